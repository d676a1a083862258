"""A run tells what job it was: simulated ones all of it, recorded ones what their modules and spans show."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis.strategies import sampled_from
from tests.simulator.predicted import simulate

from foretrace.cli import main
from foretrace.simulator.config import job_from, job_settings, read_config, write_config
from foretrace.simulator.errors import ConfigError, LikeError
from foretrace.simulator.idle import idle
from foretrace.simulator.models.model import Model
from foretrace.simulator.models.sources import load_model
from foretrace.simulator.recorded import like as observed
from foretrace.simulator.recorded.like import job_like
from foretrace.simulator.recorded.model import recorded_model
from foretrace.simulator.simulate import Simulation
from foretrace.topologies.catalog import load_cluster
from foretrace.traces.info import RunInfo
from foretrace.traces.layout import Layout
from foretrace.traces.run import Part, Run

SMALL = {"model": "llama3-8b", "cluster": "dgx-h100", "global_batch": 16, "seq_len": 512}


@pytest.fixture(scope="module")
def simulation() -> Simulation:
    """A small simulated run with every axis but ep and cp."""
    return simulate(job_from({**SMALL, "tp": 2, "pp": 2, "dp": 2, "sharding": "zero1", "micro_batch": 2}))


def test_like_a_simulated_run_is_that_run(simulation: Simulation) -> None:
    """Nothing is lost on the way through run.json."""
    again = job_like(simulation.run, {})
    assert again == job_from({**SMALL, "tp": 2, "pp": 2, "dp": 2, "sharding": "zero1", "micro_batch": 2})


EXPERTS = {**SMALL, "model": "qwen3-30b-a3b", "dp": 4, "ep": 4}


@pytest.mark.parametrize(
    "asked",
    [
        {**SMALL, "tp": 2, "dp": 4},
        {**SMALL, "dp": 2, "fp32_gradients": False},
        {**SMALL, "dp": 2, "framework": "nemo"},
        {**EXPERTS, "tp": 2},
    ],
    ids=["open", "one said", "named", "experts"],
)
def test_what_nobody_said_stays_open_in_a_run_and_in_a_file(asked: dict[str, Any], tmp_path: Path) -> None:
    """The job is the same, and so is what a framework decides that is named later."""
    job = job_from(asked)
    file = tmp_path / "run.toml"
    file.write_text(write_config(job_settings(job)))
    run = simulate(job)
    assert ("framework" in job.unsaid) is ("framework" not in asked)
    later = job_from({**asked, "framework": "deepspeed"})
    for again, named in (
        (job_like(run.run, {}), job_like(run.run, {"framework": "deepspeed"})),
        (job_from(read_config(file)), job_from({**read_config(file), "framework": "deepspeed"})),
    ):
        assert again == job
        if "framework" not in asked:
            assert named == later


@given(dp=sampled_from([1, 2, 8, 64]))
def test_a_replica_keeps_its_batch(simulation: Simulation, dp: int) -> None:
    """More replicas make the global batch larger, not the share of each smaller."""
    job = job_like(simulation.run, {"dp": dp})
    assert job.layout == Layout(tp=2, pp=2, dp=dp)
    assert job.global_batch == 8 * dp
    assert job_like(simulation.run, {"gpus": 4 * dp}) == job


def test_conventions_of_a_simulated_run_are_kept_and_can_be_changed() -> None:
    """Framework and single conventions travel with the run; what is given goes before."""
    settings = {**SMALL, "dp": 2, "framework": "torchtitan", "conventions": {"grad_norm": False}}
    run = simulate(job_from(settings)).run
    again = job_like(run, {})
    assert again == job_from(settings) == job_like(run, {"conventions": {}})
    changed = job_like(run, {"conventions": {"grad_norm": True}})
    assert changed.profile.grad_norm


def structure_of(model: Model, *, heads: str) -> dict[str, Any]:
    """Return what the recorder notes of a Llama whose attention keeps a number that is called *heads*."""
    layers = list(range(model.n_layers))
    kv, inner, hidden = model.n_kv_heads * model.head_dim, model.ffn_hidden, model.hidden
    value = model.head_dim if "dim" in heads else model.n_heads

    def linear(n_out: int, n_in: int) -> dict[str, Any]:
        return {"kind": "Linear", "shapes": {"weight": [n_out, n_in]}, "layers": layers}

    norm = {"kind": "RMSNorm", "shapes": {"weight": [hidden]}}
    structure = {
        "embed_tokens": {"kind": "Embedding", "shapes": {"weight": [model.vocab, hidden]}},
        "layers.*.input_layernorm": {**norm, "layers": layers},
        "layers.*.post_attention_layernorm": {**norm, "layers": layers},
        "layers.*.self_attn": {"kind": "Attention", "numbers": {heads: value}, "layers": layers},
        "layers.*.self_attn.q_proj": linear(model.n_heads * model.head_dim, hidden),
        "layers.*.self_attn.k_proj": linear(kv, hidden),
        "layers.*.self_attn.v_proj": linear(kv, hidden),
        "layers.*.self_attn.o_proj": linear(hidden, model.n_heads * model.head_dim),
        "layers.*.mlp.gate_proj": linear(inner, hidden),
        "layers.*.mlp.up_proj": linear(inner, hidden),
        "layers.*.mlp.down_proj": linear(hidden, inner),
        "norm": norm,
        "lm_head": {"kind": "Linear", "shapes": {"weight": [model.vocab, hidden]}},
    }
    return {"name": model.name, "n_params": model.n_params, "structure": structure}


@pytest.mark.parametrize("name", ["llama3-8b", "llama2-7b", "llama3.2-1b"])
@pytest.mark.parametrize("heads", ["head_dim", "n_heads"])
def test_the_shape_of_a_model_is_found_in_its_parameters(name: str, heads: str) -> None:
    """Grouped heads, a wide MLP and a tied head are told apart by the shapes alone."""
    model = load_model(name)
    found = recorded_model(structure_of(model, heads=heads), "run")
    for field in ("n_layers", "hidden", "n_heads", "n_kv_heads", "head_dim", "ffn_hidden", "vocab", "gated"):
        assert getattr(found, field) == getattr(model, field), field
    assert found.n_params == model.n_params
    assert found.tied_embeddings == model.tied_embeddings
    assert found.norm == "rmsnorm"


def test_a_structure_that_is_no_transformer_is_refused() -> None:
    """Parameters that the shape does not explain are said, with both counts."""
    described = structure_of(load_model("llama3-8b"), heads="head_dim")
    described["n_params"] *= 2
    with pytest.raises(LikeError, match=r"16,060,522,496 parameters, but .* 8,030,261,248"):
        recorded_model(described, "run")
    del described["structure"]["layers.*.self_attn"]
    with pytest.raises(LikeError, match="how many attention heads"):
        recorded_model(described, "run")


def noted(simulation: Simulation, cluster: dict[str, Any]) -> Run:
    """Return the run of *simulation*, whose machine is described as *cluster*."""
    info = replace(simulation.info, cluster=cluster)
    return Run("runs/then", info, [Part(None, lambda: simulation.spans)], simulation.memory, ())


@pytest.mark.parametrize("value", [None, "two", 2.5])
def test_a_setting_that_is_none_is_named_with_the_run(simulation: Simulation, value: object) -> None:
    info = replace(simulation.info, job={**(simulation.info.job or {}), "micro_batch": value})
    run = Run("runs/then", info, [Part(None, lambda: simulation.spans)], simulation.memory, ())
    with pytest.raises(ConfigError, match=r"runs/then: micro_batch = .*: must be a whole number"):
        job_like(run, {})


@pytest.mark.parametrize("axis", ["tp", "cp", "pp", "dp", "ep"])
def test_a_degree_of_none_is_refused_before_ranks_are_divided_by_it(
    simulation: Simulation, axis: str
) -> None:
    with pytest.raises(ConfigError, match=rf"{axis}=0: a parallel degree"):
        job_like(noted(simulation, {}), {axis: 0, "gpus": 8})


def bare(simulation: Simulation, **changes: Any) -> Run:
    """Return a recorded run with the spans of *simulation* that knows only what *changes* say."""
    info = RunInfo(origin="recorded", world_size=8, **changes)
    return Run("runs/real", info, [Part(None, lambda: simulation.spans)], simulation.memory, ())


def test_what_a_recording_does_not_tell_is_asked_for_one_by_one(simulation: Simulation) -> None:
    """Each refusal names the flag that helps."""
    run = bare(simulation)
    given: dict[str, Any] = {}
    for needs, then in (
        ("--model", {"model": "llama3-8b"}),
        ("--dp", {"dp": 8}),
        ("--cluster", {"cluster": "dgx-h100"}),
        ("--micro-batch", {"micro_batch": 1, "seq_len": 512}),
    ):
        with pytest.raises(LikeError, match=needs):
            job_like(run, given)
        given |= then
    assert job_like(run, given).layout.dp == 8


def test_nobody_is_warned_of_what_a_run_was_read_to_do(simulation: Simulation) -> None:
    """Conventions without effect are left out, unless a user has said them; sharding brings them back."""
    run = bare(simulation, job={"input_shape": [1, 512], "input_is_embedded": False})
    given = {"model": "llama3-8b", "cluster": "dgx-h100", "dp": 8}
    assert idle(job_like(run, given)) == []
    assert job_like(run, {**given, "sharding": "fsdp"}).profile.copies_gathered
    (said,) = idle(job_like(run, {**given, "conventions": {"copies_gathered": True}}))
    assert said.startswith("copies_gathered = true has no effect here")


def test_what_is_trained_beside_the_model_is_no_part_of_a_step(simulation: Simulation) -> None:
    """A critic is refused, a scale that a loss learns is not."""
    model = structure_of(load_model("llama3-8b"), heads="head_dim")
    given = {"cluster": "dgx-h100", "dp": 8}
    job = {"input_shape": [1, 512], "input_is_embedded": False, "beside_params": 1}
    assert job_like(bare(simulation, model=model, job=job), given).seq_len == 512
    critic = bare(simulation, model=model, job={**job, "beside_params": 10**9})
    with pytest.raises(LikeError, match=r"1,000,000,000 parameters beside .*--model"):
        job_like(critic, given)
    assert job_like(critic, {**given, "model": "llama3-8b"}).layout.dp == 8


def test_rows_of_features_are_not_taken_for_tokens(simulation: Simulation) -> None:
    """Sequences that come embedded have a width as well; all that is missing is said at once."""
    job = {"input_shape": [4, 512], "input_is_embedded": True}
    with pytest.raises(LikeError, match=r"--model.*; .*inputs of 4 x 512, no sequences of tokens.*--seq-len"):
        job_like(bare(simulation, job=job), {"cluster": "dgx-h100", "dp": 8})
    run = bare(simulation, job={**job, "input_shape": [4, 512, 64]})
    found = job_like(run, {"model": "llama3-8b", "cluster": "dgx-h100", "dp": 8})
    assert (found.micro_batch, found.seq_len) == (4, 512)


def test_a_context_parallel_rank_has_a_part_of_each_sequence(simulation: Simulation) -> None:
    """The model is called with it; a sequence is that of all ranks along cp."""
    job = {"input_shape": [2, 512], "input_is_embedded": False}
    run = bare(simulation, layout=Layout(dp=2, cp=4), job=job)
    found = job_like(run, {"model": "llama3-8b", "cluster": "dgx-h100"})
    assert (found.micro_batch, found.seq_len, found.layout) == (2, 2048, Layout(dp=2, cp=4))


def test_machines_with_the_recorded_device_are_named(simulation: Simulation) -> None:
    """A device does not say how its machines are wired."""
    cluster = {"device": {"name": "NVIDIA H100 80GB HBM3", "kind": "gpu"}}
    run = bare(simulation, cluster=cluster)
    with pytest.raises(LikeError, match=r"NVIDIA H100.*dgx-h100"):
        job_like(run, {"model": "llama3-8b", "dp": 8})


def test_the_verb_takes_a_run_and_changes_it(simulation: Simulation, tmp_path: Path) -> None:
    """``--like`` with flags, and not beside a file."""
    path = simulation.write(tmp_path / "run")
    result = CliRunner().invoke(main, ["simulate", "--like", str(path), "--dp", "4", "--json"])
    assert result.exit_code == 0, result.output
    assert '"world_size": 16' in result.stdout
    assert CliRunner().invoke(main, ["simulate", "run.toml", "--like", str(path)]).exit_code == 2


def test_a_run_on_a_machine_of_a_file_asks_for_the_file(simulation: Simulation) -> None:
    """The run has its name alone: no machine of the catalogue is taken in its place."""
    info = replace(simulation.info, cluster={**(simulation.info.cluster or {}), "name": "mine"})
    run = Run("runs/mine", info, [Part(None, lambda: simulation.spans)], simulation.memory, ())
    with pytest.raises(LikeError, match=r"runs/mine is of 'mine', .*--cluster FILE\.toml"):
        job_like(run, {})
    assert job_like(run, {"cluster": "dgx-h100"}).cluster.name == "dgx-h100"


FASTER = 'base = "dgx-h100"\n[nic]\nbandwidth = "800 Gb/s"\nlatency = "2 us"\n'


def test_a_file_that_is_called_like_a_machine_of_the_catalogue_is_asked_for(tmp_path: Path) -> None:
    """The name is not the machine: figures are; a run without a digest is held to those that it has."""
    file = tmp_path / "dgx-h100.toml"
    file.write_text(FASTER)
    own = simulate(job_from({**SMALL, "cluster": str(file), "dp": 8}))
    older = {key: value for key, value in (own.info.cluster or {}).items() if key != "digest"}
    for run in (own.run, noted(own, older)):
        with pytest.raises(LikeError, match=r"not that of the catalogue.*nic.*: give --cluster FILE\.toml"):
            job_like(run, {})
        assert (
            job_like(run, {"cluster": str(file)}).cluster
            == load_cluster(file, 8)
            != load_cluster("dgx-h100", 8)
        )
    file.write_text('base = "dgx-h100"\ndescription = "ours"\n')
    same = simulate(job_from({**SMALL, "cluster": str(file), "dp": 8}))
    assert job_like(same.run, {}).cluster == load_cluster("dgx-h100", 8)


def test_an_older_run_on_a_machine_of_the_catalogue_needs_no_digest(simulation: Simulation) -> None:
    older = {key: value for key, value in (simulation.info.cluster or {}).items() if key != "digest"}
    same = job_like(simulation.run, {})
    assert job_like(noted(simulation, {**older, "a key of then": 1}), {}) == same
    assert job_like(noted(simulation, {"name": "dgx-h100"}), {}) == same


@pytest.mark.parametrize("keeps", [True, False])
def test_whether_inputs_are_gathered_once_is_counted(keeps: bool) -> None:
    """DTensor keeps what it gathered; Megatron gathers again for the gradients of weights."""
    run = simulate(job_from({**SMALL, "tp": 2, "conventions": {"keeps_gathered_inputs": keeps}})).run
    assert observed.keeps_gathered(run, 0) is keeps


@pytest.mark.parametrize("times", [0, 1, 3])
def test_sums_of_gradients_of_norms_are_counted(times: int) -> None:
    """A simulated optimizer sums the gradient of each of 65 norms *times* over."""
    settings = {**SMALL, "tp": 2, "framework": "torchtitan"}
    run = simulate(job_from({**settings, "conventions": {"norm_reductions": times}})).run
    spans = [row for row in run.spans([0]).to_pylist() if row["name"] == "norm gradient"]
    assert len(spans) == times * (2 * 32 + 1)
    assert {row["size_bytes"] for row in spans} <= {4096 * 2}
    assert observed.norm_reductions(run) == times


def test_what_is_described_in_another_form_is_another() -> None:
    assert observed.different({"device": "h100", "n": 1}, {"device": {"name": "h100"}, "n": 1}) == ["device"]
