"""One process: which block owns which time, forward, backward and recomputed; nothing else changes."""

import sys
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest

import foretrace
from foretrace.tracer.shape import find_blocks
from foretrace.traces.store import open_run

torch = pytest.importorskip("torch")
nn = torch.nn
Module: Any = nn.Module


class Block(Module):  # type: ignore[misc]  # torch is untyped here
    """A layer with a part, and an operation in place on what it was given back."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True), nn.Linear(width, width))

    def forward(self, x: Any) -> Any:
        y = self.mlp(self.norm(x))
        y += x
        return y


class Net(Module):  # type: ignore[misc]  # torch is untyped here
    """Embedding, layers, head; optionally with activation checkpointing."""

    def __init__(self, width: int = 128, n_layers: int = 3, *, checkpoint: str = "") -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self.embed = nn.Embedding(32, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(n_layers))
        self.head = nn.Linear(width, 32)

    def forward(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for layer in self.layers:
            if self.checkpoint:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=self.checkpoint == "reentrant")
            else:
                x = layer(x)
        return self.head(x)


class Inside(Module):  # type: ignore[misc]  # torch is untyped here
    """A layer that computes its inside again, without a module that is called for it."""

    def __init__(self, width: int, checkpoint: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(width))
        self.checkpoint = checkpoint

    def forward(self, x: Any) -> Any:
        reenters = self.checkpoint == "reentrant"
        return torch.utils.checkpoint.checkpoint(self._inside, x, use_reentrant=reenters)

    def _inside(self, x: Any) -> Any:
        for _ in range(4):
            x = (x @ self.weight).tanh()
        return x


def train(model: Any, steps: int = 2) -> list[float]:
    """Train and return the losses."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(0, 32, (8, 64))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def net(**options: Any) -> Any:
    """Return a model with weights that are always the same."""
    torch.manual_seed(0)
    return Net(**options)


def work(path: Path, kind: str, step: int = 1) -> list[str]:
    """Return the names of the blocks that worked, in order, each run of one name once."""
    spans = [row for row in open_run(path).spans().to_pylist() if row["category"] == "compute"]
    names = [
        row["name"]
        for row in sorted(spans, key=lambda row: row["start_ns"])
        if row["kind"] == kind and row["step"] == step
    ]
    return [name for i, name in enumerate(names) if not i or names[i - 1] != name]


PARTS = [f"layers.{i}.mlp" for i in range(3)]


@pytest.mark.parametrize("checkpoint", ["", "non-reentrant", "reentrant"])
def test_blocks_own_forward_backward_and_recomputation(tmp_path: Path, checkpoint: str) -> None:
    plain = train(net(checkpoint=checkpoint))
    with foretrace.record(tmp_path / "run"):
        assert train(net(checkpoint=checkpoint)) == plain
    run = open_run(tmp_path / "run")
    assert run.warnings == ()
    assert run.info.layout is not None
    assert run.info.layout.world_size == 1
    for kind, order in (("forward", PARTS), ("backward", PARTS[::-1])):
        assert [name for name in work(tmp_path / "run", kind) if name in PARTS] == order
        assert {"embed", "head"} <= set(work(tmp_path / "run", kind))
    recomputed = [name for name in work(tmp_path / "run", "recompute") if name in PARTS]
    assert recomputed == (PARTS[::-1] if checkpoint else [])
    assert work(tmp_path / "run", "optimizer") == ["AdamW"]


@pytest.mark.parametrize("checkpoint", ["non-reentrant", "reentrant"])
def test_what_a_layer_computes_again_inside_of_itself_is_recomputation(
    tmp_path: Path, checkpoint: str
) -> None:
    def inside() -> Any:
        model = net()
        model.layers = nn.ModuleList(Inside(128, checkpoint) for _ in range(3))
        return model

    plain, names = train(inside()), [f"layers.{i}" for i in range(3)]
    with foretrace.record(tmp_path / "run"):
        assert train(inside()) == plain
    assert open_run(tmp_path / "run").warnings == ()
    assert work(tmp_path / "run", "recompute") == names[::-1]
    assert [name for name in work(tmp_path / "run", "forward") if name in names] == names
    assert [name for name in work(tmp_path / "run", "backward") if name in names] == names[::-1]


def test_the_loss_owns_the_backward_before_the_model(tmp_path: Path) -> None:
    with foretrace.record(tmp_path / "run"):
        train(net())
    assert work(tmp_path / "run", "backward")[:2] == ["loss", "head"]


def test_gradients_are_the_same_to_the_last_bit(tmp_path: Path) -> None:
    models = [net(), net()]
    train(models[0])
    with foretrace.record(tmp_path / "run"):
        train(models[1])
    for plain, recorded in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(plain, recorded)
        assert torch.equal(plain.grad, recorded.grad)


def test_everything_is_as_it_was_afterwards(tmp_path: Path) -> None:
    def state() -> list[Any]:
        module, optimizer = nn.modules.module, sys.modules["torch.optim.optimizer"]
        hooks = (
            module._global_forward_hooks,
            module._global_forward_pre_hooks,
            optimizer._global_optimizer_pre_hooks,
            optimizer._global_optimizer_post_hooks,
        )
        kept = (
            torch.utils.checkpoint._CheckpointFrame.__init__,
            torch.utils.checkpoint.CheckpointFunction.forward,
        )
        return [*(dict(found) for found in hooks), torch.autograd.Variable._execution_engine, *kept]

    before = state()
    with foretrace.record(tmp_path / "run"):
        assert state() != before
    assert state() == before


