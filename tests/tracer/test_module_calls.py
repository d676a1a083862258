"""How calls of modules are seen: nothing of torch is replaced, and hooks that modules have are not theirs."""

import copy
import pickle
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import foretrace
from foretrace.tracer import internals
from foretrace.tracer.hooks import install
from foretrace.traces.store import open_run

torch = pytest.importorskip("torch")
nn = torch.nn
Linear: Any = nn.Linear


PAUSE_S = 0.05


def scaled(module: Any, args: Any, output: Any) -> Any:
    """A hook of a module, which takes a while and gives something else back."""
    time.sleep(PAUSE_S)
    return output * 2


def model() -> Any:
    """Return two layers, the first with a hook of its own, and weights that are always the same."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    layers[0].register_forward_hook(scaled)
    return layers


def trained(parts: Any) -> list[float]:
    """Train three steps and return the losses."""
    optimizer, losses = torch.optim.SGD(parts.parameters(), lr=0.1), []
    for step in range(3):
        loss = parts(torch.full((2, 4), step + 1.0)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def seconds(path: Path, kind: str, name: str) -> float:
    """Return how long a block worked, s."""
    rows = open_run(path).spans().to_pylist()
    found = [row["duration_ns"] for row in rows if (row["kind"], row["name"]) == (kind, name)]
    return float(sum(found) / 1e9)


def test_what_a_hook_of_a_module_does_belongs_to_the_block_around(tmp_path: Path) -> None:
    plain = trained(model())
    with foretrace.record(tmp_path / "run"):
        parts = model()
        assert trained(parts) == plain
        assert list(parts[0]._forward_hooks.values()) == [scaled]
    assert open_run(tmp_path / "run").warnings == ()
    assert seconds(tmp_path / "run", "forward", "Sequential") >= 3 * PAUSE_S
    assert seconds(tmp_path / "run", "forward", "0") < PAUSE_S
    assert seconds(tmp_path / "run", "backward", "0") > 0


def test_an_error_in_a_hook_of_a_module_passes(tmp_path: Path) -> None:
    def fail(*call: Any) -> None:
        raise KeyError("mine")

    with foretrace.record(tmp_path / "run"):
        parts = model()
        handle = parts[1].register_forward_hook(fail)
        with pytest.raises(KeyError, match="mine"):
            parts(torch.ones(2, 4))
        assert list(parts[1]._forward_hooks.values()) == [fail]
        handle.remove()
        assert trained(parts) == trained(model())
    rows = [row for row in open_run(tmp_path / "run").spans().to_pylist() if row["category"] == "compute"]
    ends = [row["start_ns"] + row["duration_ns"] for row in rows]
    assert all(row["start_ns"] >= end for row, end in zip(rows[1:], ends, strict=False))
    assert {row["name"] for row in rows} == {"Sequential", "0", "1", "loss", "SGD"}


def test_a_module_that_calls_itself_ends_as_often_as_it_begins(tmp_path: Path) -> None:
    class Deep(Linear):  # type: ignore[misc]  # torch is untyped here
        def forward(self, x: Any, depth: int = 3) -> Any:
            return super().forward(self(x, depth=depth - 1) if depth else x)

    parts = nn.Sequential(Deep(4, 4), nn.Linear(4, 4))
    parts[0].register_forward_hook(scaled)
    with foretrace.record(tmp_path / "run"):
        trained(parts)
        assert list(parts[0]._forward_hooks.values()) == [scaled]
    rows = [row for row in open_run(tmp_path / "run").spans().to_pylist() if row["kind"] == "forward"]
    assert [row["name"] for row in rows if row["name"] in "01"][-1] == "1"


@pytest.mark.parametrize("way", [copy.deepcopy, lambda parts: pickle.loads(pickle.dumps(parts))])
def test_a_recorded_model_can_be_copied(tmp_path: Path, way: Callable[[Any], Any]) -> None:
    with foretrace.record(tmp_path / "run"):
        parts = model()
        trained(parts)
        twin = way(parts)
        assert trained(twin) == trained(parts)
    assert open_run(tmp_path / "run").warnings == ()


@pytest.mark.filterwarnings("ignore")  # torch's own, which differ between versions
def test_a_strict_export_goes_as_without_recording_and_what_follows_is_seen(tmp_path: Path) -> None:
    parts, refused = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4)
    with foretrace.record(tmp_path / "run"):
        for strict in (True, False):
            exported = torch.export.export(parts, (torch.ones(2, 4),), strict=strict).module()
            assert torch.equal(exported(torch.ones(2, 4)), parts(torch.ones(2, 4)))
        with pytest.raises(Exception, match=r"."):
            torch.export.export(refused, (torch.ones(2, 5),), strict=True)
        trained(parts)
    assert open_run(tmp_path / "run").warnings == ()
    assert seconds(tmp_path / "run", "backward", "1") > 0
    assert not nn.modules.module._global_forward_hooks


def test_what_fx_traces_is_left_alone_and_what_follows_is_seen(tmp_path: Path) -> None:
    """The graph is the one without recording; a graph that is given its parameters describes no model."""
    torch.manual_seed(0)
    parts = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plain = torch.fx.symbolic_trace(parts).code
    bare = torch.fx.symbolic_trace(nn.ReLU())
    with foretrace.record(tmp_path / "run"):
        bare(torch.ones(2, 4))
        assert torch.fx.symbolic_trace(parts).code == plain
        trained(parts)
    run = open_run(tmp_path / "run")
    assert run.warnings == ()
    assert run.info.model is not None
    assert run.info.model["n_params"] == sum(one.numel() for one in parts.parameters())
    assert seconds(tmp_path / "run", "forward", "1") > 0


def test_hooks_are_not_compiled_beside_graphs_and_end_none(tmp_path: Path) -> None:
    ours, parts = internals.fx_tracing.__code__, nn.Linear(4, 4)
    whole = torch.compile(lambda batch: parts(batch) + 1, backend="eager", fullgraph=True)
    with foretrace.record(tmp_path / "run"):
        assert torch.equal(whole(torch.ones(2, 4)), parts(torch.ones(2, 4)) + 1)
        assert torch._dynamo.trace_rules.check(ours)
    assert not torch._dynamo.trace_rules.check(ours)


class Breaking(nn.Module):  # type: ignore[misc, name-defined]
    """Ends a graph."""

    def forward(self, batch: Any) -> Any:
        """Return the batch."""
        torch._dynamo.graph_break()
        return batch


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which the compiler asks for, recorded or not
def test_a_compiler_looks_at_as_many_frames_as_without_recording(tmp_path: Path) -> None:
    """Hooks run beside the parts of a graph that breaks, and call functions that a compiler would take."""

    def frames() -> int:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        parts = nn.Sequential(nn.Linear(4, 4), Breaking(), nn.Linear(4, 4))
        broken = torch.compile(lambda batch: parts(batch), backend="eager")  # noqa: PLW0108 - it is compiled
        optimizer = torch.optim.SGD(parts.parameters(), lr=0.1)
        for _ in range(2):
            broken(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        return sum(torch._dynamo.utils.counters["frames"].values())

    plain = frames()
    with foretrace.record(tmp_path / "run"):
        assert frames() == plain


HOOKED = "Using `torch.compile"


def test_torch_warns_of_global_hooks_of_others_alone(tmp_path: Path) -> None:
    hooks = nn.modules.module
    has_any = hooks._has_any_global_hook
    compiled = torch.compile(nn.Linear(4, 4), backend="eager")
    with foretrace.record(tmp_path / "run"):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", HOOKED)
            trained(compiled)
        handle = hooks.register_module_forward_hook(lambda *_: None)
        with pytest.warns(UserWarning, match=HOOKED):
            compiled(torch.ones(2, 4))
        handle.remove()
    assert hooks._has_any_global_hook is has_any
    assert not has_any()
    assert open_run(tmp_path / "run").warnings == ()


def test_what_is_no_module_is_refused_by_torch_and_harms_nothing(tmp_path: Path) -> None:
    with foretrace.record(tmp_path / "run"):
        with pytest.raises(AttributeError):
            nn.Module._call_impl(1, torch.ones(2, 4))
        trained(model())
    assert open_run(tmp_path / "run").warnings == ()
    assert seconds(tmp_path / "run", "forward", "1") > 0


def test_calls_are_seen_while_hooks_stand(tmp_path: Path) -> None:
    parts = model()
    with foretrace.record(tmp_path / "run") as recording:
        assert recording.session is not None
        for stands in (True, False, True):
            if not stands:
                recording.session.unhook()
            trained(parts)
            if not stands:
                install(recording.session)
    rows = open_run(tmp_path / "run").spans().to_pylist()
    assert [row["name"] for row in rows if row["kind"] == "forward" and row["name"] in "01"] == ["0", "1"] * 6
