"""The command line: one group of verbs, each imported when it is called.

``foretrace`` and ``python -m foretrace``. The only module that sees both the simulator and the tracer.
"""

from __future__ import annotations

import difflib
import errno
import inspect
import io
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Final, NoReturn, TextIO, cast

import click

import foretrace
from foretrace import door
from foretrace.interrupts import INTERRUPTED, verb_begins
from foretrace.simulator.errors import SimulationError
from foretrace.topologies.errors import TopologyError
from foretrace.tracer.errors import RecordError
from foretrace.traces.errors import LeftoverWarning, TraceError

VERBS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "simulate": ("simulator.cli", "Predict one training step: its time, memory and timeline."),
        "rehearse": ("tracer.rehearse.cli", "Run your own script as ranks of a cluster you do not have."),
        "record": ("tracer.cli", "Record a real torch.distributed run, without editing its script."),
        "ingest": ("tracer.cli", "Import traces of other tools: Kineto, Chakra, timers, tables."),
        "analyze": ("traces.cli", "Show where the time of a run goes, rank by rank, up to 100 %."),
        "compare": ("traces.cli", "Compare two runs: what differs, by cause."),
        "calibrate": ("simulator.recorded.cli", "Fit a machine's constants to a recording or a step time."),
        "report": ("traces.report.cli", "Write one self-contained HTML page for one run or two."),
        "export": ("traces.cli", "Write a run for other tools: Perfetto, Chakra, Kineto, CSV, ..."),
        "serve": ("simulator.what_if.cli", "Browse runs and try out layouts in a browser."),
        "config": ("simulator.configs.cli", "Read another tool's configuration, or write one for it."),
        "advise": ("simulator.advise.cli", "Explain in words how to train a model on given GPUs."),
        "search": ("simulator.search.cli", "Find the best layouts of a model on a machine."),
        "bubble": ("simulator.search.bubble_cli", "Show how much of a pipeline idles, by schedule."),
        "goodput": ("simulator.goodput.cli", "Estimate days and dollars of a training when machines fail."),
        "memory": ("simulator.memory.cli", "Check whether a job fits in memory, and what would make it fit."),
        "model": ("simulator.models.cli", "List and show models, and check one against a published count."),
        "bench": ("tracer.bench.cli", "Compare what this machine reaches with what it promises."),
        "validate": ("simulator.validate.cli", "Check predictions against tables of measurements."),
        "topology": ("topologies.cli", "List, show and check machines, and measure this one."),
    }
)
"""Verbs, the module of each, and the line that ``--help`` shows without importing it."""

SECTIONS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "Predict": ("simulate", "rehearse", "memory", "config"),
        "Choose": ("search", "advise", "bubble", "goodput"),
        "Record": ("record", "ingest"),
        "Understand": ("analyze", "compare", "report", "export", "serve"),
        "Measure and check": ("topology", "model", "bench", "calibrate", "validate"),
    }
)
"""Headings below which ``--help`` lists the verbs."""

USER_ERRORS: Final = (TopologyError, TraceError, SimulationError, RecordError)

_NO_WORDS: Final = getattr(click.exceptions, "NoArgsIsHelpError", ())
"""Raised with the whole help for a group without a verb; before 8.2 click prints that itself."""

_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""What writing our output fails with when it is the disk behind it that is at fault."""

_EXAMPLE: Final = re.compile(r"(?:(For example:) )?((?:foretrace|torchrun|nvidia-smi) .*)")
_EXAMPLE_WIDTH: Final = 66
"""Letters of an example on one line of a help text, which is indented by ten at most in a terminal of 80."""


def _module(name: str) -> ModuleType:
    return import_module(f"foretrace.{name}")


def _promise(against: str, kernels: Sequence[Mapping[str, object]]) -> Any:
    """Return what a device promises for measured kernels; the tracer, which measures, knows no devices."""
    return _module("simulator.compute.benched").promise(against, kernels)


def _promise_collectives(against: str, n_ranks: int, rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return what a machine promises for collectives that were measured."""
    return _module("simulator.compute.benched").promise_collectives(against, n_ranks, rows)


def _check_machine(name: str, calibration: str | None, n_gpus: int) -> None:
    """Raise TopologyError or CalibrationError, before a script is run, unless both are there and fit."""
    _module("simulator.rehearsed.cli").machine_of(name, calibration, n_gpus)


def _time_rehearsal(path: str, settings: Mapping[str, Any], **wanted: Any) -> Any:
    """Time a rehearsal on a machine; the tracer that made it knows no machines."""
    return _module("simulator.rehearsed.cli").time_and_show(path, settings, **wanted)


