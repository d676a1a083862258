"""Communications that are issued and have no span yet: each waits for its end, and for those before it.

Streams are given in the order of issue within a group. So a communication waits for those that its group has
issued before it, for no others and for not too many: one that takes long holds up no span of another group.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Final

from foretrace.tracer.device_works import DeviceTimes
from foretrace.tracer.records import Communication

MOST_UNDER_WAY: Final = 65_536
"""Communications that are followed at once: some 40 MB."""

MOST_BEHIND: Final = 1024
"""Communications that wait for one before them: with more of them, what has ended passes what has not."""

Line = tuple[int, int, str, bool]


class UnderWay:
    """Communications of one rank that have no span yet; used on the thread that writes.

    Iterating yields them, oldest first.

    Args:
        times: tells when communications began and ended.
        most: how many are followed at once; what comes beyond is only counted, as the oldest explain a hang.

    Attributes:
        n_kept: how many are followed.
        n_left: how many had not ended when the recording did.
        n_beyond: how many came while as many as are followed were under way.
    """

    def __init__(self, times: DeviceTimes, most: int = MOST_UNDER_WAY) -> None:
        self._times, self._most = times, most
        self._lines: defaultdict[Line, deque[tuple[int, Communication]]] = defaultdict(deque)
        self._numbers = itertools.count()
        self.n_kept = 0
        self.n_left = self.n_beyond = 0

    def __iter__(self) -> Iterator[Communication]:
        return (one for _, one in heapq.merge(*self._lines.values()))

    def add(self, communication: Communication) -> None:
        """Take a communication that was issued after those which were added before."""
        if self.n_kept >= self._most:
            self.n_beyond += 1
            return
        self.n_kept += 1
        self._lines[_line(communication)].append((next(self._numbers), communication))

    def take(self, *, last: bool) -> Iterator[tuple[Communication, int, int]]:
        """Yield what has ended, when it began and when it ended, in the order of issue within a group.

        On a processor it began when it was issued, as far as is known here.

        Args:
            last: the recording ends: what has not ended is counted, and kept to be told of.
        """
        for line in self._lines.values():
            may_pass = last or len(line) > MOST_BEHIND
            for _ in range(len(line)):
                _, one = line[0]
                times = self._times.of(one, last=last)
                if times is not None:
                    line.popleft()
                    self.n_kept -= 1
                    yield one, *times
                elif may_pass:
                    self.n_left += last
                    if last and one.launch is not None:
                        one.launch.work = None  # it keeps the memory of its tensors
                    line.rotate(-1)
                else:
                    break


def _line(communication: Communication) -> Line:
    """Return what tells communications that wait for each other from others.

    A group may run tensors of the processor on gloo and those of a GPU on NCCL, one at a time. A transfer
    between processors waits for its peer only.
    """
    if communication.device >= 0:
        return communication.group.id, -1, "", True
    direction = communication.kind if communication.is_p2p else ""
    return communication.group.id, communication.peer, direction, False
