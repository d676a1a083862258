"""Laws of experts that are cut over other ranks than layers are: nothing is lost, or done twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulator.predicted import simulate

from foretrace.simulator.builder.groups import Groups
from foretrace.simulator.config import job_from, job_settings, read_config, write_config
from foretrace.simulator.configs.read import read_files
from foretrace.simulator.configs.write import written
from foretrace.simulator.errors import ConfigError, JobError
from foretrace.simulator.job import Job
from foretrace.simulator.memory.ranks import rank_memories
from foretrace.simulator.memory.states import sharding_units
from foretrace.simulator.simulate import simulate as in_every_reading
from foretrace.simulator.summary import job_name
from foretrace.simulator.workload.mlp import experts_mlp, mlp_block
from foretrace.simulator.workload.ops import Comm, Op
from foretrace.traces.errors import LayoutError
from foretrace.traces.layout import Layout

MIXTRAL = {"model": "mixtral-8x7b", "cluster": "dgx-h100", "gpus": 16, "global_batch": 32, "seq_len": 2048}


def _job(**given: Any) -> Job:
    return job_from({**MIXTRAL, **given})


def _products(job: Job) -> int:
    """FLOPs of the products of experts in one layer, forward, over all ranks of all replicas."""
    ops = [op for piece in experts_mlp(job) for op in piece.forward if isinstance(op, Op) and op.grouped]
    return sum(op.flops for op in ops) * job.layout.world_size


def _comms(job: Job) -> dict[tuple[str, str], int]:
    """Bytes of each kind of communication of the experts of a layer, forward."""
    found: dict[tuple[str, str], int] = {}
    for piece in experts_mlp(job):
        for comm in piece.forward:
            if isinstance(comm, Comm):
                key = (comm.axis, comm.kind)
                found[key] = found.get(key, 0) + comm.size_bytes
    return found


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Layouts of up to 64 ranks with experts cut in any way that goes round."""
    pp, dp, cp, tp = (draw(st.sampled_from([1, 2, 4])) for _ in range(4))
    n_ranks = dp * cp * tp
    etp = draw(st.sampled_from([n for n in (1, 2, 4, 8) if n_ranks % n == 0]))
    ep = draw(st.sampled_from([n for n in (1, 2, 4, 8) if n_ranks % (n * etp) == 0]))
    return Layout(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep, expert_tp=etp)


@settings(deadline=None)
@given(layouts())
def test_ranks_are_dealt_out_to_experts_once(layout: Layout) -> None:
    groups = Groups(layout)
    sizes = {"ep": layout.ep, "edp": layout.expert_replicas, "etp": layout.expert_tp or 1}
    for scope, size in sizes.items():
        assert groups.size(scope) == size
        members = [groups.of(scope, rank) for rank in range(layout.world_size)]
        assert all(group is None or rank in group.ranks for rank, group in enumerate(members))
    assert {group.axis for group in groups.all} <= {"tp", "cp", "ep", "dp", "pp", "world"}
    for rank in range(layout.world_size):
        together = [groups.of(scope, rank) for scope in ("ep", "edp", "etp")]
        assert len({group.ranks for group in together if group}) == len([g for g in together if g])


def test_groups_are_those_of_megatron() -> None:
    """``RankGenerator(tp=1, ep=4, dp=2, order="tp-cp-ep-dp-pp")`` beside tp 2, dp 4: neighbours exchange."""
    layout = Layout(dp=4, tp=2, ep=4, expert_tp=1)
    assert layout.groups("ep") == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert layout.groups("edp") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    wider = Layout(dp=4, tp=1, ep=2, expert_tp=2)
    assert wider.groups("etp") == [(0, 1), (2, 3)]
    assert wider.groups("ep") == [(0, 2), (1, 3)]


def test_saying_what_is_so_anyway_changes_nothing() -> None:
    assert Layout(dp=4, tp=2, ep=2, expert_tp=2) == Layout(dp=4, tp=2, ep=2)
    assert "expert_tp" not in Layout(tp=2, expert_tp=2).degrees
    assert Layout(**Layout(tp=4, dp=2, ep=8, expert_tp=1).degrees).etp == 1


