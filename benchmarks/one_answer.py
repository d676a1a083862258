"""One job has one answer: ten questions asked of every verb, as one table.

    python benchmarks/one_answer.py

Of a layout: the step time that `simulate`, `search` among that layout alone, `goodput` and the what-if page
give, the peak memory of `simulate`, `search`, `memory` and the page, their ranges, and the energy of tokens
with its range, of `goodput` where nothing fails. The page names a framework where others leave it open: its
ranges are those of another question. Of the best layout: what `search`,
`advise` and the page find where only model, machine, batch and sequence are given. Ends with status 1 if two
of them differ.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any, Final

from click.testing import CliRunner

from foretrace.cli import main
from foretrace.simulator.what_if.planner import DEFAULTS, Planner
from foretrace.traces.serving.server import Query

QUESTIONS: Final[tuple[dict[str, Any], ...]] = (
    {"model": "llama2-7b", "cluster": "dgx-a100", "gpus": 8, "tp": 2, "pp": 2, "global_batch": 16},
    {"model": "llama3-8b", "cluster": "dgx-h100", "gpus": 16, "global_batch": 64, "sharding": "fsdp"},
    {"model": "llama3-70b", "cluster": "dgx-h100", "gpus": 64, "tp": 8, "pp": 4, "global_batch": 64},
    {
        "model": "mixtral-8x7b", "cluster": "dgx-h100", "gpus": 32, "tp": 2, "ep": 8, "expert_tp": 1,
        "global_batch": 64,
    },
    {"model": "llama3.2-1b", "cluster": "dgx-a100", "gpus": 4, "global_batch": 32, "framework": "torchtitan"},
    {"model": "llama3-8b", "cluster": "dgx-h100", "gpus": 8, "pp": 8, "schedule": "zb-h1", "global_batch": 8},
    {"model": "llama3-8b", "cluster": "dgx-h200", "gpus": 8, "cp": 4, "global_batch": 8, "seq_len": 32768},
    {"model": "llama2-13b", "cluster": "dgx-a100", "gpus": 16, "tp": 4, "global_batch": 32, "micro_batch": 2},
    {"model": "llama3-8b", "cluster": "dgx-b200", "gpus": 8, "global_batch": 32, "sharding": "zero2"},
    {
        "model": "deepseek-v2-lite", "cluster": "dgx-h100", "gpus": 32, "pp": 4, "ep": 8, "expert_tp": 1,
        "schedule": "dualpipe", "global_batch": 96,
    },
)  # fmt: skip
"""Dense and sharded, pipelines, experts, another framework, zero-bubble, context parallel, DualPipe."""

NOTHING_FAILS: Final = ("--mtbf-gpu", "1e12 h", "--checkpoint-time", "1e-9 s")
"""What leaves of a training its steps alone."""

ENERGY: Final = "kwh_per_1b_tokens"
"""The figure of energy that is compared."""

OPEN: Final = ("model", "cluster", "gpus", "global_batch", "seq_len", "framework")
"""What is given where the best layout is asked for."""


def said(*words: str) -> dict[str, Any]:
    """Return what a verb prints with ``--json``."""
    done = CliRunner().invoke(main, [*words, "--json"])
    if done.exit_code:
        raise SystemExit(f"foretrace {' '.join(words)}: {done.output}")
    return dict(json.loads(done.stdout))


def flags(job: Mapping[str, Any]) -> list[str]:
    """Return *job* as it is typed."""
    return [word for name, value in job.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def whole(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return every setting of a question, so that no verb has to choose one."""
    degrees = dict.fromkeys(("tp", "pp", "cp", "ep"), 1)
    usual = {"seq_len": 4096, "micro_batch": 1, "sharding": "zero1", "recompute": "full", "schedule": "1f1b"}
    return {**usual, **degrees, **asked}


