"""Which kernels a rehearsed script launches, in the words of a framework's profile and of a model's shape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from foretrace.simulator.profiles import load_framework
from foretrace.traces.rehearsal import RankTables

PYTORCH: Final = "torchtitan"
"""Profile of PyTorch itself, whose separate kernels a rehearsed script has but for those below."""

ONE_NORM: Final = frozenset({"aten._fused_rms_norm", "aten.native_layer_norm"})
"""Norms that are one kernel; others are written out, as transformers' ``LlamaRMSNorm``."""


def separate_parts(tables: Iterable[RankTables]) -> list[str]:
    """Return what runs as several kernels, of ``simulator.framework.EAGER_PARTS``.

    What PyTorch runs as it is written runs so here: what a script compiles is not told apart. A norm is one
    kernel or several, as its module is written.
    """
    names = {name for one in tables for name in one.works["name"].to_pylist()}
    norm = [] if names & ONE_NORM else ["norm"]
    return norm + [part for part in load_framework(PYTORCH).eager if part != "norm"]


def head_dim(tables: Iterable[RankTables]) -> int:
    """Return how wide the heads of attention are, 0 if no attention was seen."""
    works = [row for one in tables for row in one.works.select(["kind", "k"]).to_pylist()]
    return next((int(row["k"]) for row in works if row["kind"] == "attention"), 0)


def described(model: Mapping[str, Any] | None, tables: Iterable[RankTables]) -> Mapping[str, Any] | None:
    """Return the description *model* with the width of its heads, which no parameter tells."""
    width = head_dim(tables)
    return {**model, "head_dim": width} if model and width else model
