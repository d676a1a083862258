"""Writes the table of docs/frameworks.md: what each profile says of the conventions that time depends on.

python benchmarks/frameworks.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from accuracy import replaced

from foretrace.simulator.framework import Framework
from foretrace.simulator.profiles import framework_names, load_framework

PAGE: Final = Path(__file__).parents[1] / "docs" / "frameworks.md"
KEYS: Final = (
    *("overlap_grad_reduce", "overlap_param_gather", "reduces_in_16_bit", "fused_wgrad", "copies_gathered"),
    *("joins_gradients", "buckets_first_chunk_only", "pipeline_keeps_whole"),
    *("async_tp", "overlap_tp_backward", "p2p_scattered", "context", "attention", "eager", "rotary"),
    *("autocast", "stops_early", "host_work"),
    *("host_per_tensor_rank", "expert_dispatch", "overlap_shared_experts", "fused_experts"),
    *("loss_all_reduce", "selective", "fp8_recipe", "amax_ranks"),
)


def main() -> None:
    """Replace the table."""
    names = framework_names()
    head = ("convention", "default", *names)
    plain = Framework(name="", matches=())
    rows = [
        (f"`{key}`", _words(getattr(plain, key)), *(_own(name, key, plain) for name in names)) for key in KEYS
    ]
    lines = ["| " + " | ".join(row) + " |" for row in (head, tuple("---" for _ in head), *rows)]
    PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8"), "profiles", lines), encoding="utf-8")


def _own(name: str, key: str, plain: Framework) -> str:
    value = getattr(load_framework(name), key)
    return "" if value == getattr(plain, key) else _words(value)


def _words(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "-"
    return str(value)


if __name__ == "__main__":
    main()
