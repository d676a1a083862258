"""Scripts that cannot be rehearsed as they are: a line that says why, and a stub that mends it."""

import math
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.data.experts import EXCHANGE, Known
from foretrace.tracer.rehearse.data.stated import Stated
from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.traces.rehearsal import Rehearsal, read_rank, rehearsal_folder

torch = pytest.importorskip("torch")

SCRIPT = Path(__file__).parent / "awkward.py"
ROOT = Path(__file__).parents[2]

STUB = """
import sys
import torch

if sys.argv[1] == "custom":
    @torch.library.register_fake("awkward::kernel")
    def _(x):
        return torch.empty_like(x)
else:
    from torch import nn

    unique = torch.unique
    torch.unique = lambda x: torch.empty(x.shape[0] // 2, dtype=torch.int64)
"""


def _rehearsed(what: str, folder: Path, stub: str = "") -> Rehearsal:
    if stub:
        (folder / "stub.py").write_text(stub)
    asked = Asked(
        command=(str(SCRIPT), what), world_size=2, ranks=(0,), stub=str(folder / "stub.py") if stub else ""
    )
    return rehearse(asked, folder / "runs" / "run")


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (
            "custom",
            r"Custom at awkward.py:\d+: .* custom operator awkward::kernel is not described; in a stub",
        ),
        ("pick", r"Pick at awkward.py:\d+: aten._unique2.default needs values.* stub file"),
    ],
)
def test_what_cannot_be_rehearsed_is_named_and_a_stub_mends_it(what: str, said: str, tmp_path: Path) -> None:
    """One line names module, line, operator and remedy; nothing is written. With the stub it runs."""
    with pytest.raises(RehearsalError, match=said) as error:
        _rehearsed(what, tmp_path)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "runs").exists()
    found = _rehearsed(what, tmp_path, STUB)
    works = read_rank(rehearsal_folder(tmp_path / "runs" / "run"), found.ranks[0]).works.to_pylist()
    unknown = {work["name"] for work in works if not work["is_known"]}
    assert unknown == ({"awkward.kernel"} if what == "custom" else set())


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "import torch\ntorch.ones(4).nope()\n",
            "slip.py:2: AttributeError: 'Tensor' object has no attribute 'nope'; ",
        ),
        ("import torch\ndef f(:\n", "slip.py:2: SyntaxError: "),
        (
            "try: None.nope\nexcept AttributeError as error: raise RuntimeError('a stage') from error",
            "slip.py:2: RuntimeError: a stage .from AttributeError: 'NoneType' object has no attr",
        ),
        (
            "exec(compile('def f(): raise ValueError(1)', '/x/site-packages/its.py', 'exec'))\nf()",
            "slip.py:2, in its.py:1: ValueError: 1",
        ),
    ],
    ids=["attribute", "syntax", "cause", "library"],
)
def test_a_slip_is_told_as_python_tells_it(source: str, said: str, tmp_path: Path) -> None:
    script = tmp_path / "slip.py"
    script.write_text(source)
    with pytest.raises(RehearsalError, match=said) as error:
        rehearse(Asked(command=(str(script),), world_size=2, ranks=(0,)), tmp_path / "run")
    Path(str(error.value).rpartition(" is in ")[2]).unlink()


def test_a_parameter_of_a_class_of_its_own_is_named(tmp_path: Path) -> None:
    """It is a plain one in a rehearsal: the line says what it has not, and where to keep that."""
    script = tmp_path / "flat.py"
    script.write_text(
        "import torch\n"
        "class Flat(torch.nn.Parameter):\n"
        "    def views(self):\n"
        "        return self.split(2)\n"
        "Flat(torch.ones(4)).views()\n"
    )
    said = r"flat.py:5: .* has no attribute 'views': a parameter of a class of its own is .* stub"
    with pytest.raises(RehearsalError, match=said) as error:
        rehearse(Asked(command=(str(script),), world_size=2, ranks=(0,)), tmp_path / "run")
    Path(str(error.value).rpartition(" is in ")[2]).unlink()


