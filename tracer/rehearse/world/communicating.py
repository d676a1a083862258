"""Writes down the communication that a process issues, and follows the numbers that ranks send each other."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar, Final, NamedTuple

from foretrace.tracer import internals
from foretrace.tracer.flows import PASSES
from foretrace.tracer.internals import makers
from foretrace.tracer.operators import Operator, dtype_name, tensor_bytes
from foretrace.tracer.records import Position
from foretrace.tracer.rehearse.data.experts import EXCHANGE
from foretrace.tracer.rehearse.data.stated import Stated
from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.replacing import replaces
from foretrace.tracer.rehearse.state import State
from foretrace.tracer.rehearse.tape.calls import Kernel, storage_key, tensors_in
from foretrace.tracer.rehearse.tape.tape import GRADIENTS, INPUT
from foretrace.tracer.rehearse.world.letters import ALL, MOST_NUMBERS, Address
from foretrace.traces.rehearsal import WAIT, Message

# What an asynchronous communication of a rehearsal hands back: waiting for it is written down.


def settled(future: Any) -> Any:
    """Return a *future* for torch's reducer: one of C++, which is complete; the wait comes before its end."""
    if not isinstance(future, RehearsedFuture):
        return future
    import torch

    found = torch.futures.Future()
    with internals.without_modes():
        found.set_result(future.value())
    internals.queue_callback()(future.wait)
    return found


class RehearsedFuture:
    """What becomes of a communication.

    Args:
        wait: lets the current stream wait for it.
        result: its results.
    """

    stream: ClassVar[Any] = None  # on which is issued what follows communications, made when it is needed

    def __init__(self, wait: Callable[[], Any], result: Any) -> None:
        self._wait, self._result = wait, result

    def then(self, follower: Callable[[Any], Any]) -> RehearsedFuture:
        """Return a future of what *follower* makes of this one.

        It is called at once, on a stream of its own that waits for the communication, as torch calls what is
        to follow one of NCCL: such a future is complete as soon as its kernel is queued (``workEnqueue`` of
        ProcessGroupNCCL.cpp, ``invokeCallback`` of ivalue_inl.h). So it is done whether or not anybody waits.
        """
        from torch import cuda

        if RehearsedFuture.stream is None:
            RehearsedFuture.stream = cuda.Stream()
        with cuda.stream(RehearsedFuture.stream):
            self._wait()
            result = follower(self)
            return RehearsedFuture(RehearsedFuture.stream.record_event().wait, result)

    def add_done_callback(self, follower: Callable[[Any], Any]) -> None:
        """Have *follower* called as ``then`` does."""
        self.then(follower)

    def wait(self) -> Any:
        """Let the current stream wait, and return the result."""
        self._wait()
        return self._result

    def value(self) -> Any:
        """Return the result."""
        return self._result

    def done(self) -> bool:
        """Say that it is."""
        return True


def install_futures() -> None:
    """Let ``torch.futures`` wait for these futures, too: its own functions take those of C++ only."""
    import torch

    @replaces(torch.futures)
    def collect_all(original: Any, futures: Sequence[Any]) -> Any:
        if not any(isinstance(one, RehearsedFuture) for one in futures):
            return original(futures)
        return RehearsedFuture(lambda: [one.wait() for one in futures], list(futures))

    torch.futures.wait_all = lambda futures: [one.wait() for one in futures]


_MOST: Final = 4096
"""Works for which nobody has waited that are kept; more are never under way."""


def work_class(dist: Any, tape: Any) -> Any:
    """Return the class of works of torch, ``dist.Work``, whose waits are written down on *tape*."""
    return type("RehearsedWork", (_Waited, dist.Work), {"tape": tape, "under_way": {}})


