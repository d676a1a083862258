"""What a recorded run says about a machine: a few factors on the times of the catalogue, with their errors.

A factor of 1.2 means that something took 1.2 times as long as the catalogue's constants say. ``compute`` has
``products`` (of matrices), ``convolutions``, ``attention`` (its core), ``memory`` (element-wise operations),
``copies`` (of gathered parameters and gradients), ``optimizer`` (its pass over the states), ``fixed`` (the
part of every operation that does not depend on its size), ``launch`` (what the host needs to launch one) and
``link`` (copies from and to the host). ``network`` has, for links inside of a node (``near``) and between
nodes (``far``), ``latency`` and ``wire`` of each kind of communication that the run had, and of all others.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from foretrace.door import load
from foretrace.simulator.errors import CalibrationError
from foretrace.simulator.job import Job
from foretrace.topologies.cluster import Cluster, processor_share
from foretrace.topologies.device import Device

COMPUTE: Final = (
    "products", "convolutions", "attention", "memory", "copies", "optimizer", "fixed", "launch", "link",
)  # fmt: skip
LINKS: Final = ("near", "far")
PARTS: Final = ("latency", "wire")
OTHERS: Final = "others"
"""Key of the factors for kinds of communication that the run did not have."""


@dataclass(frozen=True, slots=True)
class Factor:
    """How many times as long something takes as the catalogue says, with its standard error."""

    value: float
    error: float

    def __post_init__(self) -> None:
        for name in ("value", "error"):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
                raise CalibrationError(f"{name} = {number!r}: a number is needed")
        if self.value <= 0 or self.error < 0:
            raise CalibrationError(f"factor {self.value} +- {self.error}: above zero, its error not below")


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Factors of one machine, out of one run.

    Attributes:
        run: the run that they come from.
        cluster: machine whose catalogue entry they are on.
        compute: by name, one of ``COMPUTE``; what the run does not identify is left out.
        network: by link (``near`` or ``far``), kind of communication and part, ``"near.all_reduce.wire"``.
        not_identified: what the run cannot say, and why, as sentences.
        only: jobs that the factors hold for, as ``job_kind`` names them; empty: all on that device.
        own: names of ``compute`` that hold for the operators of the run alone.
        constants: fingerprint of the device's numbers that the factors are on; empty: not known, not checked.
    """

    run: str
    cluster: str
    device: str
    precision: str
    compute: Mapping[str, Factor] = field(hash=False)
    network: Mapping[str, Factor] = field(hash=False)
    not_identified: tuple[str, ...] = ()
    only: str = ""
    own: tuple[str, ...] = ()
    constants: str = ""

    def calibrated(self, job: Job) -> Job:
        """Return *job* on its machine with these factors.

        Raises CalibrationError if they hold for other jobs, or another device.
        """
        if self.only and self.only != job_kind(job):
            raise CalibrationError(
                f"the calibration is of {self.only}, on {self.run}, which tells nothing of {job_kind(job)}; "
                "measure a step of that, or calibrate on a recording (foretrace calibrate RUN)"
            )
        return replace(job, cluster=self.applied(job.cluster))

    def applied(self, cluster: Cluster, *, like: str = "") -> Cluster:
        """Return *cluster* with these factors on its constants.

        *like*: the run whose operators are simulated. Raises CalibrationError if it has another device than
        the run had, or one of other numbers.
        """
        if cluster.device.name != self.device:
            raise CalibrationError(
                f"the calibration is of {self.device}, on {self.run}, but {cluster.name} has "
                f"{cluster.device.name}; calibrate on a run of that device"
            )
        if self.constants and self.constants != constants_of(cluster):
            raise CalibrationError(
                f"the calibration is on the figures of {self.device} in {self.cluster}, those in "
                f"{cluster.name} are others; calibrate with --cluster {cluster.name}, or its file"
            )
        left = () if like == self.run else self.own
        values = {name: factor.value for name, factor in self.compute.items() if name not in left}
        if cluster.device.kind == "cpu" and {"fixed", "launch"} & values.keys():
            values["launch"] = values.get("fixed", 1.0)  # the host is the device: a part of every operation
        device = _with_latencies(cluster.device, values)
        network = {name: factor.value for name, factor in self.network.items()}
        return replace(
            cluster, device=replace(device, factors=values), transfer_factors=network, uncalibrated=left
        )

    def named(self) -> Iterator[tuple[str, Factor]]:
        """Yield every factor with its name, compute first."""
        for name, factor in self.compute.items():
            yield f"compute.{name}", factor
        for name, factor in self.network.items():
            yield f"network.{name}", factor

    def to_toml(self) -> str:
        """Return the text of a calibration file."""
        lines = [
            "# Factors on the times of the catalogue; errors are standard errors: foretrace calibrate",
            *(f"{key} = {_quoted(getattr(self, key))}" for key in ("run", "cluster", "device", "precision")),
        ]
        if self.constants:
            lines.append(f"constants = {_quoted(self.constants)}")
        if self.only:
            lines.append(f"only = {_quoted(self.only)}")
        if self.own:
            lines.append(f"own = [{', '.join(map(_quoted, self.own))}]")
        if self.not_identified:
            lines += ["not_identified = [", *(f"    {_quoted(text)}," for text in self.not_identified), "]"]
        for table, factors in (("compute", self.compute), *_tables(self.network)):
            if factors:
                lines += ["", f"[{table}]"]
            for name, factor in factors.items():
                lines.append(f"{name} = {{ value = {factor.value:.6g}, error = {factor.error:.3g} }}")
        return "\n".join(lines) + "\n"


