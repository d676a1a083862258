"""Other ways to start: several machines with a directory each, no process group, a recorder per rank."""

import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from foretrace.tracer.cli import _told
from foretrace.tracer.errors import RecordError
from foretrace.tracer.finish import _join_memory, merge
from foretrace.tracer.memory import write_samples
from foretrace.traces.errors import RunError
from foretrace.traces.reader import open_whole
from foretrace.traces.sealed import read_file
from foretrace.traces.store import SpanWriter, open_run
from foretrace.traces.timeline import MEMORY


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory, ranks: Any, config: Path) -> Path:
    """One training on two machines of one rank each, which are this one; each is recorded by itself."""
    folder = tmp_path_factory.mktemp("nodes")
    script = str(ranks.root / "examples" / "train_ddp.py")
    commands = []
    for node in (0, 1):
        command = [sys.executable, "-m", "foretrace", "record", "-o", str(folder / f"node{node}"), "--"]
        command += [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node)]
        command += ["--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", "{port}", script]
        command += ["--config", str(config), "--steps", "3", "--seq-len", "16"]
        commands.append(command)
    done = ranks.launch(*commands, fresh=folder)
    assert [one.returncode for one in done] == [0, 0], done
    return folder


def test_what_two_machines_recorded_becomes_one_run(nodes: Path, tmp_path: Path, ranks: Any) -> None:
    parts = [nodes / "node0", nodes / "node1"]
    assert [open_run(part).stored_ranks for part in parts] == [(0,), (1,)]
    for part in parts:
        (note,) = (said for said in open_run(part).warnings if "a part of the run" in said)
        assert not any("has not finished" in said for said in open_run(part).warnings)
        assert "on other machines, foretrace record --merge joins them" in note
    output = tmp_path / "all"
    command = [sys.executable, "-m", "foretrace", "record", "--merge", "-o", str(output), *map(str, parts)]
    (result,) = ranks.launch(command)
    assert result.returncode == 0, result.stderr
    run = open_whole(str(output), partial=False)
    assert run.stored_ranks == (0, 1)
    assert run.info.finished
    assert run.info.name == "all"
    assert run.warnings == ()
    assert {row["rank"] for row in run.memory().to_pylist()} == {0, 1}
    numbers = [
        sorted(row["sequence"] for row in run.spans([rank]).to_pylist() if row["category"] == "collective")
        for rank in (0, 1)
    ]
    assert numbers[0] == numbers[1]
    (output / "spans" / "rank-00001.arrow").unlink()
    with SpanWriter(output, 1) as writer:
        writer.append_table(run.spans([1]))
    with pytest.raises(RunError, match=r"rank-00001\.arrow is of another run"):
        open_run(output)
    for name in ("memory.arrow", "spans/rank-00001.arrow", "ranks/rank-00001.json"):
        (output / name).unlink()
    lost = "files of the run are missing, and what they say is not shown: memory.arrow, ranks/rank-00001.json"
    assert lost in open_run(output).warnings


def test_memory_of_ranks_that_end_later_is_joined_to_what_is_there(tmp_path: Path) -> None:
    """As of nodes that share a folder, each with a launcher that joins what it finds."""
    (tmp_path / "ranks").mkdir()
    target = tmp_path / "memory.arrow"
    for rank in (0, 1):
        row = {"rank": rank, "t_ns": 5, "category": "parameters", "bytes": 7 + rank}
        samples = pa.Table.from_pylist([row], MEMORY)
        write_samples(tmp_path / "ranks" / f"rank-{rank:05d}.memory.arrow", samples, "1")
        _join_memory(tmp_path, "1")
        assert not [*tmp_path.glob("ranks/*")]
        assert read_file(target)[0]["rank"].to_pylist() == [*range(rank + 1)]
    target.write_bytes(b"damaged")
    write_samples(tmp_path / "ranks" / "rank-00002.memory.arrow", samples, "1")
    _join_memory(tmp_path, "1")
    assert target.read_bytes() == b"damaged"
    assert (tmp_path / "ranks" / "rank-00002.memory.arrow").exists()


def test_parts_that_do_not_belong_together_are_refused(nodes: Path, tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="give each rank once"):
        merge([nodes / "node0", nodes / "node0"], tmp_path / "all")
    with pytest.raises(RecordError, match="two run directories"):
        merge([nodes / "node0"], tmp_path / "all")
    with pytest.raises(RecordError, match="holds something"):
        merge([nodes / "node0", nodes / "node1"], nodes / "node0")
    assert not (tmp_path / "all").exists()


ALONE = """
import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
"""


def test_a_training_without_a_process_group_is_recorded(tmp_path: Path, ranks: Any) -> None:
    script, path = tmp_path / "train.py", tmp_path / "run"
    script.write_text(ALONE)
    command = [
        sys.executable,
        "-m",
        "foretrace",
        "record",
        "-o",
        str(path),
        "--",
        sys.executable,
        str(script),
    ]
    (result,) = ranks.launch(command, fresh=path)
    assert result.returncode == 0, result.stderr
    run = open_run(path)
    assert run.info.world_size == 1
    spans = run.spans().to_pylist()
    # The first step of the optimizer tells that this is a training: what was before it is not seen.
    assert [row["step"] for row in spans if row["category"] == "step"] == [0, 1, 2]
    assert {row["kind"] for row in spans if row["category"] == "compute"} == {
        "forward",
        "backward",
        "optimizer",
    }


def test_a_recorder_per_rank_shares_the_directory(tmp_path: Path, ranks: Any, config: Path) -> None:
    """As ``srun foretrace record -- python train.py`` has it: the launcher starts the recorder."""
    path, script = tmp_path / "run", str(ranks.root / "examples" / "train_ddp.py")
    command = [sys.executable, "-m", "foretrace", "record", "-o", str(path), "--", sys.executable, script]
    command += ["--config", str(config), "--steps", "2", "--seq-len", "16"]
    result = ranks.run(command, ranks.env(), fresh=path)
    assert result.status == (0, 0), result.errors
    run = open_run(path)
    assert run.stored_ranks == (0, 1)
    assert run.info.finished
    assert run.warnings == ()


@pytest.mark.parametrize(("n_known", "is_said"), [(1, True), (2, False)])
def test_ranks_are_sought_on_other_machines_that_have_not_begun_here(
    n_known: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    is_said: bool,
) -> None:
    """A rank that has begun and stored nothing, as on a full disk, is on no other machine."""
    found = {"n_ranks_stored": 1, "world_size": 2, "n_spans": 3, "warnings": [], "ranks_here": 2}
    monkeypatch.setattr("foretrace.tracer.finish.finish", lambda path: {**found, "ranks_known": n_known})
    _told(tmp_path, 0, ranks="", as_json=False)
    assert ("on other machines" in capsys.readouterr().err) == is_said
