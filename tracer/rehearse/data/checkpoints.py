"""Checkpoints of a rehearsal: what the script saves it can load again, with shapes and without numbers.

What is written to a file, or to a buffer, describes each tensor. So a file can be renamed and copied, and
others load what one rank has saved. No such file stays on the disk.
"""
# ruff: noqa: SLF001 - this module takes the place of parts of torch

from __future__ import annotations

import functools
import io
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from foretrace.tracer import internals
from foretrace.tracer.internals import loads_with_weights
from foretrace.tracer.rehearse.errors import AwaitedError, RehearsalError
from foretrace.tracer.rehearse.replacing import replaces, when_imported
from foretrace.tracer.rehearse.session import RehearsalSession
from foretrace.tracer.rehearse.tape.calls import storage_key

# Where ``torch.load`` puts each storage: where the file says, or where ``map_location`` says.


class _Read:
    """Represents a storage that has been read; it is on the host until ``map_location`` moves it."""

    device: Any = "cpu"

    def to(self, device: Any = "cpu", *_: Any, **__: Any) -> _Read:
        """Move it."""
        self.device = device
        return self

    def cuda(self, device: Any = None, *_: Any, **__: Any) -> _Read:
        """Move it to a GPU."""
        return self.to("cuda")

    def cpu(self) -> _Read:
        """Move it to the host."""
        return self.to()

    def untyped(self) -> _Read:
        """Return itself."""
        return self


def device_of(mapped: Any, location: str) -> str:
    """Return the device of a storage that was saved at *location*, which ``map_location`` says, *mapped*."""
    return str(internals.restore_location()(mapped)(_Read(), location).device)


def put(session: RehearsalSession, tensor: Any, where: str) -> Any:
    """Let the fake *tensor*, which has been loaded, be on the device *where*; return it."""
    import torch

    device = torch.device(where)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    tensor.fake_device = device
    session.host.settle(tensor)
    return tensor


@contextmanager
def placing(session: RehearsalSession, mapped: Any) -> Iterator[None]:
    """Inside this context ``torch.load`` puts storages where the file or *mapped* says.

    *mapped* is the ``map_location``: a device, a dict, a function, or None; torch itself evaluates it. For
    fake tensors torch only notes the location in the file.

    Raises:
        RehearsalError: torch is older than 2.7, and does not note the location.
    """
    import torch

    anywhere: Any = internals.rebuilding()
    if not hasattr(anywhere, "_restore_device_fake_mode"):
        raise RehearsalError(
            f"torch.load cannot be rehearsed with torch {torch.__version__}: use 2.7 or newer, or turn "
            "loading off with an argument of the script or a stub (--stub, docs/rehearse.md section 6)"
        )
    original = anywhere._restore_device_fake_mode

    def restored(tensor: Any) -> Any:
        location = getattr(tensor.untyped_storage(), "_fake_device", None)
        where = "meta" if location is None else device_of(mapped, location)
        if where.startswith("meta"):
            return original(tensor)
        return put(session, tensor, where)

    anywhere._restore_device_fake_mode = restored
    try:
        # The operator that puts a tensor on a storage has that as an argument. As a part of a key its memory
        # would count for ever, also after the script has dropped it.
        with internals.without_cache():
            yield
    finally:
        anywhere._restore_device_fake_mode = original


MAGIC: Final = b"foretrace checkpoint\n"
"""How such a file begins."""

MOST_NUMBERS: Final = 1 << 16
"""Known numbers of a tensor that are saved: states of random generators, lengths, counts of steps."""

VARIABLES: Final = ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
"""Variables by which ``torch.load`` is told, without its arguments, what to load."""

REFUSED: Final = (
    "Weights only load failed: GLOBAL {name} was not an allowed global by default. Please use "
    "`torch.serialization.add_safe_globals([{name}])`, or load with `weights_only=False`"
)
"""Error of PyTorch for a file with more than weights."""

METADATA: Final = ".metadata"
"""Name of the file of a distributed checkpoint that says what is in it."""

