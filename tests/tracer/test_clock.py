"""Ranks of several machines on one clock: offsets that are known are found, within the stated uncertainty."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest

from foretrace.tracer.clock import CommonClock, machine_id, synchronise

distributed = pytest.importorskip("torch.distributed")


def clocks(machines: list[str], offsets_ns: dict[str, int]) -> list[CommonClock]:
    """Synchronise one thread per rank; the clock of each machine is wrong by its offset."""
    store = distributed.HashStore()

    def own(machine: str) -> Callable[[], int]:
        return lambda: time.monotonic_ns() - offsets_ns[machine]

    def join(rank: int) -> CommonClock:
        machine = machines[rank]
        return synchronise(store, rank, len(machines), machine=machine, now=own(machine))

    with ThreadPoolExecutor(len(machines)) as threads:
        return list(threads.map(join, range(len(machines))))


def test_ranks_of_one_machine_share_its_clock_exactly() -> None:
    found = clocks(["a"] * 3, {"a": 0})
    assert len({clock.epoch_ns for clock in found}) == 1
    assert all((clock.offset_ns, clock.uncertainty_ns) == (0, 0) for clock in found)
    assert all(0 <= time.monotonic_ns() + clock.shift_ns < 60e9 for clock in found)


def test_offsets_between_machines_are_found_within_their_uncertainty() -> None:
    offsets = {"a": 0, "b": 5_000_000, "c": -86_400_000_000_000}
    machines = ["a", "b", "b", "c", "a"]
    found = clocks(machines, offsets)
    for machine, clock in zip(machines, found, strict=True):
        assert abs(clock.offset_ns - offsets[machine]) <= clock.uncertainty_ns, machine
        assert clock.uncertainty_ns < 1_000_000_000  # a day of offset, to a second
        assert (machine == "a") == (clock.uncertainty_ns == 0)
    assert replace(found[1], measures=found[2].measures) == found[2]
    assert sorted(clock.measures for clock in found[1:3]) == [False, True]  # one for its machine


def test_a_rank_that_does_not_come_is_not_waited_for_forever() -> None:
    with pytest.raises(RuntimeError):
        synchronise(distributed.HashStore(), 0, 2, timeout=timedelta(milliseconds=50))


def test_a_machine_knows_itself() -> None:
    assert machine_id() == machine_id() != ""
