"""Element-wise work of what ``torch.compile`` compiles: as the kernels that it would fuse, not one by one.

Nothing is compiled in a rehearsal. Operators of a compiled part run one by one, and what the compiler would
have made of them is counted, by five rules of its scheduler (``torch/_inductor/scheduler.py`` and
``torch/_functorch/partitioners.py``):

- Element-wise operators between two kernels that are not fused (a product, attention) are one kernel. It
  reads each tensor in memory once, and keeps what lies between in registers.
- A result is written only if another kernel reads it: a product, a later kernel, what is not compiled.
- A later kernel, as in a backward, computes a result again where what it is made of takes less to read than
  the result takes to be written and read; otherwise the result is written.
- Each call of what is compiled is a graph of its own: what another one reads of it is written. A backward
  sees what its own forward was made of.
- A reduction ends a kernel if it is over other dimensions than the last ones, as that of a bias: all of its
  operand is read for it. Its result is small and is written.
"""
# ruff: noqa: SLF001 - only autograd's engine knows which node it computes

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Final, NamedTuple

from foretrace.tracer import internals
from foretrace.tracer.operators import dtype_name
from foretrace.tracer.rehearse.state import State
from foretrace.tracer.rehearse.tape.calls import tensors_in
from foretrace.tracer.rehearse.tape.compiled_memory import CompiledMemory
from foretrace.tracer.rehearse.tape.works import Work, is_aligned

# Which part of a memory a tensor is, and how much of it a kernel has not read yet.


class Region(NamedTuple):
    """A part of a memory, as a view describes it."""

    memory: int  # number of the memory
    n_bytes: int  # bytes of the part; an element that a view repeats counts once
    of_bytes: int  # bytes of the whole memory
    begin: int = 0  # byte with which it begins
    # distance in bytes and number of what follows each other, the farthest first; () of all
    dims: tuple[tuple[int, int], ...] = ()


def region_of(tensor: Any, memory: int) -> Region:
    """Return which part of the *memory* of that number a tensor is."""
    item, of_bytes = int(tensor.element_size()), int(tensor.untyped_storage().nbytes())
    dims, n_bytes = [(1, item)], item
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda dim: int(dim[1])):
        if stride == 0 or size == 1:
            continue
        n_bytes *= int(size)
        apart, number = dims[-1]
        # This dimension begins where the one inside it ends: both are one.
        if int(stride) * item == apart * number:
            dims[-1] = (apart, number * int(size))
        else:
            dims.append((int(stride) * item, int(size)))
    if n_bytes >= of_bytes:
        return Region(memory, of_bytes, of_bytes)
    return Region(memory, n_bytes, of_bytes, int(tensor.storage_offset()) * item, tuple(reversed(dims)))


class Unwritten:
    """A result that is in no memory yet.

    Attributes:
        n_bytes: its size.
        dtype: type of its elements.
        at: number of the kernel that computes it, and of the call that it belongs to.
        roots: what in memory it is made of.
    """

    __slots__ = ("at", "dtype", "n_bytes", "roots")

    def __init__(self, n_bytes: int, dtype: str, at: tuple[int, int], roots: Set[Region]) -> None:
        self.n_bytes, self.dtype, self.at, self.roots = n_bytes, dtype, at, roots


class Reading:
    """What one kernel reads: each byte once."""

    def __init__(self) -> None:
        self._read: dict[int, list[Region]] = {}

    def add(self, regions: Iterable[Region]) -> int:
        """Read *regions*; return the bytes that had not been read."""
        return sum(map(self._add, regions))

    def _add(self, region: Region) -> int:
        found = self._read.setdefault(region.memory, [])
        if any(_contains(one, region) for one in found):
            return 0
        # Parts that overlap without containing each other count twice, but never more than the whole memory.
        before = sum(one.n_bytes for one in found)
        found[:] = [one for one in found if not _contains(region, one)]
        fresh = min(region.n_bytes + sum(one.n_bytes for one in found), region.of_bytes) - before
        found.append(region)
        return max(fresh, 0)


def _contains(outer: Region, inner: Region) -> bool:
    """Return whether all bytes of *inner* are some of *outer*: each distance is one along *outer*'s."""
    if not outer.dims or outer == inner:
        return True
    if not inner.dims or inner.n_bytes > outer.n_bytes or inner.begin < outer.begin:
        return False
    # How far the last byte of *inner* is from the first of *outer*, in steps along each dimension.
    last = _along(outer, inner.begin - outer.begin)
    for apart, number in inner.dims:
        last = [at + (number - 1) * step for at, step in zip(last, _along(outer, apart), strict=True)]
    return all(at < number for at, (_, number) in zip(last, outer.dims, strict=True))


