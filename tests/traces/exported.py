"""Reads traces for Perfetto and Chrome by their formats alone: nothing here knows what has written them."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

Slice = tuple[int, str, str, int, int]
"""Rank, name of the track, name, start and end in ns."""


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and value of every field of a protobuf message."""
    at = 0

    def read_varint() -> int:
        nonlocal at
        value, shift = 0, 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        field, wire = divmod(read_varint(), 8)
        if wire == 0:
            yield field, read_varint()
        elif wire == 1:
            yield field, int.from_bytes(data[at : at + 8], "little")
            at += 8
        else:
            assert wire == 2
            size = read_varint()
            yield field, data[at : at + size]
            at += size
    assert at == len(data)


def message(data: int | bytes) -> dict[int, list[Any]]:
    """Return the values of every field of a protobuf message, by its number."""
    assert isinstance(data, bytes)
    found: dict[int, list[Any]] = defaultdict(list)
    for field, value in fields(data):
        found[field].append(value)
    return found


class Perfetto:
    """A trace, read as the trace processor reads it: events by time, equal times in the order of the file."""

    def __init__(self, data: bytes) -> None:
        self.names: dict[int, str] = {}
        self.arguments: dict[int, str] = {}
        self.tracks: dict[int, dict[int, list[Any]]] = {}
        self.slices: list[tuple[int, str, int, int, dict[str, int]]] = []
        self.arrows: list[tuple[str, str]] = []
        self.counters: dict[str, list[tuple[int, int]]] = defaultdict(list)
        events: list[tuple[int, dict[int, list[Any]]]] = []
        for field, packet in fields(data):
            assert field == 1
            self.packet(message(packet), events)
        self.replay(sorted(events, key=lambda event: event[0]))

    def packet(self, packet: dict[int, list[Any]], events: list[tuple[int, dict[int, list[Any]]]]) -> None:
        """Take in a packet: names, tracks, and *events* with their times."""
        assert packet[10] == [1]
        for entries in map(message, packet[12]):
            for store, field in ((self.names, 2), (self.arguments, 3)):
                store |= {m[1][0]: m[2][0].decode() for m in map(message, entries[field])}
        for track in map(message, packet[60]):
            self.tracks[track[1][0]] = track
        events += [(packet[8][0], event) for event in map(message, packet[11])]

    def replay(self, events: list[tuple[int, dict[int, list[Any]]]]) -> None:
        """Make slices, arrows and counters of *events* in their order."""
        open_slices: dict[int, list[tuple[int, dict[int, list[Any]]]]] = defaultdict(list)
        flows: dict[int, str] = {}
        for t_ns, event in events:
            (track,), (kind,) = event[11], event[9]
            if kind == 4:
                self.counters[self.tracks[track][2][0].decode()].append((t_ns, event[30][0]))
            elif kind == 1:
                open_slices[track].append((t_ns, event))
                name = self.names[event[10][0]]
                for flow in event[47]:
                    flows[flow] = name
                self.arrows += [(flows[flow], name) for flow in event[48] if flow in flows]
            else:
                start, begun = open_slices[track].pop()
                said = {self.arguments[a[1][0]]: a[3][0] for a in map(message, begun[4])}
                self.slices.append((track, self.names[begun[10][0]], start, t_ns, said))
        assert not any(open_slices.values())

    def all(self) -> Counter[Slice]:
        """Return every slice, and how often."""
        found: Counter[Slice] = Counter()
        for track, name, start, end, _ in self.slices:
            own = self.tracks[track]
            parent = self.tracks[own[5][0]] if own[5] else own
            rank = int(parent[2][0].decode().split()[1])
            found[rank, own[2][0].decode() if own[5] else "compute", name, start, end] += 1
        return found


def chrome(data: bytes) -> Counter[Slice]:
    """Return every slice of a trace for Chrome, and how often."""
    events = json.loads(data)["traceEvents"]
    threads = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in events
        if e["ph"] == "M" and e["name"] == "thread_name"
    }
    return Counter(
        (
            e["pid"],
            threads[e["pid"], e["tid"]],
            e["name"],
            round(e["ts"] * 1000),
            round(e["ts"] * 1000) + round(e["dur"] * 1000),
        )
        for e in events
        if e["ph"] == "X"
    )
