"""What a device promises: the time of kernels that somebody measures, by the model that predicts runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from foretrace.simulator.errors import SimulationError
from foretrace.simulator.network.cost import Network
from foretrace.simulator.validate.hardware import device_of
from foretrace.simulator.validate.kernels import measured_ops
from foretrace.simulator.validate.loops import BURST, model_of
from foretrace.simulator.validate.table import Row
from foretrace.topologies.catalog import load_cluster
from foretrace.topologies.errors import TopologyError


class Promise(NamedTuple):
    """What a device promises of measured kernels.

    Attributes:
        device: name of it.
        times_us: time of each kernel in µs; None where the device has no such figure.
    """

    device: str
    times_us: tuple[float | None, ...]


def promise_collectives(against: str, n_ranks: int, rows: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """Return how long collectives over the first *n_ranks* of a machine should take, in seconds.

    Args:
        against: a machine of the catalogue, or a machine file.
        n_ranks: ranks that take part.
        rows: each with ``kind`` and ``size_bytes``.

    Raises:
        TopologyError: there is no such machine, or it is too small.
    """
    network = Network(load_cluster(against, n_ranks))
    found: list[float | None] = []
    for row in rows:
        try:
            transfer = network.collective(row["kind"], row["size_bytes"], list(range(n_ranks)))
        except SimulationError:  # the machine says nothing of this kind
            found.append(None)
        else:
            found.append((transfer.latency_ns + transfer.wire_ns) / 1e9)
    return found


def promise(against: str, kernels: Sequence[Mapping[str, object]]) -> Promise:
    """Return how long *kernels* should take on the device that *against* names.

    Args:
        against: a device or machine of the catalogue, a machine file, or what a GPU calls itself.
        kernels: rows with the columns of a table of kernels.

    Raises:
        TableError: no device is meant.
        TopologyError: a machine file is not valid.
    """
    device = device_of(against)
    times: list[float | None] = []
    for number, cells in enumerate(kernels, start=1):
        row = Row({name: "" if value == 0 else value for name, value in cells.items()}, number)
        model = model_of(device, burst=row.text("notes").startswith(BURST))
        try:
            times.append(sum(model.op_s(op) for op in measured_ops(row, device)[0]) * 1e6)
        except (SimulationError, TopologyError):
            times.append(None)
    return Promise(device.name, tuple(times))
