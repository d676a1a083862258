"""What a report calls runs: a title, how they were laid out, and a short word for each of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foretrace.traces.analysis.activity import is_pipelined
from foretrace.traces.report.format import number, quantity
from foretrace.traces.report.kinds import AXIS_WORDS
from foretrace.traces.run import Run


def title(run: Run) -> str:
    """Return what a run is, in one line: its script or its model on its machine, else its name."""
    model, cluster = _script(run) or _name(run.info.model), _name(run.info.cluster)
    if not model:
        return run.info.name or run.path.rstrip("/").rpartition("/")[2]
    ranks = f"{run.info.world_size} {_device_words(run)}"
    where = f"{ranks} ({cluster})" if cluster else ranks
    return f"{model} on {where}"


def subtitle(run: Run) -> str:
    """Return how a run was laid out, in words."""
    job, model = run.info.job or {}, _name(run.info.model)
    if _script(run):
        parts = ["rehearsed", _stages(run) if is_pipelined(run) else model, layout_words(run)]
    else:
        parts = [
            run.info.origin,
            run.info.name if model and model not in run.info.name else "",
            layout_words(run),
        ]
    if batches := number(job.get("n_microbatches")):
        each = [quantity("", job[key]) for key in ("micro_batch", "seq_len") if number(job.get(key))]
        of = f" of {' × '.join(each)} tokens" if len(each) == 2 else ""
        parts.append(f"{batches:.0f} micro-batch{'es' if batches > 1 else ''}{of}")
    for key, noun in (("schedule", ""), ("sharding", ""), ("recompute", "recompute "), ("precision", "")):
        value = job.get(key)
        if isinstance(value, str) and value not in ("", "none") and (key != "schedule" or is_pipelined(run)):
            parts.append(f"{noun}{value}")
    parts += _unusual(job)
    return " · ".join(part for part in parts if part)


def _unusual(job: Mapping[str, Any]) -> list[str]:
    """Return settings that most jobs leave alone and that change what a step is made of, in words."""
    said = []
    if job.get("fp8"):
        said.append(f"products in fp8{f' ({recipe})' if (recipe := job.get('recipe')) else ''}")
    if shards := number(job.get("shard_ranks")):
        said.append(f"shards over {shards:.0f} ranks")
    if rank := number(job.get("lora_rank")):
        said.append(f"LoRA of rank {rank:.0f}{', base in 4 bits' if job.get('quantized_base') else ''}")
    if (offload := job.get("offload", "none")) != "none":
        n_layers = number(job.get("offload_layers"))
        of = f" of {n_layers:.0f} layers" if n_layers else ""
        said.append(f"{'everything' if offload == 'all' else offload}{of} on {job.get('offload_to', 'host')}")
    return said


def _script(run: Run) -> str:
    """Return the name of the script of which a run is a rehearsal, empty if it is none."""
    return run.info.name.partition(" on ")[0] if (run.info.job or {}).get("rehearsed") else ""


def _stages(run: Run) -> str:
    """Return how large the model of a pipeline is: the modules that were called are called after stages.

    Empty if stages are missing, whose parameters nobody has seen.
    """
    layout, model = run.info.layout, run.info.model or {}
    n_params, structure = model.get("n_params"), model.get("structure")
    if layout is None or len(run.stored_ranks) < layout.pp or not isinstance(structure, Mapping):
        return ""
    layers = {layer for part in structure.values() for layer in part.get("layers", ())}
    return f"{quantity('', n_params)} parameters in {len(layers)} layers" if n_params and layers else ""


def layout_words(run: Run) -> str:
    """Return the parallel degrees above 1 in words, and the number of ranks."""
    layout = run.info.layout
    ranks = f"{run.info.world_size} rank{'s' if run.info.world_size > 1 else ''}"
    if layout is None:
        return ranks
    axes = [axis for axis in ("tp", "cp", "ep", "pp", "dp") if layout.degrees[axis] > 1]
    return ranks + "".join(f" · {AXIS_WORDS[axis]} {layout.degrees[axis]}" for axis in axes)


def run_labels(runs: Sequence[Run]) -> tuple[str, ...]:
    """Return a short word for each run: where it comes from, or, if that is the same, its name or folder.

    Of names, what they have in common in front is left out.
    """
    origins = tuple(run.info.origin for run in runs)
    if len(set(origins)) == len(runs):
        return origins
    names = tuple(run.info.name for run in runs)
    folders = tuple(Path(run.path).name for run in runs)
    apart = (one for one in (names, folders) if len(set(one)) == len(runs) and all(one))
    return _own_parts(next(apart, ("first", "second")))


def _own_parts(names: Sequence[str]) -> tuple[str, ...]:
    """Return *names* from the first word on in which they differ, if every one of them has such a word.

    >>> _own_parts(["8b on 64 dgx-h100, tp8 dp8", "8b on 64 dgx-h100, tp4 dp16"])
    ('tp8 dp8', 'tp4 dp16')
    >>> _own_parts(["8b on 64", "8b"])
    ('8b on 64', '8b')
    """
    words = [name.split() for name in names]
    same = next((at for at, column in enumerate(zip(*words, strict=False)) if len(set(column)) > 1), 0)
    return tuple(" ".join(each[same:]) for each in words) if same else tuple(names)


def _name(description: Mapping[str, Any] | None) -> str:
    """Return the name that a description gives itself, "" if none."""
    name = (description or {}).get("name")
    return name if isinstance(name, str) else ""


def _device_words(run: Run) -> str:
    device = (run.info.cluster or {}).get("device")
    name = device.get("name") if isinstance(device, Mapping) else None
    return f"× {name}" if isinstance(name, str) and name else "ranks"
