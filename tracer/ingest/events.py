"""Events of a Chrome trace as Arrow tables: the columns that matter, checked one by one.

Times stay what the file says, in microseconds, until ``tracer.ingest.kineto`` puts them on the file's clock.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import json as arrow_json

from foretrace.traces.columns import Int64Array

ARGUMENTS: Final[Mapping[str, pa.DataType]] = {
    "stream": pa.int64(),
    "device": pa.int64(),
    "correlation": pa.int64(),
    "bytes": pa.float64(),
    "Collective name": pa.string(),
    "dtype": pa.string(),
    "In msg nelems": pa.int64(),
    "Out msg nelems": pa.int64(),
    "Group size": pa.int64(),
    "Process Group Name": pa.string(),
    "Process Group Description": pa.string(),
    "Process Group Ranks": pa.string(),
    "Global rank start": pa.int64(),
    "Global rank stride": pa.int64(),
    "Seq": pa.int64(),
    "Src Rank": pa.int64(),
    "Dst Rank": pa.int64(),
}
"""Arguments of device events that are read; the metadata of collectives is there from torch 2.4 on."""

DEVICE: Final = pa.schema(
    [
        ("cat", pa.string()),
        ("name", pa.string()),
        ("ts", pa.float64()),
        ("dur", pa.float64()),
        *ARGUMENTS.items(),
    ]
)
"""Kernels and copies on a device, times in microseconds."""

LAUNCH: Final = pa.schema(
    [
        ("name", pa.string()),
        ("tid", pa.int64()),
        ("ts", pa.float64()),
        ("dur", pa.float64()),
        ("correlation", pa.int64()),
    ]
)
"""Calls of the CUDA or HIP runtime on the host, times in microseconds."""

MEMORY_INSTANT: Final = pa.schema(
    [
        ("ts", pa.float64()),
        ("Device Type", pa.int64()),
        ("Device Id", pa.int64()),
        ("Total Allocated", pa.int64()),
        ("Total Reserved", pa.int64()),
    ]
)
"""Instants at which memory of a device (a type that is not 0), or of the host, is taken or given back."""

# Names of activities in Kineto (libkineto/include/ActivityType.h); with a capital: of 2021 and before.
DEVICE_CATEGORIES: Final = frozenset(
    {"kernel", "gpu_memcpy", "gpu_memset", "mtia_ccp_events", "Kernel", "Memcpy", "Memset"}
)
LAUNCH_CATEGORIES: Final = frozenset(
    {"cuda_runtime", "cuda_driver", "mtia_runtime", "xpu_runtime", "xpu_driver", "Runtime"}
)
NOTE_CATEGORIES: Final = frozenset({"user_annotation", "gpu_user_annotation", "cuda_sync"})
FRAME_CATEGORIES: Final = frozenset({"cpu_op", "python_function"})
OPERATOR_CATEGORIES: Final = frozenset({"cpu_op", "Operator"})
MODULE: Final = "nn.Module: "  # how the Python functions of modules are named
CALL_NAME: Final = "record_param_comms"  # operator in which torch notes what each collective is
SIZED_CALLS: Final = ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_")
"""Operators around it whose first inputs are output and input: their ratio is the group's size."""
CALL_NAMES: Final = (CALL_NAME, *SIZED_CALLS)

LEAST_FRAME_US: Final = 100  # shorter operators and Python functions explain no pause that is worth a name

PRODUCTS: Final[Mapping[str, tuple[int, int]]] = {
    "aten::mm": (0, 1),
    "aten::bmm": (0, 1),
    "aten::addmm": (1, 2),
    "aten::baddbmm": (1, 2),
}
"""Operators that are one matrix product, and which of their inputs are its two sides."""

_LABELS: Final = ("cat", "name", *(name for name, kind in ARGUMENTS.items() if kind == pa.string()))
_OUTER: Final = frozenset({"cat", "name", "ts", "dur", "tid"})
"""Columns that stand beside the arguments of an event, not in them."""

LONGEST_US: Final = 4e15  # times beyond 127 years are not times
_BLOCK_BYTES: Final = 1 << 24
_INT64: Final = 1 << 63


