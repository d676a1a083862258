"""A world of processes of which only this one is there: groups, meshes, and collectives of Python objects."""
# ruff: noqa: SLF001 - this module takes the place of parts of torch

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from foretrace.tracer.rehearse.peers import joining, objects, stores
from foretrace.tracer.rehearse.peers.backends import UNSAID
from foretrace.tracer.rehearse.script.libraries import everywhere
from foretrace.traces.info import stable_group_id
from foretrace.traces.layout import Group

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.session import RehearsalSession

UNPATCHED: Final = frozenset({"__class__", "__getattribute__", "__new__", "__setattr__", "__repr__"})
"""Methods of a mesh that compute nothing."""


def _with_signature_of(original: Callable[..., Any], function: Any) -> Callable[..., Any]:
    """Return *function*, which tells the arguments of the *original*: libraries choose theirs by them."""

    @functools.wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return called


class World:
    """The groups of a world.

    Args:
        rank: who this process is.
        world_size: number of ranks.

    Attributes:
        made: ranks and description of every group that the script has made, by torch's name of it.
        is_joined: whether the script has made the group of all ranks.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.made: dict[str, tuple[tuple[int, ...], str]] = {}
        self._has_device = False
        self._kept: list[Any] = []
        self.is_joined = False

    def install(self, session: RehearsalSession) -> None:
        """Replace how processes meet in *session*; torch must have been imported."""
        import torch
        import torch.distributed as dist
        from torch.distributed import device_mesh
        from torch.distributed import distributed_c10d as c10d

        self._dist: Any = dist
        self._store = stores.install(dist, session.letters, session.stated, self.world_size)
        self._session, self._backends = session, session.backends
        anywhere: Any = c10d
        meshes: Any = device_mesh
        self._join, self._new_group = c10d.init_process_group, c10d.new_group
        self._signature = inspect.signature(self._join)
        for name, function in (
            ("init_process_group", self._joined),
            ("new_group", self._made_group),
            ("split_group", self._split),
            *objects.collectives(dist, session),
        ):
            as_torchs = _with_signature_of(getattr(anywhere, name), function)
            for module in (anywhere, self._dist):
                setattr(module, name, as_torchs)
        meshes.init_process_group = anywhere.init_process_group  # of a script that makes a mesh first
        meshes.new_group = self._group_of_mesh
        meshes.get_backend = self._backend  # they choose a device where it is not "fake"
        self._dist.get_backend, self._dist.is_nccl_available = self._backend, torch.cuda.is_available
        self._dist.ProcessGroupNCCL = NcclGroup
        self._dist.ProcessGroup._device_types = property(self._backends.devices)
        anywhere.monitored_barrier = self._dist.monitored_barrier = self._monitored
        _meshes_without_fakes(session)

    def groups(self, session: RehearsalSession) -> tuple[Group, ...]:
        """Return every group that was made; one that this rank is not in has the axis of its like."""
        own = {group.id: group for group in session.groups.table()}
        axes = {name: session.groups.axis_of_name(name) for name in self.made}
        by_words = {words: axis for name, (_, words) in self.made.items() if (axis := axes[name])}
        for name, (ranks, words) in self.made.items():
            number = stable_group_id(name, ranks)
            found = by_words.get(words) if words not in {"", "undefined"} else None
            if number not in own and found and len(ranks) > 1:
                own[number] = Group(id=number, axis=found, ranks=ranks)
        return tuple(own[number] for number in sorted(own))

    def said(self) -> list[str]:
        """Return what to say of the world at the end."""
        return [joining.NEVER.format(self.world_size)] if self.world_size > 1 and not self.is_joined else []

    def _joined(self, *args: Any, **kwargs: Any) -> None:
        """Join the world, whatever rendezvous is asked for; remember the backend that was."""
        asked = kwargs.get("backend", args[0] if args else None)
        arguments = self._signature.bind(*args, **kwargs).arguments
        joining.check(self._session, joining.told(arguments))
        self.is_joined = True
        self._has_device = kwargs.get("device_id") is not None
        self._backends.ask("", str(asked or ("nccl" if kwargs.get("device_id") is not None else UNSAID)))
        import torch.testing._internal.distributed.fake_pg  # which makes the backend known

        del torch
        store = arguments.get("store") or self._store()
        self._kept.append(store)  # torch finds what is in Python behind a store only while that is there
        self._join("fake", store=store, rank=self.rank, world_size=self.world_size)

    def _made_group(self, ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Make a group, and remember those of others, too."""
        chosen = {
            name: kwargs[name] for name in ("use_local_synchronization", "group_desc") if name in kwargs
        }
        before = set(self._names())
        group = self._new_group(ranks, **chosen)
        members = tuple(range(self.world_size) if ranks is None else sorted(ranks))
        name = str(next(iter(set(self._names()) - before), f"other-{len(self.made)}"))
        self.made[name] = (members, str(kwargs.get("group_desc") or ""))
        asked = kwargs.get("backend", args[1] if len(args) > 1 else None)
        if asked:
            self._backends.ask(name, str(asked))
        return group

    def _group_of_mesh(self, *args: Any, **kwargs: Any) -> Any:
        """Make a group of a mesh, of whose dimensions each may be told a backend (``backend_override``)."""
        asked, _ = kwargs.pop("backend", None), kwargs.pop("pg_options", None)
        group = self._new_group(*args, **kwargs)
        if asked and (name := getattr(group, "group_name", None)) is not None:
            self._backends.ask(str(name), str(asked))
        return group

    def _split(
        self, parent_pg: Any = None, split_ranks: Any = None, *_: Any, group_desc: Any = None, **__: Any
    ) -> Any:
        """Make the groups of *split_ranks*, which are places in the parent; return that of this rank."""
        if not split_ranks:
            raise ValueError("split_ranks cannot be None or empty")
        if not self._has_device:
            raise RuntimeError(
                "No device associated with the default pg, not safe to split any process groups"
            )
        parents, mine = self._dist.get_process_group_ranks(parent_pg or self._dist.group.WORLD), None
        for places in split_ranks:
            ranks = [parents[place] for place in places]
            group = self._made_group(ranks, group_desc=group_desc)
            mine = group if self.rank in ranks else mine
        return mine

    def _backend(self, group: Any = None) -> Any:
        """Return the backend that the script asked for, by which it and libraries choose what they send."""
        name = "" if group is None else str(group.group_name)
        return self._dist.Backend(self._backends.of(name))

    def _monitored(self, group: Any = None, *args: Any, **kwargs: Any) -> None:
        """Have a barrier of gloo, which is none of another backend's, as torch has it."""
        del args, kwargs
        if self._backend(group) != self._dist.Backend.GLOO:
            raise ValueError("monitored_barrier is only implemented for GLOO backend.")
        self._dist.barrier(group)

    @staticmethod
    def _names() -> list[str]:
        from torch.distributed import distributed_c10d as c10d

        return list(c10d._world.pg_names.values())


