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
    ("file", "within", "nearest"),
    [
        ("topologies/units.py", "parse_time", "test_units.py"),
        ("topologies/units.py", "parse_time", "units.py"),  # its examples
        ("topologies/shape.py", "def ways_out", "test_folded.py"),
        ("simulator/workload/linear.py", "UNALIGNED", "test_unaligned.py"),
        # Behind a process that is started by the name of its file.
        ("tracer/rehearse/world/world.py", "alike(address)", "test_rehearse_told_by_others.py"),
    ],
)
def test_tests_of_a_mistake_reach_its_file_and_share_its_words(file: str, within: str, nearest: str) -> None:
    found = [one for one in mistakes(ROOT / file) if within in one.within]
    one = min(found, key=lambda one: len(one.within))
    assert nearest in [test.name for test in nearest_tests(one, 5)]
