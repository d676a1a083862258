"""The verb ``foretrace advise``: how to train a model on some GPUs, in words, every sentence computed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from foretrace.simulator.settings import MOST

if TYPE_CHECKING:
    from foretrace.simulator.advise.ladder import Question


@click.command()
@click.option("--model", required=True, help="Model: a preset such as llama2-13b, or a config.json.")
@click.option("--cluster", default="dgx-h100", show_default=True, help="Machine: a name or a TOML file.")
@click.option("--gpus", required=True, type=click.IntRange(1, MOST), help="GPUs to use.")
@click.option(
    "--seq-len", default=4096, show_default=True, type=click.IntRange(1, MOST), help="Tokens per sequence."
)
@click.option(
    "--global-batch", type=click.IntRange(1, MOST), help="Sequences per optimizer step. [default: 8 per GPU]"
)
@click.option(
    "--micro-batch", type=click.IntRange(1, MOST), help="Sequences per micro-batch. [default: the fastest]"
)
@click.option(
    "--precision",
    type=click.Choice(["bf16", "fp16", "fp32"]),
    default="bf16",
    show_default=True,
    help="Number format of compute.",
)
@click.option(
    "--kernels",
    type=click.Choice(["fused", "eager"]),
    default="fused",
    show_default=True,
    help="Run element-wise work in fused or in eager kernels.",
)
@click.option(
    "--framework",
    default="torchtitan",
    show_default=True,
    help="Framework whose conventions for sharding apply.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def advise(*, as_json: bool, **flags: Any) -> None:
    """Explain in words how to train a model on given GPUs: what fits, what is missing if not, what is best.

    foretrace advise --model llama2-13b --cluster dgx-a100 --gpus 4 --seq-len 4096
    """
    from foretrace.simulator.advise.ladder import climb
    from foretrace.simulator.advise.words import sentence, verdict
    from foretrace.simulator.config import job_settings
    from foretrace.traces.console import telling

    question = _question(flags)
    with telling("trying", quiet=as_json) as tell:
        rungs = climb(question, tell)
    found = {
        "question": _asked(question),
        "ladder": [
            {
                "way": rung.way.key,
                "title": rung.way.title,
                "fits": rung.fits,
                "trains_all": rung.way.trains_all,
                "sentence": sentence(rung).text,
                "numbers": sentence(rung).numbers,
                "job": job_settings(rung.job) if rung.job else None,
            }
            for rung in rungs
        ],
        "advice": [one._asdict() for one in verdict(question, rungs)],
    }
    if as_json:
        click.echo(json.dumps(found))
    else:
        _show(found)


def _question(flags: dict[str, Any]) -> Question:
    from foretrace.simulator.advise.ladder import Question
    from foretrace.simulator.models.sources import load_model
    from foretrace.topologies.catalog import load_cluster

    return Question(
        model=load_model(flags["model"]),
        cluster=load_cluster(flags["cluster"], flags["gpus"]),
        global_batch=flags["global_batch"] or 8 * flags["gpus"],
        seq_len=flags["seq_len"],
        framework=flags["framework"],
        micro_batch=flags["micro_batch"] or 0,
        precision=flags["precision"],
        kernels=flags["kernels"],
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
        "conventions": f"{question.framework}, {question.kernels} kernels; tensor and pipeline parallelism: "
        "megatron",
    }


def _show(found: dict[str, Any]) -> None:
    """Print the ladder, then what to do."""
    from rich.table import Table
    from rich.text import Text

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
    console.print(Text(f"conventions: {asked['conventions']}", style="dim"))
    for rung in found["ladder"]:
        mark = ("+", "green") if rung["fits"] else ("-", "red")
        line = Table.grid(padding=(0, 1))
        line.add_row(Text(" "), Text(mark[0], style=mark[1]), Text(rung["sentence"]))
        console.print(line)
    console.print()
    for one in found["advice"]:
        said = one["text"]
        console.print(Text(said[0].upper() + said[1:] + "."))
