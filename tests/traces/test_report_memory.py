"""Memory curves: what they add up to, where their peak is, what is kept of a long one."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.traces.unpacked import decode

from foretrace.traces.analysis.memory import Curve, curves
from foretrace.traces.info import RunInfo
from foretrace.traces.pack import Pack
from foretrace.traces.report.run import held_where, pack_memory
from foretrace.traces.run import Run
from foretrace.traces.store import open_run, write_run
from foretrace.traces.timeline import MEMORY, timeline


def opened(folder: Path, rows: list[tuple[int, str, int]]) -> Run:
    columns: dict[str, Any] = {"rank": [0] * len(rows)}
    columns |= dict(zip(("t_ns", "category", "bytes"), map(list, zip(*rows, strict=True)), strict=True))
    spans = timeline(
        {"rank": [0], "category": ["step"], "kind": ["step"], "start_ns": [0], "duration_ns": [100]}
    )
    info = RunInfo(origin="simulated", world_size=1)
    return open_run(write_run(folder / "run", info, spans, pa.table(columns).cast(MEMORY)))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(
    st.lists(
        st.tuples(st.integers(0, 20), st.sampled_from("abc"), st.integers(0, 9)), min_size=1, max_size=20
    )
)
def test_the_total_is_the_sum_of_what_each_category_holds(
    tmp_path: Path, rows: list[tuple[int, str, int]]
) -> None:
    latest = {(t, name): size for t, name, size in rows}
    rows = [(t, name, size) for (t, name), size in latest.items()]
    (curve,) = curves(opened(tmp_path, rows), [0])
    for t, total in zip(curve.t_ns, curve.total_bytes, strict=True):
        held = {}
        for when, name, size in sorted(rows):
            if when <= t:
                held[name] = size
        assert total == sum(held.values())
        assert curve.parts_at(int(t)) == {name: size for name, size in held.items() if size}
    t_ns, peak = curve.peak(0, 100)
    assert peak == curve.total_bytes.max()
    assert sum(curve.parts_at(t_ns).values()) == peak


@pytest.mark.parametrize(
    ("rows", "total", "parts"),
    [
        ([(0, "total", 9), (0, "reserved", 2), (0, "weights", 7)], 9, {"weights": 7, "reserved": 2}),
        ([(0, "allocated", 5), (0, "reserved", 8)], 5, {}),
        ([(0, "weights", 4), (0, "reserved", 3)], 7, {"weights": 4, "reserved": 3}),
    ],
)
def test_a_category_that_is_a_sum_is_the_curve(
    tmp_path: Path, rows: list[tuple[int, str, int]], total: int, parts: dict[str, int]
) -> None:
    (curve,) = curves(opened(tmp_path, rows), [0])
    assert curve.total_bytes.tolist() == [total]
    assert curve.parts_at(0) == parts


def test_a_peak_counts_what_is_held_when_the_step_begins() -> None:
    points = np.array([0, 50, 90], np.int64)
    curve = Curve(rank=0, t_ns=points, total_bytes=np.array([9, 3, 4], np.int64), categories={})
    assert curve.peak(10, 40) == (0, 9)
    assert curve.peak(50, 80) == (50, 3)
    assert curve.peak(95, 99) == (90, 4)


def test_a_long_curve_is_thinned_and_keeps_its_peak_and_its_ends() -> None:
    size = np.random.default_rng(0).integers(0, 10**9, 50_000)
    curve = Curve(rank=3, t_ns=np.arange(50_000), total_bytes=size, categories={})
    pack = Pack()
    (series,) = pack_memory([curve], {3: 1}, pack, "a")
    found = decode(pack.columns, pack.encode())
    assert series == {"row": 1, "from": 0, "to": len(found["a.memory.t"])}
    assert 4096 < series["to"] < 10_000
    assert found["a.memory.bytes"].max() == size.max()
    assert [found["a.memory.t"][0], found["a.memory.t"][-1]] == [0, 49_999]
    assert (np.diff(found["a.memory.t"]) > 0).all()


def test_a_page_says_whether_memory_is_that_of_a_device_or_of_a_process() -> None:
    """Without a GPU a recording has the resident set, and a prediction has tensors alone."""

    def of(origin: str, kind: str) -> Run:
        info = RunInfo(origin=origin, world_size=1, cluster={"device": {"kind": kind}})
        return Run("run", info, [], None, ())

    gpu, processor, predicted = of("recorded", "gpu"), of("recorded", "cpu"), of("simulated", "cpu")
    assert held_where([gpu], ["recorded"]) == "held on the device"
    assert held_where([processor], ["recorded"]) == "held by the process, libraries included"
    assert held_where([predicted, processor], ["simulated", "recorded"]) == (
        "simulated: held on the device; recorded: held by the process, libraries included"
    )
