"""Nodes of several kinds in one machine."""

from pathlib import Path

import pytest

from foretrace.topologies.catalog import load_cluster
from foretrace.topologies.cluster import Cluster
from foretrace.topologies.errors import CatalogError
from foretrace.topologies.reach import Reach
from foretrace.topologies.wiring import fabric

MIXED = 'base = "dgx-h100"\nn_gpus = 64\n[[others]]\nmachine = "dgx-a100"\nnodes = 2\n'


def mixed(tmp_path: Path, text: str = MIXED) -> Cluster:
    path = tmp_path / "mixed.toml"
    path.write_text(text, encoding="utf-8")
    return load_cluster(path)


def test_the_last_nodes_are_of_the_other_kind(tmp_path: Path) -> None:
    cluster = mixed(tmp_path)
    assert [cluster.kind_of(node).device.name for node in range(8)] == ["h100-sxm"] * 6 + ["a100-80gb"] * 2
    assert cluster.describe()["others"] == [{"machine": "dgx-a100", "nodes": 2}]
    reach = Reach(fabric(cluster), range(64))
    own, theirs, both = (reach.shape(gpus) for gpus in (range(48), range(48, 64), range(64)))
    assert (own.intra_bytes_per_s, own.inter_bytes_per_s) == (450e9, 400e9)
    assert (theirs.intra_bytes_per_s, theirs.inter_bytes_per_s) == (300e9, 200e9)
    assert (both.intra_bytes_per_s, both.inter_bytes_per_s) == (300e9, 200e9)


def test_slower_devices_take_longer_and_the_smallest_memory_counts(tmp_path: Path) -> None:
    cluster, a100 = mixed(tmp_path), load_cluster("dgx-a100").device
    assert (cluster.slowdown(0), cluster.slowdown(47)) == (1.0, 1.0)
    assert 2.0 < cluster.slowdown(48) == cluster.slowdown(63) < 4.0
    assert cluster.device.memory_bytes == min(load_cluster("dgx-h100").device.memory_bytes, a100.memory_bytes)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (MIXED.replace("nodes = 2", "nodes = 8"), "8 nodes of other kinds in a machine of 8"),
        (MIXED.replace("nodes = 2", "nodes = 0"), "others: nodes = 0, at least 1"),
        (MIXED.replace("nodes = 2", "node = 2"), r"\[\[others\]\] number 1: nodes is missing"),
        (MIXED.replace("dgx-a100", "jean-zay-v100"), "have gpus_per_node = 4, its own 8"),
        (MIXED.replace("dgx-a100", "aws-p4d"), "have nics_per_node = 4, its own 8"),
        (MIXED.replace("dgx-a100", "abacus"), "abacus"),
    ],
)
def test_nodes_that_cannot_stand_together_are_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(CatalogError, match=said):
        mixed(tmp_path, text)
