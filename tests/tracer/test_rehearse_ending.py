"""A check that would end the script is told to hold; what else needs a number ends the rehearsal."""

import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from foretrace.tracer.rehearse.data.truths import may_decide, passing
from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.rehearsing import Asked, rehearse
from foretrace.tracer.rehearse.world.acting import Loaded
from foretrace.traces.rehearsal import Rehearsal, rehearsal_folder

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
    if one.any():
        print("any", one)
    if one.any():
        print("any")
    else:
        other = one
    return text if one.all() else other
"""
TRUTHS = {
    2: True,
    4: False,
    7: True,
    9: False,
    10: True,
    12: True,
    16: None,
    18: None,
    22: None,
    24: False,
    26: None,
    30: None,
}

SCRIPT = """\
import torch

model = torch.nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(2):
    out = model(torch.ones(2, 4, device="cuda"))
    if not (out[:, 2:] >= out[:, :2]).all():
        raise ValueError("no boxes")
    assert (out > -1e9).all()
    assert torch.allclose(out, 2 * out), "not twice as much"
    out.sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("line", range(1, 31))
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
    """It says what it was told; a branch that ends nothing ends the rehearsal."""
    script = tmp_path / "boxes.py"
    script.write_text(SCRIPT)
    told = rehearse(Asked(command=(str(script),), world_size=1), tmp_path / "run", on=loaded).stated
    held = [line for line in told if "told True (a check that would end the script, or print)" in line]
    assert [line.split()[0] for line in held] == ["boxes.py:7", "boxes.py:9", "boxes.py:10"]


PRINTS = """
print(f"{loss:.2f}", "%d %.1f" % (number, loss), float(loss), 2 * number // 3, round(number, 2), -number)
print(math.ceil(loss), math.trunc(number))
print(math.exp(loss), np.float64(2) / number, abs(number) ** 0.5, json.dumps(number))
print(loss.numpy(), np.array(loss, copy=True), max([number]), max(number, 1.0), max(1.0, number, told_last))
print(min(float("inf"), number), min((one for one in [1e9, number]), default=None), min(number, -float(loss)))
if max(number, float("inf")) < float("inf") or loss > torch.tensor(float("inf")):
    sys.exit(3)
if not math.isfinite(loss) or number != number or np.isnan(number) or loss > float("inf"):
    sys.exit(3)
if number < best:
    pass
kept = torch.tensor([number, 1.0])
told = told_last = kept.sum().item() + number
words.append(float(told))
made = [loss.new([number]), torch.Tensor([number]), loss.new_tensor([number]), torch.full((2,), number)[:1]]
print(*(one.item() for one in made), *((number - one).item() for one in made))
losses = np.concatenate([loss.detach().repeat(2).numpy(), loss.detach().repeat(3).numpy()])
losses *= 2
if np.isnan(losses / 2).any() or not np.isfinite(losses[np.isfinite(losses)]).all():
    sys.exit(3)
print(np.mean(words), losses.mean().item())
print(np.median([number] * 3), *np.mean([[number]] * 2, axis=0).tolist())
"""
NEEDS = {
    "a comparison": "number < 0.5",
    "a truth": "bool(number)",
    "a branch": "1 if loss > 2 else 0",
    "a whole number": "range(int(number))",
    "an index": "words[number]",
    "a shape": "torch.zeros(number)",
    "the larger by another measure": "max(number, 1.0, key=abs)",
    "an order": "sorted([number, 1.0])",
    "what the larger of two decides": "max(number, 1.0) > 2 and print()",
    "a comparison with what was made of it": "math.exp(told / 2) > 1",
    "a comparison of arrays": "(loss.numpy() * 2 > 1).any()",
    "a plain number that decides": "float(loss) > 3",
    "a mean that decides": "np.mean([number, 1.0]) > 3",
    "a tensor that decides": "torch.tensor([float(number)]).item() > 3",
    "a comparison in a tensor": "torch.tensor([float(number) > 3.0])",
    "the larger of two in a tensor": "torch.tensor([max(0.0, told := float(number))]) and told > 1",
    "a plain number by another name": "plain",
    "a mask": "rows[rows > loss]",
}
NUMBERS = """
import json, math, sys, warnings
import numpy as np
import torch
warnings.simplefilter("ignore", DeprecationWarning)  # of an ``__array__`` without ``copy``, as torch's

model = torch.nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
best, words, told_last = float("inf"), [], 0.0
for _ in range(2):
    rows = model(torch.ones(2, 4, device="cuda"))
    rows.sum().backward()
    optimizer.step()
    loss = rows.detach().square().mean().cpu()
    number = loss.item()
"""


def _numbers(folder: Path, last: str, loaded: Loaded) -> Rehearsal:
    script = folder / "reading.py"
    body = PRINTS + ("plain = float(loss)\nif plain > 1:\n    pass\n" if last == "plain" else f"{last}\n")
    script.write_text(NUMBERS + textwrap.indent(body, "    "))
    return rehearse(Asked(command=(str(script),), world_size=1), folder / "run", on=loaded)


def test_a_number_that_is_only_printed_is_not_needed(tmp_path: Path, loaded: Loaded) -> None:
    """Formatted, averaged, written to a file; also what asks whether it is finite is answered."""
    _numbers(tmp_path, "pass", loaded)
    words = (rehearsal_folder(tmp_path / "run") / "rank-00000" / "output.log").read_text().split()
    assert {word.lower() for word in words} == {"nan", "0"}  # no text of a whole number is another


