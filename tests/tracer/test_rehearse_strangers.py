"""What strangers' scripts ask: whether numbers are finite, over what ranks talk, how long targets are."""

import doctest
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis.strategies import lists, sampled_from
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.data import truths as module
from foretrace.tracer.rehearse.data.truths import BOTH, EITHER, joined
from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.traces.rehearsal import RankTables, Rehearsal, read_rank, rehearsal_folder

pytest.importorskip("torch")

SCRIPT = Path(__file__).parent / "strangers.py"
LAYER_BYTES, RANKS = 64 * 64 * 4, 4

TOGETHER = (
    "finite",
    "chosen",
    "collected",
    "joined",
    "gathered",
    "aligned",
    "viewed",
    "copied",
    "exported",
    "saved",
    "sought",
)
"""Trainings that one rehearsal has one behind the other, of two steps each."""


def _rehearsed(folder: Path, *names: str, **asked: Any) -> tuple[Rehearsal, RankTables, str]:
    """Return a rehearsal, what its rank did, and what it printed."""
    found = rehearse(
        Asked(command=(str(SCRIPT), *names), world_size=RANKS, ranks=(0,), **asked), folder / "run"
    )
    tables = rehearsal_folder(folder / "run")
    return found, read_rank(tables, 0), (tables / "rank-00000" / "output.log").read_text()


class Together:
    """The trainings of ``TOGETHER``.

    Args:
        folder: where to.
    """

    def __init__(self, folder: Path) -> None:
        kept = 2 * len(TOGETHER)
        self.rehearsal, self._tables, self.printed = _rehearsed(folder, *TOGETHER, warmup=0, steps=kept)
        self._places = self._tables.places.to_pylist()

    def said(self, name: str) -> str:
        """Return what was printed last behind *name*."""
        return [line for line in self.printed.splitlines() if line.startswith(f"{name} ")][-1][
            len(name) + 1 :
        ]

    def rows(self, name: str, what: int, kind: str = "") -> list[dict[str, Any]]:
        """Return works (0) or messages (1) of the second step of a training, of all passes or of a *kind*."""
        items = (self._tables.messages if what else self._tables.works).to_pylist()
        step = 2 * TOGETHER.index(name) + 1
        return [
            items[event["item"]]
            for event in self._tables.events.to_pylist()
            if event["what"] == what
            and (place := self._places[event["place"]])["step"] == step
            and kind in {"", place["kind"]}
        ]


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Together:
    """One rehearsal for all that can share it: most of what one takes is its start."""
    return Together(tmp_path_factory.mktemp("together"))


def test_numbers_are_finite_however_a_script_asks(together: Together) -> None:
    """Of a loss, of gradients and their norm, of large tensors, over ranks; the script says where."""
    assert together.said("found") == str([False] * 8)
    told = together.rehearsal.stated
    assert any("asks whether numbers are finite: told that they are" in line for line in told)


def test_given_numbers_are_looked_for_among_known_ones_only(together: Together) -> None:
    """Whether a token that nobody has ends a generation is unknown: who needs it ends the rehearsal."""
    assert together.said("sought") == str([(2, 4), [False, True, False, True]])


@given(truths=lists(sampled_from([0.0, 1.0]), min_size=1, max_size=4))
def test_what_is_joined_of_known_truths_is_what_python_makes_of_them(truths: list[float]) -> None:
    """All or any; a truth that nobody knows counts unless another decides."""
    for name in BOTH:
        assert joined(name, truths) == float(all(truths))
        assert joined(name, [*truths, None]) == (None if all(truths) else 0.0)
    for name in EITHER:
        assert joined(name, truths) == float(any(truths))
        assert joined(name, [*truths, None]) == (1.0 if any(truths) else None)
    assert joined("aten.logical_not", truths[:1]) == 1.0 - truths[0]
    assert joined("aten.logical_not", [None]) is None
    assert not doctest.testmod(module).failed


def test_distributions_and_states_in_shards_go_through(together: Together) -> None:
    """Torch asks whether parameters are valid; collecting states exchanges objects as bytes."""
    assert together.rows("chosen", 0, "backward")
    assert together.rows("collected", 1, "backward") == []
    assert together.rows("collected", 1)


def test_ranks_have_as_many_batches_as_each_other(together: Together) -> None:
    """A context that waits for those with more finds none; gradients are reduced once per step."""
    assert [row["size_bytes"] for row in together.rows("joined", 1, "backward")] == [4 * LAYER_BYTES]


def test_ranks_talk_over_what_the_script_asked_for(together: Together) -> None:
    """Gradients of gathered rows are scattered over NCCL; without it torch would exchange all of them."""
    assert together.said("over") == "nccl True True"
    assert {row["kind"] for row in together.rows("gathered", 1)} == {"all_gather", "reduce_scatter"}


def test_a_loss_over_alignments_is_as_wide_as_its_longest_target(together: Together) -> None:
    """Two places per label, and one: of 2 labels in 4 steps of 2 sequences."""
    shapes = [row["shapes"] for row in together.rows("aligned", 0) if row["name"] == "aten._ctc_loss"]
    assert [found.partition(" -> ")[2] for found in shapes] == ["2, 2x4x5"]


def test_gradients_that_lie_in_buckets_take_no_memory_beside_them(together: Together) -> None:
    """Four layers, their buckets, and four gradients or none; 512 bytes at most are DDP's own."""
    viewed, copied = (int(together.said(name).split()[0]) for name in ("viewed", "copied"))
    assert copied - viewed == 4 * LAYER_BYTES
    assert 0 <= viewed - 8 * LAYER_BYTES <= 512


def test_buckets_made_anew_take_the_place_of_those_before(together: Together) -> None:
    """Gradients that lie in them move: once gradients are dropped, no bucket of before is freed with them."""
    assert together.said("viewed").split()[1] == "0"
    assert together.said("copied").split()[1] == str(4 * LAYER_BYTES)


def test_a_graph_of_a_model_takes_no_memory(together: Together) -> None:
    """It keeps a fake tensor for every operator, which is not on the device."""
    assert together.said("exported") == "True 0"


def test_a_whole_state_is_collected_on_the_host(together: Together) -> None:
    """The first FSDP moves whole parameters there and back."""
    assert together.said("state") == "[(64, 64)]"


def test_a_parameter_without_a_gradient_ends_what_it_would_end_for_real(tmp_path: Path) -> None:
    """DDP refuses the next forward, with the remedy."""
    with pytest.raises(RehearsalError, match="find_unused_parameters=True") as error:
        _rehearsed(tmp_path, "unused")
    assert "\n" not in str(error.value)


def test_a_module_that_is_missing_is_named_whoever_says_so(tmp_path: Path) -> None:
    """A library raises an error of its own, which has no name."""
    with pytest.raises(RehearsalError, match="a_module_that_nobody_has is not installed here: install it"):
        _rehearsed(tmp_path, "wrapped")


def test_the_only_step_of_a_script_is_kept_whatever_follows_it(tmp_path: Path) -> None:
    """It was to warm up, and had ended when an evaluation began: passes and memory are those of the step."""
    found, tables, _ = _rehearsed(tmp_path, "once")
    assert any(note.startswith("the script did 1 step only: step 0 was kept") for note in found.notes)
    places = tables.places.to_pylist()
    kinds = {(places[at]["step"], places[at]["kind"]) for at in tables.events["place"].to_pylist()}
    assert {(0, "forward"), (0, "backward"), (0, "optimizer")} <= kinds
    assert found.memory["0"]["peak_bytes"] >= 2 * LAYER_BYTES
    assert found.job["first_step"] == 0
