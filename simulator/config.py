"""Settings of a job: read from a TOML file, overridden by flags, turned into a ``Job``, written back."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from foretrace.door import load, own_table
from foretrace.simulator.errors import ConfigError, JobError
from foretrace.simulator.framework import OVERRIDABLE, load_framework, profile
from foretrace.simulator.job import Job, check_chunks, check_heads, possible_expert_tp
from foretrace.simulator.models.model import Model
from foretrace.simulator.models.sources import (
    SHAPE_FIELDS,
    is_preset,
    load_model,
    model_fields,
    model_from_fields,
    published,
)
from foretrace.simulator.nearest import near_name
from foretrace.simulator.settings import CONVENTIONS, KINDS, SHAPE, TABLES, checked, near_setting
from foretrace.simulator.variation import Variation
from foretrace.topologies.catalog import load_cluster
from foretrace.topologies.cluster import Cluster
from foretrace.traces.layout import Layout

NEEDED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "model": "--model, a preset such as llama3-8b, or a config.json",
        "cluster": "--cluster, a machine such as dgx-h100, or a .toml file",
        "global_batch": "sequences a step (--global-batch 256, or global_batch = 256 in a file)",
    }
)
"""What no job can be made without, and how to give it."""

_OF_JOB: Final = tuple(
    name
    for table in ("batch", "schedule", "network", "framework", "training", "outer")
    for name in TABLES[table].values()
    if name != "steps"
)


def read_config(path: str | Path) -> dict[str, Any]:
    """Return the settings in the TOML file *path*; those it does not give are left out.

    Paths of a model, a cluster or a schedule are taken from the directory of the file. Raises ConfigError if
    the file cannot be read, is not TOML, or describes no job but, for example, a machine; a key is unknown or
    given twice, or a value has the wrong type.
    """
    path = Path(path)
    document = load(path, "TOML", ConfigError)
    if said := other_file(str(path), document):
        raise ConfigError(said)
    # Conventions and shape are taken out of their tables first: what is left there are plain settings.
    settings = {
        **_taken(document, "framework", CONVENTIONS, OVERRIDABLE),
        **_taken(document, "model", SHAPE, SHAPE_FIELDS),
    }
    for place, name, value in _flattened(document, path):
        if name in settings:
            raise ConfigError(f"{path}: {name} is given twice, the second time as {place}")
        settings[name] = checked(f"{path}: {place}", name, value)
    for name in ("model", "cluster", "schedule"):
        # A file beside goes before a name of the catalogue.
        if name in settings and (beside := path.parent / settings[name]).exists():
            settings[name] = str(beside)
    return settings


def write_config(settings: Mapping[str, Any]) -> str:
    """Return *settings* as the text of a TOML file, sorted into tables; ``read_config`` reads it back."""
    lines: list[str] = []
    for table, keys in TABLES.items():
        given = [(key, settings[name]) for key, name in keys.items() if settings.get(name) is not None]
        inside = {"framework": CONVENTIONS, "model": SHAPE}.get(table)
        given += list((settings.get(inside) or {}).items()) if inside else []
        if given:
            lines += [f"[{table}]", *(f"{key} = {_toml(value)}" for key, value in given), ""]
    return "\n".join(lines)


PUBLISHED_WITH: Final = frozenset({"model", "cluster", "gpus", "steps"})
"""Settings beside which a run is the published one of its model."""


def job_from(
    settings: Mapping[str, Any], *, model: Model | None = None, cluster: Cluster | None = None
) -> Job:
    """Return the job that *settings* describe, with *model* and *cluster* in place of those that they name.

    Without ``dp`` the data-parallel degree is what fills ``gpus``; without ``gpus`` the machine has as many
    as the layout needs. Raises ConfigError if a setting is unknown, has the wrong type, or one that is needed
    is missing. Raises SimulationError, TopologyError, TraceError if the job, its model, machine or layout is
    not possible.
    """
    given = {name: checked(name, name, value) for name, value in settings.items() if value is not None}
    # Before what is missing is named: a published run brings its batch along.
    given, fields, source = _as_published(given) if model is None else (given, {}, "")
    _check_enough(given, model)
    model = replace(_model(given), **fields) if model is None else model
    degrees: dict[str, int] = {name: given[name] for name in TABLES["layout"] if name in given}
    # Before dp is inferred: that tp does not fit the heads says more than that some GPUs are left over.
    check_heads(max(degrees.get("tp", 1), 1), model)
    if "gpus" in given and "dp" not in given:
        degrees["dp"] = inferred_dp(given["gpus"], degrees)
    degrees, origin = with_expert_tp(model, degrees, given)
    layout = Layout(**degrees)
    job = Job(
        model=model,
        cluster=cluster or load_cluster(given["cluster"], given.get("gpus", layout.world_size)),
        layout=layout,
        n_steps=given.get("steps", 1),
        variation=Variation(**{name: given[name] for name in TABLES["variation"] if name in given}),
        expert_tp_from=origin,
        published=source,
        conventions=tuple(
            (name, tuple(value) if isinstance(value, list) else value)
            for name, value in given.get(CONVENTIONS, {}).items()
        ),
        **{**of_framework(given), **{name: given[name] for name in _OF_JOB if name in given}},
    )
    check_chunks(job)
    check_sites(job)
    return job


def check_sites(job: Job) -> None:
    """Raise JobError if sites are to meet, and there is one alone."""
    # Only here, not where a Job is made: a job of one site is what each of several sites runs.
    if job.outer_every and job.n_sites == 1:
        raise JobError(
            f"outer_every={job.outer_every} needs GPUs on several sites: {job.cluster.n_gpus} are on one of "
            f"{job.cluster.name}, which has {job.cluster.fabric_spec.group_nodes * job.cluster.gpus_per_node}"
        )


def _check_enough(given: Mapping[str, Any], model: Model | None) -> None:
    """Raise ConfigError, which names all that is missing, if a job cannot be made of the settings *given*.

    What is given is looked up first: a name that is not known matters more than what is not there yet.
    """
    known = {*given, *(["model"] if model is not None or SHAPE in given else [])}
    missing = [name for name in NEEDED if name not in known]
    if not missing:
        return
    if "model" in given and model is None:
        _model(given)
    if "cluster" in given:
        load_cluster(given["cluster"])
    names = f"{', '.join(missing[:-1])} and {missing[-1]} are" if len(missing) > 1 else f"{missing[0]} is"
    raise ConfigError(f"{names} missing: {'; '.join(NEEDED[name] for name in missing)}")


def _as_published(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Return settings, fields of the model, and the source of those that nobody gave.

    A run that says no more than its model and as many GPUs as the published one had is that one.
    """
    recipe = published(given.get("model", ""))
    if not recipe or set(given) - PUBLISHED_WITH or given.get("gpus") != recipe["gpus"]:
        return given, {}, ""
    fields, source = recipe.pop("model", {}), recipe.pop("source")
    settings = {name: checked(f"[recipe] {name}", name, value) for name, value in recipe.items()}
    return {**settings, **given}, fields, source


