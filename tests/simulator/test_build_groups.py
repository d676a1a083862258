"""Laws of stages and process groups: everything is in one of them, and in no two."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.simulator.builder.groups import Groups
from foretrace.simulator.builder.stage_layers import split_layers
from foretrace.simulator.errors import JobError
from foretrace.traces.layout import Layout


@settings(deadline=None)
@given(n_layers=st.integers(1, 130), n_stages=st.integers(1, 16))
def test_layers_are_split_evenly_and_the_ends_hold_no_more(n_layers: int, n_stages: int) -> None:
    if n_stages > n_layers:
        with pytest.raises(JobError, match=f"{n_stages} pipeline stages for {n_layers} layers"):
            split_layers(n_layers, n_stages)
        return
    stages = split_layers(n_layers, n_stages)
    assert [layer for stage in stages for layer in stage] == list(range(n_layers))
    sizes = [len(stage) for stage in stages]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[-1] == min(sizes)
    assert sizes[0] == min(sizes) or sizes[1:-1] == [max(sizes)] * (n_stages - 2)


def test_llama_405b_has_one_layer_less_at_both_ends() -> None:
    assert [len(stage) for stage in split_layers(126, 16)] == [7, *[8] * 14, 7]


@settings(deadline=None)
@given(st.tuples(*(st.sampled_from([1, 2, 3]) for _ in range(4))), st.integers(1, 9))
def test_groups_of_a_scope_are_a_partition(degrees: tuple[int, int, int, int], ep: int) -> None:
    pp, dp, cp, tp = degrees
    layout = Layout(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep if (dp * cp) % ep == 0 else 1)
    groups = Groups(layout)
    sizes = {"tp": tp, "cp": cp, "ep": layout.ep, "dp": dp * cp, "edp": dp * cp // layout.ep, "pp": pp}
    for scope, size in sizes.items():
        assert groups.size(scope) == size
        members = [groups.of(scope, rank) for rank in range(layout.world_size)]
        assert all((group is None) == (size == 1) for group in members)
        assert all(group is None or rank in group.ranks for rank, group in enumerate(members))
        for stage in range(pp):
            used = {members[rank] for rank in groups.of_pipeline_rank(stage)} - {None}
            assert groups.on_pipeline_rank(scope, stage) == sorted(group.ranks for group in used if group)
    assert [group.id for group in groups.all] == list(range(len(groups.all)))


def test_without_context_and_expert_parallelism_groups_are_those_of_the_layout() -> None:
    layout = Layout(pp=2, dp=4, tp=2)
    assert tuple(Groups(layout).all) == tuple(layout.process_groups())
