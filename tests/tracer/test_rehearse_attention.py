"""Attention of a rehearsal is fused where that of a GPU is, and is cut over ranks as there."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.traces.rehearsal import read_rank, rehearsal_folder

pytest.importorskip("torch")

SCRIPT = Path(__file__).parent / "attending.py"

BATCH, HEADS, TOKENS, WIDTH = 2, 4, 64, 32
SEEN = BATCH * HEADS * TOKENS * TOKENS
"""Pairs of a query and a key, of all heads; under a causal mask half of them count."""


def _rehearsed(what: str, folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return what the last step of rank 0 of 4 computes and sends."""
    rehearse(Asked(command=(str(SCRIPT), what), world_size=4, ranks=(0,)), folder / "run")
    tables = read_rank(rehearsal_folder(folder / "run"), 0)
    works, messages = tables.works.to_pylist(), tables.messages.to_pylist()
    events = tables.events.to_pylist()
    return (
        [works[event["item"]] for event in events if event["what"] == 0],
        [messages[event["item"]] for event in events if event["what"] == 1],
    )


def test_what_a_gpu_fuses_keeps_no_scores(tmp_path: Path) -> None:
    """Narrower values, a bias that is trained, each fused kernel by name, heads cut by DTensor."""
    works, _ = _rehearsed("fused", tmp_path)
    assert not {work["name"] for work in works} & {"aten.bmm", "aten._softmax"}
    forward = sorted(work["flops"] for work in works if work["kind"] == "attention")
    whole = SEEN // 2 * 2 * (2 * WIDTH)
    cut, narrow, biased = whole // 2, whole * 3 // 4, 2 * whole
    assert forward == sorted([whole, narrow, biased, whole, whole, cut])
    backward = [work["flops"] for work in works if work["kind"] == "attention_backward"]
    assert sorted(backward) == [flops * 5 // 2 for flops in forward]
    assert {work["dtype"] for work in works if "attention" in work["kind"]} == {"bf16"}


def test_scores_that_a_script_asks_for_are_computed(tmp_path: Path) -> None:
    """Forward two products of all pairs, backward four."""
    works, _ = _rehearsed("scores", tmp_path)
    assert not [work for work in works if "attention" in work["kind"]]
    products = [work["flops"] for work in works if work["name"] == "aten.bmm"]
    assert products == [SEEN * 2 * WIDTH] * 6


def test_heads_in_groups_are_fused_by_flash_alone(tmp_path: Path) -> None:
    """In fp32 they go over all scores: forward two products, backward four."""
    works, _ = _rehearsed("grouped", tmp_path)
    assert [work["kind"] for work in works if work["flops"] and "attention" in work["kind"]] == [
        "attention",
        "attention_backward",
    ]
    works, _ = _rehearsed("grouped_fp32", tmp_path / "fp32")
    assert not [work for work in works if "attention" in work["kind"]]
    assert [work["flops"] for work in works if work["name"] == "aten.bmm"] == [SEEN * 2 * WIDTH] * 6


def test_a_kernel_that_cannot_take_the_operands_is_not_replaced_by_another(tmp_path: Path) -> None:
    """Flash attention takes no fp32: a real run ends there, too."""
    with pytest.raises(
        RehearsalError, match=r"Chosen at attending.py:\d+: RuntimeError: No available kernel"
    ):
        _rehearsed("none", tmp_path)


def test_context_parallelism_of_torch_sends_what_its_ring_sends(tmp_path: Path) -> None:
    """Keys and values are gathered in forward and backward, their gradients go around in fp32.

    Balanced, each of four ranks has a quarter of the pairs that count, and of each pair of blocks the whole:
    a rank has 2 of 8 blocks of tokens.
    """
    works, messages = _rehearsed("context", tmp_path)
    sent = Counter((message["kind"], message["size_bytes"], message["dtype"]) for message in messages)
    local_elements = 2 * BATCH * HEADS * TOKENS // 4 * WIDTH  # keys and values
    assert sent["all_gather", 4 * local_elements * 2, "bf16"] == 2
    assert sent["all_to_all", local_elements * 4, "fp32"] == 4
    assert sum(sent.values()) == 6
    assert sum(work["flops"] for work in works if work["kind"] == "attention") == (
        SEEN // 2 * 2 * (2 * WIDTH) // 4
    )
