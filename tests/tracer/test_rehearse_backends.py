"""What is sent is carried by the backend that its group has for its device, or the rehearsal says why not."""

from pathlib import Path

import pytest

from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.rehearsing import Asked, rehearse
from foretrace.tracer.rehearse.world.acting import Loaded
from foretrace.traces.rehearsal import Rehearsal

pytest.importorskip("torch")

SCRIPT, RANKS = Path(__file__).parent / "backends.py", 4
BOTH = "cpu:gloo,cuda:nccl"


def _rehearsed(backend: str, what: str, folder: Path, loaded: Loaded) -> Rehearsal:
    asked = Asked(command=(str(SCRIPT), backend, what), world_size=RANKS, ranks=(0,))
    return rehearse(asked, folder / "run", on=loaded)


@pytest.mark.parametrize(
    ("backend", "what", "call"),
    [
        ("nccl", "here", "all_reduce"),
        ("none", "here", "all_reduce"),
        ("nccl", "gathered", "all_gather"),
        ("nccl", "peer", "send"),
        ("nccl", "clipped", "all_reduce"),
        ("nccl", "copied", "DistributedDataParallel"),
        ("gloo", "nccl group", "all_reduce"),
        ("nccl", "unmet", "all_reduce"),
        ("gloo", "unmet nccl", "all_reduce"),
    ],
)
def test_nccl_has_nothing_for_the_host(
    backend: str, what: str, call: str, tmp_path: Path, loaded: Loaded
) -> None:
    """One line names place, call, group and remedy; nothing is written.

    So it is where the script's own call sends, and where torch sends what the script has left on the host: a
    norm of gradients that FSDP2 keeps there, a model that is copied without having been moved. Who names no
    backend gets that of the GPUs alone; who names NCCL has spoken of them.
    """
    with pytest.raises(RehearsalError) as error:
        _rehearsed(backend, what, tmp_path, loaded)
    said = str(error.value)
    making = "new_group(backend=" if "nccl" in what else "init_process_group("
    named = "nccl, as no backend is named," if backend == "none" else "nccl"
    assert f"{call} of a tensor on the host, in the group of all ranks, whose backend {named} is not" in said
    assert 'with "No backend type associated with device type cpu"' in said
    assert f'{making}"{BOTH}")' in said
    assert "backends.py:" in said
    assert "\n" not in said
    assert not (tmp_path / "run").exists()


def test_gloo_of_the_host_has_nothing_for_the_device(tmp_path: Path, loaded: Loaded) -> None:
    """The same the other way round."""
    with pytest.raises(RehearsalError, match=r'a tensor on the device, .* "No backend .* type cuda"; move'):
        _rehearsed("cpu:gloo", "there", tmp_path, loaded)


@pytest.mark.parametrize(
    ("backend", "what"),
    [
        *((BOTH, what) for what in ("here", "there", "gathered", "peer", "clipped")),
        *(("nccl", what) for what in ("there", "gloo group", "objects", "copied there", "sharded")),
        *((backend, what) for backend in ("gloo", "none") for what in ("objects", "copied there")),
        ("gloo", "monitored"),
        ("gloo", "unmet"),
    ],
)
def test_what_a_backend_carries_goes_through(backend: str, what: str, tmp_path: Path, loaded: Loaded) -> None:
    """Also what torch itself puts on the device first: objects, parameters, norms of FSDP1."""
    found = _rehearsed(backend, what, tmp_path, loaded)
    is_staged = backend == "gloo" and what not in {"objects", "monitored", "unmet"}
    assert any("over gloo" in note for note in found.notes) == is_staged


@pytest.mark.parametrize(("backend", "what"), [("gloo", "there"), ("nccl", "gloo group there")])
def test_gloo_takes_what_is_on_the_device_through_the_host(
    backend: str, what: str, tmp_path: Path, loaded: Loaded
) -> None:
    """A group of gloo alone may be asked for it; what that would take is said not to be in the time."""
    notes = _rehearsed(backend, what, tmp_path, loaded).notes
    assert sum("tensors on the device are sent over gloo, as by all_reduce" in note for note in notes) == 1


def test_a_barrier_of_gloo_alone_is_refused_as_torch_does(tmp_path: Path, loaded: Loaded) -> None:
    """In torch's own words, for a script may catch them."""
    with pytest.raises(RehearsalError, match="monitored_barrier is only implemented for GLOO"):
        _rehearsed("nccl", "monitored", tmp_path, loaded)
