"""Memory of what ``torch.compile`` compiles: what its kernels write, for as long as its graphs would hold it.

Of a forward, tensors count once it is over, since only then is known what its backward reads: what PyTorch's
partitioner keeps, which is asked, from its making until the backward has run, other tensors that kernels
write until they are read for the last time, what stays in registers not at all. In a backward, a tensor
counts from when a kernel writes it.
"""

from __future__ import annotations

import functools
import operator
import weakref
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from foretrace.tracer import internals
from foretrace.tracer.rehearse.device.memory import Memory, rounded
from foretrace.tracer.rehearse.state import State
from foretrace.tracer.rehearse.tape.calls import Kernel, parts_of, tensors_in
from foretrace.tracer.rehearse.tape.tape import Tape

# What a compiled forward keeps for its backward: PyTorch's partitioner is asked, of what the forward
# issues.


NAMESPACES: Final = frozenset({"aten", "prims"})
"""Operators that are written down; what others return, as collectives do, comes from outside."""


class Kept(NamedTuple):
    """Something that is kept for the backward."""

    row: int  # number of the operator that makes it; below 0: of an input, -1 for the first
    n_bytes: int  # its size
    reader: int  # number of the operator whose backward is the last to read it


class Given(NamedTuple):
    """What an operator is given, before it runs."""

    args: Any  # with nodes of the graph in place of tensors, as autograd sees them
    kwargs: Mapping[str, Any]
    memories: list[int]  # of the tensors
    values: list[tuple[int, bool]]  # their numbers, and whether autograd follows each