@pytest.mark.parametrize("etp", [1, 2, 4, 8, 16])
def test_products_and_parameters_are_conserved(etp: int) -> None:
    whole = _job(tp=4, pp=1)
    cut = _job(tp=4, pp=1, expert_tp=etp, ep=min(8, 16 // etp))
    assert _products(cut) == _products(whole)
    experts = sum(unit.experts for unit in sharding_units(cut, range(32), first=True, last=True))
    in_all = experts * cut.layout.world_size // cut.layout.expert_replicas
    assert in_all == sum(cut.model.expert_params(layer) for layer in range(32))
    assert mlp_block(cut, 0).expert_params * 32 == experts


def test_whole_experts_are_not_gathered_for_and_send_less() -> None:
    cut, whole = _job(tp=4, ep=4), _job(tp=4, ep=4, expert_tp=1)
    assert ("tp", "all_gather") in _comms(cut)
    assert set(_comms(whole)) == {("ep", "all_to_all")}
    assert _comms(whole)["ep", "all_to_all"] == _comms(cut)["ep", "all_to_all"]
    half = _comms(_job(tp=4, ep=4, expert_tp=2))
    assert half["etp", "all_gather"] * 2 == _comms(cut)["tp", "all_gather"]


def test_whole_experts_in_a_node_are_faster_than_cut_ones_here() -> None:
    """Exchanges stay inside the node either way; what was gathered and scattered over tp is gone."""
    cut, whole = (
        simulate(job, only_figures=True).summary["step_time_s"]
        for job in (_job(tp=8, ep=1), _job(tp=8, ep=8, expert_tp=1))
    )
    assert whole < cut


def test_states_of_experts_are_shared_out_among_their_replicas() -> None:
    """With dp 2, tp 8, ep 8 and whole experts, every expert has two replicas."""
    job = _job(tp=8, ep=8, expert_tp=1)
    (rank,) = rank_memories(job)
    experts = sum(job.model.expert_params(layer) for layer in range(32)) // 8
    dense = sum(job.model.dense_params(layer, 8) for layer in range(32))
    ends = job.model.embedding_params(8) + job.model.head_params(8) + job.model.norm_params
    assert rank.items["optimizer"] == pytest.approx(12 * (experts / 2 + (dense + ends) / 2), rel=1e-6)


def test_copies_of_experts_are_as_many_as_of_the_rest() -> None:
    groups = Groups(Layout(dp=16, tp=2, ep=8, expert_tp=1), shard_ranks=8)
    assert [groups.size(f"dp.{part}") for part in ("shard", "copies")] == [8, 2]
    assert [groups.size(f"edp.{part}") for part in ("shard", "copies")] == [2, 2]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"tp": 4, "expert_tp": 3},
            r"1\*3 = 3 does not divide dp\*cp\*tp = 4\*1\*4 = 16; try expert_tp=2",
        ),
        ({"tp": 4, "ep": 8, "expert_tp": 4, "dp": 4}, r"ep=8 does not divide dp\*cp = 4\*1"),
        ({"tp": 4, "ep": 8, "expert_tp": 8}, r"try ep=2"),
        ({"tp": 4, "expert_tp": 2, "sequence_parallel": False}, "needs sequence_parallel: .* or expert_tp=4"),
        ({"model": "llama3-8b", "tp": 4, "expert_tp": 2}, "llama3-8b has no experts"),
        ({"tp": 4, "expert_tp": -1}, "a whole number of at least 1"),
        ({"tp": 4, "ep": 0}, "ep=0: a parallel degree is a whole number of at least 1"),
    ],
)
def test_what_cannot_be_cut_so_is_refused_with_what_could(given: dict[str, Any], said: str) -> None:
    with pytest.raises((ConfigError, LayoutError, JobError), match=said):
        _job(**given)


def test_a_file_and_a_command_of_megatron_say_it(tmp_path: Path) -> None:
    job = _job(tp=8, ep=8, expert_tp=1)
    path = tmp_path / "run.toml"
    path.write_text(write_config({**MIXTRAL, "tp": 8, "ep": 8, "expert_tp": 1}), encoding="utf-8")
    assert job_from(read_config(path)).layout == job.layout
    assert "--expert-tensor-parallel-size 1" in written(job, "megatron").text


