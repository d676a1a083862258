"""Analyses of runs whose every span is known: bandwidths, who waits for whom, critical path, findings."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.traces.hand_made import in_memory

from foretrace.cli import main
from foretrace.traces.analysis.collectives import bandwidths, bus_factor, collectives, stragglers
from foretrace.traces.analysis.critical_path import GAP, critical_path
from foretrace.traces.analysis.device_time import device_times
from foretrace.traces.analysis.everything import analysis
from foretrace.traces.analysis.findings import findings
from foretrace.traces.analysis.gaps import gaps, gaps_on_path
from foretrace.traces.analysis.kernels import group_of, kernel_groups
from foretrace.traces.analysis.metrics import summarize
from foretrace.traces.analysis.windows import windows
from foretrace.traces.errors import RunError
from foretrace.traces.info import RunInfo
from foretrace.traces.layout import Group
from foretrace.traces.replay.whatif import scaled, what_if
from foretrace.traces.replay.work import replay
from foretrace.traces.run import Run
from foretrace.traces.store import open_run, write_run
from foretrace.traces.timeline import timeline

MS = 1_000_000


def made(rows: list[dict[str, Any]], world_size: int) -> Run:
    names = sorted({name for row in rows for name in row})
    blank = {
        "axis": "",
        "group": -1,
        "sequence": -1,
        "size_bytes": 0,
        "step": 0,
        "stream": "compute",
        "name": "x",
    }
    columns: dict[str, object] = {name: [row.get(name, blank.get(name)) for row in rows] for name in names}
    info = RunInfo(
        origin="ingested",
        world_size=world_size,
        groups=(Group(id=0, axis="dp", ranks=tuple(range(world_size))),),
    )
    return in_memory(info, timeline(columns))


def compute(rank: int, start: int, end: int, **more: Any) -> dict[str, Any]:
    row = {"rank": rank, "category": "compute", "kind": "forward", "step": 0}
    return row | {"start_ns": start, "duration_ns": end - start} | more


def reduced(rank: int, start: int, end: int, number: int = 0) -> dict[str, Any]:
    said = {"category": "collective", "kind": "all_reduce", "axis": "dp", "group": 0, "stream": "dp"}
    return compute(rank, start, end, sequence=number, size_bytes=8 * MS, **said)


def late_rank() -> Run:
    """Rank 1 computes 30 ms, the others 10; then all reduce 8 MB in 2 ms."""
    rows = []
    for rank in range(4):
        done = 30 * MS if rank == 1 else 10 * MS
        rows += [compute(rank, 0, done), reduced(rank, done, 32 * MS)]
    return made(rows, 4)


def test_bandwidth_is_of_the_transfer_not_of_the_wait() -> None:
    """8 MB in 2 ms are 4 GB/s; each of 4 ranks sends 1.5 times that."""
    (row,) = collectives(late_rank()).to_pylist()
    assert (row["transfer_ns"], row["last_rank"], row["n_seen"]) == (2 * MS, 1, 4)
    assert row["algbw_bytes_per_s"] == pytest.approx(4e9)
    assert row["busbw_bytes_per_s"] == pytest.approx(6e9)
    assert row["waiting_ns"] == 3 * 20 * MS


def test_a_group_that_names_no_members_is_one_of_unknown_members() -> None:
    nobody = late_rank()
    object.__setattr__(nobody.info, "groups", (Group(id=0, axis="dp", ranks=()),))
    (row,) = collectives(nobody).to_pylist()
    assert (row["n_ranks"], row["busbw_bytes_per_s"]) == (1, 0.0)


def test_what_a_rank_transfers_at_once_counts_once() -> None:
    """Each ms of a step of 100 two small reductions begin; they take 1 and 1.5 ms, the last two 1 ms."""
    rows = [compute(rank, 0, 100 * MS) for rank in (0, 1)]
    for rank, at, which in product((0, 1), range(100), (0, 1)):
        end = at * MS + MS + which * (MS // 2) * (at < 99)
        rows.append(
            reduced(rank, at * MS, end, 2 * at + which) | {"size_bytes": 4096, "stream": f"dp{which}"}
        )
    run = made(rows, 2)
    (row,) = bandwidths(run)
    assert row["transfer_s"] == pytest.approx(0.2495)
    assert row["rank_s"] == pytest.approx(2 * 0.1)
    (latency,) = [one for one in findings(run) if one.what == "small:dp"]
    assert latency.share == pytest.approx(1.0)


def test_bus_factors_are_those_of_nccl_tests() -> None:
    assert [bus_factor(kind, 8) for kind in ("all_reduce", "reduce_scatter", "broadcast")] == [
        1.75,
        0.875,
        1.0,
    ]


def test_the_late_rank_is_named_with_what_it_costs() -> None:
    run = late_rank()
    (one,) = stragglers(run)
    assert (one.rank, one.n_last, one.n_others, one.caused_ns, one.longest_ns) == (1, 1, 3, 60 * MS, 20 * MS)
    worst = findings(run, usd_per_gpu_hour=2.0)[0]
    assert worst.what == "held up:1"
    assert worst.text.startswith(
        "rank 1 computes 3.00 times as long as the other ranks: 3 others wait for it, most along dp"
    )
    assert worst.share == pytest.approx(60 / 128)
    assert worst.usd_per_hour == pytest.approx(8 * 60 / 128)


def stepped(*, missing: int = 0) -> Run:
    """A dp pair in four steps of 10 ms, the first of 12 warms up, between which rank 1 is 100 ms late once.

    In each step rank 1 computes 8 ms and rank 0 6, then both reduce in 2 ms.
    """
    rows = []
    for step in range(4):
        zero = step * 10 * MS + (2 * MS if step else 0) + (100 * MS if step > 1 else 0)
        end = zero + (10 if step else 12) * MS
        for rank in range(2 - missing):
            done = end - (2 if rank else 4) * MS
            rows += [compute(rank, zero, done, step=step), reduced(rank, done, end, step) | {"step": step}]
            marker = {"category": "step", "kind": "step", "stream": "step", "step": step}
            rows.append(compute(rank, zero, end) | marker)
    for rank in range(2 - missing):
        came = (119 if rank else 22) * MS
        rows.append(reduced(rank, came, 120 * MS, 9) | {"step": -1, "stream": "evaluation"})
    return made(rows, 2)


def test_only_what_is_in_averaged_steps_is_held_against_them() -> None:
    """2 ms of waiting per step on one of two ranks are a tenth; the evaluation is in no step."""
    run = stepped()
    (one,) = stragglers(run)
    assert (one.rank, one.n_last, one.n_joined, one.caused_ns) == (1, 3, 3, 6 * MS)
    assert len(collectives(run)) == 5
    (waits,) = (found for found in findings(run) if found.what == "held up:1")
    assert waits.share == pytest.approx(0.1)
    assert waits.cost_s == pytest.approx(1e-3)
    assert sum(row["count"] for row in bandwidths(run, averaged=True)) == 3
    assert sum(row["count"] for row in bandwidths(run)) == 5


def test_with_a_rank_missing_nobody_claims_that_data_moves() -> None:
    whole, part = stepped(), stepped(missing=1)
    assert (whole.missing_ranks, part.missing_ranks) == ((), (1,))
    for run, text in (
        (whole, "data moves along dp while nobody computes: 2.00 ms a step, 20.0 %"),
        (
            part,
            "communication along dp while nobody computes, be it transfer or waiting for a missing rank: 4.0",
        ),
    ):
        (said,) = (found.text for found in findings(run) if found.what == "exposed:dp")
        assert said.startswith(text)
    assert not whole.warnings
    (warning,) = part.warnings
    assert "waiting for a missing rank cannot be told from transfer" in warning


@pytest.mark.parametrize(
    ("origin", "job", "n_ranks", "said"),
    [
        ("simulated", {}, 1, None),
        ("simulated", {"stragglers": "", "compute_jitter": 0.0}, 1, None),
        ("simulated", {"compute_jitter": 0.1}, 1, "most of all all_reduce dp (alone 1.50)"),
        ("recorded", {}, 1, "most of all all_reduce dp (alone 1.50)"),
        ("simulated", {}, 2, "most of all forward (alone 1.33), rank 1 (1.33)"),
    ],
)
def test_unlike_times_name_only_what_there_are_several_of(
    origin: str, job: dict[str, Any], n_ranks: int, said: str | None, tmp_path: Path
) -> None:
    if n_ranks == 1:  # the third all-reduce takes 40 ms instead of 10: 90 ms instead of 60
        rows = [
            row | {"step": step}
            for step, zero in enumerate((0, 20 * MS, 40 * MS))
            for row in (
                compute(0, zero, zero + 10 * MS, microbatch=0, stage=0),
                reduced(0, zero + 10 * MS, zero + (50 if step == 2 else 20) * MS, step),
            )
        ]
    else:
        rows = [
            compute(0, 0, 10 * MS, microbatch=0, stage=0),
            compute(1, 0, 20 * MS, microbatch=0, stage=0),
        ]
    blank: dict[str, Any] = {
        "microbatch": -1,
        "stage": 0,
        "axis": "",
        "group": -1,
        "sequence": -1,
        "size_bytes": 0,
    }
    blank["stream"] = "compute"
    names = sorted({*blank, *rows[0]})
    columns: dict[str, object] = {name: [(blank | row)[name] for row in rows] for name in names}
    groups = (Group(id=0, axis="dp", ranks=tuple(range(n_ranks))),)
    info = RunInfo(origin=origin, world_size=n_ranks, job=job, groups=groups)
    run = open_run(write_run(tmp_path / "run", info, timeline(columns)))
    found = [one.text for one in findings(run) if one.what == "unlike"]
    if said is None:
        assert found == []
    else:
        assert f"{said}:" in found[0]


def test_the_critical_path_follows_the_late_rank() -> None:
    path = critical_path(late_rank(), 0)
    assert [(p.rank, p.start_ns, p.end_ns, p.kind) for p in path.pieces] == [
        (1, 0, 30 * MS, "forward"),
        (path.pieces[1].rank, 30 * MS, 32 * MS, "all_reduce dp"),
    ]
    assert path.by_kind() == {"forward": 30 * MS, "all_reduce dp": 2 * MS}
    assert path.scaled_ns({"forward": 0.5}) == 17 * MS


def test_work_that_issues_a_collective_is_on_the_path() -> None:
    """A collective out of the middle of a pass waits for the work that runs, not for nothing."""
    rows = [compute(0, 0, 60, kind="backward"), reduced(0, 40, 90)]
    path = critical_path(made(rows, 1), 0)
    assert path.by_kind() == {"all_reduce dp": 50, "backward": 40}


def test_gaps_on_the_path_are_gaps() -> None:
    run = made([compute(0, 0, 5), compute(0, 9, 12)], 1)
    assert critical_path(run, 0).by_kind() == {"forward": 8, GAP: 4}


pieces = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(0, 20)), min_size=1, max_size=25
)


@settings(max_examples=40, deadline=None)
@given(pieces=pieces, ends=st.lists(st.integers(20, 60), max_size=4))
def test_the_path_is_as_long_as_the_makespan_and_has_no_holes(
    pieces: list[tuple[int, int, int]], ends: list[int]
) -> None:
    rows = [compute(rank, a, a + d, stream=f"s{i}") for i, (rank, a, d) in enumerate(pieces)]
    for number, end in enumerate(ends):
        stream = {"stream": f"c{number}"}
        rows += [reduced(rank, max(end - 7 * (rank + 1), 0), end, number) | stream for rank in range(3)]
    run = made(rows, 3)
    extent = windows(run)
    if not extent:
        return
    path = critical_path(run, 0)
    first, last = min(w.start_ns for w in extent), max(w.end_ns for w in extent)
    assert path.length_ns == last - first
    assert path.scaled_ns({}) == path.length_ns
    assert [p.end_ns for p in path.pieces[:-1]] == [p.start_ns for p in path.pieces[1:]]


def test_a_simulated_pipeline_plays_again_exactly(pipeline_run: Run) -> None:
    """A factor of one changes nothing, whatever the engine that made the timeline."""
    times = scaled(pipeline_run, {})
    played = replay(pipeline_run)
    recorded = {
        int(step): int(played.work.end_ns[played.work.step == step].max() - first)
        for step, first in zip(played.steps, played.first_ns, strict=True)
    }
    assert {step: round(s * 1e9) for step, s in times.items()} == recorded
    assert scaled(pipeline_run, {"forward": 0.5})[0] < times[0]
    assert what_if(pipeline_run).slowdown >= 1.0 - 1e-9


def test_a_kind_that_is_not_there_is_refused(pipeline_run: Run) -> None:
    with pytest.raises(RunError, match="no operation 'sleep'"):
        scaled(pipeline_run, {"sleep": 0.5})


def test_a_run_without_micro_batches_cannot_be_played(fsdp_run: Run) -> None:
    with pytest.raises(RunError, match="do not say their micro-batch"):
        what_if(fsdp_run)


def test_pauses_are_summed_by_cause() -> None:
    idle = {"stream": "idle", "category": "host", "kind": "host", "name": "cudaStreamSynchronize"}
    rows = [
        compute(0, 0, 10),
        compute(0, 30, 40),
        compute(0, 10, 25, **idle),
        compute(0, 25, 30, **idle | {"kind": "launch"}),
    ]
    found = gaps(made(rows, 1))
    assert [(row["cause"], row["total_s"]) for row in found] == [("host", 1.5e-8), ("launch", 5e-9)]


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("volta_sgemm_128x32_nt", "gemm"),
        ("flash_fwd_splitkv_kernel", "attention"),
        (
            "pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, cutlass::bfloat16_t>",
            "attention",
        ),
        ("attn_fwd", "attention"),
        ("softmax_warp_forward<c10::BFloat16>", "softmax and loss"),
        ("cutlass_tensorop_bf16_s16816fprop_optimized_bf16_256x64", "convolution"),
        ("igemm_fwd_gtcx3_nhwc_bf16_bx0_ex1_bt256x64x8", "convolution"),
        ("MIOpenBatchNormFwdTrainSpatial", "normalization"),
        ("silu_kernel(at::TensorIteratorBase&)::{lambda", "elementwise"),
        ("indexSelectLargeIndex<c10::BFloat16, long>", "embedding"),
        ("cudnn::bn_bw_1C11_kernel_new", "normalization"),
        ("Memcpy HtoD", "copy and layout"),
        ("something", "other"),
        # What templates are filled with is no word of the kernel: a lambda is no LAMB, a conversion no
        # convolution, a normal distribution no norm.
        (
            "void at::elementwise_kernel<4, at::neg(Base&)::{lambda()#2}::operator()(){lambda(int)#1}>(int)",
            "elementwise",
        ),
        (
            "std::enable_if<(8>(0)) && _typeConvert<int>::exists, void>::type fused_add_rms_norm<int>()",
            "normalization",
        ),
        (
            "void (anonymous namespace)::distribution_elementwise<float, normal_and_transform<float>>(long)",
            "dropout and random",
        ),
        ("sm80_xmma_fprop_implicit_gemm_indexed_tf32f32_nhwckrsc_nchw_tilesize128x128x16", "convolution"),
        # Inductor names the operators of which a kernel computes a part.
        ("triton_poi_fused_addmm_gelu_view_15", "elementwise"),
        ("triton_red_fused__unsafe_view_addmm_native_layer_norm_19", "normalization"),
        ("triton_per_fused_addmm_mean_2", "reduction"),
    ],
)
def test_kernels_are_grouped_by_name(name: str, group: str) -> None:
    assert group_of(name) == group


def test_groups_of_kernels_share_all_compute(fsdp_run: Run) -> None:
    assert sum(row["share"] for row in kernel_groups(fsdp_run)) == pytest.approx(1.0)


def test_the_device_is_added_up_as_unions() -> None:
    """0-10 compute, 5-20 communication, 15-18 compute on another stream, 30-40 a copy."""
    rows = [compute(0, 0, 10), compute(0, 15, 18, stream="s2"), reduced(0, 5, 20)]
    rows.append(compute(0, 30, 40, category="copy", kind="memset"))
    (found,) = device_times(made(rows, 1))
    assert (found.window_ns, found.idle_ns, found.compute_ns) == (40, 10, 13)
    assert (found.communication_ns, found.overlap_ns, found.other_ns) == (15, 8, 17)


def test_the_analysis_is_json_and_the_verb_prints_it(tmp_path: Path) -> None:
    run = late_rank()
    write_run(tmp_path / "run", run.info, run.spans())
    document = json.loads(json.dumps(analysis(run)))
    for name in ("length_s", "step_time_s"):
        assert document["critical_path"][name] == pytest.approx(0.032)
    done = CliRunner().invoke(main, ["analyze", str(tmp_path / "run"), "--json", "--price", "2 USD/h"])
    assert json.loads(done.output)["findings"][0]["usd_per_hour"] == pytest.approx(3.75)
    shown = CliRunner().invoke(main, ["analyze", str(tmp_path / "run")])
    assert "rank 1 computes 3.00 times as long" in shown.output


@pytest.mark.parametrize("fixture", ["pipeline_run", "recorded_pipeline_run", "fsdp_run", "many_ranks_run"])
def test_every_kind_of_run_is_analysed(fixture: str, request: pytest.FixtureRequest) -> None:
    found = analysis(request.getfixturevalue(fixture))
    assert found["critical_path"]["length_s"] > 0
    assert all(0 < one["share"] < 1 for one in found["findings"])
    assert bandwidths(request.getfixturevalue(fixture))


def test_gaps_of_the_path_are_explained_as_far_as_the_trace_knows() -> None:
    """Of a pause of 20 ns, 15 were the host's and 2 the launch's; another rank's do not count."""
    idle = {"stream": "idle", "category": "host", "kind": "host", "name": "cudaStreamSynchronize"}
    rows = [compute(0, 0, 10), compute(0, 30, 40), compute(0, 10, 25, **idle), compute(1, 12, 13, **idle)]
    run = made([*rows, compute(0, 26, 28, **idle | {"kind": "launch"})], 2)
    path = critical_path(run, 0)
    assert path.by_kind()[GAP] == 20
    assert gaps_on_path(run, path) == {"host": 15, "launch": 2}


