"""A world of processes of which only this one is there: groups, meshes, stores, collectives of objects."""
# ruff: noqa: SLF001 - this module takes the place of parts of torch

from __future__ import annotations

import functools
import inspect
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Final
from urllib.parse import parse_qs, urlparse

from foretrace.tracer import internals
from foretrace.tracer.guarded import everywhere
from foretrace.tracer.rehearse.data.stated import Stated
from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.replacing import replaces
from foretrace.tracer.rehearse.state import State
from foretrace.tracer.rehearse.words import asker
from foretrace.tracer.rehearse.world.communicating import own_numbers
from foretrace.tracer.rehearse.world.launchers import is_task, name_on_node, on_node
from foretrace.tracer.rehearse.world.letters import ALL, MOST_NUMBERS, Described, Letters
from foretrace.traces.info import stable_group_id
from foretrace.traces.layout import Group

# Stores that a script makes itself, or asks its group for: what other ranks set is what they have left.


KINDS: Final = ("TCPStore", "FileStore")
"""Stores of torch that ranks share."""


def install_stores(dist: Any, letters: Letters, stated: Stated, world_size: int) -> Callable[[], Any]:
    """Put rehearsed stores in the place of torch's; return what makes one for the group of all ranks."""
    of_the_world = {"letters": letters, "stated": stated, "world_size": world_size}
    kind: Any = type("RehearsedStore", (OneRanksStore, dist.Store), of_the_world)
    for name in KINDS:
        everywhere(getattr(dist, name), type(name, (kind,), {}), name)
    made: Callable[[], Any] = kind
    return made


class OneRanksStore:
    """What a store of torch does in a world of which only one rank is there; a base beside ``dist.Store``."""

    letters: Letters  # what other ranks have set
    stated: Stated  # told what the script is told
    world_size: int  # number of ranks, all of which are taken to add what this one adds

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.host, self.port = (*args, "127.0.0.1", 29500)[:2] if len(args) > 1 else ("127.0.0.1", 29500)
        self.is_master = bool(kwargs.get("is_master", False))
        self.path = args[0] if args else ""
        self._own: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        """Set *key*, for other ranks, too."""
        self._own[key] = _bytes(value)
        self.letters.leave(("store", key), self._own[key])

    def get(self, key: str) -> bytes:
        """Return what this rank, or one before it, has set; else what it has set under a key like that.

        Raises:
            RehearsalError: there is nothing like it.
        """
        found = self._own.get(key, self.letters.read(("store", key)))
        if found is None:
            self.letters.await_any()
            found = self._like(key)
        if found is None:
            raise RehearsalError(
                f"the script waits for the key {key!r} of a store, which no rank has set that was "
                "rehearsed before: say in a stub file what it is (--stub, docs/rehearse.md section 6)"
            )
        return found

    def _like(self, key: str) -> bytes | None:
        """Return what this rank has set under a key that is *key* but for numbers."""
        found = next((self._own[own] for own in self._own if _shape(own) == _shape(key)), None)
        if found is not None:
            own = reprlib.repr(found)
            self.stated.tell(f"{asker()} asks a store what another rank has set: told its own, {own}")
        return found

    def add(self, key: str, number: int) -> int:
        """Add *number* as if all ranks had done so at once; return the sum."""
        total = int(self._own.get(key, b"0")) + number * self.world_size
        self._own[key] = str(total).encode()
        return total

    def append(self, key: str, value: Any) -> None:
        """Put *value* behind what is there."""
        self.set(key, self._own.get(key, b"") + _bytes(value))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Set *key* to *desired* if it is as *expected*, or is not there and nothing is expected."""
        held = self._own.get(key, self.letters.read(("store", key)))
        if (held or b"") == _bytes(expected):
            self.set(key, desired)
            return _bytes(desired)
        return _bytes(expected) if held is None else held

    def check(self, keys: Sequence[str]) -> bool:
        """Say that all are there: other ranks have come as far as this one."""
        del keys
        return True

    def wait(self, keys: Sequence[str], timeout: Any = None) -> None:
        """Wait for nobody."""

    def delete_key(self, key: str) -> bool:
        """Forget *key*."""
        return self._own.pop(key, None) is not None

    def num_keys(self) -> int:
        """Return how many keys this rank has set."""
        return len(self._own)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return what stands under each of *keys*."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        """Set each of *keys*."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)


def _shape(key: str) -> str:
    """Return *key* without the numbers in it.

    >>> _shape("host12/done")
    'host#/done'
    """
    return re.sub(r"\d+", "#", key)


