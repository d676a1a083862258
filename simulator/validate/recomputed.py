"""How tables of training runs say what is computed again in backward, as settings of a job."""

from __future__ import annotations

import re
from typing import Any, Final

from foretrace.simulator.errors import TableError
from foretrace.simulator.job import RECOMPUTE_MODULES
from foretrace.simulator.validate.spelling import NO, YES

PER_STAGE: Final = re.compile(r"(\d+) layers? ?(?:/|per|a) ?stage|\bblock\D{0,12}(\d+)|(\d+) block")
"""So many layers of each stage, the method that Megatron-LM calls ``block``."""

EVERY: Final = re.compile(r"every (\d+)(?:nd|rd|th|st)? ?(?:layer|block)?|\b1 ?(?:/|of|in) ?(\d+)\b")
OTHER: Final = re.compile(r"every (?:other|second)(?: layer| block)?\b(?! \w)|alternate")
"""One layer out of so many."""

MODULES: Final = (
    ("core_attn", r"core|attention|attn"),
    ("layernorm", r"norm"),
    ("mla_up_proj", r"mla|up[ _]proj"),
    ("mlp", r"\bmlp\b|\bffn\b"),
    ("moe_act", r"moe[ _]act"),
    ("moe", r"\bmoe\b(?![ _]act)"),
    ("shared_experts", r"shared"),
)
"""Parts of a layer, of ``simulator.job.RECOMPUTE_MODULES``, by how people write them."""

JAX_POLICIES: Final = (
    (r"nothing_saveable|save_(?:qkv|out)_proj|qkv_proj_offloaded", {"recompute": "full"}),
    (r"everything_saveable", {"recompute": "none"}),
    (r"with_context_except_mlp", {"recompute": "selective", "recompute_modules": "layernorm,mlp"}),
    (r"save_dot\w*_except_mlp", {"recompute": "selective", "recompute_modules": "core_attn,layernorm,mlp"}),
    (r"minimal_(?:flash|with_context)", {"recompute": "selective", "recompute_modules": "layernorm"}),
    (
        r"minimal|save_dot|dots_saveable|checkpoint_dots|dots_with_no_batch_dims",
        {"recompute": "selective", "recompute_modules": "core_attn,layernorm"},
    ),
)
"""Policies of JAX, which name what is kept, and what is then computed again; the first that is found counts.

``minimal`` keeps results of products whose operands have no batch dimension: all but attention's own. Where
only a product or two of a layer are kept, all of it is nearest. Reference: AI-Hypercomputer/maxtext
``layers/decoders.py``, ``get_remat_policy``.
"""

ALL: Final = re.compile(
    r"full|all\b|uniform|whole|every ?layer|per[ _-]?layer"
    r"|(?:activation|gradient)[ _-]?(?:check ?point|recomp)"
)
SOME: Final = re.compile(r"selective|\bsac\b|(?:per|op)[ _-]?(?:op|level)|^ops?$")
NONE: Final = re.compile(r"none\b.*|no (?:recomp|ac|check|remat).*|without.*")


def recomputed(text: str, notes: str = "") -> dict[str, Any]:
    """Return what *text* says about recomputation: how, and of which layers; *notes* may list modules.

    Raises:
        TableError: it names nothing that is simulated.

    >>> recomputed("partial-full (5 layers/stage)"), recomputed("selective (every 2nd layer)")
    ({'recompute': 'full', 'recompute_layers': 5}, {'recompute': 'full', 'recompute_every': 2})
    >>> recomputed("Gradient checkpointing"), recomputed("off"), recomputed("moe_act")["recompute_modules"]
    ({'recompute': 'full'}, {'recompute': 'none'}, 'moe_act')
    """
    word = text.lower().strip()
    if not word or word in NO or NONE.fullmatch(word):
        return {"recompute": "none"}
    for form, settings in JAX_POLICIES:
        if re.search(form, word):
            return dict(settings)
    found = _of_layers(word) or _of_modules(word, notes)
    if not found:
        raise TableError(f"recompute {text!r}: one of none, selective, full, or modules of a layer")
    return found


def _of_layers(word: str) -> dict[str, Any]:
    """Return the settings if *word* counts layers; nothing if it does not."""
    if found := PER_STAGE.search(word):
        return {"recompute": "full", "recompute_layers": int(next(filter(None, found.groups())))}
    if (found := EVERY.search(word)) or OTHER.search(word):
        every = int(found[1] or found[2]) if found else 2
        return {"recompute": "full", "recompute_every": every} if every > 1 else {"recompute": "full"}
    return {}


def _of_modules(word: str, notes: str) -> dict[str, Any]:
    """Return the settings if *word* says how much of every layer is meant; nothing if it does not."""
    named = ",".join(name for name, form in MODULES if re.search(form, word))
    if SOME.search(word):
        modules = _listed(notes) or named
        return {"recompute": "selective", **({"recompute_modules": modules} if modules else {})}
    if word in YES or ALL.search(word):
        return {"recompute": "full"}
    return {"recompute": "selective", "recompute_modules": named} if named else {}


def _listed(notes: str) -> str:
    """Return the modules that *notes*, which quote a recipe, list; commas between."""
    found = re.search(r'"recompute_modules": \[([^\]]*)\]', notes)
    return ",".join(name for name in RECOMPUTE_MODULES if f'"{name}"' in found[1]) if found else ""
