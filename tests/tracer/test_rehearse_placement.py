"""What a rehearsal tells scripts and libraries of where their tensors are."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tests.rehearsals import rehearse
from tests.tracer import placed
from torch._subclasses.fake_tensor import FakeTensorMode

from foretrace.tracer.rehearse.device.memory import rounded
from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.traces.rehearsal import RankTables, read_rank, rehearsal_folder

SCRIPT = Path(__file__).parent / "placed.py"
LOCAL_RANKS = 8


def _rehearsed(folder: Path, name: str, *, rank: int, steps: int) -> tuple[list[list[str]], RankTables]:
    """Return what the training *name* printed on *rank*, word by word, and what it did."""
    asked = Asked(
        command=(str(SCRIPT), name), world_size=16, ranks=(rank,), warmup=0, steps=steps,
        local_world_size=LOCAL_RANKS,
    )  # fmt: skip
    rehearse(asked, folder / "run")
    tables = rehearsal_folder(folder / "run")
    printed = (tables / f"rank-{rank:05d}" / "output.log").read_text().splitlines()
    return [line.split() for line in printed], read_rank(tables, rank)


def _held(pool: Sequence[torch.Tensor]) -> int:
    """Return the bytes of all storages on a GPU, each in whole blocks of its allocator."""
    storages = {one.untyped_storage()._cdata: one for one in pool if one.device.type == "cuda"}
    return sum(rounded(one.untyped_storage().nbytes()) for one in storages.values())


def test_tensors_are_where_torch_has_those_of_a_gpu(tmp_path: Path) -> None:
    """Random programs on both devices; torch follows fake tensors of a GPU by itself, without gradients.

    That goes for what a script is told of each tensor, and for what counts as memory of the device.
    """
    printed, _ = _rehearsed(tmp_path, "programs", rank=0, steps=1)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        expected = [f"{seed} {line}" for seed in range(placed.SEEDS) for line in placed.devices(seed, _held)]
    assert [" ".join(words) for words in printed[: len(expected)]] == expected
    assert {line.rpartition(": ")[2] for line in expected} == {"cpu", "cuda:0"}


@pytest.fixture(scope="module")
def branches(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[str]], RankTables]:
    """A script with a branch for a GPU and one for the host, in each way to ask."""
    return _rehearsed(tmp_path_factory.mktemp("branches"), "branches", rank=9, steps=len(placed.ASKED))


def test_a_script_is_told_a_gpu_where_it_has_put_its_tensors_there(
    branches: tuple[list[list[str]], RankTables],
) -> None:
    """Input and parameters before they are moved and after, a result, and its copy on the host."""
    printed = iter(branches[0])
    for name in placed.ASKED:
        assert next(printed) == [name, "False", "False"]
        assert next(printed) == [name, "True", "True", "True", "False"]


def test_the_branch_of_a_gpu_is_the_one_that_is_written_down(
    branches: tuple[list[list[str]], RankTables],
) -> None:
    """Two products of 2 x rows x width x width forward, as often as a model is called, and three backward.

    The one of the first layer asks for no gradient of its input.
    """
    _, tables = branches
    works, places = tables.works.to_pylist(), tables.places.to_pylist()
    events = [row for row in tables.events.to_pylist() if row["what"] == 0]
    flops = {"forward": 0, "backward": 0}
    for event in events:
        kind = places[event["place"]]["kind"]
        if works[event["item"]]["kind"] == "gemm" and places[event["place"]]["step"] >= 0:
            flops[kind] += works[event["item"]]["flops"]
    product = 2 * placed.ROWS * placed.WIDTH**2
    n_ways = len(placed.ASKED)
    assert flops == {"forward": 2 * 2 * n_ways * product, "backward": 3 * n_ways * product}


def test_what_torch_moves_to_the_device_is_told_to_be_there(tmp_path: Path) -> None:
    """DTensor, both FSDPs, DDP and tensor parallelism; with gradients and states, but counters of steps."""
    printed, _ = _rehearsed(tmp_path, "moved_by_torch", rank=9, steps=5)
    on_device = [["grad", "cuda:1", "True"], ["states", "cpu", "cuda:1"]]
    assert printed == [
        ["mesh", "cuda"],
        ["sharded", "cuda:1"],
        *on_device * 4,
        ["before", "cpu"],
        ["grad", "cpu", "False"],
        ["states", "cpu", "cpu"],
    ]


def test_the_device_of_a_tensor_can_be_handed_on(tmp_path: Path) -> None:
    """To generators, defaults, contexts, autocast, modules: in fp16, which CUDA takes where none is said."""
    printed, _ = _rehearsed(tmp_path, "named", rank=9, steps=1)
    assert [" ".join(words) for words in printed] == [
        "generator cuda:1 cpu",
        "default cuda:1 cuda:1",
        "default cuda:1 cuda:1",
        "default cpu cpu",
        "current 1",
        "autocast torch.float16 torch.float16",
        "back cpu cuda:1 cuda:1",
        "grad cuda:1 True",
        "states cpu cuda:1",
    ]


def test_a_list_that_a_script_puts_on_the_host_is_there(tmp_path: Path) -> None:
    """Whether or not it has spoken of a GPU by then, and whether or not a model holds it that is called."""
    printed, _ = _rehearsed(tmp_path, "listed", rank=9, steps=1)
    assert [" ".join(words) for words in printed] == [
        "early cpu cpu cpu",
        "grad cuda:1 True",
        "states cpu cuda:1",
        "kept cpu",
    ]
