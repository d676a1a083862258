"""Memory of what ``torch.compile`` compiles is what PyTorch's partitioner keeps and its kernels write."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.rehearsing import Asked

torch = pytest.importorskip("torch")

SCRIPT = Path(__file__).parent / "saved.py"
LOGITS = 8 * 128 * 4096
"""Elements of the logits of ``loss``."""


Memory = Callable[..., dict[str, int]]


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> Memory:
    """Return what rehearses a model once each way, and tells its memory.

    It is what a forward has ``left``, the ``most`` that its backward adds, and what is ``after`` it.
    """

    @cache
    def told(model: str, way: str, how: str, n_ranks: int = 1) -> dict[str, int]:
        asked = Asked(command=(str(SCRIPT), model, way, how), world_size=n_ranks, ranks=(0,))
        with pytest.raises(RehearsalError) as caught:
            rehearse(asked, tmp_path_factory.mktemp("run") / "run")
        return {name: int(n) for name, n in re.findall(r"(left|most|after) (-?\d+)", str(caught.value))}

    return told


@pytest.mark.parametrize(
    ("model", "how"),
    [
        ("llamas", "bf16"),
        ("gpt2", "fp32"),
        ("gpt2s", "bf16"),
        ("bottlenecks", "bf16"),
        ("bottleneck", "autocast"),
        ("gelu", "autocast"),
        ("scores", "bf16"),
        ("norms", "fp32"),
        ("chain", "fp32"),
        ("loss", "bf16"),
        ("head", "autocast"),
        ("recomputed", "fp32"),
        ("chosen", "bf16"),
        ("vision", "autocast"),
    ],
)
def test_a_forward_keeps_what_the_partitioner_keeps(memory: Memory, model: str, how: str) -> None:
    """Within 1 %, and what rounding to blocks adds."""
    kept = pytest.importorskip("tests.tracer.partitioned").kept(model, how)
    n_bytes = sum(value[2] for value in kept)
    assert memory(model, "compiled", how)["left"] == pytest.approx(n_bytes, rel=0.01, abs=4096)


@pytest.mark.parametrize(("model", "how"), [("llama", "bf16"), ("gpt2", "autocast"), ("gelu", "fp32")])
def test_sharded_blocks_keep_what_each_of_them_keeps(memory: Memory, model: str, how: str) -> None:
    """Compiled one by one and sharded by FSDP2 over two ranks: no block's weights stay, whole or cast.

    The second block is called with what the first has returned, which its norm or its product reads.
    """
    kept = pytest.importorskip("tests.tracer.partitioned").kept(model, how)
    between = 8 * 128 * 256 * (2 if how == "bf16" else 4)
    n_bytes = 2 * sum(value[2] for value in kept) + between
    found = memory(f"{model}s", "sharded", how, n_ranks=2)
    assert found["left"] == pytest.approx(n_bytes, rel=0.01, abs=4096)


@pytest.mark.parametrize(("model", "how", "least"), [("gpt2", "fp32", 1.7), ("head", "bf16", 1.9)])
def test_eager_mode_keeps_more(memory: Memory, model: str, how: str, least: float) -> None:
    eager, compiled = (memory(model, way, how) for way in ("eager", "compiled"))
    assert eager["left"] > least * compiled["left"]
    assert eager["most"] > compiled["most"]
    assert eager["after"] == compiled["after"]  # gradients, and nothing that is held for ever


def test_a_loss_writes_no_more_than_the_gradient_of_its_logits(memory: Memory) -> None:
    """In bf16; in eager mode the logits in fp32, their logarithms, and two gradients in fp32."""
    eager, compiled = (memory("loss", way, "bf16") for way in ("eager", "compiled"))
    assert compiled["most"] <= 2 * LOGITS
    assert eager["left"] >= 4 * LOGITS
    assert eager["most"] >= 8 * LOGITS


def test_a_function_is_like_a_module(memory: Memory) -> None:
    function, module = (memory("gpt2", way, "fp32") for way in ("function", "compiled"))
    assert function == module


def test_a_checkpoint_around_keeps_nothing(memory: Memory) -> None:
    found = memory("gpt2", "around", "fp32")
    kept = memory("gpt2", "compiled", "fp32")
    assert found["left"] <= 4096
    assert found["most"] > kept["left"]  # its backward runs the forward again, and holds what it keeps
    assert found["after"] == kept["after"]


def test_other_compilers_hold_what_eager_mode_holds(memory: Memory) -> None:
    assert memory("gpt2", "aot_eager", "fp32") == memory("gpt2", "eager", "fp32")


def test_without_gradients_only_what_is_returned_stays(memory: Memory) -> None:
    found = memory("gpt2", "inference", "fp32")
    assert found["left"] == found["after"] == 0
