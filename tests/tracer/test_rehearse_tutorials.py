"""What scripts in the manner of tutorials were answered wrongly, without a word."""

from pathlib import Path

import pytest
from tests.rehearsals import rehearse, rows_and_tokens

from foretrace.simulator.rehearsed.notes import model_flops, stage_of
from foretrace.topologies.catalog import load_cluster
from foretrace.tracer.rehearse.cli import layout_words
from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.traces.batch import batch_in
from foretrace.traces.rehearsal import WHAT, Rehearsal, read_rank, rehearsal_folder

torch = pytest.importorskip("torch")

SCRIPT = Path(__file__).parent / "tutorials.py"


def _rehearsed(what: str, folder: Path) -> Rehearsal:
    return rehearse(Asked(command=(str(SCRIPT), what), world_size=8, samples=0), folder / "run")


def test_a_loss_that_is_a_module_is_no_pass_of_the_model(tmp_path: Path) -> None:
    """A processor has no fused kernel of attention that drops. Ranks that send nothing may share rows."""
    found = _rehearsed("numbered", tmp_path)
    assert (found.job["forwards_per_step"], rows_and_tokens(found)) == (1, (None, None))
    works = read_rank(rehearsal_folder(tmp_path / "run"), 0).works.to_pylist()
    assert not any("attention" in work["name"] for work in works)
    assert any("softmax" in work["name"] for work in works)


def test_what_a_wrapped_layer_computes_again_is_not_the_work_of_the_model(tmp_path: Path) -> None:
    """FSDP1 around checkpoints has the model's FLOPs of a step without them: three times the forward.

    Attention that drops is one kernel of CUDA: its scores are not in memory.
    """
    found = _rehearsed("wrapped", tmp_path)
    tables = {0: read_rank(rehearsal_folder(tmp_path / "run"), 0)}
    names = {work["name"] for work in tables[0].works.to_pylist()}
    assert any("attention" in name for name in names)
    assert not any("softmax" in name for name in names)
    kinds = {place["kind"] for place in tables[0].places.to_pylist()}
    tokens, width, n_layers, n_ranks = 4 * 8, 32, 2, 8
    matrices = n_layers * 6 * width * width * tokens  # qkv, projection, and two of the feed-forward
    scores = n_layers * 2 * 8 * width * tokens
    assert "recompute" in kinds
    of_the_input = 3 * width * width * tokens  # the batch has no gradient
    assert model_flops(found, tables) == pytest.approx(2 * (3 * (matrices + scores) - of_the_input) * n_ranks)


def test_stages_that_are_neighbours_share_their_rows(tmp_path: Path) -> None:
    """Two ranks work on each batch, though no layout has this order; every schedule of a step counts."""
    found = _rehearsed("staged", tmp_path)
    assert found.layout is None
    assert rows_and_tokens(found) == (2 * 8 * 4, 2 * 8 * 4 * 8)
    assert batch_in(found.job).equation.startswith("2 rows × 8 × 8 micro-batches × dp 4 (")
    assert found.representatives == (0, 1) * 4
    machine, folder = load_cluster("dgx-h100"), rehearsal_folder(tmp_path / "run")
    stages = [stage_of(found, rank, machine, read_rank(folder, rank)) for rank in found.ranks]
    assert [stage["stage"] for stage in stages] == [0, 1]
    assert set(layout_words(found).split(",")[0].split()) == {"groups", "dp4", "pp2"}


@pytest.mark.parametrize(("ranks", "n_stages"), [((0,), None), ((0, 1), 2)])
def test_the_size_of_a_model_is_that_of_all_stages_or_unknown(
    ranks: tuple[int, ...], n_stages: int | None, tmp_path: Path
) -> None:
    layer = torch.nn.TransformerEncoderLayer(32, 2, 32)
    n_params = None if n_stages is None else n_stages * sum(one.numel() for one in layer.parameters())
    asked = Asked(command=(str(SCRIPT), "staged"), world_size=2, ranks=ranks)
    assert (rehearse(asked, tmp_path / "run").model or {})["n_params"] == n_params


