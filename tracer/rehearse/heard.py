"""Python objects that one rank tells others: one that is acted out hears what the other one has said."""

from __future__ import annotations

import io
import os
import pickle
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

PATIENCE_S: Final = 60.0
"""How long a rank waits for another one to say something, which is acted out beside it."""


def acts(folder: Path, rank: int) -> Path:
    """Return the file that is there once *rank* is acted out."""
    return folder / f"acts-{rank:05d}"


def outcome_of(folder: Path, rank: int) -> Path:
    """Return the file in which *rank* tells how it ended."""
    return folder / f"outcome-{rank:05d}.json"


def _words(objects: list[Any]) -> bytes:
    """Return *objects* in words, none if one cannot be kept: a tensor, which has no numbers here."""
    import torch

    class Plain(pickle.Pickler):
        """Refuses tensors."""

        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, torch.Tensor):
                raise pickle.PicklingError("a tensor")
            return NotImplemented

    words = io.BytesIO()
    try:
        Plain(words).dump(objects)
    except Exception:
        return b""
    return words.getvalue()


class Heard:
    """What ranks tell each other, by the order in which each of them speaks in a group.

    Args:
        folder: where ranks of this rehearsal leave what they say.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._n_said = folder, Counter[tuple[int, int]]()

    def say(self, source: int, members: Sequence[int], objects: list[Any]) -> None:
        """Leave *objects* that rank *source*, this one, tells *members*; what cannot be kept is not."""
        file = self._next(source, members)
        words = _words(objects)
        part = file.with_suffix(".part")
        part.write_bytes(words)
        os.rename(part, file)  # noqa: PTH104 - in one piece, for who waits for it

    def hear(self, source: int, members: Sequence[int]) -> list[Any] | None:
        """Return what rank *source* tells *members* next, None if it is not acted out or cannot be kept."""
        file, until = self._next(source, members), time.monotonic() + PATIENCE_S
        while not file.is_file():
            is_acting = acts(self._folder, source).is_file()
            if not is_acting or outcome_of(self._folder, source).is_file() or time.monotonic() > until:
                return None
            time.sleep(0.02)
        words = file.read_bytes()
        found: list[Any] | None = pickle.loads(words) if words else None
        return found

    def _next(self, source: int, members: Sequence[int]) -> Path:
        key = (source, zlib.crc32(repr(sorted(members)).encode()))
        self._n_said[key] += 1
        return self._folder / f"said-{source:05d}-{key[1]:08x}-{self._n_said[key]}.pickle"
