"""Scripts that ask the machine which device it has, in which type it computes, and how much fits."""

import json
from pathlib import Path
from types import ModuleType

import pytest
from tests.rehearsals import rehearse
from tests.tracer import chosen_device, old_names

from foretrace.tracer.rehearse.device.host import WORKSPACE_BYTES
from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.tracer.rehearse.words import explain
from foretrace.traces.rehearsal import RankTables, read_rank, read_rehearsal, rehearsal_folder


def _rehearsed(script: ModuleType, how: str, folder: Path) -> tuple[str, RankTables]:
    """Return what the script printed, and what it did."""
    rehearse(Asked(command=(str(script.__file__), how), world_size=2, ranks=(1,), warmup=0, steps=2), folder)
    tables = rehearsal_folder(folder)
    return (tables / "rank-00001" / "output.log").read_text().splitlines()[-1], read_rank(tables, 1)


def test_who_asks_for_the_device_does_what_is_done_by_who_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the GPU, over NCCL, in bf16; all places to ask say the same of memory."""
    monkeypatch.chdir(tmp_path)  # the script writes a snapshot
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


@pytest.mark.parametrize("how", old_names.USES)
def test_old_names_of_types_tell_tensors_apart_move_them_and_make_none(tmp_path: Path, how: str) -> None:
    """Libraries ask whether a tensor is a ``torch.cuda.FloatTensor``; who makes one is told so in a line.

    A torch that is built for GPUs makes it: such a script comes to its end, and has trained nothing.
    """
    refused = r"old_names\.py:\d+: types of tensors that name a GPU"
    said = refused if pytest.importorskip("torch").version.cuda is None else "nothing to rehearse"
    with pytest.raises(RehearsalError, match=said):
        _rehearsed(old_names, how, tmp_path / "run")


def test_who_looks_for_what_fits_finds_it(tmp_path: Path) -> None:
    """Three times 2 ** 22 rows of 4 KiB are within 80 GiB; peaks are told from when they were reset.

    What was let go stays reserved, and is not free, until the cache is emptied.
    """
    folder, script = tmp_path / "run", Path(__file__).parent / "finding_batch.py"
    rehearse(Asked(command=(str(script),), world_size=2, ranks=(1,), warmup=0, steps=2), folder)
    said = (rehearsal_folder(folder) / "rank-00001" / "output.log").read_text().splitlines()[-1]
    assert json.loads(said) == {
        "rows": 2**22,
        "total": 80,
        "is within": True,
        "peak of 4": 4,
        "reserved after 4": pytest.approx(4, abs=0.02),
        "peak of 2": 2,
        "reserved after 2": pytest.approx(4, abs=0.02),
        "free": 4,
    }


TOO_LARGE = """
import torch

model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters())
for step in range(3):
    loss = model(torch.ones(4, 8, device="cuda")).sum()
    try:
        held = torch.empty(2**30, 30, device="cuda") if step == 0 else None
    except torch.OutOfMemoryError:
        pass
    loss.backward()
    optimizer.step()
"""


def test_what_did_not_fit_is_held_by_nobody(tmp_path: Path) -> None:
    """A script that has run out of memory and goes on with less needs only that, and two workspaces."""
    script = tmp_path / "train.py"
    script.write_text(TOO_LARGE)
    found = rehearse(Asked(command=(str(script),), world_size=1), tmp_path / "run")
    assert found.memory["0"]["reserved_bytes"] < 2**24 + 2 * WORKSPACE_BYTES


NUMBERED = """
import torch

class Mine(torch.Tensor):
    pass

class Graphs:
    is_cuda = True  # says so, and is no tensor, as a batch of graphs

    def __init__(self, nodes):
        self.nodes = nodes

class Model(torch.nn.Linear):
    def forward(self, graphs):
        return super().forward(graphs.nodes)

device = {device}
model = Model(4, 4).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    nodes = torch.randn(2, 4, device=device)
    model(Graphs(nodes{own})).sum().backward()
    optimizer.step()
print(device, nodes.device, model.weight.device)
"""


@pytest.mark.parametrize(
    ("device", "own"), [('torch.device("cuda", 0)', ""), ("torch.device(0)", ""), ("0", ".as_subclass(Mine)")]
)
def test_a_bare_number_names_a_gpu_and_what_is_no_tensor_none(tmp_path: Path, device: str, own: str) -> None:
    """fastai asks so for its device, and puts tensors into classes of its own, which are plain here."""
    script = tmp_path / "train.py"
    script.write_text(NUMBERED.format(device=device, own=own))
    rehearse(Asked(command=(str(script),), world_size=2, ranks=(0,), warmup=0, steps=2), tmp_path / "run")
    tables = rehearsal_folder(tmp_path / "run")
    said = (tables / "rank-00000" / "output.log").read_text().splitlines()[-1]
    assert said == f"{'0' if device == '0' else 'cuda:0'} cuda:0 cuda:0"
    assert any("the class Mine" in note for note in read_rehearsal(tables).notes) == bool(own)
    products = [work for work in read_rank(tables, 0).works.to_pylist() if work["kind"] == "gemm"]
    assert {product["flops"] for product in products} == {2 * 2 * 4 * 4}


PROFILED = """
import torch
from torch.profiler import ProfilerActivity, profile

model = torch.nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for kinds in ([ProfilerActivity.CPU, ProfilerActivity.CUDA], [ProfilerActivity.CUDA]):
    with profile(activities=kinds) as found:
        model(torch.ones(2, 4).cuda()).sum().backward()
        optimizer.step()
    print(sorted(one.name for one in found.activities), found.use_device)
"""


def test_the_profiler_looks_at_the_host_alone(tmp_path: Path) -> None:
    """For a GPU that is not there it may wait without end."""
    script = tmp_path / "train.py"
    script.write_text(PROFILED)
    rehearse(Asked(command=(str(script),), world_size=1, warmup=0, steps=9), tmp_path / "run")
    printed = (rehearsal_folder(tmp_path / "run") / "rank-00000" / "output.log").read_text()
    assert [line for line in printed.splitlines() if line.startswith("[")] == ["['CPU'] None"] * 2


def test_a_module_that_another_error_kept_from_being_imported_is_not_called_missing() -> None:
    """transformers says "Could not import module" of whatever went wrong in it."""

    def imported(cause: Exception) -> str:
        try:
            try:
                raise cause
            except Exception as error:
                raise ModuleNotFoundError("Could not import module 'Model'") from error
        except ModuleNotFoundError as error:
            return explain(error, {"log": "x"})

    said = imported(RuntimeError("compiled with another CUDA"))
    assert "RuntimeError: compiled with another CUDA" in said
    assert "is not installed" not in said
    assert ": board is needed; install it, or" in imported(ModuleNotFoundError("board is needed"))
    assert ": nvml is not installed here" in imported(
        ModuleNotFoundError("No module named 'nvml'", name="nvml")
    )
