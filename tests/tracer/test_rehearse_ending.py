"""A check that would end the script is told to hold; whatever else asks is told as before."""

from pathlib import Path

import pytest

from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.ranks.acting import Loaded
from foretrace.tracer.rehearse.rehearsing import Asked, rehearse
from foretrace.tracer.rehearse.values.ending import passing

CHECKS = """\
def asked(one, other, text):
    if not (one >= other).all():
        raise ValueError(text)
    if one.any() or other.any():
        text = "more"
        raise ValueError(text)
    assert one.all() and other.all(), text
    assert not (
        one.any()
        or not other.any()
    )
    if one.all():
        text = ""
    else:
        raise ValueError(text)
    if one.any() or not other.any():
        raise ValueError(text)
    if one.any():
        raise ValueError(text)
    else:
        raise TypeError(text)
    while one.any():
        raise ValueError(text)
    return text if one.all() else other
"""
TRUTHS = {2: True, 4: False, 7: True, 9: False, 10: True, 12: True, 16: None, 18: None, 22: None, 24: None}

SCRIPT = """\
import torch

model = torch.nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(2):
    out = model(torch.ones(2, 4, device="cuda"))
    if not (out[:, 2:] >= out[:, :2]).all():
        raise ValueError("no boxes")
    assert (out > -1e9).all()
    if (out > 0).all():
        print("all")
    out.sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("line", range(1, 25))
def test_the_truth_that_lets_the_script_go_on_is_that_of_its_source(tmp_path: Path, line: int) -> None:
    """Of negations, parts of a condition, conditions of several lines; not where it is one or the other."""
    file = tmp_path / "checks.py"
    file.write_text(CHECKS)
    assert passing(str(file), line) is TRUTHS.get(line)


def test_what_has_no_source_is_no_check(tmp_path: Path) -> None:
    """Nothing is raised where the source is of another language, or is not there."""
    (tmp_path / "broken.py").write_text("if x: raise (\n")
    assert passing(str(tmp_path / "broken.py"), 1) is None
    assert passing("<string>", 1) is None


def test_a_script_that_checks_what_it_computes_goes_on(tmp_path: Path, loaded: Loaded) -> None:
    """It says what it was told; a branch that ends nothing is told as ever."""
    script = tmp_path / "boxes.py"
    script.write_text(SCRIPT)
    told = rehearse(Asked(command=(str(script),), world_size=1), tmp_path / "run", on=loaded).stated
    held = [line for line in told if "told True (a check that would end the script)" in line]
    assert [line.split()[0] for line in held] == ["boxes.py:7", "boxes.py:9"]
    assert any(
        line.startswith("boxes.py:10") and "told False (nothing is known of it)" in line for line in told
    )


def test_parameters_of_a_class_of_their_own_end_in_a_line(tmp_path: Path, loaded: Loaded) -> None:
    """As weights in 4 or 8 bits of bitsandbytes are."""
    script = tmp_path / "own.py"
    script.write_text(
        "import torch\nclass Own(torch.nn.Parameter):\n    def __new__(cls, data):\n"
        "        return torch.Tensor._make_subclass(cls, data)\nOwn(torch.ones(2).cuda())\n"
    )
    with pytest.raises(RehearsalError, match="a class of its own, as bitsandbytes has in 4 or 8 bits"):
        rehearse(Asked(command=(str(script),), world_size=1), tmp_path / "run", on=loaded)
