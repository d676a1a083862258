"""A torch that lacks what recording needs: one line that says so, and the training goes on."""

import sys
from pathlib import Path
from typing import Any

import pytest

from tracer import internals

pytest.importorskip("torch.distributed")

SCRIPT = """
import torch
from torch.distributed import distributed_c10d

del torch._C._dispatch_keyset_full_after
torch.distributed.init_process_group("gloo")
print("trains")
torch.distributed.destroy_process_group()
"""


def test_this_torch_has_all_that_is_needed() -> None:
    assert internals.missing(internals.NEEDED + internals.NEEDED_DISTRIBUTED) == []
    assert internals.missing(["nn.Linear", "nn.no_such_thing", "no.such"]) == ["nn.no_such_thing", "no.such"]


def test_another_torch_is_told_in_one_line(tmp_path: Path, ranks: Any) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    result = ranks.run([sys.executable, str(script)], ranks.env(tmp_path / "run"), 1)
    assert result.status == (0,), result.errors
    assert result.output == "trains\n"
    (said,) = [line for line in result.errors.splitlines() if "foretrace" in line]
    assert "has no torch._C._dispatch_keyset_full_after, which recording needs" in said
