"""What is recorded of real trainings: the collectives that arithmetic demands, joined and in order."""

import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from foretrace.traces.analysis.metrics import breakdown
from foretrace.traces.store import open_run

Row = dict[str, Any]


def rows(pair: Any, *, category: str | None = None, step: int | None = None, rank: int = 0) -> list[Row]:
    """Return the spans of one rank in the order of time."""
    spans = pair.run.spans([rank]).to_pylist()
    chosen = [
        row for row in spans if category in (None, row["category"]) and (step is None or row["step"] == step)
    ]
    return sorted(chosen, key=lambda row: row["start_ns"])


def bytes_by_kind(spans: Iterable[Row]) -> dict[str, list[int]]:
    """Return the sizes of each kind, largest first."""
    found: dict[str, list[int]] = defaultdict(list)
    for row in spans:
        found[row["kind"]].append(row["size_bytes"])
    return {kind: sorted(sizes, reverse=True) for kind, sizes in found.items()}


def test_losses_are_the_same_to_the_last_bit(any_example: Any, job: Any) -> None:
    assert len(any_example.plain.losses) == job.steps
    assert any_example.recorded.losses == any_example.plain.losses


def test_nothing_was_lost_and_nobody_complained(any_example: Any) -> None:
    assert any_example.run.warnings == ()
    assert any_example.run.info.dropped == {}
    assert any_example.run.info.finished
    assert "foretrace" not in any_example.recorded.errors


@pytest.mark.parametrize(("name", "axis"), [("ddp", "dp"), ("fsdp2", "dp"), ("tp", "tp"), ("pp", "pp")])
def test_the_layout_is_told_by_the_groups(example: Callable[[str], Any], name: str, axis: str) -> None:
    info = example(name).run.info
    assert info.layout is not None
    assert {a: d for a, d in info.layout.degrees.items() if d > 1} == {axis: 2}
    assert [(group.axis, group.ranks) for group in info.groups] == [(axis, (0, 1))]


def test_ddp_reduces_every_gradient_once_per_step(example: Callable[[str], Any], job: Any) -> None:
    for rank in (0, 1):
        for step in range(job.steps):
            found = bytes_by_kind(rows(example("ddp"), category="collective", step=step, rank=rank))
            # In its second step DDP agrees on the order in which gradients became ready.
            assert set(found) == {"all_reduce", "broadcast"} if step == 1 else {"all_reduce"}
            assert sum(found["all_reduce"]) == 4 * (job.n_layers * job.layer_params + job.root_params)


def test_fsdp2_gathers_each_layer_twice_and_the_rest_once(example: Callable[[str], Any], job: Any) -> None:
    layer, root, n = 4 * job.layer_params, 4 * job.root_params, job.n_layers
    for rank in (0, 1):
        for step in range(job.steps):
            found = bytes_by_kind(rows(example("fsdp2"), category="collective", step=step, rank=rank))
            assert found == {
                # The root keeps its parameters from forward to backward: they would be freed only to be
                # gathered again at once.
                "all_gather": sorted([layer] * (2 * n) + [root], reverse=True),
                "reduce_scatter": sorted([layer] * n + [root], reverse=True),
            }


def test_tensor_parallel_collectives_are_those_of_sequence_parallelism(
    example: Callable[[str], Any], job: Any
) -> None:
    hidden = job.activation_bytes
    logits = hidden // job.hidden * job.vocab
    n_blocks = 2 * job.n_layers
    for rank in (0, 1):
        for step in range(job.steps):
            found = bytes_by_kind(rows(example("tp"), category="collective", step=step, rank=rank))
            # Forward: a gather before each block and before the head, a scatter after each block and after
            # the embedding, and the logits gathered. Backward turns each into the other, except that the
            # gradient of the logits is only cut.
            assert found["all_gather"] == sorted([hidden] * (2 * n_blocks + 2) + [logits], reverse=True)
            assert found["reduce_scatter"] == [hidden] * (2 * n_blocks + 2)
            # Each rank has seen a part of the sequence only: the gradients of the norms are summed, by the
            # optimizer, and as often as it reads them.
            assert set(found["all_reduce"]) == {4 * job.hidden}
            assert len(found["all_reduce"]) % (n_blocks + 1) == 0
            assert set(found) == {"all_gather", "reduce_scatter", "all_reduce"}


