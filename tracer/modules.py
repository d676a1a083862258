"""Sees the forward of the model: which block computes, and which autograd nodes are at its borders.

Global module hooks tell when a block begins and ends. Nodes at the borders tell ``tracer.backward`` who owns
the time there.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from foretrace.tracer import internals
from foretrace.tracer.guarded import Replacements, between
from foretrace.tracer.inputs import first_of
from foretrace.tracer.lane import NOBODY
from foretrace.tracer.records import Block
from foretrace.tracer.shape import find_blocks, untimed
from foretrace.tracer.stamps import ComputeStreams
from foretrace.tracer.wrapped import inside

if TYPE_CHECKING:
    from foretrace.tracer.session import Session

_TAG: Final = "foretrace"  # key in the metadata of an autograd node that has an owner

_VIEWS: Final = frozenset({"ViewBackward0", "UnsafeViewBackward0"})
"""Nodes of an output that is another shape of what the block has computed, as that of a linear layer."""


class ModuleHook(Replacements):
    """Global hooks around the forward of every module; torch warns of those of others, as without ours.

    Attributes:
        compile_by: sets what compiles the frames of this thread, None: nothing, and returns what did.
    """

    def __init__(self, session: Session) -> None:
        import torch
        from torch.nn.modules import module as hooks

        super().__init__()
        self._session = session
        self._lane = session.lane
        self._traces = internals.fx_tracing()
        self._tensor: type[Any] = torch.Tensor
        self._blocks: dict[int, Block] = {}
        self._inner: set[int] = set()
        self._shells: set[int] = set()
        self._lives: dict[int, weakref.ref[Any]] = {}
        self._running: list[tuple[Any, Block, int, Any]] = []
        self.compile_by: Callable[[Any], Any] = lambda _: None
        session.steps.is_inside = self._is_inside
        self.watch()
        self.replace(hooks, internals.ASKS_FOR_HOOKS, self._asking)

    def _asking(self, _: Any) -> Callable[[], bool]:
        """Return what tells whether somebody else has global hooks on modules."""

        def has_others() -> bool:
            return not internals.global_hooks() <= {handle.id for handle in self._handles}

        return has_others

    def watch(self) -> None:
        """Have the calls of modules seen from now on."""
        from torch.nn.modules import module as hooks

        before, after = self._hooks()
        self._handles = [
            hooks.register_module_forward_pre_hook(before),
            hooks.register_module_forward_hook(after, with_kwargs=True, always_call=True),
        ]

    def _hooks(self) -> tuple[Callable[..., None], Callable[..., None]]:
        import torch

        entered, left = (
            self._uncompiled(self._session.guarded("modules", f)) for f in (self._entered, self._left)
        )
        inner, is_compiling = self._inner, torch.compiler.is_compiling
        traced = internals.tracing_state()  # a tenth of the time of torch.jit.is_tracing
        computed, awaited = self._computed()

        # The compiler traces hooks: it must meet nothing that changes before it knows that they do nothing.
        # torch.jit.trace takes every look at a size into the graph, which then differs from its own check's.
        def before(module: Any, args: Any) -> None:
            if not is_compiling() and not traced() and id(module) not in inner:
                entered(module, args)

        def after(module: Any, args: Any, *rest: Any) -> None:
            if (
                not is_compiling() and not traced() and id(module) not in inner
            ):  # after an exception torch leaves kwargs out
                left(module, args, rest[0] if len(rest) > 1 else {}, rest[-1])
                if awaited:
                    computed(module, rest[-1])

        return before, after

    def _uncompiled(self, function: Callable[..., Any]) -> Callable[..., None]:
        """Return *function*, in which no compiler looks at the frames of what it calls."""

        def run(*args: Any) -> None:
            compiler = self.compile_by(None)
            try:
                function(*args)
            finally:
                self.compile_by(compiler)

        return run

    def _computed(self) -> tuple[Callable[[Any, Any], None], Mapping[int, Any]]:
        """Return what is told of calls that are over, and for which models: none, as a rule."""
        precision = self._session.precision
        return self._uncompiled(self._session.guarded("modules", precision.ran)), precision.awaited

    def unwatch(self) -> None:
        """Have the calls of modules not seen until ``watch``."""
        for handle in self._handles:
            handle.remove()
            internals.forget_hook(handle.id)

    def remove(self) -> None:
        """Take the hooks away for good; modules that live until Python ends then call nothing of ours."""
        super().remove()
        self.unwatch()
        self._lives.clear()

    def _entered(self, module: Any, args: Any) -> None:
        if not self._lane.is_own() or self._traces():
            return
        block = self._blocks.get(id(module))
        if block is None and (block := self._met(module, args)) is None:
            return
        session = self._session
        if not self._is_inside():
            session.called(module, args)
        elif block is self._running[-1][1]:
            return  # what its wrapper has begun; called without it, as in a recomputation, it begins itself
        elif block.layer < 0 <= self._running[-1][1].layer:
            return  # shared by layers, as a table of rotations: part of the layer that calls it
        session.sweep()
        depth = self._lane.push(session.backward.forward_kind, block)
        self._running.append((module, block, depth, self._node(args)))

    def _left(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        stack = self._running
        if (
            not self._lane.is_own()
            or self._traces()
            or not stack
            or (stack[-1][0] is not module and all(entry[0] is not module for entry in stack))
        ):
            return
        while stack:
            running, block, depth, entry = stack.pop()
            self._lane.pop(depth)
            if running is module:
                around = stack[-1][1] if stack else self._lane.block
                node = self._node(output)
                self._tag(node, block)
                if type(node).__name__ in _VIEWS:  # gone if somebody changes the output in place
                    self._tag(node.next_functions[0][0], block)
                # In the backward pass the input comes behind the block: from its node on the time is that of
                # the block around.
                self._tag(entry or self._node(args) or self._node(kwargs), around)
                if kwargs and not self._is_inside():
                    self._session.called_with(kwargs.values())
                return

    def _met(self, module: Any, args: Any) -> Block | None:
        """Learn the blocks of a module that is called for the first time; return which one it is itself."""
        if self._is_inside():  # made in the middle of a forward, or changed since: part of what is around it
            self._learn(module, None)
            return None
        blocks = find_blocks(module)
        blocks.setdefault(inside(module), blocks[module])  # without its wrapper it is called to be evaluated
        for part in module.modules():
            self._learn(part, blocks.get(part))
        if next(module.parameters(), None) is None:  # a loss, or a graph that is given its parameters
            self._keep_shell(module)
        else:
            self._session.met_model(module, args)
        if warning := untimed(module):
            self._session.warn(warning)
        if self._lane.device is None and (device := _gpu(module, args)) >= 0:
            self._lane.move_to(ComputeStreams(device))
        return blocks[module]

    def _learn(self, module: Any, block: Block | None) -> None:
        self._keep(module, block)
        number = id(module)
        if number not in self._lives:
            self._lives[number] = weakref.ref(module, lambda _: self._forget(number))

    def _is_inside(self) -> bool:
        """Whether the forward of a model is running; a module without parameters, as a loss, is none.

        A model that such a module is given, and calls, is called from outside of any other.
        """
        return any(id(module) not in self._shells for module, *_ in self._running)

    def _keep_shell(self, module: Any) -> None:
        self._shells.add(id(module))

    def _keep(self, module: Any, block: Block | None) -> None:
        """Remember what *module* is; None: part of the block around it."""
        number = id(module)
        self._shells.discard(number)
        self._inner.discard(number)
        self._blocks.pop(number, None)
        if block is None:
            self._inner.add(number)
        else:
            self._blocks[number] = block

    def _forget(self, number: int) -> None:
        self._shells.discard(number)
        self._inner.discard(number)
        self._blocks.pop(number, None)
        self._lives.pop(number, None)

    def _node(self, values: Any) -> Any:
        """Return the autograd node that made the first tensor among *values* that has one."""
        tensor = self._tensor
        for value in first_of(values):
            if isinstance(value, tensor) and value.grad_fn is not None:
                return value.grad_fn
        return None

    def _tag(self, node: Any, block: Block) -> None:
        """Make *block* the owner of the time from *node* on, unless the node has an owner already."""
        # A block within this one that returned the same tensor has left before, and keeps its node.
        if node is None or block is NOBODY or _TAG in (metadata := node.metadata):
            return
        metadata[_TAG] = True
        node.register_prehook(self._session.backward.entering(block))


def _gpu(module: Any, args: Any) -> int:
    """Return on which GPU a model computes, -1: none. Its parameters are there or, offloaded, its input.

    What only says that it is on one, as a batch of graphs, names no device.
    """
    import torch

    found = [next(module.parameters(), None), *args]
    there = (value for value in found if isinstance(value, torch.Tensor) and value.is_cuda)
    return next((value.device.index for value in there), -1)


class CompilerHook:
    """Hooks, and what they call, are not compiled beside a graph; in a graph they are looked into."""

    def __init__(self, modules: ModuleHook) -> None:
        self.remove = internals.run_as_is(f"{Path(__file__).parent.as_posix()}/")
        modules.compile_by = internals.compile_by()


STRICT: Final = "_export_to_torch_ir"
"""Private function in it that traces a module strictly, from torch 2.6 to 2.15."""


class ExportHook(Replacements):
    """The function that traces a module strictly, and refuses one under global hooks: ours go meanwhile."""

    def __init__(self, session: Session, modules: ModuleHook) -> None:
        super().__init__()

        def watch_again(_: Any) -> None:
            if not session.is_closed:  # meanwhile
                modules.watch()

        around = between(lambda *_, **__: modules.unwatch(), watch_again)
        self.replace(sys.modules[internals.EXPORTING], STRICT, around)