SAID: Final = (
    "what the script saves is kept without the numbers of weights, and removed in the end: saving and "
    "loading take no time"
)


def install(session: RehearsalSession) -> None:
    """Replace what saves and loads tensors in torch and safetensors."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

    kept = _Kept(session)
    _files(kept)
    for name, function in _distributed(kept, dcp.load).items():
        # The package has its own names for the functions of both modules.
        for module in (dcp, state_dict_saver, state_dict_loader):
            if hasattr(module, name):
                setattr(module, name, function)
    _shards()
    _told_states()
    when_imported("safetensors", functools.partial(_opened_parts, kept))
    when_imported("safetensors.torch", functools.partial(_safetensors, kept))


class _Kept:
    """What has been saved, by file; other ranks are told."""

    def __init__(self, session: RehearsalSession) -> None:
        self.session = session
        self.live: list[Any] = []  # what belongs to this process: meshes, process groups

    def write(self, obj: Any, file: Any) -> None:
        """Write *obj* to *file*, a path, an open file or a buffer.

        Raises:
            RuntimeError: the folder of the file does not exist.
        """
        self.session.warn(SAID)
        content = self.described(obj)
        path = _path(file)
        if not isinstance(file, str | os.PathLike):
            file.write(content)
        elif path is not None and not path.parent.is_dir():
            raise RuntimeError(f"Parent directory {Path(file).parent} does not exist.")
        else:
            Path(file).write_bytes(content)
        if path is not None:
            self.session.letters.leave(("file", str(path)), content)
            if (files := self.session.files) is not None:
                files.removes(path)
                files.moved = self._moved

    def _moved(self, old: str, new: str) -> None:
        """Tell other ranks that the file, or the folder, *old* is *new* from now on."""
        left = self.session.letters.left
        for key in [key for key in left if key[0] == "file" and f"{key[1]}/".startswith(f"{old}/")]:
            left["file", new + key[1].removeprefix(old)] = left.pop(key)

    def described(self, obj: Any) -> bytes:
        """Return what a file of *obj* contains; if it cannot be described, why."""
        written = io.BytesIO(MAGIC)
        written.seek(len(MAGIC))
        try:
            _Writer(written, self.session, self.live).dump(obj)
        except Exception as error:  # of whatever the script saves
            return MAGIC + pickle.dumps(TypeError(f"it cannot be described ({error})"))
        return written.getvalue()

    def content(self, file: Any) -> bytes | None:
        """Return what the script, or another rank, has saved to *file*; None of any other file.

        Raises:
            AwaitedError: rank 0, which may save it, is to be rehearsed first.
        """
        path, letters = _path(file), self.session.letters
        if not isinstance(file, str | os.PathLike):
            at = file.tell()
            if file.read(len(MAGIC)) == MAGIC:
                return bytes(file.read())
            # None of ours: torch reads it from where it was.
            file.seek(at)
            return None
        # A file that is there says itself whether the script has saved it.
        with suppress(OSError), Path(file).open("rb") as opened:
            return opened.read() if opened.read(len(MAGIC)) == MAGIC else None
        # That of another rank may be gone by now; what was in it is left for others.
        found = letters.read(("file", str(path)))
        if found is None and self.session.rank and 0 in letters.coming:
            raise AwaitedError(0)
        return None if found is None else bytes(found[len(MAGIC) :])

    def made(
        self, content: bytes, name: str, where: Callable[[str], str], *, weights_only: bool = False
    ) -> Any:
        """Return what *content* describes.

        Raises:
            RehearsalError: it could not be described when it was saved.
            UnpicklingError: torch refuses it.
        """
        try:
            found = _Reader(io.BytesIO(content), where, self, weights_only=weights_only).load()
        except pickle.UnpicklingError:
            raise
        except Exception as error:
            raise RehearsalError(f"the script reads {name}, which it has saved: {error}") from error
        if isinstance(found, TypeError):
            raise RehearsalError(f"the script reads {name}, which it has saved, but {found}")
        return found


class _Writer(pickle.Pickler):
    """Writes objects with their tensors described, and notes what belongs to this process."""

    def __init__(self, file: io.BytesIO, session: RehearsalSession, live: list[Any]) -> None:
        import torch

        fake_tensor = internals.fake_tensor()

        super().__init__(file)
        self._session, self._live, self._parameter = session, live, torch.nn.Parameter
        self._real, self._fake = (torch.Tensor, torch.nn.Parameter), fake_tensor
        self._numbers: dict[Any, int] = {}

    def persistent_id(self, obj: Any) -> Any:
        """Return the description of a tensor, or where a mesh or a group is; None of anything else."""
        if type(obj).__name__ in {"DeviceMesh", "ProcessGroup"}:
            self._live.append(obj)
            return "live", os.getpid(), len(self._live) - 1
        is_real = type(obj) in self._real
        if type(obj) is not self._fake and not is_real:
            return None
        shape, session = tuple(obj.shape), self._session
        at = storage_key(obj)
        # The same memory seen in the same way gets one number, so that tied weights are one tensor when read.
        key = id(obj) if at == -1 else (at, obj.storage_offset(), shape, obj.dtype)
        number = self._numbers.setdefault(key, len(self._numbers))
        real = obj.detach() if is_real else session.stated.numbers.of(obj)
        listed = None
        if real is not None and real.numel() <= MOST_NUMBERS:
            with session.stated.numbers.really():
                listed = real.tolist()
        kind = obj.dtype, str(obj.device), obj.requires_grad, isinstance(obj, self._parameter)
        return number, shape, *kind, listed


class _Reader(pickle.Unpickler):
    """Reads such objects, and makes their tensors."""

    def __init__(
        self, file: io.BytesIO, where: Callable[[str], str], kept: _Kept, *, weights_only: bool
    ) -> None:
        super().__init__(file)
        self._where, self._kept, self._weights_only = where, kept, weights_only
        self._made: dict[int, Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return a class or function. Raises UnpicklingError, as torch does, if weights have none of it."""
        if self._weights_only and not loads_with_weights(f"{module}.{name}"):
            raise pickle.UnpicklingError(REFUSED.format(name=f"{module}.{name}"))
        return super().find_class(module, name)

    def persistent_load(self, pid: Any) -> Any:
        """Return a tensor as described, or what belongs to this process."""
        import torch

        if pid[0] == "live":
            if pid[1] != os.getpid():
                raise TypeError("it is in shards of another rank")
            return self._kept.live[pid[2]]
        number, shape, dtype, location, trains, is_parameter, listed = pid
        if number not in self._made:
            where = self._where(location)
            if listed is None:
                made = torch.empty(shape, dtype=dtype, device=where)
            else:
                made = torch.tensor(listed, dtype=dtype, device=where).reshape(shape)
            if is_parameter:
                made = torch.nn.Parameter(made, requires_grad=trains)
            self._made[number] = made if is_parameter or not trains else made.requires_grad_()
        return self._made[number]


