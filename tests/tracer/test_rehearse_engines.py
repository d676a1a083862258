"""Engines around a training, rehearsed: DeepSpeed's, Megatron-core's, and what they do in small."""

import importlib.util
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.rehearsals import rehearse
from tests.tracer.test_wrapped import N_PARAMS, SENT, ZERO

from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.traces.rehearsal import Rehearsal, read_rank, rehearsal_folder

pytest.importorskip("torch")

SCRIPT = Path(__file__).parent / "engines.py"
STEP = 2
"""The step that is kept: engines ask each other in the first two what they do not ask again."""


def _rehearsed(folder: Path, rank: int, *command: str) -> tuple[Rehearsal, list[dict[str, Any]], str]:
    """Return a rehearsal of one rank of two, the messages of its last step, and what it printed."""
    found = rehearse(Asked(command=command, world_size=2, ranks=(rank,), warmup=STEP), folder / "run")
    tables = rehearsal_folder(folder / "run")
    rows = read_rank(tables, rank)
    places, messages = rows.places.to_pylist(), rows.messages.to_pylist()
    sent = [
        messages[event["item"]]
        for event in rows.events.to_pylist()
        if event["what"] == 1 and places[event["place"]]["step"] == STEP
    ]
    return found, sent, (tables / f"rank-{rank:05d}" / "output.log").read_text()


@pytest.mark.parametrize("rank", [0, 1])
def test_what_engines_do_beside_a_plain_loop(rank: int, tmp_path: Path) -> None:
    """Agree with the first rank, whoever one is; ask a list of tensors for numbers, count
    what is not finite, have generators."""
    _, sent, printed = _rehearsed(tmp_path, rank, str(SCRIPT), str(tmp_path))
    assert printed.splitlines()[-1] == "cpu (1, 2) [3, 4] False"
    asked = [("broadcast", 8), ("broadcast", 16)]
    assert [(one["kind"], one["size_bytes"]) for one in sent] == [*asked, ("all_reduce", 1)]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_stages_of_zero_send_what_they_send_over_gloo(stage: int, tmp_path: Path) -> None:
    """The closed form of ``test_wrapped.py``, to which the recorded ranks are held, too."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    script = tmp_path / "train.py"
    script.write_text(ZERO.replace('"gloo"', '"nccl"'))
    found, sent, _ = _rehearsed(tmp_path, 1, str(script), str(stage))
    assert found.job["sharding"] == f"zero{stage}"
    bytes_of = Counter[str]()
    for one in sent:
        bytes_of[one["kind"]] += one["size_bytes"] if one["size_bytes"] > 8 else 0
    assert {kind: size / (4 * N_PARAMS) for kind, size in bytes_of.items() if size} == SENT[stage]


def test_a_stage_of_deepspeed_knows_what_the_one_before_it_sends(tmp_path: Path) -> None:
    """Its engine reads shapes out of a message, which has no numbers: those that were sent are told.

    Its groups are named, so that one rank of each stage is rehearsed.
    """
    command = (str(Path(__file__).parent / "staged.py"), str(tmp_path / "library"), "24")
    found = rehearse(Asked(command=command, world_size=2), tmp_path / "run")
    assert ("pp", (0, 1)) in {(group.axis, group.ranks) for group in found.groups}
    assert found.ranks == (0, 1)
    for rank in (0, 1):
        rows = read_rank(rehearsal_folder(tmp_path / "run"), rank)
        messages = {(one["kind"], one["size_bytes"]) for one in rows.messages.to_pylist()}
        assert messages >= {("send", 24 * 32 * 4), ("recv", 24 * 32 * 4)}


def test_a_stage_of_deepspeed_that_nobody_sends_to_says_so(tmp_path: Path) -> None:
    """In the line that says which ranks to rehearse with it."""
    command = (str(Path(__file__).parent / "staged.py"), str(tmp_path / "library"), "24")
    with pytest.raises(
        RehearsalError, match=r"stage 1 on rank 1 needs the shapes that stage 0 sends: .*--ranks 0,1"
    ):
        rehearse(Asked(command=command, world_size=2, ranks=(1,), warmup=0), tmp_path / "run")


ADAM = """
import torch


