"""Says in one line why a script cannot be rehearsed: which part of it, which operator, and what to do.

This module does not import torch.
"""

from __future__ import annotations

import linecache
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, Final

from foretrace.tracer.rehearse.errors import Finished, RehearsalError
from foretrace.tracer.rehearse.world.launchers import missing

# Which names a function uses, as its code tells.


def names_of(code: CodeType) -> Iterator[str]:
    """Yield the names that *code*, and the functions defined in it, use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_of(constant)


def led_to(function: Any, depth: int) -> Iterator[tuple[FunctionType, set[str]]]:
    """Yield *function*, and the functions that it leads to in up to *depth* steps, each with its names.

    By a name, none of torch's: they lead everywhere.
    """
    seen, last = set[CodeType](), [function]
    for _ in range(depth + 1):
        found = [getattr(one, "__wrapped__", one) for one in last if isinstance(one, FunctionType)]
        last = []
        for one in found:
            if one.__code__ in seen:
                continue
            seen.add(one.__code__)
            names = {*names_of(one.__code__)}
            yield one, names
            with suppress(ValueError):  # a cell that is not set yet
                last += [cell.cell_contents for cell in one.__closure__ or ()]
            for other in map(one.__globals__.get, names):
                if isinstance(other, FunctionType) and not str(other.__module__).startswith("torch."):
                    last.append(other)


# What to do about errors whose own words do not say it. This module does not import torch.


STUB: Final = "--stub, docs/rehearse.md section 6"
"""What names the way by which a script can be helped."""

OWN_CLASS: Final = (
    "a parameter of a class of its own is a plain one in a rehearsal; in a stub file "
    f"({STUB}), keep elsewhere what it has beside its numbers"
)
"""What to say where a script asks a tensor for what those of its own class have."""

NO_FLEX: Final = (
    f"FlexAttention has no kernel without a GPU; in a stub file ({STUB}), put "
    "scaled_dot_product_attention, with is_causal or without, in place of flex_attention"
)
"""What to say where a script asks for it, by whatever function."""

NO_SIZE: Final = (
    "parameters that learn their sizes from the first input, as in torch.nn.LazyLinear, cannot be rehearsed; "
    f"tell the modules their sizes, in the script or in a stub file ({STUB})"
)
"""What to say of lazy modules."""

SPARSE: Final = (
    "sparse tensors cannot be rehearsed; run with dense gradients, as with sparse=False, and in a stub file "
    f"({STUB}) leave out what else makes a tensor sparse, as an evaluation"
)
"""What to say of sparse tensors, of gradients or else."""

UNCOMPUTED: Final = (
    "numbers are needed here that a rehearsal does not compute: say in a stub file what they are, or leave "
    f"out what depends on them ({STUB})"
)
"""What to say where NumPy, or torch, cannot take what stands for unknown numbers."""

OLD_TYPES: Final = (
    "types of tensors that name a GPU, as torch.cuda.FloatTensor, cannot be rehearsed; name a dtype and "
    f'device="cuda" in their place, in the script or in a stub file ({STUB})'
)
"""What to say where a script makes or converts tensors by them."""

ELSEWHERE: Final = (
    "a process that the script starts trains, and joins no process group; only those that join one are "
    "rehearsed as ranks: rehearse by itself what this one runs"
)
"""What ends a script that trains in processes that are no ranks."""

NO_GPU: Final = ("Found no NVIDIA driver", "not compiled with CUDA")
"""What torch says in a process that was not told of the GPUs here, as one that is not forked from a rank."""

HINTS: Final[Mapping[str, str]] = {
    "FlexAttention": NO_FLEX,
    "HigherOrderOperator flex_attention": NO_FLEX,
    "FlashAttention2 has been toggled on": "FlashAttention 2 is built on GPUs only; let the model ask for "
    'attn_implementation="sdpa", which is the same kernel, by an argument of the script or by the stub '
    f"examples/rehearse/stub_flash_attention_2.py ({STUB})",
    "No CUDA GPUs are available": "it requests a GPU, but --without-gpu says that there is none",
    "Cannot access accelerator device": "a bare number names no device without a GPU; say cuda and the "
    'number, as torch.device("cuda", 0) or device_map={"": "cuda:0"}',
    "expect_autograd_hooks_ INTERNAL ASSERT": "DDP with static_graph=True reduces in its first backward, "
    "which is under no_sync (accumulation) here: torch fails in an assertion of its own; leave either out",
    "SymmetricMemory": "symmetric memory cannot be rehearsed; run with collectives in its place, by an "
    f"argument of the script or in a stub file ({STUB})",
    **dict.fromkeys(("UninitializedParameter", "UninitializedBuffer"), NO_SIZE),
    "Creating a new Tensor subclass": "a parameter of a class of its own, as bitsandbytes has in 4 or 8 "
    "bits, cannot be rehearsed; run with weights in 16 bits",
    "'scontrol'": "scontrol is of SLURM, which is not here: MASTER_ADDR is set, so let the script ask for "
    f"the first node only where it is not, or put what it says into a stub file ({STUB})",
    "'nvidia-smi'": "nvidia-smi is not here: leave out what asks it, by an argument of the script or in a "
    f"stub file ({STUB})",
    "type torch.cuda.": OLD_TYPES,
    **dict.fromkeys(("numpy.object_", "not supported for the input types", "type Unknown"), UNCOMPUTED),
    **dict.fromkeys(("SparseTensorImpl", "SparseCsrTensorImpl"), SPARSE),
}
"""What to say of errors of torch by what stands in them."""


FOREIGN: Final = (
    "KeyError of a parameter, which torch raises as well: an optimizer holds one that the model no longer "
    "has, as FSDP1 puts its own in place; make the optimizer after wrapping, or pass use_orig_params=True"
)
"""What to say where a parameter is looked for among others, as for the state of an optimizer."""


def hint(error: BaseException, words: str, spec: Mapping[str, Any]) -> str:
    """Return what to say of *error* instead of its *words*, empty if they say it; *spec* as ``explain``."""
    if isinstance(error, KeyError) and words.startswith("Parameter("):
        return FOREIGN
    # Pools of processes have a class of this name for what happened elsewhere.
    if type(error.__cause__).__name__.endswith("RemoteTraceback") and any(one in words for one in NO_GPU):
        return ELSEWHERE
    if isinstance(error, KeyError) and (what := missing(str(error.args[0]) if error.args else "", spec)):
        return f"KeyError of {words}, {what}"
    return next((hint for sign, hint in HINTS.items() if sign in words), "")


# Which errors a number may have caused that a script was told. This module does not import torch.

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


DEPENDS: Final = frozenset({"DataDependentOutputException", "DynamicOutputShapeException"})
"""Errors of fake tensors where an operator needs numbers."""

UNSUPPORTED: Final = frozenset({"UnsupportedOperatorException", "UnsupportedFakeTensorException"})
"""Errors of fake tensors where nobody has said what an operator makes."""

OURS: Final = str(Path(__file__).parents[1]) + os.sep
STANDARD: Final = str(Path(os.__file__).parent) + os.sep
# With folders around it: a script may be below a folder that is called torch.
LIBRARIES: Final = (
    *(f"/{place}-packages/{name}/" for place in ("site", "dist") for name in ("torch", "numpy")),
    "/typing_extensions.py",
)
"""Parts of the paths of files that are not of a script; ``STANDARD`` is where those of Python are."""

INSTALLED: Final = "-packages" + os.sep
"""Part of the path of a file of a library that is installed."""

FIRST_VALUES: Final = "/torch/nn/init.py"
"""End of the path of the file whose functions give parameters their first values."""

NO_STEPS: Final = (
    "no optimizer of torch.optim stepped: the whole script counts as one step, because nothing marks its end"
)
"""What to say of a script that updates its parameters by its own hand."""

LONG: Final = 8
"""Letters from which a number is said with four digits."""

MOST_LETTERS: Final = 500
"""Most letters of an error's words that are said."""