def _model(given: Mapping[str, Any]) -> Model:
    """Return the model by its name, or with the fields that a file gives it."""
    if SHAPE in given:
        return model_from_fields({"name": given.get("model", "model"), **given[SHAPE]}, where="[model]")
    return load_model(given["model"])


def with_expert_tp(
    model: Model, degrees: Mapping[str, int], given: Mapping[str, Any]
) -> tuple[dict[str, int], str]:
    """Return *degrees* with the ranks that an expert is cut over, and where these are from.

    If they are not given, the only number that is possible counts; else that of the published recipe of the
    model; else that of the framework that is *given*; else it stays open, and is taken as ``tp``.

    Returns:
        the degrees, and a key of ``simulator.job.EXPERT_TP_FROM``; empty if there is nothing to decide.
    """
    tp, ep = degrees.get("tp", 1), degrees.get("ep", 1)
    if not model.n_experts or "expert_tp" in degrees or tp <= 1 or min(degrees.values()) < 1:
        return dict(degrees), ""
    framework = profile(given.get("framework", "megatron"), tuple((given.get(CONVENTIONS) or {}).items()))
    possible = possible_expert_tp(model, degrees, sequence_parallel=given.get("sequence_parallel", True))
    own = {"tp": tp, "one": 1 if ep > 1 else tp}.get(framework.expert_tp)
    stated = "framework" in given or "expert_tp" in (given.get(CONVENTIONS) or {})
    if len(possible) == 1:
        return {**degrees, "expert_tp": possible[0]}, "only"
    if model.expert_tp in possible:
        return {**degrees, "expert_tp": model.expert_tp}, "model"
    if stated and own is not None:
        return {**degrees, "expert_tp": own}, "framework"
    return {**degrees, "expert_tp": tp}, "open"


