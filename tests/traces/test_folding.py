"""A folded run, expanded, is the run that was folded; the parts of a description join without loss."""

import json

import pyarrow as pa
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from foretrace.traces.errors import RunError
from foretrace.traces.info import Clock, RunInfo, merged, rank_list, stable_group_id
from foretrace.traces.layout import Group, Layout
from foretrace.traces.run import Expander
from foretrace.traces.timeline import timeline

DEGREE = st.integers(1, 3)


def spans_of(rank: int, groups: list[Group]) -> pa.Table:
    """Return one collective per group of *rank*, and a send to each other member."""
    rows = []
    for group in (group for group in groups if rank in group.ranks):
        place = group.ranks.index(rank)
        rows.append((group.id, -1, group.axis, "all_reduce"))
        for step in range(1, len(group.ranks)):
            rows.append((group.id, group.ranks[(place + step) % len(group.ranks)], group.axis, "send"))
    group_id, peer, axis, kind = zip(*rows, strict=True)
    return timeline(
        {
            "rank": [rank] * len(rows),
            "category": ["collective" if p < 0 else "p2p" for p in peer],
            "kind": list(kind),
            "start_ns": list(range(len(rows))),
            "duration_ns": [1] * len(rows),
            "axis": list(axis),
            "group": list(group_id),
            "peer": list(peer),
        }
    )


@given(pp=DEGREE, dp=DEGREE, cp=DEGREE, tp=DEGREE)
@settings(max_examples=30)
def test_expanding_gives_what_was_folded(pp: int, dp: int, cp: int, tp: int) -> None:
    layout = Layout(pp=pp, dp=dp, cp=cp, tp=tp)
    if layout.world_size == 1:
        return
    groups = layout.process_groups(("tp", "cp", "dp", "pp"))
    expander = Expander(groups)
    for rank in range(layout.world_size):
        source = layout.rank(layout.coord(rank)._replace(dp=0, cp=0, tp=0))
        expanded = expander.expand(spans_of(source, groups), source, rank)
        assert expanded.equals(spans_of(rank, groups))


def test_unknown_groups_keep_the_distance_of_a_peer() -> None:
    groups = [Group(id=0, axis="pp", ranks=(0, 2))]
    expanded = Expander([]).expand(spans_of(0, groups), 0, 1)
    assert expanded["peer"].to_pylist() == [-1, 3]
    assert expanded["group"].to_pylist() == [-1, -1]


def test_a_rank_is_represented_by_one_that_stands_for_itself() -> None:
    with pytest.raises(RunError, match="rank 0 is represented by 1"):
        RunInfo(origin="simulated", world_size=2, representatives=(1, 0))
    with pytest.raises(RunError, match="1 representatives for a world of 2"):
        RunInfo(origin="simulated", world_size=2, representatives=(0,))


@given(ranks=st.sets(st.integers(0, 40)))
def test_rank_list_names_exactly_its_ranks(ranks: set[int]) -> None:
    named = set()
    for part in rank_list(ranks).split(", ") if ranks else []:
        first, _, last = part.partition("-")
        named |= set(range(int(first), int(last or first) + 1))
    assert named == ranks


def test_group_numbers_agree_between_ranks_and_differ_between_groups() -> None:
    groups = Layout(pp=4, dp=8, tp=8).process_groups()
    numbers = [stable_group_id(group.axis, group.ranks) for group in groups]
    assert len(set(numbers)) == len(groups)
    assert all(0 <= number < 2**31 for number in numbers)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


@given(name=st.sampled_from(RunInfo.__slots__), value=JSON)
@settings(max_examples=100)
def test_any_value_in_run_json_is_a_description_or_one_line(name: str, value: object) -> None:
    layout = Layout(dp=2)
    info = RunInfo(
        origin="recorded",
        world_size=2,
        layout=layout,
        groups=tuple(layout.process_groups()),
        clock={0: Clock(offset_ns=3)},
    )
    document = json.loads(info.to_json()) | {name: value}
    try:
        read = RunInfo.from_json(json.dumps(document))
    except RunError as error:
        event(str(error)[:40])
        return
    event("description")
    assert RunInfo.from_json(read.to_json()) == read


@pytest.mark.parametrize(
    "text", ['{"format_version": 1, "clock": {"0": {"offset_ns": Infinity}}}', "[" * 100_000, "", "nul"]
)
def test_strange_json_is_one_line(text: str) -> None:
    with pytest.raises(RunError, match=r"^run.json .*$"):
        RunInfo.from_json(text)


def part(rank: int, **values: object) -> RunInfo:
    return RunInfo(origin="recorded", world_size=2, clock={rank: Clock(offset_ns=rank)}, **values)  # type: ignore[arg-type]


def test_what_run_json_says_goes_first_and_the_ranks_fill_in() -> None:
    base = RunInfo(origin="recorded", world_size=2, name="mine", finished=False)
    info = merged(base, {1: part(1, layout=Layout(dp=2)), 0: part(0, name="theirs", started="now")})
    assert (info.name, info.layout, info.started) == ("mine", Layout(dp=2), "now")
    assert info.clock == {0: Clock(offset_ns=0), 1: Clock(offset_ns=1)}
    assert info.finished


def test_settings_of_the_job_are_joined_one_by_one() -> None:
    """A run that says which ranks were chosen does not hide what these have learned."""
    base = RunInfo(origin="recorded", world_size=2, job={"recorded_ranks": [1]})
    joined = merged(base, {1: part(1, job={"recorded_ranks": [0, 1], "sharding": "ddp"})})
    assert joined.job == {"recorded_ranks": [1], "sharding": "ddp"}
    assert merged(None, {0: part(0)}).job is None


@pytest.mark.parametrize("finished", [True, False])
def test_a_run_has_finished_when_all_its_ranks_have(finished: bool) -> None:
    assert merged(None, {0: part(0), 1: part(1, finished=finished)}).finished == finished
    assert not merged(None, {0: part(0)}).finished


def test_one_number_for_two_groups_is_said() -> None:
    one, other = Group(id=5, axis="tp", ranks=(0,)), Group(id=5, axis="tp", ranks=(0, 1))
    info = merged(None, {0: part(0, groups=(one,)), 1: part(1, groups=(other,))})
    assert info.groups == (one,)
    assert info.warnings == ("group 5 means ranks 0 to one rank and 0-1 to another",)


@pytest.mark.parametrize("axes", [("world", "tp"), ("tp", "world")])
def test_a_group_has_the_axis_that_somebody_knows(axes: tuple[str, str]) -> None:
    """A sidecar may be older than what its group is known by; two names for one group are a clash."""
    first, second = (Group(id=5, axis=axis, ranks=(0, 1)) for axis in axes)
    info = merged(None, {0: part(0, groups=(first,)), 1: part(1, groups=(second,))})
    assert (info.groups, info.warnings) == ((Group(id=5, axis="tp", ranks=(0, 1)),), ())
    turned = [Group(id=5, axis="tp", ranks=(1, 0)), Group(id=5, axis="dp", ranks=(0, 1))]
    parts = {n + 1: part(n + 1, groups=(group,)) for n, group in enumerate(turned)}
    assert merged(None, {0: part(0, groups=info.groups)} | parts).warnings == (
        "group 5 is tp to one rank and dp to another",
        "group 5 means ranks 0, 1 to one rank and 1, 0 to another",
    )
