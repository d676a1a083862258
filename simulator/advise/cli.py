"""The verb ``foretrace advise``: how to train a model on some GPUs, in words, every sentence computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from foretrace.door import json_text
from foretrace.simulator.search.flags import (
    FRAMEWORK,
    GLOBAL_BATCH,
    MASTER_WEIGHTS,
    OF_THE_JOB,
    OPTIMIZER,
    PRECISION,
    PRICE,
    SEQ_LEN,
    TOKENS,
)
from foretrace.simulator.settings import MOST

if TYPE_CHECKING:
    from foretrace.simulator.advise.ladder import Question, Rung


@click.command()
@click.option("--model", required=True, help="Model: a preset such as llama2-13b, or a config.json.")
@click.option("--cluster", default="dgx-h100", show_default=True, help="Machine: a name or a TOML file.")
@click.option("--gpus", required=True, type=click.IntRange(1, MOST), help="GPUs to use.")
@SEQ_LEN
@GLOBAL_BATCH
@click.option(
    "--micro-batch", type=click.IntRange(1, MOST), help="Sequences per micro-batch. [default: the fastest]"
)
@PRECISION
@OPTIMIZER
@MASTER_WEIGHTS
@FRAMEWORK
@TOKENS
@PRICE
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def advise(*, as_json: bool, **flags: Any) -> None:
    """Explain in words how to train a model on given GPUs: what fits, what is missing if not, what is best.

    foretrace advise --model llama2-13b --cluster dgx-a100 --gpus 4 --seq-len 4096
    """
    from foretrace.simulator.advise.ladder import climb
    from foretrace.simulator.advise.words import sentence, verdict
    from foretrace.simulator.config import job_settings
    from foretrace.simulator.search.describe import conventions
    from foretrace.traces.console import telling

    question = _question(flags)
    with telling("trying", quiet=as_json) as tell:
        rungs = climb(question, tell)
        if flags["framework"] is None:
            rungs = [_covering(rung) for rung in rungs]
        advice = list(verdict(question, rungs))
    taken = next((rung.job for rung in rungs if rung.way.key == advice[0].numbers.get("way")), None)
    some = taken or next(rung.job for rung in rungs if rung.job)
    told, _ = conventions(some, given=flags["framework"] is not None, wanted=taken is not None)
    found = {
        "question": _asked(question),
        "conventions": told,
        "ladder": [
            {
                "way": rung.way.key,
                "title": rung.way.title,
                "fits": rung.fits,
                "trains_all": rung.way.trains_all,
                "sentence": sentence(rung).text,
                "numbers": sentence(rung).numbers,
                "job": job_settings(rung.job) if rung.job else None,
                "figures": question.figures(rung),
            }
            for rung in rungs
        ],
        "advice": [one._asdict() for one in advice],
    }
    if as_json:
        click.echo(json_text(found))
    else:
        _show(found)


def _covering(rung: Rung) -> Rung:
    """Return *rung* with ranges that cover what every framework makes of it."""
    from dataclasses import replace

    from foretrace.simulator.advise.ladder import engine_of
    from foretrace.simulator.intervals import Reading, covers
    from foretrace.simulator.simulate import UNNAMED, by_framework

    if rung.job is None or rung.summary is None:
        return rung
    summary = rung.summary
    own = Reading(rung.job.framework, summary["step_time_s"], summary["peak_memory_bytes"])
    ranges = covers(summary["intervals"], own, {UNNAMED: by_framework(rung.job, engine=engine_of(rung.job))})
    return replace(rung, summary={**summary, "intervals": ranges})


def _question(flags: dict[str, Any]) -> Question:
    from foretrace.simulator.advise.ladder import Question
    from foretrace.simulator.goodput.training import parse_count
    from foretrace.simulator.models.sources import load_model
    from foretrace.simulator.price import usd_per_gpu_hour
    from foretrace.simulator.search.space import usual_batch
    from foretrace.topologies.catalog import load_cluster

    if flags["tokens"] is not None:
        parse_count(flags["tokens"])  # says what is wrong before the work begins
    cluster = load_cluster(flags["cluster"], flags["gpus"])
    return Question(
        model=load_model(flags["model"]),
        cluster=cluster,
        global_batch=flags["global_batch"] or usual_batch(flags["seq_len"]),
        seq_len=flags["seq_len"],
        micro_batch=flags["micro_batch"] or 0,
        others={name: flags[name] for name in OF_THE_JOB if flags[name] is not None},
        price_usd_per_gpu_hour=usd_per_gpu_hour(flags["price"], cluster.mean_price_usd_per_gpu_hour),
        is_price_given=flags["price"] is not None,
        tokens=flags["tokens"],
    )


def _asked(question: Question) -> dict[str, Any]:
    return {
        "model": question.model.name,
        "n_params": question.model.n_params,
        "cluster": question.cluster.name,
        "gpus": question.cluster.n_gpus,
        "memory_bytes": question.cluster.device.memory_bytes,
        "global_batch": question.global_batch,
        "seq_len": question.seq_len,
        "tokens": question.tokens,
        "price_usd_per_gpu_hour": question.price_usd_per_gpu_hour,
    }


def _show(found: dict[str, Any]) -> None:
    """Print the ladder, then what to do."""
    from rich.table import Table
    from rich.text import Text

    from foretrace.simulator.search.describe import conventions_line
    from foretrace.topologies.units import format_capacity
    from foretrace.traces.console import stdout

    console, asked = stdout(), found["question"]
    gpus = "one GPU" if asked["gpus"] == 1 else f"{asked['gpus']} GPUs"
    console.print(
        Text(
            f"{asked['model']} ({asked['n_params'] / 1e9:.3g} billion parameters) on {gpus} of "
            f"{asked['cluster']}, {format_capacity(asked['memory_bytes'])} each; "
            f"{asked['global_batch']} sequences of {asked['seq_len']:,} tokens a step",
            style="bold",
        )
    )
    told = found["conventions"]
    console.print(Text(conventions_line(told["framework"], told["step_time_s"]), style="dim"))
    for rung in found["ladder"]:
        mark = ("+", "green") if rung["fits"] else ("-", "red")
        line = Table.grid(padding=(0, 1))
        line.add_row(Text(" "), Text(mark[0], style=mark[1]), Text(rung["sentence"]))
        console.print(line)
    console.print()
    for one in found["advice"]:
        said = one["text"]
        console.print(Text(said[0].upper() + said[1:] + "."))