def objects(texts: Sequence[bytes | bytearray], lost: Counter[str]) -> list[dict[str, Any]]:
    """Return the JSON objects in *texts*; those that are none are counted in *lost*."""
    together = _decoded(b"[" + b",".join(texts) + b"]")  # at once: half the time of one by one
    if isinstance(together, list) and [type(value) for value in together] == [dict] * len(texts):
        return together
    values = [_decoded(text.decode("utf-8", "replace")) for text in texts]
    found = [value for value in values if isinstance(value, dict)]
    if len(found) < len(texts):
        lost["malformed event"] += len(texts) - len(found)
    return found


def _decoded(text: bytes | str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def from_objects(events: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.Table:
    """Return *events* in the columns of *schema*; a value of a wrong type becomes null."""
    inner = [arguments(event) for event in events]
    columns = {
        name: _typed([event.get(name) for event in (events if name in _OUTER else inner)], kind)
        for name, kind in zip(schema.names, schema.types, strict=True)
    }
    return _encoded(pa.table(columns, schema=schema))


def _typed(values: list[Any], kind: pa.DataType) -> pa.Array:
    types = set(map(type, values)) - {type(None)}
    try:
        if not types:
            return pa.nulls(len(values), kind)
        if kind == pa.float64() and types <= {int, float}:
            numbers = pa.array(values, kind).to_numpy(zero_copy_only=False)
            return pa.array(numbers, kind, mask=~np.isfinite(numbers))
        if (kind, types) in ((pa.int64(), {int}), (pa.string(), {str})):
            return pa.array(values, kind)
    except (pa.ArrowException, OverflowError, UnicodeEncodeError):
        pass  # one of them is out of range, or no character
    return pa.array([_value(value, kind) for value in values], kind)


def number(value: object) -> float | None:
    """Return *value* as a finite number, None if it is none; numbers in strings count."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        result = float(value)
    except (ValueError, OverflowError):
        return None
    return result if math.isfinite(result) else None


def timed(event: Mapping[str, Any]) -> tuple[float, float, int] | None:
    """Return start, duration (µs) and thread of an event of the host; None if it has no usable time."""
    ts, dur, tid = number(event.get("ts")), number(event.get("dur")), whole(event.get("tid"))
    if ts is None or dur is None or tid is None or not 0 <= dur < LONGEST_US or abs(ts) >= LONGEST_US:
        return None
    return ts, dur, tid


def timed_ns(event: Mapping[str, Any], base_ns: int) -> tuple[int, int, int] | None:
    """Return start, end and thread of an event of the host, in ns from *base_ns* on; None as `timed`."""
    if (found := timed(event)) is None:
        return None
    start_ns = base_ns + to_ns(found[0])
    return start_ns, start_ns + to_ns(found[1]), found[2]


def whole(value: object) -> int | None:
    """Return *value* as an integer of 64 bits, None if it is none."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value if -_INT64 <= value < _INT64 else None
    found = number(value)
    return int(found) if found is not None and abs(found) < _INT64 else None


def elements(shape: object) -> int:
    """Return the number of elements of a shape, or of a list of shapes together; 0 where it is not one.

    >>> elements([4, 8]), elements([[4, 8], [2]]), elements([4, -1])
    (32, 34, 0)
    """
    if not isinstance(shape, list) or not shape:
        return 0
    if all(isinstance(part, list) for part in shape):
        return sum(elements(part) for part in shape)
    sizes = [whole(size) for size in shape]
    if any(size is None or size < 0 for size in sizes):
        return 0
    return math.prod(size for size in sizes if size is not None)


def product_flops(name: str, shapes: object) -> int:
    """Return the FLOPs of a matrix product of inputs of these *shapes*, 0 of anything else.

    >>> product_flops("aten::mm", [[4, 8], [8, 2]]), product_flops("aten::add", [[4], [4]])
    (128, 0)
    """
    if name not in PRODUCTS or not isinstance(shapes, list) or len(shapes) <= max(PRODUCTS[name]):
        return 0
    left, right = (shapes[at] for at in PRODUCTS[name])
    if not (isinstance(left, list) and isinstance(right, list) and left and right):
        return 0
    columns = whole(right[-1])
    total = 2 * elements(left) * (columns if columns is not None and columns > 0 else 0)
    return total if total < 1 << 56 else 0


def array_bytes(n_elements: int, width: int) -> int:
    """Return the size of so many elements, 0 if no array is as large."""
    return n_elements * width if n_elements < 1 << 56 else 0


def to_ns(us: float) -> int:
    """Return microseconds as whole nanoseconds; ``us * 1000`` of a date has lost the last 256 of them.

    >>> to_ns(1669783687389292.0)
    1669783687389292000
    """
    full = math.floor(us)
    return full * 1000 + round((us - full) * 1000)


def all_to_ns(us: NDArray[np.float64]) -> Int64Array:
    """Return an array of microseconds as whole nanoseconds, as exactly as ``to_ns``."""
    full = np.floor(us)
    ns: Int64Array = full.astype(np.int64) * 1000 + np.rint((us - full) * 1000).astype(np.int64)
    return ns


def text(value: object) -> str:
    """Return *value* as text that Arrow can hold: what is no character is replaced."""
    return str(value).encode("utf-8", "replace").decode("utf-8")


def arguments(event: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the ``args`` of *event*, empty if they are not an object."""
    found = event.get("args")
    return found if isinstance(found, dict) else {}


def parsed(texts: Sequence[bytes | bytearray], schema: pa.Schema, lost: Counter[str]) -> pa.Table:
    """Return events from the JSON *texts* of single ones, in the columns of *schema*; labels are encoded.

    Arrow parses them; where a value has an unexpected type, they are decoded event by event.
    """
    if not texts:
        return _encoded(schema.empty_table())
    outer = [field for field in schema if field.name in _OUTER]
    inner = pa.struct([field for field in schema if field.name not in _OUTER])
    options = arrow_json.ParseOptions(
        explicit_schema=pa.schema([*outer, ("args", inner)]),
        unexpected_field_behavior="ignore",
        newlines_in_values=True,
    )
    try:
        table = arrow_json.read_json(  # Arrow's own pool keeps 32 MB for every thread that ever asked it
            pa.BufferReader(b"\n".join(texts)),
            arrow_json.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES),
            options,
            memory_pool=pa.system_memory_pool(),
        ).flatten()
        flat = table.rename_columns([name.removeprefix("args.") for name in table.column_names])
        return _validated(_encoded(flat.select(schema.names)))
    except pa.ArrowException:
        return from_objects(objects(texts, lost), schema)


def _validated(table: pa.Table) -> pa.Table:
    """Return *table*; raises ArrowInvalid if a label is not UTF-8, which Arrow does not ask when parsing."""
    for column in table.columns:
        if pa.types.is_dictionary(column.type):
            for chunk in column.chunks:
                chunk.dictionary.validate(full=True)
    return table


def _value(value: object, kind: pa.DataType) -> object:
    if value is None:
        return None
    if kind == pa.string():
        return text(value)
    return number(value) if kind == pa.float64() else whole(value)


def _encoded(table: pa.Table) -> pa.Table:
    """Return *table* with its labels as dictionaries: a kernel's name is stored once."""
    columns = [
        column.dictionary_encode() if name in _LABELS and not pa.types.is_dictionary(column.type) else column
        for name, column in zip(table.column_names, table.columns, strict=True)
    ]
    return pa.table(columns, names=table.column_names)


def encoded_schema(schema: pa.Schema) -> pa.Schema:
    """Return *schema* with labels as dictionaries."""
    label = pa.dictionary(pa.int32(), pa.string())
    return pa.schema([(f.name, label if f.type == pa.string() else f.type) for f in schema])


def joined(tables: Sequence[pa.Table], schema: pa.Schema) -> pa.Table:
    """Return *tables* as one, in one piece per column."""
    filled = [table for table in tables if table.num_rows]
    if not filled:
        return schema.empty_table()
    return pa.concat_tables(filled).unify_dictionaries().combine_chunks()
