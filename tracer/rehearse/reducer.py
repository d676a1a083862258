"""The reducer of DDP in Python: that of torch is in C++ and refuses tensors without data.

Follows ``torch/csrc/distributed/c10d/reducer.cpp``: gradients are divided and copied into buckets as they
come, a bucket is all-reduced when it is full and those before it have been, and everything is copied back at
the end of the backward. After the first backward the buckets are made anew in the order in which
gradients came. With ``find_unused_parameters`` buckets stay as they are, parameters that no output depends
on count as there from the first gradient on, and behind the last bucket ranks sum how many of them have used
each parameter.
"""
# ruff: noqa: SLF001 - this module takes the place of parts of torch

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any


class Bucket:
    """What a communication hook is handed, as ``torch.distributed.GradBucket``.

    Args:
        index: which bucket.
        data: gradients of all its parameters, one behind the other.
        parameters: those that are in it.
        is_last: whether no other follows.
    """

    def __init__(self, index: int, data: Any, parameters: Sequence[Any], *, is_last: bool) -> None:
        self._index, self._data, self._parameters, self._is_last = index, data, list(parameters), is_last

    def index(self) -> int:
        """Return which bucket it is."""
        return self._index

    def buffer(self) -> Any:
        """Return all gradients as one tensor."""
        return self._data

    def set_buffer(self, data: Any) -> None:
        """Let *data* be the gradients."""
        self._data = data

    def parameters(self) -> list[Any]:
        """Return the parameters."""
        return self._parameters

    def gradients(self) -> list[Any]:
        """Return the gradient of each parameter."""
        sizes = [parameter.numel() for parameter in self._parameters]
        parts = self._data.split(sizes)
        return [part.view(p.shape) for part, p in zip(parts, self._parameters, strict=True)]

    def is_last(self) -> bool:
        """Whether no other bucket follows."""
        return self._is_last


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
        self._unreached: list[int] = []
        self._used = (
            self._params[0].new_empty(len(self._params), dtype=torch.int32)
            if find_unused_parameters
            else None
        )
        self._as_view = gradient_as_bucket_view
        self._is_rebuilt = False
        self._order: list[int] = []
        self._expects = False
        self._is_reducing = False
        self.hook: Callable[[Bucket], Any] | None = None
        self._build(bucket_indices)
        for at, parameter in enumerate(self._params):
            parameter.register_post_accumulate_grad_hook(lambda _, at=at: self._ready(at))

    def __getattr__(self, name: str) -> Any:
        """Answer whatever else DDP tells its reducer with nothing."""
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None

    def prepare_for_forward(self) -> None:
        """A forward begins."""

    def prepare_for_backward(self, outputs: Any) -> None:
        """A backward will come in which gradients are reduced."""
        self._expects = True
        if self._unused and outputs:
            reached = _reached(outputs)
            self._unreached = [
                at for at, parameter in enumerate(self._params) if id(parameter) not in reached
            ]

    def _set_static_graph(self) -> None:
        """The graph is the same in every step: nobody has to ask who used what."""
        self._used = None

    def _rebuild_buckets(self) -> bool:
        """Make the buckets anew after the first backward, in the order in which gradients came."""
        if self._is_rebuilt or not self._order or self._unused:
            return False
        self._is_rebuilt = True
        params = [self._params[at] for at in self._order]
        found, _ = self._dist._compute_bucket_assignment_by_size(params, self._caps, [False] * len(params))
        self._build([[self._order[at] for at in bucket] for bucket in found])
        return True

    def _build(self, indices: Sequence[Sequence[int]]) -> None:
        self._buckets = [list(bucket) for bucket in indices]
        self._bucket_of = {at: n for n, bucket in enumerate(self._buckets) for at in bucket}
        self._data = [self._flat(bucket) for bucket in self._buckets]
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
        """The gradient of parameter *at* is there."""
        if not self._expects:
            return
        from tracer import internals

        if not self._is_rebuilt:
            self._order.append(at)
        if not self._is_reducing:
            self._is_reducing = True
            internals.queue_callback()(self._finish)
            for unreached in self._unreached:
                self._take(unreached)
        self._take(at)

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
            if grad is None:  # of an operator that has no derivative
                self._view(at).zero_()
            elif self.hook is not None:  # which divides by itself
                self._view(at).copy_(grad)
            else:
                torch.div(grad, self._group.size(), out=self._view(at))

    def _reduce_full(self) -> None:
        if self._next == len(self._buckets):
            return
        while self._next < len(self._buckets) and not self._left[self._next]:
            self._works.append(self._reduced(self._next))
            self._next += 1
        if self._used is not None and self._next == len(self._buckets):
            self._works.append(self._dist.all_reduce(self._used, group=self._group, async_op=True))

    def _reduced(self, number: int) -> Any:
        """Reduce a bucket, or have the hook do it; return what to wait for."""
        data = self._data[number]
        if self.hook is None:
            return self._dist.all_reduce(data, group=self._group, async_op=True)
        params = [self._params[at] for at in self._buckets[number]]
        return self.hook(Bucket(number, data, params, is_last=number == len(self._buckets) - 1))

    def _finish(self) -> None:
        """The backward has ended: reduce what no gradient came for, wait, copy back."""
        import torch

        for left in self._left if self._unused else ():
            left.clear()
        self._reduce_full()
        for work in self._works:
            work.wait()
        with torch.no_grad():
            for bucket in () if self._as_view else self._buckets[: self._next]:
                for at in bucket:
                    if self._params[at].grad is not None:
                        self._params[at].grad.copy_(self._view(at))
        self._expects = False
        self._restart()


