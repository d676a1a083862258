"""Sees every operator of a process: kernels, communications, waits, and reads of values."""
# ruff: noqa: SLF001 - this module asks operators what they do

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import get_ident
from types import MappingProxyType
from typing import Any, Final

from foretrace.tracer import internals
from foretrace.tracer.operators import OPERATORS, dtype_name, tensor_bytes
from foretrace.tracer.rehearse.data.numbers import is_followed
from foretrace.tracer.rehearse.data.questions import DATA_DEPENDENT, Questions
from foretrace.tracer.rehearse.data.stated import FOLLOWED, Stated
from foretrace.tracer.rehearse.device.host import Workspaces
from foretrace.tracer.rehearse.device.kernels import WHOLE
from foretrace.tracer.rehearse.device.memory import OF_KIND
from foretrace.tracer.rehearse.session import RehearsalSession
from foretrace.tracer.rehearse.tape.calls import Kernel, tensors_in
from foretrace.tracer.rehearse.tape.fused import ACCUMULATING
from foretrace.tracer.rehearse.tape.pricing import Pricing
from foretrace.tracer.rehearse.tape.remembered import Memo
from foretrace.tracer.rehearse.tape.works import SILENT, Work
from foretrace.tracer.rehearse.world import communicating
from foretrace.tracer.rehearse.world.communicating import Communications, kind_of
from foretrace.traces.rehearsal import HOST_WAIT, ON_HOST, TO_HOST

# What comes with an operator besides its kernel: writes of what it reads or keeps, waits of the host.


Before = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
"""Told of a call that comes: the operator, its arguments, those by name."""

After = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]
"""Told of a call that is over; last is what it has returned."""


