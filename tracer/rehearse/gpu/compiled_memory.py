"""Memory of what ``torch.compile`` compiles: what its kernels write, for as long as its graphs would hold it.

Of a forward, tensors count once it is over, since only then is known what its backward reads: what the cut
saves (``saved_values``) from its making until the backward has run, other tensors that kernels write until
they are read for the last time, what stays in registers not at all. In a backward, a tensor counts from
when a kernel writes it.
"""
# ruff: noqa: SLF001 - this module asks autograd for its hooks

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from foretrace.tracer.rehearse.gpu.compiled_calls import Call, not_in_eager
from foretrace.tracer.rehearse.gpu.forward_values import ForwardValues
from foretrace.tracer.rehearse.gpu.memory import rounded
from foretrace.tracer.rehearse.gpu.stored import TAKEN, Step, Stored, replay, stays, steps_of
from foretrace.tracer.rehearse.operators.calls import parts_of, tensors_in

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.session import RehearsalSession

FREE: Final = frozenset({"parameters", "gathered", "buffers"})
"""What memory is for that is there whatever a forward saves."""


class CompiledMemory:
    """Counts what the kernels of compiled calls write.

    Args:
        session: the rehearsal.
        key: returns the number of the memory of a tensor, which no other one has had or will have.
        is_unwritten: whether the memory of that number is in registers only.
    """

    def __init__(
        self, session: RehearsalSession, key: Callable[[Any], int], is_unwritten: Callable[[int], bool]
    ) -> None:
        self._session, self._key, self._is_unwritten = session, key, is_unwritten
        self._stored: dict[int, Stored] = {}
        self._forward: ForwardValues | None = None
        self._rows, self._operators, self._regions = list[int](), list[int](), list[Any]()
        self._call, self._has_back = -1, False

    def begin(self) -> None:
        """A compiled forward begins."""
        self.now(-1)
        if self._session.position.step >= 0:
            self._forward = ForwardValues(self._key, self._is_there)
            self._regions = [_hooks()]
            self._rows, self._operators = [], []

    def now(self, call: int) -> None:
        """The backward of a *call* issues operators, -1: of none; what another one has left is written."""
        if call == self._call:
            return
        self._call = call
        if self._has_back:
            self._has_back = False
            for key, one in list(self._stored.items()):
                if one.is_back:
                    self.wrote(key)

    def made(self, tensor: Any, category: str, call: int) -> None:
        """Begin to follow the memory of a *tensor* of a *call* that is not counted."""
        if self._forward is None:
            self.now(call)
        at = -1 if self._forward is None else len(self._rows)
        one = Stored(self._session.memory, tensor.untyped_storage(), category, at)
        self._stored[self._key(tensor)] = one
        self._has_back |= at < 0

    def op(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, *, is_fused: bool
    ) -> None:
        """An operator of a compiled call has been issued."""
        import torch

        results = [self._key(tensor) for tensor in tensors_in(out)]
        if self._forward is not None:
            for tensor in tensors_in((args, kwargs)):
                one = self._stored.get(self._key(tensor))
                if one is not None:
                    one.last = len(self._rows)
                    if not is_fused:
                        self.wrote(self._key(tensor))
            self._forward.region = self._region()
            self._forward.op(name, args, kwargs, out, trains=torch.is_grad_enabled())
        for key in results:
            if not self._is_unwritten(key):
                self.wrote(key)
        if self._forward is not None:
            self._rows.append(self._session.tape.next_number)
            self._operators += [len(self._rows) - 1] * (len(self._forward.values) - len(self._operators))

    def keeps(self, gradient: Any) -> None:
        """Autograd keeps *gradient* as it is, for a parameter that had none."""
        self.wrote(self._key(gradient))

    def wrote(self, key: int) -> None:
        """A kernel has written the memory of that number."""
        one = self._stored.get(key)
        if one is None:
            return
        if self._forward is not None and one.at >= 0:
            one.written = len(self._rows) if one.written < 0 else one.written
        else:
            self._session.memory.write(one.number)
            del self._stored[key]

    def end(self, out: Any) -> None:
        """A compiled forward has returned *out*: count what it has written, and what its backward holds."""
        forward, self._forward, self._regions = self._forward, None, []
        if forward is None:
            return
        own = {key: one for key, one in self._stored.items() if one.at >= 0}
        storages = {key: storage for key, one in own.items() if (storage := one.storage()) is not None}
        keys = {self._key(part) for tensor in tensors_in(out) for part in parts_of(tensor)}
        for at in {forward.latest(key) for key in keys} - {-1}:
            forward.values[at].is_output = True
        call = Call(forward, set(own), set(storages), keys & set(storages), _hooks() is not None)
        users = call.users()
        held = call.returned | call.unexplained() | {forward.memories[at] for at in users}
        only_saved = self._only_saved(call, users, storages)
        steps = list(only_saved.values())
        for key in own.keys() - only_saved.keys():
            steps += steps_of(own[key], is_held=key in held and key in storages)
        replay(self._session.memory, self._session.tape, self._rows, steps)
        for key, one in own.items():
            one.at = -1
            if key in held or key not in storages:
                del self._stored[key]

    def _only_saved(
        self, call: Call, users: Mapping[int, set[int]], storages: Mapping[int, Any]
    ) -> dict[int, Step]:
        """Return when what is saved though eager mode does not hold it is made, by its memory.

        What the call was called with stays as long as what is made of it does.
        """
        found: dict[int, Step] = {}
        for at, of in not_in_eager(call, users, storages).items():
            memory, value = call.forward.memories[at], call.forward.values[at]
            if memory >= 0 and memory not in call.own:
                stays(None if value.is_free else call.forward.inputs.get(memory), of)
                continue
            one = self._stored.get(memory)
            n_bytes = rounded(value.n_bytes) if one is None else one.n_bytes
            key = memory if memory >= 0 else -2 - at
            before = found[key].users if key in found else ()
            found[key] = Step(self._operators[at], TAKEN, None, n_bytes, "activations", [*before, *of])
        return found

    def _region(self) -> int:
        """Return the number of the checkpoint within the call that runs now, 0 if none does."""
        hooks = _hooks()
        if hooks not in self._regions:
            self._regions.append(hooks)
        return self._regions.index(hooks)

    def _is_there(self, tensor: Any) -> bool:
        """Whether *tensor* is there whatever a forward saves."""
        return self._session.memory.category_of(tensor.untyped_storage()) in FREE


def _hooks() -> Any:
    """Return the hooks to which autograd gives what it saves, as those of a checkpoint; None: it has none."""
    import torch

    return torch._C._autograd._top_saved_tensors_default_hooks(True)  # noqa: FBT003 - has no name