class Forward:
    """The operators of one call of what is compiled, as a graph; each node says in its stack which one it is.

    Args:
        memory_of: returns the number of the memory of a tensor.
        is_free: whether a tensor that the call reads is there anyway.

    Attributes:
        graph: the ``torch.fx.Graph``, without what it returns.
        results: of each operator, the numbers of the values that it returns.
        forms: shape, stride, dtype, device of each input, and whether autograd follows it.
        free: numbers of the inputs that are there anyway, as parameters.
        storages: the memory of each input.
        made: by memory, the number of the operator that makes it.
        reads: by memory, the numbers of the operators that read it.
    """

    def __init__(self, memory_of: Callable[[Any], int], is_free: Callable[[Any], bool]) -> None:
        import torch

        self.graph, self._detach = torch.fx.Graph(), torch.Tensor.detach
        self.forms, self.free, self.storages = list[Any](), list[int](), list[Any]()
        self.results, self.made, self.reads = (
            list[tuple[int, ...]](),
            dict[int, int](),
            dict[int, list[int]](),
        )
        self._memory_of, self._is_free = memory_of, is_free
        self._calls, self._regions, self._inputs = list[Any](), list[int](), list[Any]()
        self._nodes, self._follows = list[Any](), list[bool]()  # by value
        self._origins: dict[int, list[int]] = {}  # what autograd follows of a value that it does not
        self._values: dict[Any, int] = {}
        self._first: dict[int, int] = {}
        self._given, self._leaves = set[int](), set[int]()
        self._followed, self._own = set[int](), set[int]()

    def before(self, args: Any, kwargs: Mapping[str, Any], region: int, *, trains: bool) -> Given:
        """Return what an operator is given that runs now, in a checkpoint if *region* is not 0."""
        given = Given(None, {}, [], [])

        def node(one: Any) -> Any:
            if not (hasattr(one, "element_size") and hasattr(one, "shape")):
                return type(one)(map(node, one)) if type(one) in {list, tuple} else one
            given.memories.append(self._memory_of(one))
            value = self._value(one, given.memories[-1], region)
            given.values.append((value, one.requires_grad))
            return self._seen(value, wants=one.requires_grad and trains)

        return given._replace(args=node(args), kwargs={name: node(one) for name, one in kwargs.items()})

    def _seen(self, value: int, *, wants: bool) -> Any:
        """Return the node of a *value* as autograd saw it, which may have been told to leave it alone."""
        node, follows = self._nodes[value], self._follows[value]
        if wants == follows:
            return node
        if not wants:
            return self.graph.call_function(self._detach, (node,))
        sources = [self._nodes[at] for at in self._origins.get(value, ())]
        return self.graph.call_function(internals.joined(), (node, *sources)) if sources else node

    def add(self, func: Any, given: Given, out: Any, region: int, *, trains: bool) -> None:
        """Write down an operator that has returned *out*; *given* is what ``before`` has returned."""
        memories, at = given.memories, len(self.results)
        if func.is_view and hasattr(out, "shape") and _form(memories[0], out) in self._values:
            return  # the same once more, as autograd makes it
        made, results = self._call(func, given.args, given.kwargs, region), list[int]()
        returns = internals.schema_of(func).returns
        is_one = len(returns) == 1 and str(returns[0].type) == "Tensor"
        for number, tensor in enumerate(tensors_in(out)):
            memory = self._memory_of(tensor)
            node = made if is_one else self.graph.call_function(operator.getitem, (made, number))
            node.meta = dict(made.meta)
            results.append(self._new(_form(memory, tensor), node, given.values, trains=trains))
            if memory not in self._first:
                self._first[memory], self.made[memory] = results[-1], at
        for memory in memories:
            self.reads.setdefault(memory, []).append(at)
        is_seen = any(has_gradient for _, has_gradient in given.values)
        if is_seen and trains:
            self._followed.add(at)
        elif is_seen or any(self.made.get(memory) in self._own for memory in memories):
            self._own.add(at)
        self.results.append(tuple(results))

    def _call(self, func: Any, args: Any, kwargs: Mapping[str, Any], region: int) -> Any:
        made = self.graph.call_function(func, args, dict(kwargs))
        made.meta["source_fn_stack"] = [(str(len(self.results)), func)]
        self._calls.append(made)
        self._regions.append(region)
        return made

    def key(self, returned: Sequence[int], chosen: Collection[int]) -> str:
        """Return what is the same of forwards that are the same."""
        return repr((str(self.graph), self.forms, self.free, self._regions, returned, sorted(chosen)))

    def finished(self, returned: Sequence[int], chosen: Collection[int]) -> Any:
        """Return the graph, which returns values; a checkpoint has *chosen* to keep results of operators."""
        for at, (made, region) in enumerate(zip(self._calls, self._regions, strict=True)):
            told = {"recompute": internals.recomputing(is_kept=at in chosen), "ac_graph_id": region}
            for node in (made, *(user for user in made.users if user.target is operator.getitem)):
                node.meta |= told if region else {}
        self.graph.output(tuple(self._nodes[value] for value in returned))
        return self.graph

    def is_known(self, memory: int) -> bool:
        """Whether the backward of known operators is all that eager mode keeps a *memory* for.

        A function with a backward of its own issues operators that autograd does not follow.
        """
        touched = {self.made.get(memory, -1), *self.reads.get(memory, ())}
        is_made = memory in self.made
        return is_made and not touched.isdisjoint(self._followed) and touched.isdisjoint(self._own)

    def first_read(self, memory: int) -> int:
        """Return the number of the first operator that autograd follows and that reads a *memory*."""
        return min(
            (at for at in self.reads.get(memory, ()) if at in self._followed), default=self.made[memory]
        )

    def is_chosen(self, memory: int) -> bool:
        """Whether only the checkpoint that makes a *memory* reads it, so that it has chosen to keep that."""
        region = self._regions[self.made[memory]]
        return bool(region) and all(self._regions[at] == region for at in self.reads.get(memory, ()))

    def returned(self, tensors: Sequence[Any]) -> list[int]:
        """Return the values of *tensors*; of a call that a checkpoint has stopped: what is made last."""
        forms = (_form(self._memory_of(one), one) for one in tensors)
        found = [self._values[form] for form in forms if form in self._values]
        return found or list(self.results[max(self._followed)])

    def _new(self, form: Any, node: Any, of: Sequence[tuple[int, bool]], *, trains: bool) -> int:
        """Return the number of a new value that a *node* makes of others."""
        value = self._values[form] = len(self._nodes)
        self._nodes.append(node)
        self._follows.append(trains and any(has_gradient for _, has_gradient in of))
        if not self._follows[value]:
            sources = [[one] if self._follows[one] else self._origins.get(one, []) for one, _ in of]
            self._origins[value] = list(dict.fromkeys(source for some in sources for source in some))
        return value

    def _value(self, tensor: Any, memory: int, region: int) -> int:
        """Return the value of *tensor*: an input if nothing here has made it, or a view that was not seen."""
        form, is_leaf = _form(memory, tensor), tensor.requires_grad and tensor.is_leaf
        if memory not in self._given and self._is_free(tensor):  # what FSDP gathers is no part of the graph
            self._first.pop(memory, None)
        elif form in self._values and (not is_leaf or self._values[form] in self._leaves):
            return self._values[form]
        # A view of known memory that was not seen: it is cut out of the first value that had this memory.
        if memory in self._first and not is_leaf:
            whole, shape = (
                self._first[memory],
                (tuple(tensor.shape), tensor.stride(), tensor.storage_offset()),
            )
            seen = self._seen(whole, wants=tensor.requires_grad)
            node = self._call(internals.as_strided(), (seen, *shape), {}, region)
            value = self._new(form, node, [(whole, tensor.requires_grad)], trains=True)
            self.results.append((value,))
            return value
        # An operator may meet a new input at any time, but a graph has its inputs first.
        with self.graph.inserting_after(self._inputs[-1]) if self._inputs else self.graph.inserting_before():
            self._inputs.append(self.graph.placeholder(f"input_{len(self._nodes)}"))
        value = self._new(form, self._inputs[-1], [(-1, tensor.requires_grad)], trains=True)
        self._first.setdefault(memory, value)
        self._leaves |= {value} if is_leaf else set()
        self._given.add(memory)
        self.storages.append(tensor.untyped_storage())
        self.free += [len(self.forms)] if self._is_free(tensor) else []
        self.forms.append((form[2], form[3], tensor.dtype, tensor.device, tensor.requires_grad))
        return value


