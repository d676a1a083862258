"""Links between switches: how full transfers make them, and that they never hold up what fits through
NICs."""

from dataclasses import replace

import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis.strategies import sampled_from
from tests.simulator.predicted import simulate

from foretrace.simulator.errors import SimulationError
from foretrace.simulator.job import Job
from foretrace.simulator.models.sources import load_model
from foretrace.simulator.network.cost import Network
from foretrace.simulator.simulate import Simulation
from foretrace.simulator.variation import Variation
from foretrace.topologies.catalog import load_cluster
from foretrace.topologies.cluster import Cluster
from foretrace.topologies.fabric import FabricSpec
from foretrace.traces.layout import Layout

SPECS = {
    "rail": FabricSpec(kind="rail", nodes_per_leaf=2, oversubscription=2.0),
    "fat-tree": FabricSpec(kind="fat-tree", nodes_per_leaf=2),
    "dragonfly": FabricSpec(kind="dragonfly", nodes_per_leaf=1, group_nodes=2, group_bytes_per_s=50e9),
    "switch": FabricSpec(kind="switch"),
    "torus": FabricSpec(kind="torus", shape=(4,)),
}


def machine(kind: str, n_gpus: int = 32) -> Cluster:
    return replace(load_cluster("dgx-h100", n_gpus), fabric_spec=SPECS[kind])


MODEL = replace(load_model("llama3.2-1b"), n_layers=4)


def run(kind: str, engine: str, layout: Layout, *, folded: bool = True) -> Simulation:
    job = Job(model=MODEL, layout=layout, cluster=machine(kind), global_batch=16, seq_len=512)
    return simulate(job, engine=engine, folded=folded)


def test_a_group_that_stays_under_a_leaf_fills_nothing_above_it() -> None:
    net = Network(machine("rail"))
    assert net.uplinks(range(8)) == {}
    assert net.uplinks(range(0, 16, 8)) == {}
    assert {below for below, _ in net.uplinks(range(0, 32, 8))} == {"leaf:0", "leaf:8"}


@pytest.mark.parametrize(("kind", "full"), [("rail", 1.0), ("fat-tree", 1.0), ("dragonfly", 1.0)])
def test_all_groups_together_fill_the_narrowest_layer_and_no_more(kind: str, full: float) -> None:
    """Eight data-parallel groups at their fair share: what the fabric was asked for is what it carries."""
    net = Network(machine(kind))
    used: dict[tuple[str, str], float] = {}
    for local in range(8):
        for link, share in net.uplinks(range(local, 32, 8)).items():
            used[link] = used.get(link, 0.0) + share
    assert max(used.values()) == pytest.approx(full)


def test_a_group_of_all_fills_as_much_as_all_groups() -> None:
    shares = [*Network(machine("rail")).uplinks(range(32)).values()]
    assert shares
    assert shares == pytest.approx([1.0] * len(shares))


@pytest.mark.parametrize("kind", ["switch", "torus"])
def test_fabrics_without_a_layer_above_have_none(kind: str) -> None:
    assert Network(machine(kind)).uplinks(range(32)) == {}


@given(kind=sampled_from(("rail", "fat-tree", "dragonfly")), dp=sampled_from((4, 8)))
def test_links_between_switches_never_hold_up_what_fits_through_nics(kind: str, dp: int) -> None:
    layout = Layout(dp=dp, pp=4 if dp == 8 else 1, tp=1 if dp == 8 else 8)
    shared, alone = (run(kind, engine, layout) for engine in ("contended", "contended-compiled"))
    assert shared.spans["duration_ns"].equals(alone.spans["duration_ns"])


def test_how_full_they_were_is_kept_and_the_same_folded_or_not() -> None:
    layout = Layout(dp=4, tp=8)
    folded, all_ranks = (run("rail", "contended", layout, folded=folded).links for folded in (True, False))
    assert folded is not None
    assert all_ranks is not None
    leaves = [links.filter(pc.equal(links["tier"], "leaf")) for links in (folded, all_ranks)]
    assert set(leaves[0]["rank"].to_pylist()) == set(range(16))
    assert 0 < pc.max(leaves[0]["used"]).as_py() <= 1
    for links in leaves:
        assert pc.max(links["used"]).as_py() == pytest.approx(pc.max(leaves[0]["used"]).as_py(), rel=1e-6)
    busy = [
        sum(
            row["used"] * (row["end_ns"] - row["start_ns"])
            for row in links.to_pylist()
            if (row["rank"], row["direction"]) == (0, "out")
        )
        for links in leaves
    ]
    assert busy[0] == pytest.approx(busy[1], rel=1e-3)


def slowed(kind: str, change: str, engine: str = "contended") -> float:
    job = Job(
        model=MODEL,
        layout=Layout(dp=4, tp=8),
        cluster=machine(kind),
        global_batch=16,
        seq_len=512,
        variation=Variation(link_changes=change),
    )
    return float(simulate(job, engine=engine, only_figures=True).summary["step_time_s"])


def test_a_leaf_that_loses_width_holds_up_everyone_behind_it() -> None:
    """All data-parallel groups of an oversubscribed fabric cross; a leaf with half its width halves them."""
    assert slowed("rail", "0:leaf:0.5", "contended-compiled") == slowed("rail", "0:leaf:0.5")
    well = slowed("rail", "")
    half, tenth, later = (slowed("rail", change) for change in ("0:leaf:0.5", "0:leaf:0.1", "0:leaf:0.1@1s"))
    assert well < half < tenth
    assert later == well
    assert slowed("rail", "0:leaf:0,0:leaf:1@1s") > well


@pytest.mark.parametrize(
    ("kind", "change", "engine", "said"),
    [
        ("rail", "99:leaf:0.5", "contended", "has no leaf 99 with a way upward"),
        ("switch", "0:leaf:0.5", "contended", "has no leaf 0 with a way upward"),
        ("rail", "0:spine:0.5", "contended", "has no spine 0 with a way upward"),
        ("rail", "0:leaf:0.5", "event", "--engine contended"),
        ("rail", "0:roof:0.5", "contended", "leaf and spine"),
    ],
)
def test_switches_that_are_not_there_are_named(kind: str, change: str, engine: str, said: str) -> None:
    with pytest.raises(SimulationError, match=said):
        slowed(kind, change, engine)


@pytest.mark.parametrize(
    ("sharding", "kinds"), [("ddp", {"all_reduce"}), ("fsdp", {"all_gather", "reduce_scatter"})]
)
def test_what_leaves_a_node_is_what_its_collectives_move(sharding: str, kinds: set[str]) -> None:
    """One GPU of each of two nodes: ``S`` of an all-reduce, ``S/2`` of a gather; NICs at 0.95 of 50 GB/s."""
    job = Job(
        model=MODEL,
        layout=Layout(dp=2, tp=8),
        cluster=load_cluster("dgx-h100", 16),
        global_batch=4,
        seq_len=512,
        sharding=sharding,
        nccl_proto="simple",
    )
    found = simulate(job, engine="contended")
    spans = [row for row in found.spans.to_pylist() if (row["rank"], row["axis"]) == (0, "dp")]
    assert {row["kind"] for row in spans} == kinds
    moved = sum(row["size_bytes"] / (1 if row["kind"] == "all_reduce" else 2) for row in spans)
    assert found.links is not None
    carried = sum(
        row["used"] * (row["end_ns"] - row["start_ns"]) * 0.95 * 50
        for row in found.links.to_pylist()
        if (row["rank"], row["tier"], row["direction"]) == (0, "far", "out")
    )
    assert carried == pytest.approx(moved, rel=1e-3)