class _Waited:
    """A communication that nobody carries out.

    It holds the tensors *held* until somebody waits for it, and its results as long as it lives, as those of
    NCCL do (``stashed_for_allocator_safety_`` and ``outputs_`` of ``WorkNCCL`` in ProcessGroupNCCL.cpp): a
    script that keeps its handles keeps the gradients behind them.

    Args:
        number: of its event, -1 if nobody is to wait for it.
        outputs: its results.
        held: see above.

    Attributes:
        under_way: works for which nobody has waited: torch finds the Python object behind a work only while
            there is one.
    """

    tape: Any  # where waits are written down
    under_way: ClassVar[dict[int, Any]]

    def __init__(self, number: int, outputs: Sequence[Any] = (), *, held: Sequence[Any] = ()) -> None:
        super().__init__()
        self.number = number
        self._outputs = [weakref.ref(output) for output in outputs]
        self._until_waited = held
        self.is_reducers = False  # whether torch's reducer, which is in C++, has issued it
        self._results: list[Any] = []
        self.under_way[id(self)] = self
        if len(self.under_way) > _MOST:
            # The first one is the oldest.
            del self.under_way[next(iter(self.under_way))]

    def wait(self, timeout: Any = None) -> bool:
        """Let the current stream wait; from now on the work lives as long as the script keeps it."""
        if self.number >= 0:
            self.tape.note(WAIT, number=self.number)
        if self._until_waited:
            self._results = [output() for output in self._outputs]
            self._until_waited = ()
        self.under_way.pop(id(self), None)
        return True

    def is_completed(self) -> bool:
        """Say that it is done."""
        return True

    def is_success(self) -> bool:
        """Say that it went well."""
        return True

    def synchronize(self) -> None:
        """Let the current stream wait."""
        self.wait()

    def get_future(self) -> Any:
        """Return what becomes of the communication; its results are there already."""
        found = RehearsedFuture(self.wait, [output() for output in self._outputs])
        return settled(found) if self.is_reducers else found


# Checks that the operands of a collective fit its group, as NCCL does: a script may assume one size.

WHOLE: Final = {
    "_allgather_base_": (
        0,
        "output tensor must have the same type as input tensor",
        "output tensor size must be equal to world_size times input tensor size",
    ),
    "_reduce_scatter_base_": (
        1,
        "input tensor must be the same type as the output tensor.",
        "input tensor must be the same size as output size times world size",
    ),
}
"""Operators of ``c10d``: which of their first two operands holds what all ranks have a part of, and with what
words a real run ends where types or sizes differ (``ProcessGroupNCCL.cpp`` of PyTorch)."""


def check(name: str, args: tuple[Any, ...], n_ranks: int) -> None:
    """Raise PyTorch's own error if operands of the operator *name* do not fit *n_ranks*.

    Raises:
        TypeError: their types differ.
        ValueError: the whole is not as large as all parts.
    """
    if name not in WHOLE:
        return
    at, of_types, of_sizes = WHOLE[name]
    whole, part = args[at], args[1 - at]
    if whole.dtype != part.dtype:
        raise TypeError(of_types)
    if whole.numel() != part.numel() * n_ranks:
        raise ValueError(f"{of_sizes}: {whole.numel():,} against {n_ranks:,} times {part.numel():,} elements")


def check_splits(exchange: Exchange, n_ranks: int) -> None:
    """Raise PyTorch's own error if the rows of an all-to-all are not the sum of its splits.

    Without splits, and for lists, NCCL checks nothing (``ProcessGroupNCCL::alltoall_base``, ``alltoall``,
    ``checkSplitSizes``): it would write past the end of what is filled, or wait for what nobody sends.

    Raises:
        RuntimeError: there are not as many splits as ranks, or rows that they leave over or do not have.
        RehearsalError: without splits more is sent than is filled; lists have not one tensor per rank.
    """
    source, filled = exchange.source, exchange.filled
    if isinstance(source, list | tuple):
        if len(source) != n_ranks or len(filled) != n_ranks:
            raise RehearsalError(
                f"all_to_all sends {len(source):,} tensors and fills {len(filled):,} in a group of "
                f"{n_ranks:,} ranks: a real run over NCCL waits for the others, give one per rank"
            )
    elif exchange.rows_in or exchange.rows_out:
        _check_rows(source, exchange.rows_in, n_ranks)
        _check_rows(filled, exchange.rows_out, n_ranks)
    elif filled.numel() < source.numel():
        raise RehearsalError(
            f"all_to_all_single sends {source.numel():,} elements and fills {filled.numel():,}: without "
            "splits a real run over NCCL writes past the end, give as many or output_split_sizes"
        )