def constants_of(cluster: Cluster) -> str:
    """Return a fingerprint of the numbers of the device of *cluster*, whatever is said of their sources.

    Processes that share the cores of a machine are slower the more there are, and have less memory each: the
    numbers are those of one that has a core to itself, however many there are.
    """
    # What of a core each process has.
    share = processor_share(cluster.cores, cluster.n_gpus) if cluster.cores else 1.0
    # Without factors and sources: two files with the same numbers are the same device.
    bare = asdict(replace(cluster.device.shared(1 / share), factors={}, sources={}, assumed=""))
    if cluster.cores:
        del bare["memory_bytes"]
        # Nine digits: sharing and its undoing leave rounding in the last ones.
        bare = json.loads(json.dumps(bare), parse_float=lambda digits: f"{float(digits):.9g}")
    return hashlib.sha256(json.dumps(bare, sort_keys=True).encode()).hexdigest()[:12]


def job_kind(job: Job) -> str:
    """Return model and precision of *job*, in words."""
    fp8 = f" and {job.recipe or 'fp8'}" if job.fp8 else ""
    return f"{job.model.name} in {job.precision}{fp8}"


def read_calibration(path: str | Path) -> Calibration:
    """Return the calibration in the TOML file *path*.

    Raises CalibrationError if it cannot be read, or something in it is not what a calibration has.
    """
    document = load(path, "TOML", CalibrationError)
    try:
        return _from_document(document)
    except CalibrationError as error:
        raise CalibrationError(f"{path}: {error}") from None


def _from_document(document: Mapping[str, Any]) -> Calibration:
    for key in ("run", "cluster", "device", "precision"):
        if not isinstance(document.get(key), str):
            raise CalibrationError(f"no {key} in it; is it a file that foretrace calibrate wrote?")
    compute = {name: _factor(name, given) for name, given in _table(document, "compute").items()}
    if unknown := set(compute) - set(COMPUTE):
        raise CalibrationError(f"compute.{min(unknown)}: one of {', '.join(COMPUTE)}")
    network: dict[str, Factor] = {}
    for link, kinds in _table(document, "network").items():
        if link not in LINKS or not isinstance(kinds, Mapping):
            raise CalibrationError(f"network.{link}: one of {', '.join(LINKS)}")
        for kind, parts in kinds.items():
            for part, given in parts.items() if isinstance(parts, Mapping) else ():
                if part not in PARTS:
                    raise CalibrationError(f"network.{link}.{kind}.{part}: one of {', '.join(PARTS)}")
                network[f"{link}.{kind}.{part}"] = _factor(f"network.{link}.{kind}.{part}", given)
    said, own = (document.get(name, []) for name in ("not_identified", "own"))
    return Calibration(
        **{key: document[key] for key in ("run", "cluster", "device", "precision")},
        compute=compute,
        network=network,
        not_identified=tuple(map(str, said)) if isinstance(said, list) else (),
        only=str(document.get("only", "")),
        own=tuple(map(str, own)) if isinstance(own, list) else (),
        constants=str(document.get("constants", "")),
    )


def _table(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = document.get(name, {})
    if not isinstance(found, Mapping):
        raise CalibrationError(f"{name} must be a table")
    return found


def _factor(name: str, given: Any) -> Factor:
    if not isinstance(given, Mapping) or set(given) != {"value", "error"}:
        raise CalibrationError(f"{name} must be {{ value = 1.2, error = 0.1 }}")
    try:
        return Factor(given["value"], given["error"])
    except CalibrationError as error:
        raise CalibrationError(f"{name}: {error}") from None


def _with_latencies(device: Device, values: Mapping[str, float]) -> Device:
    """Return *device* with the factors on what does not depend on size."""
    fixed, launch = values.get("fixed", 1.0), values.get("launch", 1.0)
    return replace(
        device,
        attention_kernels={name: kernel.delayed(fixed) for name, kernel in device.attention_kernels.items()},
        gemm_latency_s=device.gemm_latency_s * fixed,
        memory_bound_latency_s=device.memory_bound_latency_s * fixed,
        launch_s=device.launch_s * launch,
        # A factor on times divides a bandwidth.
        host_bytes_per_s=device.host_bytes_per_s / values.get("link", 1.0),
    )


def _tables(network: Mapping[str, Factor]) -> Iterator[tuple[str, dict[str, Factor]]]:
    """Yield the tables that the factors of the network are written to."""
    tables: dict[str, dict[str, Factor]] = {}
    for name, factor in network.items():
        place, _, part = name.rpartition(".")
        tables.setdefault(f"network.{place}", {})[part] = factor
    yield from tables.items()


def _quoted(text: str) -> str:
    """Return *text* as TOML writes it, which is how JSON does."""
    return json.dumps(text, ensure_ascii=False)
