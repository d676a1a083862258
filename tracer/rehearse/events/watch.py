"""Sees every operator of a process: kernels, communications, waits, and reads of values."""
# ruff: noqa: SLF001 - this module takes the place of parts of torch

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

from foretrace.tracer.operators import OPERATORS, dtype_name, tensor_bytes
from foretrace.tracer.rehearse.device.kernels import WHOLE
from foretrace.tracer.rehearse.events import in_place
from foretrace.tracer.rehearse.events.around import AROUND, keeping, reading
from foretrace.tracer.rehearse.events.converting import CONVOLUTIONS, converting
from foretrace.tracer.rehearse.events.counted import Counted
from foretrace.tracer.rehearse.events.remembered import Memo
from foretrace.tracer.rehearse.gpu import tensor_float
from foretrace.tracer.rehearse.gpu.workspaces import Workspaces
from foretrace.tracer.rehearse.operators import agreeing
from foretrace.tracer.rehearse.operators.calls import tensors_in
from foretrace.tracer.rehearse.operators.pricing import Pricing
from foretrace.tracer.rehearse.operators.work import Work
from foretrace.tracer.rehearse.operators.works import BY_NUMBERS, SILENT
from foretrace.tracer.rehearse.peers import symmetric
from foretrace.tracer.rehearse.peers.communicating import FUNCTIONAL, Communications
from foretrace.tracer.rehearse.values.following import following
from foretrace.tracer.rehearse.values.questions import DATA_DEPENDENT, Kernel, Questions
from foretrace.tracer.rehearse.values.stated import FOLLOWED
from foretrace.traces.rehearsal import ON_HOST, TO_HOST

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.session import RehearsalSession

INERT: Final = frozenset({"aten._amp_foreach_non_finite_check_and_unscale_", "aten._amp_update_scale_"})
"""In-place operators that fail on fake tensors, and are skipped."""

CROSSING: Final = frozenset({"aten._to_copy", "aten.copy_"})
"""Operators that may cast what they copy."""

COMMUNICATING: Final = frozenset({"c10d", "_c10d_functional", "_dtensor"})
"""Namespaces of collectives and transfers."""

ON_CUDA: Final = frozenset(f"aten.{name}" for name in WHOLE)
"""Operators that are not decomposed."""


