"""Writes a job for other tools, and says what they cannot express: by reading it back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from foretrace.door import PARSERS
from foretrace.simulator.builder.stages import stage_layers
from foretrace.simulator.config import job_from, job_settings
from foretrace.simulator.configs import write_megatron, write_tables
from foretrace.simulator.configs.documents import Document
from foretrace.simulator.configs.read import read_documents
from foretrace.simulator.configs.shell import arguments
from foretrace.simulator.configs.torchtitan import presets
from foretrace.simulator.errors import SimulationError
from foretrace.simulator.job import Job
from foretrace.simulator.models.sources import model_fields
from foretrace.simulator.schedules import SCHEDULES
from foretrace.simulator.settings import CONVENTIONS, SHAPE


class Target(NamedTuple):
    """A tool that jobs are written for.

    Attributes:
        file: what its file is usually called.
        write: returns the text of a job.
        parse: reads the text; None where nothing does.
        asks: settings that belong to the training script, and have to be given beside the file.
        framework: whose conventions hold when it runs.
    """

    file: str
    write: Callable[[Job], str]
    parse: Callable[[str], Mapping[str, Any]] | None = None
    asks: tuple[str, ...] = ()


_SCRIPT: Final = ("model", "seq_len", "micro_batch", "global_batch")

TARGETS: Final[Mapping[str, Target]] = MappingProxyType(
    {
        "megatron": Target("train.sh", write_megatron.text, arguments),
        "torchtitan": Target("torchtitan.toml", write_tables.torchtitan, PARSERS["TOML"], ("gpus",)),
        "deepspeed": Target(
            "ds_config.json",
            write_tables.deepspeed,
            PARSERS["JSON"],
            ("model", "seq_len", "recompute", "gpus"),
        ),
        "accelerate": Target("accelerate.yaml", write_tables.accelerate, PARSERS["YAML"], _SCRIPT),
        "fsdp2": Target("fsdp2.py", write_tables.fsdp2),
    }
)
"""Tools that jobs are written for, by name."""

_OURS: Final = (
    *("cluster", "gpus", "stragglers", "link_changes", "samples", "seed", "compute_jitter", "steps"),
    *(
        "network_jitter",
        "rank_jitter",
        "overlap_slowdown",
        "ranks_per_node",
        "placement",
        "nccl_algo",
        "nccl_proto",
    ),
    *("expert_imbalance", "checkpoint_every", "checkpoint_bytes_per_s", "dp", CONVENTIONS, SHAPE),
)
"""Settings of the simulation rather than of the run; and ``dp``, which follows from the others."""


class Difference(NamedTuple):
    """What a tool would do otherwise: a setting, what was asked for, and what its file gives."""

    setting: str
    asked: Any
    gives: Any


class Written(NamedTuple):
    """A job as a tool takes it.

    Attributes:
        target: a key of ``TARGETS``.
        text: contents of its file.
        differences: what the tool cannot be told, or would do otherwise.
        asks: settings that the training script has to be given, by name.
    """

    target: str
    text: str
    differences: tuple[Difference, ...]
    asks: dict[str, Any]

    def describe(self) -> dict[str, Any]:
        """Return all of it as plain JSON types."""
        return {**self._asdict(), "differences": [one._asdict() for one in self.differences]}


def written(job: Job, target: str) -> Written:
    """Return *job* as the tool *target* takes it."""
    found = TARGETS[target]
    text = found.write(job)
    wanted = job_settings(job)
    asks = {name: wanted[name] for name in found.asks if name in wanted}
    # It knows a model only by family and flavor.
    if target == "torchtitan" and job.model.name not in presets().values():
        asks["model"] = job.model.name
    differences = () if found.parse is None else tuple(_differences(job, target, text, asks))
    return Written(target, text, differences, asks)


def read_back(job: Job, target: str, text: str, asks: Mapping[str, Any]) -> Job:
    """Return the job that the tool's *text* describes on the machine of *job*.

    Raises:
        SimulationError: the text describes none that can run there.
    """
    parse = TARGETS[target].parse
    content = parse(text) if parse is not None else {}
    document = Document(target, Path(TARGETS[target].file), content)
    given = {"cluster": job.cluster.name, "gpus": job.cluster.n_gpus, **asks}
    if "model" in asks:
        given |= {"model": job.model.name, SHAPE: model_fields(job.model)}
    return job_from(read_documents([document], given).settings, cluster=job.cluster)


def _differences(job: Job, target: str, text: str, asks: Mapping[str, Any]) -> list[Difference]:
    try:
        back = read_back(job, target, text, asks)
    except SimulationError as error:
        return [Difference("layout", " ".join(f"{a}{n}" for a, n in job.layout.degrees.items()), str(error))]
    found = []
    wanted, gives = job_settings(job), job_settings(back)
    for name in dict.fromkeys([*wanted, *gives]):
        if name in (*_OURS, "model", "framework") or _same(name, job, back):
            continue
        found.append(Difference(name, wanted.get(name), gives.get(name)))
    return found + _of_model(job, back) + _of_profile(job, back)


def _same(name: str, job: Job, back: Job) -> bool:
    """Return whether a setting has the same effect; a schedule has none without a pipeline."""
    if name in ("schedule", "virtual_stages", "overlap_p2p", "overlap_pairs", "deallocate_outputs") and (
        job.layout.pp == 1
    ):
        return True
    if name == "sequence_parallel" and job.layout.tp == 1:
        return True
    if name == "sharding" and job.layout.dp * job.layout.cp == 1:
        return True
    # Empty, 0 and None are alike: not given.
    return bool((_meant(name, job) or None) == (_meant(name, back) or None))


def _meant(name: str, job: Job) -> Any:
    """Return what the setting *name* comes to in *job*."""
    if name in ("pp", "cp", "tp", "ep", "expert_tp"):
        return getattr(job.layout, name)
    if name == "sharding":
        return job.shards.stage  # fully sharded is the same stage by either name
    if name == "shard_ranks":
        return job.shard_ranks or job.layout.dp * job.layout.cp
    if name == "layers_per_stage":  # the layers of every stage
        several = job.virtual_stages or SCHEDULES[job.schedule].virtual_stages
        return stage_layers(job, job.layout.pp * several)
    return getattr(job, name, None)


def _of_model(job: Job, back: Job) -> list[Difference]:
    wanted, gives = asdict(job.model), asdict(back.model)
    return [
        Difference(f"model.{name}", wanted[name], gives[name])
        for name in wanted
        if name not in ("name", "source", "left_out") and wanted[name] != gives[name]
    ]


def _of_profile(job: Job, back: Job) -> list[Difference]:
    """Return the conventions that the file would set differently from the job."""
    named = dict(back.conventions)
    return [
        Difference(name, getattr(job.profile, name), value)
        for name, value in named.items()
        if getattr(job.profile, name) != value
    ]
