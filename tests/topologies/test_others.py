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


def test_each_kind_is_a_machine_of_its_own_with_the_smallest_memory(tmp_path: Path) -> None:
    cluster = mixed(tmp_path)
    h100, a100 = cluster.kinds
    assert [cluster.kind_at(gpu) for gpu in (0, 47, 48, 63)] == [0, 0, 1, 1]
    assert (h100.device.name, a100.device.name) == ("h100-sxm", "a100-80gb")
    assert (h100.intra.name, a100.intra.name) == ("nvlink4", "nvlink3")
    least = min(load_cluster(name).device.memory_bytes for name in ("dgx-h100", "dgx-a100"))
    assert {kind.device.memory_bytes for kind in (cluster, *cluster.kinds)} == {least}
    assert load_cluster("dgx-h100").kinds == (load_cluster("dgx-h100"),)


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
