"""Examples in the documentation run, and print what it says they print."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", ["compute.md", "memory.md"])
def test_examples_print_what_the_page_says(name: str) -> None:
    results = doctest.testfile(str(DOCS / name), module_relative=False, encoding="utf-8")
    assert results.attempted > 0
    assert results.failed == 0
