"""The page of predicted against measured: one file that names every row and asks for nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from foretrace.simulator.errors import TableError
from foretrace.simulator.validate.render import page, write_page
from foretrace.simulator.validate.scores import Scored, Validation


def scored(name: str, predicted: float = 1.0) -> Scored:
    return Scored(
        id=name,
        family="a · b",
        group="FSDP",
        what=f"{name} dp8, 8 h100-sxm",
        predicted=predicted,
        measured=2.0,
    )


def validation(*rows: Scored) -> Validation:
    return Validation(kind="steps", table="steps.csv", unit="s", rows=rows, failures=[])


def test_the_page_holds_every_row_and_needs_no_network() -> None:
    text = page(validation(scored("one"), scored("two", 3.25)))
    data = json.loads(re.search(r'application/json">(.*?)</script>', text, re.DOTALL)[1])  # type: ignore[index]
    assert [(row["id"], row["predicted"], row["device"]) for row in data["rows"]] == [
        ("one", 1.0, "h100-sxm"),
        ("two", 3.25, "h100-sxm"),
    ]
    assert not re.search(r"""(?:src|href)\s*=|@import|fetch\(""", text)
    assert "default-src 'none'" in text.partition("<title>")[0]


def test_a_name_cannot_end_the_script_that_holds_it() -> None:
    text = page(validation(scored("</script><script>alert(1)</script>")))
    assert text.count("</script>") == 2


def test_a_page_that_cannot_be_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="nothing to draw"):
        write_page(tmp_path / "page.html", validation())
    with pytest.raises(TableError, match="cannot be written"):
        write_page(tmp_path, validation(scored("one")))