def _path(file: Any) -> Path | None:
    """Return where *file* is, which a script saves to or reads from: a path, or an open file."""
    named = file if isinstance(file, str | os.PathLike) else getattr(file, "name", None)
    return Path(named).resolve() if isinstance(named, str | os.PathLike) else None


def _name(file: Any) -> str:
    """Return what to call *file*: as the script does, without the folder of a copy that it was given."""
    if isinstance(file, str | os.PathLike):
        return os.fspath(file)
    path = _path(file)
    return "a buffer" if path is None else path.name


def _files(kept: _Kept) -> None:
    """Replace ``torch.save`` and ``torch.load``."""
    import torch

    @replaces(torch)
    def save(_: Any, obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        kept.write(obj, f)

    @replaces(torch)
    def load(original: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        mapped = kwargs.get("map_location", args[0] if args else None)
        if (content := kept.content(f)) is not None:
            where = functools.partial(device_of, mapped)
            # By position, ``pickle_module`` comes second.
            return kept.made(content, _name(f), where, weights_only=_is_careful(*args[1:2], **kwargs))
        with placing(kept.session, mapped):
            return original(f, *args, **kwargs)


def _is_careful(pickle_module: Any = None, *, weights_only: bool | None = None, **others: Any) -> bool:
    """Whether ``torch.load`` with these arguments loads weights only, as it does unless told otherwise."""
    is_told = [os.environ.get(name, "0").lower() in {"1", "y", "yes", "true"} for name in VARIABLES]
    # As in torch.load: the first variable overrules the argument, the second one does not.
    if is_told[0] or (is_told[1] and weights_only is None):
        return is_told[0]
    return weights_only if weights_only is not None else pickle_module is None


def _safetensors(kept: _Kept, module: Any) -> None:
    """Do the same for safetensors, which would read memory at the made-up addresses of tensors."""

    @replaces(module)
    def save_file(_: Any, tensors: Mapping[str, Any], filename: Any, metadata: Any = None) -> None:
        kept.write({"tensors": dict(tensors), "metadata": metadata}, filename)

    @replaces(module)
    def save(_: Any, tensors: Mapping[str, Any], metadata: Any = None) -> bytes:
        return kept.described({"tensors": dict(tensors), "metadata": metadata})

    @replaces(module)
    def load_file(original: Any, filename: Any, device: Any = "cpu") -> Any:
        if (content := kept.content(filename)) is None:
            return original(filename, device)
        return kept.made(content, _name(filename), lambda _: str(device))["tensors"]

    @replaces(module)
    def load(original: Any, content: bytes) -> Any:
        if not content.startswith(MAGIC):
            return original(content)
        return kept.made(content[len(MAGIC) :], "bytes", lambda _: "cpu")["tensors"]


def _opened_parts(kept: _Kept, module: Any) -> None:
    """Let ``safetensors.safe_open`` open what was saved."""

    @replaces(module)
    def safe_open(
        original: Any, filename: Any, framework: Any = "pt", device: Any = "cpu", **kwargs: Any
    ) -> Any:
        if (content := kept.content(filename)) is None:
            return original(filename, framework=framework, device=device, **kwargs)
        return _Parts(**kept.made(content, _name(filename), lambda _: str(device)))


class _Parts:
    """What ``safe_open`` returns of a file that the script has saved."""

    def __init__(self, tensors: dict[str, Any], metadata: Any) -> None:
        self._tensors, self._metadata = tensors, metadata

    def __enter__(self) -> _Parts:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return sorted(self._tensors)

    offset_keys = keys

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def metadata(self) -> Any:
        """Return what else was saved."""
        return self._metadata

    def get_tensor(self, name: str) -> Any:
        """Return a tensor."""
        return self._tensors[name]

    def get_slice(self, name: str) -> Any:
        """Return what slices a tensor."""
        return _Slice(self._tensors[name])


_KINDS: Final = {"bfloat": "BF", "float": "F", "uint": "U", "int": "I", "complex": "C"}
# Of these the format has one kind only, and does not say which.
_ONLY: Final = {"F8_E4M3FN": "F8_E4M3", "F8_E8M0FNU": "F8_E8M0", "F4_E2M1FN_X2": "F4"}


class _Slice:
    """A tensor of a file of which parts are read."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __getitem__(self, at: Any) -> Any:
        return self._tensor[at]

    def get_shape(self) -> list[int]:
        """Return its sizes."""
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        """Return its type as the format has it, such as ``BF16``."""
        name = str(self._tensor.dtype).removeprefix("torch.")
        for whole, short in _KINDS.items():
            name = name.replace(whole, short)
        return _ONLY.get(name.upper(), name.upper())


def _shards() -> None:
    """Make FSDP1 collect optimizer states of parameters of which this rank has no shard.

    With ``use_orig_params`` a rank has states only for parameters in its shard. In a real run it receives the
    names of the others from other ranks.
    """
    module = internals.fsdp_optimizers()

    @replaces(module, name="_map_param_key_to_optim_keys")
    def mapped(original: Any, *args: Any, merge_keys: bool) -> tuple[list[Any], dict[Any, Any]]:
        keys, own = original(*args, merge_keys=merge_keys)
        if not (merge_keys and keys):
            return keys, own
        trained = (
            module._OptimStateKey(unflat_param_names=(name,), is_fsdp_managed=True)
            for name, info in args[4].items()  # of shards
            if info.param_requires_grad[info.param_indices[name]]
        )
        return sorted({*keys, *trained}), own


def _told_states() -> None:
    """Give ranks that wait for the states of rank 0 their own names, with the sizes of whole tensors.

    In a real run rank 0 sends names, sizes and dtypes as an object, and then broadcasts each tensor.
    """
    import torch
    import torch.distributed as dist

    module = internals.state_dict_utils()

    @replaces(module, internals.state_dict_of_users(), name="_broadcast_state_dict")
    def broadcast(original: Any, whole: Any, own: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        told = {
            name: module._TensorInfo(one.size(), one.dtype) if torch.is_tensor(one) and one.dim() else one
            for name, one in own.items()
        }

        def tell(objects: list[Any], *_: Any, **__: Any) -> None:
            if dist.get_rank():
                objects[0] = told

        hear, dist.broadcast_object_list = dist.broadcast_object_list, tell
        try:
            original(whole, own, *args, **kwargs)
        finally:
            dist.broadcast_object_list = hear


def _distributed(kept: _Kept, loads: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """Return ``save``, ``async_save`` and ``load`` of ``torch.distributed.checkpoint``, given the last one.

    Saving collects states, which may communicate, and writes them without doing so.
    """

    def metadata(kwargs: Mapping[str, Any], args: tuple[Any, ...], by: str) -> Path | None:
        named = kwargs.get("checkpoint_id") or getattr(kwargs.get(by), "path", None) or (args or (None,))[0]
        return Path(named) / METADATA if isinstance(named, str | os.PathLike) else None

    def save(state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        states = {name: one.state_dict() if _has_states(one) else one for name, one in state_dict.items()}
        if (path := metadata(kwargs, args, "storage_writer")) is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            kept.write(states, path)

    def load(state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        path = metadata(kwargs, args, "storage_reader")
        content = None if path is None else kept.content(path)
        if path is not None and content is not None:
            _merge(kept, state_dict, kept.made(content, str(path.parent), lambda _: "cpu"))
        elif path is not None and path.parent.exists():
            kept.session.warn("torch.distributed.checkpoint read nothing: weights keep their initial values")
        else:
            loads(state_dict, *args, **kwargs)

    def async_save(state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Future[None]:
        save(state_dict, *args, **kwargs)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    return {"save": save, "async_save": async_save, "load": load}


def _has_states(value: Any) -> bool:
    return hasattr(value, "load_state_dict") and hasattr(value, "state_dict")


def _merge(kept: _Kept, own: dict[str, Any], saved: Mapping[str, Any], prefix: str = "") -> None:
    """Give *own* what is *saved*, in place, as a distributed checkpoint is loaded.

    Raises:
        RuntimeError: something was not saved.
    """
    for name, value in own.items():
        if name not in saved:
            raise RuntimeError(f"Missing key in checkpoint state_dict: {prefix}{name}.")
        if hasattr(value, "untyped_storage"):
            # What was known of its numbers holds no more, and those that were saved are not known.
            kept.session.stated.forget([getattr(value, "_local_tensor", value)])
        elif _has_states(value):
            states = value.state_dict()
            _merge(kept, states, saved[name], f"{prefix}{name}.")
            value.load_state_dict(states)
        elif isinstance(value, dict) and isinstance(saved[name], Mapping):
            _merge(kept, value, saved[name], f"{prefix}{name}.")
        else:
            own[name] = saved[name]
