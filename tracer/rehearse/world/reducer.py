"""What DDP's reducer, which is torch's own, is told of a world of which only this rank is there.

Once, as buckets are made anew, the first rank tells the others how. A step that is kept after others that
have warmed up stands for all later ones: that is left out of it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from foretrace.tracer import internals
from foretrace.tracer.rehearse.replacing import replaces
from foretrace.tracer.rehearse.state import State
from foretrace.tracer.rehearse.world.communicating import settled

# Parameters that each rank trains alone: DDP has them not, and nothing is sent that could hold them.


FEW: Final = 16
"""Numbers that no parameter needs to be looked for in: losses, norms, counts."""

PARTLY: Final = "DistributedDataParallel reduces the gradients of {n:,} of {n_all:,} trained parameters"
APART: Final = (
    "each rank trains {which} on its own, and the ranks drift apart unless other steps average them: nothing "
    "of that size is sent in the steps that are kept"
)
"""What is said of parameters that DDP has not; a parameter is one number, as in the size of a model."""

SAID_OF_ALL: Final = APART.partition("{")[0]
"""How it begins, which is of all steps that are kept: one that sends takes it back."""


class Apart:
    """Holds what is trained in a step against what is sent in it."""

    def __init__(self, session: State) -> None:
        self._session = session
        self._is_ddps, self._sends, self._has_sent = False, False, False
        self._reduced: set[int] = set()
        self.reducers: dict[int, Reducer] = {}  # by the identity of torch's, and by that of its group
        self.is_building = False  # whether torch's reducer makes its buckets
        self._trained: dict[int, int] = {}
        self._is_sharded = False

    @contextmanager
    def of_ddp(self, parameters: Iterable[int] = ()) -> Iterator[None]:
        """Let what is sent be DDP's for a while: its buffers, or gradients of *parameters*, by identity."""
        self._reduced.update(parameters)
        before, self._is_ddps = self._is_ddps, True
        try:
            yield
        finally:
            self._is_ddps = before

    def sent(self, tensor: Any, n_ranks: int) -> None:
        """*tensor* is sent to some of *n_ranks*: it may hold parameters or gradients.

        Whole numbers of 4 or 8 bytes are not what these are packed into.
        """
        is_number = tensor.is_floating_point() or tensor.is_complex() or tensor.element_size() < 4
        self._sends |= n_ranks > 1 and not self._is_ddps and is_number and tensor.numel() > FEW

    def stepped(self, optimizer: Any) -> None:
        """*optimizer* steps now."""
        from torch.distributed.fsdp import FlatParameter
        from torch.distributed.tensor import DTensor

        trained = [one for group in optimizer.param_groups for one in group["params"]]
        for one in trained:
            if one.grad is not None:
                self._trained[id(one)] = one.numel()
                self._is_sharded |= isinstance(one, DTensor | FlatParameter)

    def step_ended(self, *, is_kept: bool) -> None:
        """A step is over: say what is certain of all that were kept so far, if it is kept."""
        import torch.distributed as dist

        session = self._session
        if is_kept and self._sends and not self._has_sent:
            self._has_sent = True
            session.notes[:] = [note for note in session.notes if not note.startswith(SAID_OF_ALL)]
        n_all = sum(self._trained.values())
        n = sum(size for number, size in self._trained.items() if number in self._reduced)
        is_said = is_kept and n < n_all and session.world_size > 1 and not self._is_sharded
        if is_said and n:
            session.warn(PARTLY.format(n=n, n_all=n_all))
        if is_said and not self._has_sent and dist.is_initialized():
            session.warn(APART.format(which=f"the other {n_all - n:,}" if n else f"all {n_all:,} parameters"))
        self._sends, self._is_sharded = False, False
        self._reduced.clear()
        self._trained.clear()


BEGINS: Final = ("start_powerSGD_iter", "start_localSGD_iter")
"""What hooks of torch keep the step in which they begin."""

LATER: Final = (
    "the hook of DistributedDataParallel begins in step {start} only ({name}): in the steps that are kept "
    "whole gradients are summed over all ranks; --warmup {start} keeps a later one, or let it begin earlier"
)
"""What to say of a hook that begins after the steps that are kept."""