def _along(region: Region, distance: int) -> list[int]:
    """Return how many steps of each dimension of a *region* a *distance* in bytes is."""
    steps = []
    for apart, _ in region.dims:
        n_steps, distance = divmod(distance, apart)
        steps.append(n_steps)
    return steps


# Which operators a compiler fuses, and what they read if that is not each operand once.

APART: Final = (
    *("embedding_dense_backward", "embedding_bag", "index_put", "index_add", "index_copy", "scatter"),
    *("sort", "topk", "cumsum", "cumprod", "unique", "nonzero", "masked_select", "histc", "bincount"),
    *("pool", "upsample", "grid_sampl", "_foreach_", "_fused_adam", "_fused_sgd", "fft", "linalg", "svd"),
    *("multinomial", "ctc_loss", "searchsorted", "bucketize", "max_unpool", "roll", "repeat_interleave"),
)
"""Parts of the names of operators that stay kernels of their own."""

GATHERS: Final = frozenset({"aten.embedding", "aten.index", "aten.index_select", "aten.gather"})
"""Operators that read as much of their first operand as they make."""

RANDOM: Final = frozenset(
    {"aten.bernoulli_", "aten.rand_like", "aten.randn_like", "aten.normal_", "aten.uniform_"}
    | {"aten.zero_", "aten.fill_"}
)
"""Operators that read nothing: one number, or random numbers, which are drawn again where needed."""

OVERWRITES: Final = frozenset({"aten.copy_"})
"""Operators that write their first operand, and do not read it."""

MADE: Final = ("zeros_like", "ones_like", "full_like", "new_zeros", "new_full", "new_ones", "empty_like")
"""Ends of the names of operators that use only the shape of their operand."""

COLUMNS: Final = frozenset({"aten.native_layer_norm_backward", "aten._fused_rms_norm_backward"})
"""Backwards that also reduce over the rows: they read gradient and input once more."""

SUMS: Final = ("aten.sum", "aten.mean", "aten.amax", "aten.var", "aten.norm")
"""Reductions, by the beginnings of their names."""

BATCHES: Final = frozenset(
    {"aten.native_batch_norm", "aten.cudnn_batch_norm", "aten._native_batch_norm_legit"}
)
"""Norms over all but one dimension: one kernel reduces, the next one applies the result."""

BATCHES_BACKWARD: Final = frozenset({"aten.native_batch_norm_backward", "aten.cudnn_batch_norm_backward"})
"""Their backwards, which reduce gradient and input."""


def is_fused(name: str, work: Work) -> bool:
    """Return whether an operator is element-wise, or a reduction, that a compiler fuses with others."""
    if work.kind != "memory" or not work.is_known or not name.startswith(("aten.", "prims.")):
        return False
    return not any(part in name for part in APART)


def passes_over(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[Any]
) -> list[Any]:
    """Return the operands that a kernel of its own reads, to reduce over other dimensions than the last."""
    if name in COLUMNS or name in BATCHES_BACKWARD:
        return tensors_in(args[:2])
    if name in BATCHES:
        return tensors_in(args[:1])
    if not name.startswith(SUMS) or not results:
        return []
    operand = args[0]
    dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if not isinstance(dims, list | tuple) or not dims or not operand.dim():
        return []
    return [] if operand.dim() - 1 in {one % operand.dim() for one in dims} else [operand]


WRITE: Final = "compiled.write"
"""Name of the operation by which a kernel writes what another one reads."""

PAD: Final = "compiled.pad"
"""Name of the operation that gives a matrix aligned rows (torch/_inductor/fx_passes/pad_mm.py)."""

ACCUMULATING: Final = -2
"""In place of the number of a call: autograd adds to the gradient of a parameter."""

# ``AccumulateGrad`` gets UINT64_MAX (torch/csrc/autograd/functions/accumulate_grad.cpp).
_OF_LEAVES: Final = 1 << 62
"""Autograd's number of what does that is the largest that there is."""


