"""Reads the files of a run: many at once, where that is worth the start of processes that share them."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from importlib import import_module
from typing import Any, Final, NamedTuple

from foretrace.tracer.errors import IngestError
from foretrace.tracer.ingest.recording import Recording
from foretrace.tracer.ingest.sources import Progress, Source

LEAST_BYTES: Final = 1 << 24
"""Stored bytes of all files from which on processes are started: each takes a second of its own to begin."""

WORKER: Final = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "from foretrace.tracer.ingest.reading import work; work()"
)
"""What a worker runs; Ctrl-C is for the process that started it, which then ends it."""


class Outcome(NamedTuple):
    """What came of a file: the recordings in it, or in one line why there are none."""

    recordings: list[Recording]
    failed: str = ""


def read_all(
    module: str, options: Mapping[str, Any], sources: Sequence[Source], progress: Progress | None
) -> Iterator[Outcome]:
    """Yield what came of each of *sources*, in their order.

    Raises IngestError: a process that read for this one was ended.
    """
    n = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1, len(sources))
    if n < 2 or sum(source.size_bytes for source in sources) < LEAST_BYTES:
        yield from (_outcome(module, options, source, progress) for source in sources)
        return
    # Workers import from where this process does, whatever has changed its path, and (-P) from nowhere else.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with ExitStack() as stack:
        workers = []
        for place in range(n):
            command = [sys.executable, "-P", "-c", WORKER]
            worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            stack.callback(_end, worker)
            assert worker.stdin is not None  # noqa: S101 - asked for above
            assert worker.stdout is not None  # noqa: S101 - the same
            with suppress(BrokenPipeError), worker.stdin as pipe:  # one that has ended is told below
                pickle.dump((module, options, sources[place::n]), pipe)
            workers.append(worker.stdout)
        for number, source in enumerate(sources):
            try:
                # Each worker has every n-th file and answers in their order, so the next answer is known to
                # be there.
                found: Outcome = pickle.load(workers[number % n])
            except (EOFError, pickle.UnpicklingError) as error:
                raise IngestError(
                    f"the process that read {source.name} was ended, perhaps for want of memory"
                ) from error
            if progress is not None:
                progress(source.name, source.size_bytes)
            yield found


def work() -> None:
    """Read the files that the standard input names, and write what came of each to the standard output."""
    module, options, sources = pickle.load(sys.stdin.buffer)
    for source in sources:
        pickle.dump(_outcome(module, options, source, None), sys.stdout.buffer, protocol=5)
        sys.stdout.buffer.flush()


def _outcome(module: str, options: Mapping[str, Any], source: Source, progress: Progress | None) -> Outcome:
    try:
        found = import_module(module).read(source, progress, **options)
    except IngestError as error:
        said = str(error)
        return Outcome([], said if source.name in said else f"{source.name}: {said}")
    return Outcome(found if isinstance(found, list) else [found])


def _end(worker: subprocess.Popen[bytes]) -> None:
    """End *worker*, whatever it is at."""
    worker.kill()
    if worker.stdout is not None:
        worker.stdout.close()
    worker.wait()
