"""Writes the tables of docs/ whose figures are in this repository: ``python benchmarks/pages.py``.

Public scripts, published steps, kernels and collectives are in ``tables/``, conventions in the frameworks'
profiles.
tests/test_docs.py holds the pages to what this writes.
"""

from __future__ import annotations

import argparse
import csv
import math
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from accuracy import replaced
from measured.collectives import score_collectives
from measured.kernels import validate_kernels

from foretrace.simulator.framework import Framework, framework_names, load_framework
from foretrace.traces.report.format import format_share

ROOT: Final = Path(__file__).parents[1]
TABLES: Final = Path(__file__).parent / "tables"
KEYS: Final = (
    *("overlap_grad_reduce", "overlap_param_gather", "reduces_in_16_bit", "fused_wgrad", "copies_gathered"),
    *("joins_gradients", "buckets_first_chunk_only", "pipeline_keeps_whole"),
    *("async_tp", "batch_first", "overlap_tp_backward", "p2p_scattered", "context", "attention", "eager"),
    *("rotary", "autocast", "stops_early", "host_work"),
    *("host_per_tensor_rank", "expert_dispatch", "expert_tp", "overlap_shared_experts", "fused_experts"),
    *("loss_all_reduce", "selective", "fp8_recipe", "amax_ranks"),
)
"""The conventions of a framework that time depends on."""

PAGES: Final = (
    ROOT / "README.md",
    *(
        ROOT / "docs" / f"{name}.md"
        for name in ("compute-evidence", "frameworks", "network-evidence", "rehearse", "rehearse-evidence")
    ),
)
OUTCOMES: Final = ("right", "goes through", "true line", "wrong line", "silently wrong")

Lines = Sequence[str]


def pages() -> dict[Path, str]:
    """Return the text that each page should have."""
    texts = {path: path.read_text(encoding="utf-8") for path in PAGES}
    for name, lines in tables().items():
        for path, text in texts.items():
            if f"<!-- {name} -->" in text:
                texts[path] = replaced(text, name, lines)
    return texts


def tables() -> dict[str, Lines]:
    """Return the lines of each table by the name of its mark."""
    scripts = _scripts()
    with (TABLES / "rehearsed_ratios.csv").open(encoding="utf-8", newline="") as file:
        ratios = {row["name"]: row for row in csv.DictReader(file)}
    runs = tomllib.loads((TABLES / "rehearsed_times.toml").read_text(encoding="utf-8"))["run"]
    return {
        "profiles": _profiles(),
        "first tries": _first_tries(scripts),
        "outcomes": _outcomes(scripts),
        "samples": _samples(scripts),
        "step times": _step_times(runs, ratios),
        "torchtitan": _torchtitan(runs, ratios),
        "kernel tables": _kernels(),
        "later clusters": _collectives(),
    }


def _scripts() -> list[dict[str, str]]:
    """Return the rows of all samples of public scripts; a table may begin with the rule of its choice."""
    rows = list[dict[str, str]]()
    for path in sorted(TABLES.glob("public_scripts*.csv")):
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        rows += csv.DictReader(line for line in lines if not line.startswith("#"))
    return rows


LATEST: Final = 50
"""Scripts that are told apart as the latest."""


def _first_tries(scripts: Sequence[Mapping[str, str]]) -> Lines:
    """Return how the first tries of all scripts ended, and those of the latest, as a table."""

    def row(said: str, own: Sequence[Mapping[str, str]]) -> tuple[object, ...]:
        ended = Counter(one["first"] for one in own)
        through = ended["right"] + ended["goes through"]
        return (said, through, *(ended[name] for name in OUTCOMES[2:]))

    every = row(f"of {len(scripts)} public scripts", scripts)
    head = ("first try of a rehearsal", "went through", *OUTCOMES[2:])
    return _table(head, [every, row(f"of the latest {LATEST}", scripts[-LATEST:])])


def _outcomes(scripts: Sequence[Mapping[str, str]]) -> Lines:
    first, now = (Counter(row[when] for row in scripts) for when in ("first", "now"))
    rows = [(name, first[name], now[name]) for name in OUTCOMES]
    return _table((f"of {len(scripts)} scripts", "first try", "now"), rows)


