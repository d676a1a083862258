"""What a training, or a recording, leaves behind for the next of its process, and how much it keeps."""

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import foretrace
from foretrace.tracer.records import Block
from foretrace.traces.store import open_run

torch = pytest.importorskip("torch")


N_RECORDINGS = 5


def trained(model: Any, optimizer: Any, n: int) -> None:
    """Train *n* steps."""
    for _ in range(n):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


def test_recordings_leave_no_objects(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def objects(number: int) -> int:
        for part in range(N_RECORDINGS):
            with foretrace.record(tmp_path / f"{number}-{part}"):
                trained(model, optimizer, 2)
        gc.collect()
        return len(gc.get_objects())

    counts = [objects(number) for number in range(4)]  # what is made once is there by then
    assert counts[-1] - counts[-2] < N_RECORDINGS


SGD: Any = torch.optim.SGD


class Failing(SGD):  # type: ignore[misc]  # torch is untyped here
    """An optimizer whose steps fail, as those of one that finds no memory."""

    def step(self) -> None:
        """Fail."""
        raise MemoryError("no room for its state")


def test_a_step_that_has_failed_hides_none_of_another_optimizer(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    with foretrace.record(tmp_path / "run"):
        failing = Failing(model.parameters(), lr=0.1)
        with pytest.raises(MemoryError):
            trained(model, failing, 1)
        freed = weakref.ref(failing)
        del failing
        gc.collect()
        assert freed() is None
        trained(model, torch.optim.SGD(model.parameters(), lr=0.1), 3)
    rows = open_run(tmp_path / "run").spans().to_pylist()
    assert [row["step"] for row in rows if row["kind"] == "step"] == [0, 1, 2]
    assert {row["name"] for row in rows if row["kind"] == "optimizer"} >= {"SGD"}


def test_a_step_inside_of_another_is_part_of_it(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))

    class Outer(SGD):  # type: ignore[misc]  # torch is untyped here
        def step(self) -> None:
            inner.step()
            super().step()

    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with foretrace.record(tmp_path / "run"):
        trained(model, Outer(model.parameters(), lr=0.1), 3)
    rows = open_run(tmp_path / "run").spans().to_pylist()
    assert [row["step"] for row in rows if row["kind"] == "step"] == [0, 1, 2]
    assert {row["name"] for row in rows if row["kind"] == "optimizer"} == {"Outer"}


def steps_of(path: Path, training: Callable[[], None]) -> list[int]:
    """Record *training*; return how many forwards each of its steps has."""
    with foretrace.record(path):
        training()
    rows = open_run(path).spans().to_pylist()
    n_steps = sum(row["kind"] == "step" for row in rows)
    forwards = Counter(row["step"] for row in rows if row["kind"] == "forward")
    return [forwards[step] for step in range(n_steps)]


@pytest.mark.parametrize("fails", [False, True])
def test_steps_of_a_training_end_though_the_optimizer_of_one_before_is_kept(
    tmp_path: Path, *, fails: bool
) -> None:
    """As a training that has failed is, by the exception that a script keeps."""

    def trainings() -> None:
        kept = []
        for n in (3, 1, 2):
            model = torch.nn.Linear(4, 4)
            kept.append(SGD(model.parameters(), lr=0.1))
            trained(model, kept[-1], n)
            if fails:
                kept.append(Failing(model.parameters(), lr=0.1))
                with pytest.raises(MemoryError):
                    trained(model, kept[-1], 1)

    found = steps_of(tmp_path / "run", trainings)
    assert found == ([1, 1, 1, 2, 2, 1] if fails else [1] * 6)  # what failed belongs to the step after


def test_a_second_training_is_found_by_its_second_step_if_its_optimizer_was_there(tmp_path: Path) -> None:
    models = [torch.nn.Linear(4, 4) for _ in range(2)]
    optimizers = [SGD(model.parameters(), lr=0.1) for model in models]

    def trainings() -> None:
        for model, optimizer in zip(models, optimizers, strict=True):
            trained(model, optimizer, 4)

    assert steps_of(tmp_path / "run", trainings) == [1, 1, 1, 1, 2, 1, 1]


@pytest.mark.parametrize("n_critic", [1, 2, 5])
def test_a_generator_beside_its_critic_ends_no_step(tmp_path: Path, n_critic: int) -> None:
    critic, generator = (torch.nn.Linear(4, 4) for _ in range(2))
    optimizers = [SGD(model.parameters(), lr=0.1) for model in (critic, generator)]

    def rounds() -> None:
        for _ in range(4):
            trained(critic, optimizers[0], n_critic)
            trained(generator, optimizers[1], 1)

    n_steps = 4 * n_critic
    found = steps_of(tmp_path / "run", rounds)
    assert found == [2 if step and not step % n_critic else 1 for step in range(n_steps)]


def test_optimizers_of_tasks_end_no_step_of_the_one_around_them(tmp_path: Path) -> None:
    """As in meta-learning: a copy is trained for each task, by an optimizer of its own."""

    def rounds() -> None:
        model = torch.nn.Linear(4, 4)
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            copy = torch.nn.Linear(4, 4)
            trained(copy, SGD(copy.parameters(), lr=0.1), 2)
            trained(model, optimizer, 1)

    # until the first of them is gone, nobody knows that there is one around it
    assert steps_of(tmp_path / "run", rounds) == [1, 1, 1, 3, 3]


def test_what_memory_has_no_room_for_is_counted_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many records wait at most: here nothing is written before the end."""
    outer, inner, n_most, n_beyond = Block("outer"), Block("inner"), 5000, 1000
    monkeypatch.setattr("foretrace.tracer.sink.MOST_RECORDS", n_most)
    with foretrace.record(tmp_path / "run", flush_s=1e6) as recording:
        assert recording.session is not None
        lane = recording.session.lane
        lane.push("forward", outer)
        for _ in range((n_most + n_beyond) // 2):  # a piece of either block
            lane.pop(lane.push("forward", inner))
        lane.pop(0)
    run = open_run(tmp_path / "run")
    told = "records that came faster than they could be written"
    assert run.info.dropped == {told: n_beyond + 1}
    assert run.warnings == (f"rank 0: {n_beyond + 1:,} {told}: in no span",)
    assert len(run.spans()) <= n_most