def around(handler: Kernel, before: Before | None = None, after: After | None = None) -> Kernel:
    """Return *handler*, with what is done *before* each call and *after* it."""

    def handled(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if before is not None:
            before(func, args, kwargs)
        out = handler(func, args, kwargs)
        if after is not None:
            after(func, args, kwargs, out)
        return out

    return handled if before is not None or after is not None else handler


CONVOLUTIONS: Final = frozenset({"aten.convolution", "aten.convolution_backward"})
"""Operators around whose products a library may convert tensors to another memory layout."""


def converting(session: RehearsalSession, pricing: Pricing, name: str, is_ours: Callable[..., bool]) -> After:
    """Return what writes down the conversions around the convolution *name*, if it *is_ours*."""
    host, fused = session.host, session.fused

    def converted(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        is_chosen = fused.is_used and fused.is_inside()  # a compiler lets all tensors be in that layout
        is_host = bool(host.part(name, args, out))
        if session.position.step >= 0 and not is_host and not is_chosen and is_ours(args, kwargs, out):
            number = pricing.conversion(name, func, args, kwargs, out)
            if number >= 0:
                session.tape.op(number)

    return converted


# Gradients that torch writes into zeros in place, but not while somebody watches operators. Where a mode or
# a subclass may see an operator, some formulas of autograd take its variant out of place: there are two
# tensors for a moment where a real run has one (``areAnyTensorSubclassLike`` and ``isTensorSubclassLike``
# in torch/csrc/autograd/FunctionsManual.cpp, and in ``gather_backward``, ``index_select_backward`` and
# ``value_selecting_reduction_backward`` of ATen).

NODES: Final = frozenset(
    {
        *("IndexBackward0", "IndexSelectBackward0", "GatherBackward0", "TakeBackward0"),
        *("MaxBackward0", "MinBackward0", "TopkBackward0", "SortBackward0", "SortBackward1"),
        *("KthvalueBackward0", "ModeBackward0", "MedianBackward1", "NanmedianBackward1"),
        *("CummaxBackward0", "CumminBackward0"),
    }
)
"""Nodes of autograd that write a gradient into zeros of their own."""


def variants() -> dict[Any, Any]:
    """Return operators that write into a copy of their first operand, and those that write into it."""
    import torch

    aten = torch.ops.aten
    return {
        aten.index_put.default: aten.index_put_.default,
        aten.index_add.default: aten.index_add_.default,
        aten.scatter.src: aten.scatter_.src,
        aten.scatter_add.default: aten.scatter_add_.default,
        aten.put.default: aten.put_.default,
    }


def writing(handler: Kernel, variant: Any, into: Kernel) -> Kernel:
    """Return *handler*, which leaves the work to *into*, that of the *variant* in place, where torch does."""
    node_of = internals.node_that_runs()

    def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        node = node_of()
        if node is None or node.name() not in NODES:
            return handler(func, args, kwargs)
        into(variant, args, kwargs)
        return args[0]

    return written


def following(known: Stated, name: str, func: Any, handler: Kernel) -> Kernel:
    """Return *handler*, which then also updates what is *known* of the numbers of the operator *func*.

    They are computed, or forgotten where an operator writes to operands, which its schema marks; places and
    lengths that it only reads stay known. *name* is that of the operator without its overload.
    """
    schema, follow, choices = internals.schema_of(func), known.numbers.follow, known.choices
    infos = [(at, one.name, one.alias_info) for at, one in enumerate(schema.arguments)]
    named = [(at, one) for at, one, info in infos if info is not None and info.is_write]

    def forget(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for at, one in named:
            known.forget(tensors_in((args[at] if at < len(args) else kwargs.get(one),)))

    def forget_mean(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        known.forget_mean(tensors_in(kwargs["out"] if "out" in kwargs else args[:1]))

    def learn(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        follow(name, func, args, kwargs, out)
        if choices.n_routed:
            known.taint(args, out)

    if is_followed(name, func):
        return around(handler, forget_mean if schema.is_mutable else None, learn)
    return around(handler, forget if schema.is_mutable else None)


# Checks that operands have equal dtypes where a GPU kernel requires it; fake tensors do not check it. A
# product of fp32 and bf16 succeeds with fake tensors, but is an error of the kernel in a real run. So it
# must be an error in a rehearsal too. The casts of autocast happen before these checks.

ALIKE: Final[Mapping[str, tuple[int, ...]]] = MappingProxyType(
    {
        **dict.fromkeys(("aten.mm", "aten.bmm", "aten.mv"), (0, 1)),
        **dict.fromkeys(("aten.addmm", "aten.baddbmm", "aten.addmv"), (1, 2, 0)),
        **dict.fromkeys(("aten.convolution", "aten.native_group_norm"), (0, 1, 2)),
        **dict.fromkeys(("aten.index_add", "aten.index_add_", "aten.index_copy", "aten.index_copy_"), (0, 3)),
        "aten.native_layer_norm": (0, 2, 3),
        "aten.index_put_": (0, 2),
    }
)
"""By operator, the operands that must have the same dtype. CUDA kernels read all of them in one dtype; those
of a CPU accept fp32 weights of a norm with inputs of fewer bits."""

CLASSES: Final = frozenset({"aten.nll_loss_forward", "aten.nll_loss2d_forward"})
"""Losses whose second operand names classes: int64 or uint8 (``nll_loss_out_frame`` in NLLLoss.cu)."""


def checking(name: str) -> Before | None:
    """Return what raises RuntimeError where a GPU would, for dtypes of operands of the operator *name*."""
    first, *others = ALIKE.get(name, (0,))

    def check(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        dtype = args[first].dtype
        for at in others:
            other = args[at] if at < len(args) else None
            may_differ = not at and "dtype" in func._overloadname  # ``addmm(..., out_dtype=)``
            if other is not None and other.dtype is not dtype and not may_differ:
                types = f"{_word(dtype)} and {_word(other.dtype)}"
                raise RuntimeError(
                    f"{name} of {types}: on a GPU both must have the same dtype; cast one, or use autocast"
                )

    def check_classes(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (word := _word(args[1].dtype)) not in {"int64", "uint8"}:
            raise RuntimeError(f"{name} needs class indices in int64, not {word}: cast them with .long()")

    return check_classes if name in CLASSES else check if others else None


def _word(dtype: Any) -> str:
    return str(dtype).rpartition(".")[2]


def reading(session: RehearsalSession) -> Before:
    """Return what has compiled kernels write what a communication reads."""

    def read(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if session.fused.is_used and session.position.step >= 0:
            session.fused.used(args)

    return read


def keeping(session: RehearsalSession) -> Before:
    """Return what follows a gradient of a parameter that autograd keeps as it is."""
    fused = session.fused

    def keep(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if fused.is_used and fused.inside() == ACCUMULATING:
            fused.memory.keeps(args[0])

    return keep


def waiting(session: RehearsalSession) -> Before:
    """Return what waits for products of experts: other than in bf16 the host asks where each begins."""

    def wait(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _word(args[0].dtype) != "bfloat16" and session.position.step >= 0:
            session.tape.note(HOST_WAIT)

    return wait


def adding(session: RehearsalSession) -> After:
    """Return what tells ``session.learning`` of an addition."""
    return lambda _, args, kwargs, out: session.learning.added(args, out)


# Counts the memory of what operators make, by what it is for.


class Counted:
    """The memory of new tensors."""

    def __init__(self, session: RehearsalSession) -> None:
        self._session = session

    def category(self) -> str:
        """Return what a tensor is for that is made now."""
        if self._session.apart.is_building:
            return "gradients"
        category, lane = OF_KIND[self._session.lane.owner[0]], self._session.lane
        between = not lane.depth and category != "parameters"  # the parts of a step
        return "activations" if between else category

    def made(self, out: Any, operands: Sequence[Any] = ()) -> None:
        """Count the memory of new tensors, which are where the *operands* are that they were made of."""
        session, category, fused = self._session, self.category(), self._session.fused
        call = fused.inside() if fused.is_used and session.position.step >= 0 else -1
        for tensor in (out,) if hasattr(out, "untyped_storage") else tensors_in(out):
            if _is_meta(tensor):
                continue
            storage = tensor.untyped_storage()
            if session.memory.add(storage, category, is_written=call < 0):
                if call >= 0:
                    fused.memory.made(tensor, category, call)
                session.meter.made()

    def gathered(self, tensors: Any) -> None:
        """Count the memory of *tensors* as that of gathered parameters."""
        for tensor in tensors_in(tensors):
            self._session.memory.add(tensor.untyped_storage(), "gathered")
            self._session.memory.move(tensor.untyped_storage(), "gathered")


def _is_meta(tensor: Any) -> bool:
    """Whether *tensor* was asked for on the meta device, and so has no memory anywhere."""
    device = getattr(tensor, "fake_device", None)
    return device is not None and device.type == "meta"


INERT: Final = frozenset({"aten._amp_foreach_non_finite_check_and_unscale_", "aten._amp_update_scale_"})
"""In-place operators that fail on fake tensors, and are skipped."""

ADDS: Final = frozenset({"aten.add", "aten.add_"})

CROSSING: Final = frozenset({"aten._to_copy", "aten.copy_"})
"""Operators that may cast what they copy."""

COMMUNICATING: Final = frozenset({"c10d", "_c10d_functional", "_dtensor"})
"""Namespaces of collectives and transfers."""

ON_CUDA: Final = frozenset(f"aten.{name}" for name in WHOLE)
"""Operators that are not decomposed."""


class Watcher:
    """Finds a handler for each operator; ``mode`` returns a context manager that sees operators."""

    def __init__(self, session: RehearsalSession) -> None:
        import torch

        fake_tensor = internals.fake_tensor()

        self._session, self._torch = session, torch
        self._FakeTensor, self._workspaces = fake_tensor, Workspaces(session)
        self._pricing, self._counted = Pricing(session), Counted(session)
        self._call = Memo().call
        self._handlers: dict[Any, Kernel] = {}
        self._composite = set[Any]()
        self._in_place = variants()
        self._by_numbers = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
        self._plain = {fake_tensor, torch.Tensor, torch.nn.Parameter}
        self._questions = Questions(session, self._computing("aten.index"), self._write)
        self._communications = Communications(session, self._counted.made, self._counted.gathered, self._call)

    def mode(self) -> Any:
        """Return a mode that passes every operator on plain tensors to its handler."""
        HigherOrderOperator = internals.operators_of_others()  # noqa: N806 - a class
        TorchDispatchMode = internals.dispatch_mode()  # noqa: N806 - a class

        handlers, made, plain, fake = self._handlers, self._handler, self._plain, self._FakeTensor
        device_of, session = self._torch.ops.prim.device.default, self._session
        follow, higher = session.streams.follow, HigherOrderOperator
        doing, loaded, call = session.host.doing, self._loaded, self._call
        compiled, parts = session.fused.memory, self._composite

        class WatchMode(TorchDispatchMode):  # type: ignore[misc, valid-type]  # torch is untyped here
            """Skips operators on other tensors, such as DTensor: they come again with their parts."""

            supports_higher_order_operators = True

            @classmethod
            def _should_skip_dynamo(cls) -> bool:
                return False  # nothing is compiled; skipping takes time

            def __torch_dispatch__(  # noqa: PLR0911 - called for every operator, where a call more counts
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
                    return call(func, args, kwargs or {})[0]
                try:
                    if doing.is_loading and (out := loaded(func, args, kwargs or {})) is not None:
                        return out
                    handler = handlers.get(func) or made(func)
                    if compiled.forward is None or func in parts:
                        return handler(func, args, kwargs or {})
                    return compiled.write_down(handler, func, args, kwargs or {})
                except Exception as error:
                    session.failures.add(error)
                    raise

        self._mode = WatchMode()
        return self._mode

    def _loaded(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any | None:
        """Return the real result of an operator of a loader on known numbers of the host, None if none.

        A data set may make each row by thousands of small operators, of which nothing is recorded.
        """
        numbers, device = self._session.stated.numbers, kwargs.get("device")
        fakes = [
            tensor for tensor in tensors_in((args, *kwargs.values())) if type(tensor) is self._FakeTensor
        ]
        is_written = internals.schema_of(func).is_mutable and type(args[0]) is self._FakeTensor
        if not fakes or is_written or (device is not None and device.type != "cpu"):
            return None
        if any(numbers.is_shared(tensor) or self._session.host.on_device(tensor) for tensor in fakes):
            return None
        return numbers.computed(func, args, kwargs)

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
        # A stub may have described the operator before there was one.
        self._session.fakes.pop(internals.schema_of(func).name, lambda: None)()
        handler, name = self._choose(func), ".".join(internals.schema_of(func).name.split("::"))
        if func.namespace in COMMUNICATING:
            handler = around(handler, reading(self._session))
        handler = following(self._session.stated, name, func, around(handler, checking(name)))
        if variant := self._in_place.get(func):
            handler = writing(handler, variant, self._handlers.get(variant) or self._handler(variant))
        self._handlers[func] = handler
        return handler

    def _choose(self, func: Any) -> Kernel:  # noqa: PLR0911, PLR0912 - a table of what operators are
        namespace, name = func.namespace, internals.schema_of(func).name.partition("::")[2]
        full = f"{namespace}.{name}"
        if namespace == "c10d":
            operator = OPERATORS.get(name)
            return _through if operator is None else self._communications.eager(operator, func)
        if namespace in COMMUNICATING:
            if name == "wait_tensor":
                return self._communications.wait_tensor
            return self._communications.functional(kind) if (kind := kind_of(name)) else _through
        if namespace == "prim":
            return _through
        if namespace == "profiler":
            return _unseen
        if namespace == communicating.NAMESPACE:
            return communicating.refuse
        is_composite = full not in ON_CUDA and internals.is_composite(func)
        if func.is_view and full != "aten._to_copy" and not is_composite:  # `to` and `reshape` may copy
            return around(self._viewing, keeping(self._session) if full == "aten.detach" else None)
        if full in DATA_DEPENDENT:
            return getattr(self._questions, DATA_DEPENDENT[full])  # type: ignore[no-any-return]
        if not self._by_numbers.isdisjoint(func.tags):
            return self._questions.other
        if full in INERT:
            return self._inert(full)
        if is_composite:
            self._composite.add(func)
            return self._decomposing
        if full in SILENT:
            return self._allocating
        if full in CONVOLUTIONS:
            converted = converting(self._session, self._pricing, full, self._is_ours)
            return around(self._computing(full), after=converted)
        computing = self._session.bodies.handler(self._mode, func, self._computing(full))
        if full in CROSSING:
            computing = self._crossing(computing, is_write=full == "aten.copy_")
        if full == "aten._grouped_mm":
            return around(computing, waiting(self._session))
        return around(computing, after=adding(self._session) if full in ADDS else None)

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
        fused, beside = session.fused, self._pricing.beside(name)

        def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            out, known = call(func, args, kwargs)
            # What is remembered was asked of fake tensors.
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
                works = {} if known is None else known.works
                by = beside(args, kwargs) if beside is not None else None
                number = works.get(by, -1)
                if number < 0:
                    number = works[by] = self._pricing.number(name, func, args, kwargs, out)
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
        """Count the memory of *out* and record the work, except for single numbers and loading."""
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
        name, host = ".".join(internals.schema_of(func).name.split("::")), self._session.host
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
            return args[0] if internals.schema_of(func).returns else None

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
        if type(args[0]) is self._torch.Tensor:
            for view in tensors_in(out):
                self._session.stated.numbers.adopt(view, args[0])
                if func is self._torch.ops.aten.lift_fresh.default:
                    self._session.host.adopt(view)
        return out

    def _is_ours(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> bool:
        """Whether an operator belongs to the device: it reads or creates a fake tensor."""
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


def _unseen(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operator that takes no tensor, such as one that names a range, without any mode."""
    with internals.without_dispatch():
        return func(*args, **kwargs)
