"""Two views of one model: a rehearsed script, and the simulation of what it is read to be."""

from pathlib import Path
from typing import Any

import pytest
from tests.rehearsals import rehearse

from foretrace.simulator.recorded.like import job_like
from foretrace.simulator.rehearsed.run import described, separate_parts, simulate_rehearsal
from foretrace.simulator.settings import CONVENTIONS
from foretrace.simulator.simulate import simulate
from foretrace.topologies.catalog import load_cluster
from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.traces.compare import compare
from foretrace.traces.rehearsal import EVENTS, MESSAGES, PLACES, WORKS, RankTables
from foretrace.traces.store import open_run

SHARDED = ("--fsdp", "full_shard auto_wrap")
FSDP1 = {"copies_gathered": False, "joins_gradients": True, "prefetch_backward": False}
EXAMPLE = Path(__file__).parents[2] / "examples" / "rehearse" / "llama_fsdp2_tp.py"


def issued(*works: dict[str, Any]) -> RankTables:
    """Return a rank that issues nothing, but knows *works*."""
    row: dict[str, Any] = dict.fromkeys(WORKS.names, "") | {"causal": False, "is_known": True}
    row |= {"rows": (), "aligned": True}
    row |= dict.fromkeys(("flops", "bytes_moved", "m", "n", "k", "batch", "v_dim", "kernels"), 1)
    table = WORKS.empty_table().from_pylist([row | work for work in works], schema=WORKS)
    return RankTables(EVENTS.empty_table(), table, MESSAGES.empty_table(), PLACES.empty_table())


def test_what_is_one_kernel_is_read_off_the_operators() -> None:
    """A norm is one kernel or several; without compilation everything else is several."""
    apart = separate_parts([issued({"name": "aten.rsqrt"})])
    whole = separate_parts([issued({"name": "aten._fused_rms_norm"})])
    assert set(apart) - set(whole) == {"norm"}
    assert {"rotary", "loss"} <= set(whole) <= set(apart)


def test_the_width_of_heads_is_that_of_attention() -> None:
    """It completes the description of a model, and invents none."""
    seen = [issued({"name": "aten.mm", "kind": "gemm", "k": 512}, {"kind": "attention", "k": 96})]
    assert described({"name": "a"}, seen) == {"name": "a", "head_dim": 96}
    assert described({"name": "a"}, [issued({"kind": "gemm", "k": 512})]) == {"name": "a"}
    assert described(None, seen) is None


@pytest.mark.slow
def test_a_script_and_the_job_that_it_is_read_to_be_take_the_same_time(tmp_path: Path) -> None:
    """FSDP2 over 512 ranks: within 3 % in all, and in computing."""
    pytest.importorskip("torch")
    command = (str(EXAMPLE), "--tp", "1", "--layers", "4", "--vocab", "32000")
    rehearse(Asked(command=command, world_size=512, ranks=(0,)), tmp_path)
    simulate_rehearsal(tmp_path, lambda n: load_cluster("dgx-h100", n)).write(tmp_path)
    script = open_run(tmp_path)
    found = compare(simulate(job_like(script, {})).run, script)
    assert found.ratio == pytest.approx(1, abs=0.03)
    computing = [cause for cause in found.causes if cause.name.startswith("compute")]
    assert sum(one.a_ns for one in computing) == pytest.approx(sum(one.b_ns for one in computing), rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "conventions"),
    [((), {}), (SHARDED, {}), ((*SHARDED, "--recompute"), {}), ((*SHARDED, "--fsdp-version", "1"), FSDP1)],
    ids=["ddp", "fsdp2", "fsdp2-recomputed", "fsdp1"],
)
def test_the_trainer_of_transformers_takes_as_long_as_its_profile_says(
    arguments: tuple[str, ...], conventions: dict[str, bool], tmp_path: Path
) -> None:
    """On 8 ranks: within 3 % in all, and in computing."""
    pytest.importorskip("transformers")
    sizes = ("--layers", "4", "--accumulate", "1", "--log-every", "100")
    command = (str(EXAMPLE.with_name("hf_trainer.py")), *sizes, *arguments)
    rehearse(Asked(command=command, world_size=8, ranks=(0,)), tmp_path)
    simulate_rehearsal(tmp_path, lambda n: load_cluster("dgx-h100", n)).write(tmp_path)
    script = open_run(tmp_path)
    told = {"framework": "transformers", CONVENTIONS: conventions}
    found = compare(simulate(job_like(script, told)).run, script)
    assert found.ratio == pytest.approx(1, abs=0.03)
    computing = [cause for cause in found.causes if cause.name.startswith("compute")]
    ours, theirs = (sum(getattr(one, side) for one in computing) for side in ("a_ns", "b_ns"))
    assert ours == pytest.approx(theirs, rel=0.03)
