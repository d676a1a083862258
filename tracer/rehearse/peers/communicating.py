"""Writes down the communication that a process issues, in the order in which it does."""
# ruff: noqa: SLF001 - this module takes the place of parts of torch

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from foretrace.tracer import internals
from foretrace.tracer.flows import PASSES
from foretrace.tracer.operators import Operator, dtype_name, tensor_bytes
from foretrace.tracer.records import Position
from foretrace.tracer.rehearse.events.lane import GRADIENTS, INPUT
from foretrace.tracer.rehearse.events.tape import WAIT, Message
from foretrace.tracer.rehearse.operators.calls import tensors_in
from foretrace.tracer.rehearse.peers import fitting, gathering, hearing
from foretrace.tracer.rehearse.peers.letters import Address
from foretrace.tracer.rehearse.peers.splits import EVEN, Exchange, Splits, exchange_of
from foretrace.tracer.rehearse.peers.waits import work_class
from foretrace.tracer.rehearse.values.questions import Kernel
from foretrace.tracer.rehearse.values.shares import EXCHANGE

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.session import RehearsalSession

FUNCTIONAL: Final[Mapping[str, str]] = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_reduce_coalesced_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
    "shard_dim_alltoall": "all_to_all",
}
"""Functional collectives, and the kind of each."""


_OPS: Final = frozenset(
    {"sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum", "unused"}
)
"""Names of reductions, which stand among the arguments of functional collectives beside the group's."""


class _Reduction(threading.local):
    """By what a thread reduces, ``""`` where it does not."""

    name = ""


