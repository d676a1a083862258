"""Real trainings on two gloo processes: each example once as it is, and once recorded.

The model is tiny, so that the time goes into starting processes; every recording is shared by all tests.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest
from tests.forked import python_on_cpu
from tests.processes import Ranks, Runner
from tests.rehearsals import LOADED, rehearse

from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.tracer.rehearse.world.acting import Loaded
from foretrace.traces.rehearsal import RankTables, Rehearsal, read_rank, rehearsal_folder
from foretrace.traces.run import Run
from foretrace.traces.store import open_run

collect_ignore = ["by_numbers.py", "every_strategy.py", "matrix.py", "tracked_memory.py"]
"""Scripts that tests start as processes of their own."""

NEEDS_NEWER = {
    "fsdp2": "FSDP2 runs on GPUs only",
    "pp": "a batch of transfers drops all works but one, which gloo needs: 1F1B hangs by itself",
}
"""Examples that torch 2.6 cannot run on gloo, recorded or not, and why."""

LOADING = "fsdp2"
"""The example that is recorded from before it loads torch, as a user's are; the others find it loaded."""

STEPS = 3
SHAPE = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}


@dataclass(frozen=True)
class Job:
    """What the examples are asked to train."""

    n_layers: int = 4
    hidden: int = 32
    ffn: int = 64
    kv_width: int = 16
    vocab: int = 64
    steps: int = STEPS
    micro_batch: int = 2
    seq_len: int = 16
    microbatches: int = 4

    @property
    def layer_params(self) -> int:
        """Parameters of one layer: four projections, three matrices, two norms."""
        attention = 2 * self.hidden**2 + 2 * self.hidden * self.kv_width
        return attention + 3 * self.hidden * self.ffn + 2 * self.hidden

    @property
    def root_params(self) -> int:
        """Parameters outside of the layers: embedding, head, norm."""
        return 2 * self.vocab * self.hidden + self.hidden

    @property
    def activation_bytes(self) -> int:
        """Size of the hidden states of one micro-batch, in float32."""
        return 4 * self.micro_batch * self.seq_len * self.hidden


@dataclass(frozen=True)
class Pair:
    """One example, run as it is and run while it was recorded."""

    plain: Ranks
    recorded: Ranks
    run: Run


@pytest.fixture(scope="session")
def job() -> Job:
    """What the examples are asked to train."""
    return Job()


@pytest.fixture(scope="session")
def ranks() -> type[Runner]:
    """How to run processes of one world."""
    pytest.importorskip("torch")
    return Runner


@pytest.fixture(scope="session")
def on_cpu() -> None:
    """Processes in which processors stand for two GPUs are split off one that has loaded torch so."""
    pytest.importorskip("torch")
    python_on_cpu()


@pytest.fixture(scope="session")
def loaded() -> Loaded:
    """The process that has loaded torch, for all rehearsals, which then take a second each."""
    pytest.importorskip("torch")
    return LOADED


@pytest.fixture(scope="module")
def rehearsed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Rehearsal, RankTables]]:
    """Return a function that rehearses rank 0 of RANKS of a module's SCRIPT, once each way it is told."""
    pytest.importorskip("torch")

    @cache
    def run(way: str) -> tuple[Rehearsal, RankTables]:
        folder = tmp_path_factory.mktemp("run") / "run"
        asked = Asked(command=(str(request.module.SCRIPT), way), world_size=request.module.RANKS, ranks=(0,))
        return rehearse(asked, folder), read_rank(rehearsal_folder(folder), 0)

    return run


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model file for the examples, small enough that a step takes milliseconds."""
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(SHAPE))
    return path


@pytest.fixture(scope="session")
def example(config: Path, job: Job, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """Return what runs an example, plain and recorded, and remembers it for the other tests."""
    pytest.importorskip("torch")

    @cache
    def pair(words: str) -> Pair:
        name, *flags = words.split()
        if name in NEEDS_NEWER and Runner.torch() < Runner.newer:
            pytest.skip(f"torch {version('torch')}: {NEEDS_NEWER[name]}")
        script = str(Runner.root / "examples" / f"train_{name}.py")
        command = [sys.executable, script, "--config", str(config)]
        command += (
            f"--steps {job.steps} --micro-batch {job.micro_batch} --seq-len {job.seq_len}".split() + flags
        )
        path = tmp_path_factory.mktemp("recorded") / name
        plain = Runner.run(command, Runner.env())
        recorded = Runner.run(command, Runner.env(path), loads_torch=words == LOADING)
        assert plain.status == (0, 0), plain.errors
        assert recorded.status == (0, 0), recorded.errors
        return Pair(plain, recorded, open_run(path))

    return pair


@pytest.fixture(params=["ddp", "fsdp2", "tp", "pp", "pp --schedule gpipe"])
def any_example(request: pytest.FixtureRequest, example: Callable[[str], Pair]) -> Pair:
    """Every example in turn."""
    return example(request.param)
