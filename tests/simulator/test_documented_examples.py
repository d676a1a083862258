"""Examples in the documentation run, and print what it says they print."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

from foretrace.simulator.settings import TABLES

DOCS = Path(__file__).parents[2] / "docs"


def test_examples_print_what_the_page_says() -> None:
    results = doctest.testfile(str(DOCS / "memory.md"), module_relative=False, encoding="utf-8")
    assert results.attempted > 0
    assert results.failed == 0


def test_every_setting_is_in_the_table_of_the_page() -> None:
    page = (DOCS / "simulation.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    named = {word for row in rows for word in re.findall(r"`([a-z0-9_]+)`", row.split("|")[1])}
    assert {setting for table in TABLES.values() for setting in table.values()} <= named
