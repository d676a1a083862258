"""What the pages link to is there: a reader never ends at a page that does not exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")), *ROOT.glob("docs/*.md")]

_CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(\s*<?([^)\s>]+)")
_ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


def missing(page: Path) -> list[str]:
    """Return the relative links of *page* that lead nowhere, code left out."""
    found = _LINK.findall(_CODE.sub("", page.read_text(encoding="utf-8")))
    paths = [link.partition("#")[0] for link in found if not _ELSEWHERE.match(link)]
    return [path for path in paths if path and not (page.parent / path).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    assert missing(page) == []


def test_a_link_to_nowhere_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "[a](page.md#part) [b](https://example.org/x) [c](#here) ![d](gone.png) [e](gone/x.md#y 'z')\n"
        "```\n[f](in_code.md)\n```\nand `[g](in_code.md)`\n",
        encoding="utf-8",
    )
    assert missing(page) == ["gone.png", "gone/x.md"]
