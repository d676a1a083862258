"""What a callback logs of a step while it runs is what the finished recording says of it."""

import json
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import foretrace
from foretrace.tracer.callbacks import Steps
from foretrace.tracer.errors import RecordError
from foretrace.traces.info import RunInfo
from foretrace.traces.run import Part, Run
from foretrace.traces.timeline import MEMORY, timeline

STEP_NS = 1000


def _spans(busy: list[tuple[int, int]]) -> pa.Table:
    """Return a step each of so much compute, then so much of an all-reduce that ends behind the step."""
    rows: list[tuple[str, str, str, str, int, int, int]] = []
    for step, (computing, moving) in enumerate(busy):
        start = step * STEP_NS
        rows.append(("compute", "compute", "forward", "", start, computing, step))
        rows.append(("dp", "collective", "all_reduce", "dp", start + computing, moving, step))
        rows.append(("step", "step", "step", "", start, STEP_NS, step))
    names = ("stream", "category", "kind", "axis", "start_ns", "duration_ns", "step")
    return timeline(
        {"rank": [0] * len(rows), **dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))}
    )


@given(
    st.lists(st.tuples(st.integers(1, 600), st.integers(1, 900)), min_size=1, max_size=6),
    st.lists(st.integers(1, 5), max_size=18),
)
def test_steps_are_those_of_the_whole_however_their_spans_come(
    busy: list[tuple[int, int]], sizes: list[int]
) -> None:
    """Each once, in turn; in one batch or in many, with collectives that reach into the next step."""
    spans, heard, at = _spans(busy), Steps(0, 2), 0
    found: list[tuple[int, Mapping[str, float]]] = []
    for size in (*sizes, spans.num_rows):
        heard.hear(spans.slice(at, size))
        at += size
        found += heard.take()
    heard.finish()
    found += heard.take()
    info = RunInfo(origin="recorded", world_size=2)
    whole = foretrace.breakdown(Run("whole", info, [Part(0, lambda: spans)], MEMORY.empty_table(), ()))
    assert [step for step, _ in found] == list(range(len(busy)))
    for (_, figures), row in zip(found, whole, strict=True):
        shares = {state: share for state, share in row.shares.items() if not state.startswith("wait")}
        assert figures == {"step_s": row.window_ns / 1e9} | shares
        assert sum(figures.values()) - figures["step_s"] == pytest.approx(1)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> dict[int, dict[str, float]]:
    """Stand in for transformers and wandb, which the suite does not install; return what wandb is given.

    As wandb does, refuse what is drawn over the Trainer's own step.
    """
    logged: dict[int, dict[str, float]] = {}
    drawn_over: dict[str, str] = {"foretrace/step": "foretrace/step"}

    def log(found: dict[str, float]) -> None:
        assert {drawn_over[name] for name in found} == {"foretrace/step"}
        logged[int(found["foretrace/step"])] = found

    def define_metric(name: str, *, step_metric: str) -> None:
        drawn_over[name] = step_metric

    for name, attribute, value in (
        ("transformers", "TrainerCallback", type("TrainerCallback", (), {})),
        ("wandb", "run", SimpleNamespace(log=log, define_metric=define_metric)),
    ):
        module = ModuleType(name)
        setattr(module, attribute, value)
        monkeypatch.setitem(sys.modules, name, module)
    return logged


