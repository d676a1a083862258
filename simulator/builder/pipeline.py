"""Turns the schedule of a rank into receives, work and sends, whatever the work of an action consists of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from foretrace.simulator.builder.instances import Message
from foretrace.simulator.builder.program_builder import STREAMS, Task, Template
from foretrace.simulator.builder.stages import n_stages
from foretrace.simulator.program import Label
from foretrace.simulator.schedules import Action, Plan, holders


class Visit(NamedTuple):
    """Everything that the template of an action depends on.

    Attributes:
        kind: kind of the action: forward, backward, or one half of a backward.
        source: pipeline rank that it receives from, None if it does not receive.
        destination: pipeline rank that it sends to, None if it does not send.
        is_last: whether it is the last of its rank and stage to make weight gradients.
        first: 1 for the first forward of its rank, 2 for the first one of another stage of it, and so on; 0
            for any other action.
    """

    kind: str
    stage: int
    pp: int
    source: int | None
    destination: int | None
    is_last: bool
    first: int = 0


@lru_cache(maxsize=64)
def visits(orders: Plan) -> tuple[tuple[Visit, ...], ...]:
    """Return the ``Visit`` of every action of a plan, by pipeline rank, in the plan's order."""
    at = holders(orders)
    # Later actions take the place of earlier ones: what is left is the last.
    last = {(pp, a.stage): a for pp, own in enumerate(orders) for a in own if a.kind in "BW"}
    first = [_firsts(own) for own in orders]

    def visit(pp: int, action: Action) -> Visit:
        kind, stage, microbatch = action
        is_last = kind in "BW" and action == last[pp, stage]
        if kind == "W":  # weight gradients stay where they are
            return Visit(kind, stage, pp, None, None, is_last, 0)
        before, after = at.get((stage - 1, microbatch)), at.get((stage + 1, microbatch))
        source, destination = (before, after) if kind == "F" else (after, before)
        return Visit(
            kind,
            stage,
            pp,
            None if source == pp else source,  # what stays on the rank is not sent
            None if destination == pp else destination,
            is_last,
            first[pp].get(action, 0),
        )

    return tuple(tuple(visit(pp, action) for action in own) for pp, own in enumerate(orders))


def _firsts(actions: Sequence[Action]) -> dict[Action, int]:
    """Return the first forward of each stage among *actions*, numbered from 1 in their order."""
    found: dict[int, Action] = {}
    for action in actions:
        if action.kind == "F":
            found.setdefault(action.stage, action)
    return {action: at for at, action in enumerate(found.values(), 1)}


class Pipeline:
    """Writes receives and sends around what the actions of a plan do.

    *size_bytes*: size of a message between stages: activations or their gradients. *overlap_p2p*: post a
    receive one action earlier. None: only if a rank has several stages or backward is split (splitting it is
    of no use where ranks wait for messages).

    *visits*: what each action is, by pipeline rank, in the order of the plan.
    """

    def __init__(self, orders: Plan, size_bytes: int, dtype: str, *, overlap_p2p: bool | None) -> None:
        self.n_stages = n_stages(orders)
        self.visits = visits(orders)
        self._n_ranks = len(orders)
        has_several = len({visit[1:3] for own in self.visits for visit in own}) > len(orders)
        is_split = any(visit.kind == "W" for own in self.visits for visit in own)
        self._overlaps = has_several or is_split if overlap_p2p is None else overlap_p2p
        self._has_queue_per_neighbour = has_several or self._overlaps
        self._size_bytes, self._dtype = size_bytes, dtype

    def write(self, template: Template, visit: Visit, main: Callable[[], object]) -> None:
        """Write receive, main line and send of an action; *main* appends the main line.

        A receive is posted when the action before it has been computed, so that its span shows the wait; a
        send does not hold up what follows (Megatron-LM ``schedules.py``, without overlapped p2p). The host
        waits for what was received (``batch_p2p_sync`` there). With overlapped p2p the receive is posted one
        action earlier, and the host does not wait.
        """
        if visit.source is not None:
            message = self._message(visit, "recv", visit.source)
            if self._overlaps:
                template.tails = (Template.BEFORE, template.add(message, (Template.EARLIER,)))
            else:
                template.synchronized = (template.then(message),)
        main()
        if visit.destination is not None:
            template.add(self._message(visit, "send", visit.destination), template.tails)

    def write_pair(self, template: Template, pair: tuple[Visit, Visit], main: Callable[[], object]) -> None:
        """Write two actions that run together: both receive, *main* appends both main lines, both send."""
        received = [
            template.add(
                self._message(visit, "recv", visit.source)._replace(part=part),
                (Template.EARLIER if self._overlaps else Template.BEFORE,),
            )
            for part, visit in enumerate(pair)
            if visit.source is not None
        ]
        template.tails = (Template.BEFORE, *received)
        if not self._overlaps:
            template.synchronized = tuple(received)
        main()
        for part, visit in enumerate(pair):
            if visit.destination is not None:
                message = self._message(visit, "send", visit.destination)
                template.add(message._replace(part=part), template.tails)

    def _message(self, visit: Visit, kind: str, peer_pp: int) -> Task:
        """Return the transfer of one micro-batch's activations or their gradients."""
        name = "activations" if visit.kind == "F" else "gradients"
        # The cut that a message crosses, by the number of the stage behind it.
        boundary = visit.stage + ((kind == "send") == (visit.kind == "F"))
        stream = f"pp.{kind}"
        if self._has_queue_per_neighbour:
            # Of two ranks the other one always counts as the next: one queue for both ways.
            is_next = (peer_pp - visit.pp) % self._n_ranks == 1
            stream += f".{name}.{'next' if is_next else 'prev'}"
        label = Label("p2p", kind, name, "pp", self._dtype)
        message = Message(kind, "pp", self._size_bytes, self._dtype, peer_pp, boundary)
        return Task(STREAMS.index(stream), label, message=message)
