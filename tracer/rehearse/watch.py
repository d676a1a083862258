"""Sees every operator that a process issues: kernels, communications, waits, and questions for numbers."""
# ruff: noqa: SLF001 - this module takes the place of parts of torch

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from tracer import internals
from tracer.operators import OPERATORS, Operator, dtype_name, tensor_bytes
from tracer.records import Position
from tracer.rehearse.calls import Call, tensors_in
from tracer.rehearse.memory import OF_KIND
from tracer.rehearse.questions import DATA_DEPENDENT, Kernel, Questions
from tracer.rehearse.remembered import Memo
from tracer.rehearse.stated import FOLLOWED
from tracer.rehearse.tape import WAIT, Message
from tracer.rehearse.waits import work_class
from tracer.rehearse.works import SILENT, Work, work_of

if TYPE_CHECKING:
    from tracer.rehearse.session import RehearsalSession

INERT: Final = frozenset({"aten._amp_foreach_non_finite_check_and_unscale_", "aten._amp_update_scale_"})
"""Operators in place that a fake tensor cannot go through, and need not."""

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


class Watcher:
    """Handles operators by what they are; ``mode`` is what Python's ``with`` takes.

    Args:
        session: the rehearsal.
        fake: whether tensors are fake. If not, operators run as they are and are only written down.
    """

    def __init__(self, session: RehearsalSession, *, fake: bool = True) -> None:
        import torch
        import torch.distributed as dist
        from torch._subclasses.fake_tensor import FakeTensor

        self._session, self._torch, self._dist, self._fake = session, torch, dist, fake
        self._FakeTensor = FakeTensor
        self._numbers: dict[Any, int] = {}
        self._call = Memo().call if fake else _unremembered
        self._handlers: dict[Any, Kernel] = {}
        self._under_way: dict[int, int] = {}
        self._plain = {FakeTensor, torch.Tensor, torch.nn.Parameter}
        self._questions = Questions(session, self._computing("aten.index"))
        self._work = work_class(dist, session.tape)
        self._kept: list[Any] = []

    def mode(self) -> Any:
        """Return a mode that hands every operator on plain tensors to its handler."""
        from torch.utils._python_dispatch import TorchDispatchMode

        handlers, made, plain, fake = self._handlers, self._handler, self._plain, self._FakeTensor
        device_of, session = self._torch.ops.prim.device.default, self._session

        class WatchMode(TorchDispatchMode):  # type: ignore[misc]  # torch is untyped here
            """Operators on other kinds of tensors, as DTensor, come again with their parts."""

            def __torch_dispatch__(
                self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
            ) -> Any:
                if func is device_of:  # asked more often than everything else together
                    tensor = args[0]
                    if type(tensor) is fake and not tensor.fake_mode.in_kernel_invocation:
                        return tensor.fake_device
                for kind in types:
                    if kind not in plain:
                        return NotImplemented
                if session.is_aside:
                    return func(*args, **(kwargs or {}))
                return (handlers.get(func) or made(func))(func, args, kwargs or {})

        return WatchMode()

    def _handler(self, func: Any) -> Kernel:
        """Return what handles *func*, found once."""
        self._handlers[func] = handler = self._choose(func)
        return handler

    def _choose(self, func: Any) -> Kernel:  # noqa: PLR0911 - a table of what operators are
        self._session.fakes.pop(func._schema.name, lambda: None)()
        namespace, name = func.namespace, func._schema.name.partition("::")[2]
        full = f"{namespace}.{name}"
        if namespace == "c10d":
            operator = OPERATORS.get(name)
            return _through if operator is None else self._communicating(operator, func)
        if namespace in {"_c10d_functional", "_dtensor"}:
            if name == "wait_tensor":
                return self._wait_tensor
            return self._functional(FUNCTIONAL[name]) if name in FUNCTIONAL else _through
        if namespace == "prim":
            return _through
        if func.is_view and full != "aten._to_copy":
            return self._viewing
        if full in DATA_DEPENDENT:
            return getattr(self._questions, DATA_DEPENDENT[full])  # type: ignore[no-any-return]
        if full in INERT:
            return self._inert(full)
        if full in SILENT:
            return self._allocating
        return self._computing(full)

    def _computing(self, name: str) -> Kernel:
        """Return the handler of an operator that launches a kernel."""
        session, tape, call = self._session, self._session.tape, self._call
        note, made, is_ours = session.stated.note, self._made, self._is_ours
        position, follows = session.position, name in FOLLOWED

        def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            out, known = call(func, args, kwargs)
            if known is None and not is_ours(args, kwargs, out):
                return out
            made(out)
            if name in _UNSHARDS:
                self._gathered(kwargs["out"])
            if follows:
                note(name, args, out)
            if position.step >= 0:
                number = -1 if known is None else known.work
                if number < 0:
                    number = self._number(name, func, args, kwargs, out)
                    if known is not None:
                        known.work = number
                tape.op(number)
            return out

        return handler

    def _number(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
        """Return the number of the work of a call."""
        key = (func, _signature(args), _signature(out))
        if key not in self._numbers:
            self._numbers[key] = self._session.tape.number_of(self._priced(name, func, args, kwargs, out))
        return self._numbers[key]

    def _priced(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Work:
        names = [argument.name for argument in func._schema.arguments]
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        positional = (*args, *(value for key, value in kwargs.items() if key != "out"))
        return work_of(Call(name, positional, named, out))

    def _inert(self, name: str) -> Kernel:
        """Return the handler of an operator that is written down and not called."""

        def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            del kwargs
            tensors = tensors_in(args[0])
            size = 2 * sum(map(tensor_bytes, tensors))
            work = Work(name, "memory", "", dtype_name(tensors[0]) if tensors else "", 0, size)
            if self._session.position.step >= 0:
                self._session.tape.op(self._session.tape.number_of(work))
            return args[0] if func._schema.returns else None

        return handler

    def _allocating(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle an operator that launches nothing but may allocate."""
        out, known = self._call(func, args, kwargs)
        if known is not None or self._is_ours(args, kwargs, out):
            self._made(out)
        return out

    def _viewing(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle an operator that makes nothing but another view of memory."""
        return self._call(func, args, kwargs)[0]

    def _is_ours(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> bool:
        """Whether an operator is one of the device: it takes or makes a fake tensor."""
        if not self._fake:
            return True
        fake = self._FakeTensor
        if type(out) is fake:
            return True
        return any(isinstance(tensor, fake) for tensor in (*tensors_in(out), *tensors_in(args)))

    def _made(self, out: Any) -> None:
        """Count the memory of new tensors."""
        session = self._session
        category = OF_KIND[session.lane.owner[0]]
        if not session.lane.depth and category != "parameters":  # between the parts of a step
            category = "activations"
        for tensor in (out,) if hasattr(out, "untyped_storage") else tensors_in(out):
            session.memory.add(tensor.untyped_storage(), category)

    def _gathered(self, tensors: Any) -> None:
        """Count the memory of *tensors* as that of gathered parameters."""
        for tensor in tensors_in(tensors):
            self._session.memory.add(tensor.untyped_storage(), "gathered")
            self._session.memory.move(tensor.untyped_storage(), "gathered")

    # --- communication

    def _communicating(self, operator: Operator, func: Any) -> Kernel:
        """Return the handler of a ``c10d`` operator."""
        at = internals.async_flag(func)
        default = _default_of(func, at)
        n_returns = len(func._schema.returns)

        def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            group = self._session.groups.of(self._dist.ProcessGroup.unbox(args[operator.group]))
            is_async = bool(kwargs.get("async_op", args[at] if at < len(args) else default))
            tensor = operator.tensor(args)
            size = operator.size(args, len(group.ranks))
            peer = group.ranks[args[operator.peer]] if operator.peer >= 0 else -1
            number = self._issue(operator.kind, group, size, tensor, is_async=is_async, peer=peer)
            outputs = tensors_in(list(operator.outputs(args)))
            for output in outputs:
                self._under_way[_storage_key(output)] = number
            if operator.kind == "all_gather":
                self._gathered(outputs)
            if operator.kind == "all_to_all" and outputs and args[0] is outputs[0]:
                self._session.stated.note("_c10d_functional.all_to_all_single", args[1:2], args[0])
            if not self._fake:
                return func(*args, **kwargs)
            work = self._work(number if is_async else -1)
            self._kept.append(work)
            del self._kept[:-_KEPT]
            return (args[0], work.boxed()) if n_returns > 1 else work.boxed()

        return handler

    def _issue(self, kind: str, group: Any, size: int, tensor: Any, *, is_async: bool, peer: int = -1) -> int:
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
        message = Message(kind, group.id, size, dtype_name(tensor), peer, is_async, name or kind)
        return session.tape.communication(message, sequence, position)

    def _functional(self, kind: str) -> Kernel:
        """Return the handler of a functional collective, whose results are waited for by ``wait_tensor``."""

        def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            from torch.distributed.distributed_c10d import _resolve_process_group

            named = next(
                a for a in (*reversed(args), *kwargs.values()) if isinstance(a, str) and a not in _OPS
            )
            group = self._session.groups.of(_resolve_process_group(named))
            out = func(*args, **kwargs)
            self._made(out)
            self._session.stated.note(f"{func.namespace}.{func._schema.name.partition('::')[2]}", args, out)
            inputs, outputs = tensors_in(args[0]), tensors_in(out)
            whole = outputs if kind == "all_gather" else inputs
            size = sum(map(tensor_bytes, whole))
            number = self._issue(kind, group, size, inputs[0], is_async=True)
            for output in outputs:
                self._under_way[_storage_key(output)] = number
            return out

        return handler

    def _wait_tensor(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        del kwargs
        number = self._under_way.pop(_storage_key(args[0]), -1)
        if number >= 0 and self._session.position.step >= 0:
            self._session.tape.note(WAIT, number=number)
        return func(*args) if not self._fake else args[0]


_UNSHARDS: Final = frozenset({"fsdp.split_with_sizes_copy"})
"""Operators whose results are whole parameters, put together out of shards."""

_KEPT: Final = 4096
"""Works that are kept alive, so that torch finds the Python object behind each; more are never under way."""

_OPS: Final = frozenset(
    {"sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum", "unused"}
)
"""Names of reductions, which stand among the arguments of functional collectives beside the group's."""


def _through(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle an operator that is of no interest."""
    return func(*args, **kwargs)


def _unremembered(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, None]:
    """Call an operator on tensors that have numbers."""
    return func(*args, **kwargs), None


def _signature(values: Any) -> Any:
    """Return what the work of a call depends on: shapes, types and switches."""
    if hasattr(values, "element_size"):
        return (values.shape, values.dtype)
    if isinstance(values, list | tuple):
        return tuple(map(_signature, values))
    return values if values is None or isinstance(values, bool) else 0


def _storage_key(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)


def _default_of(func: Any, at: int) -> bool:
    """Return whether an operator is asynchronous if it does not say."""
    arguments = func._schema.arguments
    return bool(arguments[at].default_value) if at < len(arguments) else True
