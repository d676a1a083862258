"""The allocator of a rehearsal: that of PyTorch, request by request."""

import csv
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rehearsals import rehearse

from foretrace.simulator.rehearsed.run import simulate_rehearsal
from foretrace.topologies.catalog import load_cluster
from foretrace.tracer.rehearse.device.allocator import (
    LARGE_SEGMENT_BYTES,
    MIB,
    SETTINGS,
    SMALL_SEGMENT_BYTES,
    Block,
    CachingAllocator,
    Reserved,
)
from foretrace.tracer.rehearse.device.memory import Memory, rounded
from foretrace.tracer.rehearse.rehearsing import Asked

GOLDEN = Path(__file__).parent / "allocator.csv"
"""Random requests, and what PyTorch 2.11 for CUDA holds after each (``benchmarks/allocator.py --golden``)."""


def told() -> list[Any]:
    with GOLDEN.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [
        pytest.param(list(group), id=key or "as it is")
        for key, group in groupby(rows, lambda row: row["setting"])
    ]


@pytest.mark.parametrize("rows", told())
def test_it_holds_what_pytorch_holds(rows: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """After each of 250 requests, of up to three streams; segments that grow, and limits to splitting."""
    monkeypatch.setenv(SETTINGS[1], rows[0]["setting"])
    monkeypatch.delenv(SETTINGS[0], raising=False)
    allocator, held = CachingAllocator.as_set(), dict[str, Block]()
    for at, row in enumerate(rows):
        if row["what"] == "a":
            held[row["number"]] = allocator.allocate(int(row["bytes"]), int(row["stream"]))
        elif row["what"] == "f":
            allocator.free(held.pop(row["number"]))
        else:
            allocator.empty()
        assert allocator.reserved_bytes == int(row["reserved"]), (at, row)
    assert len(rows) == 250


SIZES = st.sampled_from((1, 512, 5000, MIB, MIB + 1, 3 * MIB, 10 * MIB, 11 * MIB, 64 * MIB)) | st.integers(
    1, 100 * MIB
)
REQUESTS = st.lists(st.tuples(SIZES, st.integers(0, 2), st.integers(0, 5)), max_size=60)


@given(asked=REQUESTS, is_expandable=st.booleans())
def test_blocks_in_use_share_nothing(asked: list[tuple[int, int, int]], is_expandable: bool) -> None:
    """Each has its bytes to itself, segments hold them all, and nothing is left once all are let go."""
    allocator, held = CachingAllocator(is_expandable=is_expandable), list[Block]()
    for size, stream, n_freed in asked:
        block = allocator.allocate(rounded(size), stream)
        assert block.n_bytes >= size
        held.append(block)
        for _ in range(min(n_freed, len(held)) // 2):
            allocator.free(held.pop(n_freed % len(held)))
        ranges = sorted((one.address, one.address + one.n_bytes) for one in held)
        assert all(before[1] <= after[0] for before, after in pairwise(ranges))
        assert sum(one.n_bytes for one in held) <= allocator.reserved_bytes
    for block in held:
        allocator.free(block)
    allocator.empty()
    assert allocator.reserved_bytes == 0


@pytest.mark.parametrize("is_expandable", [False, True])
def test_what_a_stream_lets_go_serves_that_stream_alone(is_expandable: bool) -> None:
    """This is why a job whose gradients are reduced on a stream of their own holds more than it ever uses."""
    allocator = CachingAllocator(is_expandable=is_expandable)
    allocator.free(allocator.allocate(100 * MIB, stream=0))
    allocator.free(allocator.allocate(100 * MIB, stream=0))
    assert allocator.reserved_bytes == 100 * MIB
    allocator.allocate(100 * MIB, stream=1)
    assert allocator.reserved_bytes == 200 * MIB


def test_a_growing_segment_joins_what_two_requests_left() -> None:
    """Two neighbours of 60 MiB serve one of 120 MiB, which two segments of their own cannot."""
    held = {}
    for is_expandable in (False, True):
        allocator = CachingAllocator(is_expandable=is_expandable)
        for block in [allocator.allocate(60 * MIB, 0) for _ in range(2)]:
            allocator.free(block)
        allocator.allocate(120 * MIB, 0)
        held[is_expandable] = allocator.reserved_bytes
    assert held == {False: 240 * MIB, True: 120 * MIB}


@pytest.mark.parametrize("is_expandable", [False, True])
@pytest.mark.parametrize(
    ("free", "asked", "serves"),
    [(60, 3, True), (64, 3, False), (100, 63, False), (100, 80, False), (100, 81, True)],
)
def test_what_is_larger_than_may_be_split_serves_no_small_request(
    free: int, asked: int, serves: bool, is_expandable: bool
) -> None:
    """Nor one above that size of which 20 MiB would be left, in segments that grow as in others."""
    allocator = CachingAllocator(is_expandable=is_expandable, max_split_bytes=64 * MIB)
    # What is behind the block stays in use: at its end, a segment grows out of what is free there.
    block, _ = (allocator.allocate(free * MIB, 0) for _ in range(2))
    allocator.free(block)
    assert (allocator.allocate(asked * MIB, 0) is block) == serves


def test_an_emptied_cache_gives_back_whole_pages() -> None:
    allocator = CachingAllocator(is_expandable=True)
    first, second = allocator.allocate(30 * MIB, 0), allocator.allocate(45 * MIB, 0)
    assert allocator.reserved_bytes == 4 * LARGE_SEGMENT_BYTES
    allocator.free(second)
    allocator.empty()  # 30 MiB lie in the first two pages
    assert allocator.reserved_bytes == 2 * LARGE_SEGMENT_BYTES
    allocator.free(first)
    allocator.empty()
    assert allocator.reserved_bytes == 0


def test_memory_of_the_host_is_in_no_cache() -> None:
    totals = list[int]()
    host, device = Memory(totals.append, block_bytes=1), Memory(totals.append, stream=lambda: 0)
    for memory in (host, device):
        memory.hold(512, "activations")
    assert (host.reserved_bytes, device.reserved_bytes) == (0, SMALL_SEGMENT_BYTES)
    assert "reserved_bytes" not in host.described()
    assert device.described(has_gpu=True)["reserved_bytes"] == SMALL_SEGMENT_BYTES


SCRIPT = """
import sys
import torch

torch._C._accelerator_setAllocatorSettings(sys.argv[1])
side = torch.cuda.Stream()
model = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    with torch.cuda.stream(side):
        kept = torch.zeros(100 * 2**20, dtype=torch.uint8, device="cuda")
        del kept
    with torch.cuda.stream(torch.cuda.default_stream()):
        more = torch.zeros(100 * 2**20, dtype=torch.uint8, device="cuda")
        del more
    model(torch.randn(4, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 0:
        reserved, allocated = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
        print("peak", reserved >> 20, "of", allocated >> 20)
        print("now", torch.cuda.memory_reserved() >> 20, "of", torch.cuda.memory_allocated() >> 20)
        torch.cuda.empty_cache()
        print("emptied", torch.cuda.memory_reserved() >> 20)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "emptied", "most"), [("", 122, 322), ("expandable_segments:True", 82, 282)]
)
def test_a_script_is_told_what_the_allocator_holds(
    setting: str, emptied: int, most: int, tmp_path: Path
) -> None:
    """Memory that two streams use in turn counts twice, and goes when the script empties the cache.

    Segments: 100 MiB on each stream, 20 for the 4 MiB of the weights, 2 for the bias. Those that grow:
    6 pages of 20 MiB for weights and 100 MiB, 5 on the other stream, 2 MiB for the bias. Two workspaces of
    cuBLAS have got into what the 100 MiB left, and stay: a whole segment, or three pages. So the next step
    takes 100 MiB more for what it makes itself, and the other stream its own again.
    """
    script = tmp_path / "streams.py"
    script.write_text(SCRIPT)
    found = rehearse(Asked(command=(str(script), setting), world_size=1, ranks=(0,)), tmp_path / "run")
    output = (tmp_path / "run" / "rehearsal" / "rank-00000" / "output.log").read_text().splitlines()
    assert output == ["peak 222 of 104", "now 222 of 4", f"emptied {emptied}"]
    memory = found.memory["0"]
    assert memory["peak_bytes"] < 130 * MIB
    assert memory["reserved_bytes"] == most * MIB
    assert memory["expandable_segments"] == bool(setting)


BUILDING = """
import torch

with torch.device("meta"):
    model = torch.nn.Linear(8192, 8192, bias=False)
print(torch.cuda.memory_allocated())
model.to_empty(device="cuda")
print(torch.cuda.memory_allocated() >> 20)
more = torch.empty({gib} * 2**30, dtype=torch.uint8, device="cuda")
del more
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.randn(4, 8192, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("gib", "is_too_much"), [(40, False), (100, True)])
def test_what_is_built_before_the_first_step_has_to_fit(
    gib: int,
    is_too_much: bool,
    tmp_path: Path,
) -> None:
    """Memory let go before the first step stays reserved, unless no GPU has it; the meta device has none."""
    script = tmp_path / "building.py"
    script.write_text(BUILDING.format(gib=gib))
    found = rehearse(Asked(command=(str(script),), world_size=1, ranks=(0,)), tmp_path / "run")
    output = (tmp_path / "run" / "rehearsal" / "rank-00000" / "output.log").read_text().split()
    assert output == ["0", "256"]
    memory = found.memory["0"]
    assert memory["building_bytes"] == 256 * MIB + gib * 2**30
    assert (memory["reserved_bytes"] > gib * 2**30) != is_too_much
    simulation = simulate_rehearsal(tmp_path / "run", lambda n: load_cluster("dgx-h100", n))
    assert any("before its first step" in note for note in simulation.run.warnings) == is_too_much


STEPS = st.lists(
    st.tuples(st.sampled_from(("state", "result", "passing")), SIZES, st.integers(0, 2)), max_size=30
)


@given(steps=STEPS, setting=st.sampled_from(("", "expandable_segments:True")))
def test_a_first_step_asked_for_again_holds_what_a_second_one_holds(steps: list[Any], setting: str) -> None:
    """What the first left goes, what stays is not made again: as if the script had done another step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SETTINGS[0], setting)
        repeated, done = Reserved(), Reserved()
        states = {at for at, (kind, _, _) in enumerate(steps) if kind == "state"}
        for reserved in (repeated, done):
            reserved.start(is_first=True)
            _step(reserved, steps, 0)
        repeated.repeat(states.__contains__)
        for at, (kind, _, _) in enumerate(steps):
            if kind == "result":
                done.place(at)
        _step(done, [one for one in steps if one[0] != "state"], len(steps))
    assert repeated.n_bytes == done.n_bytes
    assert repeated.most_bytes == done.most_bytes


def _step(reserved: Reserved, steps: list[Any], first: int) -> None:
    """Make what a step makes, numbered from *first*; what only passes goes as the next thing is there."""
    passing = -1
    for number, (kind, size, stream) in enumerate(steps, first):
        reserved.place(number, rounded(size), stream)
        if passing >= 0:
            reserved.place(passing)
        passing = number if kind == "passing" else -1
    if passing >= 0:
        reserved.place(passing)
