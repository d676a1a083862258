"""Writes the tables of docs/accuracy*.md from what ``validate.py steps TABLE --json`` printed.

    python benchmarks/validate.py steps steps.csv --calibrate --worst 100000 --json > steps.json
    python benchmarks/accuracy.py steps.json

Everything between two marks in a page is replaced; the words around it are written by people.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from foretrace.traces.report.format import format_share

DOCS: Final = Path(__file__).parents[1] / "docs"
PAGE: Final = DOCS / "accuracy.md"
EVIDENCE: Final = DOCS / "accuracy-evidence.md"


def main() -> None:
    """Replace the tables of both pages."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path)
    parser.add_argument("--pages", type=Path, nargs="+", default=[PAGE, EVIDENCE])
    args = parser.parse_args()
    document = json.loads(args.result.read_text(encoding="utf-8"))
    texts = {page: page.read_text(encoding="utf-8") for page in args.pages}
    for name, lines in tables(document).items():
        page = next((page for page, text in texts.items() if f"<!-- {name} -->" in text), args.pages[0])
        texts[page] = replaced(texts[page], name, lines)
    for page, text in texts.items():
        page.write_text(text, encoding="utf-8")


def tables(found: Mapping[str, Any]) -> dict[str, Sequence[str]]:
    """Return the lines of each table by the name of its mark."""
    return {
        "headline": _headline(found),
        "classes": _grid(found["score_by_class_and_gpu"], found["score_by_class"], found["score_by_gpu"]),
        "sizes": list(_rows(("GPUs", "score"), found["score_by_size"].items())),
        "families": _families(found["families"]),
        "calibration": _calibration(found),
        "choices": _choices(found["choices_by_source"]),
        "wrong": _wrong(found["choices"]),
        "others": _others(found["worst"]),
        "worst": _worst(found["worst"][:5]),
        "outside": _worst(_outside(found["worst"])[:6]),
    }


OTHERS: Final = {
    "vtrain-multi": ("", ("12.2 %", "16.4 %", "19.6 %", "14.7 %")),
    "vtrain-single": ("", ("29.3 %", "56.7 %", "38.9 %", "8.4 %")),
    "nvidia-dgxc": (" · H100-SXM-80GB · bf16", ("13.3 %", "", "44.7 %", "")),
}
"""Mean |predicted / measured - 1| of SimuMax, llm-analysis, Calculon and vTrain by source, and its part."""


