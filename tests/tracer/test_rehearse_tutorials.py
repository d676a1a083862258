"""What scripts in the manner of tutorials were answered wrongly, without a word."""

from pathlib import Path

import pytest

from simulator.rehearsed.figures import model_flops, rows_and_tokens, stage_of
from topologies.catalog import load_cluster
from tracer.rehearse.cli import layout_words
from tracer.rehearse.rehearsing import Asked, rehearse
from traces.rehearsal import Rehearsal, read_rank, rehearsal_folder

torch = pytest.importorskip("torch")

SCRIPT = Path(__file__).parent / "tutorials.py"


def _rehearsed(what: str, folder: Path) -> Rehearsal:
    return rehearse(Asked(command=(str(SCRIPT), what), world_size=8, samples=0), folder / "run")


def test_a_loss_that_is_a_module_is_no_pass_of_the_model_and_attention_that_drops_is_fused(
    tmp_path: Path,
) -> None:
    """Rows are those of one batch; scores are not in memory, as in the fused kernel of CUDA."""
    found = _rehearsed("numbered", tmp_path)
    assert rows_and_tokens(found) == (4 * 8, 4 * 8 * 8)
    works = read_rank(rehearsal_folder(tmp_path / "run"), 0).works.to_pylist()
    assert {work["name"] for work in works if "attention" in work["name"]}
    assert not any("softmax" in work["name"] for work in works)


def test_what_a_wrapped_layer_computes_again_is_not_the_work_of_the_model(tmp_path: Path) -> None:
    """FSDP1 around checkpoints has the model's FLOPs of a step without them: three times the forward."""
    found = _rehearsed("wrapped", tmp_path)
    tables = {0: read_rank(rehearsal_folder(tmp_path / "run"), 0)}
    kinds = {place["kind"] for place in tables[0].places.to_pylist()}
    tokens, width, n_layers, n_ranks = 4 * 8, 32, 2, 8
    matrices = n_layers * 6 * width * width * tokens  # qkv, projection, and two of the feed-forward
    scores = n_layers * 2 * 8 * width * tokens
    assert "recompute" in kinds
    of_the_input = 3 * width * width * tokens  # the batch has no gradient
    assert model_flops(found, tables) == pytest.approx(2 * (3 * (matrices + scores) - of_the_input) * n_ranks)


def test_stages_that_are_neighbours_share_their_rows(tmp_path: Path) -> None:
    """Two ranks work on each batch, though no layout has this order of axes."""
    found = _rehearsed("staged", tmp_path)
    assert found.layout is None
    assert rows_and_tokens(found) == (8 * 4, 8 * 4 * 8)
    assert found.representatives == (0, 1) * 4
    machine = load_cluster("dgx-h100")
    assert [stage_of(found, rank, machine)["stage"] for rank in found.ranks] == [0, 1]
    assert set(layout_words(found).split(",")[0].split()) == {"groups", "dp4", "pp2"}


def test_rows_are_those_that_train_and_features_are_no_tokens(tmp_path: Path) -> None:
    """What is evaluated beside, even before the first training pass, is said to be in the time alone."""
    found = _rehearsed("evaluated", tmp_path)
    assert rows_and_tokens(found) == (8 * 2 * 4, 0)
    assert sum("evaluation" in note for note in found.notes) == 1
