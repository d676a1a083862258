"""What libraries of trainings do on their way: recompute under autocast, multiply by experts, save."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.data.checkpoints import SAID
from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.traces.rehearsal import Rehearsal, read_rank, rehearsal_folder

pytest.importorskip("torch")

SCRIPT = Path(__file__).parent / "libraries.py"

WIDTH, EXPERTS, ROWS = 64, 4, 128
EXPERT_ROWS = (5, 0, 65, 58)


def _rehearsed(folder: Path, *arguments: str) -> tuple[Rehearsal, list[dict[str, Any]]]:
    """Return a rehearsal and the works of its step, with what else its rank did."""
    found = rehearse(Asked(command=(str(SCRIPT), *arguments), world_size=1), folder / "run")
    tables = read_rank(rehearsal_folder(folder / "run"), 0)
    works, places = tables.works.to_pylist(), tables.places.to_pylist()
    return found, [
        {"what": event["what"], "kind_of_place": places[event["place"]]["kind"]}
        | (works[event["item"]] if event["what"] == 0 else {})
        for event in tables.events.to_pylist()
    ]


def test_what_is_computed_again_is_what_was_computed(tmp_path: Path) -> None:
    """Under autocast a norm is in fp32 on a GPU, also where a backward computes it again."""
    _, works = _rehearsed(tmp_path, "recomputed")
    norms = [work for work in works if work.get("name") == "aten.native_layer_norm"]
    assert [norm["kind_of_place"] for norm in norms] == ["forward"] * 2 + ["recompute"] * 2
    assert {norm["dtype"] for norm in norms} == {"fp32"}


def test_what_is_computed_again_inside_of_a_module_is_recomputation(tmp_path: Path) -> None:
    """It is no work of the model; what nobody needs of it is not computed again."""
    _, works = _rehearsed(tmp_path, "inside")
    norms = [work["kind_of_place"] for work in works if work.get("name") == "aten.native_layer_norm"]
    assert norms == ["forward"] * 2 + ["recompute"] * 2
    products = Counter(work["kind_of_place"] for work in works if work.get("kind") == "gemm")
    assert products == {
        "forward": 3,
        "recompute": 1,
        "backward": 5,
    }  # one stops early, one has no input gradient


def test_dropout_is_the_kernel_of_a_gpu(tmp_path: Path) -> None:
    """One forward and one backward; both read 16-bit values and write them, and the mask is of bytes."""
    _, works = _rehearsed(tmp_path, "dropped")
    found = [(one["name"], one["bytes_moved"]) for one in works if "drop" in one.get("name", "")]
    moved = ROWS * WIDTH * (2 + 2 + 1)
    assert found == [("aten.native_dropout", moved), ("aten.native_dropout_backward", moved)]
    assert not [one for one in works if "bernoulli" in one.get("name", "")]


def test_products_of_experts_keep_their_type_and_ask_where_each_begins(tmp_path: Path) -> None:
    """One kernel in bf16; in fp32 a kernel for each expert, and the host waits for where its rows are."""
    _, works = _rehearsed(tmp_path, "experts")
    products = [work for work in works if work.get("name") == "aten._grouped_mm"]
    assert {work["flops"] for work in products} == {2 * ROWS * WIDTH * WIDTH}
    assert {tuple(work["rows"]) for work in products} == {EXPERT_ROWS}
    assert sorted(work["along"] for work in products) == ["k"] * 2 + ["m"] * 3
    for work in products:
        weights = (
            3 if work["along"] == "m" else EXPERTS
        )  # nobody reads those of the second; its gradient is 0
        n_elements = 2 * ROWS * WIDTH + weights * WIDTH * WIDTH
        assert work["bytes_moved"] == n_elements * (2 if work["dtype"] == "bf16" else 4)
    kernels = [(work["dtype"], work["kernels"]) for work in products]
    assert sorted(kernels) == [("bf16", 1)] * 3 + [("fp32", EXPERTS)] * 2  # the input has no gradient
    assert sum(work["what"] == 5 for work in works) == 3  # the first for the copy of the ends to the device


def test_a_library_that_writes_what_addresses_point_to_writes_no_numbers(tmp_path: Path) -> None:
    """Safetensors would find nothing there, and end the process."""
    found, _ = _rehearsed(tmp_path, "saved", str(tmp_path))
    assert SAID in found.notes


def test_a_library_that_asks_whether_a_tensor_is_fake_is_told_no(tmp_path: Path) -> None:
    """Transformers would take another way than in a real run."""
    _, works = _rehearsed(tmp_path, "asking", str(tmp_path))
    assert works


LLAMA = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

shape = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, vocab_size=99)
model = LlamaForCausalLM(LlamaConfig(**shape, num_key_value_heads=1)).to("cuda", torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for given in ("nothing", "nothing", "whole", "padded"):
    tokens = torch.randint(0, 99, (2, 32), device="cuda")
    mask = torch.ones_like(tokens)
    if given == "padded":
        mask[0, 16:] = 0
    mask = None if given == "nothing" else mask
    model(input_ids=tokens, labels=tokens, attention_mask=mask).loss.backward()
    optimizer.step()
"""


def test_a_mask_is_built_where_something_is_padded_only(tmp_path: Path) -> None:
    """Of 32 x 32 pairs half are computed, unless the second half of a row is padding: then all."""
    pytest.importorskip("transformers")
    (tmp_path / "llama.py").write_text(LLAMA)
    asked = Asked(command=(str(tmp_path / "llama.py"),), world_size=1, steps=3)
    rehearse(asked, tmp_path / "run")
    tables = read_rank(rehearsal_folder(tmp_path / "run"), 0)
    works, places = tables.works.to_pylist(), tables.places.to_pylist()
    found = [
        (places[event["place"]]["step"], works[event["item"]]["flops"])
        for event in tables.events.to_pylist()
        if event["what"] == 0 and works[event["item"]]["kind"] == "attention"
    ]
    whole = 2 * 2 * 32 * 32 * 2 * (32 + 32)  # of both rows and both heads
    assert found == [
        (step, flops) for step, flops in ((1, whole // 2), (2, whole // 2), (3, whole)) for _ in "12"
    ]