@pytest.mark.parametrize("done", [0, 500])
def test_each_step_is_logged_with_where_it_went(
    done: int, library: dict[int, dict[str, float]], tmp_path: Path
) -> None:
    """By the number that the Trainer gives it, which goes on from a checkpoint."""
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    callback = foretrace.trainer_callback(tmp_path / "run", flush_s=0.01)
    args = SimpleNamespace(report_to=[])
    state = SimpleNamespace(is_world_process_zero=True, global_step=done)
    callback.on_train_begin(args, state, None)
    for _ in range(6):
        model(torch.randn(512, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        callback.on_step_end(args, state, None)
    callback.on_train_end(args, state, None)
    rows = foretrace.breakdown(foretrace.open_run(tmp_path / "run"))
    assert [row.step for row in rows] == list(range(6))
    assert list(library) == [done + 1 + row.step for row in rows]
    for row, logged in zip(rows, library.values(), strict=True):
        assert logged["foretrace/step_s"] == row.window_ns / 1e9
        assert logged["foretrace/compute"] == row.shares["compute"]


@pytest.mark.parametrize("name", ["transformers"])
def test_a_logger_that_fails_ends_no_training_and_a_second_training_is_not_recorded(
    library: dict[int, dict[str, float]],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Both are said in one line; what was recorded stays whole."""
    torch = pytest.importorskip("torch")

    def broken(found: dict[str, float]) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(sys.modules["wandb"].run, "log", broken)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    callback = foretrace.trainer_callback(tmp_path / "run", flush_s=0.01)
    args = SimpleNamespace(report_to=[])
    state = SimpleNamespace(is_world_process_zero=True, global_step=0)
    for _ in range(2):
        callback.on_train_begin(args, state, None)
        for _ in range(4):
            model(torch.randn(8, 8)).sum().backward()
            optimizer.step()
            callback.on_step_end(args, state, None)
        callback.on_train_end(args, state, None)
    said = capsys.readouterr().err
    assert said.count("steps are not logged any more: no space left") == 1
    assert said.count("has the training before; this one is not recorded") == 1
    assert not library
    assert len(foretrace.breakdown(foretrace.open_run(tmp_path / "run"))) == 4


def test_a_library_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(RecordError, match="lightning is not installed"):
        foretrace.lightning_callback(tmp_path / "run")
    assert not list(tmp_path.iterdir())


TRAININGS = {
    "transformers": """
import json, sys, torch, foretrace
from importlib.util import find_spec
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

report_to = [name for name in ("wandb", "tensorboard") if find_spec(name)]
config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
rows = [{"input_ids": torch.arange(16), "labels": torch.arange(16)} for _ in range(64)]
how = {"max_steps": 5, "report_to": report_to, "use_cpu": True, "save_strategy": "no"}
args = TrainingArguments(sys.argv[1] + "/out", **how)
callback = foretrace.trainer_callback(sys.argv[1] + "/run")
Trainer(model=LlamaForCausalLM(config), args=args, train_dataset=rows, callbacks=[callback]).train()
if "wandb" in report_to:
    import wandb
    open(sys.argv[1] + "/wandb.json", "w").write(json.dumps(dict(wandb.run.summary), default=str))
""",
    "lightning": """
import sys, torch, foretrace
import lightning as L
from lightning.pytorch.loggers import CSVLogger

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 16)
    def training_step(self, batch, number):
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

rows = torch.utils.data.DataLoader(torch.randn(64, 16), batch_size=4)
callback = foretrace.lightning_callback(sys.argv[1] + "/run")
L.Trainer(max_steps=5, accelerator="cpu", devices=1, logger=CSVLogger(sys.argv[1] + "/out"),
          callbacks=[callback], enable_progress_bar=False, enable_checkpointing=False).fit(Module(), rows)
""",
}


@pytest.mark.parametrize("name", TRAININGS)
def test_the_libraries_themselves_take_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's own loggers, wandb and TensorBoard get the figures; both record their steps."""
    pytest.importorskip(name)
    script = tmp_path / "script.py"
    script.write_text(TRAININGS[name])
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True, capture_output=True)
    rows = foretrace.breakdown(foretrace.open_run(tmp_path / "run"))
    assert [row.step for row in rows] == list(range(5))
    if name == "lightning":
        (logged,) = tmp_path.rglob("metrics.csv")
        assert "foretrace/exposed" in logged.read_text() or "foretrace/compute" in logged.read_text()
    elif find_spec("wandb"):
        summary = json.loads((tmp_path / "wandb.json").read_text())
        assert summary["foretrace/step"] == summary["train/global_step"] == 5
        assert summary["foretrace/step_s"] == rows[-1].window_ns / 1e9
    if name == "transformers" and find_spec("tensorboard"):
        accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        events = accumulator.EventAccumulator(str(tmp_path / "out" / "runs" / "foretrace-run"))
        events.Reload()
        assert [scalar.step for scalar in events.Scalars("foretrace/step_s")] == [1, 2, 3, 4, 5]