def _behind(error: ModuleNotFoundError) -> BaseException:
    """Return what kept a module from being imported: a library may raise another error about it.

    That is the first in the chain of *error* that names a missing module; without one, what began it.
    """
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
        causes.append(cause)
    named = (cause for cause in causes if isinstance(cause, ModuleNotFoundError) and cause.name)
    return next(named, causes[-1])


def ending(error: BaseException, spec: Mapping[str, Any], told: Sequence[str] = ()) -> str:
    """Return what to say of an *error* that has ended the script, or that the script has caught."""
    if isinstance(error, SystemExit):
        if isinstance(caught := error.__cause__ or error.__context__, Exception):
            if not _of_script(caught):  # a library has raised and caught it, as argparse does
                caught = caught.with_traceback(error.__traceback__)
            return f"{ending(caught, spec, told)}; the script caught that, and ended with {error.code}"
        return f"the script ended with {error.code}{_said(spec['log'])}; its output is in {spec['log']}"
    if not isinstance(error, RehearsalError):
        return explain(error, spec, told)
    where, words = place(error), str(error)
    return words if words.startswith(f"{where} ") or error.__traceback__ is None else f"{where}: {words}"


def _said(log: str) -> str:
    """Return the last line of the output in the file *log*, as of ``argparse``, in a part of a sentence."""
    # The log is what these are written to.
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    lines = Path(log).read_text(encoding="utf-8", errors="replace").split("\n") if Path(log).is_file() else []
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f" ({last})" if last else ""


