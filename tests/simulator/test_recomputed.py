"""What is read of recomputation: none of it, all of a layer but its end, or a part."""

import itertools
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest

from foretrace.simulator.errors import LikeError
from foretrace.simulator.recorded.like import job_like, recomputed
from foretrace.traces.info import RunInfo
from foretrace.traces.run import Part, Run
from foretrace.traces.timeline import MEMORY, timeline

LAYER = (("", 4), (".attention", 8), (".mlp", 16))
"""Blocks of a layer in order, and the FLOPs of each."""

Passes = Sequence[tuple[str, int]]


def run_of(forward: Passes, again: Sequence[Passes], *, n_forward: int = 1) -> Run:
    """Return a run whose layers do *forward*, so many times each, and *again* in their backward."""
    rows: list[dict[str, Any]] = []
    clock = itertools.count()
    plain = {"rank": 0, "step": 0, "stream": "compute", "duration_ns": 1}
    passes = [("forward", forward)] * n_forward
    for layer, blocks in enumerate(again):
        for kind, done in (*passes, ("recompute", blocks)):
            rows += [
                {"name": f"layers.{layer}{name}", "kind": kind, "layer": layer, "flops": flops}
                | {"category": "compute", "start_ns": next(clock)}
                for name, flops in done
            ]
    table = timeline(pa.Table.from_pylist([plain | row for row in rows]).to_pydict())
    info = RunInfo(origin="recorded", world_size=1)
    return Run("run", info, [Part(0, lambda: table)], MEMORY.empty_table(), ())


@pytest.mark.parametrize(
    ("again", "expected"),
    [
        ((), "none"),
        (LAYER, "full"),
        ((*LAYER[:2], (".mlp", 8)), "full"),  # a checkpoint stops before its last product
        (LAYER[:2], "full"),
        (LAYER[2:], "part"),
        ((("", 0), *LAYER[2:]), "part"),  # the inside of a module, which is not called again
        ((("", 2), (".attention", 4), (".mlp", 8)), "part"),  # every second product is kept
    ],
)
def test_how_much_of_each_layer_is_computed_again(again: Passes, expected: str) -> None:
    """Passes without gradients beside those that train change nothing."""
    for n_forward in (1, 3):
        assert recomputed(run_of(LAYER, [again] * 2, n_forward=n_forward)) == expected


def test_some_of_the_layers_are_a_part() -> None:
    """The first layer is computed again, the second is not."""
    assert recomputed(run_of(LAYER, [LAYER, ()])) == "part"


def test_without_flops_blocks_count() -> None:
    """As in recordings of machines on which nobody counted."""
    plain = [(name, 0) for name, _ in LAYER]
    assert recomputed(run_of(plain, [plain] * 2)) == "full"
    assert recomputed(run_of(plain, [plain[1:]] * 2)) == "part"


def test_a_part_is_asked_for() -> None:
    """No setting is made up: what was computed again is for the user to say."""
    run = run_of(LAYER, [LAYER[2:]] * 2)
    given = {"model": "llama3-8b", "dp": 1, "cluster": "dgx-h100", "micro_batch": 1, "seq_len": 512}
    with pytest.raises(LikeError, match="a part of its layers: give --recompute none, full, or selective"):
        job_like(run, given)
    assert job_like(run, {**given, "recompute": "selective"}).recompute == "selective"
    assert job_like(run_of(LAYER, [LAYER] * 2), given).recompute == "full"
