"""What is under way waits for its own group only, in order; nothing is lost unsaid, and not all is kept."""

import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.tracer.device_works import DeviceTimes
from foretrace.tracer.groups import GroupInfo
from foretrace.tracer.records import Block, Communication
from foretrace.tracer.sink import MOST_BEHIND, UnderWay
from foretrace.tracer.stamps import Resolver
from foretrace.traces.store import open_run

UNWAITED = """
import sys
import torch, torch.distributed as dist
import foretrace
from foretrace.tracer.completion import Completions

Completions.close.__defaults__ = (float(sys.argv[2]),)
dist.init_process_group("gloo")
tensors = [torch.ones(4) for _ in range(64)]
with foretrace.record(sys.argv[1]):
    for i in range(2000):
        dist.all_reduce(tensors[i % 64], async_op=True)
"""

GROUPS = [GroupInfo(number, "dp", (0, 1), on_gloo=True) for number in range(3)]


def issued(group: int, sequence: int, *, peer: int = -1, kind: str = "all_reduce") -> Communication:
    """Return a communication that has not ended."""
    return Communication(
        kind, GROUPS[group], sequence, peer, 4, "fp32", Block(""), (0, -1, -1, -1), 10 + sequence
    )


def followed(communications: Iterable[Communication], most: int = 10_000) -> UnderWay:
    """Return what follows *communications*."""
    found = UnderWay(DeviceTimes(Resolver()), most)
    for one in communications:
        found.add(one)
    return found


@given(
    st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=60),
    st.lists(st.integers(0, 59), max_size=60),
    st.integers(1, 60),
)
def test_each_is_told_once_or_counted_and_in_order(
    calls: list[tuple[int, bool]], ends: list[int], most: int
) -> None:
    made = [issued(group, i, peer=-1 + is_send) for i, (group, is_send) in enumerate(calls)]
    under_way = followed(made, most)
    told: list[Communication] = []
    for i in ends:
        if i < len(made):
            made[i].end = 100
        told += [one for one, *_ in under_way.take(last=False)]
    told += [one for one, *_ in under_way.take(last=True)]
    left = list(under_way)
    assert len(told) == len({id(one) for one in told})
    assert len(told) + under_way.n_left + under_way.n_beyond == len(made)
    assert under_way.n_left == len(left)
    assert under_way.n_beyond == max(len(made) - most, 0)
    assert all(one.end is not None for one in told)
    assert [one.sequence for one in left] == sorted(one.sequence for one in left)
    lines = defaultdict(list)
    for one in told:
        lines[one.group.id, one.peer].append(one.sequence)
    assert all(line == sorted(line) for line in lines.values())


def test_one_that_hangs_holds_up_no_other_group_and_no_transfer() -> None:
    hanging = [issued(0, 0), issued(2, 0, peer=1, kind="recv")]
    others = [issued(1, 1), issued(0, 2, peer=1, kind="send"), issued(2, 3, peer=1, kind="send")]
    for one in others:
        one.end = 50
    under_way = followed([*hanging, *others])
    assert [one for one, *_ in under_way.take(last=False)] == others
    assert list(under_way) == hanging


@pytest.mark.parametrize("n_behind", [MOST_BEHIND - 1, MOST_BEHIND])
def test_of_too_many_in_a_row_those_that_have_ended_pass(n_behind: int) -> None:
    made = [issued(0, i) for i in range(n_behind + 1)]
    for one in made[1:]:
        one.end = 50
    under_way = followed(made)
    assert len(list(under_way.take(last=False))) == (n_behind if n_behind == MOST_BEHIND else 0)
    made[0].end = 60  # late, but not lost
    assert len(list(under_way.take(last=True))) == (1 if n_behind == MOST_BEHIND else n_behind + 1)
    assert not list(under_way)
    assert under_way.n_left == 0


@pytest.mark.parametrize("patience_s", ["0", "60"])
def test_what_nobody_waits_for_is_told_or_counted_and_ends_no_process(
    tmp_path: Path, ranks: Any, patience_s: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(UNWAITED)
    command = [sys.executable, "-W", "ignore", str(script), str(tmp_path / "run"), patience_s]
    done = ranks.run(command, ranks.env())
    assert done.status == (0, 0), done.errors
    run = open_run(tmp_path / "run")
    left = sum(run.info.dropped.values())
    assert run.spans().num_rows + left == 2 * 2000
    assert left == 0 or patience_s == "0"
    assert bool(run.warnings) == bool(left)
    assert all("under way when the recording ended: in no span" in said for said in run.warnings)