def test_autocast_a_scaler_and_compilation_are_gone_through(tmp_path: Path) -> None:
    """Products in fp16, a softmax that reads fp16 and writes fp32; a scaler steps; no compilation is said."""
    found = _rehearsed("plain", tmp_path)
    tables = read_rank(rehearsal_folder(tmp_path / "runs" / "run"), 0)
    dtypes = {(work["name"], work["dtype"]) for work in tables.works.to_pylist()}
    assert ("aten.addmm", "fp16") in dtypes
    softmax = next(w for w in tables.works.to_pylist() if w["name"] == "aten._softmax")
    n_elements = math.prod(map(int, softmax["shapes"].partition(" -> ")[2].split("x")))
    assert softmax["bytes_moved"] == n_elements * (2 + 4)
    assert any(name == "aten._amp_foreach_non_finite_check_and_unscale_" for name, _ in dtypes)
    assert any(name.startswith("aten._fused_adamw") for name, _ in dtypes)
    assert any("torch.compile is not run" in note for note in found.notes)


def test_what_wants_a_gpu_or_other_processes_is_stood_in_for(tmp_path: Path) -> None:
    """A copied model, children, a hook of DDP, norms over all ranks, numpy, sizes that ranks exchange."""
    found = _rehearsed("strange", tmp_path)
    tables = read_rank(rehearsal_folder(tmp_path / "runs" / "run"), 0)
    messages = {(m["kind"], m["dtype"], m["size_bytes"]) for m in tables.messages.to_pylist()}
    assert ("all_reduce", "bf16", 2 * (3 * 4 + 4 + 2 * 4)) in messages  # convolution and norm, by the hook
    assert {("all_gather", "fp32", 2 * (2 * 4 + 1) * 4), ("all_reduce", "fp32", 2 * 4 * 4)} <= messages
    assert any("told 24 (as if other ranks had what this one has)" in told for told in found.stated)
    assert ("all_gather", "fp32", 2 * 24 * 4) in messages  # of that size


def test_a_process_that_is_killed_says_where_it_was(tmp_path: Path) -> None:
    """The signal by name, the line that was run, and a log that is still there."""
    with pytest.raises(
        RehearsalError, match=r"signal 11 \(SIGSEGV\): in File .*ctypes.*; its output is in"
    ) as error:
        _rehearsed("killed", tmp_path)
    log = Path(str(error.value).rpartition(" is in ")[2])
    assert "Segmentation fault" in log.read_text()
    log.unlink()


def test_ranks_end_with_the_process_that_asked_for_them(tmp_path: Path) -> None:
    """A command that is killed leaves no rank behind, however long its script would go on."""
    number = tmp_path / "pid"
    sleeper = tmp_path / "sleeper.py"
    sleeper.write_text(
        "import os, pathlib, time\n"
        f"pathlib.Path({str(tmp_path / 'part')!r}).write_text(str(os.getpid()))\n"
        f"os.replace({str(tmp_path / 'part')!r}, {str(number)!r})\n"
        "time.sleep(600)\n"
    )
    command = [
        sys.executable,
        "-c",
        "from foretrace.cli import main; main()",
        "rehearse",
        "--world-size",
        "2",
    ]
    asking = subprocess.Popen([*command, "-o", str(tmp_path / "runs" / "run"), "--", str(sleeper)], cwd=ROOT)
    while not number.exists():
        assert asking.poll() is None
        time.sleep(0.05)
    asking.kill()
    asking.wait()
    rank = Path("/proc", number.read_text())
    while rank.exists() and "State:\tZ" not in (rank / "status").read_text():  # else the test never ends
        time.sleep(0.05)


def test_counts_that_ranks_exchange_have_the_load_that_is_stated() -> None:
    """What a rank sends is even; what its experts are sent is so many times that, and so are sums of it."""
    stated = Stated(expert_load=1.5)
    chosen, counts, theirs = torch.zeros(1024), torch.zeros(16), torch.zeros(16)
    stated._set(chosen, Known(n_values=16))
    stated.note("aten.bincount", (chosen,), counts)
    assert stated.of(counts).mean == 64
    stated.note(EXCHANGE, (counts,), theirs)
    assert stated.of(theirs).mean == 96
    per_rank = torch.zeros(8)
    stated.note("aten.sum", (theirs, [1]), per_rank)
    assert stated.of(per_rank).mean == 192
    even = Stated()
    even._set(chosen, Known(n_values=16))
    even.note("aten.bincount", (chosen,), counts)
    even.note(EXCHANGE, (counts,), theirs)
    assert even.of(theirs).mean == 64
