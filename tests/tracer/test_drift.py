"""Clocks that drift: what is measured during a run puts every moment of it where it belongs."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.tracer.clock import PATIENCE, ClockLine, CommonClock, Measurement, RunClock, synchronise
from foretrace.traces.store import open_run

distributed = pytest.importorskip("torch.distributed")


@given(
    offset_ns=st.integers(-(10**14), 10**14),
    drift_ppb=st.floats(-1e6, 1e6),
    errors=st.lists(st.integers(-50_000, 50_000), min_size=2, max_size=6),
    at=st.floats(0, 2),
)
def test_an_even_clock_is_within_the_band_also_until_the_next_measurement(
    offset_ns: int, drift_ppb: float, errors: list[int], at: float
) -> None:
    """Offsets on a line, each measured to 50 µs: so is every moment, up to as long again after the last."""

    def truth_ns(own_ns: int) -> float:
        return offset_ns + own_ns * drift_ppb * 1e-9

    span_ns = 3_600_000_000_000
    own = [round(span_ns * i / (len(errors) - 1)) for i in range(len(errors))]
    found = [Measurement(t, round(truth_ns(t)) + e, 50_000) for t, e in zip(own, errors, strict=True)]
    line = ClockLine.through(found, tail_ns=span_ns)
    moment = round(at * span_ns)
    assert abs(line.common_ns(moment) - moment - truth_ns(moment)) <= line.uncertainty_ns + 2


def test_an_uneven_clock_widens_the_band() -> None:
    found = [Measurement(0, 0, 10), Measurement(1000, 500, 10), Measurement(2000, 0, 10)]
    assert ClockLine.through(found) == ClockLine(0, 0, 0.0, 510)


def test_one_measurement_is_an_offset() -> None:
    assert ClockLine.through([Measurement(5, 7, 3)], tail_ns=10**9) == ClockLine(5, 7, 0.0, 3)


def test_a_drifting_clock_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks on two machines; the second clock runs fast by 1 %, a thousand times what quartz does."""
    monkeypatch.setattr("foretrace.tracer.clock.FIRST_S", 0.1)
    monkeypatch.setattr("foretrace.tracer.clock.POLL_S", 0.01)
    store = distributed.HashStore()
    began_ns = time.monotonic_ns()

    def fast() -> int:
        return 10**15 + round((time.monotonic_ns() - began_ns) * 1.01)

    def join(rank: int) -> RunClock:
        now = fast if rank else time.monotonic_ns
        found = synchronise(store, rank, 3, machine="b" if rank else "a", now=now)
        return RunClock(found, store, tmp_path, now=now)

    with ThreadPoolExecutor(3) as threads:
        clocks = list(threads.map(join, range(3)))
    try:
        assert [clock.is_shared for clock in clocks] == [True, False, False]
        time.sleep(0.5)
        before_ns, own_ns, after_ns = time.monotonic_ns(), fast(), time.monotonic_ns()
    finally:
        for clock in (clocks[1], clocks[2], clocks[0]):
            clock.close()
    for clock in clocks[1:]:
        shown = clock.shown()
        # A second of its own is 1/1.01 of a true one; 0.5 s of them at least were measured.
        assert shown.drift_ppb == pytest.approx(1e9 * (1 / 1.01 - 1), abs=4e9 * shown.uncertainty_ns / 0.5e9)
        assert not shown.applied
        stored_ns = own_ns + clock.span_shift_ns
        read_ns = stored_ns + shown.offset_ns + round(stored_ns * shown.drift_ppb * 1e-9)
        for found_ns in (read_ns, clock.mapping()(own_ns)):
            common_ns = found_ns + clock.epoch_ns
            assert before_ns - shown.uncertainty_ns <= common_ns <= after_ns + shown.uncertainty_ns
    assert clocks[1].shown() == clocks[2].shown()  # one measures for its machine


def test_without_rank_0_what_is_known_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have ended long before: nobody waits for it, and nothing fails."""
    monkeypatch.setattr("foretrace.tracer.clock.FIRST_S", 0.01)
    monkeypatch.setattr("foretrace.tracer.clock.PATIENCE", PATIENCE / 20)
    found = CommonClock(0, 5, 3, 1000, machine="b", is_shared=False, measures=True)
    clock = RunClock(found, distributed.HashStore())
    time.sleep(0.1)
    clock.close()
    assert clock.line() == ClockLine(1000, 5, 0.0, 3)


SCRIPT = """
import os, pathlib, sys, time

rank, true = int(os.environ["RANK"]), time.monotonic_ns
began = true()
if rank:
    time.monotonic_ns = lambda: 10**13 + round((true() - began) * 1.02)

import torch, torch.distributed as dist
import foretrace
from foretrace.tracer import clock

clock._BOOT_ID = pathlib.Path(sys.argv[1] + f".machine-{rank}")
clock._BOOT_ID.write_text(f"machine {rank}")
clock.FIRST_S = 0.2
dist.init_process_group("gloo")
with foretrace.record(sys.argv[1]):
    until = time.time() + 2
    done = torch.zeros(1)
    while not done.item():
        dist.barrier()
        time.sleep(0.01)
        done.fill_(time.time() > until)
        dist.all_reduce(done)
dist.destroy_process_group()
"""


def test_recorded_ranks_of_drifting_machines_meet_in_their_barriers(tmp_path: Path, ranks: Any) -> None:
    """Nobody leaves a barrier before everybody has come: with 2 % of drift on one side, hundreds would."""
    script, path = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(path)]
    result = ranks.run(command, ranks.env(), fresh=path, loads_torch=True)  # and foretrace, with its clock
    assert result.status == (0, 0), result.errors
    run = open_run(path)
    assert run.info.finished
    assert run.warnings == ()
    clock = run.info.clock[1]
    assert clock.drift_ppb == pytest.approx(1e9 * (1 / 1.02 - 1), rel=0.05)
    rows = [
        {row["sequence"]: row for row in run.spans([rank]).to_pylist() if row["category"] == "collective"}
        for rank in (0, 1)
    ]
    both = sorted(rows[0].keys() & rows[1].keys())
    assert len(both) > 20
    for sequence in both:
        a, b = (rows[rank][sequence] for rank in (0, 1))
        for one, other in ((a, b), (b, a)):
            ended_ns = one["start_ns"] + one["duration_ns"]
            assert ended_ns >= other["start_ns"] - clock.uncertainty_ns, sequence
    memory = run.memory().to_pylist()
    assert all(row["t_ns"] < 100e9 for row in memory)