def _form(memory: int, tensor: Any) -> tuple[Any, ...]:
    """Return what tells one view of a memory from another."""
    return (memory, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


class Partitioner:
    """Asks PyTorch's partitioner; of forwards that are the same, once."""

    def __init__(self) -> None:
        self._answers: dict[str, list[Kept]] = {}

    def kept(self, forward: Forward, returned: Sequence[int], chosen: Collection[int]) -> list[Kept]:
        """Return what is kept of a *forward*."""
        key = forward.key(returned, chosen)
        if key not in self._answers:
            cut = internals.partitioned(forward.finished(returned, chosen), forward.forms, forward.free)
            self._answers[key] = [] if cut is None else _read(*cut, forward.free)
        return self._answers[key]


def _read(forward: Any, backward: Any, n_results: int, free: Collection[int]) -> list[Kept]:
    """Return what the graph *forward* hands to the graph *backward* beside its *n_results* results."""
    nodes = list(forward.graph.nodes)
    numbers = {node: -1 - at for at, node in enumerate(node for node in nodes if node.op == "placeholder")}
    for node in nodes:
        if stack := node.meta.get("source_fn_stack"):
            numbers.setdefault(node, int(stack[-1][0]))
    by_sequence = dict[int, int]()  # autograd's number of an operator, which its backward has, too → its row
    for node, row in numbers.items():
        if row >= 0 and "seq_nr" in node.meta:
            by_sequence.setdefault(node.meta["seq_nr"], row)
    handed = list(nodes[-1].args[0])
    returned = {_memory(node) for node in handed[:n_results]}
    inside, found = {node.name: node for node in backward.graph.nodes}, dict[Any, Kept]()
    for node in handed[n_results:]:
        memory = _memory(node)
        value: Any = getattr(memory, "meta", {}).get("val")
        is_size = not hasattr(value, "untyped_storage") or any(type(size) is not int for size in value.shape)
        if is_size or memory in returned or (number := numbers.get(memory, 0)) in {-1 - at for at in free}:
            continue
        reader = _row_of(_last_reader(inside[node.name]), by_sequence)
        if memory in found:
            # A backward runs in reverse: the smallest number is the last to read.
            reader = min(reader, found[memory].reader)
        found[memory] = Kept(number, value.numel() * value.element_size(), reader)
    return list(found.values())


def _memory(node: Any) -> Any:
    """Return what has made the memory of *node*: views have none of their own."""
    while getattr(getattr(node, "target", None), "is_view", False):
        node = node.args[0]
    return node


def _last_reader(node: Any) -> int:
    """Return autograd's number of the last node of a backward that reads *node* or a view of it, -1: none."""
    found, waiting, seen = -1, [node], set[Any]()
    while waiting:
        for user in waiting.pop().users:
            if user.op == "output" or user in seen:
                continue
            seen.add(user)
            if getattr(user.target, "is_view", False):
                waiting.append(user)
            number = user.meta.get("seq_nr", -1)
            # A backward runs in reverse: its last node is the one with the smallest number.
            found = number if found < 0 else min(found, number if number >= 0 else found)
    return found


def _row_of(sequence: int, rows: Mapping[int, int]) -> int:
    """Return the row of an operator by autograd's number; 0 if it has none."""
    known = sorted(rows)
    return rows[known[max(bisect_right(known, sequence) - 1, 0)]] if known and sequence >= 0 else 0


# Storages of a compiled call, and when each of them takes memory.

TAKEN, GIVEN_BACK = range(2)
"""What happens to memory: of two things at one operator, the first comes first."""


class Stored:
    """The storage of a tensor that is not counted yet.

    Args:
        memory: counts it later.
        storage: the storage.
        category: what it is for.
        at: number of the operator of a forward that makes it, -1: a backward does.

    Attributes:
        number: of it in ``Memory``.
        n_bytes: that it takes.
        category, at: as given.
        written: number of the operator at which it is written, -1: it is not.
        last: number of the last one that reads it.
        is_back: whether a backward makes it.
    """

    __slots__ = (
        *("at", "category", "is_back", "is_counted", "last", "n_bytes", "number"),
        *("storage", "written"),
    )

    def __init__(self, memory: Memory, storage: Any, category: str, at: int) -> None:
        self.number = number = memory.number_of(storage)
        self.n_bytes, self.category = memory.unwritten.get(number, 0), category
        self.at, self.written, self.last, self.is_back = at, -1, at, at < 0
        self.is_counted = False  # whether it was counted for other reasons when it died

        def died(_: Any) -> None:
            self.is_counted = number not in memory.unwritten

        self.storage = weakref.ref(storage, died)  # refers to it as long as eager mode holds it


class Step(NamedTuple):
    """Memory is taken, or given back."""

    at: int  # number of the operator of the call
    what: int  # ``TAKEN`` or ``GIVEN_BACK``
    of: Stored | None  # the storage that takes it, None: one that eager mode does not make, or does not hold
    n_bytes: int  # how much
    category: str  # what it is for
    users: Sequence[Any]  # storages for which it is held after the call; of an *of* that stays itself, that


def steps_of(one: Stored, *, is_held: bool) -> list[Step]:
    """Return when the memory of *one* is taken, and given back unless it *is_held* after the call."""
    written = one.at if one.written < 0 and is_held else one.written
    if written < 0 or one.is_counted:
        return []
    begin = Step(written, TAKEN, one, one.n_bytes, one.category, [one] if is_held else [])
    return [begin] if is_held else [begin, begin._replace(at=max(one.last, written), what=GIVEN_BACK)]


def replay(memory: Memory, tape: Tape, rows: Sequence[int], steps: Iterable[Step]) -> None:
    """Count *memory* as *steps* say, also in what the operators of the call have noted."""
    before, ends, tokens = memory.total, [*rows, tape.next_number], dict[int, int]()
    ordered = sorted(steps, key=lambda step: step[:2])
    for n, step in enumerate(ordered):
        if step.what == GIVEN_BACK:
            memory.free(tokens.pop(id(step.of)))
        elif step.of is not None and step.users:
            memory.write(step.of.number)
        else:
            number = memory.hold(step.n_bytes, step.category)
            tokens[id(step.of)] = number
            if step.of is None:
                hold_for(step.users, functools.partial(memory.free, number))
        following = ordered[n + 1].at if n + 1 < len(ordered) else len(rows)
        # Up to the next step, operators have noted the memory as it was before the call.
        if following > step.at:
            tape.add_bytes(ends[step.at], ends[following], memory.total - before)


def hold_for(users: Iterable[Any], free: Callable[[], None]) -> None:
    """Call *free* once all *users* have gone."""
    waiting = [weakref.finalize(one, lambda: gone()) for one in users]  # noqa: PLW0108 - not there yet

    def gone() -> None:
        if not any(one.alive for one in waiting):
            free()


def stays(storage: Any, users: Iterable[Any]) -> None:
    """Let *storage* be there as long as *users* are."""
    for one in users if storage is not None else ():
        weakref.finalize(one, id, storage)  # which is called with it


FREE: Final = frozenset({"parameters", "gathered", "buffers"})
"""What memory is for that is there whatever a forward saves."""

NO_ANSWER: Final = (
    "PyTorch's partitioner did not take a compiled part ({error}): memory of it counts as in eager mode"
)
"""What to say where the operators of a forward cannot be made a graph again."""


class CompiledMemory:
    """Counts what the kernels of compiled calls write.

    Args:
        key: returns the number of the memory of a tensor, which no other one has had or will have.
        is_unwritten: whether the memory of that number is in registers only.

    Attributes:
        forward: the compiled forward that runs, None: none does, or what runs is part of an operator of it.
    """

    def __init__(
        self, session: State, key: Callable[[Any], int], is_unwritten: Callable[[int], bool]
    ) -> None:
        self._session, self._key, self._is_unwritten = session, key, is_unwritten
        self._stored: dict[int, Stored] = {}
        self._partitioner = Partitioner()
        self.forward: Forward | None = None
        self._is_forward = False
        self._rows, self._operators, self._regions = list[int](), list[int](), list[Any]()
        self._call, self._has_back = -1, False

    def begin(self) -> None:
        """A compiled forward begins."""
        self.now(-1)
        if self._session.position.step >= 0:
            self.forward, self._is_forward = Forward(self._key, self._is_there), True
            self._regions = [internals.saved_tensor_hooks()]
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
        if not self._is_forward:
            self.now(call)
        at = len(self._rows) if self._is_forward else -1
        one = Stored(self._session.memory, tensor.untyped_storage(), category, at)
        self._stored[self._key(tensor)] = one
        self._has_back |= at < 0

    def op(self, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, *, is_fused: bool) -> None:
        """An operator of a compiled call has been issued, which is a kernel or a part of one."""
        if self._is_forward:
            for tensor in tensors_in((args, kwargs)):
                one = self._stored.get(self._key(tensor))
                if one is not None:
                    one.last = len(self._rows)
                    if not is_fused:
                        self.wrote(self._key(tensor))
        for tensor in tensors_in(out):
            if not self._is_unwritten(key := self._key(tensor)):
                self.wrote(key)
        if self._is_forward:
            self._rows.append(self._session.tape.next_number)

    def write_down(self, handler: Kernel, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the *handler* of an operator of a forward returns, and write the operator down."""
        import torch

        if self.forward is None or func.namespace not in NAMESPACES:
            return handler(func, args, kwargs)
        forward, self.forward, region = self.forward, None, self._region()
        given = forward.before(args, kwargs, region, trains=torch.is_grad_enabled())
        try:
            out = handler(func, args, kwargs)
        finally:
            self.forward = forward
        forward.add(func, given, out, region, trains=torch.is_grad_enabled())
        # By operator of the graph, the last row of the tape then: a view has no row of its own.
        self._operators += [max(len(self._rows) - 1, 0)] * (len(forward.results) - len(self._operators))
        return out

    def keeps(self, gradient: Any) -> None:
        """Autograd keeps *gradient* as it is, for a parameter that had none."""
        self.wrote(self._key(gradient))

    def wrote(self, key: int) -> None:
        """A kernel has written the memory of that number."""
        one = self._stored.get(key)
        if one is None:
            return
        if self._is_forward and one.at >= 0:
            one.written = len(self._rows) if one.written < 0 else one.written
        else:
            self._session.memory.write(one.number)
            del self._stored[key]

    def end(self, out: Any) -> None:
        """A compiled forward has returned *out*: count what it has written, and what its backward holds."""
        forward, self.forward, self._is_forward, self._regions = self.forward, None, False, []
        if forward is None:
            return
        # Of this forward alone: what earlier ones have left waits for a backward.
        own = {key: one for key, one in self._stored.items() if one.at >= 0}
        # What eager mode still holds.
        storages = {key: storage for key, one in own.items() if (storage := one.storage()) is not None}
        results = [part for tensor in tensors_in(out) for part in parts_of(tensor)]
        held = {self._key(one) for one in results} & set(storages)
        known = {key: storages[key] for key in storages.keys() - held if forward.is_known(key)}
        # What the graph does not account for is held as eager mode holds it.
        held |= storages.keys() - known.keys()
        steps = self._kept(forward, results, known, held) if known else []
        for key, one in own.items():
            steps += steps_of(one, is_held=key in held and key in storages)
        replay(self._session.memory, self._session.tape, self._rows, steps)
        # What is only in registers so far counts once a backward, or anything else, has it written.
        for key, one in own.items():
            one.at = -1
            if key in held or key not in storages:
                del self._stored[key]

    def _kept(
        self, forward: Forward, results: Sequence[Any], known: Mapping[int, Any], held: set[int]
    ) -> list[Step]:
        """Return when what eager mode does not make is kept for a backward; the rest of that is *held*."""
        chosen = {forward.made[key] for key in known if forward.is_chosen(key)}
        reads = {key: forward.first_read(key) for key in known}
        found = list[Step]()
        try:
            kept = self._partitioner.kept(forward, forward.returned(results), chosen)
        except Exception as error:  # whatever a compiler may raise
            self._session.warn(NO_ANSWER.format(error=str(error).partition("\n")[0] or type(error).__name__))
            held |= known.keys()
            return []
        for one in kept:
            users = _freed_with(reads, one.reader)
            n_bytes = rounded(one.n_bytes)
            same = (key for key in known if forward.made[key] == one.row and key not in held)
            # An input takes no further memory, but lives until its last reader has run.
            if one.row < 0:
                stays(forward.storages[-1 - one.row], [known[key] for key in users])
            elif (key := next((key for key in same if self._stored[key].n_bytes == n_bytes), -1)) >= 0:
                held.add(key)
            else:
                # Eager mode holds nothing of that operator and size: it is counted beside its tensors.
                at, of = self._operators[one.row], [known[key] for key in users]
                found.append(Step(at, TAKEN, None, n_bytes, "activations", of))
        return found

    def _region(self) -> int:
        """Return the number of the checkpoint within the call that runs now, 0 if none does."""
        hooks = internals.saved_tensor_hooks()
        if hooks not in self._regions:
            self._regions.append(hooks)
        return self._regions.index(hooks)

    def _is_there(self, tensor: Any) -> bool:
        """Whether *tensor* is there whatever a forward saves."""
        return self._session.memory.category_of(tensor.untyped_storage()) in FREE


def _freed_with(reads: Mapping[int, int], reader: int) -> list[int]:
    """Return the memory that eager mode frees once the backward of *reader* has run, or as near as may be.

    *reads*: by memory, the first operator that reads it, whose backward is the last.
    """
    when = min((at for at in reads.values() if at >= reader), default=max(reads.values()))
    return [key for key, at in reads.items() if at == when]
