"""A forward and a backward that a schedule pairs: what hides behind what, and where their tasks belong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.simulator.predicted import simulate

from foretrace.simulator.builder.instances import Message
from foretrace.simulator.builder.program_builder import COMPUTE, HOST, STREAMS, Task, Template
from foretrace.simulator.builder.step import build
from foretrace.simulator.builder.templates import write_both
from foretrace.simulator.compute.timing import ComputeModel
from foretrace.simulator.config import job_from
from foretrace.simulator.engine import compiled, contended, contended_compiled, event
from foretrace.simulator.job import Job
from foretrace.simulator.network.cost import Network
from foretrace.simulator.program import Label, Program
from foretrace.simulator.schedules import pairs, plan, write_csv

EP = STREAMS.index("ep")


def make_job(**given: Any) -> Job:
    """Return a job with experts across two nodes, so that they take long to reach; anything may be given."""
    base = {"model": "mixtral-8x7b", "cluster": "dgx-h100", "gpus": 32, "pp": 2, "ep": 8, "global_batch": 256}
    job = job_from({**base, "seq_len": 4096, "schedule": "dualpipe", "sharding": "ddp", **given})
    return replace(job, model=replace(job.model, n_layers=4))


def program_of(job: Job) -> Program:
    return build(job, Network(job.cluster), ComputeModel(job.cluster.device, job.precision))


def line(*kinds: str) -> Template:
    """Return a main line of computing ("c") and communication ("m"), each after the one before."""
    template = Template()
    for kind in kinds:
        if kind == "c":
            template.then(Task(COMPUTE, Label("compute", "forward", "x"), 10))
        else:
            message = Message("all_to_all", "ep", 8, "bf16")
            template.then(Task(EP, Label("collective", "all_to_all", "x", "ep"), message=message))
    return template


lines = st.lists(st.sampled_from("cm"), max_size=8).map(lambda kinds: line(*kinds))


def streams(template: Template) -> list[str]:
    return ["cm"[task.stream == EP] + str(task.part) for task in template.tasks]


def test_they_take_turns_after_every_communication() -> None:
    both = Template()
    write_both(both, line("c", "m", "c", "c"), line("c", "c", "m", "c", "m"))
    assert streams(both) == ["c0", "m0", "c1", "c1", "m1", "c0", "c0", "c1", "m1"]
    assert both.tails == (6, 8)


@given(forward=lines, backward=lines)
def test_every_task_is_there_once_and_waits_for_what_it_waited_for(
    forward: Template, backward: Template
) -> None:
    both = Template()
    write_both(both, forward, backward)
    for part, one in enumerate((forward, backward)):
        own = [at for at, task in enumerate(both.tasks) if task.part == part]
        assert [both.tasks[at]._replace(part=0) for at in own] == one.tasks
        waits = {(own.index(a), own.index(b) if b >= 0 else b) for a, b in both.waits if a in own}
        assert waits == set(one.waits)


def test_a_pair_hides_the_way_to_the_experts_behind_computing() -> None:
    at_once, in_turn = (simulate(make_job(overlap_pairs=on)).summary for on in (True, False))
    assert at_once["step_time_s"] < in_turn["step_time_s"]
    assert at_once["exposed_by_axis"]["ep"] < 0.4 * in_turn["exposed_by_axis"]["ep"]
    assert at_once["peak_memory_bytes"] == in_turn["peak_memory_bytes"]


@pytest.mark.parametrize("schedule", ["dualpipe", "dualpipe-v"])
def test_memory_over_time_has_the_peak_that_decides(schedule: str) -> None:
    found = simulate(make_job(schedule=schedule, recompute="full"))
    total = found.memory.filter(pc.equal(found.memory["category"], "total"))
    assert pc.max(total["bytes"]).as_py() == found.summary["peak_memory_bytes"]


def test_spans_of_a_pair_belong_to_their_own_stage_and_micro_batch() -> None:
    """But for those of the host, which are written for both of a pair if either of them needs it."""
    at_once, in_turn = (program_of(make_job(overlap_pairs=on)) for on in (True, False))

    def work(program: Program) -> list[tuple[int, ...]]:
        columns = (program.rank, program.label, program.stage, program.virtual_stage, program.microbatch)
        more = (program.layer, program.duration_ns, program.stream)
        of_device = np.asarray(program.stream) != HOST
        rows = (np.asarray(column)[of_device].tolist() for column in (*columns, *more))
        return sorted(zip(*rows, strict=True))

    named = [replace(at_once, label=_by_name(at_once)), replace(in_turn, label=_by_name(in_turn))]
    assert work(named[0]) == work(named[1])


def _by_name(program: Program) -> Any:
    order = sorted(set(program.labels))
    return np.array([order.index(label) for label in program.labels], np.int32)[program.label]


@pytest.mark.parametrize("schedule", ["dualpipe", "dualpipe-v"])
@pytest.mark.parametrize(
    "given", [{}, {"sharding": "fsdp", "ep": 1}, {"seq_len": 256}, {"overlap_p2p": False}]
)
def test_engines_agree_on_pairs(schedule: str, given: dict[str, Any]) -> None:
    made = program_of(make_job(schedule=schedule, global_batch=64, **given))
    assert [x.tolist() for x in compiled.times(made)] == [x.tolist() for x in event.times(made)]
    shared = [x.tolist() for x in contended_compiled.times(made)]
    assert shared == [x.tolist() for x in contended.times(made)]


def test_a_file_with_pairs_is_the_schedule_it_was_written_from(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    write_csv(path, plan("dualpipe-v", 2, 16), pairs("dualpipe-v", 2, 16))
    given = {"ep": 8, "global_batch": 256}
    ours, theirs = (simulate(make_job(schedule=name, **given)) for name in (str(path), "dualpipe-v"))
    assert ours.spans.equals(theirs.spans)
