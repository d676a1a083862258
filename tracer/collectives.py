"""Observes every collective and transfer of a process.

All of them, from Python, from the C++ reducer of DDP or from a compiled graph, are dispatched as ``c10d::*``
operators. An implementation at the dispatch key ``BackendSelect``, which comes first and which none of them
uses, sees each call on any thread and any device, and redispatches it with the key removed. Other methods
miss some of them, or deadlock because they hold the interpreter lock.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from foretrace.tracer import internals
from foretrace.tracer.clock import now_ns
from foretrace.tracer.groups import GroupInfo
from foretrace.tracer.guarded import between
from foretrace.tracer.lane import NOBODY
from foretrace.tracer.operators import RECORDED, Operator, dtype_name
from foretrace.tracer.records import Block, Communication, Position
from foretrace.tracer.stamps import cuda_stamp

if TYPE_CHECKING:
    from foretrace.tracer.session import Session


class CollectiveHook:
    """Implementations of the ``c10d`` operators that record each call."""

    def __init__(self, session: Session) -> None:
        import torch
        import torch.distributed as dist

        self._session = session
        self._lane = session.lane
        self._unbox_group, self._unbox_work = dist.ProcessGroup.unbox, dist.Work.unbox
        self._after = internals.keys_after_backend_select()
        self._classic, self._functional = Implementations("c10d"), Implementations("_c10d_functional")
        pause, resume = session.pausing()
        paused = between(lambda *_, **__: pause(), resume)
        for name, operator in RECORDED.items():
            if (packet := getattr(torch.ops.c10d, name, None)) is not None:
                kernel = self._noting(name, operator, packet.default)
                self._classic.add(packet.default, paused(kernel) if operator.waits else kernel)
        wait_tensor = internals.wait_tensor()
        self._functional.add(wait_tensor, self._waiting(wait_tensor))

    def remove(self) -> None:
        """Restore the original operators."""
        self._classic.remove()
        self._functional.remove()

    def _noting(self, name: str, operator: Operator, overload: Any) -> Callable[..., Any]:
        """Return the kernel that records a call of one operator and redispatches it."""
        completions, work_of, guarded = self._session.completions, self._work, self._session.guarded
        may_watch = not operator.is_p2p and operator.kind != "reduce_scatter"

        def followed(one: Communication, result: Any) -> None:
            completions.issued(one, work_of(result), watchable=may_watch and one.group.on_gloo)

        def followed_on_device(one: Communication, result: Any, called: int) -> None:
            completions.issued_on_device(one, work_of(result), called)

        before, issued, failed, issued_on_device = (
            guarded("collectives", f)
            for f in (self._describing(operator), followed, _over, followed_on_device)
        )
        pause, resume = self._session.pausing()
        redispatch, after, flag = internals.redispatch(overload), self._after, internals.async_flag(overload)

        def kernel(keyset: Any, /, *args: Any, **kwargs: Any) -> Any:
            communication = before(args)
            if communication is None:
                return redispatch(keyset & after, *args, **kwargs)
            if communication.device >= 0:
                return on_device(communication, keyset & after, args, kwargs)
            try:
                result = redispatch(keyset & after, *args, **kwargs)
            except BaseException:
                failed(communication)
                raise
            issued(communication, result)
            return result

        def on_device(communication: Communication, keyset: Any, args: Any, kwargs: Any) -> Any:
            # One that need not run beside the current stream may run on it, and then is no compute of it.
            is_paused = pause() if args[flag : flag + 1] == (False,) else False
            called = time.time_ns()
            try:
                result = redispatch(keyset, *args, **kwargs)
                issued_on_device(communication, result, called)
                return result
            except BaseException:
                failed(communication)
                raise
            finally:
                resume(is_paused)

        kernel.__name__ = f"foretrace_{name}"
        return kernel

    def _describing(self, operator: Operator) -> Callable[[tuple[Any, ...]], Communication]:
        """Return the function that describes a call of *operator* beforehand.

        Caches are cold when a collective is issued, so each Python function call on this path costs as
        much as its body. The common call, with one CPU tensor, is described without any.
        """
        session, unbox, known = self._session, self._unbox_group, self._session.groups.by_object
        put, note = session.sink.put, session.issued.note
        position, stack, is_own = session.position, session.lane.stack, session.lane.is_own
        kind, at, whole, filled = operator.kind, operator.group, operator.whole, operator.filled
        is_plain = not operator.is_p2p and whole >= 0

        def describe(args: tuple[Any, ...]) -> Communication:
            tensor = args[whole] if is_plain else None
            if tensor.__class__ is list:
                tensor = tensor[0] if len(tensor) == 1 else None
            if tensor is None or tensor.is_cuda:
                communication = self._described(operator, args)
            else:
                process_group = unbox(args[at])
                group = known.get(id(process_group)) or session.groups.of(process_group)
                communication = Communication(  # by position: half as long
                    kind, group, next(group.collectives), -1, tensor.nbytes, dtype_name(tensor),
                    stack[-1][1] if stack and is_own() else NOBODY,
                    (position.step, position.stage, position.virtual_stage, position.microbatch),
                    now_ns(), (_address(tensor if filled == whole else args[filled]),),
                )  # fmt: skip
            put(communication)  # before it is made: NCCL may wait for a missing rank inside of it
            note(communication)
            return communication

        return describe

    def _described(self, operator: Operator, args: tuple[Any, ...]) -> Communication:
        """Describe a call of any kind, on any device."""
        session = self._session
        process_group = self._unbox_group(args[operator.group])
        group = session.groups.of(process_group)
        tensor = operator.tensor(args)
        if tensor.is_cuda and not group.is_timed:
            group.is_timed = True
            with suppress(RuntimeError):  # a backend whose works do not tell how long they ran
                internals.time_on_device(process_group)
        lane = session.lane
        at, block, peer = session.position, lane.block if lane.is_own() else NOBODY, -1
        if operator.is_p2p:
            sequence = -1
            if operator.peer >= 0:
                peer = group.ranks[args[operator.peer]]
                pair = (session.rank, peer) if operator.kind == "send" else (peer, session.rank)
                sequence = group.next_transfer(pair)
            at, block = session.transfer(operator.kind, tensor)
        else:
            sequence = group.next_collective()
        return _issued(
            operator.kind,
            group,
            sequence,
            operator.size(args, len(group.ranks)),
            tensor,
            block=block,
            at=at,
            peer=peer,
            outputs=operator.outputs(args),
        )

    def _work(self, result: Any) -> Any:
        """Return the work in the result of an operator, None if it was complete on return."""
        boxed = result[-1] if isinstance(result, tuple | list) else result
        try:
            return self._unbox_work(boxed)
        except (RuntimeError, TypeError):
            return None

    def _waiting(self, overload: Any) -> Callable[..., Any]:
        """Return the kernel of ``wait_tensor``, which waits for functional collectives."""
        waited, by_storage = self._session.waiting(), self._session.completions.by_storage
        redispatch, after = internals.redispatch(overload), self._after

        def kernel(keyset: Any, tensor: Any) -> Any:
            communication = by_storage.get(_address(tensor)) if by_storage else None
            if communication is None and not tensor.is_cuda:
                return redispatch(keyset & after, tensor)  # waited for before: DTensor asks more than once
            return waited(communication, redispatch, keyset & after, tensor)

        return kernel


def _issued(
    kind: str,
    group: GroupInfo,
    sequence: int,
    size_bytes: int,
    tensor: Any,
    *,
    block: Block,
    at: Position,
    peer: int = -1,
    outputs: Iterable[Any] = (),
) -> Communication:
    """Return what is being issued, of tensors such as *tensor*, which fills *outputs*."""
    device = tensor.get_device() if tensor.is_cuda else -1
    position = at.step, at.stage, at.virtual_stage, at.microbatch
    start, storages = now_ns() if device < 0 else cuda_stamp(device), tuple(map(_address, outputs))
    dtype = dtype_name(tensor)
    return Communication(
        kind, group, sequence, peer, size_bytes, dtype, block, position, start, storages, device
    )


def _over(one: Communication | None) -> None:
    """The call of a communication has raised, or it is over when the call is."""
    if one is not None:
        one.end = now_ns() if isinstance(one.start, int) else cuda_stamp(one.device)


def _address(tensor: Any) -> int:
    """Return the address of the elements of *tensor*, 0 if it has none."""
    try:
        return int(tensor.data_ptr())
    except RuntimeError:
        return 0


# torch keeps the last function of Python that was registered for an operator and a key in a table of its own
# (``python_registrations_`` in ``torch/csrc/utils/python_dispatch.cpp``), and never lets go of it: not when
# its ``Library`` is destroyed, not when Python ends. With it lives all that it refers to. Where that led to
# the process groups of the training, gloo's threads outlived Python, and ran on while C++ was taken apart.

FIRST: Final = "BackendSelect"  # the dispatch key at which a call is seen first


class Implementations:
    """Functions that see the calls of operators of one namespace first, and pass them on."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._overloads: list[Any] = []
        self._library = _library(namespace)

    def add(self, overload: Any, kernel: Callable[..., Any]) -> None:
        """Have *kernel* called in place of *overload*, with the keys of the call before its arguments."""
        self._library.impl(overload, kernel, FIRST, with_keyset=True)
        self._overloads.append(overload)

    def remove(self) -> None:
        """Give the operators back as they were, and have torch forget the functions."""
        internals.destroy_library(self._library)
        last = _library(self._namespace)
        for overload in self._overloads:
            last.impl(overload, _passing(overload), FIRST, with_keyset=True)
        internals.destroy_library(last)