class FusedAdamBuilder:
    def load(self):
        raise RuntimeError("CUDA_HOME environment variable is not set")


class FusedAdam(torch.optim.Optimizer):
    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})
        self.kernel = FusedAdamBuilder().load().multi_tensor_adam
        self.flag = torch.zeros(1, dtype=torch.int32, device="cuda")

    def step(self):
        lists = [[], [], [], []]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            for name in () if state else ("mean", "square"):
                state[name] = torch.zeros_like(p.data)
            for one, tensor in zip(lists, (p.grad.data, p.data, state["mean"], state["square"])):
                one.append(tensor)
        self.kernel(65536, self.flag, lists, 0.1, 0.9, 0.999, 1e-8, 1, 1, 1, 0.01)
"""
"""The optimizer of DeepSpeed as it asks for its kernel and calls it."""

CPU_ADAM = """
import torch


class CPUAdamBuilder:
    def load(self):
        raise RuntimeError("compiled code would read the memory of fake tensors")


class DeepSpeedCPUAdam(torch.optim.Optimizer):
    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})
        self.kernels = CPUAdamBuilder().load()
        self.kernels.create_adam(3, lr, 0.9, 0.999, 1e-8, 0.01, True, False)

    def __del__(self):
        self.kernels.destroy_adam(3)

    def step(self):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            for name in () if state else ("mean", "square"):
                state[name] = torch.zeros_like(p.data, device="cpu")
            states = state["mean"], state["square"]
            self.kernels.adam_update(3, 1, 0.1, 0.9, 0.999, 1e-8, 0.01, True, p.data, p.grad.data, *states)
"""
"""Its optimizer on the host."""

FUSED = """
import sys, torch, torch.distributed as dist

dist.init_process_group("nccl")
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 32)).cuda()
if sys.argv[1] == "deepspeed":
    from deepspeed.ops.adam.fused_adam import FusedAdam

    optimizer = FusedAdam(model.parameters(), lr=0.1)
elif sys.argv[1] == "host":
    from deepspeed.ops.adam.cpu_adam import DeepSpeedCPUAdam

    model = model.cpu()
    optimizer = DeepSpeedCPUAdam(model.parameters(), lr=0.1)
else:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
for _ in range(4):
    model(torch.ones(2, 64, device=next(model.parameters()).device)).sum().backward()
    optimizer.step()
    model.zero_grad()
"""


def test_the_fused_adam_of_deepspeed_is_one_pass_over_all_parameters(tmp_path: Path) -> None:
    """Its kernels are compiled: a rehearsal has what torch's own moves, on the GPU or on the host."""
    package = tmp_path / "deepspeed" / "ops" / "adam"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "fused_adam.py").write_text(ADAM)
    (package / "cpu_adam.py").write_text(CPU_ADAM)
    (tmp_path / "train.py").write_text(FUSED)
    moved = {}
    for kind in ("deepspeed", "host", "torch"):
        _rehearsed(tmp_path / kind, 1, str(tmp_path / "train.py"), kind)
        rows = read_rank(rehearsal_folder(tmp_path / kind / "run"), 1)
        works = [rows.works.to_pylist()[one["item"]] for one in rows.events.to_pylist() if one["what"] == 0]
        moved[kind] = [work["bytes_moved"] for work in works if work["name"] == "aten._fused_adamw_"]
    (size,), counters = moved["deepspeed"], 4 * 4  # of torch's, a number for each parameter
    n_values = 64 * 64 + 64 + 64 * 32 + 32
    assert size == pytest.approx(7 * 4 * n_values, abs=2 * counters)
    assert moved["torch"] == pytest.approx([size], abs=2 * counters)
    assert len(moved["host"]) == 4  # one parameter after the other
    assert sum(moved["host"]) == pytest.approx(size, abs=4 * counters)
