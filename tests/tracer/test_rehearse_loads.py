"""Loads of experts that are stated: no token is lost, and all ranks tell the same story."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.tracer.rehearse.data.experts import Loads, parsed
from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.world.acting import Loaded
from foretrace.tracer.rehearse.world.classes import Classes
from foretrace.traces.layout import Group
from foretrace.traces.rehearsal import read_rank, rehearsal_folder

torch = pytest.importorskip("torch")

from foretrace.tracer.rehearse.data.stated import Stated  # noqa: E402
from foretrace.tracer.rehearse.rehearsing import Asked, rehearse  # noqa: E402 - needs torch

SCRIPT = Path(__file__).parent / "loaded.py"

N_RANKS, EXPERTS, TOP_K, TOKENS = 4, 8, 2, 48

SHARES = "0.3,0.25,0.15,0.1,0.1,0.1,0,0"

Splits = list[list[list[list[int]]]]
"""By rank and exchange: rows sent, rows received, rows of each of its experts."""


@given(
    st.floats(0, 3) | st.lists(st.floats(0.5, 1), min_size=8, max_size=8),
    st.integers(0, 300),
    st.integers(1, 4),
)
def test_every_choice_is_of_one_expert_and_no_token_has_one_twice(
    shape: float | list[float], n_tokens: int, top_k: int
) -> None:
    """Counts add up to tokens times choices, each within one of its share, none above the tokens."""
    load = parsed(f"zipf:{shape}" if isinstance(shape, float) else ",".join(map(str, shape)))
    assert isinstance(load, Loads)
    counts = load.counts(n_tokens, top_k, EXPERTS)
    assert sum(counts) == n_tokens * top_k
    assert set(counts) <= set(range(n_tokens + 1))
    for share, count in zip(load.shares, counts, strict=False):
        assert abs(count - share * n_tokens * top_k) < 1 + 1e-6
    if not load.shares:
        assert list(counts) == sorted(counts, reverse=True)


@given(st.integers(1, 64), st.integers(1, 8))
def test_even_shapes_are_the_even_shares_of_a_number(n_tokens: int, top_k: int) -> None:
    """Zipf's law with 0 and equal shares differ by a token at most from one expert to another."""
    for text in ("zipf:0", ",".join(["3"] * EXPERTS)):
        load = parsed(text)
        assert isinstance(load, Loads)
        counts = load.counts(n_tokens * EXPERTS, top_k, EXPERTS)
        assert set(counts) == {n_tokens * top_k}


def test_choices_are_numbers_that_scripts_can_count() -> None:
    """Of all tokens, every expert is chosen as often as it should be, and by each of them once at most."""
    stated = Stated("zipf:1")
    assert stated.routing is not None
    router = type("TopKRouter", (torch.nn.Module,), {})()
    stated.choices.inside = lambda: router
    with torch._subclasses.fake_tensor.FakeTensorMode():
        scores = torch.empty(TOKENS, EXPERTS)
        out = scores.topk(TOP_K, -1)
    stated.note("aten.topk", (scores, TOP_K), tuple(out))
    chosen = stated.numbers.of(out[1])
    assert chosen is not None
    load = parsed("zipf:1")
    assert isinstance(load, Loads)
    assert tuple(chosen.view(-1).bincount(minlength=EXPERTS).tolist()) == load.counts(TOKENS, TOP_K, EXPERTS)
    assert all(len(set(row)) == TOP_K for row in chosen.tolist())


@pytest.mark.parametrize(
    ("load", "message"),
    [
        ("nan", "nan is not a finite number"),
        ("0.5", "from 1, which is even"),
        ("zipf:-1", "an exponent from 0"),
        ("zipf:x", "'x' is not a number"),
        ("0,0,0", "add up to more than 0"),
        ("1,-1,2", "shares from 0"),
        ("1,nan", "nan is not a finite number"),
        ("1,inf", "inf is not a finite number"),
        ("even", "'even' is not a number"),
    ],
)
def test_what_is_no_load_is_refused_in_a_line(load: str, message: str) -> None:
    """Before anything is run."""
    with pytest.raises(RehearsalError, match=message) as error:
        parsed(load)
    assert "\n" not in str(error.value)


def test_a_share_that_no_router_can_give_is_refused() -> None:
    """A token that chooses two experts cannot choose one of them twice; by Zipf's law others get the rest."""
    listed, law = parsed("6,1,1,1"), parsed("zipf:9")
    assert isinstance(listed, Loads)
    assert isinstance(law, Loads)
    with pytest.raises(RehearsalError, match=r"66\.7 % .* at most 50\.0 % can"):
        listed.counts(10, 2, 4)
    assert law.counts(1000, 2, 4)[0] == 1000


def test_shares_of_a_file(tmp_path: Path) -> None:
    """One number after another, with commas, spaces, lines or brackets between them."""
    file = tmp_path / "shares.json"
    file.write_text("[1, 2,\n 1]")
    load = parsed(str(file))
    assert isinstance(load, Loads)
    assert load.shares == (0.25, 0.5, 0.25)


