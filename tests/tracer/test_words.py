"""Where an error arose, as its line says: in the script, not in the standard library that it calls."""

import json
import runpy
from pathlib import Path

import pytest
import torch

from foretrace.tracer.rehearse.words import ending, explain, place


def test_an_error_inside_the_standard_library_is_at_the_line_that_called_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text('import json\n\njson.loads("{")\n', encoding="utf-8")
    with pytest.raises(json.JSONDecodeError) as raised:
        runpy.run_path(str(script))
    assert place(raised.value) == "script.py:3"


def test_an_error_inside_compiled_code_is_at_the_line_that_called_it(tmp_path: Path) -> None:
    """NumPy's compiled files are in tracebacks by the names of their sources."""
    script = tmp_path / "script.py"
    script.write_text('import numpy as np\n\nnp.random.seed("a")\n', encoding="utf-8")
    with pytest.raises(TypeError) as raised:
        runpy.run_path(str(script))
    assert place(raised.value) == "script.py:3"


def test_what_a_library_has_caught_itself_is_at_the_line_that_ended_the_script(tmp_path: Path) -> None:
    """As ``argparse`` does with an argument that it does not take."""
    script = tmp_path / "script.py"
    lines = ("import argparse", "parser = argparse.ArgumentParser()", 'parser.add_argument("--n", type=int)')
    script.write_text("\n".join((*lines, 'parser.parse_args(["--n", "b"])\n')), encoding="utf-8")
    with pytest.raises(SystemExit) as raised:
        runpy.run_path(str(script))
    assert ending(raised.value, {"log": "log"}).startswith(
        "script.py:4: ArgumentError: argument --n: invalid"
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("torch._six", "torch is installed here, but has no torch._six: install a version that has it"),
        ("nobody.has", "nobody.has is not installed here: install it"),
    ],
)
def test_a_part_that_an_installed_package_lacks_is_not_to_be_installed(name: str, said: str) -> None:
    assert said in explain(ModuleNotFoundError(f"No module named {name!r}", name=name), {"log": "log"})


class Net(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A module whose forward divides one by a number."""

    def forward(self, divisor: int) -> float:
        """Fail where it is zero."""
        return 1 / divisor


def epoch(model: torch.nn.Module, divisor: int) -> float:
    """Divide as a function of the script that is given a model first."""
    return float(model(divisor)) / (divisor - 1)


@pytest.mark.parametrize(("divisor", "owner"), [(0, "Net at "), (1, "")])
def test_a_function_that_is_given_a_module_is_no_method_of_it(divisor: int, owner: str) -> None:
    """An error in a method is said to be in its module; one in a function beside it is not."""
    with pytest.raises(ZeroDivisionError) as raised:
        epoch(Net(), divisor)
    assert place(raised.value).startswith(f"{owner}test_words.py:")


def test_an_assertion_without_words_is_said_by_its_line(tmp_path: Path) -> None:
    """One that says why is said in its words."""
    for words, said in (("", "assert n % 64 == 0"), (', "not over 64"', "not over 64")):
        script = tmp_path / f"script{len(words)}.py"
        script.write_text(f"n = 40\nassert n % 64 == 0{words}\n", encoding="utf-8")
        with pytest.raises(AssertionError) as raised:
            runpy.run_path(str(script))
        found = explain(raised.value, {"log": "output.log"})
        assert found == f"{script.name}:2: AssertionError: {said}; its output is in output.log"


@pytest.mark.parametrize(
    ("error", "may_be"),
    [
        (IndexError("list index out of range"), True),
        (ZeroDivisionError("division by zero"), True),
        (KeyError(7), True),
        (AttributeError("'NoneType' object has no attribute 'shape'"), True),
        (TypeError("argument 'size' must be tuple of ints, not NoneType"), True),
        (UnboundLocalError("cannot access local variable 'loss'"), True),
        (KeyError("learning_rate"), False),
        (FileNotFoundError(2, "No such file or directory"), False),
        (ImportError("cannot import name 'AdamW'"), False),
        (AttributeError("module 'numpy' has no attribute 'float'"), False),
        (TypeError("f() got an unexpected keyword argument 'lr'"), False),
    ],
)
def test_a_number_is_blamed_only_for_what_a_number_may_cause(error: Exception, may_be: bool) -> None:
    told = ["train.py:3 reads a number: told 1.0 (nothing is known of it)"]
    assert (told[0] in explain(error, {"log": "log", "command": []}, told)) == may_be
