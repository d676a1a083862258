"""Whatever goes wrong with a recording, the training goes on, to the same numbers, and is told once."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from traces.errors import RunError
from traces.store import open_run

pytestmark = pytest.mark.usefixtures("hooks")

SCRIPT = """
import resource, sys
import torch
import foretrace
from tracer import memory, modules, pending, sink

def train(n=120):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(n):
        loss = model(torch.ones(4, 8)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()

class Broken(Exception):
    pass

def broken(*args, **kwargs):
    raise Broken("a fault of ours")

plain, way, path = train(), sys.argv[1], sys.argv[2]
if way == "full disk":
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
elif way == "broken hook":
    modules.ModuleHook._met = broken
elif way == "broken writer":
    sink._table = broken
elif way == "broken memory":
    memory.MemoryLog.sample = broken
elif way == "broken sidecar":
    pending.Pending.update = broken
with foretrace.record(path, flush_s=0.02):
    recorded = train()
print(plain == recorded)
"""

WAYS = {
    "full disk": "cannot write",
    "broken hook": "a fault of ours",
    "broken writer": "a fault of ours",
    "broken memory": "a fault of ours",
    "broken sidecar": "a fault of ours",
}


@pytest.mark.parametrize("way", sorted(WAYS))
def test_a_fault_of_the_recording_is_none_of_the_training(tmp_path: Path, ranks: Any, way: str) -> None:
    script, path = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SCRIPT)
    command = [sys.executable, "-W", "ignore", str(script), way, str(path)]
    result = subprocess.run(command, env=ranks.env(), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "True\n"
    assert "Traceback" not in result.stderr
    said = [line for line in result.stderr.splitlines() if "foretrace" in line]
    assert len(said) <= 1
    assert WAYS[way] in " ".join([*said, *warnings(path)])


def warnings(path: Path) -> tuple[str, ...]:
    """Return what the run tells; nothing if it failed before its first batch."""
    try:
        return open_run(path).warnings
    except RunError:
        return ()
