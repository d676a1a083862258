"""What is a choice of experts and what is not, and what is known of counts that differ."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.data.experts import Loads, parsed, share
from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.traces.rehearsal import read_rank, rehearsal_folder

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from foretrace.tracer.rehearse.data.experts import (  # noqa: E402
    EXCHANGE,
    Known,
    Routing,
)
from foretrace.tracer.rehearse.data.numbers import Numbers  # noqa: E402 - needs torch
from foretrace.tracer.rehearse.data.stated import Stated  # noqa: E402

TOKENS, EXPERTS, BINS = 64, 8, 4

EXCHANGED = f"""
import torch, torch.distributed as dist
from torch import nn

class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.expert = nn.Linear(8, {EXPERTS}), nn.Linear(8, 8)

    def forward(self, x):
        sent = torch.bincount(self.gate(x).topk(1)[1][:, 0] // {EXPERTS // 2}, minlength=2)
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent)
        rows = x.new_empty(sum(got.tolist()), 8)
        dist.all_to_all_single(rows, x, got.tolist(), sent.tolist())
        return self.expert(rows)

dist.init_process_group("nccl")
model = MoE().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.randn({TOKENS}, 8, device="cuda")).sum().backward()
    optimizer.step()
"""


class Router(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A module that is called after experts."""


def _routing(load: str) -> Routing:
    shape = parsed(load)
    assert isinstance(shape, Loads)
    told: dict[str, int] = {}
    return Routing(shape, Numbers(), lambda sentence: told.update({sentence: 1}), told)


def _chosen(routing: Routing, rows: int, columns: int, top_k: int, module: Any) -> bool:
    """Return whether *top_k* of *columns* for each of *rows* is a choice of experts."""
    with torch._subclasses.fake_tensor.FakeTensorMode():
        scores = torch.empty(rows, columns)
        places = scores.topk(top_k, -1)[1]
    return routing.choose(scores, places, top_k, "moe.py:1", module)


@given(st.floats(0, 2), st.integers(1, 200), st.integers(2, 6))
def test_first_choices_are_spread_as_all_are(exponent: float, n_tokens: int, top_k: int) -> None:
    """Also those that a router keeps of more than it uses: a column has its share, but for two tokens."""
    load = parsed(f"zipf:{exponent}")
    assert isinstance(load, Loads)
    counts = load.counts(n_tokens, top_k, EXPERTS)
    made = Routing._made(counts, n_tokens, top_k, (n_tokens, top_k))
    assert made.view(-1).bincount(minlength=EXPERTS).tolist() == list(counts)
    assert all(len(set(row)) == top_k for row in made.tolist())
    for column in made.t():
        for expert, n in enumerate(column.bincount(minlength=EXPERTS).tolist()):
            assert abs(n - counts[expert] / top_k) <= 2


def test_groups_of_experts_are_not_told_as_experts() -> None:
    """A router that chooses groups first, and experts of them then, has chosen experts once."""
    routing, router = _routing("zipf:0.5"), Router()
    assert _chosen(routing, TOKENS, EXPERTS // 2, 2, router)  # nobody knows better yet
    assert _chosen(routing, TOKENS, EXPERTS, 2, router)
    assert not _chosen(routing, TOKENS, EXPERTS // 2, 2, router)
    assert [sentence.partition(":1 ")[2][:22] for sentence in routing._told] == ["chooses 2 of 8 experts"]


def test_another_router_may_have_fewer_experts() -> None:
    """As in a pyramid of experts: what is known of one module is not of another of its class."""
    routing = _routing("zipf:0.5")
    assert _chosen(routing, TOKENS, EXPERTS, 2, Router())
    assert _chosen(routing, TOKENS, EXPERTS // 2, 2, Router())


@pytest.mark.parametrize(("rows", "columns"), [(EXPERTS, TOKENS), (TOKENS, 1 << 13), (1 << 14, 1 << 13)])
def test_experts_that_choose_tokens_and_words_are_no_choice_of_experts(rows: int, columns: int) -> None:
    """Few that choose among more are experts, for whom there is no load; more than 4,096 are words."""
    assert not _chosen(_routing("zipf:1"), rows, columns, 1, Router())


@pytest.mark.parametrize("together", [torch.stack, torch.cat])
def test_counts_of_two_means_stay_two_where_they_are_put_together(together: Any) -> None:
    """What is sent is even, what is received half as much again, also if both are read out of one tensor."""
    stated = Stated(1.5)
    with torch._subclasses.fake_tensor.FakeTensorMode():
        sent, received = torch.empty(BINS, dtype=torch.int64), torch.empty(BINS, dtype=torch.int64)
        chosen = torch.empty(TOKENS)
        stated._set(chosen, Known(n_values=BINS))
        stated.note("aten.bincount", (chosen,), sent)
        stated.note(EXCHANGE, (sent,), received)
        both = together([sent, received])
        stated.note(f"aten.{together.__name__}", ([sent, received],), both)
        copied = both.clone()
        stated.note("aten.clone", (both,), copied)
        found = [stated.scalar(one) for one in copied.view(-1)]
    even = TOKENS // BINS
    assert found == [even] * BINS + [share(1.5 * even, at) for at in range(BINS)]


def test_counts_that_experts_have_exchanged_are_even_unless_said_otherwise(tmp_path: Path) -> None:
    """As with ``--expert-load zipf:0``: each rank sends half of its tokens to either."""
    script = tmp_path / "train.py"
    script.write_text(EXCHANGED)
    rehearse(Asked(command=(str(script),), world_size=2, ranks=(0,)), tmp_path / "run")
    works = read_rank(rehearsal_folder(tmp_path / "run"), 0).works.to_pylist()
    assert any((one["m"], one["n"], one["k"]) == (TOKENS, 8, 8) for one in works)


@pytest.mark.parametrize(("name", "args"), [("topk", (1,)), ("argmax", (-1,)), ("multinomial", (1,))])
def test_of_one_column_the_first_is_chosen(name: str, args: tuple[int, ...]) -> None:
    """There is no other, and it was told as the second."""
    stated = Stated()
    with torch._subclasses.fake_tensor.FakeTensorMode():
        scores, places = torch.empty(1, 1), torch.empty(1, dtype=torch.int64)
        stated.note(f"aten.{name}", (scores, *args), [torch.empty(1), places] if name == "topk" else places)
        assert stated.scalar(places) == 0


@pytest.mark.parametrize("n_kept", range(1, EXPERTS + 1))
def test_as_many_as_a_router_keeps_of_what_it_sorts_are_even(n_kept: int) -> None:
    """Whichever columns of an order are taken, by ``zipf:0``; no other shape is one of an order."""
    places = {}
    for load in ("zipf:0", "zipf:1"):
        stated = Stated(load)
        stated.choices.inside = Router
        with torch._subclasses.fake_tensor.FakeTensorMode():
            scores = torch.empty(TOKENS, EXPERTS)
            out = scores.sort(-1)
        stated.note("aten.sort", (scores, -1), tuple(out))
        places[load] = stated.numbers.of(out[1])
    even = places["zipf:0"]
    assert even is not None
    assert places["zipf:1"] is None
    assert (
        even[:, :n_kept].reshape(-1).bincount(minlength=EXPERTS).tolist()
        == [TOKENS // EXPERTS * n_kept] * EXPERTS
    )