def test_an_error_in_the_training_passes_and_the_hooks_go_on(tmp_path: Path) -> None:
    model = net()
    broken = torch.full((8, 64), 99)  # no such token
    with foretrace.record(tmp_path / "run"):
        train(model, 1)
        with pytest.raises(IndexError):
            model(broken)
        train(model, 1)
    assert work(tmp_path / "run", "forward")[0] in {"Net", "embed"}
    assert (
        len([row for row in open_run(tmp_path / "run").spans().to_pylist() if row["category"] == "step"]) == 2
    )


def test_an_error_in_a_hook_is_a_warning_and_the_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(root: Any) -> Any:
        raise ValueError("no blocks today")

    monkeypatch.setattr("foretrace.tracer.modules.find_blocks", broken)
    plain = train(net())
    with foretrace.record(tmp_path / "run") as recording:
        assert train(net()) == plain
        assert recording.session is not None
        said = recording.session.info(finished=False).warnings
    assert said == ("recording of modules stopped: ValueError: no blocks today",)


def test_an_exception_ends_the_recording_and_is_told(tmp_path: Path) -> None:
    def fail() -> None:
        with foretrace.record(tmp_path / "run"):
            train(net())
            raise KeyError("gone")

    with pytest.raises(KeyError):
        fail()
    assert open_run(tmp_path / "run").warnings == ("rank 0: the training ended with KeyError: 'gone'",)


def test_a_recording_inside_of_a_recording_is_the_same(tmp_path: Path) -> None:
    with foretrace.record(tmp_path / "a") as outer, foretrace.record(tmp_path / "b") as inner:
        assert inner is outer
        train(net(), 1)
    assert not (tmp_path / "b").exists()


class Yields(Module):  # type: ignore[misc]  # torch is untyped here
    """A layer that returns what can be asked only once, is without end, or is long."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        y = self.inner(x)
        return {
            "once": (y * i for i in range(3)),
            "endless": repeat(y),
            "long": Counting([None] * 10_000 + [y]),
        }[self.kind]


class Counting(list[Any]):
    """A list that knows how much of it was asked for."""

    asked = 0

    def __iter__(self) -> Iterator[Any]:
        for value in super().__iter__():
            self.asked += 1
            yield value


@pytest.mark.parametrize("kind", ["once", "endless", "long"])
def test_what_a_module_returns_is_not_used_up(tmp_path: Path, kind: str) -> None:
    x = torch.ones(2, 4)
    with foretrace.record(tmp_path / "run"):
        found = Yields(kind)(x)
    if kind == "once":
        assert len(list(found)) == 3
    elif kind == "endless":
        assert next(found).shape == (2, 4)
    else:
        assert not found.asked
    assert open_run(tmp_path / "run").warnings == ()


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (lambda: nn.Linear(2, 2), {"Linear"}),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU()), {"Sequential", "0", "1"}),
        (
            lambda: Net(8, 1),
            {"Net", "embed", "layers", "layers.0", "layers.0.mlp", "head"},
        ),
        (lambda: nn.DataParallel(Net(8, 1)), {"Net", "embed", "layers", "layers.0", "layers.0.mlp", "head"}),
        (
            lambda: nn.Transformer(8, 2, 2, 1, 8, batch_first=True),
            {
                *("Transformer", "encoder", "encoder.layers", "encoder.norm"),
                *("encoder.layers.0", "encoder.layers.0.self_attn", "encoder.layers.1"),
                *("encoder.layers.1.self_attn", "decoder", "decoder.layers", "decoder.norm"),
                *("decoder.layers.0", "decoder.layers.0.self_attn", "decoder.layers.0.multihead_attn"),
            },
        ),
    ],
)
def test_blocks_are_what_a_person_would_name(model: Callable[[], Any], names: set[str]) -> None:
    blocks = find_blocks(model())
    assert {block.name for block in blocks.values()} == names
    for block in blocks.values():
        numbers = [int(part) for part in block.name.split(".") if part.isdigit()]
        assert block.layer == (numbers[0] if numbers else -1)


def test_a_backward_that_asks_the_engine_itself_is_seen(tmp_path: Path) -> None:
    """As that of Megatron-core does, whose outputs were freed; whoever asks then asks as torch does."""
    variable: Any = torch.autograd.Variable
    engine = variable._execution_engine
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with foretrace.record(tmp_path / "run"):
        for _ in range(2):
            variable._execution_engine.run_backward(
                tensors=(model(torch.ones(2, 4)),), grad_tensors=(torch.ones(2, 4),), keep_graph=False,
                create_graph=False, inputs=(), allow_unreachable=True, accumulate_grad=True,
            )  # fmt: skip
            assert all(parameter.grad is not None for parameter in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
    assert variable._execution_engine is engine
    rows = open_run(tmp_path / "run").spans().to_pylist()
    assert {row["name"] for row in rows if row["kind"] == "backward"} >= {"0", "1"}