def _diagnose_dumps(paths: Sequence[str]) -> Any:
    """Return what dumps of PyTorch's flight recorder tell, which the tracer reads; None for other files."""
    return _module("tracer.ingest.flight").diagnose(paths)


def _write(path: str, text: str) -> None:
    """Write a file for the package of machines, which knows no other."""
    _module("traces.writer").write_atomically(Path(path), text)


def _device(hardware: str, memory_bytes: int) -> dict[str, Any]:
    """Return what the device of that name and memory can do at most; nothing if the catalogue has none."""
    catalog = _module("topologies.catalog")
    try:
        device = catalog.device_named(hardware, memory_bytes)
    except TopologyError:
        return {}
    machines = map(catalog.load_cluster, catalog.names())
    links = [one.intra.bandwidth_bytes_per_s for one in machines if one.device.name == device.name]
    return {
        "peak_flops_per_s": dict(device.peak_flops_per_s),
        "memory_bytes_per_s": device.memory_bytes_per_s,
        "link_bytes_per_s": max(links, default=0.0),
    }


def with_examples(text: str) -> str:
    """Return the help *text* of a verb with its example commands on lines that a shell takes.

    A paragraph is one if it is a command, or ``For example:`` and a command.
    """
    return "\n\n".join(map(_example, inspect.cleandoc(text).split("\n\n")))


def _example(paragraph: str) -> str:
    found = _EXAMPLE.match(" ".join(paragraph.split()))
    if found is None:
        return paragraph
    lines = [""]
    # A line breaks before a flag only, so that each flag stays beside its value.
    for part in re.split(r" (?=-)", found[2]):
        if lines[-1] and len(lines[-1]) + len(part) > _EXAMPLE_WIDTH:
            lines.append(part)
        else:
            lines[-1] += f" {part}" if lines[-1] else part
    kept = "\b\n    " + " \\\n        ".join(lines)  # click does not wrap what follows \b
    return f"{found[1]}\n\n{kept}" if found[1] else kept


class _Whole(click.types.IntParamType):
    """A whole number that fits 64 bits, as every other in a document."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if not -door.MOST_WHOLE <= found <= door.MOST_WHOLE:
            self.fail(f"{door.shown(value)}: at most {door.MOST_WHOLE:,}", param, ctx)
        return found


class _Number(click.types.FloatParamType):
    """A finite number."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value!r}: a finite number is needed", param, ctx)
        return found


class _WholeRange(_Whole, click.IntRange):
    """The same in a range, which may be open."""


class _NumberRange(_Number, click.FloatRange):
    """A finite number in a range; NaN is in none."""


_BOUNDED: Final[Mapping[type, Callable[[], click.ParamType[Any]]]] = MappingProxyType(
    {
        type(click.INT): _Whole,
        type(click.FLOAT): _Number,
        click.IntRange: _WholeRange,
        click.FloatRange: _NumberRange,
    }
)


def _bound(command: click.Command) -> None:
    """Give the flags of *command* types that let no value in that a document could not hold."""
    for param in command.params:
        if instead := _BOUNDED.get(type(param.type)):
            known, param.type = param.type, instead()
            vars(param.type).update(vars(known))  # the bounds of a range, which its help shows


