"""Events are found in blocks of any layout, whatever stands beside them and wherever blocks end."""

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.tracer.ingest.chrome import NEITHER, Decoder, Events, NamesLeftOut, Trace

Event = dict[str, Any]


def event(cat: str, name: str) -> Event:
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": 0,
        "tid": 1,
        "ts": 1.0,
        "dur": 2.0,
        "args": {"x": name},
    }


def as_kineto(events: list[Event]) -> bytes:
    """Return *events* in the layout that Kineto writes."""
    texts = []
    for one in events:
        head = ", ".join(f'"{key}": {json.dumps(value)}' for key, value in one.items() if key != "args")
        args = ", ".join(f'"{key}": {json.dumps(value)}' for key, value in one["args"].items())
        texts.append(f'{{\n    {head},\n    "args": {{\n      {args}\n    }}\n  }}')
    return ("\n  " + ",\n  ".join(texts)).encode()


@pytest.fixture(scope="module")
def monkeypatch_module() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


NAMES = st.text('ab{}\n "\\', max_size=6)
CATEGORIES = ("kernel", "gpu_memcpy", "cpu_op", "cuda_runtime", "kernels_of_mine")
PLAIN = st.builds(lambda name, cat: event(cat, name), NAMES, st.sampled_from(CATEGORIES))
TRACK = st.builds(lambda name: {"name": name, "ph": "M", "ts": 1.0, "args": {"name": name}}, NAMES)
INSTANT = st.builds(lambda name: {"ph": "i", "cat": "kernel", "name": name, "ts": 1.0, "args": {}}, NAMES)


@settings(max_examples=80, deadline=None)
@given(found=st.lists(st.one_of(PLAIN, TRACK, INSTANT), max_size=8), stale=st.binary(max_size=40))
def test_events_are_found_whatever_stands_beside_them(found: list[Event], stale: bytes) -> None:
    """Tracks and instants in between, braces and quotes in names, stale bytes behind."""
    block = as_kineto(found)
    events = Events(bytearray(block + stale), len(block))
    for category in ("kernel", "gpu_mem", "cuda_"):
        wanted = [e for e in found if e["ph"] == "X" and e["cat"].startswith(category)]
        assert [json.loads(text) for text in events.texts((category.encode(),))] == wanted
    assert events.n_events == sum("cat" in e for e in found)


CALLS = (
    "cudaLaunchKernel",
    "cudaEventRecord",
    "cudaEventSynchronize",
    "cudaStreamWaitEvent",
    "cudaFree",
    "x",
)


@settings(max_examples=50, deadline=None)
@given(names=st.lists(st.tuples(st.sampled_from(["cuda_runtime", "cuda_driver"]), st.sampled_from(CALLS))))
def test_calls_are_left_out_by_eight_letters_of_their_names(names: list[tuple[str, str]]) -> None:
    """Only of the category that was said: another may have events of equal names."""
    block = as_kineto([event(*one) for one in names])
    found = Events(bytearray(block), len(block)).texts(
        (b"cuda_",), but=NamesLeftOut(b'cuda_runtime", "name": "cuda', (b"EventRec", b"StreamWa"))
    )
    left_out = {("cuda_runtime", "cudaEventRecord"), ("cuda_runtime", "cudaStreamWaitEvent")}
    assert [(e["cat"], e["name"]) for e in map(json.loads, found)] == [n for n in names if n not in left_out]


def test_no_call_that_blocks_or_launches_is_left_out() -> None:
    for name in ("LaunchKernel", "LaunchKernelExC", "GraphLaunch", "MemcpyAsync", "MemsetAsync", "Malloc",
                 "Free", "StreamSynchronize", "EventSynchronize", "DeviceSynchronize", "EventQuery",
                 "LaunchCooperativeKernel", "ModuleLoadData", "HostAlloc"):  # fmt: skip
        assert name.encode()[:8] not in NEITHER.begin


@settings(max_examples=50, deadline=None)
@given(
    found=st.lists(st.one_of(PLAIN, TRACK, INSTANT), max_size=30),
    indent=st.sampled_from([None, 1]),
    block=st.integers(40, 400),
    cut=st.integers(0, 400),
)
def test_events_of_any_layout_are_decoded_as_json_says_whatever_the_blocks(
    found: list[Event], indent: int | None, block: int, cut: int, monkeypatch_module: pytest.MonkeyPatch
) -> None:
    """Many at once or one by one, in blocks of any size; of a file that is cut off, those that are whole."""
    monkeypatch_module.setattr("foretrace.tracer.ingest.chrome.BLOCK_BYTES", block)
    text = json.dumps({"traceEvents": found, "traceName": "x"}, indent=indent).encode()
    trace = Trace()
    assert list(Decoder(io.BytesIO(text), trace).events()) == found
    assert (trace.cut, trace.header) == ("", {"traceName": "x"})
    short = Trace()
    part = list(Decoder(io.BytesIO(text[: min(16 + cut, len(text) - 22)]), short).events())
    assert part == found[: len(part)]
    assert short.cut