class Fused:
    """What is compiled, and what its kernels read and write.

    Attributes:
        memory: counts what its kernels write.
    """

    def __init__(self, session: State) -> None:
        self.is_used = False  # whether anything is compiled
        self._session = session
        self._modules: weakref.WeakSet[Any] = weakref.WeakSet()
        self._depth, self._starts, self._ends, self._parts = 0, list[int](), list[int](), list[object]()
        self._call, self._kernel, self._n_read, self._read = -1, 0, 0, Reading()
        self._values: dict[int, Unwritten] = {}
        self._tokens: dict[int, tuple[int, Any]] = {}
        self._n_tokens = 0
        self._works: dict[tuple[int, int, int], int] = {}
        self.memory = CompiledMemory(session, self._key, self._values.__contains__)

    def add(self, module: Any) -> None:
        """From now on *module* counts as compiled."""
        self.is_used = True
        self._modules.add(module)

    def entered(self, module: Any) -> None:
        """A module is called."""
        if module in self._modules:
            self._enter(id(module))

    def left(self, module: Any, out: Any) -> None:
        """A module has returned *out*."""
        if module in self._modules:
            self._leave(out)

    def function(self, called: Callable[[], Any]) -> Any:
        """Return what the compiled function *called* returns."""
        self.is_used, out = True, None
        self._enter(object())
        try:
            out = called()
        finally:
            self._leave(out)
        return out

    def outside(self, called: Callable[[], Any]) -> Any:
        """Return what *called* returns, which a compiled call leaves out: its graph ends, another begins."""
        if not self._depth:
            return called()
        # Depth 1, so that ``_leave`` ends the graph and ``_enter`` begins one, however deep the call is.
        depth, self._depth = self._depth, 1
        self._leave(None)
        try:
            return called()
        finally:
            # A tuple: not the same part as before the break, but the same in each call of that part.
            self._enter((self._parts[-1],))
            self._depth = depth

    def op(self, number: int, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Write an operator down whose work is *number*."""
        tape, call = self._session.tape, self.inside()
        if call != ACCUMULATING and not self._depth:
            self.memory.now(call)
        if call >= 0 and (does_fuse := is_fused(name, tape.work(number))):
            if call != self._call:
                self._next_kernel()
                self._call = call
            self._fuse(number, name, args, kwargs, out)
        else:
            does_fuse = False
            for tensor in tensors_in((args, kwargs)):
                self._written(tensor)
            self._next_kernel()
            if call >= 0 and tape.work(number).kind == "gemm" and not tape.work(number).aligned:
                number = self._padded(number, args)
            tape.op(number)
        if call >= 0:
            self.memory.op(args, kwargs, out, is_fused=does_fuse)

    def _padded(self, number: int, args: Sequence[Any]) -> int:
        """Write down the copies of operands of a product whose rows are then aligned; return its number."""
        tape = self._session.tape
        copied = [one for one in tensors_in(args) if one.dim() == 2 and not is_aligned(one)]
        work = tape.work(number)
        if copied:
            moved = 2 * sum(map(_size, copied))
            tape.op(tape.number_of(Work(PAD, "memory", "", work.dtype, 0, moved, kernels=len(copied))))
        return tape.number_of(work._replace(aligned=True))

    def used(self, tensors: Any) -> None:
        """Something that is not compiled, as a collective, reads *tensors*."""
        for tensor in tensors_in(tensors):
            self._written(tensor)

    def _enter(self, part: object) -> None:
        """A call of *part* begins: what is the same part has the same forward."""
        if not self._depth:
            self._starts.append(internals.sequence_number())
            self._ends.append(self._starts[-1])
            self._parts.append(part)
            self.memory.begin()
        self._depth += 1

    def _leave(self, out: Any) -> None:
        if self._depth == 1 and (call := self.inside()) >= 0 and self._starts[call] == self._ends[call]:
            for key in [key for key, value in self._values.items() if value.at[1] == call]:
                self._write(key)  # no backward follows: what still lives is read by others
        if self._depth == 1:
            self.memory.end(out)
        self._depth = max(self._depth - 1, 0)

    def is_inside(self) -> bool:
        """Whether what is issued now is part of a compiled forward, or of the backward of one."""
        return self.inside() >= 0

    def inside(self) -> int:
        """Return the number of the compiled call whose forward or backward runs; -1 if none does.

        Where a gradient is added to those of a parameter, it may be between two parts: ``ACCUMULATING``.
        """
        if self._depth:
            self._ends[-1] = internals.sequence_number()
            return len(self._starts) - 1
        node = internals.node_that_runs()()
        if node is None or not self._starts:
            return -1
        # Nodes of a call have the numbers that autograd gave while its forward ran.
        number = node._sequence_nr()
        if number >= _OF_LEAVES:
            return ACCUMULATING
        at = bisect_right(self._starts, number) - 1
        return at if at >= 0 and number < self._ends[at] else -1

    def _fuse(self, number: int, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Add an operator to the kernel that is open."""
        tape = self._session.tape
        operands = [tensor for tensor in tensors_in((args, kwargs)) if tensor.dim()]
        results = [tensor for tensor in tensors_in(out) if tensor.dim()]
        over = passes_over(name, args, kwargs, results)
        largest = max(map(_size, operands), default=0)
        n_bytes, roots = self._read_by(name, operands, results, over)
        for tensor in results:
            is_small = bool(operands) and 4 * tensor.numel() <= max(one.numel() for one in operands)
            key = self._key(tensor)
            is_changed = key not in self._values and any(self._key(one) == key for one in operands)
            # Written at once: memory that is changed in place, and small results, as of reductions.
            if is_changed or (is_small and largest > _size(tensor)):
                self._values.pop(key, None)
                n_bytes += _size(tensor)
            else:
                self._make(tensor, roots)
        # The first operator of a kernel that reads anything counts its launch.
        opened = int(n_bytes > 0 and not self._n_read)
        self._n_read += n_bytes
        tape.op(self._cost(number, n_bytes + sum(map(_size, over)), opened + bool(over)))

    def _read_by(
        self, name: str, operands: Sequence[Any], results: Sequence[Any], over: Sequence[Any]
    ) -> tuple[int, set[Region]]:
        """Return what the open kernel has to read for an operator, and what its *results* are made of."""
        roots = set[Region]()
        if name in GATHERS:  # rows of a table: what is read is as large as what they make
            # No storage has a number below 0: what is read counts as memory of its own.
            roots = {Region(-1 - self._key(one), _size(one), _size(one)) for one in results}
        n_bytes = sum(root.n_bytes for root in roots)
        if name in RANDOM or name.endswith(MADE) or (over and name.startswith(SUMS)):
            return n_bytes, roots
        for tensor in operands[int(name in GATHERS or name in OVERWRITES) :]:
            read, made_of = self._reading(tensor)
            n_bytes += read
            roots |= made_of
        return n_bytes, roots

    def _reading(self, tensor: Any) -> tuple[int, Set[Region]]:
        """Return what the open kernel has to read for *tensor*, and what that is made of."""
        key = self._key(tensor)
        found = self._values.get(key)
        if found is not None and found.at == (self._kernel, self._call):
            return 0, found.roots
        if found is not None and self._is_seen(found):
            return self._read.add(found.roots), found.roots
        self._written(tensor)
        roots = {region_of(tensor, key)}
        return self._read.add(roots), roots

    def _is_seen(self, value: Unwritten) -> bool:
        """Whether a kernel computes *value* again: it sees what it is made of, which is little."""
        call = value.at[1]
        is_own = call == self._call or (not self._depth and self._parts[call] == self._parts[self._call])
        # Twice: otherwise the result is written once and read once.
        return is_own and sum(root.n_bytes for root in value.roots) <= 2 * value.n_bytes

    def _make(self, tensor: Any, roots: Set[Region]) -> None:
        """Let *tensor* be a result, or a changed part of one, that is in no memory yet."""
        key, n_bytes = self._key(tensor), _size(tensor)
        if (found := self._values.get(key)) is not None:
            n_bytes, roots = max(n_bytes, found.n_bytes), roots | found.roots
        self._values[key] = Unwritten(n_bytes, dtype_name(tensor), (self._kernel, self._call), roots)

    def _key(self, tensor: Any) -> int:
        """Return the number of the storage of *tensor*, which no other one has had or will have."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._tokens:
            number, self._n_tokens = self._n_tokens, self._n_tokens + 1
            # Addresses are used again, so the entry goes with its storage.
            self._tokens[address] = (number, weakref.ref(storage, lambda _: self._gone(address)))
        return self._tokens[address][0]

    def _gone(self, address: int) -> None:
        number, _ = self._tokens.pop(address, (-1, None))
        self._values.pop(number, None)

    def _written(self, tensor: Any) -> None:
        """Have *tensor* in memory."""
        self._write(self._key(tensor))

    def _write(self, key: int) -> None:
        """Have the result of that number in memory."""
        value, tape = self._values.pop(key, None), self._session.tape
        self.memory.wrote(key)
        if value is not None and self._session.position.step >= 0:
            self._n_read += value.n_bytes
            # No launch: the kernel that computes the result writes it.
            work = Work(WRITE, "memory", "", value.dtype, 0, value.n_bytes, kernels=0)
            tape.op(tape.number_of(work))

    def _next_kernel(self) -> None:
        if self._n_read:
            self._kernel, self._n_read, self._read = self._kernel + 1, 0, Reading()

    def _cost(self, number: int, n_bytes: int, kernels: int) -> int:
        """Return the number of a work like the one of *number* with other traffic and launches.

        A compiler resolves addresses when it generates a kernel.
        """
        key = (number, n_bytes, kernels)
        if key not in self._works:
            tape = self._session.tape
            changed = tape.work(number)._replace(bytes_moved=n_bytes, kernels=kernels, m=0, aligned=True)
            self._works[key] = tape.number_of(changed)
        return self._works[key]


def _size(tensor: Any) -> int:
    """Return the bytes of *tensor* that are in memory: none twice where it is expanded."""
    return region_of(tensor, 0).n_bytes
