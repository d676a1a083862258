"""The fluid network against a reference that takes small steps, and against laws of sharing."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis.strategies import composite, dictionaries, floats, integers, lists, sampled_from

from foretrace.simulator.errors import SimulationError
from foretrace.simulator.network.fluid import Fluid, max_min

LINKS = ["a", "b", "c", "d"]
LOADS = dictionaries(sampled_from(LINKS), sampled_from([0.25, 0.5, 1.0]), min_size=1)


class Arrival(NamedTuple):
    """A job: when it starts, how long it takes alone, and what it loads."""

    start_ns: int
    work_ns: int
    loads: Mapping[str, float]


@composite
def _arrivals(draw: object) -> list[Arrival]:
    one = lists(integers(0, 2000), min_size=1, max_size=4)
    starts = draw(one)  # type: ignore[operator]  # hypothesis' own
    return [Arrival(start, draw(integers(1, 3000)), draw(LOADS)) for start in starts]  # type: ignore[operator]


def run(arrivals: Sequence[Arrival], capacity: Mapping[str, float] | None = None) -> tuple[list[int], Fluid]:
    """Return when each job ends, and the network afterwards."""
    fluid = Fluid(capacity, watched=True)
    ends = [-1] * len(arrivals)
    waiting = sorted(range(len(arrivals)), key=lambda i: arrivals[i].start_ns)
    while waiting or fluid.next_end_ns() is not None:
        end_ns = fluid.next_end_ns()
        if waiting and (end_ns is None or arrivals[waiting[0]].start_ns <= end_ns):
            at = waiting.pop(0)
            for job in fluid.advance(arrivals[at].start_ns):
                ends[int(str(job))] = fluid.now_ns
            fluid.start(at, arrivals[at].work_ns, arrivals[at].loads)
        elif end_ns is not None:
            for job in fluid.advance(end_ns):
                ends[int(str(job))] = fluid.now_ns
    return ends, fluid


def slow_rates(flows: Mapping[int, Mapping[str, float]], capacity: Mapping[str, float]) -> dict[int, float]:
    """Raise every rate by little steps for as long as all its links bear it: max-min by brute force."""
    rates = dict.fromkeys(flows, 0.0)
    step, rising = 1 / 256, set(flows)
    while rising:
        for job in sorted(rising):
            tried = {**rates, job: rates[job] + step}
            used = {
                link: sum(tried[other] * flow.get(link, 0.0) for other, flow in flows.items())
                for link in flows[job]
            }
            if tried[job] > 1 or any(used[link] > capacity.get(link, 1.0) + 1e-9 for link in used):
                rising.discard(job)
            else:
                rates = tried
    return rates


def slow_run(arrivals: Sequence[Arrival], capacity: Mapping[str, float]) -> list[float]:
    """Return when each job ends by walking through time 32 nanoseconds at a time."""
    tick, now = 32.0, 0.0
    left = [float(arrival.work_ns) for arrival in arrivals]
    ends = [-1.0] * len(arrivals)
    known: dict[tuple[int, ...], dict[int, float]] = {}
    while min(ends) < 0:
        flows = {
            i: arrival.loads for i, arrival in enumerate(arrivals) if arrival.start_ns <= now and ends[i] < 0
        }
        rates = known.setdefault(tuple(flows), slow_rates(flows, capacity))
        now += tick
        for job, rate in rates.items():
            left[job] -= rate * tick
            if left[job] <= 0:
                ends[job] = now
    return ends


@settings(max_examples=15)
@given(arrivals=_arrivals(), share=sampled_from([0.25, 0.5, 1.0]))
def test_the_network_agrees_with_small_steps(arrivals: list[Arrival], share: float) -> None:
    ends, _ = run(arrivals, {"a": share})
    slow = slow_run(arrivals, {"a": share})
    for found, expected, arrival in zip(ends, slow, arrivals, strict=True):
        assert found == pytest.approx(expected, rel=0.03, abs=120), arrival


@given(flows=lists(LOADS, min_size=1, max_size=8))
def test_no_link_is_overfull_and_every_job_below_full_rate_is_held_by_a_full_link(
    flows: list[dict[str, float]],
) -> None:
    rates = max_min(dict(enumerate(flows)))
    used = {link: sum(rates[i] * flow.get(link, 0.0) for i, flow in enumerate(flows)) for link in LINKS}
    assert all(share <= 1 + 1e-9 for share in used.values())
    for i, flow in enumerate(flows):
        held = [
            link
            for link in flow
            if used[link] >= 1 - 1e-9
            and all(rates[i] >= rates[j] - 1e-9 for j, other in enumerate(flows) if link in other)
        ]
        assert rates[i] == 1 or held, "max-min: nobody on one of its full links is faster"


@given(work=integers(1, 10**9), n=integers(1, 8))
def test_equal_jobs_on_one_link_take_that_many_times_as_long(work: int, n: int) -> None:
    ends, _ = run([Arrival(0, work, {"a": 1.0})] * n)
    assert ends == [n * work] * n


@given(arrivals=_arrivals())
def test_without_contention_nobody_is_slower(arrivals: list[Arrival]) -> None:
    ends, _ = run(arrivals)
    alone = [arrival.start_ns + arrival.work_ns for arrival in arrivals]
    assert all(end >= least for end, least in zip(ends, alone, strict=True))
    apart = [
        Arrival(a.start_ns, a.work_ns, {f"{link}{i}": 1.0 for link in a.loads})
        for i, a in enumerate(arrivals)
    ]
    assert run(apart)[0] == alone


@given(arrivals=_arrivals())
def test_jobs_elsewhere_change_nothing(arrivals: list[Arrival]) -> None:
    elsewhere = Arrival(0, 5000, {"z": 1.0})
    assert run([*arrivals, elsewhere])[0][:-1] == run(arrivals)[0]


@given(arrivals=_arrivals(), share=floats(0.1, 1.0))
def test_a_narrower_link_lets_the_last_end_no_sooner(arrivals: list[Arrival], share: float) -> None:
    """Of jobs on one link; with several, a slow one may hold a job up and let others go first."""
    one = [arrival._replace(loads={"a": 1.0}) for arrival in arrivals]
    wide, narrow = run(one)[0], run(one, {"a": share})[0]
    assert all(slow >= fast for slow, fast in zip(narrow, wide, strict=True))


@given(arrivals=_arrivals())
def test_what_the_links_carried_is_the_work_of_the_jobs(arrivals: list[Arrival]) -> None:
    _, fluid = run(arrivals)
    assert all(0 < span.used <= 1 + 1e-9 for span in fluid.spans)
    for link in LINKS:
        carried = sum((s.end_ns - s.start_ns) * s.used for s in fluid.spans if s.link == link)
        work = sum(a.work_ns * a.loads.get(link, 0.0) for a in arrivals)
        assert carried == pytest.approx(work, abs=2.0 * len(arrivals))


def test_a_link_that_fails_and_comes_back_delays_by_as_long() -> None:
    fluid = Fluid()
    fluid.start("job", 1000, {"a": 1.0})
    assert fluid.advance(400) == []
    fluid.set_capacity("a", 0.0)
    assert fluid.next_end_ns() is None
    fluid.advance(900)
    fluid.set_capacity("a", 1.0)
    assert fluid.next_end_ns() == 1500
    assert fluid.advance(1500) == ["job"]


def test_mistakes_are_refused() -> None:
    fluid = Fluid()
    fluid.start("job", 10, {"a": 1.0})
    with pytest.raises(SimulationError, match="job 'job' is under way already"):
        fluid.start("job", 10, {})
    with pytest.raises(SimulationError, match="cannot move to 11 ns; the next job ends at 10 ns"):
        fluid.advance(11)
    with pytest.raises(SimulationError, match=r"capacity -1\.0 must not be below zero"):
        fluid.set_capacity("a", -1.0)
    with pytest.raises(SimulationError, match="must not be below zero"):
        fluid.start("other", -1, {})
