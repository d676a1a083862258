"""Fused attention as work, by hand: scores of every query with every key, operands and results moved once."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis.strategies import booleans, integers, tuples

from foretrace.tracer.rehearse.tape.calls import Call
from foretrace.tracer.rehearse.tape.works import VARLEN, attention

torch = pytest.importorskip("torch")

SIZE = integers(1, 64)
BF16_BYTES = 2


def tensor(*shape: int) -> Any:
    """Return a tensor without memory."""
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


@given(SIZE, tuples(SIZE, SIZE), tuples(SIZE, SIZE), booleans())
def test_work_is_that_of_all_scores(
    heads: int, lengths: tuple[int, int], widths: tuple[int, int], causal: bool
) -> None:
    """Values may be wider or narrower. A backward has five products for the two of a forward, and moves twice
    as much; a causal mask leaves half of the scores, whichever argument says so.
    """
    (queries, keys), (width, narrow) = lengths, widths
    q, k, v = tensor(2, heads, queries, width), tensor(2, heads, keys, width), tensor(2, heads, keys, narrow)
    n_scores = 2 * heads * (queries * keys // 2 if causal else queries * keys)
    flops = 2 * (width + narrow) * n_scores
    moved = BF16_BYTES * 2 * heads * (queries + keys) * (width + narrow)
    for word in ("is_causal", "custom_mask_type"):
        named = {word: causal}
        forward = attention(Call("aten._scaled_dot_product_flash_attention", (q, k, v), named, q))
        grads = Call("aten._scaled_dot_product_flash_attention_backward", (v, q, k, v), named, (q, k, v))
        backward = attention(grads)
        assert (forward.flops, forward.bytes_moved, forward.causal) == (flops, moved, causal)
        assert (backward.flops, backward.bytes_moved) == (flops * 5 // 2, 2 * moved)
        assert (backward.kind, backward.k, backward.v_dim) == ("attention_backward", width, narrow)


@pytest.mark.parametrize("name", [name for name in VARLEN if "forward" in name])
def test_operators_for_many_lengths_are_told_of_one(name: str) -> None:
    """Without ends all sequences are of one length; with ends that nobody knows they share tokens evenly."""
    q = tensor(3, 16, 4, 8)
    together = attention(Call(name, (q, q, q), {}, q))
    assert together.flops == 3 * 4 * 16 * 16 * 2 * (8 + 8)
    flat, ends = tensor(48, 4, 8), torch.empty(4, dtype=torch.int32, device="meta")
    named = {VARLEN[name][0]: ends}
    for known in ((), (0, 16)):
        assert attention(Call(name, (flat, flat, flat), named, flat, known)).flops == together.flops