class NcclGroup:
    """What a script says of groups over NCCL is taken, and makes no difference here."""

    class Options:
        """Options of such a group, whatever they are."""

        def __init__(self, **options: Any) -> None:
            self.config = SimpleNamespace()
            vars(self).update(options)


def _meshes_without_fakes(session: RehearsalSession) -> None:
    """Let meshes compute with real numbers: they ask for elements. Every device is the processor."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.distributed import device_mesh as module

    kind: Any = module.DeviceMesh
    for name, value in list(vars(kind).items()):
        if name in UNPATCHED:
            continue
        if isinstance(value, staticmethod):
            setattr(kind, name, staticmethod(_with_real_numbers(value.__func__)))
        elif callable(value) and not isinstance(value, type | classmethod):
            setattr(kind, name, _with_real_numbers(value))
    made, original = kind.__init__, module.init_device_mesh

    def known(ranks: Any) -> Any:
        own = session.stated.numbers.of(ranks) if isinstance(ranks, FakeTensor) else None
        return ranks if own is None else own.clone()

    def init(self: Any, device_type: str, mesh: Any = None, *args: Any, **kwargs: Any) -> None:
        made(self, device_type, known(mesh), *args, **kwargs)

    def init_device_mesh(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return _with_real_numbers(original)(device_type, *args, **kwargs)

    kind.__init__ = init
    import torch.distributed.fsdp  # asks for it by a name of its own

    del torch
    everywhere("init_device_mesh", original, init_device_mesh)


def _with_real_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return *function* as it computes outside of a rehearsal: the tensors that it makes have elements."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return inner
