"""A page of predicted against measured step times: one file, no network, every run by its name."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

from foretrace.simulator.errors import TableError
from foretrace.simulator.validate.scores import Validation
from foretrace.traces.errors import reason
from foretrace.traces.replacing import replacing

ABOUT = (
    "Every point is a measured training run that was simulated as described, on logarithmic axes. Runs that "
    "could not be simulated: {failures}. The error of a run is |ln(predicted / measured)|; families (source, "
    "model, GPU, precision) count the same, however many runs they have."
)


def write_page(path: str | Path, found: Validation) -> Path:
    """Write the page of *found*, a validation of steps, to *path*, and return it.

    Raises:
        TableError: there is nothing to draw, or the file cannot be written.
    """
    target = Path(path)
    if not found.rows:
        raise TableError(f"{target}: no row was simulated, so there is nothing to draw")
    try:
        with replacing(target) as fresh:
            fresh.write_text(page(found), encoding="utf-8")
    except OSError as error:
        raise TableError(f"{target} cannot be written: {reason(error)}") from None
    return target


def page(found: Validation) -> str:
    """Return the page as HTML; ``</`` in names cannot end the script that holds the data."""
    rows = [
        {
            "id": row.id,
            "family": row.family,
            "class": row.group,
            "device": device_of(row.what),
            "what": row.what,
            "predicted": float(f"{row.predicted:.5g}"),
            "measured": float(f"{row.measured:.5g}"),
        }
        for row in found.rows
    ]
    data = {
        "about": ABOUT.format(failures=len(found.failures)),
        "classes": sorted({row.group for row in found.rows}),
        "devices": sorted({device_of(row.what) for row in found.rows}),
        "rows": rows,
    }
    template = (resources.files("foretrace.simulator") / "pages" / "steps.html").read_text(encoding="utf-8")
    return template.replace("/*DATA*/", json.dumps(data, separators=(",", ":")).replace("</", "<\\/"))


def device_of(what: str) -> str:
    """Return the GPU that the name of a row of steps ends with.

    >>> device_of("llama3-8b pp1 dp8 zero1 mbs 1 x 4, 8 h100-sxm")
    'h100-sxm'
    """
    return what.rpartition(" ")[2]
