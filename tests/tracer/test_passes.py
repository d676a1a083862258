"""What describes a training is the model that it trains, on what it trains on, whatever else it calls."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import foretrace
from foretrace.traces.store import open_run

torch = pytest.importorskip("torch")
nn = torch.nn
Module: Any = nn.Module
checkpoint = pytest.importorskip("torch.utils.checkpoint").checkpoint


def net(width: int = 4) -> Any:
    """Return a model of tokens with 8 rows of *width* in its table, and two more layers."""
    return nn.Sequential(nn.Embedding(8, width), nn.Linear(width, width), nn.Linear(width, 1))


def tokens(*shape: int) -> Any:
    """Return a batch."""
    return torch.zeros(shape, dtype=torch.long)


def described(path: Path, training: Callable[[Any, Any], None]) -> tuple[int, dict[str, Any]]:
    """Record *training*, which gets a model and an optimizer; return the described parameters and the job."""
    with foretrace.record(path):
        model = net()
        training(model, torch.optim.SGD(model.parameters(), lr=0.1))
    info = open_run(path).info
    assert info.model is not None
    return int(info.model["n_params"]), dict(info.job or {})


OWN = 8 * 4 + 4 * 4 + 4 + 4 + 1
"""Parameters of the model."""


def step(model: Any, optimizer: Any, *batches: Any) -> None:
    """Train on *batches* in one step."""
    for batch in batches:
        model(batch).sum().backward()
    optimizer.step()


def test_a_teacher_that_is_called_first_is_not_what_trains(tmp_path: Path) -> None:
    def distil(model: Any, optimizer: Any) -> None:
        teacher = net(16)
        for _ in range(3):
            with torch.no_grad():
                teacher(tokens(3, 7))
            step(model, optimizer, tokens(2, 5))

    assert described(tmp_path / "run", distil) == (
        OWN,
        {"input_shape": [2, 5], "input_is_embedded": False, "forwards_per_step": 1},
    )


def test_an_evaluation_counts_neither_its_batches_nor_its_passes(tmp_path: Path) -> None:
    def with_evaluation(model: Any, optimizer: Any) -> None:
        for _ in range(4):
            with torch.no_grad():
                for _ in range(5):
                    model(tokens(16, 3))
            step(model, optimizer, tokens(2, 5), tokens(2, 5))

    _, job = described(tmp_path / "run", with_evaluation)
    assert (job["input_shape"], job["forwards_per_step"]) == ([2, 5], 2)
    assert "input_shapes" not in job


def test_a_recomputed_pass_is_not_another(tmp_path: Path) -> None:
    def recomputing(model: Any, optimizer: Any) -> None:
        for _ in range(3):
            checkpoint(model, tokens(2, 5), use_reentrant=False).sum().backward()
            optimizer.step()

    assert described(tmp_path / "run", recomputing)[1]["forwards_per_step"] == 1


def test_of_models_that_train_side_by_side_the_largest_is_described(tmp_path: Path) -> None:
    critic = net(2)

    def with_critic(model: Any, optimizer: Any) -> None:
        for _ in range(2):
            critic(tokens(1, 9)).sum().backward()
            step(model, optimizer, tokens(2, 5))
            step(model[1], optimizer, torch.zeros(4))  # a part of it is no other model

    n_params, job = described(tmp_path / "run", with_critic)
    assert (n_params, job["input_shape"]) == (OWN, [2, 5])
    assert job["beside_params"] == sum(one.numel() for one in critic.parameters())


def test_of_batches_that_differ_the_usual_one_is_told(tmp_path: Path) -> None:
    def varying(model: Any, optimizer: Any) -> None:
        for n in (1, 4, 4, 2):
            step(model, optimizer, tokens(n, 5))

    _, job = described(tmp_path / "run", varying)
    assert (job["input_shape"], job["input_shapes"]) == ([4, 5], 3)


def test_what_other_threads_do_is_beside_the_training(tmp_path: Path) -> None:
    """As that of a checkpoint: it waits for its own collectives, while the training computes."""

    class Slow(Module):  # type: ignore[misc]  # torch is untyped here
        """A model that computes for 30 ms while another thread waits, and calls a model of its own."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Any) -> Any:
            assert recording.session is not None
            pause, resume = recording.session.pausing()

            def beside() -> None:
                is_paused = pause()
                nn.Linear(4, 4)(torch.ones(4))
                waits.set()
                ends.wait()
                resume(is_paused)

            waits, ends = threading.Event(), threading.Event()
            thread = threading.Thread(target=beside)
            thread.start()
            waits.wait()
            time.sleep(0.03)
            ends.set()
            thread.join()
            return self.weight * x

    with foretrace.record(tmp_path / "run") as recording:
        model = Slow()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            step(model, optimizer, torch.ones(4))
    rows = [row for row in open_run(tmp_path / "run").spans([0]).to_pylist() if row["step"] > 0]
    computed_ns = [row["duration_ns"] for row in rows if row["kind"] == "forward" and row["name"] == "Slow"]
    assert len(computed_ns) == 2
    assert min(computed_ns) >= 30_000_000
    assert "Linear" not in {row["name"] for row in rows}


