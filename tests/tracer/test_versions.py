"""A torch that lacks what recording needs: one line that says so, and the training goes on."""

import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tests.processes import ROOT

from foretrace.tracer import internals

pytest.importorskip("torch.distributed")

SCRIPT = """
import torch
from torch.distributed import distributed_c10d

{change}
torch.distributed.init_process_group("gloo")
print("trains")
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("name", internals.NEEDED + internals.NEEDED_DISTRIBUTED)
def test_this_torch_has_all_that_is_needed(name: str) -> None:
    assert internals._is_there(name)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            "del torch._C._dispatch_keyset_full_after",
            "has no torch._C._dispatch_keyset_full_after, which recording needs; it was tried with",
        ),
        (
            "del torch.nn.modules.module.register_module_forward_hook",
            "has no torch.nn.modules.module.register_module_forward_hook, which recording needs",
        ),
        ("torch.__version__ = '2.5.1+cpu'", "torch 2.5.1+cpu is too old: recording needs 2.6 or newer"),
    ],
)
def test_another_torch_is_told_in_one_line(tmp_path: Path, ranks: Any, change: str, why: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(change=change))
    result = ranks.run([sys.executable, str(script)], ranks.env(tmp_path / "run"), 1)
    assert result.status == (0,), result.errors
    assert result.output == "trains\n"
    (said,) = [line for line in result.errors.splitlines() if "foretrace" in line]
    assert why in said


def test_what_can_be_installed_is_what_was_tried() -> None:
    trace = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["trace"]
    assert trace == [f"torch>={'.'.join(map(str, internals.OLDEST))}"]
