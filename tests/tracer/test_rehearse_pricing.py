"""Calls on the same shapes whose plain numbers differ are different work."""

from pathlib import Path

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.tracer.rehearse.tape.works import BACKWARD_PRODUCTS
from foretrace.traces.rehearsal import read_rank, rehearsal_folder

pytest.importorskip("torch")

LENGTHS, HEADS, WIDTH = (8, 16, 40), 4, 16
TOKENS = sum(LENGTHS)

SCRIPT = f"""
import torch
from torch.nn.functional import scaled_dot_product_attention as attention

layer = torch.nn.Linear({HEADS * WIDTH}, {HEADS * WIDTH}, bias=False).cuda()
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
ends = torch.tensor([0, 8, 24, {TOKENS}]).cuda()
for _ in range(2):
    rows = layer(torch.randn({TOKENS}, {HEADS * WIDTH}).cuda()).reshape({TOKENS}, {HEADS}, {WIDTH})
    q = torch.nested.nested_tensor_from_jagged(rows, ends).transpose(1, 2)
    first, second = attention(q, q, q, is_causal=True), attention(q, q, q)
    (first.values().sum() + second.values().sum()).backward()
    optimizer.step()
"""


def test_work_depends_on_plain_numbers_of_a_call(tmp_path: Path) -> None:
    """A causal mask (``custom_mask_type``) halves the scores."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    rehearse(Asked(command=(str(script),), world_size=1), tmp_path / "run")
    tables = read_rank(rehearsal_folder(tmp_path / "run"), 0)
    items = tables.works.to_pylist()
    works = [items[event["item"]] for event in tables.events.to_pylist() if event["what"] == 0]
    scores = sum(n * n for n in LENGTHS)
    forward = [2 * HEADS * n * 2 * WIDTH for n in (scores // 2, scores)]
    assert [one["flops"] for one in works if one["kind"] == "attention"] == forward
    backward = [flops * BACKWARD_PRODUCTS // 2 for flops in reversed(forward)]
    assert [one["flops"] for one in works if one["kind"] == "attention_backward"] == backward