def of_framework(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a job has by its framework where it is not *given*: the dtype of gradients.

    Where no framework is given either, what stays open is ``unsaid``.
    """
    if "framework" not in given:
        return {"unsaid": tuple(name for name in ("framework", "fp32_gradients") if name not in given)}
    if "fp32_gradients" in given:
        return {}
    fp32 = load_framework(given["framework"]).fp32_gradients
    return {"fp32_gradients": given.get("precision", "bf16") in fp32}


def job_settings(job: Job) -> dict[str, Any]:
    """Return every setting of *job* by name, defaults included; ``job_from`` makes the same job of them.

    What is left to the schedule is left out, and whose conventions hold where nobody said it, with what they
    decide: that stays as open as it is. A model that is no preset is given by its fields. A machine that
    came from a file is given by its name, not by its path.
    """
    settings: dict[str, Any] = {
        "model": job.model.name,
        "cluster": job.cluster.name,
        "gpus": job.cluster.n_gpus,
    }
    if not is_preset(job.model):
        settings[SHAPE] = model_fields(job.model)
    return {
        **settings,
        **job.layout.degrees,
        **({"expert_tp": job.layout.etp} if job.model.n_experts and job.expert_tp_from != "open" else {}),
        **{
            name: _plain(value)
            for name in _OF_JOB
            if (value := getattr(job, name)) not in (None, ()) and name not in job.unsaid
        },
        "steps": job.n_steps,
        **({CONVENTIONS: dict(job.conventions)} if job.conventions else {}),
        **job.variation.settings(),
    }


def inferred_dp(gpus: int, degrees: Mapping[str, int]) -> int:
    """Return the data-parallel degree that fills *gpus*. Raises JobError if none does."""
    # ep, and how experts are cut, have to fit dp, which is only found here.
    layout = Layout(**{**degrees, "ep": 1, "expert_tp": 0})
    replica = layout.world_size
    if gpus < 1:
        raise JobError(f"gpus = {gpus}: at least 1")
    if gpus % replica or gpus < replica:
        lower = max(gpus // replica, 1) * replica
        raise JobError(
            f"{gpus} GPUs cannot be filled with replicas of pp*cp*tp = {layout.pp}*{layout.cp}*{layout.tp} = "
            f"{replica} ranks; {lower} or {lower + replica} GPUs would work"
        )
    return gpus // replica


def _taken(document: dict[str, Any], table: str, setting: str, names: Collection[str]) -> dict[str, Any]:
    inside = document.get(table)
    if not isinstance(inside, dict):
        return {}
    # A list of the keys: the table gets smaller meanwhile.
    found = {key: inside.pop(key) for key in list(inside) if key in names}
    named = {key: tuple(value) if isinstance(value, list) else value for key, value in found.items()}
    return {setting: named} if named else {}


def _flattened(document: Mapping[str, Any], path: Path) -> Iterator[tuple[str, str, object]]:
    """Yield where a value stands, its setting and the value, for every key of a file."""
    for key, value in document.items():
        if isinstance(value, dict):
            keys = TABLES.get(key)
            if keys is None:
                raise ConfigError(f"{path}: unknown table [{key}]; {near_name(key, TABLES)}")
            for inner, one in value.items():
                if inner not in keys:
                    raise ConfigError(f"{path}: unknown key {inner!r} in [{key}]; {near_name(inner, keys)}")
                yield f"{key}.{inner}", keys[inner], one
        elif key in KINDS:
            yield key, key, value
        else:
            raise ConfigError(f"{path}: unknown key {key!r}; {near_setting(key)}")


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _toml(value: object) -> str:
    """Return a setting as TOML writes it: JSON's spelling of text, numbers, flags and lists is TOML's too."""
    # JSON would write Infinity, TOML has inf.
    if isinstance(value, float):
        return str(value)
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{key} = {_toml(one)}' for key, one in value.items())} }}"
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)


def other_file(path: str, document: Mapping[str, Any]) -> str:
    """Return what the file *path* is and where it goes, in words, if it is no job; empty if it may be one.

    >>> other_file("mine.toml", {"device": "h100-sxm", "gpus_per_node": 8}).partition(";")[0]
    'mine.toml describes a machine, not a job: give it as --cluster mine.toml'
    >>> other_file("run.toml", {"model": "llama3-8b", "gpus": 8})
    ''
    """
    for what, kind in own_table("simulator/other_files.toml").items():
        if not document.keys().isdisjoint(kind["any_of"]):
            return f"{path} describes {what}, not a job: {kind['hint'].format(path=path)}"
    return ""