def explain(error: BaseException, spec: Mapping[str, Any], told: Sequence[str] = ()) -> str:
    """Return what went wrong, for a person who knows the script.

    *spec* is what was to be done, of which ``log`` names the file with the whole story; *told* is what the
    script was told of numbers that nobody has, which may be why.
    """
    kind, where = type(error).__name__, place(error)
    if kind in DEPENDS:
        operator = getattr(error, "func", "an operator")
        return (
            f"{where}: {operator} needs values, which a rehearsal does not have; say in a stub file what "
            f"it returns ({STUB})"
        )
    if is_of_fakes(error):
        operator = _operator(error)
        return (
            f"{where}: the output of the custom operator {operator} is not described; in a stub file "
            f'({STUB}): @torch.library.register_fake("{operator}") def _(x, ...): return torch.empty_like(x)'
        )
    words = _short(error) or _line(error)
    if words.startswith("'FakeTensor'"):
        words = f"{words}: {OWN_CLASS}" if _has_own_classes() else words.replace("FakeTensor", "Tensor", 1)
    if isinstance(error, ModuleNotFoundError):
        return _not_imported(_behind(error), where, spec)
    if any(frame.f_code.co_filename.endswith("cpp_extension.py") for frame, _ in _frames(error)):
        return (
            f"{where}: an extension cannot be compiled here ({words}); in a stub file ({STUB}), put what "
            "stands for it in place of torch.utils.cpp_extension.load"
        )
    if remedy := hint(error, words, spec):
        return f"{where}: {remedy}"
    if (root := _root(error)) is not error:
        words += f" (from {type(root).__name__}: {_short(root)})"
    is_why = bool(told) and may_come_of_numbers(error)
    why = f"; before that, {told[-1]} (if that is why, say it in a stub file: {STUB})" if is_why else ""
    return f"{where}: {kind}: {words}{why}; its output is in {spec['log']}"


def _short(error: BaseException) -> str:
    """Return the words of *error* in one line, cut where they are too long to be read."""
    words = " ".join(str(error).split())
    return words if len(words) <= MOST_LETTERS else f"{words[: MOST_LETTERS - 3]}..."


def _not_imported(cause: BaseException, where: str, spec: Mapping[str, Any]) -> str:
    """Return what to say of a module that could not be imported because of *cause*."""
    if not isinstance(cause, ModuleNotFoundError):
        return explain(cause, spec)
    words, name = _short(cause), cause.name or ""
    whole = sys.modules.get(name.partition(".")[0])
    if whole is not None and getattr(whole, "__file__", None):  # not a namespace, which others add to
        lacking = f"{whole.__name__} is installed here, but has no {name}: install a version that has it"
    else:
        lacking = f"{name} is not installed here: install it" if name else f"{words}; install it"
    return f"{where}: {lacking}, or put a stand-in for it into sys.modules in a stub file ({STUB})"