def test_rows_are_those_that_train_and_features_are_no_tokens(tmp_path: Path) -> None:
    """What is evaluated beside, even before the first training pass, is said to be in the time alone."""
    found = _rehearsed("evaluated", tmp_path)
    assert rows_and_tokens(found) == (8 * 2 * 4, 0)
    tables = {0: read_rank(rehearsal_folder(tmp_path / "run"), 0)}
    forward_and_weights = 2  # features have no gradient
    assert model_flops(found, tables) == 8 * 2 * forward_and_weights * 2 * 4 * 32 * 2
    assert sum("evaluation" in note for note in found.notes) == 1


def test_rows_are_those_of_the_model_that_ranks_share(tmp_path: Path) -> None:
    """A table that one rank has looks up for all of them; its rows are not a batch of this rank."""
    assert rows_and_tokens(_rehearsed("dealt_out", tmp_path)) == (8 * 4, 0)


def test_layers_in_a_function_that_differentiates_itself_train(tmp_path: Path) -> None:
    """In a checkpoint that enters autograd anew nothing seems to be differentiated: it is no evaluation."""
    found = _rehearsed("by_hand", tmp_path)
    tables = {0: read_rank(rehearsal_folder(tmp_path / "run"), 0)}
    assert [note for note in found.notes if "on its own" not in note] == []  # ranks share nothing here
    assert model_flops(found, tables) == 8 * 2 * 3 * 2 * 4 * 32 * 32


def test_a_static_graph_reduces_everything_at_the_end_of_its_first_step(tmp_path: Path) -> None:
    """Ranks ask once who used what; buckets are made anew after the second step, which is not kept."""
    kept = _rehearsed("unchanging", tmp_path)
    assert kept.job["first_step"] == 2
    asked = Asked(command=(str(SCRIPT), "unchanging"), world_size=8, samples=0, warmup=0, steps=4)
    rehearse(asked, tmp_path / "all")
    tables = read_rank(rehearsal_folder(tmp_path / "all"), 0)
    places, messages = tables.places.to_pylist(), tables.messages.to_pylist()
    sent: dict[int, list[int]] = {step: [] for step in range(4)}
    for event in tables.events.to_pylist():
        if event["what"] == WHAT.index("communication"):
            sent[places[event["place"]]["step"]].append(messages[event["item"]]["size_bytes"])
    who, one, never = 4 * 3, 4 * 32 * 32, 4
    assert sent[0][0] == who
    assert sorted(sent[0][1:]) == sorted(sent[1])
    assert sent[3] == [one, one, never]
    assert sent[2][2:] == sent[3]  # two broadcasts before tell of the new buckets


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("accumulated", "static_graph=True reduces in its first backward, which is under no_sync"),
        ("of_others", "make the optimizer after wrapping, or pass use_orig_params=True"),
    ],
)
def test_what_torch_ends_without_a_word_for_is_told_in_a_line(script: str, said: str, tmp_path: Path) -> None:
    """A failed assertion of the reducer, and a key that is a parameter: the line has the remedy."""
    with pytest.raises(RehearsalError, match=said) as error:
        _rehearsed(script, tmp_path)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("is_called", [False, True], ids=["never", "called"])
def test_compilation_is_said_to_be_left_out_of_what_is_called(tmp_path: Path, *, is_called: bool) -> None:
    """Libraries decorate functions as they are imported."""
    asked = Asked(command=(str(SCRIPT), "decorated", *["called"] * is_called), world_size=2, ranks=(0,))
    notes = rehearse(asked, tmp_path / "run").notes
    assert any("torch.compile is not run" in note for note in notes) is is_called


def test_a_mesh_can_be_made_of_the_ranks_of_another(tmp_path: Path) -> None:
    """Numbers of a mesh are known through its views."""
    found = _rehearsed("paired", tmp_path)
    log = rehearsal_folder(tmp_path / "run") / "rank-00000" / "output.log"
    assert log.read_text().splitlines()[0] == "[[0, 1], [2, 3], [4, 5], [6, 7]] [2, 3]"
    assert (0, 1) in {group.ranks for group in found.groups}
