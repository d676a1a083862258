"""Tables of operations and begin/end timers become pipeline runs; published answers about them come out."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from foretrace.tracer.errors import IngestError
from foretrace.tracer.ingest import optable
from foretrace.tracer.ingest.ingest import ingest
from foretrace.traces.analysis.metrics import breakdown, step_times_ns, summarize
from foretrace.traces.replay.whatif import scaled, what_if
from foretrace.traces.run import Run
from foretrace.traces.store import open_run

REAL = Path(os.environ.get("FORETRACE_REAL_TRACES", Path(__file__).parents[3] / "shared" / "real_traces"))
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason=f"no real traces at {REAL} (FORETRACE_REAL_TRACES)")

PUBLISHED_KINDS = {
    "forward": "forward-compute", "backward": "backward-compute", "optimizer": "optimizer", "gc": "gc",
    "all_reduce embedding": "embedding-grads-all-reduce", "reduce_scatter dp": "grads-reduce-scatter",
    "all_reduce world": "optimizer-clip-main-grad", "all_gather dp": "params-all-gather",
    "all_reduce tp": "layernorm-grads-all-reduce", "p2p forward": "forward-pp-comm",
    "p2p backward": "backward-pp-comm",
}  # fmt: skip
"""What the publishers call our kinds of operations."""


def table(path: Path, forward_s: dict[int, float], n_batches: int = 4, **replaced: Any) -> Path:
    """Two stages, two replicas, GPipe: forward passes, then backward passes of 20 ms, free transfers."""
    rows: list[dict[str, Any]] = []

    def add(at: tuple[int, int], kind: str, n: int, start: float, duration: float) -> None:
        dp, stage = at
        mb = n if kind.endswith("compute") else -1
        row = {"dp_rank": dp, "stage": stage, "rank": (stage * 2 + dp) * 4, "step": 7, "optype": kind}
        row |= {"start_ts": start, "duration": duration, "seq_id": n, "mc": 0, "mb_id": mb, "gmc": stage}
        rows.append(row)

    for dp in range(2):
        f = [forward_s[0], forward_s[1]]
        ready = [(n + 1) * f[0] for n in range(n_batches)]
        now = 0.0
        for n in range(n_batches):
            add((dp, 0), "forward-compute", n, n * f[0], f[0])
            add((dp, 0), "forward-send", n, ready[n], max(now, ready[n]) - ready[n])
            add((dp, 1), "forward-recv", n, now, max(ready[n] - now, 0.0))
            now = max(now, ready[n])
            add((dp, 1), "forward-compute", n, now, f[1])
            now += f[1]
        for n in range(n_batches):
            add((dp, 1), "backward-compute", n, now + n * 0.02, 0.02)
            add(
                (dp, 0),
                "optimizer" if n == n_batches - 1 else "gc",
                n,
                now + n * 0.02,
                0.0 if n < n_batches - 1 else 0.02,
            )
    columns = {name: [row[name] for row in rows] for name in rows[0]} | replaced
    pq.write_table(pa.table(columns), path)
    return path


def opened(source: Path, at: Path) -> Run:
    ingest([source], at)
    return open_run(at)


def test_a_table_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one that is as large as it says, nor one that packs as many rows as memory does not hold."""
    monkeypatch.setattr(optable, "MOST_ROWS", 3)
    with pytest.raises(IngestError, match="more than 3 operations"):
        ingest([table(tmp_path / "t.parquet", {0: 0.01, 1: 0.01})], tmp_path / "run")
    os.truncate(tmp_path / "t.parquet", 1 << 40)  # takes no room on the disk
    with pytest.raises(IngestError, match="more than 1024 MiB of such a file are not read"):
        ingest([tmp_path / "t.parquet"], tmp_path / "run")


