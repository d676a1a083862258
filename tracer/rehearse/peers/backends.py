"""Which backend would send a tensor: that of its group for the type of its device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.gpu import ordinals

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


class Backends:
    """The backends of all groups, as the script has asked for them.

    Args:
        session: the rehearsal.
    """

    def __init__(self, session: RehearsalSession) -> None:
        self._session = session
        self._asked = {"": UNSAID}
        self._known: dict[str, Mapping[str, str]] = {UNSAID: ON_GPU}

    def ask(self, group: str, backend: str) -> None:
        """Keep the *backend* that was asked for, for the *group* of that name in torch; ``""``: the world."""
        self._asked[group] = backend
        self._session.placement.is_met |= "nccl" in backend

    def of(self, group: str = "") -> str:
        """Return the backend that was asked for; if none was, that of the world."""
        return self._asked.get(group, self._asked[""])

    def check(self, call: str, group: Any, tensors: Iterable[Any]) -> None:
        """Raise RehearsalError if *call* sends *tensors* in *group* for which it has no backend.

        Args:
            call: what is called, for the message.
            group: of torch.
            tensors: what it sends; real tensors are on the host.
        """
        from torch.nn import Parameter

        session = self._session
        if not session.placement.is_met:
            return
        asked = self.of(str(group.group_name))
        by_device, sent = self._by_device(asked), list(tensors)
        ordinals.look(session, (one for one in sent if isinstance(one, Parameter)), ordinals.MODEL)
        ordinals.look(session, (one for one in sent if not isinstance(one, Parameter)), ordinals.SENT)
        for tensor in sent:
            kind = "cpu" if session.host.holds(tensor) else "cuda"
            if kind not in by_device:
                raise RehearsalError(self._refusal(call, group, asked, is_host=kind == "cpu"))
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
