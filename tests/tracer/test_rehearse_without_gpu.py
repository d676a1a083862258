"""A script that trains on a GPU where there is one, rehearsed as it runs where there is none."""

from pathlib import Path

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.traces.rehearsal import RankTables, read_rank, rehearsal_folder

SCRIPT = Path(__file__).parent / "where_there_is.py"


def _rehearsed(folder: Path, how: str, device: str, *, has_gpu: bool) -> RankTables:
    asked = Asked(command=(str(SCRIPT), how, device), world_size=2, ranks=(0,), has_gpu=has_gpu)
    rehearse(asked, folder)
    return read_rank(rehearsal_folder(folder), 0)


@pytest.mark.parametrize(("device", "dtype"), [("cuda", "bf16"), ("cpu", "fp32")])
def test_who_asks_does_what_is_done_by_who_names_the_device(tmp_path: Path, device: str, dtype: str) -> None:
    """All places to ask say the same, which the script holds itself."""
    has_gpu = device == "cuda"
    asked = _rehearsed(tmp_path / "asked", "asked", "", has_gpu=has_gpu)
    named = _rehearsed(tmp_path / "named", "named", device, has_gpu=has_gpu)
    for part in ("events", "works", "messages", "places"):
        assert getattr(asked, part).equals(getattr(named, part))
    products = [work for work in asked.works.to_pylist() if work["kind"] == "gemm"]
    assert {work["dtype"] for work in products} == {dtype}


def test_who_wants_a_gpu_all_the_same_ends_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(RehearsalError, match=r"where_there_is\.py:\d+: .* GPU.* --without-gpu"):
        _rehearsed(tmp_path / "run", "named", "cuda", has_gpu=False)
    assert not (tmp_path / "run").exists()
