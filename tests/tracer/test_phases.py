"""What is training and what is not: steps, evaluations, saves and micro-batches, as a script has them.

Each script says what it does; the recording of it must say the same.
"""

import contextlib
import copy
import io
import json
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import foretrace
from foretrace.traces.analysis.metrics import breakdown, summarize
from foretrace.traces.store import open_run

torch = pytest.importorskip("torch")
checkpoint = pytest.importorskip("torch.utils.checkpoint").checkpoint
nn = torch.nn
Module: Any = nn.Module
SGD: Any = torch.optim.SGD

STEP, EVALUATION, CHECKPOINT = "step", "evaluation", "checkpoint"


class Script:
    """A script that notes what it does."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 4))
        self.optimizer: Any = SGD(self.model.parameters(), lr=0.1)
        self.loss: Any = nn.MSELoss()
        self.done: list[str] = []

    def train(self, n: int = 1, passes: int = 1, call: Callable[[Any], Any] | None = None) -> None:
        """Train *n* steps of so many *passes*."""
        for _ in range(n):
            for _ in range(passes):
                out = (call or self.model)(torch.ones(2, 4, requires_grad=True))
                self.loss(out, torch.zeros(2, 4)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.done.append(STEP)

    def evaluate(self, model: Any = None, *, mode: bool = True, grad: bool = False, n: int = 3) -> None:
        """Evaluate on *n* batches, in ``eval()`` if *mode*, with gradients if *grad*."""
        model = model or self.model
        model.train(not mode)
        with contextlib.nullcontext() if grad else torch.no_grad():
            for _ in range(n):
                self.loss(model(torch.ones(8, 4)), torch.zeros(8, 4))
        model.train()
        self.done.append(EVALUATION)

    def save(self) -> None:
        """Save a checkpoint."""
        torch.save(self.model.state_dict(), io.BytesIO())
        self.done.append(CHECKPOINT)


Found = tuple[list[str], list[str], list[dict[str, Any]]]


def recorded(path: Path, training: Callable[[Script], None]) -> Found:
    """Record *training*; return what it did, what the recording says that it did, and the spans by start."""
    script = Script()
    with foretrace.record(path):
        training(script)
    run = open_run(path)
    assert run.warnings == ()
    rows = sorted(run.spans().to_pylist(), key=lambda row: row["start_ns"])
    marks = [row for row in rows if row["category"] in ("step", "phase")]
    check(rows, marks)
    return script.done, [row["kind"] for row in marks], rows


def check(rows: list[dict[str, Any]], marks: list[dict[str, Any]]) -> None:
    """Check that windows and phases follow each other without a gap, and hold what is of them."""
    tiles = [row for row in marks if row["category"] == "step" or row["step"] < 0]
    first = next((i for i, row in enumerate(tiles) if row["category"] == "step"), 0)
    for one, other in pairwise(tiles[first:]):
        assert one["start_ns"] + one["duration_ns"] == other["start_ns"]
    steps = [row for row in marks if row["category"] == "step"]
    assert [row["step"] for row in steps] == list(range(len(steps)))
    for row in rows:
        if row["category"] == "compute" and row["step"] > 0:
            window = steps[row["step"]] if row["step"] < len(steps) else marks[-1]
            assert window["start_ns"] <= row["start_ns"]


def periodically(evaluate: Callable[[Script], None]) -> Callable[[Script], None]:
    """Return a training that evaluates after every second step."""

    def training(script: Script) -> None:
        for _ in range(3):
            script.train(2)
            evaluate(script)
        script.train(2)

    return training


def with_another(script: Script) -> None:
    """Evaluate with another model, as one of averaged weights."""
    script.evaluate(copy.deepcopy(script.model))


def inferring(script: Script) -> None:
    """Evaluate in inference mode."""
    script.model.eval()
    with torch.inference_mode():
        script.model(torch.ones(3, 4))
    script.model.train()
    script.done.append(EVALUATION)


@pytest.mark.parametrize(
    "evaluate",
    [
        Script.evaluate,
        lambda script: script.evaluate(mode=False),
        lambda script: script.evaluate(grad=True),
        inferring,
        with_another,
        lambda script: script.evaluate(script.model[2]),
        lambda script: script.evaluate(nn.Sequential(script.model)),
    ],
    ids=["both", "no_grad", "eval", "inference", "another", "part", "wrapper"],
)
def test_an_evaluation_between_steps_is_in_none(tmp_path: Path, evaluate: Callable[[Script], None]) -> None:
    done, found, rows = recorded(tmp_path / "run", periodically(evaluate))
    assert found == done
    ours = [row for row in rows if row["category"] == "phase"]
    outside = [row for row in rows if row["category"] == "compute" and row["step"] < 0]
    assert {row["kind"] for row in outside} == {"forward"}
    for row in outside:
        assert any(0 <= row["start_ns"] - one["start_ns"] < one["duration_ns"] for one in ours)


def test_a_model_of_one_layer_is_evaluated_without_its_wrapper(tmp_path: Path) -> None:
    """As a script calls ``model.module``, which has no parts of its own that would be blocks."""

    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def training(script: Script) -> None:
        script.model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
        script.optimizer = SGD(script.model.parameters(), lr=0.1)
        for _ in range(2):
            script.train(2)
            script.evaluate(script.model.module)
        script.train()

    try:
        done, found, _ = recorded(tmp_path / "run", training)
    finally:
        dist.destroy_process_group()
    assert found == done


def test_shares_add_up_and_what_is_left_out_is_said(tmp_path: Path) -> None:
    def training(script: Script) -> None:
        periodically(Script.evaluate)(script)
        script.save()

    recorded(tmp_path / "run", training)
    run = open_run(tmp_path / "run")
    said = summarize(run)
    assert [(one["kind"], one["count"], one["count_inside"]) for one in said["left_out"]] == [
        (EVALUATION, 3, 0),
        (CHECKPOINT, 1, 0),
    ]
    for row in breakdown(run):
        assert sum(row.ns.values()) == row.window_ns
    spans = run.spans().to_pylist()
    marks = [row for row in spans if row["category"] in ("step", "phase")]
    begin = min(row["start_ns"] for row in marks)
    end = max(row["start_ns"] + row["duration_ns"] for row in marks)
    steps_s = sum(one["step_time_s"] for one in said["steps"])
    assert steps_s + sum(one["total_s"] for one in said["left_out"]) == pytest.approx((end - begin) / 1e9)


def test_an_evaluation_before_training_is_in_no_step(tmp_path: Path) -> None:
    for name, more in (("both", {}), ("no_grad", {"mode": False}), ("eval", {"grad": True})):

        def training(script: Script, more: Any = more) -> None:
            script.evaluate(**more)
            script.train(3)

        done, found, _ = recorded(tmp_path / name, training)
        assert found == done


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("mode", [False, True])
def test_a_teacher_first_in_each_step_is_part_of_it(tmp_path: Path, *, is_frozen: bool, mode: bool) -> None:
    """As the reference of DPO before the policy. The student is evaluated, too: that is none."""
    teacher = nn.Linear(4, 4).train(mode).requires_grad_(not is_frozen)

    def training(script: Script) -> None:
        for number in range(6):
            with contextlib.nullcontext() if is_frozen else torch.no_grad():
                teacher(torch.ones(2, 4))
            script.train()
            if number == 3:
                script.evaluate()

    done, found, rows = recorded(tmp_path / "run", training)
    assert found == done
    taught = [row["step"] for row in rows if row["kind"] == "forward" and row["name"] == "Linear"]
    assert taught == list(range(6))


def test_a_model_without_gradients_in_the_middle_of_a_step_is_part_of_it(tmp_path: Path) -> None:
    """As a frozen critic, a momentum encoder or old probabilities are called behind the first forward."""
    other = nn.Linear(4, 4).eval()

    def training(script: Script) -> None:
        for number in range(4):
            out = script.model(torch.ones(2, 4))
            with torch.no_grad():
                other(out)
                script.model(torch.ones(2, 4))
                if number % 2:
                    script.model.eval()(torch.ones(2, 4))
                    script.model.train()
            out.sum().backward()
            script.optimizer.step()
            script.done.append(STEP)

    done, found, _ = recorded(tmp_path / "run", training)
    assert found == done


def test_rollouts_before_every_step_are_part_of_it_and_others_are_said(tmp_path: Path) -> None:
    """A policy generates in the mode in which it trains; in every step that is work of the step."""

    def generate(script: Script) -> None:
        with torch.no_grad():
            for _ in range(4):
                script.model(torch.ones(2, 4))

    def online(script: Script) -> None:
        for _ in range(4):
            generate(script)
            script.train()

    def seldom(script: Script) -> None:
        for _ in range(3):
            generate(script)
            script.done.append(EVALUATION)
            script.train(3)

    done, found, _ = recorded(tmp_path / "online", online)
    assert found == [EVALUATION, *done]  # before the first step nobody knows what follows
    done, found, _ = recorded(tmp_path / "seldom", seldom)
    assert found == done


def test_where_steps_are_told_rollouts_are_part_of_them_and_evaluations_are_said(tmp_path: Path) -> None:
    def training(script: Script) -> None:
        for number in range(4):
            script.model.eval()
            with torch.no_grad():
                script.model(torch.ones(2, 4))
            script.model.train()
            for _ in range(2):
                script.train()
                script.done.pop()
            if number == 2:
                script.evaluate()
            foretrace.step()
            script.done.append(STEP)

    _, found, rows = recorded(tmp_path / "run", training)
    # Until the first call of step() each optimizer ends a step; the first two rollouts may be evaluations.
    assert found.count(STEP) == 5
    evaluations = [row for row in rows if row["kind"] == EVALUATION]
    assert [row["step"] for row in evaluations] == [-1, -1, 3]
    (third,) = (row for row in rows if row["category"] == "step" and row["step"] == 3)
    since_ns = evaluations[2]["start_ns"] - third["start_ns"]
    assert 0 < since_ns < since_ns + evaluations[2]["duration_ns"] <= third["duration_ns"]


def test_averages_of_weights_are_no_phase(tmp_path: Path) -> None:
    def training(script: Script) -> None:
        average = torch.optim.swa_utils.AveragedModel(script.model)
        for number in range(6):
            script.train()
            average.update_parameters(script.model)
            if number == 3:
                script.evaluate(average)

    done, found, _ = recorded(tmp_path / "run", training)
    assert found == done


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_what_a_checkpoint_runs_without_gradients_trains(tmp_path: Path, *, is_reentrant: bool) -> None:
    def training(script: Script) -> None:
        for _ in range(2):
            script.train(2, call=lambda x: checkpoint(script.model, x, use_reentrant=is_reentrant))
            script.evaluate()

    done, found, rows = recorded(tmp_path / "run", training)
    assert found == done
    assert {row["microbatch"] for row in rows if row["kind"] == "forward" and row["step"] >= 0} == {0}


def test_a_model_that_trains_in_eval_mode_trains(tmp_path: Path) -> None:
    """From the beginning, or since somebody has forgotten ``train()`` behind an evaluation."""

    def from_the_beginning(script: Script) -> None:
        script.model.eval()
        script.train(3)
        with torch.no_grad():
            script.model(torch.ones(2, 4))
        script.done.append(EVALUATION)
        script.train(3)

    def forgotten(script: Script) -> None:
        script.train(3)
        script.evaluate()
        script.model.eval()
        script.train(3)

    for training in (from_the_beginning, forgotten):
        done, found, _ = recorded(tmp_path / training.__name__, training)
        assert found == done


def test_what_an_optimizer_steps_by_without_a_backward_trains(tmp_path: Path) -> None:
    """As an evolution strategy does, which needs no gradients."""

    def training(script: Script) -> None:
        script.model.eval()
        for _ in range(4):
            with torch.no_grad():
                for parameter in script.model.parameters():
                    parameter.grad = torch.ones_like(parameter) * script.model(torch.ones(2, 4)).sum()
            script.optimizer.step()
            script.done.append(STEP)

    done, found, _ = recorded(tmp_path / "run", training)
    assert found == done


def test_steps_without_a_module_end_with_their_optimizer(tmp_path: Path) -> None:
    """A loop over a bare parameter, or a model inside of a compiled function: no forward is seen."""

    def training(script: Script) -> None:
        weight = nn.Parameter(torch.ones(4, 4))
        optimizer = torch.optim.SGD([weight], 0.1)
        for _ in range(4):
            (torch.ones(2, 4) @ weight).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            script.done.append(STEP)

    done, found, rows = recorded(tmp_path / "run", training)
    assert found == done
    assert [row["step"] for row in rows if row["kind"] == "optimizer"] == list(range(4))


def test_gradients_inside_of_a_model_are_no_training(tmp_path: Path) -> None:
    """As forces are gradients of an energy, in an evaluation, too."""

    class Forces(Module):  # type: ignore[misc]  # torch is untyped here
        def __init__(self, energy: Any) -> None:
            super().__init__()
            self.energy = energy

        def forward(self, x: Any) -> Any:
            x = x.clone().requires_grad_()
            return torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]

    def training(script: Script) -> None:
        script.model = Forces(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)))
        script.optimizer = SGD(script.model.parameters(), lr=0.1)
        for _ in range(2):
            script.train(2)
            script.evaluate(grad=True)
        script.train(2)

    done, found, rows = recorded(tmp_path / "run", training)
    assert found == done
    assert {row["microbatch"] for row in rows if row["kind"] == "forward" and row["step"] >= 0} == {0}


def test_saves_between_steps_are_a_phase_and_in_the_middle_are_said(tmp_path: Path) -> None:
    def training(script: Script) -> None:
        script.save()
        script.train(2)
        script.save()
        script.evaluate()
        script.train()
        script.evaluate()
        script.save()
        script.train()
        out = script.model(torch.ones(2, 4))
        script.done.append(STEP)
        script.save()
        out.sum().backward()
        script.optimizer.step()

    done, found, rows = recorded(tmp_path / "run", training)
    assert found == done
    saves = [row["step"] for row in rows if row["kind"] == CHECKPOINT]
    assert saves == [-1, -1, -1, 4]
    (_, said) = summarize(open_run(tmp_path / "run"))["left_out"]
    assert (said["count"], said["count_inside"]) == (3, 1)
    assert torch.save.__name__ == "save"
    assert not hasattr(torch.save, "__wrapped__")


@pytest.mark.parametrize("passes", [1, 3])
def test_micro_batches_of_a_step_are_numbered(tmp_path: Path, passes: int) -> None:
    def training(script: Script) -> None:
        script.train(2, passes)
        script.evaluate()
        script.train(2, passes)

    done, found, rows = recorded(tmp_path / "run", training)
    assert found == done
    for step in range(4):
        own = [row for row in rows if row["category"] == "compute" and row["step"] == step]
        for kind in ("forward", "backward"):
            numbers = [row["microbatch"] for row in own if row["kind"] == kind]
            assert sorted(set(numbers)) == list(range(passes))
            assert numbers == sorted(numbers)
        assert {row["microbatch"] for row in own if row["kind"] == "optimizer"} == {-1}
    assert {row["microbatch"] for row in rows if row["step"] < 0} == {-1}


def test_optimizers_in_the_backward_end_one_step(tmp_path: Path) -> None:
    def training(script: Script) -> None:
        optimizers = {one: SGD([one], lr=0.1) for one in script.model.parameters()}

        def update(parameter: Any) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for one in optimizers:
            one.register_post_accumulate_grad_hook(update)
        for number in range(5):
            script.model(torch.ones(2, 4)).sum().backward()
            script.done.append(STEP)
            if number == 2:
                script.evaluate()

    done, found, rows = recorded(tmp_path / "run", training)
    assert found == done
    for step in range(5):
        own = [row for row in rows if row["category"] == "compute" and row["step"] == step]
        assert sum(row["kind"] == "optimizer" for row in own) == 4
        assert {row["name"] for row in own if row["kind"] == "backward"} >= {"0", "2"}


def test_a_step_that_a_scaler_skips_is_one(tmp_path: Path) -> None:
    def training(script: Script) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        for number in range(6):
            if number == 4:
                script.evaluate()
            out = script.model(torch.ones(2, 4)).sum() * (float("inf") if number in (0, 3) else 1.0)
            scaler.scale(out).backward()
            scaler.step(script.optimizer)
            scaler.update()
            script.optimizer.zero_grad()
            script.done.append(STEP)

    before = torch.amp.GradScaler.step
    done, found, rows = recorded(tmp_path / "run", training)
    assert found == done
    assert [row["step"] for row in rows if row["kind"] == "optimizer"] == [1, 2, 4, 5]
    assert torch.amp.GradScaler.step is before


def test_optimizers_in_a_row_and_in_turns_end_the_steps_that_they_should(tmp_path: Path) -> None:
    def in_a_row(script: Script) -> None:
        first, *others = (SGD([one], lr=0.1) for one in script.model.parameters())
        for _ in range(3):
            script.model(torch.ones(2, 4)).sum().backward()
            for one in (first, *others):
                one.step()
            script.done.append(STEP)
            script.evaluate()

    def in_turns(script: Script) -> None:
        generator = nn.Linear(4, 4)
        optimizer = SGD(generator.parameters(), lr=0.1)
        for number in range(6):
            with torch.no_grad():
                fake = generator(torch.ones(2, 4))
            script.train(call=lambda x: script.model(x + fake))  # noqa: B023 - called at once
            script.model(generator(torch.ones(2, 4))).sum().backward()
            optimizer.step()
            if number == 3:
                script.evaluate(generator)

    done, found, _ = recorded(tmp_path / "row", in_a_row)
    assert found == done
    # The optimizer of the critic ends steps: what is evaluated behind the other one is inside of the next.
    done, found, rows = recorded(tmp_path / "turns", in_turns)
    assert sorted(found) == sorted(done)
    assert [row["step"] for row in rows if row["kind"] == EVALUATION] == [4]
    (said,) = summarize(open_run(tmp_path / "turns"))["left_out"]
    assert (said["count"], said["count_inside"]) == (0, 1)


def test_evaluations_between_chosen_steps_are_said_and_their_spans_left_out(tmp_path: Path) -> None:
    script = Script()
    with foretrace.record(tmp_path / "run", steps="2:5"):
        periodically(Script.evaluate)(script)
    rows = open_run(tmp_path / "run").spans().to_pylist()
    marks = sorted((row["start_ns"], row["kind"]) for row in rows if row["category"] in ("step", "phase"))
    assert [kind for _, kind in marks] == [EVALUATION, STEP, STEP, EVALUATION, STEP]
    assert {row["step"] for row in rows if row["category"] == "compute"} == {2, 3, 4}


SEVERAL = """
import sys
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
import foretrace