def of_the_layout(asked: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return every figure of one layout that several verbs give, by who says it."""
    job = whole(asked)
    with tempfile.TemporaryDirectory() as folder:
        told = said("simulate", *flags(job), "-o", f"{folder}/run")
        goodput = said("goodput", f"{folder}/run", "--tokens", "1B", *NOTHING_FAILS)
    (found,) = said("search", *flags(job), "--top", "1")["layouts"] or [{}]
    page = Planner().plan({name: str(value) for name, value in job.items()}).simulation.summary
    memory = said("memory", *flags(job))
    verbs = {"simulate": told, "search": found, "goodput": goodput, "memory": memory, "page": page}
    figures = {
        name: {verb: verbs[verb][name] for verb in by.split()}
        for name, by in (
            ("step_time_s", "simulate search goodput page"),
            ("peak_memory_bytes", "simulate search memory page"),
            *((name, "simulate search page") for name in ("mfu", "fits", "tokens_per_s_per_gpu")),
        )
    }
    for end, place in (("least", 0), ("most", 1)):
        for name, key in (
            ("step_time_s", "step_time_interval_s"),
            ("peak_memory_bytes", "peak_memory_interval_bytes"),
        ):
            figures[f"{end} {name}"] = {
                "simulate": told["intervals"][name][place],
                "search": found[key][place],
            }
        figures[f"{end} {ENERGY}"] = {
            **{verb: verbs[verb]["energy"][f"{ENERGY}_interval"][place] for verb in ("simulate", "search")},
            "goodput": goodput["energy"]["kwh_interval"][place],
        }
    return figures | {
        ENERGY: {
            **{verb: verbs[verb]["energy"][ENERGY] for verb in ("simulate", "search")},
            "goodput": goodput["energy"]["kwh"],
        }
    }


def of_the_best(asked: Mapping[str, Any]) -> dict[str, float]:
    """Return the step time of the best layout, by who finds it."""
    job = {name: value for name, value in whole(asked).items() if name in OPEN}
    ladder = said("advise", *flags(job))["ladder"]
    planner = Planner()
    while True:
        answer = planner.routes()["/plan/best"](Query({**DEFAULTS, **{n: str(v) for n, v in job.items()}}))
        page = json.loads(answer.body)
        if page["done"]:
            break
    return {
        "search": said("search", *flags(job))["layouts"][0]["step_time_s"],
        "advise": min(
            rung["figures"]["step_time_s"] for rung in ladder if rung["fits"] and rung["trains_all"]
        ),
        "page": page["layouts"][0]["step_time_s"],
    }


def differ(values: Mapping[str, float]) -> bool:
    """Return whether two of *values* differ by more than the nanosecond that they are counted in."""
    return max(values.values()) - min(values.values()) > 1e-8 * max(values.values())


def table() -> Iterator[tuple[str, bool]]:
    """Yield the lines of the table, and whether one says two things."""
    heads = (
        "step: simulate, search, goodput, page",
        "peak: simulate, search, memory, page",
        "range of the step: simulate, search",
        "energy of 1B tokens: simulate, search, goodput",
        "best: search, advise, page",
    )
    yield f"| job | {' | '.join(heads)} |", False
    yield f"|---|{'---|' * len(heads)}", False
    for asked in QUESTIONS:
        layout, best = of_the_layout(asked), of_the_best(asked)
        cells = [
            " ".join(f"{name} {value}" for name, value in asked.items()),
            ", ".join(f"{value:.4f} s" for value in layout["step_time_s"].values()),
            ", ".join(f"{value / 1e9:.3f} GB" for value in layout["peak_memory_bytes"].values()),
            _ranges(layout, "step_time_s", "s"),
            _ranges(layout, ENERGY, "kWh"),
            ", ".join(f"{value:.4f} s" for value in best.values()),
        ]
        yield f"| {' | '.join(cells)} |", any(map(differ, (*layout.values(), best)))


def _ranges(layout: Mapping[str, Mapping[str, float]], name: str, unit: str) -> str:
    """Return the ranges of a figure, by who says them, as one cell."""
    ends = zip(layout[f"least {name}"].values(), layout[f"most {name}"].values(), strict=True)
    return ", ".join(f"{low:.4g} to {high:.4g} {unit}" for low, high in ends)


if __name__ == "__main__":
    found = [(print(line, flush=True), is_wrong)[1] for line, is_wrong in table()]
    sys.exit(any(found))
