"""Where an error arose, as its line says: in the script, not in the standard library that it calls."""

import json
import runpy
from pathlib import Path

import pytest

from tracer.rehearse.words import place


def test_an_error_inside_the_standard_library_is_at_the_line_that_called_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text('import json\n\njson.loads("{")\n', encoding="utf-8")
    with pytest.raises(json.JSONDecodeError) as raised:
        runpy.run_path(str(script))
    assert place(raised.value) == "script.py:3"