def test_a_step_in_which_a_pass_is_of_no_micro_batch_is_not_played() -> None:
    """PyTorch's pipeline learns shapes in the first step; the others can be played."""
    more = {"microbatch": 0, "stage": 0}
    rows = [compute(0, 0, 10, microbatch=-1, stage=0), compute(0, 10, 20, **more)]
    rows += [compute(0, 30, 50, step=1, **more), compute(0, 50, 60, step=1, **more | {"microbatch": 1})]
    run = made(rows, 1)
    assert scaled(run, {}) == {1: pytest.approx(30e-9)}
    assert what_if(run).step_time_s == pytest.approx(30e-9)


def _saving(*, alone: bool, early: int = 0) -> Run:
    """Return six steps of 10 on two ranks, each with a reduction from its start on.

    After the third rank 0 saves for 50; if not *alone*, so does rank 1, *early* before it.
    """
    rows: list[dict[str, Any]] = []
    for rank in range(2):
        saves = rank == 0 or not alone
        for step in range(6):
            late = 50 if step >= 3 else 0
            start = 10 * step + (late if saves or step > 3 else 0)
            end = 10 * (step + 1) + late - (early if rank and step == 2 else 0)
            mark = {"rank": rank, "step": step, "category": "step", "kind": "step", "start_ns": start}
            rows.append(mark | {"duration_ns": end - start})
            rows.append(reduced(rank, start, 10 * step + late + 2, step) | {"step": step})
        if saves:
            begins = 30 - (early if rank else 0)
            mark = {"rank": rank, "step": -1, "category": "phase", "kind": "checkpoint", "start_ns": begins}
            rows.append(mark | {"duration_ns": 80 - begins})
    return made(rows, 2)


