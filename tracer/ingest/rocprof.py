"""Reads JSON of rocprofv3 (``--output-format json``), the profiler of ROCm. A process is a rank.

Keys: https://rocm.docs.amd.com/projects/rocprofiler-sdk, "Using rocprofv3", section on JSON output.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from foretrace.tracer.errors import IngestError
from foretrace.tracer.ingest.device_events import COPY, KERNEL, DeviceEvents, recordings
from foretrace.tracer.ingest.events import text, whole
from foretrace.tracer.ingest.recording import Recording
from foretrace.tracer.ingest.sources import Progress, Source, read_json, read_whole

TOOL: Final = "rocprofiler-sdk-tool"

_GPU: Final = 2  # ``type`` of an agent that is a GPU

_COPIES: Final = {
    "HOST_TO_DEVICE": "HtoD", "DEVICE_TO_HOST": "DtoH", "DEVICE_TO_DEVICE": "DtoD",
    "MEMORY_COPY_HOST_TO_DEVICE": "HtoD", "MEMORY_COPY_DEVICE_TO_HOST": "DtoH",
    "MEMORY_COPY_DEVICE_TO_DEVICE": "DtoD",
}  # fmt: skip
"""Names of operations of copies, as Kineto's names of copies write them."""

_CALLS: Final = ("hip_api", "rccl_api")


def read(source: Source, progress: Progress | None = None) -> list[Recording]:
    """Read one file; a rank for each process that ran kernels.

    Raises IngestError: it cannot be read, or holds nothing that ran on a device.
    """
    document = read_json(read_whole(source, progress), source.name)
    processes = document.get(TOOL) if isinstance(document, dict) else None
    if not isinstance(processes, list):
        raise IngestError(f"{source.name} has no list {TOOL}: not of rocprofv3")
    ranks = {number: _process(one) for number, one in enumerate(processes) if isinstance(one, dict)}
    return recordings(ranks, source.name, "its processes")


def _process(said: Mapping[str, Any]) -> DeviceEvents:
    agents = {_handle(one.get("id")): one for one in _objects(said, "agents")}
    gpus = {handle: one for handle, one in agents.items() if one.get("type") == _GPU}
    called = (one.get("product_name") for one in gpus.values())
    events = DeviceEvents(next((name for name in called if isinstance(name, str)), ""))
    numbers = {handle: i for i, handle in enumerate(gpus)}
    names = {
        whole(one.get("kernel_id")): text(
            one.get("formatted_kernel_name") or one.get("kernel_name") or "kernel"
        )
        for one in _objects(said, "kernel_symbols")
    }
    records = said.get("buffer_records")
    records = records if isinstance(records, Mapping) else {}
    kinds = _operations(said)
    for one in _objects(records, "kernel_dispatch"):
        about = one.get("dispatch_info")
        about = about if isinstance(about, Mapping) else {}
        name = names.get(whole(about.get("kernel_id")), "kernel")
        _add(events, KERNEL, name, one, (numbers.get(_handle(about.get("agent_id")), 0), _stream(one, about)))
    for one in _objects(records, "memory_copy"):
        kind = _COPIES.get(kinds.get(_place(one), ""), "")
        # A copy counts for the device that it comes from or goes to.
        agent = _handle(one.get("dst_agent_id")) if kind != "DtoH" else _handle(one.get("src_agent_id"))
        _add(events, COPY, f"Memcpy {kind}".strip(), one, (numbers.get(agent, 0), _stream(one, {})))
    for table in _CALLS:
        for one in _objects(records, table):
            times = _times(one)
            if times is not None:
                thread = whole(one.get("thread_id")) or 0
                events.add_call(
                    kinds.get(_place(one), table), *times, thread=thread, correlation=_correlation(one)
                )
    _markers(said, records, events)
    return events


def _markers(said: Mapping[str, Any], records: Mapping[str, Any], events: DeviceEvents) -> None:
    """Add the ranges that ROCTx has marked; their texts are with the correlation that they have."""
    strings = said.get("strings")
    marked = strings.get("marker_api") if isinstance(strings, Mapping) else None
    texts = {
        whole(one.get("key")): text(one.get("value"))
        for one in (marked if isinstance(marked, list) else [])
        if isinstance(one, Mapping)
    }
    for one in _objects(records, "marker_api"):
        times, said_ = _times(one), texts.get(_correlation(one))
        if times is not None and said_:
            events.add_note(said_, *times, thread=whole(one.get("thread_id")) or 0)


def _add(events: DeviceEvents, kind: str, name: str, one: Mapping[str, Any], at: tuple[int, int]) -> None:
    times, (device, stream) = _times(one), at
    if times is None:
        events.lost["device event without a usable time"] += 1
        return
    size, number = whole(one.get("bytes")), _correlation(one)
    events.add(kind, name, *times, stream=stream, device=device, correlation=number, size_bytes=size)


def _objects(said: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    listed = said.get(name)
    return [one for one in listed if isinstance(one, Mapping)] if isinstance(listed, list) else []


def _handle(said: Any) -> int:
    return (whole(said.get("handle")) or 0) if isinstance(said, Mapping) else 0


def _stream(one: Mapping[str, Any], about: Mapping[str, Any]) -> int:
    """Return the HIP stream, or the queue of the hardware where streams were not recorded."""
    return _handle(one.get("stream_id")) or _handle(about.get("queue_id"))


def _correlation(one: Mapping[str, Any]) -> int:
    said = one.get("correlation_id")
    return (whole(said.get("internal")) or 0) if isinstance(said, Mapping) else 0


def _times(one: Mapping[str, Any]) -> tuple[int, int] | None:
    start, end = whole(one.get("start_timestamp")), whole(one.get("end_timestamp"))
    return None if start is None or end is None or end < start else (start, end)


_Place = tuple[int | None, int | None]


def _place(one: Mapping[str, Any]) -> _Place:
    return whole(one.get("kind")), whole(one.get("operation"))


def _operations(said: Mapping[str, Any]) -> dict[_Place, str]:
    strings = said.get("strings")
    listed = _objects(strings, "buffer_records") if isinstance(strings, Mapping) else []
    found: dict[_Place, str] = {}
    # A kind is a place in this list, an operation one in the kind's own.
    for kind, one in enumerate(listed):
        names = one.get("operations")
        for number, name in enumerate(names if isinstance(names, list) else []):
            found[kind, number] = text(name)
    return found
