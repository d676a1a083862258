"""Programs that tests of the engines write by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from foretrace.simulator.program import Label, Program, Transfer


def program_of(
    *,
    rank: Sequence[int],
    stream: Sequence[int],
    label: Sequence[int],
    duration_ns: Sequence[int],
    instance: Sequence[int],
    deps: Sequence[Sequence[int]],
    streams: tuple[str, ...],
    labels: tuple[Label, ...],
    transfers: Sequence[Transfer],
    **fields: Any,
) -> Program:
    """Return a program of one entry per task in each column; communication *i* costs ``transfers[i]``.

    Its tasks belong to no micro-batch, layer or stage, and all communications to one group. *fields* replaces
    any field of the program, those that are not parameters included.
    """
    n = len(rank)
    unknown, zeros = np.full(n, -1, np.int32), np.zeros(n, np.int64)
    numbers = np.arange(len(transfers), dtype=np.int64)
    participants = np.array([sum(found == i for found in instance) for i in numbers], np.int32)
    return Program(
        **{
            "rank": np.array(rank, np.int32),
            "stream": np.array(stream, np.int32),
            "label": np.array(label, np.int32),
            "duration_ns": np.array(duration_ns, np.int64),
            "instance": np.array(instance, np.int64),
            **dict.fromkeys(("microbatch", "layer", "stage", "virtual_stage", "peer"), unknown),
            "step": np.zeros(n, np.int32),
            "flops": zeros,
            "bytes_moved": zeros,
            "dep_start": np.cumsum([0, *map(len, deps)]).astype(np.int64),
            "deps": np.array([dep for found in deps for dep in found], np.int64),
            "streams": streams,
            "labels": labels,
            "instance_size_bytes": np.full(len(transfers), 1024, np.int64),
            "instance_group": np.full(len(transfers), 7, np.int32),
            "instance_sequence": numbers,
            "instance_participants": participants,
            "transfers": tuple(transfers),
            "instance_transfer": numbers.astype(np.int32),
            **fields,
        }
    )
