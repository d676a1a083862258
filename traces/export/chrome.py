"""Chrome's trace event format: JSON that chrome://tracing, Perfetto and others open.

Reference: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
Times are microseconds with three decimals, so that no nanosecond is lost. A process is a rank; threads have
numbers that no other thread and no process has, for readers that take threads to be unique on a machine and
the thread of a process's own number to be its main thread (Perfetto drops slices otherwise). Categories
and streams are those of PyTorch's profiler; ``write_kineto`` also names steps and communication as it does,
by which tools for its traces, such as Holistic Trace Analysis, tell them apart.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import BinaryIO, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from foretrace.traces.analysis.communications import COMMUNICATION
from foretrace.traces.columns import int64
from foretrace.traces.export.scene import Scene, by_arguments, counters, origin_ns, scene
from foretrace.traces.run import Run

_SLICE: Final = '{"ph":"X","cat":"%s","pid":%d,"tid":%d,"ts":%.3f,"dur":%.3f,"name":%s,"args":{'
_ARROW: Final = '{"ph":"%s","pid":%d,"tid":%d,"ts":%.3f,"id":"%x","name":"transfer","cat":"p2p"%s}'
WHOLE: Final = "foretrace"
"""Key in the header of a file that was exported, and of all of the run, for ``ingest``, at its end."""

_FIRST_THREAD: Final = 1 << 24  # added to the numbers of tracks: above every rank
_KINETO: Final = {
    "compute": "kernel",
    "collective": "kernel",
    "p2p": "kernel",
    "copy": "gpu_memcpy",
    "host": "cpu_op",
    "step": "user_annotation",
    "phase": "user_annotation",
}
"""What PyTorch's profiler calls the categories of the timeline; others keep their names."""
_ON_DEVICE: Final = ("compute", "copy", *COMMUNICATION)  # categories that run on a stream of the device
_COUNTER: Final = '{"ph":"C","pid":%d,"ts":%.3f,"name":%s,"args":{"bytes":%d}}'


def write_chrome(run: Run, ranks: tuple[int, ...], file: BinaryIO) -> None:
    """Write the spans of *ranks* as Chrome trace events; a process per rank, a thread per stream."""
    _write(run, ranks, file, {})


def write_kineto(run: Run, ranks: tuple[int, ...], file: BinaryIO) -> None:
    """Write the same with the names that PyTorch's profiler gives to steps and to kernels of NCCL."""
    # Holistic Trace Analysis takes for communication what matches ^nccl.*Kernel.
    _write(run, ranks, file, {"step": "ProfilerStep#", **dict.fromkeys(COMMUNICATION, "ncclKernel ")})


def _write(run: Run, ranks: tuple[int, ...], file: BinaryIO, prefixes: Mapping[str, str]) -> None:
    """Write the spans of *ranks*; names of a category begin with its prefix."""
    about, own = _about(run, ranks)
    file.write(b'{%s"displayTimeUnit":"ms","otherData":%s,"traceEvents":[\n' % (own.encode(), about.encode()))
    zero_ns = origin_ns(run)
    separator = b""
    arrows: tuple[list[str], list[str]] = ([], [])
    for rank in ranks:
        drawn = scene(run, rank, frozenset(ranks))
        lines = [*_descriptions(drawn), *_slices(drawn, zero_ns, prefixes)]
        file.write(separator + ",\n".join(lines).encode())
        separator = b",\n"
        for ends in (False, True):
            arrows[ends].extend(_arrows(drawn, zero_ns, ends=ends))
    # Perfetto loses an arrow whose ends share a timestamp if it reads the last one first.
    for line in (*arrows[False], *arrows[True], *_counters(run, ranks, zero_ns)):
        file.write(separator + line.encode())
        separator = b",\n"
    file.write(b'\n],"%s":%s}\n' % (WHOLE.encode(), json.dumps(_whole(run, ranks)).encode()))


def _about(run: Run, ranks: tuple[int, ...]) -> tuple[str, str]:
    """Return what the file says about the run as a whole, and further keys: of one rank, as Kineto does."""
    known = {"origin": run.info.origin, "name": run.info.name, "world_size": run.info.world_size}
    own = ""
    if len(ranks) == 1:
        groups = [{"pg_name": str(g.id), "pg_desc": g.axis, "ranks": list(g.ranks)} for g in run.info.groups]
        told = {"rank": ranks[0], "world_size": run.info.world_size, "pg_config": groups}
        own = f'"distributedInfo":{json.dumps(told)},'
    return json.dumps({WHOLE: True} | known | {"warnings": list(run.warnings)}), own


