"""What beside what is issued: streams of a GPU, and a processor, which has none."""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa

from foretrace.topologies.device import Device
from foretrace.traces.rehearsal import RankTables

ASYNCHRONOUS: Final = "what is asynchronous runs beside the stream that issued it until it is waited for"

ON_DEVICE: Final = (
    "streams: those that the script and FSDP ask for; collectives of a group follow one another (NCCL)",
    ASYNCHRONOUS,
)
ON_PROCESSOR: Final = (
    "streams: a processor has none; what is not asynchronous is waited for",
    ASYNCHRONOUS,
)


def rules(device: Device) -> tuple[str, ...]:
    """Return what is supplied to a rehearsal on *device* beside what it shows, as sentences."""
    return ON_PROCESSOR if device.kind == "cpu" else ON_DEVICE


def on_device(tables: RankTables, device: Device) -> RankTables:
    """Return what a rank issues as *device* takes it: on a processor all of it in one order.

    A rehearsal asks for streams, as on a GPU. On a processor PyTorch runs what is put on any of them at once,
    and a collective without ``async_op`` returns when it is done (gloo).
    """
    if device.kind != "cpu":
        return tables
    events = tables.events
    at = events.schema.get_field_index("stream")
    field = events.schema.field(at)
    one = pa.array(np.zeros(events.num_rows, np.int64), field.type)
    return tables._replace(events=events.set_column(at, field, one))
