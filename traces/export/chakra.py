"""Chakra execution traces: a graph per rank that simulators such as ASTRA-sim replay.

A trace is protocol buffers, each after its length: the metadata, then a node per span, in order of start.
Field numbers are those of https://github.com/mlcommons/chakra, ``schema/protobuf/et_def.proto``.

What a timeline does not say is inferred and what Chakra cannot say is lost:

- Dependencies: a node depends on the one before it in its stream, and on what had ended last when it began.
- A communication lasts from the last arrival to its end: whoever replays it adds the waiting.
- The size of a gather is what a rank gives there (``Ring.cc`` of ASTRA-sim), not the whole.
- Who is in a group stands in an attribute of the metadata, and beside several graphs in a file of ASTRA-sim.
- Times are whole microseconds there; both ends are rounded, so that lengths do not drift.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator, Mapping
from typing import BinaryIO, Final

import numpy as np
import pyarrow as pa

from foretrace.traces.analysis.communications import COMMUNICATION, arrivals
from foretrace.traces.columns import Int64Array, bounds, int64, is_one_of, labels
from foretrace.traces.export.protobuf import message, number, varint
from foretrace.traces.run import Run

GROUPS: Final = "groups"  # attribute of the metadata with the ranks of each group by its name, in JSON
VERSION: Final = "0.0.4"  # version of the schema that files name

# Node
_ID, _NAME, _TYPE, _DATA_DEPS, _START, _DURATION, _ATTRIBUTE = 1, 2, 3, 5, 6, 7, 10
# AttributeProto
_ATTRIBUTE_NAME, _INT32, _INT64, _BOOL, _STRING = 1, 7, 9, 27, 29
# NodeType
_COMPUTE, _SEND, _RECV, _COLLECTIVE = 4, 5, 6, 7

_COLLECTIVES: Final = {
    "all_reduce": 0, "reduce": 1, "all_gather": 2, "gather": 3, "scatter": 4, "broadcast": 5,
    "all_to_all": 6, "reduce_scatter": 7, "barrier": 9,
}  # fmt: skip
"""CollectiveCommType by kind of the timeline."""

_WRITTEN: Final = ("compute", "copy", "host", *COMMUNICATION)
_FIRST_DATE: Final = (1980, 1, 1, 0, 0, 0)  # of every file in an archive: the same run gives the same bytes


def write_chakra(run: Run, ranks: tuple[int, ...], file: BinaryIO) -> None:
    """Write the graph of one rank; of several, a zip archive of ``rank.<number>.et`` and ``groups.json``."""
    if len(ranks) == 1:
        file.writelines(_graph(run, ranks[0]))
        return
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(zipfile.ZipInfo("groups.json", _FIRST_DATE), _groups(run), zipfile.ZIP_DEFLATED)
        for rank in ranks:
            whole = io.BytesIO()
            whole.writelines(_graph(run, rank))
            archive.writestr(
                zipfile.ZipInfo(f"rank.{rank}.et", _FIRST_DATE), whole.getvalue(), zipfile.ZIP_DEFLATED
            )


def _graph(run: Run, rank: int) -> Iterator[bytes]:
    """Yield the messages of one rank."""
    schema = message(_ATTRIBUTE_NAME, "schema") + message(_STRING, f"chakra.{VERSION}")
    groups = message(_ATTRIBUTE_NAME, GROUPS) + message(_STRING, _groups(run))
    yield _sized(message(1, VERSION) + message(2, schema) + message(2, groups))
    table = run.spans([rank])
    start, end = bounds(table)
    begin = arrivals(run).last_ns[run.source(rank)].clip(start, end)
    rows = np.flatnonzero(is_one_of(table, "category", _WRITTEN))
    rows = rows[np.lexsort((end[rows], begin[rows]))]
    zero = int(start.min(initial=0)) if len(start) else 0
    words = {name: labels(table, name) for name in ("category", "kind", "name", "stream")}
    numbers = {
        name: int64(table, name).tolist() for name in ("size_bytes", "flops", "peer", "group", "bytes_moved")
    }
    ranks = {group.id: len(group.ranks) for group in run.info.groups}
    before = _dependencies(words["stream"][0][rows], begin[rows], end[rows])
    for node, row in enumerate(rows.tolist()):
        said = {name: known[codes[row]] for name, (codes, known) in words.items()}
        from_us, until_us = (round((int(t[row]) - zero) / 1e3) for t in (begin, end))
        body = [
            number(_ID, node),
            message(_NAME, said["name"] or said["kind"]),
            number(_TYPE, _type(said)),
            *(number(_DATA_DEPS, other) for other in before[node]),
            number(_START, from_us),
            number(_DURATION, until_us - from_us),
            _attribute("is_cpu_op", _BOOL, int(said["category"] == "host")),
            *_attributes(said, {name: values[row] for name, values in numbers.items()}, rank, ranks),
        ]
        yield _sized(b"".join(body))


def _groups(run: Run) -> str:
    """Return the ranks of each group by its name, which is no 0: that is the whole world in ASTRA-sim."""
    return json.dumps({str(group.id + 1): list(group.ranks) for group in run.info.groups})


def _dependencies(stream: pa.Array, begin: Int64Array, end: Int64Array) -> list[list[int]]:
    """Return for each node what it depends on; nodes are in order of *begin*, ties in order of *end*."""
    found: list[list[int]] = []
    last_in: dict[int, int] = {}
    by_end = np.lexsort((np.arange(len(end)), end))
    ended = np.searchsorted(end[by_end], begin, side="right") - 1
    for node, own in enumerate(stream.tolist()):
        depends = {last_in[own]} if own in last_in else set()
        place = int(ended[node])
        while place >= 0 and by_end[place] >= node:  # of no length: begins when it ends, and comes later
            place -= 1
        if place >= 0:
            depends.add(int(by_end[place]))
        found.append(sorted(depends))
        last_in[own] = node
    return found


def _type(said: dict[str, str]) -> int:
    if said["category"] not in COMMUNICATION:
        return _COMPUTE
    return {"send": _SEND, "recv": _RECV}.get(said["kind"], _COLLECTIVE)


def _attributes(
    said: dict[str, str], values: dict[str, int], rank: int, ranks: Mapping[int, int]
) -> Iterator[bytes]:
    """Yield what replaying a node needs: sizes of work or of a communication, and among whom it is.

    *ranks*: number of ranks of each group.
    """
    if said["category"] not in COMMUNICATION:
        if values["flops"] > 0:
            yield _attribute("num_ops", _INT64, values["flops"])
        if values["bytes_moved"] > 0:
            yield _attribute("tensor_size", _INT64, values["bytes_moved"])
        return
    parts = ranks.get(values["group"], 1) if said["kind"] == "all_gather" else 1
    yield _attribute("comm_size", _INT64, max(values["size_bytes"], 0) // parts)
    if values["group"] >= 0:
        yield _text_attribute("pg_name", str(values["group"] + 1))
    if said["kind"] in ("send", "recv"):
        ends = (rank, values["peer"]) if said["kind"] == "send" else (values["peer"], rank)
        for name, value in zip(("comm_src", "comm_dst"), ends, strict=True):
            if value >= 0:
                yield _attribute(name, _INT32, value)
        yield _attribute("comm_tag", _INT32, 0)  # transfers of a pair meet in their order
    elif said["kind"] in _COLLECTIVES:
        yield _attribute("comm_type", _INT64, _COLLECTIVES[said["kind"]])


def _attribute(name: str, field: int, value: int) -> bytes:
    return message(_ATTRIBUTE, message(_ATTRIBUTE_NAME, name) + number(field, value))


def _text_attribute(name: str, value: str) -> bytes:
    return message(_ATTRIBUTE, message(_ATTRIBUTE_NAME, name) + message(_STRING, value))


def _sized(body: bytes) -> bytes:
    return varint(len(body)) + body