def _library(namespace: str) -> Any:
    import torch

    return torch.library.Library(namespace, "IMPL")


def _passing(overload: Any) -> Callable[..., Any]:
    """Return what passes a call on, and knows of nothing else: what torch keeps."""
    redispatch, after = internals.redispatch(overload), internals.keys_after_backend_select()

    def kernel(keyset: Any, /, *args: Any, **kwargs: Any) -> Any:
        return redispatch(keyset & after, *args, **kwargs)

    return kernel


# Operators on symmetric memory, as async tensor parallelism calls them, go by no process group's collectives:
# a rank reads and writes the memory of the others while it multiplies. Each is noted as the collective that
# it replaces; the block that calls it owns the time, for it computes all the while.


def _gathered(args: Any, kwargs: Any, n: int) -> int:
    """Return the size of all parts together, of which the first argument is one."""
    return int(args[0].nbytes) * n


def _scattered_product(args: Any, kwargs: Any, n: int) -> int:
    """Return the size of the product of the first two arguments, before it is scattered."""
    rows, columns = prod(args[0].shape[:-1]), args[1].shape[-1]
    kind = kwargs.get("out_dtype") or args[0].dtype
    return int(rows * columns * kind.itemsize)


def _whole(args: Any, kwargs: Any, n: int) -> int:
    """Return the size of the first argument."""
    return int(args[0].nbytes)


