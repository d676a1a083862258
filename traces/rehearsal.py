"""A rehearsal: what chosen ranks of a training would do, without a clock. Tracer writes, simulator reads.

A rehearsal is the folder ``rehearsal`` of a run directory: ``rehearsal.json`` (``Rehearsal``) and a folder
per rehearsed rank with four tables (``RankTables``). Format: docs/rehearse.md, section 5.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, TypeVar

import pyarrow as pa

from foretrace.door import read_text, sealed_text, shown
from foretrace.traces.errors import RunError
from foretrace.traces.info import CHANGED, check_representatives, check_world, described, document_of
from foretrace.traces.layout import Group, Layout
from foretrace.traces.sealed import read_file, write_file
from foretrace.traces.writer import write_atomically

_Row = TypeVar("_Row", bound=tuple[Any, ...])

REHEARSAL_VERSION: Final = 1  # version of the format; readers refuse a newer one
FOLDER: Final = "rehearsal"  # folder of a run directory that holds it

EVENTS: Final = pa.schema(
    [
        pa.field("what", pa.int8(), nullable=False),  # index into WHAT
        pa.field("item", pa.int32(), nullable=False),  # row of works or messages; mark; -1
        pa.field("place", pa.int32(), nullable=False),  # row of places
        pa.field("stream", pa.int16(), nullable=False),  # CUDA stream on which it is issued; 0 is the default
        pa.field("number", pa.int64(), nullable=False),  # communication: sequence; wait: the event waited for
        pa.field("allocated_bytes", pa.int64(), nullable=False),  # memory after it was issued
    ]
)
"""What a rank issues, in order."""

WHAT: Final = ("op", "communication", "wait", "mark", "wait_mark", "host_wait")
"""Kinds of events.

op: a kernel. communication: it starts when its stream has come to it; an asynchronous one lets its stream go
on. wait: the stream goes on when the communication of event ``number`` is complete. mark: a CUDA event is
recorded. wait_mark: the stream goes on when the mark ``item`` is reached. host_wait: the host waits for the
stream, as for ``Tensor.item``.
"""

OP, COMMUNICATION, WAIT, MARK, WAIT_MARK, HOST_WAIT = range(len(WHAT))

OUTSIDE: Final = ("loss", "input", "gradients")
"""Names of places between the parts of a step: after a forward, after an optimizer, after a backward."""

TO_HOST, TO_DEVICE, ON_HOST = HOST_KINDS = ("to_host", "to_device", "on_host")
"""Kinds of works that are none of the device: copies from and to it, and what a processor computes."""

CONVERSION: Final = "cudnn.nchw_to_nhwc"
"""Name of the work that copies tensors of a convolution into the layout of tensor cores and back, where a GPU
has them for its type."""

ALIGNED_BYTES: Final = 16
"""What tensor cores are fed with at once: rows of matrices have to begin at multiples of it (Tensor Core
requirements in NVIDIA's Matrix Multiplication Background User's Guide, DU-09799-001, section 2.2)."""

WORKS: Final = pa.schema(
    [
        pa.field("name", pa.string(), nullable=False),  # operator, e.g. aten.mm
        pa.field(
            "kind", pa.string(), nullable=False
        ),  # gemm, attention, attention_backward, memory, HOST_KINDS
        pa.field("shapes", pa.string(), nullable=False),  # operands -> results, for people
        pa.field("dtype", pa.string(), nullable=False),
        pa.field("flops", pa.int64(), nullable=False),
        pa.field("bytes_moved", pa.int64(), nullable=False),
        pa.field("m", pa.int64(), nullable=False),
        pa.field("n", pa.int64(), nullable=False),
        pa.field("k", pa.int64(), nullable=False),
        pa.field("batch", pa.int64(), nullable=False),
        pa.field("v_dim", pa.int64(), nullable=False),
        pa.field("causal", pa.bool_(), nullable=False),
        pa.field("kernels", pa.int32(), nullable=False),
        pa.field("is_known", pa.bool_(), nullable=False),  # False: priced by the bytes of its operands alone
        pa.field("rows", pa.list_(pa.int64()), nullable=False),  # of each expert of a grouped product
        pa.field(
            "along", pa.string(), nullable=False
        ),  # m, n or k, that rows are of; empty: rows are unknown
        pa.field("aligned", pa.bool_(), nullable=False),  # False: rows not at 16 bytes, or not in order
    ]
)
"""The distinct operations of a rank."""

MESSAGES: Final = pa.schema(
    [
        pa.field("kind", pa.string(), nullable=False),
        pa.field("group", pa.int32(), nullable=False),
        pa.field("size_bytes", pa.int64(), nullable=False),
        pa.field("dtype", pa.string(), nullable=False),
        pa.field("peer", pa.int32(), nullable=False),  # global rank, -1: a collective
        pa.field("is_async", pa.bool_(), nullable=False),
        pa.field("name", pa.string(), nullable=False),
        # of an uneven all-to-all, by place in the group; else empty
        pa.field("sent_bytes", pa.list_(pa.int64()), nullable=False),
        pa.field("received_bytes", pa.list_(pa.int64()), nullable=False),
    ]
)
"""The distinct communications of a rank."""

PLACES: Final = pa.schema(
    [
        pa.field("kind", pa.string(), nullable=False),  # forward, backward, ..., as in the timeline
        pa.field("name", pa.string(), nullable=False),  # block of the model
        pa.field("layer", pa.int32(), nullable=False),
        pa.field("step", pa.int32(), nullable=False),
        pa.field("microbatch", pa.int32(), nullable=False),
        pa.field("stage", pa.int32(), nullable=False),
        pa.field("virtual_stage", pa.int32(), nullable=False),
        pa.field("trains", pa.bool_(), nullable=False),  # False: in a pass of a model without gradients
    ]
)
"""Where in the training events are."""


MEASURED: Final = pa.schema(
    [
        pa.field("event", pa.int64(), nullable=False),  # row of events
        pa.field("start_ns", pa.int64(), nullable=False),  # when it began on the device
        pa.field("device_ns", pa.int64(), nullable=False),  # how long its kernels ran
        pa.field("host_ns", pa.int64(), nullable=False),  # what the host worked since the launch before
        pa.field("pause_ns", pa.int64(), nullable=False),  # the same, where it did not work on launching
    ]
)
"""What operations and communications took, where a rank's events are those of a trace."""


