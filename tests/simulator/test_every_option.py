"""Options crossed: whatever is asked for runs, or is refused in one line that says why."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.simulator.crossed_options import ASKED, CONVENTIONS, NEEDS, OPTIONS, outcome

from foretrace.simulator.framework import Framework
from foretrace.simulator.profiles import OVERRIDABLE, framework_names, load_framework


def crossed(seed: int) -> dict[str, Any]:
    """Return a job in which about a third of all options are not what they are by default."""
    draw = random.Random(seed)
    found = {
        name: draw.choice(values[1:])
        for name, values in OPTIONS.items()
        if draw.random() < 1 / 3 and len(values) > 1
    }
    names = draw.sample(sorted(CONVENTIONS), 3)
    found["conventions"] = {name: draw.choice(CONVENTIONS[name]) for name in names}
    if found.get("checkpoint_every"):
        found["checkpoint_bytes_per_s"] = 1e9
    return found


@pytest.mark.parametrize("seed", range(40))
def test_what_is_asked_for_runs_or_is_refused_in_one_line(seed: int) -> None:
    refused = outcome(crossed(seed))
    assert "\n" not in refused
    assert refused != "refused without a word"


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_every_option_runs_somewhere(name: str) -> None:
    """Alone, with what it needs beside it."""
    given = NEEDS.get(name, {})
    found = {
        value: outcome({**given, **ASKED.get((name, value), {}), name: value}) for value in OPTIONS[name]
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
    assert outcome(given) == ""


@pytest.mark.parametrize("name", framework_names())
def test_a_profile_says_where_it_read_what_it_says_otherwise(name: str) -> None:
    profile, plain = load_framework(name), Framework(name="", matches=())
    other = {key for key in OVERRIDABLE if getattr(profile, key) != getattr(plain, key)}
    assert other <= set(profile.sources)
