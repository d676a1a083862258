"""Everything that people read says a share through one door, ``traces.report.format.format_share``.

Read from the syntax tree of every module, example and benchmark: no text is put together with a percentage of
its own, so that there is one way to write one, with a space before the sign.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("simulator", "tracer", "topologies", "traces", "examples", "benchmarks")

DOOR = "traces/report/format.py"
KEYS = {"f'{q:.0%}'"}
"""Texts that are keys of quantiles in JSON, as ``"5%"``: programs read them."""

ALONE = {"examples/rehearse/pretrain.py"}
"""Scripts that stand for those of a user, and know nothing of this package."""


def own_percentages(source: str) -> Iterator[str]:
    """Yield every text of *source* that formats a share itself."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.JoinedStr):
            continue
        for part, following in zip(node.values, [*node.values[1:], None], strict=True):
            if not isinstance(part, ast.FormattedValue):
                continue
            form = ast.unparse(part.format_spec) if part.format_spec else ""
            after = following.value if isinstance(following, ast.Constant) else ""
            if form.rstrip("'\"").endswith("%") or str(after).lstrip().startswith("%"):
                yield ast.unparse(node)


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_module_writes_a_share_in_its_own_way(folder: str) -> None:
    found = {
        str(path.relative_to(ROOT)): texts
        for path in sorted((ROOT / folder).rglob("*.py"))
        if (texts := set(own_percentages(path.read_text(encoding="utf-8"))) - KEYS)
    }
    assert {name: texts for name, texts in found.items() if name not in {DOOR, *ALONE}} == {}


@pytest.mark.parametrize("text", ['f"{a:.1%}"', 'f"{100 * a:.1f} %"', 'f"{a}%"', 'f"of {a:{w}.0%} all"'])
def test_a_text_that_does_is_found(text: str) -> None:
    assert list(own_percentages(text))


@pytest.mark.parametrize("text", ['f"{format_share(a)}"', 'f"%{a}"', 'f"{a} of 100 %"', '"5 %"'])
def test_others_are_not(text: str) -> None:
    assert not list(own_percentages(text))
