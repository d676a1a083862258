"""What a report explains: losses in words, the critical path, links; each equal to what it is taken from."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.simulator.predicted import simulate
from tests.traces.unpacked import decode

from foretrace.simulator.config import job_from
from foretrace.traces.analysis.critical_path import critical_path
from foretrace.traces.analysis.findings import findings
from foretrace.traces.analysis.metrics import breakdown as rows_of_breakdown
from foretrace.traces.analysis.metrics import step_times_ns, summarize
from foretrace.traces.compare import causes
from foretrace.traces.info import RunInfo
from foretrace.traces.pack import Pack
from foretrace.traces.report.document import document
from foretrace.traces.report.findings import slowest
from foretrace.traces.report.links import BINS, FULL, narrow, utilisation
from foretrace.traces.run import Run
from foretrace.traces.store import open_run, write_run
from foretrace.traces.timeline import timeline


def test_two_runs_are_explained_each(pipeline_run: Run, recorded_pipeline_run: Run) -> None:
    pack = Pack()
    page = document(pipeline_run, recorded_pipeline_run, pack)
    columns = decode(pack.columns, pack.encode())
    for run, shown in zip((pipeline_run, recorded_pipeline_run), page["runs"], strict=True):
        about = shown["critical"]
        assert about["length_ns"] == critical_path(run, about["step"]).length_ns
        assert columns[f"{shown['key']}.critical.end"][-1] == about["length_ns"]
        said = [one["text"] for one in page["findings"] if one["run"] == shown["label"]]
        assert said == [one.text for one in findings(run)[: len(said)]]
        assert said


def test_links_of_a_run_in_memory_are_drawn(tmp_path: Path) -> None:
    job = job_from(
        {"model": "llama3-8b", "cluster": "dgx-h100", "gpus": 4, "tp": 2, "global_batch": 4, "seq_len": 1024}
    )
    simulation = simulate(job, engine="contended")
    stored = open_run(simulation.write(tmp_path / "run"))
    shown, kept = (told(run) for run in (simulation.run, stored))
    assert shown[0]["runs"][0]["links"] == kept[0]["runs"][0]["links"]
    assert shown[0]["runs"][0]["links"]["groups"]
    assert (shown[1]["a.links"] == kept[1]["a.links"]).all()


ALONE = {"cluster": "dgx-a100", "gpus": 8, "global_batch": 8, "seq_len": 1024}


@pytest.mark.parametrize(
    ("settings", "state", "label"),
    [
        ({"offload": "optimizer"}, "host:optimizer", "Optimizer on the host"),
        ({"offload": "activations"}, "exposed:host", "copies to and from the host"),
    ],
)
def test_what_is_offloaded_has_a_name_of_its_own(settings: dict[str, Any], state: str, label: str) -> None:
    run = simulate(job_from({"model": "llama2-7b", "sharding": "zero2"} | ALONE | settings)).run
    shares = summarize(run)["shares"]
    assert shares[state] > 0.005
    assert shares["other"] < 0.005
    assert sum(shares.values()) == pytest.approx(1)
    assert sum(causes(run, 0).values()) == max(row.window_ns for row in rows_of_breakdown(run))
    page = told(run)[0]
    assert label in page["story"]
    on_path = [page["kinds"][kind]["id"] for kind, _ in page["runs"][0]["critical"]["parts"]]
    assert state in on_path
    assert any(one.what == state for one in findings(run))


@pytest.mark.parametrize(("imbalance", "said"), [(0.0, "do the same"), (0.5, "tokens of the fullest")])
def test_uneven_experts_are_not_said_to_do_the_same(imbalance: float, said: str) -> None:
    job = {"model": "mixtral-8x7b", "ep": 8, "expert_imbalance": imbalance} | ALONE
    assert said in told(simulate(job_from(job)).run)[0]["story"]


WORD = pa.dictionary(pa.int32(), pa.string())
LINKS = pa.schema(
    [("rank", pa.int32()), ("tier", WORD), ("direction", WORD), ("start_ns", pa.int64()),
     ("end_ns", pa.int64()), ("used", pa.float64())]
)  # fmt: skip


def told(run: Run) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
    pack = Pack()
    return document(run, None, pack), decode(pack.columns, pack.encode())


@pytest.mark.parametrize("name", ["pipeline_run", "recorded_pipeline_run", "fsdp_run", "many_ranks_run"])
def test_the_path_on_the_page_is_the_critical_path(name: str, request: pytest.FixtureRequest) -> None:
    run: Run = request.getfixturevalue(name)
    page, columns = told(run)
    about = page["runs"][0]["critical"]
    path = critical_path(run, about["step"])
    assert about["length_ns"] == path.length_ns == sum(ns for _, ns in about["parts"])
    start, end = columns["a.critical.start"], columns["a.critical.end"]
    assert start[0] == 0
    assert (start[1:] == end[:-1]).all()
    assert end[-1] == path.length_ns
    (shown,) = page["runs"]
    assert set(columns["a.critical.row"]) <= set(range(-1, len(shown["rows"])))
    step = shown["steps"][shown["default_step"]]
    assert about["step"] == step["step"]
    assert path.length_ns <= step["length_ns"]
    assert step_times_ns(rows_of_breakdown(run))[about["step"]] <= step["length_ns"]


def test_findings_on_the_page_are_those_of_the_analysis(recorded_pipeline_run: Run) -> None:
    page, _ = told(recorded_pipeline_run)
    known = findings(recorded_pipeline_run)
    assert [one["text"] for one in page["findings"]] == [one.text for one in known[: len(page["findings"])]]
    assert page["findings"]


def links(rows: list[tuple[int, str, str, int, int, float]]) -> pa.Table:
    columns = list(zip(*rows, strict=True))
    return pa.Table.from_arrays(
        [pa.array(c, f.type) for c, f in zip(columns, LINKS, strict=True)], schema=LINKS
    )


@given(
    lengths=st.lists(
        st.tuples(st.integers(1, 500), st.integers(0, 300), st.floats(0, 1)), min_size=1, max_size=9
    )
)
def test_a_link_carries_in_the_picture_what_it_carried(lengths: list[tuple[int, int, float]]) -> None:
    """Sum over slices of share × length = sum over spans of the same, whatever the slices."""
    rows, now = [], 0
    for length, gap, used in lengths:
        rows.append((3, "far", "in", now, now + length, used))
        now += length + gap
    shares, lines = utilisation(links(rows), 0, now)
    assert lines == [("far", 3, "in")]
    carried = sum((end - start) * used for _, _, _, start, end, used in rows)
    assert shares.sum() * now / BINS == pytest.approx(carried)
    assert shares.max() <= 1 + 1e-9


def test_a_link_is_framed_while_it_has_less_than_its_width() -> None:
    """From a change to the next, within the step; two at once: the later one counts."""
    said = [
        {"rank": rank, "tier": "far", "direction": "in", "at_ns": at_ns, "capacity": capacity}
        for rank, at_ns, capacity in [
            (3, 50, 0.25),
            (3, 150, 1.0),
            (4, 10, 0.5),
            (5, 190, 0.0),
            (6, 40, 0.5),
            (6, 40, 1.0),
        ]
    ]
    table = LINKS.empty_table().replace_schema_metadata({"changes": json.dumps(said)})
    found = narrow(table, 100, 80)
    assert {way: spans for way, spans in found.items() if spans} == {
        ("far", 3, "in"): [(0, 50, 0.25)],
        ("far", 4, "in"): [(0, 80, 0.5)],
    }
    assert narrow(LINKS.empty_table(), 0, 10) == {}


def test_links_are_drawn_where_a_run_has_them(tmp_path: Path, pipeline_run: Run) -> None:
    path = write_run(tmp_path / "run", pipeline_run.info, pipeline_run.spans())
    assert told(open_run(path))[0]["runs"][0]["links"] is None
    page, _ = told(pipeline_run)
    step = page["runs"][0]["steps"][0]
    begin, length = step["t0_ns"], step["length_ns"]
    table = links([(0, "near", "in", begin, begin + length, 1.0), (1, "near", "in", begin, begin + 10, 0.5)])
    with pa.OSFile(str(path / "links.arrow"), "wb") as file, pa.ipc.new_file(file, LINKS) as writer:
        writer.write_table(table)
    page, columns = told(open_run(path))
    (tier,) = page["runs"][0]["links"]["groups"]
    assert tier["fullest"] == {"name": "rank 0 in", "mean": pytest.approx(1)}
    assert (columns["a.links"][:BINS] == FULL).all()
    assert columns["a.links"][BINS + 1 :].max() == 0
    json.dumps(page, allow_nan=False)
    (path / "links.arrow").write_bytes(b"damaged")
    assert told(open_run(path))[0]["runs"][0]["links"] is None


@pytest.mark.parametrize(
    ("slow", "step", "expected"),
    [(1.0, 2000, None), (1.02, 2000, None), (1.5, 2000, 3), (0.5, 2000, None), (1.5, 30_000, None)],
)
def test_a_rank_slower_than_its_like_is_named(
    tmp_path: Path, slow: float, step: int, expected: int | None
) -> None:
    lengths = [1000] * 8
    lengths[3] = round(1000 * slow)
    columns: dict[str, object] = {
        "rank": [*range(8)] * 2,
        "category": ["compute"] * 8 + ["step"] * 8,
        "kind": ["forward"] * 8 + ["step"] * 8,
        "stream": ["compute"] * 8 + ["step"] * 8,
        "start_ns": [0] * 16,
        "duration_ns": [*lengths, *[step] * 8],
        "step": [0] * 16,
    }
    run = open_run(write_run(tmp_path / "run", RunInfo(origin="recorded", world_size=8), timeline(columns)))
    found = slowest(run)
    assert (found.rank if found else None) == expected
    page, _ = told(run)
    assert ("slowest" in page) == (expected is not None)
    if found is not None:
        assert found.ratio == pytest.approx(slow)
        assert f"Rank 3 computes {slow:.2f} times" in page["slowest"]["text"]
        assert 3 in page["picks"][page["pick"]]


@pytest.mark.parametrize("is_said", [False, True])
def test_a_stage_that_computes_longer_is_no_slow_rank(tmp_path: Path, is_said: bool) -> None:
    """Where no layout says it, the spans of a rank say in which stage of the pipeline it is."""
    columns: dict[str, object] = {
        "rank": [*range(8)] * 2,
        "category": ["compute"] * 8 + ["step"] * 8,
        "kind": ["forward"] * 8 + ["step"] * 8,
        "stream": ["compute"] * 8 + ["step"] * 8,
        "stage": [*([0, 1] * 4 if is_said else [-1] * 8), *[-1] * 8],
        "start_ns": [0] * 16,
        "duration_ns": [*[1000, 1500] * 4, *[2000] * 8],
        "step": [0] * 16,
    }
    run = open_run(write_run(tmp_path / "run", RunInfo(origin="recorded", world_size=8), timeline(columns)))
    assert (slowest(run) is None) == is_said
