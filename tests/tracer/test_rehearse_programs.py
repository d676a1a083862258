"""Programs of a machine with GPUs that a script starts, where there is no such machine."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.tracer.rehearse.script import nvidia_smi
from foretrace.tracer.rehearse.script.programs import ASKED, PROGRAM
from foretrace.traces.rehearsal import read_rehearsal, rehearsal_folder

pytest.importorskip("torch")

STARTS = """
import os
import subprocess

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
{starts}
model = torch.nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.randn(2, 4).cuda()).sum().backward()
    optimizer.step()
"""

QUERY = "--query-gpu=index,name,memory.used,memory.total --format=csv,noheader"


@pytest.mark.skipif(shutil.which(PROGRAM) is not None, reason="there is a driver here")
@pytest.mark.parametrize(
    "starts",
    [
        'assert subprocess.run(["nvidia-smi"], capture_output=True, text=True).stdout',
        'subprocess.check_output("nvidia-smi -L | grep H100", shell=True)',
        'assert os.system("nvidia-smi") == 0',
        f'assert os.popen("nvidia-smi {QUERY}").read().count("H100") == torch.cuda.device_count()',
        "",
    ],
)
def test_a_script_that_logs_what_nvidia_smi_says_goes_on_and_that_is_said(
    tmp_path: Path, starts: str
) -> None:
    """Started by whatever function, by its name alone, it answers for the GPUs of a node."""
    script = tmp_path / "train.py"
    script.write_text(STARTS.format(starts=starts))
    rehearse(Asked(command=(str(script),), world_size=16, ranks=(0,)), tmp_path / "run")
    notes = read_rehearsal(rehearsal_folder(tmp_path / "run")).notes
    assert (ASKED in notes) == bool(starts)
    assert not list((tmp_path / "run").rglob(PROGRAM))


def test_fields_have_a_line_per_gpu_in_the_order_that_they_were_asked_in(tmp_path: Path) -> None:
    told = ["--query-gpu=memory.total,index,utilization.gpu", "--format=csv,noheader,nounits"]
    total = str(nvidia_smi.MEMORY_MIB)
    assert nvidia_smi.answer(told, 2) == f"{total}, 0, 0\n{total}, 1, 0"
    named = nvidia_smi.answer([told[0], "--format=csv"], 1).splitlines()
    assert named == ["memory.total, index, utilization.gpu", f"{total} MiB, 0, 0 %"]
    assert not nvidia_smi.answer(["--query-compute-apps=pid", "--format=csv,noheader"], 2)
    command = [sys.executable, "-I", nvidia_smi.__file__, str(tmp_path / "asked"), "3", "-L"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.count("GPU ") == 3
    assert (tmp_path / "asked").exists()