class Reducer:
    """A reducer of torch: tells what it sends from what others do.

    Args:
        parameters: those that it reduces.
    """

    def __init__(self, parameters: Sequence[Any]) -> None:
        self.parameters = [*map(id, parameters)]  # by identity: they live as long as torch's reducer
        self._own: list[Any] = []

    def join(self, session: State, reducer: Any, group: Any) -> Any:
        """Return what stands for *group* with torch's *reducer* alone: it sends what is sent in that."""
        import torch.distributed as dist

        self.group, own = group, dist.ProcessGroup(group.rank(), group.size())
        self._own.append(own)  # known by its identity
        for number in map(id, (reducer, own)):
            session.apart.reducers[number] = self
            weakref.finalize(reducer, session.apart.reducers.pop, number, None)
        return own


def install(session: State) -> None:
    """Let DDP's reducer work on fake tensors, and note what it makes and sends."""
    import torch.distributed as dist
    from torch.nn.parallel import distributed as names

    replaces(dist, name="_broadcast_coalesced")(lambda _, *args: _broadcast(session, *args))
    replaces(dist, name="_register_comm_hook")(functools.partial(_register, session))
    # There are no other ranks whose shapes could be compared.
    replaces(names, name="_verify_param_shape_across_processes")(lambda *args, **kwargs: None)
    kind = names.DistributedDataParallel

    @replaces(kind, name="__init__")
    def init(original: Any, self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        group = kwargs.get("process_group") or dist.group.WORLD
        session.backends.check("DistributedDataParallel", group, (*module.parameters(), *module.buffers()))
        original(self, module, *args, **kwargs)

    @replaces(dist.Reducer, name="__init__")
    def made(  # noqa: PLR0917 - the order in which DDP passes them
        original: Any,
        self: Any,
        params: Any,
        buckets: Any,
        limits: Any,
        group: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        own = Reducer(params).join(session, self, group)
        with _making_gradients(session):
            original(self, params, buckets, limits, own, *args, **kwargs)

    @replaces(dist.Reducer, name="_update_process_group")
    def moved(original: Any, self: Any, group: Any) -> None:
        original(self, session.apart.reducers[id(self)].join(session, self, group))

    @replaces(dist.Reducer, name="_rebuild_buckets")
    def rebuilt(original: Any, self: Any) -> bool:
        position, step = session.position, session.position.step
        with internals.without_fakes(), _making_gradients(session):  # it reads numbers of its own
            # What is sent outside of all steps is not written down.
            position.step = -1 if session.kept.warmup else step
            try:
                return bool(original(self))
            finally:
                position.step = step

    @replaces(dist.Reducer, name="_set_static_graph")
    def static(original: Any, self: Any) -> None:
        # Buckets of a static graph are made anew after the second step, not the first.
        session.kept.warm_up(2)
        original(self)

    replaces(kind, name="_check_comm_hook")(lambda _, self, hook: None)  # asks for versions of NCCL


@contextmanager
def _making_gradients(session: State) -> Iterator[None]:
    """Inside this context, what is made is for gradients, in whatever pass it is."""
    session.apart.is_building = True
    try:
        yield
    finally:
        session.apart.is_building = False


def _broadcast(session: State, group: Any, tensors: Sequence[Any], size: int, src: int = 0) -> None:
    """Send tensors as one per bucket of *size* bytes, as the coalesced broadcast of C++ does."""
    import torch.distributed as dist

    for bucket in internals.buckets(tensors, [size])[0]:
        # The one before lives until this one is there: C++ has two under way.
        flat = tensors[bucket[0]].new_empty(sum(tensors[at].numel() for at in bucket))
        with session.apart.of_ddp():
            dist.broadcast(flat, dist.get_global_rank(group, src), group=group)


def _register(
    session: State, original: Any, reducer: Any, state: Any, hook: Callable[[Any, Any], Any]
) -> None:
    """Let *hook* reduce buckets; say so if it begins what it is for after the steps that are kept."""
    name = next((name for name in BEGINS if hasattr(state, name)), "")

    def reduced(state: Any, bucket: Any) -> Any:
        last = session.kept.warmup + session.kept.n_steps - 1
        # The step that the hook will have counted to when the last kept one is done.
        if name and state.iter + last - session.position.step < (start := getattr(state, name)):
            session.warn(LATER.format(name=name, start=start))
        with session.apart.of_ddp(map(id, bucket.parameters())):
            return settled(hook(state, bucket))

    original(reducer, state, reduced)
