"""Threads that wait in place of the training: none is in a wait for a transfer when the process ends."""

from types import SimpleNamespace
from typing import Any, cast

from foretrace.tracer.completion import Watchers


def test_a_transfer_that_is_watched_when_the_process_ends_is_not_waited_for() -> None:
    """The end gives up the waits that have begun; nobody would end one that begins behind it."""
    waited: list[Any] = []
    watchers = Watchers(waited.append, lambda _: None)
    transfer = cast("Any", SimpleNamespace(is_p2p=True, watch=None, work=object(), end=None))
    watchers.watch([transfer])
    transfer.watch.done.wait(60)
    assert waited == [transfer.work]
    watchers.give_up()
    watchers.watch([transfer])
    assert watchers.close(60)
    assert waited == [transfer.work]