def _copied(args: Any, kwargs: Any, n: int) -> int:
    """Return the size of the second argument, which is copied into the memory that is the first."""
    return int(args[1].nbytes)


FUSED: Final[Mapping[str, tuple[str, Callable[[Any, Any, int], int]]]] = MappingProxyType(
    {
        "fused_all_gather_matmul": ("all_gather", _gathered),
        "fused_all_gather_scaled_matmul": ("all_gather", _gathered),
        "fused_matmul_reduce_scatter": ("reduce_scatter", _scattered_product),
        "fused_scaled_matmul_reduce_scatter": ("reduce_scatter", _scattered_product),
        "_low_contention_all_gather": ("all_gather", _gathered),
        "_low_contention_reduce_scatter": ("reduce_scatter", _whole),
        "multimem_all_reduce_": ("all_reduce", _whole),
        "multimem_one_shot_all_reduce": ("all_reduce", _whole),
        "multimem_one_shot_all_reduce_out": ("all_reduce", _whole),
        "multimem_all_gather_out": ("all_gather", _gathered),
        "one_shot_all_reduce": ("all_reduce", _whole),
        "one_shot_all_reduce_out": ("all_reduce", _whole),
        "one_shot_all_reduce_copy": ("all_reduce", _copied),
        "one_shot_all_reduce_copy_out": ("all_reduce", _copied),
        "two_shot_all_reduce_": ("all_reduce", _whole),
        "two_shot_all_reduce_out": ("all_reduce", _whole),
        "reduce_scatter_out": ("reduce_scatter", _whole),
        "all_to_all_vdev": ("all_to_all", _whole),
        "all_to_all_vdev_2d": ("all_to_all", _whole),
        "all_to_all_vdev_2d_offset": ("all_to_all", _whole),
        "nvshmem_all_to_all": ("all_to_all", _whole),
        "nvshmem_broadcast": ("broadcast", _whole),
    }
)
"""Operators of ``symm_mem`` as of torch 2.13: the collective that each replaces, the size of its array. How
much of its input an ``all_to_all_vdev`` sends only the device knows. Gets, puts and signals are left out."""


class SymmetricHook(Implementations):
    """Implementations of the operators that note each call and pass it on."""

    def __init__(self, session: Session) -> None:
        import torch

        super().__init__("symm_mem")
        self._session = session
        began, over = (session.guarded("collectives", f) for f in (self._began, _over))
        for name in FUSED:
            if (packet := getattr(torch.ops.symm_mem, name, None)) is not None:
                noted = between(functools.partial(began, name, packet.default), over)
                self.add(packet.default, noted(_passing(packet.default)))

    def _began(self, operator: str, overload: Any, _: Any, *args: Any, **kwargs: Any) -> Communication:
        """A call of *operator* with *args* begins."""
        session, (kind, size), tensor = self._session, FUSED[operator], args[0]
        name = args[internals.position_of(overload, "group_name")]
        group, at = session.groups.of(internals.group_named(name)), session.position
        n_bytes, block = size(args, kwargs, len(group.ranks)), session.lane.block
        one = _issued(kind, group, group.next_collective(), n_bytes, tensor, block=block, at=at)
        session.sink.put(one)
        session.issued.note(one)
        return one