@pytest.mark.parametrize(("said", "cut_over"), [("", 1), ("expert_tensor_parallel_degree = 4", 4)])
def test_torchtitan_leaves_experts_whole_unless_told(tmp_path: Path, said: str, cut_over: int) -> None:
    path = tmp_path / "train.toml"
    path.write_text(
        f"[parallelism]\ntensor_parallel_degree = 4\nexpert_parallel_degree = 4\n{said}\n"
        "[training]\nlocal_batch_size = 1\nseq_len = 2048\n",
        encoding="utf-8",
    )
    given = {"model": "mixtral-8x7b", "cluster": "dgx-h100", "gpus": 16}
    assert job_from(read_files([path], given).settings).layout.etp == cut_over


@pytest.mark.parametrize(
    ("given", "etp", "origin"),
    [
        ({"tp": 4, "ep": 4, "expert_tp": 2}, 2, ""),
        ({"tp": 1, "ep": 8}, 1, ""),
        ({"tp": 2, "ep": 8, "gpus": 8}, 1, "only"),
        ({"tp": 4, "ep": 2, "sequence_parallel": False, "framework": "nemo"}, 4, "only"),
        ({"tp": 4, "ep": 2, "model": "qwen3-30b-a3b", "framework": "megatron"}, 1, "model"),
        ({"tp": 4, "ep": 2, "framework": "megatron"}, 4, "framework"),
        ({"tp": 4, "ep": 2, "framework": "nemo"}, 1, "framework"),
        ({"tp": 4, "ep": 1, "framework": "nemo"}, 4, "framework"),
        ({"tp": 4, "ep": 2, "conventions": {"expert_tp": "one"}}, 1, "framework"),
        ({"tp": 4, "ep": 2, "framework": "nanotron"}, 4, "open"),
        ({"tp": 4, "ep": 2}, 4, "open"),
    ],
)
def test_what_nobody_gave_is_what_is_possible_then_published_then_the_frameworks(
    given: dict[str, Any], etp: int, origin: str
) -> None:
    job = _job(**given)
    assert (job.layout.etp, job.expert_tp_from) == (etp, origin)
    assert job_name(job).endswith(f"expert tp{etp}")
    assert job_from(job_settings(job)) == job


def test_the_range_covers_whole_experts_where_nobody_said_which() -> None:
    given = {"tp": 4, "ep": 2, "cluster": "dgx-b200", "global_batch": 8}
    open_, cut, whole = (
        in_every_reading(_job(**given, **more), only_figures=True).summary
        for more in ({}, {"expert_tp": 4}, {"expert_tp": 1})
    )
    assert open_["step_time_s"] == cut["step_time_s"]
    for name in ("step_time_s", "mfu", "peak_memory_bytes"):
        ends = [one["intervals"][name] for one in (cut, whole)]  # each covers all frameworks, too
        least, most = open_["intervals"][name]
        assert least <= min(low for low, _ in ends) * (1 + 1e-9)
        assert most >= max(high for _, high in ends) * (1 - 1e-9)
    assert "--expert-tp says which" in open_["intervals"]["step_time_from"]
    assert "expert tp" not in " ".join(cut["rests_on"])


def test_whole_experts_that_do_not_fit_widen_memory_alone() -> None:
    found = in_every_reading(_job(tp=4, ep=2, cluster="dgx-h100"), only_figures=True).summary
    assert found["fits"]
    assert found["intervals"]["peak_memory_bytes"][1] > 2 * found["memory_limit_bytes"]
    assert "--expert-tp says which" in found["intervals"]["peak_memory_from"]
    assert "--expert-tp" not in found["intervals"]["step_time_from"]


def test_an_error_names_the_expert_tp_that_solves_it() -> None:
    with pytest.raises(LayoutError, match="try ep=4, or expert_tp=1 or 2"):
        _job(tp=4, ep=8)
    assert _job(tp=4, ep=8, expert_tp=2).layout.etp == 2
