"""Bus bandwidth is held against what links allow: said by the run, or by a person."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis.strategies import integers

from foretrace.traces.analysis.collectives import bandwidths, bus_limit, parse_limit
from foretrace.traces.analysis.everything import analysis
from foretrace.traces.analysis.findings import findings
from foretrace.traces.errors import RunError
from foretrace.traces.info import RunInfo
from foretrace.traces.layout import Group
from foretrace.traces.run import Part, Run
from foretrace.traces.store import open_run, write_run
from foretrace.traces.timeline import MEMORY, empty, timeline

MACHINE = {
    "gpus_per_node": 8,
    "nics_per_node": 8,
    "intra": {"bandwidth_bytes_per_s": 450e9},
    "nic": {"bandwidth_bytes_per_s": 50e9},
}


def described(cluster: dict[str, object] | None) -> Run:
    """Return a run without spans on a machine."""
    info = RunInfo(origin="simulated", world_size=64, cluster=cluster)
    return Run("run", info, [Part(0, empty)], MEMORY.empty_table(), ())


@given(first=integers(0, 7), n=integers(2, 8))
def test_a_group_within_a_node_has_the_link_of_a_gpu(first: int, n: int) -> None:
    """Whoever is in it."""
    assert bus_limit(described(MACHINE), range(first - first % 8, first - first % 8 + n)) == 450e9


def test_a_group_between_nodes_shares_its_nics() -> None:
    """One rank per node has one NIC; all eight have all eight, up to what a GPU carries."""
    run = described(MACHINE)
    assert bus_limit(run, range(0, 64, 8)) == 50e9
    assert bus_limit(run, range(16)) == 400e9
    assert bus_limit(run, [0, 1, 8, 9]) == 100e9
    assert bus_limit(described(None), range(8)) is None
    assert bus_limit(described({**MACHINE, "nic": None}), range(16)) is None


@pytest.mark.parametrize("text", ["400", "400 GB", "fast", "0 GB/s", "-3 GB/s", "1 GFLOP/s"])
def test_a_limit_without_a_unit_is_refused(text: str) -> None:
    """With what would work."""
    with pytest.raises(RunError, match=r"e\.g\. '400 GB/s'"):
        parse_limit(text)


def test_slow_collectives_are_said_with_what_they_cost(tmp_path: Path) -> None:
    """64 MB over 8 ranks in 10 ms is 11.2 GB/s of bus bandwidth: 11 % of 100."""
    n = 8
    spans = timeline(
        {
            "rank": list(range(n)) * 2,
            "category": ["collective"] * n + ["step"] * n,
            "kind": ["all_reduce"] * n + ["step"] * n,
            "name": [""] * 2 * n,
            "stream": ["dp"] * n + ["step"] * n,
            "start_ns": [0] * 2 * n,
            "duration_ns": [10_000_000] * n + [20_000_000] * n,
            "axis": ["dp"] * n + [""] * n,
            "group": [0] * n + [-1] * n,
            "sequence": [0] * n + [-1] * n,
            "size_bytes": [64_000_000] * n + [0] * n,
            "step": [0] * 2 * n,
        }
    )
    info = RunInfo(origin="recorded", world_size=n, groups=(Group(id=0, axis="dp", ranks=tuple(range(n))),))
    run = open_run(write_run(tmp_path / "run", info, spans))
    (row,) = bandwidths(run, limit_bytes_per_s=100e9)
    assert row["share_of_limit"] == pytest.approx(0.112)
    assert bandwidths(run)[0]["share_of_limit"] is None
    (slow,) = (one for one in findings(run, limit_bytes_per_s=100e9) if one.what == "slow:dp")
    assert slow.share == pytest.approx(0.5 * (1 - 0.112))
    assert "reaches 11.2 GB/s of the 100 GB/s of its links: at most " in slow.text
    path = analysis(run)["critical_path"]
    assert path["what_if_s"]["all_reduce dp"] == {"half": 0.015, "none": 0.01}