def _reached(outputs: Sequence[Any]) -> set[int]:
    """Return the ids of the parameters on which *outputs* depend."""
    left = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen, found = set(left), {id(output) for output in outputs}
    while left:
        node = left.pop()
        found.add(id(getattr(node, "variable", None)))
        after = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= after
        left.extend(after)
    return found


class Logger:
    """What ``DistributedDataParallel`` tells of itself goes nowhere."""

    def __init__(self, reducer: Any) -> None:
        del reducer

    def __getattr__(self, name: str) -> Any:
        """Take whatever is told."""
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


def install() -> None:
    """Let DDP take this reducer, and send what it sends from C++ from here."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import distributed as module

    def broadcast(group: Any, tensors: Sequence[Any], size: int, src: int = 0) -> None:
        """Send tensors as one per type, as the coalesced broadcast of C++ does up to *size* bytes."""
        del size
        by_type: dict[Any, list[Any]] = {}
        for tensor in tensors:
            by_type.setdefault(tensor.dtype, []).append(tensor)
        for dtype, found in by_type.items():
            flat = torch.empty(sum(tensor.numel() for tensor in found), dtype=dtype)
            dist.broadcast(flat, dist.get_global_rank(group, src), group=group)

    anywhere: Any = dist
    anywhere.Reducer, anywhere.Logger = Reducer, Logger
    anywhere._broadcast_coalesced = broadcast

    def register(reducer: Reducer, state: Any, hook: Callable[[Any, Bucket], Any]) -> None:
        """Let *hook* reduce buckets."""
        reducer.hook = functools.partial(hook, state)

    anywhere._register_comm_hook = register
    names: Any = module
    names._verify_param_shape_across_processes = lambda *args, **kwargs: None
    original = module.DistributedDataParallel.__init__

    def init(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        kept = dict(kwargs)
        kept.pop("device_ids", None)
        kept.pop("output_device", None)
        original(self, module, None, None, *args[2:], **kept)

    names.DistributedDataParallel.__init__ = init
    names.DistributedDataParallel._check_comm_hook = lambda self, hook: None  # asks for versions of NCCL