def _bytes(value: Any) -> bytes:
    """Return *value* as a store has it: of words that a script gives, or bytes of another store."""
    return value if isinstance(value, bytes) else str(value).encode()


# Collectives of Python objects in a world in which only one rank is run.


class Objects:
    """Objects that ranks send each other: all send what this one has, or one what it has left for others.

    Where this rank has nothing, and nobody has left anything, the script is told what it has itself. Methods
    take the arguments of the collectives of torch, by the names that they have there.
    """

    def __init__(self, dist: Any, session: State) -> None:
        self._dist, self._session = dist, session

    def install(self, c10d: Any) -> None:
        """Replace the collectives of objects of torch."""
        for name, act in (
            ("all_gather_object", self._gathered),
            ("gather_object", self._gathered),
            ("scatter_object_list", self._scattered),
            ("broadcast_object_list", self._broadcast),
            ("send_object_list", self._left),
            ("recv_object_list", self._received),
        ):
            self._replace(c10d, name, act)

    def _replace(self, c10d: Any, name: str, act: Callable[[SimpleNamespace], Any]) -> None:
        signature = inspect.signature(getattr(c10d, name))

        @replaces(c10d, self._dist, name=name)
        def called(_: Any, *args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return act(SimpleNamespace(**bound.arguments))

    def _gathered(self, given: SimpleNamespace) -> None:
        lists = vars(given)
        objects = lists.get("object_list", lists.get("object_gather_list"))
        if objects is not None:
            objects[:] = [given.obj] * (n := self._dist.get_world_size(given.group))
            if n > 1 and given.obj is not None:
                self._session.stated.tell(
                    f"{asker()} gathers objects of {n} ranks: told what it has itself for each"
                )

    def _scattered(self, given: SimpleNamespace) -> None:
        found, _ = self._by_one("scatter", given, given.scatter_object_input_list)
        if found is not None:
            given.scatter_object_output_list[0] = found[self._dist.get_rank(given.group)]
        else:
            self._kept(given.scatter_object_output_list, "gets an object of another rank")

    def _broadcast(self, given: SimpleNamespace) -> None:
        objects = given.object_list
        found, _ = self._by_one("objects", given, objects, is_there=None not in objects)
        if found is not None:
            objects[:] = found
        elif None in objects:
            self._kept(objects, "hears objects")

    def _left(self, given: SimpleNamespace) -> None:
        receiver, number = self._which(given, "dst")
        address = self._session.letters.next("object", number, self._session.rank, receiver)
        self._session.letters.leave(address, given.object_list, self._described)

    def _received(self, given: SimpleNamespace) -> int:
        found, sender = self._by_one("object", given, given.object_list, receiver=self._session.rank)
        if found is not None:
            given.object_list[:] = found
        else:
            self._kept(given.object_list, "receives objects of another rank")
        return sender

    def _by_one(
        self, kind: str, given: SimpleNamespace, own: Any, *, receiver: int = ALL, is_there: bool = False
    ) -> tuple[Any, int]:
        """Return what one rank sends, *own* if it is this one, and who; None if nobody has left it.

        *is_there*: whether this rank has objects of its own, by which it can do.
        """
        sender, number = self._which(given, "src")
        letters = self._session.letters
        # Numbered in any case, as the sender numbers it.
        address = letters.next(kind, number, sender, receiver)
        if receiver == ALL and sender == self._session.rank:
            letters.leave(address, own, self._described)
            return own, sender
        found = letters.read(address)
        if receiver != ALL and found is None and sender not in letters.coming:
            found = letters.alike(address)
            if found is not None:
                words = f"told what a rank as far from its receiver sends, {reprlib.repr(found)}"
                self._session.stated.tell(f"{asker()} receives objects of another rank: {words}")
        if found is None and not is_there:
            letters.await_(sender)
        return found, sender

    def _kept(self, found: list[Any], does: str) -> None:
        """Report that the script gets back what it has *found* itself."""
        self._session.stated.tell(f"{asker()} {does}: told what it has itself, {reprlib.repr(found)}")

    def _described(self, tensor: Any) -> Described | None:
        """Return what others make of a *tensor* in an object; None for a DTensor, which has a mesh."""
        if hasattr(tensor, "_local_tensor"):
            return None
        is_short = tensor.numel() <= MOST_NUMBERS
        numbers = own_numbers(self._session.stated, tensor) if is_short else None
        device = "cuda" if self._session.host.on_device(tensor) else "cpu"
        return Described(tuple(tensor.shape), tensor.dtype, device, tensor.requires_grad, numbers)

    def _which(self, given: SimpleNamespace, side: str) -> tuple[int, int]:
        """Return the rank at a *side*, which may be told by its place, and the number of the group."""
        own = given.group if given.group is not None else self._dist.group.WORLD
        rank, place = getattr(given, side), getattr(given, f"group_{side}", None)
        if rank is None:
            rank = 0 if place is None else int(self._dist.get_global_rank(own, place))
        return rank, self._session.groups.of(own).id


# Which backend would send a tensor: that of its group for the type of its device.


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
    """The backends of all groups, as the script has asked for them."""

    def __init__(self, session: State) -> None:
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
        """Raise RehearsalError if *call* sends *tensors* in *group* for which it has no backend."""
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
    device = getattr(tensor, "fake_device", None) or tensor.device  # torch's own answer takes long
    return bool(device.index == 0 < rank) and n_gpus > 1 and not is_only


# Compares the rank and world size that a script joins with, and those that are rehearsed. A script that
# takes its rank from somewhere else than the environment of the rehearsal would otherwise train as another
# rank, or in another world, than the recorded one.

NEVER: Final = (
    "no process group was made: each of the {:,} ranks trains for itself; a script that takes its rank from "
    "SLURM or MPI is rehearsed by -- srun python train.py, or -- mpirun python train.py"
)
"""What to say of a script that joins no world."""

UNTOLD: Final = -1
"""What torch takes for a rank, or a number of them, that is told elsewhere."""


def told(arguments: Mapping[str, Any]) -> tuple[int, int]:
    """Return rank and number of ranks from a call of ``init_process_group``, or from its environment.

    ``UNTOLD`` if the launcher, such as MPI, or the store says it instead.

    Raises:
        ValueError: nothing says it; in the words of torch (``_env_rendezvous_handler``).
    """
    found = [UNTOLD if (n := arguments.get(name)) is None else int(n) for name in ("rank", "world_size")]
    if arguments.get("store") is not None or str(arguments.get("backend")) == "mpi":
        return found[0], found[1]
    address = urlparse(arguments.get("init_method") or "env://")
    query = parse_qs(address.query)
    for at, name in enumerate(("rank", "world_size")):
        if found[at] == UNTOLD and name in query:
            found[at] = int(query[name][0])
        elif found[at] == UNTOLD and address.scheme == "env":
            if name.upper() not in os.environ:
                raise ValueError(
                    "Error initializing torch.distributed using env:// rendezvous: environment variable "
                    f"{name.upper()} expected, but not set"
                )
            found[at] = int(os.environ[name.upper()])
    return found[0], found[1]


def check(session: State, found: tuple[int, int]) -> None:
    """Compare the rank and the number of ranks that a script has *found* with those of *session*.

    Raises:
        RehearsalError: it joins another world.
    """
    rank, n_ranks = found
    if n_ranks not in {UNTOLD, session.world_size}:
        n, ending = session.world_size, "s" * (n_ranks > 1)
        raise RehearsalError(
            f"a group of {n_ranks} rank{ending} is not the world of {n}: rehearse with --world-size "
            f"{n_ranks}, or tell the script of {n} (where it counts the GPUs of one node, by "
            f"--ranks-per-node {n}; where it asks its launcher, by writing that before it, as in -- srun "
            "python train.py)"
        )
    if rank not in {UNTOLD, session.rank}:
        session.warn(
            f"the script takes itself for rank {rank} where rank {session.rank} is rehearsed: what it "
            "chooses by a number of its own is that of another rank, and a real run whose nodes are not told "
            "apart (as by --node_rank) does not come up"
        )


UNPATCHED: Final = frozenset(
    {"__class__", "__eq__", "__getattribute__", "__hash__", "__new__", "__setattr__", "__repr__"}
    | {"get_coordinate", "get_group", "size"}
    | internals.METHODS_OF_MESH
)
"""Methods of a mesh that make no tensor."""


def _instead(function: Callable[..., Any], _: Any, *args: Any, **kwargs: Any) -> Any:
    """Call *function* in the place of another one."""
    return function(*args, **kwargs)


class World:
    """The groups of a world.

    Args:
        rank: who this process is.
        world_size: number of ranks.

    Attributes:
        made: ranks and description of every group that the script has made, by torch's name of it.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.made: dict[str, tuple[tuple[int, ...], str]] = {}
        self._has_device = False
        self._kept: list[Any] = []
        self.is_joined = False  # whether the script has made the group of all ranks

    def install(self, session: State) -> None:
        """Replace how processes meet in *session*; torch must have been imported."""
        import torch
        import torch.distributed as dist
        from torch.distributed import device_mesh
        from torch.distributed import distributed_c10d as c10d

        self._dist: Any = dist
        self._store = install_stores(dist, session.letters, session.stated, self.world_size)
        self._session, self._backends = session, session.backends
        self._join, self._new_group = c10d.init_process_group, c10d.new_group
        self._signature = inspect.signature(self._join)
        for name, function in (
            ("init_process_group", self._joined),
            ("new_group", self._made_group),
            ("split_group", self._split),
        ):
            replaces(c10d, dist, name=name)(functools.partial(_instead, function))
        Objects(dist, session).install(c10d)
        device_mesh.init_process_group = c10d.init_process_group  # of a script that makes a mesh first
        device_mesh.new_group = self._group_of_mesh
        device_mesh.get_backend = self._backend  # they choose a device where it is not "fake"
        self._dist.get_backend, self._dist.is_nccl_available = self._backend, torch.cuda.is_available
        self._dist.ProcessGroupNCCL = NcclGroup
        self._dist.ProcessGroup._device_types = property(self._backends.devices)
        c10d.monitored_barrier = self._dist.monitored_barrier = self._monitored
        _meshes_without_fakes(session)

    def groups(self, session: State) -> tuple[Group, ...]:
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
        return [NEVER.format(self.world_size)] if self.world_size > 1 and not self.is_joined else []

    def _joined(self, *args: Any, **kwargs: Any) -> None:
        """Join the world, whatever rendezvous is asked for; remember the backend that was."""
        asked = kwargs.get("backend", args[0] if args else None)
        arguments = self._signature.bind(*args, **kwargs).arguments
        check(self._session, told(arguments))
        self.is_joined = True
        self._has_device = kwargs.get("device_id") is not None
        self._backends.ask("", str(asked or ("nccl" if kwargs.get("device_id") is not None else UNSAID)))
        internals.know_fake_groups()
        store = arguments.get("store") or self._store()
        self._kept.append(store)  # torch finds what is in Python behind a store only while that is there
        self._join("fake", store=store, rank=self.rank, world_size=self.world_size)

    def _made_group(self, ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Make a group, and remember those of others, too."""
        chosen = {
            name: kwargs[name] for name in ("use_local_synchronization", "group_desc") if name in kwargs
        }
        before = set(internals.group_names())
        group = self._new_group(ranks, **chosen)
        members = tuple(range(self.world_size) if ranks is None else sorted(ranks))
        # torch keeps no group that this rank is not in: such a one gets a name here.
        name = str(next(iter(set(internals.group_names()) - before), f"other-{len(self.made)}"))
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
        if self._backend(group) != self._dist.Backend.GLOO:
            raise ValueError("monitored_barrier is only implemented for GLOO backend.")
        self._dist.barrier(group)


class NcclGroup:
    """What a script says of groups over NCCL is taken, and makes no difference here."""

    class Options:
        """Options of such a group, whatever they are."""

        def __init__(self, **options: Any) -> None:
            self.config = SimpleNamespace()
            vars(self).update(options)


def _meshes_without_fakes(session: State) -> None:
    """Let meshes compute with real numbers: they ask for elements. Every device is the processor."""
    fake_tensor = internals.fake_tensor()
    from torch.distributed import device_mesh as module

    kind = module.DeviceMesh
    for name, value in list(vars(kind).items()):
        if name in UNPATCHED:
            continue
        if isinstance(value, staticmethod):
            real = _with_real_numbers(value.__func__)
            setattr(kind, name, staticmethod(_once(real) if name == internals.JOINED else real))
        elif callable(value) and not isinstance(value, type | classmethod):
            setattr(kind, name, _with_real_numbers(value))

    def known(ranks: Any) -> Any:
        own = session.stated.numbers.of(ranks) if isinstance(ranks, fake_tensor) else None
        return ranks if own is None else own.clone()

    @replaces(kind, name="__init__")
    def init(made: Any, self: Any, device_type: str, mesh: Any = None, *args: Any, **kwargs: Any) -> None:
        made(self, device_type, known(mesh), *args, **kwargs)

    import_module("torch.distributed.fsdp")  # asks for it by a name of its own
    original = module.init_device_mesh
    everywhere(original, _with_real_numbers(original), "init_device_mesh")


def _once(join: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return *join* of a list of meshes, which remembers what it has made of the same ones."""
    known: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def joined(meshes: Any) -> Any:
        key = tuple(map(id, meshes))
        if key not in known:
            # The meshes are kept: they are known by their identity.
            known[key] = [*meshes], join(meshes)
        return known[key][1]

    return joined


def _with_real_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return *function* as it computes outside of a rehearsal: the tensors that it makes have elements."""

    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        with internals.without_fakes():
            return function(*args, **kwargs)

    return inner
