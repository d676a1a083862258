"""Every strategy that runs on gloo, on two and four ranks: what arithmetic demands, and the same losses."""

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from foretrace.traces.store import open_run

LAYER, LAYERS, STEPS, MICROBATCHES = 4 * 8 * 8, 4, 3, 4
"""Bytes of a layer, layers, steps and micro-batches of ``matrix.py``."""

ROWS = 4 * 4 * 8
"""Bytes of a micro-batch: four rows of eight numbers."""

SCHEDULES = ("gpipe", "1f1b", "looped-bfs", "interleaved-1f1b", "interleaved-zb", "zb-v", "dualpipe-v")
ON_TWO = (
    "ddp_buckets",
    "ddp_no_sync",
    "recompute",
    "fsdp1",
    "ep",
    "cp",
    "ring",
    "objects",
    "classic",
    "compiled",
    *SCHEDULES,
    "cp_split",  # the last: torch keeps its mesh, which names the group of the whole world
)
ON_FOUR = ("hsdp1", "hsdp2", "pp_fsdp", "ring", "ep", "gpipe")

SHARDED = {("dp", "all_gather", LAYER): 2 * LAYERS, ("dp", "reduce_scatter", LAYER): LAYERS}
"""Each layer is gathered forward and backward and its gradient scattered, as nothing is kept in between."""