class Verbs(click.Group):
    """A command group that imports a verb when it is called, and shows a user's mistake as one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the verbs in the order of a project: predict, record, understand."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the verb *cmd_name*, or None if there is no such verb."""
        if cmd_name not in VERBS:
            return None
        command: click.Command = getattr(_module(VERBS[cmd_name][0]), cmd_name)
        # A command lives as long as its module: an earlier call in this process may have added these.
        if cmd_name == "topology" and isinstance(command, click.Group) and "detect" not in command.commands:
            command.add_command(_module("tracer.cli").detect, "detect")
            command.add_command(_module("simulator.network.cli").cost, "cost")
        if cmd_name == "topology":
            command.context_settings["obj"] = _write
        if cmd_name == "rehearse":
            command.context_settings["obj"] = {"check": _check_machine, "time": _time_rehearsal}
        if cmd_name == "analyze":
            command.context_settings["obj"] = _diagnose_dumps
        if cmd_name == "ingest":
            command.context_settings["obj"] = _device
        if cmd_name == "bench":
            command.context_settings["obj"] = {"kernels": _promise, "collectives": _promise_collectives}
        for one in (command, *(command.commands.values() if isinstance(command, click.Group) else ())):
            _bound(one)
            if "\b" not in (one.help or ""):
                one.help = with_examples(one.help or "")
        # All is loaded now: from here on Ctrl-C is an exception again.
        verb_begins()
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the verbs with one line each, importing none of them."""
        for heading, verbs in SECTIONS.items():
            with formatter.section(heading):
                formatter.write_dl([(f"{verb:<9}", VERBS[verb][1]) for verb in verbs])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve a verb; an unknown one is answered with the verbs there are."""
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], VERBS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(VERBS)}"
            raise click.UsageError(f"no verb {args[0]!r}: {hint}", ctx)
        return super().resolve_command(ctx, args)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,  # noqa: FBT001, FBT002 - click's signature
        **extra: Any,
    ) -> Any:
        """Run the command line; a mistake a user can make becomes one line on stderr and exit status 2."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        _replace_closed()
        _replace_unprintable()
        shown, told = cast("TextIO", _Shown(sys.stdout)), cast("TextIO", _Shown(sys.stderr))
        with redirect_stdout(shown), redirect_stderr(told):
            return self._run(args, prog_name, complete_var, extra)

    def _run(
        self,
        args: Sequence[str] | None,
        prog_name: str | None,
        complete_var: str | None,
        extra: dict[str, Any],
    ) -> NoReturn:
        """Run the command line, and exit."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("default", LeftoverWarning)
                warnings.showwarning = partial(_show, warnings.showwarning)
                status = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
            # What is left of the output is written here, where an error becomes one line, and not when Python
            # exits.
            sys.stdout.flush()
        except _NO_WORDS as error:
            click.echo(error.format_message(), err=True)
            sys.exit(2)
        except click.UsageError as error:
            command = error.ctx.command_path if error.ctx else "foretrace"
            _fail(f"{_said(error)} (see {command} --help)")
        except click.ClickException as error:
            _fail(error.format_message())
        except click.Abort:
            sys.exit(INTERRUPTED)
        except USER_ERRORS as error:
            _fail(str(error))
        except BrokenPipeError:  # the reader of our output has seen enough
            _forget_output()
            sys.exit(141)  # 128 + SIGPIPE, as a shell reports it
        except OSError as error:
            if error.filename is None and error.errno == errno.ENOENT:  # as the system says of it
                _fail("the current folder is gone: start in another one")
            # An error that names no file is no fault of a path that a user gave: it keeps its traceback.
            if error.filename is None and error.errno not in _NO_ROOM:
                raise
            _forget_output()
            _fail(f"{error.filename or 'cannot write the output'}: {error.strerror}")
        # Where click does not exit by itself it returns the status that a verb has asked for.
        sys.exit(status if isinstance(status, int) else 0)


def _said(error: click.UsageError) -> str:
    """Return what is wrong with a command; of an unknown part of a verb also which parts there are."""
    message = error.format_message().rstrip(".")
    group = error.ctx.command if error.ctx else None
    if isinstance(group, click.Group) and message.startswith("No such command"):
        return f"{message.partition('.')[0]}: one of {', '.join(group.commands)}"
    return message


class _Shown:
    """A stream on which what files say gives a terminal no orders: only colours and progress lines do.

    A name in a run could otherwise change the title of a window, or what its user pastes.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(_ORDER.sub(lambda found: repr(found[0])[1:-1], text))
        return len(text)

    def __getattr__(self, name: str) -> Any:  # whatever a stream has
        return getattr(self._stream, name)


_ORDER: Final = re.compile(r"\x1b(?!\[[0-9;?]*[mAGKhl])|[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f]")


def _replace_closed() -> None:
    """Lead standard streams that are closed (``>&-``) nowhere; files would be opened in their places."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 - until the end


def _replace_unprintable() -> None:
    """Escape what the encoding of a terminal cannot show, such as µ in ASCII, instead of raising for it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _show(other: Any, message: Warning | str, category: type[Warning], *where: Any) -> None:
    """Show what a verb warns of as one line, and a warning of a library as *other* does."""
    if issubclass(category, LeftoverWarning):
        click.echo(f"warning: {message}", err=True)
    else:
        other(message, category, *where)


def _forget_output() -> None:
    """Lead stdout nowhere: Python would try once more to write what is left of it when it exits."""
    with suppress(OSError):  # a stdout that is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str) -> NoReturn:
    """Print *message* as one line on stderr and exit with status 2."""
    with suppress(OSError):  # where nobody can be told
        said = " ".join(message.split())
        if len(said) > 2 * _ENDS:  # as with a value of many letters
            said = f"{said[:_ENDS]} ... {said[-_ENDS:]}"
        click.echo(f"Error: {said}", err=True)
    sys.exit(2)


_ENDS: Final = 2000
"""Letters of a very long error that are shown of its begin, and of its end."""


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(foretrace.__version__, prog_name="foretrace")
def main() -> None:
    """Rehearse a distributed training run, record the real one, and see where the two differ.

    foretrace VERB --help explains a verb, with examples to start from.
    """
