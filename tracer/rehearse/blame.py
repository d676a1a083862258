"""Which errors a number may have caused that a script was told. This module does not import torch."""

from __future__ import annotations

from typing import Final

NOT_OF_NUMBERS: Final = (
    OSError,
    ImportError,
    NameError,
    SyntaxError,
    UnicodeError,
    NotImplementedError,
    EOFError,
)
"""Errors that no number has caused, except a variable that was not set because a branch was not taken."""


def may_come_of_numbers(error: BaseException) -> bool:
    """Whether *error* may have come about because a number was another one than in a real run.

    Not where it is about a file, a module, a name, or the arguments or attributes of something.

    >>> may_come_of_numbers(IndexError("list index out of range")), may_come_of_numbers(KeyError("lr"))
    (True, False)
    """
    if isinstance(error, KeyError):
        return not (error.args and isinstance(error.args[0], str))
    if isinstance(error, AttributeError):
        return "NoneType" in str(error)
    if isinstance(error, TypeError):
        return " argument" not in str(error) or "NoneType" in str(error)
    is_unbound = isinstance(error, UnboundLocalError)
    return is_unbound or not isinstance(error, NOT_OF_NUMBERS)