def _check_rows(tensor: Any, splits: Sequence[int] | None, n_ranks: int) -> None:
    n_rows = int(tensor.shape[0])
    if not splits:
        if n_rows % n_ranks:
            raise RuntimeError(
                f"Tensor's dim 0 does not divide equally across group size: {n_rows:,} by {n_ranks:,}"
            )
        return
    if len(splits) != n_ranks:
        raise RuntimeError(
            f"Number of tensor splits not equal to group size: {len(splits):,} against {n_ranks:,}"
        )
    if sum(splits) != n_rows:
        raise RuntimeError(f"Split sizes doesn't match total dim 0 size: {sum(splits):,} against {n_rows:,}")


class Splits(NamedTuple):
    """Bytes of an all-to-all by place in the group, both empty if it is even."""

    sent: tuple[int, ...] = ()  # to each rank, itself included
    received: tuple[int, ...] = ()  # from each


EVEN: Final = Splits()
"""Those of an all-to-all that sends as much to each, and of every other collective."""


class Exchange(NamedTuple):
    """What one rank hands to an all-to-all."""

    filled: Any  # what comes, a tensor or one from each rank
    source: Any  # what is sent, a tensor or one for each rank
    rows_out: Sequence[int] | None = None  # rows of *filled* from each rank; empty or None: as many from each
    rows_in: Sequence[int] | None = None  # rows of *source* for each rank, in the same way

    def splits(self, n_ranks: int) -> Splits:
        """Return the bytes among *n_ranks*.

        >>> Exchange([], []).splits(2)
        Splits(sent=(), received=())
        """
        sent = _sizes(self.source, n_ranks, self.rows_in)
        received = _sizes(self.filled, n_ranks, self.rows_out)
        return Splits(sent, received) if len({*sent, *received}) > 1 else EVEN


def exchange_of(name: str, args: Sequence[Any], out: Any = None) -> Exchange | None:
    """Return the all-to-all that a call of the operator *name* is, None if it is another collective."""
    if name == "alltoall_base_":
        return Exchange(args[0], args[1], args[3], args[4])
    if name == "alltoall_":
        return Exchange(args[0], args[1])
    return Exchange(out, args[0], args[1], args[2]) if name == "all_to_all_single" else None