@pytest.mark.parametrize("words", ["pp", "pp --schedule gpipe"])
def test_a_pipeline_passes_every_microbatch_both_ways(
    example: Callable[[str], Any], job: Any, words: str
) -> None:
    for rank, forward, backward in ((0, "send", "recv"), (1, "recv", "send")):
        for step in range(job.steps):
            p2p = [
                row for row in rows(example(words), category="p2p", step=step, rank=rank) if row["stage"] >= 0
            ]
            assert {row["peer"] for row in p2p} == {1 - rank}
            assert {row["size_bytes"] for row in p2p} == {job.activation_bytes}
            found = Counter((row["kind"], row["name"], row["microbatch"]) for row in p2p)
            every = range(job.microbatches)
            assert found == Counter(
                [(forward, "activations", i) for i in every] + [(backward, "gradients", i) for i in every]
            )


@pytest.mark.parametrize("words", ["pp", "pp --schedule gpipe"])
def test_every_stage_works_on_every_microbatch(example: Callable[[str], Any], job: Any, words: str) -> None:
    for rank in (0, 1):
        work = [row for row in rows(example(words), category="compute", rank=rank) if row["microbatch"] >= 0]
        found = {(row["step"], row["kind"], row["stage"], row["microbatch"]) for row in work}
        assert found == {
            (step, kind, rank, microbatch)
            for step in range(job.steps)
            for kind in ("forward", "backward")
            for microbatch in range(job.microbatches)
        }
        half = job.n_layers // 2
        assert {row["layer"] for row in work} == {-1, *range(rank * half, (rank + 1) * half)}


def test_gpipe_finishes_all_forwards_first_and_1f1b_does_not(example: Callable[[str], Any]) -> None:
    def changes(words: str) -> int:
        work = [row for row in rows(example(words), category="compute", step=1) if row["microbatch"] >= 0]
        kinds = [row["kind"] for row in work]
        return sum(a != b for a, b in pairwise(kinds))

    assert changes("pp --schedule gpipe") == 1
    assert changes("pp") > 1


def test_every_communication_is_joined_with_those_of_all_other_ranks(any_example: Any) -> None:
    collectives: dict[tuple[int, int], list[Row]] = defaultdict(list)
    transfers: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for rank in (0, 1):
        for row in rows(any_example, rank=rank):
            if row["category"] == "collective":
                collectives[row["group"], row["sequence"]].append(row)
            elif row["category"] == "p2p":
                pair = (rank, row["peer"]) if row["kind"] == "send" else (row["peer"], rank)
                transfers[(row["group"], *pair, row["sequence"], row["size_bytes"])].append(row["kind"])
    assert collectives or transfers
    for key, members in collectives.items():
        assert [row["rank"] for row in members] == [0, 1], key
        assert len({(row["kind"], row["size_bytes"], row["dtype"], row["step"]) for row in members}) == 1, key
    assert all(sorted(kinds) == ["recv", "send"] for kinds in transfers.values())


def test_no_collective_ends_before_its_last_rank_has_come(any_example: Any) -> None:
    joined: dict[tuple[int, int], list[Row]] = defaultdict(list)
    for rank in (0, 1):
        for row in rows(any_example, category="collective", rank=rank):
            if row["kind"] in {"all_reduce", "all_gather", "reduce_scatter"}:
                joined[row["group"], row["sequence"]].append(row)
    for members in joined.values():
        last_start = max(row["start_ns"] for row in members)
        assert last_start <= min(row["start_ns"] + row["duration_ns"] for row in members), members


def test_nothing_overlaps_on_one_stream(any_example: Any) -> None:
    for rank in (0, 1):
        streams: dict[str, list[Row]] = defaultdict(list)
        for row in rows(any_example, rank=rank):
            streams[row["stream"]].append(row)
        assert {"compute", "step"} < set(streams)
        for spans in streams.values():
            for before, after in pairwise(spans):
                assert before["start_ns"] + before["duration_ns"] <= after["start_ns"], (before, after)