dist.init_process_group("gloo")
rank, folder = dist.get_rank(), sys.argv[1]

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

def looped(name, net, save):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with foretrace.record(f"{folder}/{name}"):
        for number in range(6):
            for _ in range(2):
                net(torch.ones(4, 8)).sum().backward()
            optimizer.step()
            if number % 2:
                net.eval()
                with torch.no_grad():
                    for _ in range(3):
                        net(torch.ones(4, 8))
                dist.all_reduce(torch.ones(4))
                net.train()
                save(net)

ddp = nn.parallel.DistributedDataParallel(model())
looped("ddp", ddp, lambda net: torch.save(net.state_dict(), f"{folder}/{rank}.pt"))
sharded = model()
mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
for part in (*sharded, sharded):
    fully_shard(part, mesh=mesh)
looped("fsdp2", sharded, lambda net: dcp.save(net.state_dict(), checkpoint_id=f"{folder}/saved"))

stage = PipelineStage(model()[rank], rank, 2, torch.device("cpu"))
schedule = ScheduleGPipe(stage, 2, loss_fn=nn.MSELoss())
optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.1)
given, target = ((torch.ones(4, 8),), {}) if rank == 0 else ((), {"target": torch.zeros(4, 8)})
with foretrace.record(f"{folder}/pipeline"):
    for number in range(6):
        schedule.step(*given, **target)
        optimizer.step()
        optimizer.zero_grad()
        if number % 2:
            schedule.eval(*given, **target)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, ranks: Any) -> Path:
    """Trainings of two ranks that evaluate and save, recorded one after the other by the same processes."""
    folder = tmp_path_factory.mktemp("phases")
    script = folder / "train.py"
    script.write_text(SEVERAL)
    made = folder / "runs"
    result = ranks.run([sys.executable, str(script), str(made)], ranks.env(), fresh=made)
    assert result.status == (0, 0), result.errors
    return made


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "pipeline"])
def test_what_ranks_do_between_steps_is_in_none(runs: Path, name: str) -> None:
    run = open_run(runs / name)
    assert run.warnings == ()
    once = [STEP, STEP, EVALUATION] + [CHECKPOINT] * (name != "pipeline")
    for rank in (0, 1):
        rows = sorted(run.spans([rank]).to_pylist(), key=lambda row: row["start_ns"])
        marks = [row for row in rows if row["category"] in ("step", "phase")]
        assert [row["kind"] for row in marks] == once * 3
        check(rows, marks)
        for one in (row for row in marks if row["kind"] == EVALUATION):
            since = [row["start_ns"] - one["start_ns"] for row in rows]
            sent = [
                row["step"]
                for row, ns in zip(rows, since, strict=True)
                if row["category"] == "collective" and 0 < ns < one["duration_ns"]
            ]
            assert set(sent) == (set() if name == "pipeline" else {-1})
    said = {one["kind"]: one["count"] for one in summarize(run)["left_out"]}
    assert said == dict.fromkeys(once[2:], 3)


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_collectives_say_their_micro_batch(runs: Path, name: str) -> None:
    rows = open_run(runs / name).spans([0]).to_pylist()
    reduced = [row for row in rows if row["kind"] in ("all_reduce", "reduce_scatter") and row["step"] > 0]
    assert {row["microbatch"] for row in reduced} == {0, 1}


def test_commands_say_what_is_left_out(runs: Path, ranks: Any) -> None:
    foretrace_ = [sys.executable, "-m", "foretrace"]
    done = ranks.launch(
        [*foretrace_, "analyze", str(runs / "ddp")],
        [*foretrace_, "analyze", "--json", str(runs / "ddp")],
        [*foretrace_, "compare", str(runs / "ddp"), str(runs / "pipeline")],
    )
    assert [one.returncode for one in done] == [0, 0, 0]
    assert "left out: 3 evaluations (" in done[0].stdout
    assert "), 3 checkpoint saves (" in done[0].stdout
    said = json.loads(done[1].stdout)["left_out"]
    assert [(one["kind"], one["count"]) for one in said] == [(EVALUATION, 3), (CHECKPOINT, 3)]
    assert done[2].stdout.count("left out: 3 evaluations") == 2