class Message(NamedTuple):
    """A communication, in the columns of ``MESSAGES``."""

    kind: str
    group: int
    size_bytes: int
    dtype: str
    peer: int
    is_async: bool
    name: str
    sent_bytes: tuple[int, ...] = ()
    received_bytes: tuple[int, ...] = ()


class Place(NamedTuple):
    """The place in the training of an event, in the columns of ``PLACES``."""

    kind: str
    name: str
    layer: int = -1
    step: int = 0
    microbatch: int = -1
    stage: int = 0
    virtual_stage: int = 0
    trains: bool = True


class Distinct(Generic[_Row]):
    """Distinct rows, numbered in the order of their first use."""

    def __init__(self) -> None:
        self.rows: dict[_Row, int] = {}
        self.listed: list[_Row] = []

    def number(self, row: _Row) -> int:
        """Return the number of *row*."""
        found = self.rows.setdefault(row, len(self.listed))
        if found == len(self.listed):
            self.listed.append(row)
        return found

    def table(self, schema: pa.Schema) -> pa.Table:
        """Return the rows in the columns of *schema*."""
        return table_of(self.listed, schema)


def table_of(rows: Sequence[Iterable[Any]], schema: pa.Schema) -> pa.Table:
    """Return *rows* in the columns of *schema*."""
    columns: list[Any] = list(zip(*rows, strict=True)) or [[] for _ in schema]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.table(arrays, schema=schema)


class RankTables(NamedTuple):
    """What one rank does: tables in the columns of ``EVENTS``, ``WORKS``, ``MESSAGES`` and ``PLACES``."""

    events: pa.Table
    works: pa.Table
    messages: pa.Table
    places: pa.Table


class Issued(NamedTuple):
    """What a rank issued, in the tables of a rehearsal, and what it took: columns of ``MEASURED``, facts."""

    tables: RankTables
    measured: pa.Table
    facts: Mapping[str, Any]


_SCHEMAS: Final = (EVENTS, WORKS, MESSAGES, PLACES)

