"""Profiles of training frameworks: loaded by name, found by what people call them, changed by a job.

Never chosen by a model or a run.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from functools import cache
from importlib import resources
from typing import Any, Final

from foretrace.simulator.errors import JobError
from foretrace.simulator.framework import Framework
from foretrace.simulator.nearest import near_name


@cache
def framework_names() -> tuple[str, ...]:
    """Return the names of the profiles, sorted."""
    folder = resources.files("foretrace.simulator") / "frameworks"
    found = [entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")]
    return tuple(sorted(found))


@cache
def load_framework(name: str) -> Framework:
    """Return a profile by name.

    Raises:
        JobError: there is none of that name.

    >>> load_framework("megatron").logits_kept_bytes
    4
    """
    if name not in framework_names():
        raise JobError(f"framework={name!r}: {near_name(name, framework_names(), 'one of')}")
    text = (resources.files("foretrace.simulator") / "frameworks" / f"{name}.toml").read_text(
        encoding="utf-8"
    )
    given: dict[str, Any] = tomllib.loads(text)
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in given.items()
    }
    missing = [f.name for f in fields(Framework) if f.default is MISSING and f.default_factory is MISSING]
    if absent := [key for key in missing if key not in values and key != "name"]:
        raise JobError(f"framework {name}: missing {', '.join(absent)}")
    return Framework(name=name, **values)


NAMES: Final = ("matches", "library", "technique")
"""What tells which profile a text speaks of, the most telling first."""

OVERRIDABLE: Final = tuple(
    found.name for found in fields(Framework) if found.name not in ("name", *NAMES, "sources")
)
"""Conventions that a job may set for itself."""


def profile(name: str, settings: tuple[tuple[str, object], ...]) -> Framework:
    """Return the profile *name* with *settings* in place of what it says.

    >>> profile("megatron", (("overlap_grad_reduce", False),)).overlap_grad_reduce
    False

    Raises:
        JobError: no such profile or convention, or a value of the wrong kind.
    """
    return _profile(name, settings, tuple(type(value) for _, value in settings))


_KINDS: Final[Mapping[type, str]] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a word",
    tuple: "a list of words",
}
"""Types of conventions, as messages name them."""


@cache
def _profile(name: str, settings: tuple[tuple[str, object], ...], _types: tuple[type, ...]) -> Framework:
    """Return what ``profile`` does; by types too, as 1 and True are the same key of a cache."""
    base = load_framework(name)
    for key, value in settings:
        if key not in OVERRIDABLE:
            raise JobError(f"framework convention {key!r}: {near_name(key, OVERRIDABLE, 'it has')}")
        old = getattr(base, key)
        fits = type(value) is type(old) or (isinstance(old, float) and type(value) is int)
        if not fits:
            raise JobError(f"framework convention {key}={value!r}: must be {_KINDS[type(old)]}")
    return replace(base, **dict(settings))  # type: ignore[arg-type]


def framework_of(text: str, otherwise: str = "megatron") -> str:
    """Return the name of the profile that *text* speaks of; *otherwise* if it speaks of none.

    An engine counts before a library around it, and that before a word for what many frameworks do; of
    several the longest, so that "Megatron-DeepSpeed" is not Megatron-LM.

    >>> framework_of("nanotron v0.5"), framework_of("Megatron-DeepSpeed"), framework_of("TRL, FSDP")
    ('nanotron', 'megatron-deepspeed', 'transformers')
    """
    for kind in NAMES:
        found = [
            (len(part), name)
            for name in framework_names()
            for part in getattr(load_framework(name), kind)
            if part in text.lower()
        ]
        if found:
            return max(found)[1]
    return otherwise


def profile_meant(text: str) -> str:
    """Return what to add to the refusal of a profile named *text*; nothing if no profile speaks of it.

    >>> profile_meant("accelerate"), profile_meant("x")
    ('; accelerate has the profile transformers', '')
    """
    found = framework_of(text, "")
    return f"; {text} has the profile {found}" if found else ""