def _others(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return our error beside that of other tools; *rows* are all of them, not only the worst."""
    lines = []
    for source, (part, others) in OTHERS.items():
        own = [row for row in rows if row["family"].startswith(f"{source} · ") and part in row["family"]]
        errors = [abs(row["predicted"] / row["measured"] - 1) for row in own]
        middle = sorted(errors)[len(errors) // 2]
        lines.append((f"{source}{part}", f"{len(own):,}", sum(errors) / len(errors), middle, *others))
    head = ("source", "rows", "foretrace, mean", "median", "SimuMax", "llm-analysis", "Calculon", "vTrain")
    return list(_rows(head, lines))


def _outside(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the worst of *rows* outside of the source that the very worst one is of."""
    source = rows[0]["family"].split(" · ")[0]
    return [row for row in rows if not row["family"].startswith(f"{source} · ")]


def replaced(text: str, name: str, lines: Iterable[str]) -> str:
    """Return *text* with *lines* between ``<!-- name -->`` and ``<!-- /name -->``.

    Raises:
        ValueError: the marks are not there.
    """
    start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    before, after = text.index(start) + len(start), text.index(end)
    return text[:before] + "\n".join(("", *lines, "", "")) + text[after:]


def _headline(found: Mapping[str, Any]) -> list[str]:
    cells = [
        ("rows", f"{found['rows']:,}"),
        ("of which in the score (level A and A-, not flagged)", f"{found['predicted']:,}"),
        ("could not be simulated", f"{found['failures']:,}"),
        ("score", found["score"]),
        ("score, each cluster calibrated on one of its runs", found["calibrated_score"]),
        ("score, each model on each machine calibrated on one of its runs", found["calibrated_model_score"]),
        ("score of incomplete rows (levels B and C)", found["incomplete_score"]),
        (f"score of the {found['stress_rows']} rows flagged as stress", found["stress_score"]),
        (f"score with the {found['slow_rows']} rows flagged as slow", found["with_slow_score"]),
        ("groups of layouts to choose from", f"{found['choice_groups']:,}"),
        ("Kendall's tau, mean over groups", f"{found['kendall_tau']:.2f}"),
        ("regret, median over groups", found["regret_median"]),
        ("regret, mean over groups", found["regret_mean"]),
    ]
    return list(_rows(("", "figure"), cells))


def _grid(both: Mapping[str, float], by_class: Mapping[str, float], by_gpu: Mapping[str, float]) -> list[str]:
    rows = [
        (gpu, *(both.get(f"{name} · {gpu}", "") for name in by_class), value) for gpu, value in by_gpu.items()
    ]
    return list(_rows(("GPU", *by_class, "all"), [*rows, ("all", *by_class.values(), "")]))


def _families(families: Iterable[Mapping[str, Any]]) -> list[str]:
    sources: dict[str, list[Mapping[str, Any]]] = {}
    for family in families:
        sources.setdefault(family["name"].split(" · ")[0], []).append(family)
    rows = [
        (
            source,
            str(len(own)),
            f"{sum(one['n'] for one in own):,}",
            sum(one["median_error"] for one in own) / len(own),
            sum(one["bias"] for one in own) / len(own),
        )
        for source, own in sources.items()
    ]
    rows.sort(key=lambda row: row[3], reverse=True)
    return list(_rows(("source", "families", "rows", "score", "bias"), rows))


def _calibration(found: Mapping[str, Any]) -> list[str]:
    check = found["calibration_check"]
    readings = {
        "machine": "calibrated_machine",
        "cluster: machine, framework, precision": "calibrated",
        "model on each machine": "calibrated_model",
        "model on each machine and release": "calibrated_release",
    }
    rows = [
        (f"one run of each {words}, its other runs", found[f"{key}_before"], found[f"{key}_score"])
        for words, key in readings.items()
    ]
    rows.append(("any one run of each model, each source held out", check["before"], check["after"]))
    return list(_rows(("calibrated on", "before", "after"), rows))


def _choices(sources: Mapping[str, Mapping[str, Any]]) -> list[str]:
    rows = [
        (name, str(own["groups"]), f"{own['kendall_tau']:.2f}", own["regret_median"], own["regret_mean"])
        for name, own in sorted(sources.items(), key=lambda item: -item[1]["groups"])
        if own["kendall_tau"] is not None
    ]
    return list(_rows(("source", "groups", "Kendall's tau", "regret, median", "mean"), rows))


def _wrong(groups: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the groups in which following the prediction would have cost most."""
    worst = sorted(groups, key=lambda one: -one["regret"])[:3]
    rows = [
        (
            *(one["source"], one["what"], str(one["layouts"]), one["regret"]),
            *(_layout(one, "chosen"), _layout(one, "fastest")),
        )
        for one in worst
    ]
    return list(_rows(("source", "group", "layouts", "regret", "predicted to be fastest", "fastest"), rows))


def _layout(group: Mapping[str, Any], which: str) -> str:
    """Return the layout of a row without its model and its machine."""
    return str(group[which]).rpartition(",")[0].partition(" pp")[2].join(("pp", ""))


def _worst(worst: Iterable[Mapping[str, Any]]) -> list[str]:
    rows = [
        (row["id"], row["what"], f"{row['predicted']:.3g} s", f"{row['measured']:.3g} s") for row in worst
    ]
    return list(_rows(("row", "what", "predicted", "measured"), rows))


def _rows(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterable[str]:
    yield "| " + " | ".join(heads) + " |"
    yield "|" + "---|" * len(heads)
    for row in rows:
        cells = [format_share(cell) if isinstance(cell, float) else str(cell) for cell in row]
        yield "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