def test_ranks_and_layout_follow_from_the_table(tmp_path: Path) -> None:
    run = opened(table(tmp_path / "t.parquet", {0: 0.01, 1: 0.01}), tmp_path / "run")
    assert run.info.layout is not None
    assert run.info.layout.degrees == {"pp": 2, "dp": 2, "cp": 1, "tp": 4, "ep": 1}
    assert run.stored_ranks == (0, 4, 8, 12)
    assert run.warnings == ()
    receives = [row for row in run.spans([8]).to_pylist() if row["kind"] == "recv"]
    assert [row["microbatch"] for row in receives] == [0, 1, 2, 3]
    assert {row["peer"] for row in receives} == {0}


def test_a_pipeline_of_equal_stages_loses_nothing_to_unlike_durations(tmp_path: Path) -> None:
    found = what_if(opened(table(tmp_path / "t.parquet", {0: 0.01, 1: 0.01}), tmp_path / "run"))
    assert found.slowdown == pytest.approx(1.0, abs=1e-6)
    assert found.step_time_s == pytest.approx(0.05 + 0.08)


def test_a_slow_last_stage_is_named(tmp_path: Path) -> None:
    """The last stage takes 30 ms a pass, the first 10: ideally both take 20, the step is 20 ms shorter."""
    found = what_if(opened(table(tmp_path / "t.parquet", {0: 0.01, 1: 0.03}), tmp_path / "run"))
    assert found.undelayed_s == pytest.approx(0.01 + 4 * 0.03 + 0.08)
    assert found.ideal_s == pytest.approx(0.02 + 4 * 0.02 + 0.08)
    assert next(iter(found.by_stage)) == 1
    assert next(iter(found.by_kind)) == "forward"
    assert set(list(found.by_worker)[:2]) == {8, 12}


def test_a_factor_of_one_changes_nothing_and_two_doubles_the_chain(tmp_path: Path) -> None:
    run = opened(table(tmp_path / "t.parquet", {0: 0.01, 1: 0.03}), tmp_path / "run")
    assert scaled(run, {}) == {7: pytest.approx(step_times_ns(breakdown(run))[7] / 1e9, abs=1e-9)}
    assert scaled(run, {"forward": 2.0})[7] - scaled(run, {})[7] == pytest.approx(0.01 + 4 * 0.03)


