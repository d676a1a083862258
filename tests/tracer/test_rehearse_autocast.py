"""Autocast of a GPU has the state that torch keeps for CUDA: fp16 at first, and its own dtype in a region."""

import sys
from pathlib import Path

import pytest
from tests.processes import Runner
from tests.rehearsals import rehearse

from foretrace.tracer.process import ON_CPU
from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.traces.rehearsal import rehearsal_folder

pytest.importorskip("torch")

SCRIPT = """
import threading, warnings
import torch

warnings.simplefilter("ignore")
model = torch.nn.Linear(8, 8, bias=False).to("cuda" if torch.cuda.is_available() else "cpu")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = torch.ones(4, 8).to(model.weight.device)

def say(what):
    print(what, model(rows).dtype, torch.get_autocast_gpu_dtype(), torch.get_autocast_dtype("cuda"))

say("before")
with torch.autocast("cuda", torch.bfloat16):
    with torch.autocast("cuda"):
        say("nested")
    with torch.autocast("cuda", enabled=False):
        say("off")
    thread = threading.Thread(target=say, args=("thread",))
    thread.start()
    thread.join()
say("after")
torch.set_autocast_gpu_dtype(torch.bfloat16)
say("told")
with torch.autocast("cuda"):
    say("region")
torch.set_autocast_dtype("cuda", torch.float16)
torch.set_autocast_enabled("cuda", True)
say("by_hand")
torch.set_autocast_enabled(False)
say("ended")
with torch.autocast("cpu"):
    print("cpu", torch.get_autocast_dtype("cpu"))
model(rows).sum().backward()
optimizer.step()
"""

ON_GPU = {
    "before": ("float32", "float16"),
    "nested": ("bfloat16", "bfloat16"),
    "off": ("float32", "bfloat16"),
    "thread": ("float32", "float16"),
    "after": ("float32", "float16"),
    "told": ("float32", "bfloat16"),
    "region": ("bfloat16", "bfloat16"),
    "by_hand": ("float16", "float16"),
    "ended": ("float32", "float16"),
}
"""Dtype of a product and that of autocast, by ``torch.amp.autocast_mode`` and ATen/autocast_mode.cpp."""


def _printed(folder: Path, *, has_gpu: bool) -> list[str]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    asked = Asked(command=(str(script),), world_size=1, warmup=0, has_gpu=has_gpu)
    rehearse(asked, folder / "run")
    log = rehearsal_folder(folder / "run") / "rank-00000" / "output.log"
    return log.read_text().replace("torch.", "").splitlines()


SAID = [*(f"{what} {product} {told} {told}" for what, (product, told) in ON_GPU.items()), "cpu bfloat16"]


def test_autocast_of_a_gpu_keeps_its_own_dtype(tmp_path: Path) -> None:
    assert _printed(tmp_path, has_gpu=True) == SAID


@pytest.mark.usefixtures("on_cpu")
def test_autocast_on_processors_is_that_of_a_gpu(tmp_path: Path) -> None:
    env = Runner.env(tmp_path / "run") | {ON_CPU: "2"}
    ended = Runner.run([sys.executable, "-c", SCRIPT], env, 1)
    assert ended.status == (0,), ended.errors
    assert set(ended.output.replace("torch.", "").splitlines()) == set(SAID)


def test_autocast_of_a_gpu_is_off_where_there_is_none(tmp_path: Path) -> None:
    """As torch says: "CUDA is not available. Disabling"."""
    products = {line.split()[0]: line.split()[1] for line in _printed(tmp_path, has_gpu=False)}
    assert {products[what] for what in ("before", "nested", "off", "region")} == {"float32"}
