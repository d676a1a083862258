"""Tells what a file is that is given as a job and is none: machines, calibrations and models have flags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple


class _Kind(NamedTuple):
    """A kind of TOML file that is not a job.

    Attributes:
        what: what it describes.
        any_of: keys that such files have and jobs do not; one of them tells.
        hint: where the file goes instead, with its path as ``{path}``.
    """

    what: str
    any_of: frozenset[str]
    hint: str


_KINDS: Final = (
    _Kind("a calibration", frozenset({"run", "constants"}), "give it as --calibration {path}"),
    _Kind(
        "a machine",
        frozenset({"device", "gpus_per_node", "intra", "fabric", "nic", "nics_per_node"}),
        "give it as --cluster {path}; foretrace topology show {path} prints what is in it",
    ),
    _Kind(
        "a device",
        frozenset({"memory_bandwidth", "peak", "sustained_clock_fraction"}),
        "write the file of a machine with device = {path!r}, and give that as --cluster",
    ),
    _Kind(
        "a link",
        frozenset({"bandwidth", "latency", "gpu_direct"}),
        "put it into the file of a machine, as [intra] or [nic], and give that as --cluster",
    ),
    _Kind("a model", frozenset({"n_layers", "hidden", "n_heads", "vocab"}), "give it as --model {path}"),
)


def other_file(path: str, document: Mapping[str, Any]) -> str:
    """Return what the file *path* is and where it goes, in words, if it is no job; empty if it may be one.

    >>> other_file("mine.toml", {"device": "h100-sxm", "gpus_per_node": 8}).partition(";")[0]
    'mine.toml describes a machine, not a job: give it as --cluster mine.toml'
    >>> other_file("run.toml", {"model": "llama3-8b", "gpus": 8})
    ''
    """
    for kind in _KINDS:
        if not kind.any_of.isdisjoint(document):
            return f"{path} describes {kind.what}, not a job: {kind.hint.format(path=path)}"
    return ""