@pytest.mark.parametrize(
    ("replaced", "said"),
    [
        ({"rank": [5] * 38}, "its ranks are not"),
        ({"optype": ["sleep"] * 38}, "no operation that is known"),
        ({"start_ts": [float("nan")] * 38}, "no operation that is known"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused(tmp_path: Path, replaced: dict[str, Any], said: str) -> None:
    path = table(tmp_path / "t.parquet", {0: 0.01, 1: 0.01})
    n = pq.read_table(path).num_rows
    path = table(tmp_path / "t.parquet", {0: 0.01, 1: 0.01}, **{k: (v * n)[:n] for k, v in replaced.items()})
    with pytest.raises(IngestError, match=said):
        ingest([path], tmp_path / "run")


def timers(events: list[tuple[str, str, int, int, dict[str, int]]]) -> str:
    return json.dumps(
        [
            {"ph": ph, "name": name, "ts": ts, "pid": pid, "tid": 0, "args": args}
            for ph, name, ts, pid, args in events
        ]
    )


def one_pass(
    name: str, start: int, end: int, stage: int, batch: int
) -> list[tuple[str, str, int, int, dict[str, int]]]:
    said = {"iteration": 3, "microbatch": batch, "model_chunk": 0, "pp_rank": stage}
    return [("B", name, start, stage + 10, {"iteration": 3}), ("E", name, end, stage + 10, said)]


def test_timers_give_the_bubble(tmp_path: Path) -> None:
    """Stage 0 works 30 of 100 µs and stage 1 30, the last 10 are the reduction: bubble 60 %, other 10 %."""
    events = [("i", "iteration begin", 0, pid, {"iteration": 3}) for pid in (10, 11)]
    events += [*one_pass("forward", 0, 10, 0, 0), *one_pass("forward", 10, 20, 1, 0)]
    events += [*one_pass("backward", 20, 40, 1, 0), *one_pass("backward", 40, 60, 0, 0)]
    events += [("i", "reduce", 90, pid, {"iteration": 3}) for pid in (10, 11)]
    events += [("i", "iteration end", 100, pid, {"iteration": 3}) for pid in (10, 11)]
    (tmp_path / "t.json").write_text(timers(events))
    run = opened(tmp_path / "t.json", tmp_path / "run")
    assert run.info.layout is not None
    assert run.info.layout.pp == 2
    shares = summarize(run)["shares"]
    assert (shares["compute"], shares["bubble"], shares["other"]) == pytest.approx((0.3, 0.6, 0.1))
    assert {row["microbatch"] for row in run.spans().to_pylist() if row["kind"] == "forward"} == {0}


def test_timers_that_do_not_close_are_counted(tmp_path: Path) -> None:
    events = [*one_pass("forward", 0, 10, 0, 0), ("B", "forward", 20, 10, {}), ("E", "backward", 5, 99, {})]
    (tmp_path / "t.json").write_text(timers(events))
    found = ingest([tmp_path / "t.json"], tmp_path / "run")
    assert found.dropped == {"timer that never ends": 1, "end of a timer that never began": 1}


@needs_real
@pytest.mark.parametrize(("name", "slowdown"), [("ST", 1.1787), ("AR", 1.9730)])
def test_published_slowdowns_come_out(name: str, slowdown: float, tmp_path: Path) -> None:
    """The authors' tables by kind, stage and replica, within 0.05 %, and in their order."""
    folder = REAL / "bytedance_straggler"
    found = what_if(opened(folder / f"trace-{name}.parquet", tmp_path / "run"))
    published = json.loads((folder / f"result-{name}.json").read_text())
    assert found.slowdown == pytest.approx(slowdown, rel=5e-4)
    assert found.delay_slowdown == pytest.approx(published["launch_slowdown"], rel=5e-4)
    for kind, value in found.by_kind.items():
        assert value == pytest.approx(
            published["blocking_decompose_by_optype"][PUBLISHED_KINDS[kind]], rel=5e-4
        )
    for ours, theirs in ((found.by_stage, "stage"), (found.by_replica, "dp_rank")):
        table_ = {int(key): value for key, value in published[f"blocking_decompose_by_{theirs}"].items()}
        assert list(ours) == list(table_)
        assert dict(ours) == pytest.approx(table_, rel=5e-4)


@needs_real
@pytest.mark.parametrize("name", ["ST", "AR"])
def test_a_recorded_run_plays_again_to_the_nanosecond(name: str, tmp_path: Path) -> None:
    run = opened(REAL / "bytedance_straggler" / f"trace-{name}.parquet", tmp_path / "run")
    times = step_times_ns(breakdown(run))
    assert {step: round(s * 1e9) for step, s in scaled(run, {}).items()} == times


@needs_real
def test_the_bubble_of_a_real_interleaved_pipeline(tmp_path: Path) -> None:
    """20 iterations on 4 stages; what is not spent in passes is added up from the events of the file."""
    source = next((REAL / "megatronapp_pp4").glob("*aggregated.json.gz"))
    busy, window = 0, 0
    begun: dict[tuple[str, int], int] = {}
    for event in json.loads(gzip.decompress(source.read_bytes())):
        if event["args"]["iteration"] == 0:
            continue
        key = (event["name"].partition(" ")[0], event["pid"])
        if event["ph"] == "B" or event["name"].endswith("begin"):
            begun[key] = event["ts"]
        elif event["ph"] == "E":
            busy += event["ts"] - begun[key]
        elif event["name"].endswith("end"):
            window += event["ts"] - begun[key]
    found = summarize(opened(source, tmp_path / "run"))
    assert found["shares"]["compute"] == pytest.approx(busy / window, abs=0.001)
    assert found["bubble_fraction"] == pytest.approx(0.395, abs=0.001)
