"""The last calls of a rank, on disk before each is made."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.tracer import pending
from foretrace.tracer.groups import GroupInfo
from foretrace.tracer.pending import SLOT_BYTES, SLOTS, Issued, is_local
from foretrace.tracer.records import Block, Communication
from foretrace.traces.pending import damaged_notes, read_issued, read_pending


def call(sequence: int, name: str = "layers.3.mlp", axis: str = "world") -> Communication:
    """Return an all-reduce."""
    group = GroupInfo(5, axis, (0, 1))
    return Communication(
        "all_reduce", group, sequence, -1, 4000, "fp32", Block(name, 3), (2, -1, -1, 1), sequence
    )


@given(n=st.integers(1, 3 * SLOTS))
@settings(max_examples=20, deadline=None)
def test_the_newest_calls_are_kept_in_order(tmp_path_factory: pytest.TempPathFactory, n: int) -> None:
    path = tmp_path_factory.mktemp("run")
    ring = Issued(path, 3, 1000)
    for sequence in range(n):
        ring.note(call(sequence))
    (rows,) = read_issued(path).values()  # while it is written, as after a kill
    assert [row["sequence"] for row in rows] == list(range(max(n - SLOTS, 0), n))
    assert all(row["issued_ns"] == row["sequence"] + 1000 for row in rows)
    (one,) = read_pending(path)
    assert (one.rank, dict(one.collectives)) == (3, {5: n})
    ring.close()
    ring.note(call(n))
    assert read_issued(path) == {}


@given(name=st.text(max_size=200), axis=st.text(max_size=200), size=st.integers(0, 2**62))
@settings(max_examples=25, deadline=None)
def test_a_line_holds_any_name(
    tmp_path_factory: pytest.TempPathFactory, name: str, axis: str, size: int
) -> None:
    path = tmp_path_factory.mktemp("run")
    ring = Issued(path, 0, 0)
    one = call(2**62, name, axis)
    one.size_bytes = size
    ring.note(one)
    assert ring.path.stat().st_size == SLOTS * SLOT_BYTES
    (row,) = read_issued(path)[0]
    assert (row["size_bytes"], row["sequence"]) == (size, 2**62)
    assert str(row["name"]) in name


@pytest.mark.parametrize(("said_ns", "place"), [(5000, "train.py:9 main"), (1999, "")])
def test_where_a_rank_was_before_its_last_call_explains_nothing(
    tmp_path: Path, said_ns: int, place: str
) -> None:
    ring = Issued(tmp_path, 0, 1000)
    ring.note(call(1000))  # issued at 2000
    document = {"rank": 0, "t_ns": said_ns, "pending": [], "stack": ["train.py:9 main"]}
    (tmp_path / "ranks" / "rank-00000.pending.json").write_text(json.dumps(document))
    (one,) = read_pending(tmp_path)
    assert one.place == place


def test_half_a_line_is_none(tmp_path: Path) -> None:
    ring = Issued(tmp_path, 0, 0)
    for sequence in range(3):
        ring.note(call(sequence))
    data = bytearray(ring.path.read_bytes())
    data[2 * SLOT_BYTES + 40 : 3 * SLOT_BYTES - 1] = bytes(SLOT_BYTES - 41)  # as if it were being written
    ring.path.write_bytes(data)
    assert [row["sequence"] for row in read_issued(tmp_path)[0]] == [0, 1]
    assert damaged_notes(tmp_path) == []


@pytest.mark.parametrize("flipped", [range(1, 2), range(3, 5)])
def test_damaged_lines_are_left_out_and_said(tmp_path: Path, flipped: range) -> None:
    ring = Issued(tmp_path, 0, 0)
    for sequence in range(8):
        ring.note(call(sequence))
    data = bytearray(ring.path.read_bytes())
    for line in flipped:
        data[line * SLOT_BYTES + 1] ^= 1  # the quote of its first key
    ring.path.write_bytes(data)
    assert {row["sequence"] for row in read_issued(tmp_path)[0]} == {*range(8)} - {*flipped}
    (note,) = damaged_notes(tmp_path)
    assert note.startswith(f"{ring.path}: {len(flipped)} line")


def test_where_another_machine_could_take_the_file_away_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = (Path("/dev/shm"), Path("/proc"), tmp_path / "absent")
    assert [is_local(one) for one in folders] == [True, False, False]
    monkeypatch.setattr(pending, "LOCAL", frozenset())
    ring = Issued(tmp_path, 0, 0)
    ring.note(call(0))
    assert not ring.path.exists()
    assert json.dumps(read_issued(tmp_path)) == "{}"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may change the root")
def test_in_a_chroot_the_last_calls_are_kept(tmp_path: Path) -> None:
    """No list of mounts has the root of a chroot: the file system itself is asked."""
    if not is_local(tmp_path):
        pytest.skip("the folder of the tests is on a shared file system")
    pid = os.fork()
    if not pid:
        os.chroot(tmp_path)
        Issued(Path("/run"), 0, 0).note(call(7))
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert [row["sequence"] for row in read_issued(tmp_path / "run")[0]] == [7]
