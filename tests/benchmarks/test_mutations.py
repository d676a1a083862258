"""Mistakes that are drawn are each in one place, and the nearest tests look for them."""

import ast
from pathlib import Path

import pytest
from mutations import ROOT, mistakes, nearest_tests

CODE = """
def share(a: "int", b: int = 2) -> float:
    # µs, of two bytes, before what is changed
    return a * b * 1e9 if not a > 1 else f"{a + 1}"
"""


def test_every_mistake_is_another_program_of_the_same_shape(tmp_path: Path) -> None:
    path = tmp_path / "code.py"
    path.write_text(CODE, encoding="utf-8")
    found = list(mistakes(path))
    code = CODE.encode()
    made = {ast.unparse(ast.parse(code[: one.start] + one.new.encode() + code[one.end :])) for one in found}
    assert {(one.old, one.new) for one in found} == {
        *(("2", "(3)"), ("1", "(2)"), ("a * b", "(a / b)"), ("a > 1", "(a >= 1)"), ("not a > 1", "(a > 1)")),
        *(("1000000000.0", "(2000000001.0)"), ("a * b * 1000000000.0", "(a * b / 1000000000.0)")),
        ("return a * b * 1000000000.0 if not a > 1 else f'{a + 1}'", "return None"),
    }
    assert len(made - {ast.unparse(ast.parse(CODE))}) == len(found)


@pytest.mark.parametrize(
    ("file", "nearest"),
    [("topologies/units.py", "test_units.py"), ("topologies/shape.py", "test_fabric.py")],
)
def test_tests_of_a_file_are_those_that_import_it_or_what_does(file: str, nearest: str) -> None:
    assert nearest in [one.name for one in nearest_tests(ROOT / file, 12)]
