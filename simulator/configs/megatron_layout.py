"""Megatron-LM's ``--pipeline-model-parallel-layout``: which layers every stage has, in one word.

Stages are divided by ``|``, in the order of the model; ``E`` is the embedding, ``t`` a layer, ``m`` a
multi-token prediction, ``L`` the loss; ``t*3`` and ``(tt|)*29`` repeat, commas say nothing. As in
megatron/core/transformer/pipeline_parallel_layer_layout.py of NVIDIA/Megatron-LM, whose documentation has
``Et*3|(tt|)*29,m|L``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from foretrace.door import counted
from foretrace.simulator.configs.rules import Leave

MOST_LETTERS: Final = 1 << 16
"""Layers and stages of a word, at most: before it is written out."""


def stage_counts(value: Any) -> Any:
    """Return the layers of every stage.

    >>> stage_counts("Et*3|(tt|)*2,t|tL")
    (3, 2, 2, 1, 1)

    Raises:
        ValueError: it is no such word.
    """
    plain = re.sub(r"[\s,'\"]", "", str(value))
    for repeated in (r"\(([^()]*)\)\*(\d+)", r"([EtmL])\*(\d+)"):
        plain = _written_out(repeated, plain)
    if not re.fullmatch(r"E?t+(\|[tm]+)*(\|[tm]*)?L?", plain):
        raise ValueError(
            "stages of layers such as 'Et*3|(tt|)*29,m|L', the embedding first and the loss last"
        )
    counts = tuple(stage.count("t") for stage in plain.split("|"))
    return counts if all(counts) else Leave("a stage without layers is not simulated")


def _written_out(repeated: str, plain: str) -> str:
    """Return *plain* with what the pattern *repeated* finds, and how often it is there, written out."""
    n_letters = len(plain)

    def times(found: re.Match[str]) -> str:
        nonlocal n_letters
        n = counted(found[2])
        n_letters += len(found[1]) * n
        if n < 0 or n_letters > MOST_LETTERS:
            raise ValueError(f"a word of at most {MOST_LETTERS:,} letters, all that is repeated counted")
        return found[1] * n

    return re.sub(repeated, times, plain)


def layout_word(counts: Sequence[int]) -> str:
    """Return the word for stages with so many layers each.

    >>> layout_word((3, 4, 4, 3))
    'Et*3|t*4|t*4|t*3,L'
    """
    return f"E{'|'.join(f't*{count}' for count in counts)},L"