REPLICATED = {**SHARDED, ("dp", "all_reduce", LAYER // 2): LAYERS}
"""Beside that, the gradient of each half is summed over the replicas."""

Counts = dict[tuple[str, str, int], int]

EXPECTED: dict[tuple[str, int], Counts] = {
    ("ddp_buckets", 2): {("dp", "all_reduce", 2 * LAYER): LAYERS // 2},
    ("ddp_no_sync", 2): {("dp", "all_reduce", LAYERS * LAYER): 1},
    ("recompute", 2): {("dp", "all_reduce", LAYERS * LAYER): 1},
    ("fsdp1", 2): SHARDED,
    ("hsdp1", 4): REPLICATED,
    ("hsdp2", 4): REPLICATED,
    # There and back, forward and backward; the classic one has no backward.
    ("ep", 2): {("ep", "all_to_all", ROWS): 4},
    ("ep", 4): {("ep", "all_to_all", ROWS): 4},
    ("cp", 2): {("cp", "all_to_all", ROWS): 2},
    ("ring", 2): {("cp", "send", ROWS): 1, ("cp", "recv", ROWS): 1},
    ("ring", 4): {("cp", "send", ROWS): 3, ("cp", "recv", ROWS): 3},
    ("classic", 2): {
        ("world", "all_reduce", 64): 3,
        ("world", "broadcast", 64): 1,
        ("world", "reduce", 64): 1,
        ("world", "all_gather", 128): 3,
        ("world", "reduce_scatter", 128): 2,
        ("world", "scatter", 128): 1,
        ("world", "gather", 128): 1,
    },
    ("compiled", 2): {
        ("world", "all_reduce", ROWS): 1,
        ("world", "all_gather", 2 * ROWS): 1,
        ("world", "reduce_scatter", 2 * ROWS): 1,
    },
    ("cp_split", 2): {("cp", "all_gather", 4 * ROWS): 1},
    # A stage is a root of its own, whose parameters stay; its gradient is reduced once, at the end.
    ("pp_fsdp", 4): {("dp", "all_gather", LAYER): 1, ("dp", "reduce_scatter", LAYER): 1},
}
"""Communication of each rank and step, without the transfers of pipelines."""

LAYOUTS = {
    **{name: {"dp"} for name in ("ddp_buckets", "ddp_no_sync", "recompute", "fsdp1", "hsdp1", "hsdp2")},
    **{name: {"pp"} for name in SCHEDULES},
    "ep": {"dp", "ep"},
    "cp": {"cp"},
    "ring": {"cp"},
    "cp_split": {"cp"},
    "pp_fsdp": {"pp", "dp"},
}
"""Axes whose degree is more than one."""


def trained(folder: Path, ranks: Any, names: Iterable[str], n: int) -> Path:
    """Train all *names* on *n* ranks, plain and recorded."""
    if ranks.torch() < (2, 11):
        pytest.skip("this torch cannot run all of them on gloo")
    script = str(Path(__file__).parent / "matrix.py")
    command = [sys.executable, "-W", "ignore", script, str(folder), *names]
    result = ranks.run(command, ranks.env(), n, fresh=folder)
    assert result.status == (0,) * n, result.errors
    assert "foretrace" not in result.errors
    return folder


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory, ranks: Any) -> Path:
    """Two processes."""
    return trained(tmp_path_factory.mktemp("two"), ranks, usable(ON_TWO, ranks), 2)


@pytest.fixture(scope="module")
def on_four(tmp_path_factory: pytest.TempPathFactory, ranks: Any) -> Path:
    """Four processes."""
    return trained(tmp_path_factory.mktemp("four"), ranks, ON_FOUR, 4)


def usable(names: Iterable[str], ranks: Any) -> list[str]:
    """Return what this torch can run: before 2.13 a rank of a V sends to itself, which gloo refuses."""
    return [name for name in names if ranks.torch() >= (2, 13) or name not in {"zb-v", "dualpipe-v"}]


@pytest.fixture(
    params=[(name, 2) for name in ON_TWO] + [(name, 4) for name in ON_FOUR], ids=lambda p: f"{p[0]}-{p[1]}"
)
def trial(request: pytest.FixtureRequest, ranks: Any) -> tuple[str, int, Path]:
    """One strategy, its ranks, and the folder of what was recorded ."""
    name, n = request.param
    if not usable([name], ranks):
        pytest.skip("gloo refuses transfers of a rank to itself")
    folder: Path = request.getfixturevalue("on_two" if n == 2 else "on_four")
    return name, n, folder / "recorded"


def test_losses_are_the_same_to_the_last_bit(trial: tuple[str, int, Path]) -> None:
    name, n, folder = trial
    for rank in range(n):
        losses = json.loads((folder.parent / f"losses-{rank}.json").read_text())[name]
        assert len(losses["plain"]) == STEPS
        assert losses["plain"] == losses[folder.name]


def test_collectives_are_those_that_the_strategy_demands(trial: tuple[str, int, Path]) -> None:
    name, n, folder = trial
    run = open_run(folder / name)
    assert run.warnings == ()
    assert run.info.dropped == {}
    for rank in range(n):
        spans = run.spans([rank]).to_pylist()
        assert [row["step"] for row in spans if row["category"] == "step"] == list(range(STEPS))
        last = [row for row in spans if row["axis"] and row["step"] == STEPS - 1]
        if name == "objects":
            # Sizes go ahead of what is pickled; scattering says first how large the largest is.
            kinds = Counter(row["kind"] for row in last)
            assert kinds == {"all_gather": 3, "broadcast": 3, "scatter": 2, "gather": 1, "barrier": 1}
            continue
        found = Counter((row["axis"], row["kind"], row["size_bytes"]) for row in last if row["axis"] != "pp")
        assert found == EXPECTED.get((name, n), {})


def test_the_layout_follows_from_the_groups(trial: tuple[str, int, Path]) -> None:
    name, n, folder = trial
    layout = open_run(folder / name).info.layout
    if name not in LAYOUTS:
        assert layout is None
        return
    assert layout is not None
    assert layout.world_size == n
    assert {axis for axis, degree in layout.degrees.items() if degree > 1} == LAYOUTS[name]


def test_every_communication_is_joined_across_ranks(trial: tuple[str, int, Path]) -> None:
    name, n, folder = trial
    run = open_run(folder / name)
    members = {group.id: group.ranks for group in run.info.groups}
    joined: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for rank in range(n):
        for row in run.spans([rank]).to_pylist():
            if row["category"] == "collective":
                joined[row["group"], row["sequence"]].append(row)
            elif row["category"] == "p2p":
                pair = (rank, row["peer"]) if row["kind"] == "send" else (row["peer"], rank)
                joined[row["group"], *pair, row["sequence"]].append(row)
    for key, rows in joined.items():
        who = members[key[0]] if len(key) == 2 else key[1:3]
        assert sorted(row["rank"] for row in rows) == sorted(who), key
        assert len({(row["size_bytes"], row["dtype"], row["microbatch"]) for row in rows}) == 1
        assert len({row["kind"] for row in rows}) == (1 if len(key) == 2 else 2)


def stages_of(schedule: str, n: int) -> dict[int, list[int]]:
    """Return the stages of each rank: one, or two in a loop, or two in a V."""
    if schedule in {"gpipe", "1f1b"}:
        return {rank: [rank] for rank in range(n)}
    if schedule in {"zb-v", "dualpipe-v"}:
        return {rank: [rank, 2 * n - 1 - rank] for rank in range(n)}
    return {rank: [rank, rank + n] for rank in range(n)}


@pytest.mark.parametrize(("schedule", "n"), [*((name, 2) for name in SCHEDULES), ("gpipe", 4)])
def test_every_stage_works_on_every_microbatch_once(
    request: pytest.FixtureRequest, ranks: Any, schedule: str, n: int
) -> None:
    if not usable([schedule], ranks):
        pytest.skip("gloo refuses transfers of a rank to itself")
    run = open_run(request.getfixturevalue("on_two" if n == 2 else "on_four") / "recorded" / schedule)
    assert run.info.job is not None
    assert (run.info.job["schedule"], run.info.job["n_microbatches"]) == (schedule, MICROBATCHES)
    of_rank = stages_of(schedule, n)
    owner = {stage: rank for rank, stages in of_rank.items() for stage in stages}
    sends: Counter[tuple[str, int, int, int]] = Counter()
    for rank in range(n):
        spans = [
            row for row in run.spans([rank]).to_pylist() if row["step"] == STEPS - 1 and row["stage"] >= 0
        ]
        done = {
            kind: {(row["stage"], row["microbatch"]) for row in spans if row["kind"] == kind}
            for kind in ("forward", "backward", "backward_input", "backward_weight")
        }
        every = {(stage, i) for stage in of_rank[rank] for i in range(MICROBATCHES)}
        assert done["forward"] == every
        assert done["backward"] | done["backward_weight"] == every
        assert not done["backward"] & done["backward_weight"]
        assert done["backward_input"] <= done["backward_weight"]
        is_split = schedule in {"interleaved-zb", "zb-v", "dualpipe-v"}
        assert bool(done["backward_weight"]) == is_split
        for row in spans:
            if row["category"] == "p2p":
                assert row["size_bytes"] == ROWS
                sends.update(
                    [(row["name"], row["stage"], row["peer"], row["microbatch"])]
                    if row["kind"] == "send"
                    else []
                )
    crossings = [(a, a + 1) for a in range(len(owner) - 1) if owner[a] != owner[a + 1]]
    assert sends == Counter(
        [("activations", a, owner[b], i) for a, b in crossings for i in range(MICROBATCHES)]
        + [("gradients", b, owner[a], i) for a, b in crossings for i in range(MICROBATCHES)]
    )


def test_what_is_recomputed_is_told_from_what_is_computed(on_two: Path) -> None:
    run = open_run(on_two / "recorded" / "recompute")
    spans = [row for row in run.spans([0]).to_pylist() if row["step"] == STEPS - 1]
    for kind in ("forward", "recompute", "backward"):
        assert {row["layer"] for row in spans if row["kind"] == kind and row["layer"] >= 0} == set(
            range(LAYERS)
        )
