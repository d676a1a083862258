"""Which backend would send a tensor: that of its group for the type of its device."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.ranks.launchers import is_task, name_on_node, on_node

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.session import RehearsalSession

UNSAID: Final = "undefined"
"""Backend of a script that names none."""

ON_GPU: Final[Mapping[str, str]] = {"cuda": "nccl"}
"""Backends that torch makes on a machine with GPUs if none is named (``BackendConfig``, since torch 2.6)."""

STAGED: Final = (
    "tensors on the device are sent over gloo, as by {call}: a real run copies them through the host, and "
    "gloo does not have all kinds for them; here they take what they take over NCCL"
)

SHARED: Final = (
    "the tensors that each rank sends, as by {call}, are on GPU 0 of its node, because no rank chooses a GPU "
    '(torch.cuda.set_device, torch.device("cuda", {rank})): over NCCL a real run ends with "Duplicate GPU '
    'detected"{unless}'
)
"""Note about a script whose ranks share a GPU."""

UNLESS: Final = (
    ", unless the launcher shows each task one GPU only (srun --gpus-per-task, CUDA_VISIBLE_DEVICES in a "
    "script around python)"
)
"""Added to the note if ranks are tasks of SLURM or MPI: a rehearsal does not know which GPUs they see."""


class Backends:
    """The backends of all groups, as the script has asked for them.

    Args:
        session: the rehearsal.
    """

    def __init__(self, session: RehearsalSession) -> None:
        from torch.cuda import is_available

        self._session = session
        self._asked = {"": UNSAID}
        self._known: dict[str, Mapping[str, str]] = {UNSAID: ON_GPU if is_available() else {"cpu": "gloo"}}

    def ask(self, group: str, backend: str) -> None:
        """Keep the *backend* that was asked for, for the *group* of that name in torch; ``""``: the world."""
        self._asked[group] = backend

    def of(self, group: str = "") -> str:
        """Return the backend that was asked for; if none was, that of the world."""
        return self._asked.get(group, self._asked[""])

    def devices(self, group: Any) -> list[Any]:
        """Return the devices for which *group* has a backend in a real run, as torch asks a group."""
        import torch

        return [torch.device(kind) for kind in self._by_device(self.of(str(group.group_name)))]

    def check(self, call: str, group: Any, tensors: Iterable[Any]) -> None:
        """Raise RehearsalError if *call* sends *tensors* in *group* for which it has no backend.

        Args:
            call: what is called, for the message.
            group: of torch.
            tensors: what it sends; real tensors are on the host.
        """
        session = self._session
        asked = self.of(str(group.group_name))
        by_device, sent = self._by_device(asked), list(tensors)
        for tensor in sent:
            kind = "cuda" if session.host.on_device(tensor) else "cpu"
            if kind not in by_device:
                raise RehearsalError(self._refusal(call, group, asked, is_host=kind == "cpu"))
            if kind == "cuda" and by_device[kind] == "nccl" and _shares(tensor):
                unless = UNLESS if is_task() else ""
                session.warn(SHARED.format(call=call, rank=name_on_node(), unless=unless))
            if kind == "cuda" and by_device[kind] == "gloo":
                session.warn(STAGED.format(call=call))
                return

    def _by_device(self, asked: str) -> Mapping[str, str]:
        """Return the backend by kind of device, as torch takes what was *asked*."""
        if asked not in self._known:
            from torch.distributed import distributed_c10d as c10d

            self._known[asked] = c10d.BackendConfig(c10d.Backend(asked)).get_device_backend_map()
        return self._known[asked]

    def _refusal(self, call: str, group: Any, asked: str, *, is_host: bool) -> str:
        """Say why a real run would end here, and what mends it."""
        info = self._session.groups.of(group)
        n_ranks, n_all = len(info.ranks), self._session.world_size
        whose = "of all ranks" if n_ranks == n_all else f"{info.axis} of {n_ranks} ranks"
        is_own = str(group.group_name) in self._asked
        making = "new_group(backend=" if is_own else "init_process_group("
        held, other, kind = ("host", "device", "cpu") if is_host else ("device", "host", "cuda")
        named = "nccl, as no backend is named," if asked == UNSAID else asked
        return (
            f"{call} of a tensor on the {held}, in the group {whose}, whose backend {named} is not for the "
            f'{held}: a real run ends with "No backend type associated with device type {kind}"; move the '
            f'tensor to the {other}, or make the group by {making}"cpu:gloo,cuda:nccl")'
        )


def _shares(tensor: Any) -> bool:
    """Whether *tensor* is on the first GPU of its node, of which this is another rank."""
    rank, n_gpus = on_node()
    is_only = "," not in os.environ.get("CUDA_VISIBLE_DEVICES", ",")
    return tensor.get_device() == 0 < rank and n_gpus > 1 and not is_only
