"""The reducer of DDP in Python: that of torch is in C++ and refuses tensors without data.

Follows ``torch/csrc/distributed/c10d/reducer.cpp``: gradients are divided and copied into buckets as they
come, a bucket is all-reduced when it is full and those before it have been, and everything is copied back at
the end of the backward. After the first backward the buckets are made anew in the order in which
gradients came. With ``find_unused_parameters`` buckets stay as they are, parameters that no output depends
on count as there from the first gradient on, and behind the last bucket ranks sum how many of them have used
each parameter. With ``static_graph`` the first backward counts how often each gradient comes; then ranks sum
who has used what, all buckets are reduced, and later backwards go by these counts.

Once, as buckets are made anew, the first rank tells the others how. A step that is kept after others that
have warmed up stands for all later ones: that is left out of it.
"""
# ruff: noqa: SLF001 - this module takes the place of parts of torch

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from foretrace.tracer.rehearse.peers.buckets import STATIC_UNDER_NO_SYNC, Bucket, reached, unfinished


class Reducer:
    """What ``DistributedDataParallel`` wants of ``torch.distributed.Reducer``; arguments as there."""

    def __init__(  # noqa: PLR0917 - the order in which DDP passes them
        self,
        params: Sequence[Any],
        bucket_indices: Sequence[Sequence[int]],
        per_bucket_size_limits: Sequence[int],
        process_group: Any,
        expect_sparse_gradients: Sequence[bool] = (),
        bucket_bytes_cap: int = 0,
        find_unused_parameters: bool = False,  # noqa: FBT001, FBT002
        gradient_as_bucket_view: bool = False,  # noqa: FBT001, FBT002
        param_to_name_mapping: Any = None,
        first_bucket_bytes_cap: int = 0,
        *rest: Any,
    ) -> None:
        del per_bucket_size_limits, expect_sparse_gradients, param_to_name_mapping, rest
        import torch
        import torch.distributed as dist

        self._params, self._group, self._dist = list(params), process_group, dist
        self._caps = [first_bucket_bytes_cap or bucket_bytes_cap, bucket_bytes_cap]
        self._unused = find_unused_parameters
        self._is_static, self._n_forwards = False, 0
        self._unreached: list[int] = []
        self._times, self._times_left = [0] * len(self._params), [0] * len(self._params)
        self._used = self._params[0].new_empty(len(self._params), dtype=torch.int32)
        self._as_view = gradient_as_bucket_view
        self._is_rebuilt = False
        self._order: list[int] = []
        self._expects = self._is_reducing = False
        self._in_outputs: set[int] = set()
        self.hook: Callable[[Bucket], Any] | None = None
        self._build(bucket_indices)
        self._handles = _told(self, self._params)

    def __del__(self) -> None:
        """Listen no more, as torch's does when DDP is thrown away: its parameters may train on."""
        for handle in self.__dict__.get("_handles", ()):
            handle.remove()

    def __getattr__(self, name: str) -> Any:
        """Answer whatever else DDP tells its reducer with nothing."""
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None

    def prepare_for_forward(self) -> None:
        """A forward begins, behind which gradients are reduced."""
        self._n_forwards += 1

    def prepare_for_backward(self, outputs: Any) -> None:
        """A backward will come in which gradients are reduced."""
        self._expects = True
        self._times_left = list(self._times)
        if self._asks and outputs:
            found = reached(outputs)
            self._unreached = [at for at, parameter in enumerate(self._params) if id(parameter) not in found]

    def note_outputs(self, outputs: Callable[[], Sequence[Any]]) -> None:
        """Learn on which parameters the *outputs* of the first forward depend, to explain an error."""
        if self._n_forwards == 1:
            self._in_outputs = reached(outputs())

    def _set_static_graph(self) -> None:
        """The graph is the same in every step: nobody has to ask after the first who used what."""
        self._is_static = True

    @property
    def _asks(self) -> bool:
        """Whether ranks ask each other in every step who has used what."""
        return self._unused and not self._is_static

    def _delay_all_reduce(self) -> None:
        """The first backward of a static graph is over: reduce everything.

        Raises:
            RuntimeError: no forward has said that gradients are to be reduced, as under ``no_sync``.
        """
        if not self._expects:
            raise RuntimeError(STATIC_UNDER_NO_SYNC)
        self._unreached = [at for at, n in enumerate(self._times) if not n]
        for at in range(len(self._params)):
            self._copy_in(at)
        self._works.append(self._dist.all_reduce(self._used, group=self._group, async_op=True))
        self._works += map(self._reduced, range(len(self._buckets)))
        self._next = len(self._buckets)
        self._finish()

    def _rebuild_buckets(self) -> bool:
        """Make the buckets anew after the first backward, in the order in which gradients came.

        Raises:
            RuntimeError: parameters are left of which the last backward made no gradient.
        """
        if self._is_reducing:
            left = {id(self._params[at]) for bucket in self._left for at in bucket}
            in_outputs = left if self._asks else left & self._in_outputs
            raise RuntimeError(unfinished(len(left), len(in_outputs)))
        if self._is_rebuilt or not self._order or self._asks:
            return False
        self._is_rebuilt = True
        params = [self._params[at] for at in self._order]
        found, _ = self._dist._compute_bucket_assignment_by_size(params, self._caps, [False] * len(params))
        self._tell([len(params) + 1, len(found)])
        self._build([[self._order[at] for at in bucket] for bucket in found])
        return True

    def _tell(self, lengths: Sequence[int]) -> None:
        """Send whole numbers from the first rank to all: so many of parameters, so many of buckets.

        Each is read by the host before the next goes out (``Reducer::sync_bucket_indices``).
        """
        import torch

        for length in lengths:
            numbers = self._params[0].new_empty(length, dtype=torch.int32, requires_grad=False)
            first = self._dist.get_global_rank(self._group, 0)
            self._dist.broadcast(numbers, first, group=self._group)

    def _build(self, indices: Sequence[Sequence[int]]) -> None:
        self._buckets = [list(bucket) for bucket in indices]
        self._bucket_of = {at: n for n, bucket in enumerate(self._buckets) for at in bucket}
        self._data: tuple[Any, ...] = ()  # those of before go first
        self._data = tuple(map(self._flat, self._buckets))
        for at in range(len(self._params)) if self._as_view else ():
            if self._params[at].grad is not None:  # C++ copies, once: that is left out
                self._params[at].grad = self._view(at)
        self._restart()

    def _flat(self, bucket: Sequence[int]) -> Any:
        first = self._params[bucket[0]]
        return first.new_empty(sum(self._params[at].numel() for at in bucket), requires_grad=False)

    def _restart(self) -> None:
        self._left = [set(bucket) for bucket in self._buckets]
        self._next = 0
        self._works: list[Any] = []
        self._is_reducing = False

    def _ready(self, at: int) -> None:
        """The gradient of parameter *at* is there, or one of several that are added up."""
        if not self._expects or not self._is_last(at):
            return
        from foretrace.tracer import internals

        if not self._is_rebuilt:
            self._order.append(at)
        if not self._is_reducing:
            self._is_reducing = True
            for unreached in self._unreached:
                self._take(unreached)
        was_last = self._next == len(self._buckets)
        self._take(at)
        if self._next == len(self._buckets) and not was_last:  # not in a checkpoint's backward
            internals.queue_callback()(self._finish)

    def _is_last(self, at: int) -> bool:
        """Count a gradient of parameter *at*; return whether it is to be reduced now."""
        if not self._is_static:
            return True
        if self._n_forwards == 1:
            self._times[at] += 1
            return False
        self._times_left[at] -= 1
        return not self._times_left[at]

    def _take(self, at: int) -> None:
        """Copy the gradient of parameter *at* into its bucket, and reduce what is full."""
        self._copy_in(at)
        self._left[self._bucket_of[at]].discard(at)
        self._reduce_full()

    def _view(self, at: int) -> Any:
        bucket = self._buckets[self._bucket_of[at]]
        start = sum(self._params[other].numel() for other in bucket[: bucket.index(at)])
        parameter = self._params[at]
        return self._data[self._bucket_of[at]].narrow(0, start, parameter.numel()).view(parameter.shape)

    def _copy_in(self, at: int) -> None:
        import torch

        grad = self._params[at].grad
        with torch.no_grad():
            view = self._view(at)
            if grad is None:  # of an operator that has no derivative
                view.zero_()
                return
            if self.hook is not None:  # which divides by itself
                view.copy_(grad)
            else:
                torch.div(grad, self._group.size(), out=view)
            if self._as_view:
                self._params[at].grad = view

    def _reduce_full(self) -> None:
        if self._next == len(self._buckets):
            return
        while self._next < len(self._buckets) and not self._left[self._next]:
            self._works.append(self._reduced(self._next))
            self._next += 1
        if self._asks and self._next == len(self._buckets):
            self._works.append(self._dist.all_reduce(self._used, group=self._group, async_op=True))

    def _reduced(self, number: int) -> Any:
        """Reduce a bucket, or have the hook do it; return what to wait for."""
        data = self._data[number]
        if self.hook is None:
            return self._dist.all_reduce(data, group=self._group, async_op=True)
        params = [self._params[at] for at in self._buckets[number]]
        return self.hook(Bucket(number, data, params, is_last=number == len(self._buckets) - 1))

    def _finish(self) -> None:
        """The backward has ended: wait, copy back."""
        import torch

        if self._is_static and not self._is_rebuilt and self._order:
            self._order += self._unreached
        for work in self._works:
            work.wait()
        with torch.no_grad():
            for bucket in () if self._as_view else self._buckets[: self._next]:
                for at in bucket:
                    if self._params[at].grad is not None:
                        self._params[at].grad.copy_(self._view(at))
        self._expects = False
        self._restart()


def _told(reducer: Reducer, params: Sequence[Any]) -> list[Any]:
    """Have *reducer* told of each gradient of *params*, without keeping it alive; return the handles.

    Python's collector does not look for cycles through hooks of tensors that C++ holds as well.
    """
    told = weakref.WeakMethod(reducer._ready)

    def ready(at: int) -> None:
        if (method := told()) is not None:
            method(at)

    return [
        parameter.register_post_accumulate_grad_hook(lambda _, at=at: ready(at))
        for at, parameter in enumerate(params)
    ]
