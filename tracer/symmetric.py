"""Sees operators that communicate through symmetric memory, as async tensor parallelism does.

They go by no process group's collectives: a rank reads from and writes into the memory of the others while it
multiplies. Each is noted as the collective that it replaces, from where the device comes to it to where it
leaves it; the block that calls it owns the time, for it computes all the while.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from foretrace.tracer import internals
from foretrace.tracer.clock import now_ns
from foretrace.tracer.implementations import Implementations
from foretrace.tracer.operators import dtype_name
from foretrace.tracer.records import Communication
from foretrace.tracer.stamps import cuda_stamp

if TYPE_CHECKING:
    from foretrace.tracer.session import Session


def _gathered(args: Any, kwargs: Any, n: int) -> int:
    """Return the size of all parts together, of which the first argument is one."""
    return int(args[0].nbytes) * n


def _scattered_product(args: Any, kwargs: Any, n: int) -> int:
    """Return the size of the product of the first two arguments, before it is scattered."""
    rows, columns = prod(args[0].shape[:-1]), args[1].shape[-1]
    kind = kwargs.get("out_dtype") or args[0].dtype
    return int(rows * columns * kind.itemsize)


def _whole(args: Any, kwargs: Any, n: int) -> int:
    """Return the size of the first argument."""
    return int(args[0].nbytes)


def _copied(args: Any, kwargs: Any, n: int) -> int:
    """Return the size of the second argument, which is copied into the memory that is the first."""
    return int(args[1].nbytes)


FUSED: Final[Mapping[str, tuple[str, Callable[[Any, Any, int], int]]]] = MappingProxyType(
    {
        "fused_all_gather_matmul": ("all_gather", _gathered),
        "fused_all_gather_scaled_matmul": ("all_gather", _gathered),
        "fused_matmul_reduce_scatter": ("reduce_scatter", _scattered_product),
        "fused_scaled_matmul_reduce_scatter": ("reduce_scatter", _scattered_product),
        "_low_contention_all_gather": ("all_gather", _gathered),
        "_low_contention_reduce_scatter": ("reduce_scatter", _whole),
        "multimem_all_reduce_": ("all_reduce", _whole),
        "multimem_one_shot_all_reduce": ("all_reduce", _whole),
        "multimem_one_shot_all_reduce_out": ("all_reduce", _whole),
        "multimem_all_gather_out": ("all_gather", _gathered),
        "one_shot_all_reduce": ("all_reduce", _whole),
        "one_shot_all_reduce_out": ("all_reduce", _whole),
        "one_shot_all_reduce_copy": ("all_reduce", _copied),
        "one_shot_all_reduce_copy_out": ("all_reduce", _copied),
        "two_shot_all_reduce_": ("all_reduce", _whole),
        "two_shot_all_reduce_out": ("all_reduce", _whole),
        "reduce_scatter_out": ("reduce_scatter", _whole),
        "all_to_all_vdev": ("all_to_all", _whole),
        "all_to_all_vdev_2d": ("all_to_all", _whole),
        "all_to_all_vdev_2d_offset": ("all_to_all", _whole),
        "nvshmem_all_to_all": ("all_to_all", _whole),
        "nvshmem_broadcast": ("broadcast", _whole),
    }
)
"""Operators of ``symm_mem`` as of torch 2.13: the collective that each replaces, the size of its array. How
much of its input an ``all_to_all_vdev`` sends only the device knows. Gets, puts and signals are left out."""


class SymmetricHook:
    """Implementations of the operators that note each call and pass it on.

    Args:
        session: the recording.
    """

    def __init__(self, session: Session) -> None:
        import torch

        self._session = session
        self._implementations = Implementations("symm_mem")
        for name in FUSED:
            if (packet := getattr(torch.ops.symm_mem, name, None)) is not None:
                self._implementations.add(packet.default, self._noting(name, packet.default))

    def remove(self) -> None:
        """Give the operators back as they were."""
        self._implementations.remove()

    def _noting(self, name: str, overload: Any) -> Callable[..., Any]:
        """Return the kernel that notes a call of one operator and passes it on."""
        kind, size = FUSED[name]
        at = internals.position_of(overload, "group_name")
        began = self._session.guarded("collectives", self._began)
        ended = self._session.guarded("collectives", self._ended)
        redispatch, after = internals.redispatch(overload), internals.keys_after_backend_select()

        def kernel(keyset: Any, /, *args: Any, **kwargs: Any) -> Any:
            one = began(kind, args[0], args[at], lambda n: size(args, kwargs, n))
            try:
                return redispatch(keyset & after, *args, **kwargs)
            finally:
                if one is not None:
                    ended(one)

        return kernel

    def _began(self, kind: str, tensor: Any, name: str, size: Callable[[int], int]) -> Communication:
        session = self._session
        group, at = session.groups.of(internals.group_named(name)), session.position
        device = tensor.get_device() if tensor.is_cuda else -1
        one = Communication(
            kind,
            group,
            group.next_collective(),
            -1,
            size(len(group.ranks)),
            dtype_name(tensor),
            session.lane.block,
            (at.step, at.stage, at.virtual_stage, at.microbatch),
            now_ns() if device < 0 else cuda_stamp(device),
            (),
            device,
        )
        session.sink.put(one)
        session.issued.note(one)
        return one

    @staticmethod
    def _ended(one: Communication) -> None:
        one.end = now_ns() if isinstance(one.start, int) else cuda_stamp(one.device)
