"""Who does the work of a search: this process, others on this machine, or a cluster of Dask or Ray.

One small interface: start a function with one argument, wait for any that is done. A process that is lost
takes nothing with it: what it worked on is done again, by the engine itself (Dask, Ray) or here (local).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for_any
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Final, Protocol

from foretrace.door import counted
from foretrace.simulator.errors import SearchError
from foretrace.traces.private import Processes, without_this_folder

MOST_LOSSES: Final = 5
"""Times that processes may be lost before giving up: then it is the work that kills them."""

FORMS: Final = "local, local:4, dask://host:port, dask://local:4, ray://host:port or ray://local:4"

Function = Callable[[Any], Any]


class Executor(Protocol):
    """Who does the work."""

    workers: int

    def start(self, function: Function, argument: Any) -> Any:
        """Start *function* with *argument*; returns the task."""

    def wait(self, tasks: Iterable[Any]) -> list[tuple[Any, Any]]:
        """Wait until at least one of *tasks* is done; returns those that are, with what they returned."""

    def close(self) -> None:
        """Let go of processes and connections."""


class Here:
    """This process: one task after the other."""

    workers = 1

    def __init__(self) -> None:
        self._waiting: dict[object, tuple[Function, Any]] = {}

    def start(self, function: Function, argument: Any) -> object:
        """Note the task."""
        task = object()
        self._waiting[task] = (function, argument)
        return task

    def wait(self, tasks: Iterable[Any]) -> list[tuple[Any, Any]]:
        """Do one of *tasks*."""
        # In the order in which they were started.
        task = next(one for one in self._waiting if one in set(tasks))
        function, argument = self._waiting.pop(task)
        return [(task, function(argument))]

    def close(self) -> None:
        """Nothing to let go of."""


class Local:
    """Processes on this machine; a lost one is replaced, and its part done again."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._pool = Processes(workers)
        self._work: dict[object, tuple[Function, Any]] = {}
        self._futures: dict[object, Future[Any]] = {}
        self._losses = 0

    def start(self, function: Function, argument: Any) -> object:
        """Hand the task to a process."""
        task = object()
        self._work[task] = (function, argument)
        self._submit(task)
        return task

    def wait(self, tasks: Iterable[Any]) -> list[tuple[Any, Any]]:
        """Wait for any of *tasks*; starts those again whose process was lost."""
        while True:
            wanted = list(tasks)
            wait_for_any([self._futures[task] for task in wanted], return_when=FIRST_COMPLETED)
            found = []
            for task in wanted:
                future = self._futures[task]
                # A lost process breaks every future of the pool, those that had not begun as well: not an
                # answer.
                if future.done() and not isinstance(future.exception(), BrokenProcessPool):
                    found.append((task, future.result()))
                    del self._futures[task], self._work[task]
            if found:
                return found
            # Nothing was found: all that are done were lost with the pool.
            self._replace()

    def close(self) -> None:
        """End the processes."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _submit(self, task: object) -> None:
        try:
            function, argument = self._work[task]
            self._futures[task] = self._pool.submit(function, argument)
        except BrokenProcessPool:
            # ``_replace`` starts everything that is not done, this task included.
            self._replace()

    def _replace(self) -> None:
        """Start new processes, and everything that is not done.

        Raises SearchError if that has happened too often.
        """
        self._losses += 1
        if self._losses > MOST_LOSSES:
            raise SearchError(
                f"processes of the search were lost {MOST_LOSSES} times: too little memory? "
                f"--executor local:1 takes the least"
            )
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool = Processes(self.workers)
        for task, (function, argument) in self._work.items():
            # What has answered is kept, also if nobody has asked for it yet.
            future = self._futures.get(task)
            if future is None or not future.done() or future.exception() is not None:
                self._futures[task] = self._pool.submit(function, argument)


class Dask:
    """A cluster of Dask distributed, or one of its own on this machine."""

    def __init__(self, address: str) -> None:
        distributed = _imported("distributed", "dask")
        if address.startswith("local"):
            n_workers = _number(address, f"dask://{address}")
            with without_this_folder():
                self._cluster = distributed.LocalCluster(
                    n_workers=n_workers, threads_per_worker=1, dashboard_address=None, silence_logs=50
                )
            self._client = distributed.Client(self._cluster)
        else:
            self._cluster = None
            self._client = _connected(
                lambda: distributed.Client(f"tcp://{address}", timeout="10s"), "dask", address
            )
        self._wait = distributed.wait
        # Without -1 the scheduler names a few of its workers only.
        self.workers = max(len(self._client.scheduler_info(n_workers=-1)["workers"]), 1)

    def start(self, function: Function, argument: Any) -> Any:
        """Hand the task to the scheduler; it starts it again where a worker is lost."""
        # Not pure: Dask would answer equal arguments once, and hash them to see.
        return self._client.submit(function, argument, pure=False, retries=MOST_LOSSES)

    def wait(self, tasks: Iterable[Any]) -> list[tuple[Any, Any]]:
        """Wait for any of *tasks*."""
        done = self._wait(list(tasks), return_when="FIRST_COMPLETED").done
        return [(task, task.result()) for task in done]

    def close(self) -> None:
        """Disconnect, and end a cluster of our own."""
        self._client.close()
        if self._cluster is not None:
            self._cluster.close()


class Ray:
    """A cluster of Ray, or one of its own on this machine."""

    def __init__(self, address: str) -> None:
        self._ray = _imported("ray", "ray")
        options: dict[str, Any] = {
            "include_dashboard": False,
            "log_to_driver": False,
            "logging_level": "ERROR",
        }
        self._is_ours = address.startswith("local")
        if self._is_ours:
            options["num_cpus"] = _number(address, f"ray://{address}")
            self._ray.init(address="local", **options)  # not a cluster that runs here already
        else:
            _connected(lambda: self._ray.init(address=address, log_to_driver=False), "ray", address)
        self.workers = max(int(self._ray.cluster_resources().get("CPU", 1)), 1)

    def start(self, function: Function, argument: Any) -> Any:
        """Hand the task to the cluster; it starts it again where a worker is lost."""
        remote = self._ray.remote(max_retries=MOST_LOSSES, num_cpus=1)(function)
        return remote.remote(argument)

    def wait(self, tasks: Iterable[Any]) -> list[tuple[Any, Any]]:
        """Wait for any of *tasks*."""
        done, _ = self._ray.wait(list(tasks), num_returns=1)
        return [(task, self._ray.get(task)) for task in done]

    def close(self) -> None:
        """Disconnect; a cluster of our own ends with that."""
        self._ray.shutdown()


def open_executor(text: str) -> Executor:
    """Return who *text* names.

    Raises SearchError if it names nobody, the package is not installed, or nobody answers there.

    >>> open_executor("local:1").workers
    1
    """
    kind, _, address = text.partition("://")
    if text.partition(":")[0] == "local":
        workers = _number(text, text)
        return Here() if workers == 1 else Local(workers)
    if kind == "dask" and address:
        return Dask(address)
    if kind == "ray" and address:
        return Ray(address)
    raise SearchError(f"executor {text!r}: {FORMS}")


def cores() -> int:
    """Return the processors that this process may use."""
    # cpu_count knows nothing of containers and of taskset.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _number(text: str, whole: str) -> int:
    """Return the number behind ``local:``; without one, the processors of this machine."""
    number = text.partition(":")[2]
    if not number:
        return cores()
    if counted(number) < 1:
        raise SearchError(f"executor {whole!r}: a number of processes from 1 on, e.g. local:4")
    return counted(number)


def _imported(module: str, extra: str) -> Any:
    try:
        return __import__(module)
    except ImportError:
        raise SearchError(f"--executor {extra}://... needs {module}: pip install {module}") from None


def _connected(connect: Callable[[], Any], kind: str, address: str) -> Any:
    try:
        return connect()
    except (OSError, ConnectionError, ValueError) as error:
        said = " ".join(str(error).split())
        raise SearchError(f"nobody answers at {kind}://{address}: {said[:120]}") from None
