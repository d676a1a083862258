"""Megatron-LM's ``--pipeline-model-parallel-layout``: which layers every stage has, in one word.

Stages are divided by ``|``, in the order of the model; ``E`` is the embedding, ``t`` a layer, ``m`` a
multi-token prediction, ``L`` the loss; ``t*3`` and ``(tt|)*29`` repeat, commas say nothing. As in
megatron/core/transformer/pipeline_parallel_layer_layout.py of NVIDIA/Megatron-LM, whose documentation has
``Et*3|(tt|)*29,m|L``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from foretrace.simulator.configs.rules import Leave


def stage_counts(value: Any) -> Any:
    """Return the layers of every stage.

    >>> stage_counts("Et*3|(tt|)*2,t|tL")
    (3, 2, 2, 1, 1)

    Raises:
        ValueError: it is no such word.
    """
    plain = re.sub(r"[\s,'\"]", "", str(value))
    plain = re.sub(r"\(([^()]*)\)\*(\d+)", lambda found: found[1] * int(found[2]), plain)
    plain = re.sub(r"([EtmL])\*(\d+)", lambda found: found[1] * int(found[2]), plain)
    if not re.fullmatch(r"E?t+(\|[tm]+)*(\|[tm]*)?L?", plain):
        raise ValueError(
            "stages of layers such as 'Et*3|(tt|)*29,m|L', the embedding first and the loss last"
        )
    counts = tuple(stage.count("t") for stage in plain.split("|"))
    return counts if all(counts) else Leave("a stage without layers is not simulated")


def layout_word(counts: Sequence[int]) -> str:
    """Return the word for stages with so many layers each.

    >>> layout_word((3, 4, 4, 3))
    'Et*3|t*4|t*4|t*3,L'
    """
    return f"E{'|'.join(f't*{count}' for count in counts)},L"