def _whole(run: Run, ranks: tuple[int, ...]) -> dict[str, str]:
    """Return description, timeline and memory of *ranks* as ``ingest`` takes them: events lose some."""
    sources = sorted({run.source(rank) for rank in ranks})
    # The spans of an open run are on the common clock already.
    clock = {rank: replace(one, applied=True) for rank, one in run.info.clock.items()}
    tables = {"spans": run.spans(sources)}
    memory = run.memory()
    if memory.num_rows:
        tables["memory"] = memory.filter(pa.array(np.isin(int64(memory, "rank"), sources)))
    found = {"run": replace(run.info, clock=clock).to_json()}
    for name, table in tables.items():
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table.unify_dictionaries())
        # Packed as a whole: whoever unpacks it may stop at any size, as Arrow's own packing does not allow.
        found[name] = base64.b64encode(zlib.compress(sink.getvalue())).decode()
    return found


def _descriptions(drawn: Scene) -> Iterator[str]:
    """Yield the names and the order of a rank and its streams."""
    process = drawn.tracks[0]
    yield _metadata(drawn.rank, 0, "process_name", "name", process.name)
    yield _metadata(drawn.rank, 0, "process_sort_index", "sort_index", process.order)
    for number, (thread, track) in enumerate(zip(_threads(drawn).tolist(), drawn.tracks, strict=True)):
        yield _metadata(drawn.rank, thread, "thread_name", "name", track.name if number else "compute")
        yield _metadata(drawn.rank, thread, "thread_sort_index", "sort_index", number)


def _threads(drawn: Scene) -> NDArray[np.int64]:
    """Return the number of each track's thread."""
    return np.array([_FIRST_THREAD + track.id for track in drawn.tracks], np.int64)


def _metadata(rank: int, thread: int, what: str, key: str, value: str | int) -> str:
    return json.dumps({"ph": "M", "pid": rank, "tid": thread, "name": what, "args": {key: value}})


def _slices(drawn: Scene, zero_ns: int, prefixes: Mapping[str, str]) -> Iterator[str]:
    """Yield one complete event per slice, grouped by category and by which arguments they have."""
    threads = _threads(drawn)
    for rows, arguments in by_arguments(drawn):
        for code in np.unique(drawn.category[rows]).tolist():
            same = rows[drawn.category[rows] == code]
            category = drawn.categories[code]
            shown = {name: drawn.arguments[name][same].tolist() for name in arguments}
            if category in _ON_DEVICE:
                shown["stream"] = drawn.track[same].tolist()
            template = _SLICE + ",".join(f'"{name}":%d' for name in shown) + "}}"
            columns = (
                [_KINETO.get(category, category)] * len(same),
                [drawn.rank] * len(same),
                threads[drawn.track[same]].tolist(),
                ((drawn.start_ns[same] - zero_ns) / 1e3).tolist(),
                ((drawn.end_ns[same] - drawn.start_ns[same]) / 1e3).tolist(),
                _names(drawn, same, prefixes.get(category, ""), category),
                *shown.values(),
            )
            yield from (template % values for values in zip(*columns, strict=True))


def _names(drawn: Scene, rows: NDArray[np.intp], prefix: str, category: str) -> list[str]:
    """Return the names of slices; a step with a prefix has its number."""
    if prefix and category == "step":
        return [f'"{prefix}{step}"' for step in drawn.arguments["step"][rows].tolist()]
    said = [json.dumps(prefix + name) for name in drawn.names]
    return [said[number] for number in drawn.name[rows].tolist()]


def _arrows(drawn: Scene, zero_ns: int, *, ends: bool) -> Iterator[str]:
    """Yield where arrows begin, or where they end: bound to the slice that is running then."""
    threads = _threads(drawn)
    for row in np.flatnonzero((drawn.arrow > 0) & (drawn.arrow_ends == ends)).tolist():
        at = (drawn.start_ns[row] - zero_ns) / 1e3
        head = ("f", ',"bp":"e"') if ends else ("s", "")
        yield _ARROW % (head[0], drawn.rank, threads[drawn.track[row]], at, drawn.arrow[row], head[1])


def _counters(run: Run, ranks: tuple[int, ...], zero_ns: int) -> Iterator[str]:
    """Yield memory over time."""
    for rank, name, t_ns, size_bytes in counters(run, ranks):
        said = json.dumps(name)
        for at, size in zip(((t_ns - zero_ns) / 1e3).tolist(), size_bytes.tolist(), strict=True):
            yield _COUNTER % (rank, at, said, size)
