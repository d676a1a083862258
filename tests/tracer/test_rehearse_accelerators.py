"""Scripts that ask the machine which device it has, in which type it can compute, and profile it."""

from pathlib import Path
from types import ModuleType

from tests.tracer import chosen_device, old_names
from tracer.rehearse.rehearsing import Asked, rehearse
from traces.rehearsal import RankTables, read_rank, rehearsal_folder


def _rehearsed(script: ModuleType, how: str, folder: Path) -> tuple[str, RankTables]:
    """Return what the script printed, and what it did."""
    rehearse(Asked(command=(str(script.__file__), how), world_size=2, ranks=(1,), warmup=0, steps=2), folder)
    tables = rehearsal_folder(folder)
    return (tables / "rank-00001" / "output.log").read_text().splitlines()[-1], read_rank(tables, 1)


def test_who_asks_for_the_device_does_what_is_done_by_who_names_it(tmp_path: Path) -> None:
    """On the GPU, over NCCL, in bf16; all places to ask say the same of memory."""
    said, asked = _rehearsed(chosen_device, "by_question", tmp_path / "asked")
    _, named = _rehearsed(chosen_device, "by_name", tmp_path / "named")
    assert said == "cuda nccl 1 True"
    assert asked.events.equals(named.events)
    assert asked.works.equals(named.works)
    assert asked.messages.equals(named.messages)
    products = [work for work in asked.works.to_pylist() if work["kind"] == "gemm"]
    assert {work["dtype"] for work in products} == {"bf16"}
    size = (chosen_device.WIDTH + 1) * chosen_device.WIDTH * 2
    assert size in {message["size_bytes"] for message in asked.messages.to_pylist()}


def test_old_names_of_types_do_what_devices_do(tmp_path: Path) -> None:
    """Tensors made, moved and told apart by ``torch.cuda.FloatTensor``, made beside others, by default."""
    said, old = _rehearsed(old_names, "old", tmp_path / "old")
    _, new = _rehearsed(old_names, "new", tmp_path / "new")
    kinds, beside, default = [False, True, False, True], [False, False, True, True], [True, False]
    assert said == f"{kinds + beside + default} [1, 2] torch.float16"
    assert old.events.equals(new.events)
    assert old.works.equals(new.works)
