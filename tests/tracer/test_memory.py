"""The peak of memory within a step is what the allocator had, or said to be unknown."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.tracer import internals
from foretrace.tracer.memory import Counters, MemoryLog, Peak, PeakHook

MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("hold"), st.integers(0, 9)),
        st.tuples(st.sampled_from(["step", "reset", "other"]), st.just(0)),
    ),
    max_size=40,
)


@given(MOVES, st.integers(0, 9))
def test_a_peak_is_true_or_unknown(moves: list[tuple[str, int]], before: int) -> None:
    """Whatever a script allocates, frees and resets; *before* is a peak from before the recording."""
    current, counter, given_, true, peak = 0, before, 0, 0, Peak()
    for what, value in [*moves, ("step", 0)]:
        now = Counters(current, counter, given_)
        if what == "hold":
            given_ += max(value - current, 0)
            current = value
            counter, true = max(counter, current), max(true, current)
        elif what == "step":
            peak.look(now)
            known, most = peak.taken()
            assert known in (-1, true)
            assert most >= true
            true = current
        else:  # of this device, or of another one
            peak.look(now)
            counter, given_ = (current, 0) if what == "reset" else (counter, given_)
            peak.begin(Counters(current, counter, given_))


def test_a_script_that_resets_in_each_step_has_known_peaks() -> None:
    """Wherever in the step it does, as one that logs: even if each step is lower than the one before."""
    peak, found, given_ = Peak(), [], 0
    peak.begin(Counters(2, 2, 0))
    for highest in (9, 9, 5, 7):
        peak.begin(Counters(2, 2, given_))  # behind the reset
        given_ += highest - 2
        peak.look(Counters(2, highest, given_))
        found.append(peak.taken())
        peak.look(Counters(2, highest, given_))  # before the next one
    assert found == [(9, 9), (9, 9), (5, 5), (7, 7)]


def test_steps_that_do_alike_are_bounded_by_the_first() -> None:
    peak, found = Peak(), []
    peak.begin(Counters(2, 2, 0))
    for given_ in (7, 14, 15):
        peak.look(Counters(2, 9, given_))
        found.append(peak.taken())
    assert found == [(9, 9), (-1, 9), (-1, 3)]


@pytest.mark.parametrize("now", [Counters(2, 4, 20), Counters(2, 10, 3)])
def test_counters_that_were_reset_unseen_tell_nothing(now: Counters) -> None:
    peak = Peak()
    peak.begin(Counters(3, 10, 5))
    peak.look(now)
    assert peak.taken() == (-1, -1)


def test_a_reset_of_the_script_is_seen_and_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    held = {"current": 5, "peak": 5, "allocated": 5}

    def reset(device: int) -> str:
        held["peak"] = held["current"]
        return f"of {device}"

    monkeypatch.setattr(torch._C, "_accelerator_resetPeakStats", reset, raising=False)
    monkeypatch.setattr(
        torch.cuda,
        "memory_stats_as_nested_dict",
        lambda: {"allocated_bytes": {"all": dict(held)}, "reserved_bytes": {"all": {"current": 20}}},
    )
    log = MemoryLog()
    guards: Any = SimpleNamespace(guarded=lambda _, function: function)
    hook = PeakHook(log, guards)
    (name,) = {name for _, name in internals.counter_resets()} & {"_accelerator_resetPeakStats"}
    log.sample(on_cuda=True)
    for highest in (8, 6):
        held |= {"peak": max(held["peak"], highest), "allocated": held["allocated"] + highest - 5}
        log.sample(on_cuda=True)
        assert getattr(torch._C, name)(0) == "of 0"
    held |= {"peak": 7, "allocated": held["allocated"] + 2}
    log.sample(on_cuda=True)
    hook.remove()
    assert getattr(torch._C, name) is reset
    rows = log.table(0, lambda t: t).to_pylist()
    log.close()
    assert [row["bytes"] for row in rows if row["category"] == "peak"] == [5, 8, 6, 7]
    assert {row["bytes"] for row in rows if row["category"] == "reserved"} == {20}


@pytest.mark.parametrize("n_calls", [7, 8, 9, 100, 1000])
def test_a_long_training_keeps_samples_from_its_beginning_to_its_end(
    n_calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as are kept, within a half, and none far from the next."""
    log, most = MemoryLog(), 8
    monkeypatch.setattr("foretrace.tracer.memory.MOST_SAMPLES", most)
    for call in range(n_calls):
        monkeypatch.setattr("foretrace.tracer.memory.now_ns", lambda call=call: call)
        log.sample(on_cuda=False)
    rows = log.table(3, lambda t: 10 * t).to_pylist()
    log.close()
    moments = [row["t_ns"] // 10 for row in rows]
    assert moments[0] == 0
    assert min(n_calls, most // 2) <= len(moments) <= most
    assert all(0 < after - at <= 4 * n_calls / most for at, after in pairwise([*moments, n_calls]))
    assert {(row["rank"], row["category"]) for row in rows} == {(3, "total")}
    assert all(row["bytes"] > 2**20 for row in rows)  # of this process
