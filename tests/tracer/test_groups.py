"""Process groups: which axis a name tells, and the layout that the groups of a rank tell."""

import pytest
from hypothesis import given
from hypothesis.strategies import integers

from foretrace.tracer.groups import GroupInfo, Groups, axis_of, deduced_layout
from foretrace.traces.layout import Group, Layout

DEGREES = integers(1, 4)


@given(pp=DEGREES, dp=DEGREES, cp=DEGREES, tp=DEGREES, pick=integers(0, 255))
def test_any_layout_is_deduced_from_the_groups_of_any_rank(
    pp: int, dp: int, cp: int, tp: int, pick: int
) -> None:
    layout = Layout(pp=pp, dp=dp, cp=cp, tp=tp)
    groups = layout.process_groups(("tp", "cp", "dp", "pp", "world"))
    assert deduced_layout(groups, pick % layout.world_size, layout.world_size) == layout


@given(pp=DEGREES, dp=DEGREES, cp=integers(2, 4), tp=DEGREES, pick=integers(0, 255))
def test_gradients_may_be_summed_over_data_and_context_at_once(
    pp: int, dp: int, cp: int, tp: int, pick: int
) -> None:
    layout = Layout(pp=pp, dp=dp, cp=cp, tp=tp)
    rank = pick % layout.world_size
    first = rank // (dp * cp * tp) * dp * cp * tp + rank % tp  # of its stage and its part of the matrices
    summed = Group(id=99, axis="dp", ranks=tuple(range(first, first + dp * cp * tp, tp)))
    groups = [*layout.process_groups(("tp", "cp", "pp")), summed]
    assert deduced_layout(groups, rank, layout.world_size) == layout


def test_hybrid_sharding_multiplies_and_a_flattened_group_does_not() -> None:
    replicate, shard = Group(id=0, axis="dp", ranks=(0, 2)), Group(id=1, axis="dp", ranks=(0, 1))
    both = Group(id=2, axis="dp", ranks=(0, 1, 2, 3))
    assert deduced_layout([replicate, shard], 0, 4) == Layout(dp=4)
    assert deduced_layout([replicate, shard, both], 0, 4) == Layout(dp=4)


def test_no_layout_is_claimed_where_the_groups_do_not_tell() -> None:
    assert deduced_layout([Group(id=0, axis="world", ranks=(0, 1))], 0, 2) is None
    assert deduced_layout([Group(id=0, axis="tp", ranks=(0, 1))], 0, 4) is None
    crossed = [Group(id=0, axis="tp", ranks=(0, 2)), Group(id=1, axis="dp", ranks=(0, 1))]
    assert deduced_layout(crossed, 0, 4) is None  # tp varies slowest here, not fastest
    assert deduced_layout([], 0, 1) == Layout()


@pytest.mark.parametrize(
    ("description", "axis"),
    [
        ("mesh_tp", "tp"),
        ("mesh_dp_replicate", "dp"),
        ("mesh_fsdp", "dp"),
        ("mesh_pp", "pp"),
        ("mesh_dp_shard_cp", "dp"),
        ("mesh_dp_shard_mod_ep", "dp"),
        ("EXPERT_DATA_PARALLEL_GROUP", "dp"),
        ("TENSOR_MODEL_PARALLEL_GROUP", "tp"),
        ("mesh_ep", "ep"),
        ("default_pg", "world"),
        ("", "world"),
        ("embedding", "embedding"),
    ],
)
def test_a_description_tells_the_axis(description: str, axis: str) -> None:
    assert axis_of(description, fallback="world") == axis


class FakeGroup:
    """The three things that are asked of a process group."""

    def __init__(self, name: str, ranks: list[int], description: str = "") -> None:
        self.group_name, self.ranks, self.group_desc = name, ranks, description


def test_a_group_has_one_number_everywhere_and_a_name_only_where_it_is_unknown() -> None:
    tables = [Groups(4, lambda group: "gloo", lambda group: group.ranks) for _ in range(2)]
    world, pair = FakeGroup("0", [0, 1, 2, 3]), FakeGroup("7", [0, 2], "mesh_tp")
    for table in tables:
        assert table.of(world).axis == "world"
        assert table.of(pair) is table.of(pair)
        table.name_axis(pair, "dp")  # the mesh has said tp: that stands
        table.name_axis(world, "dp")
    assert [t.table() for t in tables[:1]] == [t.table() for t in tables[1:]]
    assert [(g.axis, g.ranks) for g in tables[0].table()] == [("dp", (0, 1, 2, 3)), ("tp", (0, 2))]


def test_a_group_says_how_many_numbers_it_has_given() -> None:
    group = GroupInfo(1, "dp", (0, 1))
    assert [group.next_collective() for _ in range(3)] == [0, 1, 2]
    assert [group.next_transfer(pair) for pair in ((0, 1), (1, 0), (0, 1))] == [0, 0, 1]
    assert (group.n_collectives, group.n_transfers) == (3, {(0, 1): 2, (1, 0): 1})