class Watcher:
    """Finds a handler for each operator; ``mode`` returns a context manager that sees operators.

    Args:
        session: the rehearsal.
        fake: whether tensors are fake. If not, operators really run, and are only recorded.
    """

    def __init__(self, session: RehearsalSession, *, fake: bool = True) -> None:
        import torch
        from torch._subclasses.fake_tensor import FakeTensor

        self._session, self._torch, self._fake = session, torch, fake
        self._FakeTensor, self._workspaces = FakeTensor, Workspaces(session)
        self._pricing, self._counted = Pricing(session), Counted(session)
        self._call = Memo().call if fake else _unremembered
        self._handlers: dict[Any, Kernel] = {}
        self._in_place = in_place.variants()
        self._by_numbers = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
        self._plain = {FakeTensor, torch.Tensor, torch.nn.Parameter}
        self._questions = Questions(session, self._computing("aten.index"), self._write)
        self._communications = Communications(session, self._counted.made, self._counted.gathered, fake=fake)

    def mode(self) -> Any:
        """Return a mode that passes every operator on plain tensors to its handler."""
        from torch._ops import HigherOrderOperator
        from torch.utils._python_dispatch import TorchDispatchMode

        handlers, made, plain, fake = self._handlers, self._handler, self._plain, self._FakeTensor
        device_of, session = self._torch.ops.prim.device.default, self._session
        follow, higher = session.streams.follow, HigherOrderOperator

        class WatchMode(TorchDispatchMode):  # type: ignore[misc]  # torch is untyped here
            """Skips operators on other tensors, such as DTensor: they come again with their parts."""

            supports_higher_order_operators = True

            @classmethod
            def _should_skip_dynamo(cls) -> bool:
                return False  # nothing is compiled; skipping takes time

            def __torch_dispatch__(
                self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
            ) -> Any:
                if func is device_of:  # called more often than all others together
                    tensor = args[0]
                    if type(tensor) is fake and not tensor.fake_mode.in_kernel_invocation:
                        return tensor.fake_device
                for kind in types:
                    if kind not in plain:
                        return NotImplemented
                if isinstance(func, higher):
                    return _drawn(self, func, args, kwargs or {})
                follow()
                if session.asides and get_ident() in session.asides:
                    return func(*args, **(kwargs or {}))
                try:
                    return (handlers.get(func) or made(func))(func, args, kwargs or {})
                except Exception as error:
                    session.failures.add(error)
                    raise

        self._mode = WatchMode()
        return self._mode

    def one_at_a_time(self, turn: Any) -> None:
        """Hold the lock *turn* from now on while an operator is handled: several threads issue them.

        There is no lock where torch reads a device: the lock may raise what ends the rehearsal, and the C++
        code that reads the device cannot handle errors.
        """
        kind: Any = type(self._mode)
        handle = kind.__torch_dispatch__

        device_of = self._torch.ops.prim.device.default

        def in_turn(mode: Any, *call: Any) -> Any:
            if call[0] is device_of:
                return handle(mode, *call)
            with turn:
                return handle(mode, *call)

        kind.__torch_dispatch__ = in_turn

    def _handler(self, func: Any) -> Kernel:
        """Return the handler of *func*, which is then remembered."""
        self._session.fakes.pop(func._schema.name, lambda: None)()
        handler, name = self._choose(func), ".".join(func._schema.name.split("::"))
        handler = reading(self._session, handler) if func.namespace in COMMUNICATING else handler
        handler = agreeing.checking(name, handler) if self._fake else handler
        if self._fake:
            handler = following(self._session.stated, name, func, handler)
        if self._fake and (variant := self._in_place.get(func)):
            handler = in_place.writing(
                handler, variant, self._handlers.get(variant) or self._handler(variant)
            )
        self._handlers[func] = handler
        return handler

    def _choose(self, func: Any) -> Kernel:  # noqa: PLR0911, PLR0912 - a table of what operators are
        namespace, name = func.namespace, func._schema.name.partition("::")[2]
        full = f"{namespace}.{name}"
        if namespace == "c10d":
            operator = OPERATORS.get(name)
            return _through if operator is None else self._communications.eager(operator, func)
        if namespace in COMMUNICATING:
            if name == "wait_tensor":
                return self._communications.wait_tensor
            return self._communications.functional(FUNCTIONAL[name]) if name in FUNCTIONAL else _through
        if namespace == "prim":
            return _through
        if namespace == symmetric.NAMESPACE:
            return symmetric.by_parts(self._session, self._mode, func)  # type: ignore[no-any-return]
        has_kernel = self._torch._C._dispatch_has_kernel_for_dispatch_key
        is_composite = full not in ON_CUDA and has_kernel(func.name(), "CompositeImplicitAutograd")
        if func.is_view and full != "aten._to_copy" and not is_composite:  # `to` and `reshape` may copy
            return keeping(self._session, self._viewing) if full == "aten.detach" else self._viewing
        if full in DATA_DEPENDENT:
            return getattr(self._questions, DATA_DEPENDENT[full])  # type: ignore[no-any-return]
        if self._fake and not self._by_numbers.isdisjoint(func.tags):
            return self._questions.other
        if full in INERT:
            return self._inert(full)
        if is_composite:
            return self._decomposing
        if full in SILENT:
            return self._allocating
        if full in CONVOLUTIONS:
            return converting(self._session, self._pricing, full, self._computing(full), self._is_ours)
        computing = self._session.bodies.handler(self._mode, func, self._computing(full))
        if full in CROSSING:
            computing = self._crossing(computing, is_write=full == "aten.copy_")
        return AROUND[full](self._session, computing) if full in AROUND else computing

    def _decomposing(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle a composite operator: its parts come again. It arrives whole where autograd is left out."""
        with self._mode:
            out = func.decompose(*args, **kwargs)
        return func(*args, **kwargs) if out is NotImplemented else out

    def _computing(self, name: str) -> Kernel:
        """Return the handler of an operator that launches a kernel; *name* is that of the operator."""
        session, tape, call = self._session, self._session.tape, self._call
        note, made, is_ours = session.stated.note, self._counted.made, self._is_ours
        position, follows, host = session.position, name in FOLLOWED, session.host
        fused = session.fused
        by_numbers = name in BY_NUMBERS or name in tensor_float.ROLES

        def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            out, known = call(func, args, kwargs)
            if known is None and not is_ours(args, kwargs, out):
                return out
            if part := host.part(name, args, out):
                self._write_host(part, name, func, args, kwargs, out=out)
                return out
            made(out, args)
            if name in _UNSHARDS:
                self._counted.gathered(kwargs["out"])
            if follows:
                note(name, args, out)
            if position.step >= 0:
                number = -1 if known is None or by_numbers else known.work
                if number < 0:
                    number = self._pricing.number(name, func, args, kwargs, out)
                    if known is not None:
                        known.work = number
                if fused.is_used:
                    fused.op(number, name, args, kwargs, out)
                else:
                    tape.op(number)
            return out

        return self._workspaces.used_by(name, handler)

    def _crossing(self, handler: Kernel, *, is_write: bool) -> Kernel:
        """Return the *handler* of copies: the cast of one between host and device is a kernel of its own.

        It is done on the host in a blocking copy, else on the device (``copy_kernel_cuda`` in
        ATen/native/cuda/Copy.cu). What is copied of a parameter to the device is one there.
        """
        fake, mode, memory = self._FakeTensor, self._mode, self._session.memory
        parameter, copy = self._torch.nn.Parameter, self._torch.ops.aten._to_copy.default

        def copied(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], here: str) -> Any:
            source = args[1] if is_write else args[0]
            device = args[0].device if is_write else kwargs["device"]
            dtype = args[0].dtype if is_write else kwargs.get("dtype")
            if dtype in {None, source.dtype}:
                return handler(func, args, kwargs)
            is_free = kwargs.get("non_blocking", args[2] if len(args) > 2 else False) is True
            is_first = here == ("cuda" if is_free else "cpu")
            moves = {name: value for name, value in kwargs.items() if name != "dtype"} | {"device": device}
            with mode:
                if is_write:
                    how = {"dtype": dtype} if is_first else {"device": device, "non_blocking": is_free}
                    return func(args[0], copy(source, **how), is_free)
                if is_first:
                    return func(func(source, dtype=dtype), **moves)
                return func(func(source, **moves), dtype=dtype)

        def handled(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            source = args[1] if is_write else args[0]
            to = (args[0].device if is_write else kwargs.get("device")) or source.device
            here = source.fake_device if type(source) is fake else source.device
            if {to.type, here.type} != {"cpu", "cuda"}:
                return handler(func, args, kwargs)
            out = copied(func, args, kwargs, here.type)
            if to.type == "cuda" and isinstance(source, parameter):
                memory.move(out.untyped_storage(), "parameters")
            return out

        return handled

    def _write_host(
        self, part: str, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, out: Any
    ) -> None:
        """Count the memory of *out* and record the work, except for single numbers and loading.

        Args:
            part: that the host takes, as ``Host.part`` says.
            name: of the operator.
            func: the operator.
            args: its arguments.
            kwargs: those by name.
            out: what it has returned.
        """
        session, host = self._session, self._session.host
        if name in FOLLOWED:
            session.stated.note(name, args, out)
        host.count(out, self._counted.category(), part, args)
        is_small = not any(one.dim() for one in tensors_in((args, out)))
        is_nothing = part == ON_HOST and (is_small or host.doing.is_loading)
        if session.position.step >= 0 and not is_nothing:
            work = host.work(part, self._pricing.work(name, func, args, kwargs, out), args)
            session.tape.op(session.tape.number_of(work))
        if session.position.step >= 0 and part != ON_HOST:
            is_free = kwargs.get("non_blocking", args[2] if len(args) > 2 else False) is True
            host.waited(part, name, args, non_blocking=is_free)
        if part == TO_HOST and name == "aten._to_copy" and kwargs.get("non_blocking"):
            host.pin(out)  # ``_to_copy`` in ATen/native/TensorConversions.cpp

    def _write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Record a kernel whose results were made up."""
        name, host = ".".join(func._schema.name.split("::")), self._session.host
        if part := host.part(name, args, out):
            self._write_host(part, name, func, args, kwargs, out=out)
            return
        self._counted.made(out, args)
        if self._session.position.step >= 0:
            self._session.tape.op(self._pricing.number(name, func, args, kwargs, out))

    def _inert(self, name: str) -> Kernel:
        """Return the handler of an operator that is recorded, but not called."""

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
        """Handle an operator that launches no kernel, but may allocate memory."""
        out, known = self._call(func, args, kwargs)
        host = self._session.host
        if part := host.part("", args, out):
            host.count(out, self._counted.category(), part, args)
        elif known is not None or self._is_ours(args, kwargs, out):
            self._counted.made(out, args)
        return out

    def _viewing(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle an operator that only creates a view of existing memory."""
        out = self._call(func, args, kwargs)[0]
        if type(args[0]) is self._torch.Tensor and self._fake:
            for view in tensors_in(out):
                self._session.stated.numbers.adopt(view, args[0])
                if func is self._torch.ops.aten.lift_fresh.default:
                    self._session.host.adopt(view)
        return out

    def _is_ours(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> bool:
        """Whether an operator belongs to the device: it reads or creates a fake tensor."""
        if not self._fake:
            return True
        fake = self._FakeTensor
        if type(out) is fake:
            return True
        return any(isinstance(tensor, fake) for tensor in (*tensors_in(out), *tensors_in(args)))


_UNSHARDS: Final = frozenset({"fsdp.split_with_sizes_copy"})
"""Operators whose results are whole parameters, assembled from shards."""


DRAWING: Final = frozenset({"run_dtensor_rng_op", "run_with_rng_state"})
"""Operators that call another one, their third or second operand, with a state of the generator."""


def _drawn(mode: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call what a higher operator *func* draws numbers by; any other is for the fake tensors to answer."""
    if func.name() not in DRAWING:
        return func(*args, **kwargs)
    at = next(at for at, one in enumerate(args) if hasattr(one, "overloadpacket"))
    with mode:
        return args[at](*args[at + 1 :], **kwargs)


def _through(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operator without recording it."""
    return func(*args, **kwargs)


def _unremembered(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, None]:
    """Call an operator on real tensors; nothing is remembered."""
    return func(*args, **kwargs), None
