"""What a rank issued, out of the operators that a trace holds with the shapes of their inputs.

The result is a rehearsal (``traces.rehearsal``), as if the script had been run without a GPU, and beside it
what every operator took. The work of an operator is counted as in a rehearsal: torch is asked, on tensors
without memory, what the call returns.

An operator here is the outermost of nested ones that torch does not take apart, which is what a rehearsal
sees, too: ``aten::convolution`` and not the library's call inside of it.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from foretrace.tracer import internals
from foretrace.tracer.errors import IngestError
from foretrace.tracer.ingest.events import MODULE, arguments, text, timed_ns, whole
from foretrace.tracer.ingest.host import Known, Launches, OnDevice, Steps
from foretrace.tracer.ingest.idle import SHORTEST_NS
from foretrace.tracer.ingest.kernels import dtype
from foretrace.tracer.rehearse.tape.calls import Call
from foretrace.tracer.rehearse.tape.pricing import as_laid_out
from foretrace.tracer.rehearse.tape.works import Work, work_of
from foretrace.traces import rehearsal
from foretrace.traces.analysis.activity import covered_by
from foretrace.traces.columns import Int64Array, distinct, int64, labels

SOON_NS: Final = 20_000
"""A kernel that starts so soon after a communication ended, on a stream that idled until then, waited for it:
kernels take 3 to 10 µs to start."""

PAUSE_NS: Final = 1_000_000
PAUSE_RATIO: Final = 20
"""A host that launches nothing for so long, and so many times as long as it usually takes, does something
else than to launch: conventions."""

_SCALAR_TYPES: Final = (
    "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex32", "complex64",
    "complex128", "bool", "qint8", "quint8", "qint32", "bfloat16",
)  # fmt: skip
"""Data types by their numbers in ATen (``c10/core/ScalarType.h``), as traces write them."""

_TORCH_TYPES: Final = {
    "fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp8": "float8_e4m3fn",
    "int64": "int64", "int32": "int32", "int16": "int16", "int8": "int8", "uint8": "uint8", "bool": "bool",
    "complex64": "complex64",
}  # fmt: skip

_INPUTS: Final = ("Input Dims", "Input Strides", "Input type", "Concrete Inputs")
"""What a trace says of the arguments of an operator."""

_ELSEWHERE: Final = frozenset({"Device", "Layout", "Generator"})
"""Types of arguments that say where a tensor lies, not how much work there is."""


class _Spans(NamedTuple):
    """Operators of one thread, sorted by start; ``parent`` is the operator around each, -1 for none."""

    start_ns: Int64Array
    end_ns: Int64Array
    parent: list[int]
    events: list[Mapping[str, Any]]


def issued(
    operators: Sequence[Mapping[str, Any]], rows: OnDevice, spans: pa.Table, known: Known, steps: Steps
) -> tuple[rehearsal.Issued | None, pa.Table]:
    """Return what the rank issued in its steps, None if no operator has shapes; and *spans* with its work.

    Args:
        operators: operators and modules of the host, as the file holds them.
        rows: what runs on the device.
        spans: the timeline of the same rows.
        known: what else the file holds; its steps are on the host's clock.
        steps: the same on the device's clock.

    Raises:
        IngestError: torch is not installed.
    """
    if not any("Input Dims" in arguments(event) for event in operators):
        return None, spans
    try:
        import torch
    except ImportError as error:
        raise IngestError("--explain asks PyTorch what operators compute: pip install torch") from error
    threads = _threads(operators, known.base_ns)
    counting = _Counting(torch, operators)
    return _Writer(threads, rows, spans, known, on_device=steps, counting=counting).written()


def _threads(operators: Sequence[Mapping[str, Any]], base_ns: int) -> dict[int, _Spans]:
    """Return the operators of each thread, with the operator or module around each."""
    found: dict[int, list[tuple[int, int, Mapping[str, Any]]]] = defaultdict(list)
    for event in operators:
        if (when := timed_ns(event, base_ns)) is not None:
            found[when[2]].append((*when[:2], event))
    result = {}
    for tid, own in found.items():
        own.sort(key=lambda one: (one[0], -one[1]))
        parent, stack = [], list[int]()
        for at, (start, _, _) in enumerate(own):
            while stack and own[stack[-1]][1] <= start:
                stack.pop()
            parent.append(stack[-1] if stack else -1)
            stack.append(at)
        starts, ends = (np.array([one[i] for one in own], np.int64) for i in (0, 1))
        result[tid] = _Spans(starts, ends, parent, [one[2] for one in own])
    return result


def _around(spans: _Spans, t_ns: int) -> list[int]:
    """Return the operators and modules that were open at a moment, the innermost first."""
    at = int(np.searchsorted(spans.start_ns, t_ns, side="right")) - 1
    found = []
    while at >= 0:
        if spans.end_ns[at] >= t_ns:
            found.append(at)
        at = spans.parent[at]
    return found


class _Counting:
    """Counts the work of operators, each of equal inputs once."""

    def __init__(self, torch: Any, operators: Sequence[Mapping[str, Any]]) -> None:
        self._torch = torch
        self._works: dict[str, Work] = {}
        self._overloads: dict[str, list[Any]] = {}
        # Numbers of c10::MemoryFormat, as traces write them.
        self._formats = {0: torch.contiguous_format, 1: torch.preserve_format, 2: torch.channels_last}
        floating: Counter[str] = Counter()
        for event in operators:
            said = arguments(event).get("Input type")
            floating.update(dtype(str(one))[0] for one in said if one) if isinstance(said, list) else None
        common = [name for name, _ in floating.most_common() if name.startswith(("fp", "bf"))]
        self.usual = common[0] if common else "fp32"

    def is_whole(self, name: str) -> bool:
        """Whether *name* is an operator that torch does not take apart into others."""
        overloads = self._known(name)
        return bool(overloads) and not internals.is_composite(overloads[0])

    def of(self, event: Mapping[str, Any]) -> Work:
        """Return the work of the operator that *event* is a call of."""
        said = arguments(event)
        name = text(event.get("name"))
        key = json.dumps([name, *map(said.get, _INPUTS)])
        if key not in self._works:
            self._works[key] = self._counted(name, said)
        return self._works[key]

    def _known(self, name: str) -> list[Any]:
        if name not in self._overloads:
            space, _, op = name.partition("::")
            packet = None
            if op.isidentifier() and space in {"aten", "prims"}:
                packet = getattr(getattr(self._torch.ops, space), op, None)
            listed = [getattr(packet, one) for one in packet.overloads()] if packet is not None else []
            self._overloads[name] = listed
        return self._overloads[name]

    def _counted(self, name: str, said: Mapping[str, Any]) -> Work:
        space, _, op = name.partition("::")
        dims, types, strides = (
            one if isinstance(one, list) else []
            for one in map(said.get, ("Input Dims", "Input type", "Input Strides"))
        )
        if len(strides) != len(dims):  # older files have none
            strides = [None] * len(dims)
        given = said.get("Concrete Inputs")
        given = given if isinstance(given, list) else [""] * len(types)
        for overload in self._known(name):
            wanted = internals.schema_arguments(overload)
            if len(wanted) != len(types):
                continue
            try:
                with self._torch.no_grad():
                    args = [
                        self._argument(*one) for one in zip(wanted, dims, types, given, strides, strict=True)
                    ]
                    pairs = list(zip(wanted, args, strict=True))
                    out = overload(
                        *(value for argument, value in pairs if not argument.kwarg_only),
                        **{argument.name: value for argument, value in pairs if argument.kwarg_only},
                    )
            # The arguments may be those of another overload.
            except Exception:
                continue
            named = {argument.name: value for argument, value in pairs}
            call = Call(f"{space}.{op}", args, named, out)
            return as_laid_out(work_of(call), overload, call)
        return self._unknown(f"{space}.{op}" if op else name, dims, types)

    def _unknown(self, name: str, dims: Sequence[Any], types: Sequence[Any]) -> Work:
        shapes = ["x".join(map(str, one)) for one in dims if isinstance(one, list) and one]
        return Work(name, "memory", f"{', '.join(shapes[:4])} -> ?", self.usual, 0, 0, is_known=False)

    def _argument(self, argument: Any, dims: Any, kind: Any, given: Any, strides: Any) -> Any:
        """Return an argument as the trace tells it. Raises ValueError if it does not tell a needed one."""
        wanted, label = str(argument.type), dtype(str(kind))[0]
        if kind in {"TensorList", "GenericList"} or "List[Tensor]" in wanted:
            if not isinstance(dims, list) or not dims or not all(isinstance(one, list) for one in dims):
                raise ValueError("members of a list are not told")
            known = strides if isinstance(strides, list) and len(strides) == len(dims) else [None] * len(dims)
            return [self._tensor(one, self.usual, steps) for one, steps in zip(dims, known, strict=True)]
        if label and "Tensor" in wanted:
            return self._tensor(dims, label, strides)
        value = _value(given)
        if "MemoryFormat" in wanted:
            return self._formats.get(value)
        if any(word in wanted for word in _ELSEWHERE):
            value = "meta" if "Device" in wanted else None
        elif argument.name == "dtype" and isinstance(value, int):
            value = getattr(self._torch, _SCALAR_TYPES[value])
        elif value is None and argument.has_default_value():
            value = argument.default_value
        elif value is None and "Optional" not in wanted:
            raise ValueError(f"{argument.name} is not told")
        elif "Tensor" in wanted and value is not None:
            # A number where a tensor is wanted counts as one without dimensions.
            value = self._torch.empty((), dtype=self._torch.float64, device="meta")
        return float(value) if wanted == "float" and isinstance(value, int) else value

    def _tensor(self, dims: Any, label: str, strides: Any) -> Any:
        sizes = [whole(one) for one in dims] if isinstance(dims, list) else []
        if any(size is None or size < 0 for size in sizes):
            raise ValueError("a size is not told")
        where = {"dtype": getattr(self._torch, _TORCH_TYPES[label]), "device": "meta"}
        steps = [whole(one) for one in strides] if isinstance(strides, list) else []
        if len(steps) != len(sizes) or any(step is None or step < 0 for step in steps):
            return self._torch.empty(sizes, **where)
        return self._torch.empty_strided(sizes, steps, **where)


def _value(given: Any) -> Any:
    """Return the value that a trace writes as text; None if it writes none.

    >>> _value("[1, 2]"), _value("False"), _value("0."), _value("")
    ([1, 2], False, 0.0, None)
    """
    if not isinstance(given, str) or not given:
        return None
    if given in {"True", "False"}:
        return given == "True"
    if given.startswith("["):
        return [_value(part.strip()) for part in given[1:-1].split(",") if part.strip()]
    try:
        return int(given)
    except ValueError:
        pass
    try:
        return float(given)
    except ValueError:
        return given


class _Issue(NamedTuple):
    """One thing that a rank issued: when, what, and the rows of the device that it became."""

    t_ns: int
    what: int
    work: Work | None
    rows: list[int]
    path: str
    launches: list[int]


class _Writer:
    """Writes what a rank issued, in order."""

    def __init__(
        self,
        threads: Mapping[int, _Spans],
        rows: OnDevice,
        spans: pa.Table,
        known: Known,
        *,
        on_device: Steps,
        counting: _Counting,
    ) -> None:
        self._on_device = on_device
        self._threads, self._rows, self._known, self._counting = threads, rows, known, counting
        self._step = int64(spans, "step")
        # pauses of the device's own between kernels of a stream are part of the later one
        gap = rows.start_ns - np.append(0, rows.end_ns[:-1])
        same = np.append(False, rows.stream[1:] == rows.stream[:-1])
        self._duration = (
            rows.end_ns - rows.start_ns + np.where(same & (gap > 0) & (gap <= SHORTEST_NS), gap, 0)
        )
        self._spans = spans
        self._label = {name: _words(spans, name) for name in ("category", "kind", "name", "dtype")}
        self._number = {name: int64(spans, name) for name in ("group", "sequence", "peer", "size_bytes")}
        self._moved = int64(spans, "bytes_moved")
        busy = np.bincount(rows.stream, self._duration * (rows.computes + 1e-9))
        # The place of each stream by how long it computes: 0 is the one that does most.
        self._stream = np.argsort(np.argsort(-busy, kind="stable"))[rows.stream]

    def written(self) -> tuple[rehearsal.Issued | None, pa.Table]:
        """Return what was issued in whole steps, None if nothing was, and the timeline with its work."""
        steps = self._steps()
        issues = self._issues(set(steps))
        if not issues or not steps:
            return None, self._spans
        host_ns, pauses = self._host(issues)
        events, measured = list[tuple[int, ...]](), list[tuple[int, ...]]()
        works: rehearsal.Distinct[Work] = rehearsal.Distinct()
        messages: rehearsal.Distinct[rehearsal.Message] = rehearsal.Distinct()
        places: rehearsal.Distinct[rehearsal.Place] = rehearsal.Distinct()
        waits = self._waits(issues)
        blocked = self._blocked()
        number_of: dict[int, int] = {}
        previous_ns = issues[0].t_ns
        for at, issue in enumerate(issues):
            first = issue.rows[0]
            place = places.number(self._place(issue, steps))
            stream = int(self._stream[first])
            # A call that held the host up has returned between the launch before and this one.
            if ((blocked > previous_ns) & (blocked <= issue.t_ns)).any():
                events.append((rehearsal.HOST_WAIT, -1, place, 0, -1, 0))
            previous_ns = issue.t_ns
            events += [
                (rehearsal.WAIT, -1, place, 0, number_of[other], 0)
                for other in waits.get(at, ())
                if other in number_of
            ]
            # Where this event will stand: waits for it name that place.
            number_of[at] = len(events)
            if issue.what == rehearsal.COMMUNICATION:
                item = messages.number(self._message(first))
                order = int(self._number["sequence"][first])
                events.append((rehearsal.COMMUNICATION, item, place, 0, order if order >= 0 else at, 0))
            else:
                events.append((rehearsal.OP, works.number(issue.work), place, stream, -1, 0))  # type: ignore[arg-type]
            took = int(self._duration[issue.rows].sum())
            measured.append((number_of[at], int(self._rows.start_ns[first]), took, host_ns[at], pauses[at]))
        tables = rehearsal.RankTables(
            rehearsal.table_of(events, rehearsal.EVENTS),
            works.table(rehearsal.WORKS),
            messages.table(rehearsal.MESSAGES),
            places.table(rehearsal.PLACES),
        )
        facts = self._facts(issues, steps, pauses)
        return rehearsal.Issued(
            tables, rehearsal.table_of(measured, rehearsal.MEASURED), facts
        ), self._worked(issues)

    def _worked(self, issues: Sequence[_Issue]) -> pa.Table:
        """Return the timeline with the work of operators, of each in its only kernel, where it tells none."""
        spans = self._spans
        columns = {name: spans[name].to_pylist() for name in ("flops", "bytes_moved", "dtype")}
        for one in issues:
            if one.work is None or not one.work.is_known or len(one.rows) > 1:
                continue
            (row,) = one.rows
            # A copy says its bytes itself, and has no type.
            if self._rows.computes[row]:
                for name, values in columns.items():
                    values[row] = values[row] or getattr(one.work, name)
        for name, values in columns.items():
            field = spans.schema.field(name)
            column = (
                pa.array(values, pa.string()).dictionary_encode() if name == "dtype" else pa.array(values)
            )
            spans = spans.set_column(spans.column_names.index(name), field, column.cast(field.type))
        return spans

    def _steps(self) -> list[int]:
        """Return the steps of which all that ran was launched within what was recorded; one if unmarked."""
        if not len(self._known.steps.number):
            return [-1]
        own = set(np.unique(self._step[(self._rows.launch >= 0) & (self._step >= 0)]).tolist())
        return [number for number in self._known.steps.number.tolist() if number in own]

    def _issues(self, steps: set[int]) -> list[_Issue]:
        rows, launches = self._rows, self._known.launches
        found: dict[Any, _Issue] = {}
        for row in np.flatnonzero(rows.launch >= 0).tolist():
            if int(self._step[row]) not in steps:
                continue
            launch = int(rows.launch[row])
            tid, t_ns = int(launches.tid[launch]), int(launches.start_ns[launch])
            spans = self._threads.get(tid)
            around = _around(spans, t_ns) if spans is not None else []
            path = self._path(spans, around)
            kind = self._label["kind"][row]
            if self._label["category"][row] in {"collective", "p2p"}:
                found[("communication", row)] = _Issue(
                    t_ns, rehearsal.COMMUNICATION, None, [row], path, [launch]
                )
                continue
            if kind in {"host_to_device", "device_to_host"}:
                work = self._copy(row, rehearsal.TO_DEVICE if kind == "host_to_device" else rehearsal.TO_HOST)
                found[("copy", row)] = _Issue(t_ns, rehearsal.OP, work, [row], path, [launch])
                continue
            chosen = self._chosen(spans, around)
            key = ("operator", tid, chosen) if chosen is not None else ("kernel", row)
            if key in found:
                found[key].rows.append(row)
                found[key].launches.append(launch)
                continue
            work = self._counting.of(spans.events[chosen]) if chosen is not None else self._nameless(row)  # type: ignore[union-attr]
            found[key] = _Issue(t_ns, rehearsal.OP, work, [row], path, [launch])
        for key, one in found.items():
            if one.work is not None and key[0] != "copy":  # a copy over the link is no kernel
                work = one.work._replace(kernels=len(one.rows))
                in_time = sorted(one.rows, key=lambda row: rows.start_ns[row])
                found[key] = one._replace(work=work, rows=in_time)
        return sorted(found.values(), key=lambda one: one.t_ns)

    def _chosen(self, spans: _Spans | None, around: Sequence[int]) -> int | None:
        """Return the outermost operator around a launch that torch does not take apart, or the innermost."""
        if spans is None:
            return None
        named = [at for at in around if spans.events[at].get("cat") != "python_function"]
        whole_ones = [at for at in named if self._counting.is_whole(text(spans.events[at].get("name")))]
        # The innermost comes first in *around*.
        return whole_ones[-1] if whole_ones else named[0] if named else None

    def _path(self, spans: _Spans | None, around: Sequence[int]) -> str:
        if spans is None:
            return ""
        names = [text(spans.events[at].get("name")) for at in reversed(around)]
        return "/".join(name.removeprefix(MODULE) for name in names if name.startswith(MODULE))

    def _copy(self, row: int, kind: str) -> Work:
        return Work(f"copy.{kind}", kind, f"{self._moved[row]} B", "", 0, int(self._moved[row]))

    def _nameless(self, row: int) -> Work:
        return Work(self._label["name"][row], "memory", "", self._counting.usual, 0, 0, is_known=False)

    def _place(self, issue: _Issue, steps: Sequence[int]) -> rehearsal.Place:
        kind, category = (self._label[name][issue.rows[0]] for name in ("kind", "category"))
        step = int(self._step[issue.rows[0]])
        at = steps.index(step) if step in steps else 0
        return rehearsal.Place(kind if category == "compute" else "kernel", issue.path, step=at)

    def _message(self, row: int) -> rehearsal.Message:
        kind, dtype = (self._label[name][row] for name in ("kind", "dtype"))
        group, size_bytes, peer = (int(self._number[name][row]) for name in ("group", "size_bytes", "peer"))
        return rehearsal.Message(kind, group, size_bytes, dtype, peer, is_async=True, name=kind)

    def _waits(self, issues: Sequence[_Issue]) -> dict[int, list[int]]:
        """Return what waited for which communications: it started when they ended, on a stream that idled."""
        rows = self._rows
        found: dict[int, list[int]] = defaultdict(list)
        main = [
            at for at, one in enumerate(issues) if one.what == rehearsal.OP and self._stream[one.rows[0]] == 0
        ]
        starts = np.array([rows.start_ns[issues[at].rows[0]] for at in main], np.int64)
        ends = np.array([rows.end_ns[issues[at].rows].max() for at in main], np.int64)
        for at, one in enumerate(issues):
            if one.what != rehearsal.COMMUNICATION or not main:
                continue
            end_ns = int(rows.end_ns[one.rows[0]])
            next_ = int(np.searchsorted(starts, end_ns))
            if next_ == len(main):
                continue
            idle_since = int(ends[next_ - 1]) if next_ else 0
            if starts[next_] - end_ns <= SOON_NS and idle_since < end_ns:
                found[main[next_]].append(at)
        return found

    def _blocked(self) -> Int64Array:
        """Return when calls of the runtime in which the host waited for the device returned."""
        launches = self._known.launches
        ends: Int64Array = np.sort(launches.end_ns[launches.named("Synchronize")])
        return ends

    def _host(self, issues: Sequence[_Issue]) -> tuple[list[int], list[int]]:
        """Return the time of the host for each: what it worked, what it paused, not what it waited."""
        launches, steps = self._known.launches, self._known.steps
        calls = np.unique(np.concatenate([np.array(one.launches, np.int64) for one in issues]))
        calls = calls[np.argsort(launches.start_ns[calls], kind="stable")]
        begin = launches.start_ns[calls]
        place = steps.place(begin)
        first = np.append(True, place[1:] != place[:-1])
        if len(steps.number):
            # The first call of a step counts from the step's begin, any other from the call before.
            since = np.where(
                first, steps.start_ns[np.clip(place, 0, len(steps.number) - 1)], np.append(0, begin[:-1])
            )
        else:
            since = np.append(begin[0], begin[:-1])
        waited = _waited_ns(launches, since, begin, self._rows)
        gap = np.maximum(begin - since - waited, 0)
        limit = max(PAUSE_NS, PAUSE_RATIO * float(np.median(gap)))
        of_call = dict(zip(calls.tolist(), gap.tolist(), strict=True))
        host, pauses = [], []
        seen: set[int] = set()
        for one in issues:
            # A call that launched for several operators is time of the first.
            own = [of_call[call] for call in dict.fromkeys(one.launches) if call not in seen]
            seen.update(one.launches)
            host.append(int(sum(ns for ns in own if ns < limit)))
            pauses.append(int(sum(ns for ns in own if ns >= limit)))
        return host, pauses

    def _facts(self, issues: Sequence[_Issue], steps: Sequence[int], pauses: Sequence[int]) -> dict[str, Any]:
        """Return what a reader should know: the step that was measured, and how much of it is explained."""
        rows = self._rows
        own = np.array(sorted({row for one in issues for row in one.rows}))
        before = np.ones(len(rows.start_ns), np.bool_)
        before[own] = False
        windows, idle, began = [], [], []
        edges = self._on_device
        for number in steps:
            mine = own[self._step[own] == number]
            begin = int(rows.start_ns[mine].min())
            if number >= 0:
                at = int(np.flatnonzero(edges.number == number)[0])
                begin = int(edges.start_ns[at])
            earlier = rows.end_ns[(self._step != number) | before]
            earlier = earlier[earlier <= int(rows.start_ns[mine].min())]
            # A step begins when all that ran before its first kernel has ended.
            begin = max(begin, int(earlier.max(initial=begin)))
            end = int(rows.end_ns[mine].max())
            if number >= 0:
                end = max(end, int(edges.end_ns[at]))
            began.append(begin)
            windows.append((end - begin) / 1e9)
            idle.append((end - begin - _covered_ns(rows, begin, end)) / 1e9)
        known_ns = sum(
            int(self._duration[one.rows].sum()) for one in issues if one.work is None or one.work.is_known
        )
        return {
            "steps": len(steps),
            "began_ns": began[0],
            "step_s": windows,
            "idle_s": idle,
            "explained": known_ns / max(int(self._duration[own].sum()), 1),
            "paused_s": sum(pauses) / 1e9,
        }


def _covered_ns(rows: OnDevice, begin_ns: int, end_ns: int) -> int:
    """Return how long anything ran between two moments; pauses of the device's own count as running."""
    start, end = np.clip(rows.start_ns, begin_ns, end_ns), np.clip(rows.end_ns, begin_ns, end_ns)
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    gap = start - np.append(begin_ns, end[:-1])
    return end_ns - begin_ns - int(gap[gap > SHORTEST_NS].sum()) - max(end_ns - int(end[-1]), 0)


def _waited_ns(launches: Launches, since: Int64Array, until: Int64Array, rows: OnDevice) -> Int64Array:
    """Return how much of each interval the host waited for its device, in calls that block or take long."""
    own = launches.holding()
    spans = (launches.start_ns[own], launches.end_ns[own]), (rows.start_ns, rows.end_ns)
    point = distinct(np.concatenate([since, until, *spans[0], *spans[1]]))
    waits = covered_by(point, *spans[0]) & covered_by(point, *spans[1])
    waited = np.append(0, np.cumsum(np.diff(point) * waits))
    found: Int64Array = waited[np.searchsorted(point, until)] - waited[np.searchsorted(point, since)]
    return found


def _words(spans: pa.Table, name: str) -> list[str]:
    codes, names = labels(spans, name)
    return [names[code] for code in codes.tolist()]