class Communications:
    """Makes handlers of operators that communicate.

    Args:
        session: the rehearsal.
        made: told what an operator has made, so that its memory is counted.
        gathered: told of tensors that hold gathered parameters.
        fake: whether tensors are fake. If not, operators run as they are and are only written down.
    """

    def __init__(
        self,
        session: RehearsalSession,
        made: Callable[[Any], None],
        gathered: Callable[[Any], None],
        *,
        fake: bool,
    ) -> None:
        import torch.distributed as dist

        self._session, self._dist, self._fake = session, dist, fake
        self._made, self._gathered = made, gathered
        self._under_way: dict[int, int] = {}
        self._work = work_class(dist, session.tape)
        self._reduction = _Reduction()
        self._tell_reductions()

    def _tell_reductions(self) -> None:
        """Remember by what the script reduces: the operator that arrives here is closed to Python."""
        from torch.distributed import distributed_c10d as c10d

        original = c10d.all_reduce

        @functools.wraps(original)
        def all_reduce(tensor: Any, op: Any = c10d.ReduceOp.SUM, *args: Any, **kwargs: Any) -> Any:
            self._reduction.name = str(op).rpartition(".")[2].lower()
            try:
                return original(tensor, op, *args, **kwargs)
            finally:
                self._reduction.name = ""

        for module in (c10d, self._dist):
            anywhere: Any = module
            anywhere.all_reduce = all_reduce

    @staticmethod
    def _factor(reduction: str, n_ranks: int) -> float | None:
        """Return how many times equal operands the result of a reduction is, None if nobody knows."""
        return {"sum": float(n_ranks), **dict.fromkeys(("avg", "max", "min"), 1.0)}.get(reduction)

    def eager(self, operator: Operator, func: Any) -> Kernel:
        """Return the handler of a ``c10d`` operator."""
        at = internals.async_flag(func)
        default = _default_of(func, at)
        root = _root_of(func)
        n_returns, called = len(func._schema.returns), func._schema.name.partition("::")[2]

        def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            own = self._dist.ProcessGroup.unbox(args[operator.group])
            group = self._session.groups.of(own)
            if operator.kind != "barrier":  # torch makes its tensor where the group has a backend
                self._session.backends.check(operator.kind, own, tensors_in(args[:2]))
            fitting.check(called, args, len(group.ranks))
            is_async = bool(kwargs.get("async_op", args[at] if at < len(args) else default))
            tensor = operator.tensor(args)
            size = operator.size(args, len(group.ranks))
            peer = group.ranks[args[operator.peer]] if operator.peer >= 0 else -1
            exchange = exchange_of(called, args)
            splits = self._splits(exchange, len(group.ranks))
            number = self._issue(
                operator.kind, group, size, tensor, is_async=is_async, peer=peer, splits=splits
            )
            outputs = tensors_in(list(operator.outputs(args)))
            for output in outputs:
                self._under_way[_storage_key(output)] = number
            self._hear(operator, args, group, self._address(operator.kind, group, peer, root(args)))
            if operator.kind == "all_gather":
                self._gathered(outputs)
            if exchange is not None and not self._is_dealt(exchange, group):
                for sent, got in zip(tensors_in(exchange.source), outputs, strict=False):
                    self._session.stated.note(EXCHANGE, (sent,), got)
            if not self._fake:
                return func(*args, **kwargs)
            is_held = is_async and peer < 0  # transfers tell the allocator instead (record_stream)
            held = tensors_in(args[:2]) if is_held else ()
            work = self._work(number if is_async else -1, outputs, held=held)
            return (args[0], work.boxed()) if n_returns > 1 else work.boxed()

        return handler

    def _hear(self, operator: Operator, args: tuple[Any, ...], group: Any, address: Address | None) -> None:
        """Follow numbers through a call of *operator* with *args* in *group*.

        One rank has left for others what it tells them at its *address*; else all send what this one does.
        """
        stated, sent = self._session.stated, tensors_in(args[:1])
        if address is not None and address.sender == self._session.rank:
            for one in sent:
                hearing.leave(stated, address, one)
            return
        outputs, own = tensors_in(list(operator.outputs(args))), operator.tensor(args)
        source = next((t for t in tensors_in(args[:2]) if all(t is not out for out in outputs)), own)
        factor = self._factor(self._reduction.name, len(group.ranks))
        stated.exchange(operator.kind, source, outputs, factor)
        if operator.kind == "all_gather" and len(tensors_in(args[:2])) == len(outputs) + 1:
            gathering.gathered(stated, group, self._session.rank, source, outputs)
        if address is not None:
            for one in sent:
                hearing.arrive(stated, address, one)

    def _address(self, kind: str, group: Any, peer: int, root: int) -> Address | None:
        """Return the address of what has just been issued, None if it is no message of one rank to others."""
        rank, letters = self._session.rank, self._session.letters
        if kind in {"send", "recv"} and peer >= 0:
            pair = (rank, peer) if kind == "send" else (peer, rank)
            return letters.next("transfer", group.id, *pair)
        if kind == "broadcast" and root >= 0:
            return letters.next("broadcast", group.id, group.ranks[root])
        return None

    @staticmethod
    def _splits(exchange: Exchange | None, n_ranks: int) -> Splits:
        """Return what an *exchange* among *n_ranks*, if it is one, sends to each and gets from each."""
        if exchange is None:
            return EVEN
        fitting.check_splits(exchange, n_ranks)
        return exchange.splits(n_ranks)

    def _is_dealt(self, exchange: Exchange, group: Any) -> bool:
        """Follow numbers through an *exchange* in *group*; return whether those that come of it are known."""
        stated, rank, filled = self._session.stated, self._session.rank, tensors_in(exchange.filled)
        is_dealt = stated.deal(exchange.source, filled, rank, group.ranks, exchange.rows_in)
        return gathering.exchanged(stated, group, rank, exchange) or is_dealt

    def _issue(
        self,
        kind: str,
        group: Any,
        size: int,
        tensor: Any,
        *,
        is_async: bool,
        peer: int = -1,
        splits: Splits = EVEN,
    ) -> int:
        """Write a communication down; return its number."""
        session = self._session
        session.group_infos[group.id] = group
        position: Position | None = None
        name = session.lane.block.name
        if peer >= 0:
            pair = (session.rank, peer) if kind == "send" else (peer, session.rank)
            sequence = group.next_transfer(pair)
            position, block = session.transfer(kind, tensor)
            name = block.name
        else:
            sequence = group.next_collective()
        if (position or session.position).step < 0:
            return -1
        if kind != "barrier":
            session.apart.sent(tensor, len(group.ranks))
            step = (position or session.position).step
            phase, block = session.lane.owner
            is_within = phase in PASSES and block not in {INPUT, GRADIENTS}
            session.trainings.flows.count(
                kind,
                group,
                size,
                dtype_name(tensor),
                step,
                phase=phase if is_within else "",
                is_uneven=splits is not EVEN,
            )
        message = Message(kind, group.id, size, dtype_name(tensor), peer, is_async, name or kind, *splits)
        return session.tape.communication(message, sequence, position)

    def functional(self, kind: str) -> Kernel:
        """Return the handler of a functional collective, whose results are waited for by ``wait_tensor``."""

        def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            from torch.distributed.distributed_c10d import _resolve_process_group

            named = next(
                a for a in (*reversed(args), *kwargs.values()) if isinstance(a, str) and a not in _OPS
            )
            own = _resolve_process_group(named)
            group = self._session.groups.of(own)
            self._session.backends.check(kind, own, tensors_in(args[0]))
            out = func(*args, **kwargs)
            self._made(out)
            inputs, outputs = tensors_in(args[0]), tensors_in(out)
            name = func._schema.name.partition("::")[2]
            exchange = exchange_of(name, args, out)
            splits = self._splits(exchange, len(group.ranks))
            if exchange is None or not self._is_dealt(exchange, group):
                self._session.stated.note(f"{func.namespace}.{name}", args, out)
            if kind in {"all_reduce", "all_gather", "broadcast"}:
                factor = self._factor(str(args[1]), len(group.ranks))
                self._session.stated.exchange(kind, inputs[0], outputs, factor)
            if kind == "all_gather" and len(outputs) == 1:
                gathering.gathered(self._session.stated, group, self._session.rank, inputs[0], outputs)
            whole = outputs if kind == "all_gather" else inputs
            size = sum(map(tensor_bytes, whole))
            number = self._issue(kind, group, size, inputs[0], is_async=True, splits=splits)
            for output in outputs:
                self._under_way[_storage_key(output)] = number
            return out

        return handler

    def wait_tensor(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle a wait for the result of a functional collective."""
        del kwargs
        number = self._under_way.pop(_storage_key(args[0]), -1)
        if number >= 0 and self._session.position.step >= 0:
            self._session.tape.note(WAIT, number=number)
        return func(*args) if not self._fake else args[0]


def _storage_key(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)


def _root_of(func: Any) -> Callable[[tuple[Any, ...]], int]:
    """Return what tells the place in its group of the rank that an operator names as its root, -1 if none."""
    names = [argument.name for argument in func._schema.arguments]
    at = names.index("root_rank") if "root_rank" in names else -1
    return lambda args: int(args[at]) if 0 <= at < len(args) else -1


def _default_of(func: Any, at: int) -> bool:
    """Return whether an operator is asynchronous if it does not say."""
    arguments = func._schema.arguments
    return bool(arguments[at].default_value) if at < len(arguments) else True