def test_rows_of_features_are_no_tokens(tmp_path: Path) -> None:
    with foretrace.record(tmp_path / "run"):
        nn.Linear(8, 1)(torch.zeros(4, 8)).sum().backward()
    job = open_run(tmp_path / "run").info.job
    assert job == {"input_shape": [4, 8], "input_is_embedded": True}


def test_an_optimizer_that_calls_the_model_itself_ends_a_step_each_time(tmp_path: Path) -> None:
    def with_closures(model: Any, _: Any) -> None:
        torch.manual_seed(0)  # other batches and weights may need one call only
        for weight in model.parameters():
            torch.nn.init.normal_(weight)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
        for _ in range(3):

            def closure() -> Any:
                optimizer.zero_grad()
                loss = model(tokens(2, 5)).square().sum()
                loss.backward()
                n_calls.append(1)
                return loss

            optimizer.step(closure)

    n_calls: list[int] = []
    _, job = described(tmp_path / "run", with_closures)
    rows = open_run(tmp_path / "run").spans([0]).to_pylist()
    assert [row["step"] for row in rows if row["category"] == "step"] == [0, 1, 2]
    assert 3 * job["forwards_per_step"] == len(n_calls)
    models = [row["step"] for row in rows if row["kind"] == "forward"]
    assert sorted(set(models)) == [0, 1, 2]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_calls_that_trace_or_export_a_model_are_no_input_of_it(tmp_path: Path) -> None:
    """Their sizes are tensors and symbols, which no description holds; torch then checks with real calls."""

    def traced(model: Any, optimizer: Any) -> None:
        torch.jit.trace(model, tokens(3, 7))
        torch.export.export(model, (tokens(3, 7),), dynamic_shapes=({0: torch.export.Dim("rows")},))
        for _ in range(9):
            step(model, optimizer, tokens(2, 5))

    n_params, job = described(tmp_path / "run", traced)
    assert n_params == OWN
    assert job["input_shape"] == [2, 5]


def test_an_optimizer_that_goes_on_with_other_parameters_is_in_the_same_step(tmp_path: Path) -> None:
    """As the third stage of ZeRO steps parts of its parameters, one after the other."""
    parts = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
    optimizer = torch.optim.SGD(parts[0].parameters(), lr=0.1)
    with foretrace.record(tmp_path / "run"):
        for _ in range(4):
            parts[1](parts[0](torch.ones(2, 4))).sum().backward()
            for part in parts:
                optimizer.param_groups[0]["params"] = list(part.parameters())
                optimizer.step()
    rows = open_run(tmp_path / "run").spans().to_pylist()
    assert [row["step"] for row in rows if row["category"] == "step"] == [0, 1, 2, 3]
    assert Counter(row["step"] for row in rows if row["kind"] == "optimizer") == dict.fromkeys(range(4), 2)


def test_an_optimizer_whose_model_is_not_seen_ends_a_step_each_time(tmp_path: Path) -> None:
    """As where a CUDA graph is replayed: the same parameters again are the next step."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with foretrace.record(tmp_path / "run"):
        model(torch.ones(2, 4)).sum().backward()
        for _ in range(4):
            optimizer.step()
    rows = open_run(tmp_path / "run").spans().to_pylist()
    assert [row["step"] for row in rows if row["category"] == "step"] == [0, 1, 2, 3]


class Objective(Module):  # type: ignore[misc]  # torch is untyped here
    """A loss without parameters that is given a model, and calls it by position or by name."""

    def forward(self, model: Any, batch: Any, *, by_name: bool) -> Any:
        """Return the sum of what *model* makes of *batch*."""
        return (model(input=batch) if by_name else model(batch)).sum()


@pytest.mark.parametrize("by_name", [False, True])
def test_a_model_that_a_loss_calls_is_described_as_one_that_is_called_alone(
    tmp_path: Path, by_name: bool
) -> None:
    """Where the model is given to a module, as those of diffusion and fairseq's criteria are."""

    def by_objective(model: Any, optimizer: Any) -> None:
        objective = Objective()
        for _ in range(3):
            objective(model, tokens(2, 5), by_name=by_name).backward()
            optimizer.step()

    def alone(model: Any, optimizer: Any) -> None:
        for _ in range(3):
            step(model, optimizer, tokens(2, 5))

    found = described(tmp_path / "within", by_objective)
    assert found == described(tmp_path / "alone", alone)
    assert found[1]["input_shape"] == [2, 5]


def test_an_input_of_channels_is_not_one_of_embedded_tokens(tmp_path: Path) -> None:
    """Of 3 rows with 8 channels of 16 frames, as spectrograms and clouds of points have, tokens are none."""
    for name, model, is_embedded in (
        ("channels", nn.Conv1d(8, 4, 3), False),
        ("transposed", nn.Sequential(nn.ConvTranspose1d(8, 4, 3), nn.Linear(18, 1)), False),
        ("tokens", nn.Sequential(nn.Linear(16, 16), nn.Conv1d(8, 4, 3)), True),
    ):
        with foretrace.record(tmp_path / name):
            model(torch.zeros(3, 8, 16)).sum().backward()
        job = open_run(tmp_path / name).info.job or {}
        assert (job["input_shape"], job["input_is_embedded"]) == ([3, 8, 16], is_embedded)