def test_ranks_with_other_experts_are_classes_of_their_own() -> None:
    """Two stages of four ranks, in each of which two hold all experts: four classes, which stand for all."""
    groups = [Group(id=1, axis="pp", ranks=(0, 4)), Group(id=2, axis="ep", ranks=(0, 1))]
    classes = Classes(8, groups, 0, [(0, 1)])
    assert classes.members == (0, 1, 4, 5)
    assert classes.representatives(classes.members) == [0, 1, 0, 1, 4, 5, 4, 5]
    assert Classes(8, groups, 0).members == (0, 4)


def test_a_rehearsal_has_the_splits_of_a_run_on_gloo_whose_routers_choose_so(
    tmp_path: Path, ranks: Any, rehearsed_shares: Splits
) -> None:
    """What i sends to j is what j receives from i; all tokens arrive; ranks are as full as their experts."""
    rehearsed = rehearsed_shares
    real = tmp_path / "real"
    real.mkdir()
    done = ranks.run([sys.executable, str(SCRIPT), SHARES, str(real)], ranks.env(), N_RANKS, fresh=real)
    assert done.status == (0,) * N_RANKS, done.errors
    assert rehearsed == _splits(real)
    shape = parsed(SHARES)
    assert isinstance(shape, Loads)
    counts = shape.counts(TOKENS, TOP_K, EXPERTS)
    for exchange in range(len(rehearsed[0])):
        here = [rank[exchange] for rank in rehearsed]
        for i, j in ((i, j) for i in range(N_RANKS) for j in range(N_RANKS)):
            assert here[i][0][j] == here[j][1][i]
        assert sum(sum(received) for _, received, _ in here) == N_RANKS * TOKENS * TOP_K
        assert [rows for _, _, experts in here for rows in experts] == [N_RANKS * n for n in counts]


def test_lists_of_tensors_are_exchanged_as_one_with_those_splits(
    rehearsed_folder: Path, rehearsed_shares: Splits, loaded: Loaded
) -> None:
    """The same rows, and the same kind, bytes, types and splits of all that ranks send each other.

    Gloo takes no lists of unlike tensors, so that what they are held against is one tensor with splits.
    """
    ends = (0, N_RANKS - 1)
    by_lists = _rehearsed(SHARES, rehearsed_folder / "lists", loaded, ends, ("lists",))
    assert by_lists == [rehearsed_shares[rank] for rank in ends]
    for rank in ends:
        listed, split = (_messages(rehearsed_folder / way / "run", rank) for way in ("lists", ""))
        assert listed == split
        assert any(sent for *_, sent, _ in listed)


def test_an_even_shape_is_what_a_number_of_one_says(tmp_path: Path, loaded: Loaded) -> None:
    """The same rows sent, received and for each expert."""
    even, one = (_rehearsed(load, tmp_path / str(load), loaded, (3,)) for load in ("zipf:0", 1.0))
    assert even == one


def test_shares_for_another_number_of_experts_are_refused(tmp_path: Path, loaded: Loaded) -> None:
    """The script chooses among eight."""
    with pytest.raises(RehearsalError, match=r"--expert-load 1,2,3: .* no choice among 3 experts"):
        _rehearsed("1,2,3", tmp_path, loaded, (0,))


@pytest.fixture(scope="module")
def rehearsed_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a rehearsal of all ranks is written, which several tests look at."""
    return tmp_path_factory.mktemp("loads")


@pytest.fixture(scope="module")
def rehearsed_shares(rehearsed_folder: Path, loaded: Loaded) -> Splits:
    """Rehearse all ranks by shares; return their splits."""
    return _rehearsed(SHARES, rehearsed_folder, loaded)


def _messages(run: Path, rank: int) -> set[tuple[Any, ...]]:
    """Return what *rank* sends, but for who waits for it when."""
    rows = read_rank(rehearsal_folder(run), rank).messages.to_pylist()
    sizes = ("sent_bytes", "received_bytes")
    return {
        (row["kind"], row["size_bytes"], row["dtype"], *(tuple(row[name]) for name in sizes)) for row in rows
    }


def _rehearsed(
    load: str | float, folder: Path, loaded: Loaded, chosen: tuple[int, ...] = (), how: tuple[str, ...] = ()
) -> Splits:
    written = folder / "written"
    written.mkdir(parents=True)
    asked: Any = {"world_size": N_RANKS, "warmup": 0, "expert_load": load, "ranks": chosen}
    command = (str(SCRIPT), str(load), str(written), *how)
    found = rehearse(Asked(command=command, **asked), folder / "run", on=loaded)
    if not chosen:
        assert found.ranks == tuple(range(N_RANKS))  # none stands for another
    return _splits(written)


def _splits(folder: Path) -> Splits:
    return [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))]