def _sizes(tensors: Any, n_ranks: int, rows: Sequence[int] | None) -> tuple[int, ...]:
    """Return the bytes of each part of *tensors*."""
    if isinstance(tensors, list | tuple):
        return tuple(map(tensor_bytes, tensors))
    whole = tensor_bytes(tensors)
    if not rows:
        return (whole // n_ranks,) * n_ranks
    width = whole // max(int(tensors.shape[0]), 1)
    return tuple(int(n) * width for n in rows)


# Integers that one rank sends to another in tensors: the sender writes them, the receiver reads them.


def leave(stated: Stated, address: Address, tensor: Any) -> None:
    """Write the numbers of *tensor*, which is sent to *address*, for other ranks, if they are few.

    Numbers that other ranks are only assumed to have sent are not written.
    """
    if tensor.numel() <= MOST_NUMBERS and (own := own_numbers(stated, tensor)) is not None:
        stated.letters.leave(address, own)


def arrive(stated: Stated, address: Address, tensor: Any) -> None:
    """Give *tensor* the numbers that were sent to *address*, if the sender has been rehearsed.

    If the sender will not be rehearsed, it gets those of a similar transfer.
    """
    letters = stated.letters
    found = letters.read(address)
    is_like, is_awaited = found is None, found is None and address.sender in letters.coming
    if found is None and not is_awaited:
        found = letters.alike(address)
    if found is not None and len(found) == tensor.numel():
        with stated.numbers.really():
            real = makers().tensor(found, dtype=tensor.dtype).reshape(tensor.shape)
        if stated.numbers.write_part(tensor, real):
            return
        stated.forget([tensor])
        if stated.numbers.fill([tensor], real, is_shared=is_like):
            return
    if is_awaited or address.receiver != ALL:
        stated.is_from(address.sender, tensor)


KINDS: Final = frozenset({"all_gather", "all_to_all"})
"""Kinds of messages by which all ranks tell all others something."""

MOST_GATHERED: Final = 1 << 16
"""Elements above which numbers are not left for others."""


def gathered(stated: Stated, group: Any, rank: int, source: Any, outputs: Sequence[Any]) -> None:
    """Follow an all-gather of *source* in *group*, from which *rank* gets *outputs*.

    These are one tensor per member, or one tensor for all.
    """
    heard = _heard(stated, "all_gather", group, rank, own_numbers(stated, source))
    if heard is None:
        return
    parts = heard if len(outputs) == len(heard) else [[n for one in heard for n in one]]
    _fill(stated, outputs, parts)


def exchanged(stated: Stated, group: Any, rank: int, exchange: Exchange) -> bool:
    """Follow an all-to-all in *group*; return whether the outputs are what others have sent to *rank*."""
    source, outputs = exchange.source, tensors_in(exchange.filled)
    heard = _heard(
        stated, "all_to_all", group, rank, _parts(stated, source, len(group.ranks), exchange.rows_in)
    )
    if heard is None:
        return False
    mine = [one[group.ranks.index(rank)] for one in heard]
    parts = mine if isinstance(source, list | tuple) else [[n for one in mine for n in one]]
    return _fill(stated, outputs, parts)


def _heard(stated: Stated, kind: str, group: Any, rank: int, content: Any) -> list[Any] | None:
    """Leave *content* for the others of *group*; return what each has left, None if one has not."""
    letters, found = stated.letters, []
    own = letters.next(kind, group.id, rank)
    if content is not None:
        letters.leave(own, content)
    for member in group.ranks:
        address = Address(*own[:2], member, *own[3:])
        found.append(content if member == rank else letters.read(address))
    return None if len(found) < 2 or any(one is None for one in found) else found


def own_numbers(stated: Stated, tensor: Any) -> list[int] | None:
    """Return the integers of *tensor*; None if they are not this rank's own, or too many."""
    numbers = stated.numbers
    if tensor.is_floating_point() or tensor.numel() > MOST_GATHERED or numbers.is_shared(tensor):
        return None
    own = numbers.of(tensor)
    if own is None:
        return None
    with numbers.really():
        found: list[int] = own.flatten().tolist()
    return found


def _parts(stated: Stated, source: Any, n_ranks: int, rows: Sequence[int] | None) -> list[Any] | None:
    """Return the numbers that are sent to each of *n_ranks*."""
    if isinstance(source, list | tuple):
        listed = [own_numbers(stated, one) for one in source]
        return None if any(one is None for one in listed) else listed
    whole, n_rows = own_numbers(stated, source), source.shape[0] if source.dim() else 0
    if whole is None or not n_rows:
        return None
    counts, width = rows or [n_rows // n_ranks] * n_ranks, len(whole) // n_rows
    ends = [sum(counts[: at + 1]) * width for at in range(n_ranks)]
    return [whole[end - n * width : end] for n, end in zip(counts, ends, strict=True)]


def _fill(stated: Stated, outputs: Sequence[Any], parts: Sequence[Sequence[int]]) -> bool:
    """Let *outputs* have the numbers of *parts*, where all of them fit; return whether they do."""
    sizes = [len(part) for part in parts]
    if [one.numel() for one in outputs] != sizes or any(one.is_floating_point() for one in outputs):
        return False
    with stated.numbers.really():
        real = [
            makers().tensor(part, dtype=tensor.dtype).reshape(tensor.shape)
            for tensor, part in zip(outputs, parts, strict=True)
        ]
    stated.forget(outputs)
    return stated.numbers.fill(outputs, real, is_shared=False)


NAMESPACE: Final = "symm_mem"
"""Operators that send through memory that ranks share: nothing says what they send."""


def refuse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuse an operator of that namespace."""
    raise RehearsalError(
        f"{internals.schema_of(func).name} sends through symmetric memory, which cannot be rehearsed: run "
        "with the collective that it stands for, by an argument of the script or in a stub (--stub, "
        "docs/rehearse.md section 6)"
    )


_FUNCTIONAL: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
"""Kinds of functional collectives, with which their names begin; `_dtensor` has one more."""


def kind_of(name: str) -> str:
    """Return the kind of the functional collective of that *name*, "" if it is none."""
    name = name.replace("shard_dim_alltoall", "all_to_all")
    return next((kind for kind in _FUNCTIONAL if name.startswith(kind)), "")


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
        made: told what an operator has made, so that its memory is counted.
        gathered: told of tensors that hold gathered parameters.
        call: calls an operator on tensors.
    """

    def __init__(
        self,
        session: State,
        made: Callable[[Any], None],
        gathered: Callable[[Any], None],
        call: Callable[..., tuple[Any, Any]],
    ) -> None:
        import torch.distributed as dist

        self._session, self._dist = session, dist
        self._made, self._gathered, self._call = made, gathered, call
        self._under_way: dict[int, int] = {}
        self._work = work_class(dist, session.tape)
        self._reduction = _Reduction()
        self._tell_reductions()

    def _tell_reductions(self) -> None:
        """Remember by what the script reduces: the operator that arrives here is closed to Python."""
        from torch.distributed import distributed_c10d as c10d

        @replaces(c10d, self._dist)
        def all_reduce(
            original: Any, tensor: Any, op: Any = c10d.ReduceOp.SUM, *args: Any, **kwargs: Any
        ) -> Any:
            self._reduction.name = str(op).rpartition(".")[2].lower()
            try:
                return original(tensor, op, *args, **kwargs)
            finally:
                self._reduction.name = ""

    @staticmethod
    def _factor(reduction: str, n_ranks: int) -> float | None:
        """Return how many times equal operands the result of a reduction is, None if nobody knows."""
        return {"sum": float(n_ranks), **dict.fromkeys(("avg", "max", "min"), 1.0)}.get(reduction)

    def eager(self, operator: Operator, func: Any) -> Kernel:
        """Return the handler of a ``c10d`` operator."""
        at = internals.async_flag(func)
        default = _default_of(func, at)
        root = _root_of(func)
        n_returns, called = (
            len(internals.schema_of(func).returns),
            internals.schema_of(func).name.partition("::")[2],
        )

        def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            own = self._dist.ProcessGroup.unbox(args[operator.group])
            reducer = self._session.apart.reducers.get(id(own))
            own = reducer.group if reducer else own
            group = self._session.groups.of(own)
            if operator.kind != "barrier":  # torch makes its tensor where the group has a backend
                self._session.backends.check(operator.kind, own, tensors_in(args[:2]))
            check(called, args, len(group.ranks))
            is_async = bool(kwargs.get("async_op", args[at] if at < len(args) else default))
            tensor = operator.tensor(args)
            size = operator.size(args, len(group.ranks))
            peer = group.ranks[args[operator.peer]] if operator.peer >= 0 else -1
            exchange = exchange_of(called, args)
            splits = self._splits(exchange, len(group.ranks))
            with self._session.apart.of_ddp(reducer.parameters) if reducer else nullcontext():
                number = self._issue(
                    operator.kind, group, size, tensor, is_async=is_async, peer=peer, splits=splits
                )
            outputs = tensors_in(list(operator.outputs(args)))
            for output in outputs:
                self._under_way[storage_key(output)] = number
            if reducer and operator.kind == "all_reduce":  # it counts what ranks have used, all as this one
                self._session.stated.numbers.scale(tensor, len(group.ranks))
            else:
                self._hear(operator, args, group, self._address(operator.kind, group, peer, root(args)))
            if operator.kind == "all_gather":
                self._gathered(outputs)
            if exchange is not None and not self._is_dealt(exchange, group):
                # Of what comes only the mean is known, which is that of what is sent.
                for sent, got in zip(tensors_in(exchange.source), outputs, strict=False):
                    self._session.stated.note(EXCHANGE, (sent,), got)
            is_held = is_async and peer < 0  # transfers tell the allocator instead (record_stream)
            held = tensors_in(args[:2]) if is_held else ()
            work = self._work(number if is_async else -1, outputs, held=held)
            work.is_reducers = reducer is not None
            return (args[0], work.boxed()) if n_returns > 1 else work.boxed()

        return handler

    def _hear(self, operator: Operator, args: tuple[Any, ...], group: Any, address: Address | None) -> None:
        """Follow numbers through a call of *operator* with *args* in *group*.

        One rank has left for others what it tells them at its *address*; else all send what this one does.
        """
        stated, sent = self._session.stated, tensors_in(args[:1])
        if address is not None and address.sender == self._session.rank:
            for one in sent:
                leave(stated, address, one)
            return
        outputs, own = tensors_in(list(operator.outputs(args))), operator.tensor(args)
        # What is sent is no output, unless the collective is in place.
        source = next((t for t in tensors_in(args[:2]) if all(t is not out for out in outputs)), own)
        factor = self._factor(self._reduction.name, len(group.ranks))
        stated.exchange(operator.kind, source, outputs, factor)
        if operator.kind == "all_gather" and len(tensors_in(args[:2])) == len(outputs) + 1:
            gathered(stated, group, self._session.rank, source, outputs)
        if address is not None:
            for one in sent:
                arrive(stated, address, one)

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
        check_splits(exchange, n_ranks)
        return exchange.splits(n_ranks)

    def _is_dealt(self, exchange: Exchange, group: Any) -> bool:
        """Follow numbers through an *exchange* in *group*; return whether those that come of it are known."""
        stated, rank, filled = self._session.stated, self._session.rank, tensors_in(exchange.filled)
        is_dealt = stated.deal(exchange.source, filled, rank, group.ranks, exchange.rows_in)
        return exchanged(stated, group, rank, exchange) or is_dealt

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
            # The group's name is the last text that is no reduction.
            named = next(
                a for a in (*reversed(args), *kwargs.values()) if isinstance(a, str) and a not in _OPS
            )
            own = internals.group_named(named)
            group = self._session.groups.of(own)
            self._session.backends.check(kind, own, tensors_in(args[0]))
            out = self._call(func, args, kwargs)[0]
            self._made(out)
            inputs, outputs = tensors_in(args[0]), tensors_in(out)
            name = internals.schema_of(func).name.partition("::")[2]
            exchange = exchange_of(name, args, out)
            splits = self._splits(exchange, len(group.ranks))
            if exchange is None or not self._is_dealt(exchange, group):
                self._session.stated.note(f"{func.namespace}.{name}", args, out)
            if kind in {"all_reduce", "all_gather", "broadcast"}:
                factor = self._factor(str(args[1]), len(group.ranks))
                self._session.stated.exchange(kind, inputs[0], outputs, factor)
            if kind == "all_gather" and len(outputs) == 1:
                gathered(self._session.stated, group, self._session.rank, inputs[0], outputs)
            whole = outputs if kind == "all_gather" else inputs
            size = sum(map(tensor_bytes, whole))
            number = self._issue(kind, group, size, inputs[0], is_async=True, splits=splits)
            for output in outputs:
                self._under_way[storage_key(output)] = number
            return out

        return handler

    def wait_tensor(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle a wait for the result of a functional collective."""
        number = self._under_way.pop(storage_key(args[0]), -1)
        if number >= 0 and self._session.position.step >= 0:
            self._session.tape.note(WAIT, number=number)
        return args[0]


def _root_of(func: Any) -> Callable[[tuple[Any, ...]], int]:
    """Return what tells the place in its group of the rank that an operator names as its root, -1 if none."""
    names = [argument.name for argument in internals.schema_of(func).arguments]
    at = names.index("root_rank") if "root_rank" in names else -1
    return lambda args: int(args[at]) if 0 <= at < len(args) else -1


def _default_of(func: Any, at: int) -> bool:
    """Return whether an operator is asynchronous if it does not say."""
    arguments = internals.schema_of(func).arguments
    return bool(arguments[at].default_value) if at < len(arguments) else True
