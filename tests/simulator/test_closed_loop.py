"""The closed loop on two processes: record, read the job off the recording, calibrate, predict it again."""

import json
import math
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.processes import Runner

from foretrace.cli import main
from foretrace.simulator.recorded.like import job_like
from foretrace.traces.run import Run
from foretrace.traces.store import open_run

ROOT = Path(__file__).parents[2]
SHAPE = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of DDP on two gloo processes, nine steps of two sequences of 64 tokens each."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("loop")
    (folder / "config.json").write_text(json.dumps(SHAPE))
    script = [str(ROOT / "examples" / "train_ddp.py"), "--config", str(folder / "config.json")]
    script += "--steps 9 --micro-batch 2 --seq-len 64".split()
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *script]
    command = [sys.executable, "-m", "foretrace", "record", "-o", str(folder / "run"), "--", *launch]
    (done,) = Runner.launch(command, fresh=folder / "run")
    assert done.returncode == 0, done.stderr
    return folder / "run"


def test_the_job_is_read_off_the_recording(recorded: Path) -> None:
    """Model, layout, batch and precision, without a flag."""
    run: Run = open_run(recorded)
    job = job_like(run, {})
    model = job.model
    assert (model.n_layers, model.hidden, model.n_heads, model.n_kv_heads) == (3, 64, 4, 2)
    assert (model.head_dim, model.ffn_hidden, model.vocab, model.gated) == (16, 176, 256, True)
    assert (run.info.model or {})["n_params"] == model.n_params
    assert (job.layout.dp, job.micro_batch, job.seq_len, job.n_microbatches) == (2, 2, 64, 1)
    assert (job.precision, job.sharding, job.cluster.name) == ("fp32", "ddp", "localhost")


def test_a_real_recording_calibrates_the_machine_and_predicts_another_layout(
    recorded: Path, tmp_path: Path
) -> None:
    """How near it comes is for docs/calibration.md to say: steps of 10 ms on a busy machine do not."""
    runner, file = CliRunner(), tmp_path / "cal.toml"
    result = runner.invoke(main, ["calibrate", str(recorded), "-o", str(file), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    left_out = {said.partition(":")[0] for said in found["left_out"]}  # what did not help held-back steps
    for what, name in (("compute", "products"), ("compute", "fixed"), ("optimizer", "optimizer")):
        assert (f"compute.{name}" in found["factors"]) != (what in left_out)
    assert any(said.startswith("copies: ") for said in found["not_identified"])
    (work,) = (row for row in found["held_back"] if row["name"] == "forward and backward")
    assert all(math.isfinite(work[name]) and work[name] > 0 for name in ("measured_s", "before_s", "after_s"))
    assert work["after_s"] == work["before_s"] or "compute" not in left_out
    other = ["simulate", "--like", str(recorded), "--calibration", str(file), "--sharding", "fsdp", "--json"]
    result = runner.invoke(main, other)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["step_time_s"] > 0