def _line(error: BaseException) -> str:
    """Return the line of the script that raised *error*, which says nothing itself, as a plain assertion."""
    frames = _of_script(error)
    return linecache.getline(frames[-1][0].f_code.co_filename, frames[-1][1]).strip()[:200] if frames else ""


def _root(error: BaseException) -> BaseException:
    """Return what began *error*, which may be raised from another: a pipeline says that a stage failed."""
    seen = [error]
    while (cause := seen[-1].__cause__) is not None and cause not in seen:
        seen.append(cause)
    return seen[-1]


def _has_own_classes() -> bool:
    """Whether there are classes of tensors that are not torch's."""
    import torch

    found: list[type] = [torch.Tensor]
    while found:
        one = found.pop()
        if one.__module__.partition(".")[0] != "torch":
            return True
        found += one.__subclasses__()
    return False


def is_of_fakes(error: BaseException) -> bool:
    """Whether *error* is one that no real run has: its tensors have numbers, and operators make them."""
    is_unsaid = "fake impl" in str(error) or "register_fake" in str(error)
    return is_unsaid or type(error).__name__ in DEPENDS | UNSUPPORTED


def _operator(error: BaseException) -> str:
    """Return the operator that *error* is about as ``namespace::name``."""
    schema = getattr(getattr(error, "func", None), "_schema", None)
    if schema is not None:
        return str(schema.name)
    found = re.search(r"\w+::\w+", str(error))
    return found[0] if found else "of the script"


def place(error: BaseException) -> str:
    """Return the innermost module of the script's that ran, and the line of it or of the script.

    Of an error in an installed library, that is the script's line that led there, and the library's.
    """
    frames = _of_script(error)
    modules = [found for frame, _ in frames if (found := _module(frame))]
    if not frames:
        if isinstance(error, SyntaxError) and error.filename:
            return f"{Path(error.filename).name}:{error.lineno}"
        return "before the script"
    own = [one for one in frames if INSTALLED not in one[0].f_code.co_filename]
    line = _named(*frames[-1])
    if own and own[-1] is not frames[-1]:
        line = f"{_named(*own[-1])}, in {line}"
    return f"{modules[-1]} at {line}" if modules else line


def _of_script(error: BaseException) -> list[tuple[FrameType, int]]:
    """Return the frames of *error* that are not Python's, torch's or ours, and their lines."""
    # A frame of compiled code, whose file is of another language, has no constants; Python's has one.
    return [
        one for one in _frames(error) if one[0].f_code.co_consts and not is_library(one[0].f_code.co_filename)
    ]


def _named(frame: FrameType, number: int) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{number}"


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    found = error.__traceback__
    while found is not None:
        yield found.tb_frame, found.tb_lineno
        found = found.tb_next


def is_library(name: str) -> bool:
    """Whether the file *name* is Python's, torch's, NumPy's or ours, not a script's or another library's."""
    is_standard = name.startswith(STANDARD) and INSTALLED not in name
    return is_standard or name.startswith((OURS, "<")) or any(part in name for part in LIBRARIES)


def _module(frame: FrameType) -> str:
    """Return the class of the module whose method a frame is, empty if it is none's.

    A function that is given a module first, as one that trains it, is no method of it.
    """
    code = frame.f_code
    is_function = code.co_qualname == code.co_name or code.co_qualname.endswith(f"<locals>.{code.co_name}")
    names = () if is_function else code.co_varnames[:1]  # mostly "self"
    owner = frame.f_locals.get(names[0]) if names else None
    # Of the class: an object may run anything where it is asked for a name that it lacks.
    return type(owner).__name__ if hasattr(type(owner), "named_parameters") else ""


