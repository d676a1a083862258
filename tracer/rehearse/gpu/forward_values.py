"""Writes down the values of a compiled forward: what each is made of, and what the backward reads of them.

Operators that Inductor decomposes (norms, softmax, dropout) are written down as their parts, since the parts
are what is saved (``torch/_inductor/decomposition.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from foretrace.tracer.rehearse.gpu.saved_values import BY_ITSELF, IN_A_KERNEL, Value
from foretrace.tracer.rehearse.operators import recomputable
from foretrace.tracer.rehearse.operators.calls import tensors_in

NORMS: Final = frozenset({"native_layer_norm", "_fused_rms_norm", "native_group_norm", "rms_norm"})
BATCH_NORMS: Final = frozenset({"native_batch_norm", "cudnn_batch_norm", "_native_batch_norm_legit"})
SOFTMAXES: Final = frozenset({"_softmax", "_log_softmax"})

FP32_BYTES: Final = 4
"""Norms and softmax compute in fp32."""


class Need(NamedTuple):
    """Something that the backward reads.

    Attributes:
        value: its number.
        how: how it is read, as ``Value.need``.
        kept: memory that eager mode keeps for it.
    """

    value: int
    how: int
    kept: int


class ForwardValues:
    """The values of one call of what is compiled.

    Args:
        memory_of: returns the number of the memory of a tensor.
        is_free: whether a tensor that the call reads is there anyway.

    Attributes:
        values: the values, in the order in which they are made.
        memories: the memory of each, -1 of one that eager mode does not make.
        needs: what the backward reads.
        inputs: the storages that the call reads, by the number of their memory.
        region: number of the checkpoint that runs now, 0: none does.
        explained: memory that eager mode keeps for what the backward reads in another form, or that a
            checkpoint has chosen.
    """

    def __init__(self, memory_of: Callable[[Any], int], is_free: Callable[[Any], bool]) -> None:
        self.values, self.memories, self.needs = list[Value](), list[int](), list[Need]()
        self._memory_of, self._is_free = memory_of, is_free
        self.inputs: dict[int, Any] = {}
        self.explained = set[int]()
        self.region = 0
        self._latest: dict[int, int] = {}
        self._views: dict[tuple[int, Any], int] = {}

    def latest(self, memory: int) -> int:
        """Return the last value in a *memory*, -1 if none of the call is there."""
        return self._latest.get(memory, -1)

    def is_of_region(self, at: int) -> bool:
        """Whether a value is made in a checkpoint, and nothing behind that reads it."""
        value = self.values[at]
        waiting = [at] if value.region else []
        while waiting:
            one = self.values[waiting.pop()]
            if one.region != value.region or one.is_output:
                return False
            waiting += [user for user in one.users if self.values[user].is_view]
            if any(self.values[user].region != value.region for user in one.users):
                return False
        return bool(value.region)

    def op(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, *, trains: bool
    ) -> None:
        """Write an operator down.

        Args:
            name: of the operator.
            args: its operands.
            kwargs: those by name.
            out: what it has made.
            trains: whether autograd follows it.
        """
        base, operands = recomputable.base_of(name), tensors_in((args, kwargs))
        results = tensors_in(out)
        sources = [self.of(tensor) for tensor in operands]
        if base in NORMS | BATCH_NORMS and len(results) > 1:
            self._norm(operands, results, trains=trains)
        elif base in SOFTMAXES:
            self._softmax(operands[0], results[0], is_log=base == "_log_softmax")
        elif base == "native_dropout":
            self._dropout(sources[0], results, trains=trains)
        else:
            self._plain(name, base, sources, results)
        if trains and base != "native_dropout" and base not in NORMS | BATCH_NORMS:
            self._need(base, operands, sources, results)

    def of(self, tensor: Any) -> int:
        """Return the number of the value that *tensor* is: of an input, a result, or a view of one."""
        memory = self._memory_of(tensor)
        at, shape = self._latest.get(memory, -1), _shape(tensor)
        if at < 0:
            at = self._add(Value(_bytes(tensor)), memory)
            value = self.values[at]
            value.is_input, value.is_fused, value.is_free = True, False, self._is_free(tensor)
            value.region = 0
            self._latest[memory] = self._views[at, shape] = at
            self.inputs[memory] = tensor.untyped_storage()
        if (at, shape) not in self._views:
            value = Value(_bytes(tensor), (at,), is_fused=True)
            value.is_view = True
            self._views[at, shape] = self._add(value, memory)
        return self._views[at, shape]

    def _add(self, value: Value, memory: int = -1) -> int:
        number, value.region = len(self.values), self.region
        for source in value.sources:
            self.values[source].users.append(number)
        self.values.append(value)
        self.memories.append(memory)
        return number

    def _made(self, tensor: Any, sources: Sequence[int], *, is_fused: bool) -> int:
        """Let *tensor* be a value made of *sources*."""
        memory = self._memory_of(tensor)
        at = self._add(Value(_bytes(tensor), sources, is_fused=is_fused), memory)
        self._latest[memory] = self._views[at, _shape(tensor)] = at
        return at

    def _part(self, n_bytes: int, *sources: int) -> int:
        """Add a value that eager mode does not make."""
        return self._add(Value(n_bytes, sources, is_fused=True))

    def _plain(self, name: str, base: str, sources: list[int], results: Sequence[Any]) -> None:
        """Write down an operator that is one also where it is compiled."""
        is_again, is_random = recomputable.is_again(name), base in recomputable.RANDOM
        if name.partition(".")[2] in recomputable.OVERWRITES:
            sources = sources[1:]
        for tensor in results:
            at = self._made(tensor, tuple(dict.fromkeys(sources)), is_fused=is_again or is_random)
            self.values[at].is_again = is_again
            self.values[at].is_joined = base == "cat"

    def _norm(self, operands: Sequence[Any], results: Sequence[Any], *, trains: bool) -> None:
        """Write down a norm: means of the operand in fp32, the operand without them, and times the weight."""
        x, out, statistics = operands[0], results[0], [one for one in results[1:] if one.numel()]
        weights = [self.of(one) for one in operands[1:3]]
        at = self._upcast(x)
        size = max(self.values[at].n_bytes, FP32_BYTES * x.numel())
        means = [self._made(one, (at,), is_fused=True) for one in statistics]
        centred = self._part(size, at, *means[:-1])
        normal = self._part(size, centred, *means[-1:])
        last = normal
        for weight in weights:
            last = self._part(size, last, weight)
        self._made(out, (last,), is_fused=True)
        if trains:
            kept = self._memory_of(statistics[-1]) if statistics else self._memory_of(x)
            self.needs += [Need(one, IN_A_KERNEL, kept) for one in (normal, *means[-1:], *weights[:1])]
            self.explained.update(map(self._memory_of, (x, *statistics)))

    def _upcast(self, tensor: Any) -> int:
        """Return the value of *tensor* in fp32."""
        at = self.of(tensor)
        if tensor.element_size() >= FP32_BYTES:
            return at
        return self._part(FP32_BYTES * tensor.numel(), at)

    def _softmax(self, x: Any, out: Any, *, is_log: bool) -> None:
        """Write down a softmax or its logarithm: a maximum and a sum of each row, then the numbers."""
        at = self._upcast(x)
        size, rows = self.values[at].n_bytes, _bytes(x) // max(int(x.shape[-1]) if x.dim() else 1, 1)
        most = self._part(rows, at)
        less = self._part(size, at, most)
        powers = self._part(size, less)
        total = self._part(rows, powers)
        last = self._part(size, less if is_log else powers, total)
        if out.element_size() < FP32_BYTES:
            self._made(out, (last,), is_fused=True)
            return
        memory = self._memory_of(out)
        self.memories[last] = memory
        self._latest[memory] = self._views[last, _shape(out)] = last

    def _dropout(self, source: int, results: Sequence[Any], *, trains: bool) -> None:
        """Write down a dropout: random numbers, where they are large enough, and what is left there."""
        out, mask = results
        drawn = self._part(FP32_BYTES * out.numel())
        self.values[drawn].is_again = False
        kept = self._made(mask, (drawn,), is_fused=True)
        self._made(out, (source, kept), is_fused=True)
        if trains:
            self.needs.append(Need(kept, IN_A_KERNEL, self._memory_of(mask)))

    def _need(self, base: str, operands: Sequence[Any], sources: list[int], results: Sequence[Any]) -> None:
        """Note what the backward of an operator reads."""
        if not any(one.requires_grad for one in operands):
            return
        made = [self.of(one) for one in results]
        how = IN_A_KERNEL if all(self.values[one].is_fused for one in made) else BY_ITSELF
        found = list[int]()
        if base in recomputable.BY_MASK and operands:
            at = made[0] if base == "relu" else sources[0]
            mask = self._part(results[0].numel(), at)
            self.values[mask].is_forward = False
            self.needs.append(Need(mask, IN_A_KERNEL, self.memories[at]))
        elif base in recomputable.BY_OTHER:
            found = [
                sources[1 - at]
                for at, one in enumerate(operands[:2])
                if one.requires_grad and len(sources) > 1
            ]
            found += sources[1:2] if base == "div" else []
        elif base in {"addmm", "baddbmm"}:
            found = [sources[3 - at] for at in (1, 2) if operands[at].requires_grad]
        elif base == "convolution":
            found = [sources[1 - at] for at in (0, 1) if operands[at].requires_grad]
        elif "attention" in base:
            found = [*sources, *made]
        elif base in {"where", "index", "gather", "embedding", "index_select"}:
            found = [at for at, one in zip(sources, operands, strict=True) if not one.is_floating_point()]
            how = IN_A_KERNEL if base == "where" else BY_ITSELF
        elif base not in recomputable.PLAIN:
            found = sources[:1] if base in recomputable.BY_OPERAND else []
            found += made[:1] if base in recomputable.BY_RESULT else []
        self.needs += [Need(at, how, self.memories[at]) for at in found]


def _shape(tensor: Any) -> tuple[Any, ...]:
    """Return what tells one view of a memory from another."""
    return (tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _bytes(tensor: Any) -> int:
    return int(tensor.numel()) * int(tensor.element_size())