def test_steps_follow_each_other_and_their_shares_add_up(any_example: Any, job: Any) -> None:
    for rank in (0, 1):
        steps = rows(any_example, category="step", rank=rank)
        assert [row["step"] for row in steps] == list(range(job.steps))
        for before, after in pairwise(steps):
            assert before["start_ns"] + before["duration_ns"] == after["start_ns"]
    found = breakdown(any_example.run)
    assert len(found) == 2 * job.steps
    for row in found:
        assert sum(row.shares.values()) == pytest.approx(1, abs=1e-9)
        assert sum(row.ns.values()) == row.window_ns
        assert row.shares["compute"] > 0


@pytest.mark.parametrize("words", ["ddp", "fsdp2", "tp"])
def test_every_layer_computes_forward_then_backward(
    example: Callable[[str], Any], job: Any, words: str
) -> None:
    for step in range(job.steps):
        work = rows(example(words), category="compute", step=step)
        order: dict[str, list[str]] = defaultdict(list)
        for row in work:
            if row["name"].endswith((".self_attn", ".mlp")) and row["name"] not in order[row["kind"]]:
                order[row["kind"]].append(row["name"])
        names = [f"layers.{i}.{part}" for i in range(job.n_layers) for part in ("self_attn", "mlp")]
        assert order["forward"] == names
        assert order["backward"] == names[::-1]
        assert {"embed_tokens", "norm", "lm_head"} <= {row["name"] for row in work}
        assert {row["name"] for row in work if row["kind"] == "optimizer"} == {"AdamW"}
        assert all(row["layer"] == int(row["name"].split(".")[1]) for row in work if "layers." in row["name"])


def test_the_optimizer_ends_the_step(any_example: Any, job: Any) -> None:
    for step in range(job.steps):
        window = rows(any_example, category="step", step=step)[0]
        last = rows(any_example, category="compute", step=step)[-1]
        assert last["kind"] == "optimizer"
        gap_ns = window["start_ns"] + window["duration_ns"] - last["start_ns"] - last["duration_ns"]
        assert gap_ns >= 0


def test_what_the_training_was_is_in_the_description(example: Callable[[str], Any], job: Any) -> None:
    n_params = job.n_layers * job.layer_params + job.root_params
    for words, sharding in (("ddp", "ddp"), ("fsdp2", "fsdp")):
        info = example(words).run.info
        assert info.model is not None
        assert (info.model["name"], info.model["n_params"]) == ("Llama", n_params)
        assert info.job is not None
        assert info.job["sharding"] == sharding
        assert info.job["input_shape"] == [job.micro_batch, job.seq_len]
    piped = example("pp --schedule gpipe").run.info.job
    assert piped is not None
    assert (piped["schedule"], piped["n_microbatches"]) == ("gpipe", job.microbatches)


def test_kernels_of_chosen_steps_become_a_run(tmp_path: Path, ranks: Any, config: Path, example: Any) -> None:
    """The second depth: what the profiler saw of these steps, as a run beside the recording."""
    path = tmp_path / "run"
    script = str(ranks.root / "examples" / "train_ddp.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", script]
    torchrun += "--steps 3 --micro-batch 2 --seq-len 16".split()
    command = [sys.executable, "-m", "foretrace", "record", "-o", str(path), "--depth", "kernels", "--json"]
    command += ["--steps", "1:3", "--", *torchrun, "--config", str(config)]
    (result,) = ranks.launch(command, fresh=path)
    assert result.returncode == 0, result.stderr
    assert re.findall(r"loss +(-?[0-9.e+-]+)", result.stderr) == example("ddp").plain.losses
    assert json.loads(result.stdout)["kernels"] == str(path / "kernels")
    light, kernels = open_run(path), open_run(path / "kernels")
    assert light.warnings == ()
    for rank in (0, 1):
        coarse, fine = (run.spans([rank]).to_pylist() for run in (light, kernels))
        for rows in (coarse, fine):
            assert [row["step"] for row in rows if row["category"] == "step"] == [1, 2]
        reduced = [
            [row["size_bytes"] for row in rows if row["kind"] == "all_reduce" and row["step"] == 2]
            for rows in (coarse, fine)
        ]
        assert reduced[0] == reduced[1]
        assert sum(row["category"] == "compute" for row in fine) > 5 * len(coarse)