@pytest.mark.parametrize("what", NEEDS)
def test_a_number_that_is_needed_ends_in_a_line(tmp_path: Path, loaded: Loaded, what: str) -> None:
    """It names the line of the script, and what to do."""
    with pytest.raises(RehearsalError, match=r"reading\.py:\d+.*rehearsal does not.*--stub"):
        _numbers(tmp_path, NEEDS[what], loaded)


BEST = """
    lowest = min(lowest, number)
    if number < best or loss < kept:
        best, kept = number, loss
        torch.save(model.state_dict(), "best.pt")
"""


def test_who_keeps_the_best_is_helped_by_the_stub_of_the_page(tmp_path: Path, loaded: Loaded) -> None:
    script, stub = tmp_path / "reading.py", tmp_path / "stub.py"
    script.write_text(
        NUMBERS.replace("for _ in range(2):", "lowest, kept = 9.0, torch.tensor(1e9)\nfor _ in range(9):")
        + BEST
    )
    asked = Asked(command=(str(script),), world_size=1, steps=3)
    with pytest.raises(RehearsalError, match=r"reading\.py:\d+ needs a number.*rehearsal does not.*--stub"):
        rehearse(asked, tmp_path / "run", on=loaded)
    page = (Path(__file__).parents[2] / "docs" / "rehearse.md").read_text(encoding="utf-8")
    stub.write_text("import torch\n" + page[page.index("read = torch.") : page.index("@torch.library")])
    assert rehearse(replace(asked, stub=str(stub)), tmp_path / "run", on=loaded).job["steps"] == 3


def test_parameters_of_a_class_of_their_own_end_in_a_line(tmp_path: Path, loaded: Loaded) -> None:
    """As weights in 4 or 8 bits of bitsandbytes are."""
    script = tmp_path / "own.py"
    script.write_text(
        "import torch\nclass Own(torch.nn.Parameter):\n    def __new__(cls, data):\n"
        "        return torch.Tensor._make_subclass(cls, data)\nOwn(torch.ones(2).cuda())\n"
    )
    with pytest.raises(RehearsalError, match="a class of its own, as bitsandbytes has in 4 or 8 bits"):
        rehearse(Asked(command=(str(script),), world_size=1), tmp_path / "run", on=loaded)


PLAIN = """\
import torch


class Meter:
    def __init__(self, first):
        self.last = first

    def update(self, value):
        self.last = value


def reduced(value, config):
    if config.world > 1:
        return torch.tensor(value).item()
    return value


def clipped(norm, config):
    if isinstance(norm, torch.Tensor) and norm is not None:
        norm = norm.item()
    return reduced(float(norm), config)


def best(value, so_far):
    return value if value < so_far else so_far


def kept(loss):
    return best(float(loss), so_far=9.0)


def metered(loss, meter):
    meter.update(float(loss))
    print(meter.last)


def stopped(loss, stopper):
    stopper.patience = float(loss)
    while stopper.patience > 1:
        stopper.step()


def other(value):
    return value if value > 0 else 0
"""


def test_a_plain_number_may_decide_where_functions_that_are_given_it_ask(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(PLAIN)
    lines = PLAIN.splitlines()
    makers = [at for at, line in enumerate(lines, 1) if "float(" in line]
    # Only the kind of the first is asked, beside a variable of its name in another function that is compared;
    # the second is compared in the function that it is given to; one is printed; the last ends a loop.
    assert [may_decide(str(script), at) for at in makers] == [False, True, False, True]


def test_an_object_that_fails_when_it_is_asked_for_names_hides_no_error(
    tmp_path: Path, loaded: Loaded
) -> None:
    script = tmp_path / "lazy.py"
    script.write_text(
        "class Lazy:\n"
        "    def __getattr__(self, name):\n"
        "        raise AssertionError('no driver')\n"
        "    def ask(self):\n"
        "        raise ValueError('of its own')\n"
        "Lazy().ask()\n"
    )
    with pytest.raises(RehearsalError, match=r"lazy\.py:5: ValueError: of its own"):
        rehearse(Asked(command=(str(script),), world_size=1), tmp_path / "run", on=loaded)


def test_a_compiler_of_kernels_is_told_of_the_gpu_that_torch_tells(tmp_path: Path, loaded: Loaded) -> None:
    """Its driver asks torch, but for the properties, for which it would compile code against CUDA."""
    folder = tmp_path / "triton" / "backends" / "nvidia"
    folder.mkdir(parents=True)
    (folder / "driver.py").write_text(
        "def CudaUtils():\n    raise AssertionError('libcuda.so cannot be found')\n"
    )
    script = tmp_path / "asking.py"
    script.write_text(
        "import torch\n"
        "from triton.backends.nvidia import driver\n"
        "told, gpu = driver.CudaUtils().get_device_properties(0), torch.cuda.get_device_properties(0)\n"
        "rows = told['multiprocessor_count']\n"
        "assert (rows, told['warpSize']) == (gpu.multi_processor_count, gpu.warp_size)\n"
        "model = torch.nn.Linear(4, 4).cuda()\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(2):\n"
        "    model(torch.ones(rows, 4, device='cuda')).sum().backward()\n"
        "    optimizer.step()\n"
    )
    found = rehearse(Asked(command=(str(script),), world_size=1), tmp_path / "run", on=loaded)
    assert found.job["steps"] == 1
