"""Which rank runs on which GPU."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis.strategies import integers, sampled_from

from foretrace.topologies.catalog import load_cluster
from foretrace.topologies.errors import CatalogError
from foretrace.topologies.placement import POLICIES, place

CLUSTER = load_cluster("dgx-h100", 40)


@given(policy=sampled_from(sorted(POLICIES)), n_ranks=integers(1, 40))
def test_every_rank_has_a_gpu_of_its_own(policy: str, n_ranks: int) -> None:
    gpus = place(n_ranks, CLUSTER, policy)
    assert len(set(gpus)) == len(gpus) == n_ranks
    assert set(gpus) <= set(range(40))


def test_packed_ranks_are_neighbours_and_spread_ranks_are_not() -> None:
    nodes = {policy: [CLUSTER.node_of(gpu) for gpu in place(5, CLUSTER, policy)] for policy in POLICIES}
    assert nodes == {"packed": [0] * 5, "spread": [0, 1, 2, 3, 4], "rail": [0, 1, 2, 3, 4]}


def test_rails_are_filled_within_the_nodes_that_share_leaves() -> None:
    cluster = load_cluster("dgx-h100", 8 * 64)
    gpus = place(8 * 64, cluster, "rail")
    assert list(gpus[:32]) == list(range(0, 256, 8))
    assert set(gpus[:256]) == set(range(256))


def test_a_file_says_where_each_rank_goes(tmp_path: Path) -> None:
    path = tmp_path / "map.txt"
    path.write_text("3, 2\n1 0", encoding="utf-8")
    assert place(4, CLUSTER, str(path)) == (3, 2, 1, 0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0 1 2", "placement of 3 ranks; there are 4"),
        ("0 1 2 two", "'two' is not the number of a GPU"),
        ("0 1 1 2", "placement gives gpu:1 to two ranks"),
        ("0 0 1 2", "placement gives gpu:0 to two ranks"),
        ("0 1 2 40", "placement on gpu:40: dgx-h100 has 0 to 39"),
    ],
)
def test_a_file_that_is_no_placement_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "map.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(CatalogError, match=says):
        place(4, CLUSTER, str(path))


def test_a_folder_is_no_placement(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match=r"cannot be read: Is a directory$"):
        place(4, CLUSTER, str(tmp_path))


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(CatalogError, match="placement 'pakced': one of packed, spread, rail"):
        place(4, CLUSTER, "pakced")
    with pytest.raises(CatalogError, match=r"map\.txt cannot be read"):
        place(4, CLUSTER, "nowhere/map.txt")