def test_a_step_that_waits_for_a_rank_that_saves_is_left_out() -> None:
    found = summarize(_saving(alone=True))
    assert {step["step"]: step.get("why_not", "") for step in found["steps"]} == {
        **dict.fromkeys(range(6), ""),
        3: "waits for a rank that saves or evaluates",
    }
    assert found["step_time_s"] == 10e-9


@pytest.mark.parametrize("early", [0, 2])
def test_where_all_ranks_save_no_step_waits(early: int) -> None:
    """A rank that begins while another ends its step holds nobody up."""
    assert all(step["averaged"] for step in summarize(_saving(alone=False, early=early))["steps"])


def test_a_recording_of_which_no_step_has_ended_has_no_step_time() -> None:
    """As one that steps without an optimizer, or died in its first step; a file of others may mark none."""
    run = made([compute(0, 0, 10), compute(0, 20, 30)], 1)
    assert summarize(run)["has_steps"]
    recorded = in_memory(replace(run.info, origin="recorded"), run.spans([0]))
    assert not summarize(recorded)["has_steps"]
    mark = {"rank": 0, "category": "step", "kind": "step", "start_ns": 0, "duration_ns": 30}
    marked = made([compute(0, 0, 10), mark], 1)
    assert summarize(in_memory(replace(run.info, origin="recorded"), marked.spans([0])))["has_steps"]


def test_a_group_has_one_axis_whenever_that_was_known(tmp_path: Path) -> None:
    """Rows are written before it is clear what their group is for; what nobody names stays ``world``."""
    rows = [
        {"rank": 0, "step": 0, "category": "collective", "kind": "all_reduce", "start_ns": start}
        | {"duration_ns": 5, "axis": axis, "group": group, "sequence": n}
        for n, (start, axis, group) in enumerate([(0, "world", 0), (10, "dp", 0), (20, "world", 1)])
    ]
    columns: dict[str, object] = {name: [row[name] for row in rows] for name in rows[0]}
    groups = tuple(Group(id=n, axis=axis, ranks=(0,)) for n, axis in enumerate(("dp", "world")))
    for origin, first in (("recorded", "dp"), ("ingested", "world")):
        info = RunInfo(origin=origin, world_size=1, groups=groups)
        write_run(tmp_path / origin, info, timeline(columns))
        assert open_run(tmp_path / origin).spans([0])["axis"].to_pylist() == [first, "dp", "world"]
