"""Attention without a kernel, and modules without sizes, end in one line, however a script comes to it."""

from pathlib import Path

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.tracer.rehearse.words import NO_FLEX, NO_SIZE

pytest.importorskip("torch")

ASKS = """
import torch
import torch.distributed as dist
from torch.nn.attention.flex_attention import BlockMask, flex_attention

dist.init_process_group("nccl")


class Attention(torch.nn.Linear):
    def forward(self, x):
        q = super().forward(x).view(1, 1, 128, 16)
        ones = torch.ones(1, 1, 1, dtype=torch.int32, device="cuda")
        n_blocks, places = ones, torch.zeros_like(ones)[..., None]
        mask = BlockMask.from_kv_blocks(n_blocks, places, mask_mod=lambda b, h, i, j: i >= j)
        return {asked}


model = Attention(16, 16).cuda()
model(torch.randn(128, 16).cuda()).sum().backward()
"""


@pytest.mark.parametrize(
    "asked",
    [
        "flex_attention(q, q, q)",
        "flex_attention(q, q, q, block_mask=mask)",
        "torch.ops.higher_order.flex_attention(q, q, q, lambda s, *_: s, mask.as_tuple(), 1.0, {})",
    ],
)
def test_flex_attention_ends_in_the_line_that_says_what_to_put_in_its_place(
    tmp_path: Path, asked: str
) -> None:
    """The operator itself, as compilers and libraries call it, has words of its own in torch."""
    script = tmp_path / "train.py"
    script.write_text(ASKS.format(asked=asked))
    with pytest.raises(RehearsalError) as error:
        rehearse(Asked(command=(str(script),), world_size=2, ranks=(0,)), tmp_path / "run")
    assert str(error.value).endswith(NO_FLEX)
    assert "Attention at train.py:" in str(error.value)


def test_flash_attention_that_transformers_misses_is_named_with_its_stub(tmp_path: Path) -> None:
    """The words are those of transformers 4.57 and 5.23."""
    words = (
        "FlashAttention2 has been toggled on, but it cannot be used due to the following error: the package"
    )
    script = tmp_path / "train.py"
    script.write_text(f'raise ImportError("{words} is not there")')
    with pytest.raises(RehearsalError, match=r"train.py:1: FlashAttention 2 is built on GPUs only") as error:
        rehearse(Asked(command=(str(script),), world_size=2, ranks=(0,)), tmp_path / "run")
    stub = str(error.value).split("the stub ")[1].split(" ")[0]
    assert "flash_attention_2" in (Path(__file__).parents[2] / stub).read_text()


@pytest.mark.parametrize("placed", [".cuda()", ""])
def test_modules_without_sizes_end_in_the_line_that_says_to_tell_them(tmp_path: Path, placed: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"import torch\ntorch.nn.LazyLinear(8){placed}(torch.ones(2, 4))\n")
    with pytest.raises(RehearsalError) as error:
        rehearse(Asked(command=(str(script),), world_size=2, ranks=(0,)), tmp_path / "run")
    assert str(error.value).endswith(NO_SIZE)
