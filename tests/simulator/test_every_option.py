"""Options crossed: whatever is asked for runs, or is refused in one line that says why."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Final

import pytest
from tests.simulator.crossed_options import ASKED, CONVENTIONS, NEEDS, OPTIONS, outcome

from foretrace.simulator.framework import OVERRIDABLE, Framework, framework_names, load_framework

SIZES: Mapping[str, tuple[Any, ...]] = {
    "virtual_stages": (1, 2, 3, 4),
    "layers_per_stage": ((1, 3), (0, 4), (2, 2), (1, 1, 1, 1), (1, 1, 2)),
    "document_len": (1, 64, 512, 600),
    "recompute_layers": (1, 3),
    "recompute_modules": ("core_attn", "mlp,moe", "x"),
    "global_batch": (1, 16, 48, 64),
    "seq_len": (1, 96, 256, 2048),
    "gpus": (1, 8, 12, 24, 128),
    "placement": ("spread", "rail"),
    "ranks_per_node": (1, 6, 9),
    "steps": (2,),
    "nccl_algo": ("ring", "tree", "nvls"),
    "overlap_pairs": (True, False),
    "stragglers": ("3:1.5", "99:2"),
    "deallocate_outputs": (False,),
}
"""Further settings with values that often do not go together."""

PART = 100
"""Products of settings that one test tries; 2,000 in all. ``test_every_pair.py`` tries every pair."""


AGAIN: Final = 10
"""Of so many products one is predicted twice, with its timeline and without."""

IN_EVERY_READING: Final = 50
"""Of so many products one is predicted by the conventions of every framework, too."""


def crossed(seed: int) -> dict[str, Any]:
    """Return a job of which a few to a third of all options are not what they are by default."""
    draw = random.Random(seed)
    share = draw.choice((1 / 30, 1 / 10, 1 / 5, 1 / 3))
    found = {
        name: draw.choice(values[1:])
        for name, values in OPTIONS.items()
        if draw.random() < share and len(values) > 1
    }
    found |= {name: draw.choice(values) for name, values in SIZES.items() if draw.random() < share / 2}
    names = draw.sample(sorted(CONVENTIONS), draw.randrange(4))
    found["conventions"] = {name: draw.choice(CONVENTIONS[name]) for name in names}
    if found.get("checkpoint_every"):
        found["checkpoint_bytes_per_s"] = 1e9
    return found


@pytest.mark.parametrize("first", range(0, 2000, PART))
def test_what_is_asked_for_runs_or_is_refused_in_one_line(first: int) -> None:
    """No product of settings ends in a traceback, and a good part of them runs."""
    refused = [
        outcome(crossed(seed), covers_unsaid=seed % IN_EVERY_READING == 0, again=seed % AGAIN == 1)
        for seed in range(first, first + PART)
    ]
    assert not [words for words in refused if "\n" in words or words == "refused without a word"]
    assert refused.count("") > PART / 5


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_every_option_runs_somewhere(name: str) -> None:
    """Alone, with what it needs beside it."""
    given = NEEDS.get(name, {})
    found = {
        value: outcome({**given, **ASKED.get((name, value), {}), name: value}, again=False)
        for value in OPTIONS[name]
    }
    assert found == dict.fromkeys(OPTIONS[name], "")


def test_a_stage_without_weights_to_train_gives_back_what_it_kept() -> None:
    """Beside adapters the head is frozen: on a stage of its own its backward has one half alone."""
    given = {"framework": "nanotron", "lora_rank": 8, "pp": 2, "schedule": "dualpipe-v", "fp8": True}
    assert outcome(given) == ""


@pytest.mark.parametrize("name", OVERRIDABLE)
def test_every_convention_can_be_set_alone_to_what_it_is(name: str) -> None:
    """Lists of words as a file has them, too."""
    value = getattr(load_framework("megatron"), name)
    given = {"conventions": {name: list(value) if isinstance(value, tuple) else value}}
    assert outcome(given, again=False) == ""


@pytest.mark.parametrize("name", framework_names())
def test_a_profile_says_where_it_read_what_it_says_otherwise(name: str) -> None:
    profile, plain = load_framework(name), Framework(name="", matches=())
    other = {key for key in OVERRIDABLE if getattr(profile, key) != getattr(plain, key)}
    assert other <= set(profile.sources)
