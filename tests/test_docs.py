"""What the pages link to is there: a reader never ends at a page that does not exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")), *ROOT.glob("docs/*.md")]

_CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(\s*<?([^)\s>]+)")
_ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


_ANCHOR: Final = re.compile(r"<a (?:id|name)=\"([^\"]+)\"")


def anchors(page: Path) -> set[str]:
    """Return what may stand behind ``#``: headings of *page* as GitHub spells them, and its own anchors."""
    text = page.read_text(encoding="utf-8")
    outside = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", outside, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings} | set(
        _ANCHOR.findall(text)
    )


def missing(page: Path) -> list[str]:
    """Return the relative links of *page* that lead to no file, or to no heading of it, code left out."""
    found = _LINK.findall(_CODE.sub("", page.read_text(encoding="utf-8")))
    lost = []
    for link in found:
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if _ELSEWHERE.match(link):
            continue
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            lost.append(link)
    return lost


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    assert missing(page) == []


def test_a_link_to_nowhere_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A *part*, of `it`\n[a](page.md#a-part-of-it) [a](page.md#apart) [b](https://example.org/x)\n"
        "[c](#a-part-of-it) ![d](gone.png) [e](gone/x.md#y 'z')\n"
        "```\n[f](in_code.md)\n```\nand `[g](in_code.md)`\n",
        encoding="utf-8",
    )
    assert missing(page) == ["page.md#apart", "gone.png", "gone/x.md#y"]


def floor_plan() -> dict[str, set[str]]:
    """Return the words that the floor plan of docs/architecture.md has for each package."""
    plan = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("```")[1]
    entries = re.split(r"^(\w+)/ ", plan, flags=re.MULTILINE)[1:]
    return {
        name: set(re.findall(r"\w+", words)) for name, words in zip(entries[::2], entries[1::2], strict=True)
    }


@pytest.mark.parametrize("package", ["simulator", "topologies", "traces", "tracer"])
def test_the_floor_plan_names_every_folder(package: str) -> None:
    folders = {path.name for path in (ROOT / package).iterdir() if path.is_dir()} - {"__pycache__"}
    assert folders - floor_plan()[package] == set()


def test_every_page_can_be_reached_from_the_readme() -> None:
    seen, waiting = set[Path](), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        seen.add(page)
        found = _LINK.findall(_CODE.sub("", page.read_text(encoding="utf-8")))
        linked = {(page.parent / link.partition("#")[0]).resolve() for link in found}
        waiting += [one for one in linked if one in PAGES and one not in seen]
    assert set(PAGES) - seen == set()


def test_generated_tables_are_what_the_tables_of_the_repository_say() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "pages.py"), "--check"]
    assert subprocess.run(command, capture_output=True, text=True, check=False).stdout == ""