def number(value: complex) -> str:
    """Return a number as a person says it: as it is if it is short, else four digits of it.

    >>> number(1.0), number(True), number(2.6139293370023936e16)
    ('1.0', 'True', '2.614e+16')
    """
    return f"{value:.4g}" if isinstance(value, float) and len(repr(value)) > LONG else str(value)


def amount(tensor: Any) -> str:
    """Return in words how many numbers *tensor* has."""
    return "a number" if tensor.numel() == 1 else f"{tensor.numel():,} numbers"


def asked_at() -> tuple[str, int]:
    """Return file and line of the innermost frame, from the caller's caller on, that is a script's."""
    frame = sys._getframe(2)  # noqa: SLF001 - no other way is as fast
    while frame is not None and frame.f_back is not None:
        if not is_library(frame.f_code.co_filename):
            break
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def is_first_value() -> bool:
    """Whether ``torch.nn.init`` asks, which gives parameters their first values: of these nothing depends."""
    frame = sys._getframe(2)  # noqa: SLF001 - no other way is as fast
    while frame is not None and is_library(name := frame.f_code.co_filename):
        if name.endswith(FIRST_VALUES):
            return True
        frame = frame.f_back  # type: ignore[assignment]  # None ends the walk
    return False


def asker() -> str:
    """Return the innermost line of a script's as a person names it."""
    name, line = asked_at()
    return f"{Path(name).name}:{line}"


# Remembers errors that only a rehearsal raises, in case the script catches them.


CAUGHT: Final = "the script has caught an error of an operator, so work after it may be missing: {}"
"""Note about an error that a real run may have too."""


MOST_RAISED: Final = 1000
"""Errors after which a script that catches them is said to try again for ever."""

AGAIN: Final = "the script has caught {n_times:,} errors without a step, the last one {what}"
"""Ends a rehearsal of a script that tries again for ever, as after every error."""


class Failures:
    """Errors raised while the script of one rank ran, in order; the session gets notes about caught ones."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._of_operators: list[Exception] = []
        # What was raised before in this process is of something else.
        self._n_before = len(RehearsalError.raised)
        RehearsalError.most = self._n_before + MOST_RAISED

    def add(self, error: Exception) -> None:
        """Note that an operator raised *error*; the same error may be noted several times.

        Raises:
            RehearsalError: there is no end of them.
        """
        if _is_for_the_script(error):
            return
        self._of_operators.append(error)
        if len(self._of_operators) >= MOST_RAISED:
            what = f"{type(error).__name__}: {_short(error)}"
            raise RehearsalError(AGAIN.format(n_times=MOST_RAISED, what=what)) from error

    def refusal(self, ended_by: BaseException | None = None) -> Exception | None:
        """Return the first error that a real run would not have, whether or not the script has caught it.

        What torch asked in vain counts where it then refused the argument, which has ended the script.
        """
        is_refused = isinstance(ended_by, TypeError)
        refused = [error for error in self._of_operators if is_of_fakes(error)]
        raised = RehearsalError.raised[self._n_before :]
        raised = [error for error in raised if is_refused or not _is_asked_in_c(error)]
        found = next(iter([*raised, *refused]), None)
        if found is not None:
            RehearsalError.most = float("inf")  # it is about to be said
        return found

    def step_ended(self) -> None:
        """A step ends, so the script has caught all errors raised before.

        Raises:
            Finished: it has caught an error that must end the rehearsal.
        """
        if self.refusal() is not None:
            raise Finished
        for error in self._of_operators:
            said = f"{place(error)}: {type(error).__name__}: {_short(error)}"
            self._session.warn(CAUGHT.format(said[:200]))
        self._of_operators.clear()


def _is_asked_in_c(error: Exception) -> bool:
    """Whether *error* has come to no line of Python: torch finds out what an argument is by asking it."""
    return all(frame.f_code.co_filename.startswith(OURS) for frame, _ in _frames(error))


def _is_for_the_script(error: Exception) -> bool:
    """Whether scripts may continue after *error*: the device is full."""
    import torch

    return isinstance(error, torch.OutOfMemoryError)