_ADDED: Final[Mapping[str, Any]] = {
    "trains": True, "rows": [], "along": "", "aligned": True, "sent_bytes": [], "received_bytes": [],
}  # fmt: skip
"""Columns that came later, and what those files have that are without them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """Description of a rehearsal, as stored in ``rehearsal.json``."""

    world_size: int  # number of ranks of the world that was acted out
    ranks: tuple[int, ...]  # those that were run
    representatives: tuple[int, ...]  # index rank, value the rehearsed rank that stands for it
    name: str = ""  # what a person calls it
    command: tuple[str, ...] = ()  # the script and its arguments
    layout: Layout | None = None  # parallel degrees, None if the groups do not tell
    groups: tuple[Group, ...] = ()  # every process group that the script made
    model: Mapping[str, Any] | None = None  # description of the model
    # shape of the input, schedule, sharding, tokens per step and the like
    job: Mapping[str, Any] = field(default_factory=dict)
    memory: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by rank, peak bytes by category
    # what the script wanted to know of numbers that nobody computed, and what it was told
    stated: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # what differs from the run that is acted out, as sentences
    checked: tuple[str, ...] = ()  # how the representatives were checked
    versions: Mapping[str, str] = field(default_factory=dict)  # versions of the programs that made it
    format_version: int = REHEARSAL_VERSION  # version of the format

    def __post_init__(self) -> None:
        check_world(self.world_size, self.groups)
        check_representatives(self.representatives, self.world_size)
        for name in ("first_step", "steps"):
            if not isinstance(self.job.get(name, 0), int):
                raise RunError(f"job.{name} is {shown(self.job[name])}: a whole number is needed")
        for one in self.memory.values():
            for peak in (one, one.get("host", {})):
                _check_peak(peak)

    def to_json(self) -> str:
        """Return the text of ``rehearsal.json``."""
        return sealed_text(json.dumps(document_of(self), allow_nan=False, indent=1))

    @classmethod
    def from_json(cls, text: str, source: str) -> Rehearsal:
        """Return the description in *text*, called *source* in an error. Raises RunError as `described`."""
        found, is_as_written = described(cls, text, source, "a rehearsal", REHEARSAL_VERSION)
        if is_as_written:
            return found
        return replace(found, notes=(*found.notes, CHANGED))


def _check_peak(peak: Any) -> None:
    """Raise RunError unless *peak* has numbers of bytes where it has any."""
    by_category = peak.get("bytes", {}) if isinstance(peak, Mapping) else None
    if not isinstance(peak, Mapping) or not isinstance(by_category, Mapping):
        raise RunError(f"memory of a rank is {shown(peak)}: peak_bytes, and bytes by category, are needed")
    sizes = {name: one for name, one in peak.items() if name.endswith("_bytes")} | dict(by_category)
    for name, size in sizes.items():
        if not isinstance(size, int):
            raise RunError(f"memory of a rank has {name} of {shown(size)}: a whole number is needed")


def rehearsal_folder(path: str | Path) -> Path:
    """Return the folder of the rehearsal in the run directory *path*, or *path* if it is that folder.

    Raises RunError: there is none.
    """
    for folder in (Path(path) / FOLDER, Path(path)):
        if (folder / "rehearsal.json").is_file():
            return folder
    raise RunError(f"{path} holds no rehearsal: foretrace rehearse -o RUN -- SCRIPT makes one")


def has_rehearsal(path: str | Path) -> bool:
    """Return whether the run directory *path* holds a rehearsal."""
    return (Path(path) / FOLDER / "rehearsal.json").is_file()


def read_rehearsal(path: str | Path) -> Rehearsal:
    """Return the description of the rehearsal in the run directory *path*.

    Raises RunError: there is none, or it cannot be read.
    """
    file = rehearsal_folder(path) / "rehearsal.json"
    return Rehearsal.from_json(read_text(file, RunError), str(file))


def write_rehearsal(folder: Path, rehearsal: Rehearsal) -> None:
    """Write ``rehearsal.json`` into *folder*, in one step."""
    write_atomically(folder / "rehearsal.json", rehearsal.to_json(), is_of_run=True)


def rank_file(folder: Path, rank: int, part: str) -> Path:
    """Return the file of one of the tables of *rank*."""
    return folder / f"rank-{rank:05d}" / f"{part}.arrow"


def write_rank(folder: Path, rank: int, tables: RankTables) -> None:
    """Write what *rank* does below *folder*."""
    for part, table, schema in zip(RankTables._fields, tables, _SCHEMAS, strict=True):
        file = rank_file(folder, rank, part)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, schema, [table])


def write_measured(folder: Path, rank: int, measured: pa.Table) -> None:
    """Write what the events of *rank* took below *folder*."""
    write_file(rank_file(folder, rank, "measured"), MEASURED, [measured])


def read_measured(folder: Path, rank: int) -> pa.Table | None:
    """Return what the events of *rank* took; None if nobody measured it.

    Raises RunError: the table is damaged.
    """
    file = rank_file(folder, rank, "measured")
    if not file.is_file():
        return None
    try:
        return read_file(file)[0].select(MEASURED.names).cast(MEASURED)
    except (KeyError, ValueError, pa.ArrowException) as error:
        raise RunError(f"{file} cannot be read: {error}") from error


def read_rank(folder: Path, rank: int) -> RankTables:
    """Return what *rank* does.

    One that was written before passes without gradients were told apart is taken to have none, and before
    rows of experts and sizes of uneven all-to-alls were written to have even ones. Raises RunError: a table
    is missing or damaged.
    """
    found = []
    for part, schema in zip(RankTables._fields, _SCHEMAS, strict=True):
        file = rank_file(folder, rank, part)
        try:
            table, _ = read_file(file)
            for name, default in _ADDED.items():
                if name in schema.names and name not in table.column_names:
                    column = pa.array([default] * len(table), schema.field(name).type)
                    table = table.append_column(name, column)
            found.append(table.select(schema.names).cast(schema))
        except RunError:
            raise
        except (KeyError, ValueError, pa.ArrowException) as error:
            raise RunError(f"{file} cannot be read: {error}") from error
    return RankTables(*found)