def _samples(scripts: Sequence[Mapping[str, str]]) -> Lines:
    """Return one line per kind of sample: ``language, second`` is of the kind ``language``."""
    rows = []
    kinds = [row["sample"].rpartition(", ")[0] or row["sample"] for row in scripts]
    for kind in dict.fromkeys(kinds):
        own = [row for row, its in zip(scripts, kinds, strict=True) if its == kind]
        first, now = (Counter(row[when] for row in own) for when in ("first", "now"))
        rows.append((kind, len(own), *(first[name] or "" for name in OUTCOMES), now["right"]))
    return _table(("samples", "scripts", *OUTCOMES, "right now"), rows)


def _step_times(runs: Sequence[Mapping[str, Any]], ratios: Mapping[str, Mapping[str, str]]) -> Lines:
    """Return one line per family; errors are |ln(predicted / measured)|."""
    rows = []
    for family in dict.fromkeys(run["family"] for run in runs):
        names = [run["name"] for run in runs if run["family"] == family]
        errors = []
        for when in ("first", "now"):
            found = [abs(math.log(float(ratios[name][when]))) for name in names if ratios[name][when]]
            errors.append(format_share(median(found), ".0f") if found else "")
        now = sorted((float(ratios[name]["now"]), name) for name in names)
        ends = [f"{ratio:.2f} ({name})" for ratio, name in (now[0], now[-1])]
        rows.append((family, len(names), *errors, *ends))
    return _table(("rows", "number", "median error, first", "now", "lowest ratio", "highest"), rows)


def _torchtitan(runs: Sequence[Mapping[str, Any]], ratios: Mapping[str, Mapping[str, str]]) -> Lines:
    """Return predicted over published times and reserved memory of torchtitan's own runs."""
    own = [(run, ratios[run["name"]]) for run in runs if run["name"].startswith("titan ")]
    held = [(run["measured_reserved_gb"], found) for run, found in own if "measured_reserved_gb" in run]
    columns = {
        "step time": [float(found["now"]) for _, found in own],
        "reserved memory": [float(found["reserved_gb"]) / gb for gb, found in held],
        "with expandable segments": [float(found["reserved_growing_gb"]) / gb for gb, found in held],
    }
    rows = [
        (name, len(one), *(f"{of(one):.2f}" for of in (min, median, max))) for name, one in columns.items()
    ]
    return _table(("predicted / published", "runs", "lowest", "median", "highest"), rows)


def _kernels() -> Lines:
    """Return how far published kernels are off whose tables are here."""
    rows = []
    for name in ("gemm_blackwell", "attention_backward_h100", "attention_cudnn", "attention_gb300"):
        for found in validate_kernels(TABLES / f"{name}.csv")[0].families:
            family = found.name.partition(" ")[2]
            errors = (format_share(one) for one in (found.median_error, found.p90_error))
            rows.append((f"`{name}.csv`", family, found.n, *errors, format_share(found.bias, "+.1f")))
    return _table(("table", "kernels", "rows", "median error", "nine in ten within", "bias"), rows)


def _collectives() -> Lines:
    """Return how far collectives of later clusters are off, by operation and by what predicted them."""
    found: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for row in score_collectives(TABLES / "collectives_reports.csv").rows:
        source, _, operation, gpus = row.family.split(" · ")
        inside = gpus == "8 GPUs"
        way = ("all", "inside a node") if inside else (operation, row.by.partition("/")[0])
        found[source, *way].append(row.log_ratio)
    rows = [
        (*key, len(own), format_share(median(map(abs, own))), format_share(median(own), "+.1f"))
        for key, own in sorted(found.items())
    ]
    return _table(("cluster", "operation", "by", "rows", "median error", "bias"), rows)


def _profiles() -> Lines:
    """Return what each profile says otherwise than the default, which comes first."""
    plain = Framework(name="", matches=())
    rows = [("default", _list({key: getattr(plain, key) for key in KEYS}))]
    for name in framework_names():
        own = {key: getattr(load_framework(name), key) for key in KEYS}
        rows.append(
            (f"`{name}`", _list({key: one for key, one in own.items() if one != getattr(plain, key)}))
        )
    return _table(("profile", "conventions"), rows)


def _list(conventions: Mapping[str, object]) -> str:
    return "; ".join(f"`{key}` {_words(one)}" for key, one in conventions.items()) or "the default"


def _words(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return str(value)


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Lines:
    first, *rest = ("| " + " | ".join(map(str, row)) + " |" for row in (head, *rows))
    return [first, "|" + "---|" * len(head), *rest]


def main() -> None:
    """Write the pages, or name those that are not up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="Only name the pages that would change.")
    check = parser.parse_args().check
    for page, text in pages().items():
        if check and page.read_text(encoding="utf-8") != text:
            print(f"{page.name}: run python benchmarks/pages.py")
        elif not check:
            page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
