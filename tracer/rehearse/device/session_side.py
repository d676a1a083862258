"""The host and the device of a rehearsal: which storages are on which, and what is copied between them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from foretrace.tracer.operators import dtype_name, tensor_bytes
from foretrace.tracer.rehearse.device import installing
from foretrace.tracer.rehearse.device.driver import HOST as PINNED_HOST
from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.events.tape import HOST_WAIT, WAIT_MARK
from foretrace.tracer.rehearse.gpu.memory import Memory
from foretrace.tracer.rehearse.operators.calls import tensors_in
from foretrace.tracer.rehearse.operators.work import Work
from foretrace.traces.rehearsal import ON_HOST, TO_DEVICE, TO_HOST

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.session import RehearsalSession

COPYING: Final = frozenset({"aten.copy_", "aten._foreach_copy_"})
MADE = "rehearsed_made"
INPUT: Final = "input"
STAGED_BYTES: Final = 64 * 2**10

_DEVICE: list[Any] = []
_ANSWER: list[Any] = [installing.nothing_is_known]


def start() -> Any:
    found = installing.install(8, lambda question: _ANSWER[0](question))
    _DEVICE.append(found)
    return found.mode


def attend(session: RehearsalSession) -> None:
    device = _DEVICE[0]
    import torch

    torch.autograd.set_multithreading_enabled(False)
    session.placement.driver = device.driver
    session.tape.drain = Drain(session, device.driver).drain
    device.driver.take()


class Drain:
    def __init__(self, session: Any, driver: Any) -> None:
        self._session, self._driver = session, driver
        self._marks: dict[int, int] = {}

    def drain(self) -> None:
        tape = self._session.tape
        for entry in self._driver.take():
            kind = entry.kind
            if kind == "record":
                self._marks[entry.number] = tape.mark(entry.stream)
            elif kind == "wait":
                mark = self._marks.get(entry.number, -1)
                if mark >= 0:
                    tape.note(WAIT_MARK, mark, stream=entry.stream)
            elif kind == "switch":
                tape.switch(entry.stream)
            elif kind.startswith("synchronize"):
                tape.note(HOST_WAIT)


class _Doing(threading.local):
    is_loading = False
    direction = ""
    makes = ""


class Host:
    def __init__(self, session: RehearsalSession) -> None:
        import torch

        self._session, self._parameter = session, torch.nn.Parameter
        self._real = {torch.Tensor, torch.nn.Parameter}
        self.memory = Memory(lambda n_bytes: None, block_bytes=1)
        session.memory.host = self.memory
        self.doing = _Doing()

    @property
    def is_used(self) -> bool:
        return self._session.placement.is_met

    def holds(self, tensor: Any) -> bool:
        own = getattr(tensor, "_local_tensor", tensor)
        if type(own) in self._real:
            return own.device.type == "cpu" and self._session.placement.is_met
        return own.fake_device.type == "cpu" and self._session.placement.is_met

    def settle(self, tensor: Any, *, to_host: bool = True) -> Any:
        return tensor

    def take(self, storage: Any, *, to_host: bool = True) -> None:
        pass

    def faked(self, tensor: Any) -> Any:
        mode = _DEVICE[0].mode
        if hasattr(tensor, "fake_mode"):
            return tensor
        found = mode.fake_tensor_converter.from_real_tensor(mode, tensor, make_constant=mode.may_turn_const(tensor))
        self.count(found, "activations", ON_HOST)
        self._session.stated.numbers.keep(found, tensor)
        return found

    def pin(self, tensor: Any) -> Any:
        own = getattr(tensor, "_local_tensor", tensor)
        _DEVICE[0].driver.place(own.untyped_storage(), PINNED_HOST)
        return tensor

    @contextmanager
    def making(self, where: str) -> Iterator[None]:
        yield

    @contextmanager
    def meant(self, *, is_meant: bool = True) -> Iterator[None]:
        yield

    def part(self, name: str, operands: Sequence[Any], out: Any) -> str:
        if name in COPYING:
            written, read = (self._holds_first(value) for value in operands[:2])
            return (TO_HOST if written else TO_DEVICE) if written != read else ON_HOST if read else ""
        made = tensors_in(out)
        here = any(map(self.holds, made))
        if name == "aten._to_copy" and made and (there := self._holds_first(operands[0])) != here:
            return TO_HOST if here else TO_DEVICE
        if made:
            return ON_HOST if here else ""
        tensors = tensors_in(operands)
        return ON_HOST if tensors and all(map(self.holds, tensors)) else ""

    def _holds_first(self, values: Any) -> bool:
        return any(map(self.holds, tensors_in(values)[:1]))

    def count(self, out: Any, category: str, part: str, operands: Sequence[Any] = ()) -> None:
        for tensor in tensors_in(out):
            if type(tensor) in self._real:
                continue
            storage = tensor.untyped_storage()
            memory = self.memory if tensor.fake_device.type == "cpu" and self._session.placement.is_met else self._session.memory
            if memory.add(storage, category) and part == ON_HOST and all(is_made(one) for one in tensors_in(operands)):
                setattr(storage, MADE, True)

    def work(self, part: str, found: Work, operands: Sequence[Any]) -> Work:
        if part == ON_HOST:
            return found._replace(kind=ON_HOST, kernels=0)
        read = tensors_in(operands[1]) if found.name in COPYING else tensors_in(operands)[:1]
        size = sum(map(tensor_bytes, read))
        is_input = part == TO_DEVICE and all(is_made(one) for one in read)
        return Work(f"{INPUT if is_input else 'host'}.{part}", part, found.shapes, dtype_name(read[0]), 0, size)

    def waited(self, part: str, name: str, operands: Sequence[Any], *, non_blocking: bool) -> None:
        if part == ON_HOST:
            return
        is_write, is_up = name in COPYING, part == TO_DEVICE
        here = tensors_in(operands[1] if is_write and is_up else operands[:1])
        driver = _DEVICE[0].driver
        is_free = all(type(one) not in self._real and driver.is_pinned(one.untyped_storage()) for one in here)
        is_free |= sum(map(tensor_bytes, here)) <= STAGED_BYTES if is_up else not is_write
        if not (non_blocking and is_free):
            self._session.tape.note(HOST_WAIT)


def is_made(tensor: Any) -> bool:
    return MADE in vars(tensor.untyped_storage()) or not hasattr(tensor, "fake_mode")


class Placement:
    def __init__(self, session: RehearsalSession) -> None:
        import torch
        from foretrace.tracer.rehearse.gpu.askers import Askers

        self._session = session
        self.device = torch.device("cuda", int(__import__("os").environ.get("LOCAL_RANK", 0)))
        self.there = torch.device("cpu")
        self.asker = Askers()
        self.is_used = self._is_met = self.is_denied = self.is_shared = False
        self.chosen_gpu = 0
        session.note_job(device="cpu")

    @property
    def is_met(self) -> bool:
        return self._is_met

    @is_met.setter
    def is_met(self, is_met: bool) -> None:
        if is_met and self.is_denied:
            raise RehearsalError("requests a GPU, but --without-gpu says that there is none")
        if is_met and not self._is_met:
            self._session.job.pop("device", None)
            memory, host = self._session.memory, self._session.host.memory
            for number, found in list(memory._numbers.values()):
                storage = found()
                if storage is not None:
                    host.add_from(storage, memory)
            memory.begin_device()
        self._is_met = is_met

    def use_default(self) -> None: pass
    def keep(self, tensor: Any) -> None: pass
    def leave(self, tensor: Any) -> None: pass
    def put(self, tensor: Any, *, is_said: bool = True) -> None: pass
    def put_left(self, tensors: Any, *, is_said: bool = True) -> None: pass
    def is_left(self, tensor: Any) -> bool: return False
    def follow(self, made: Any, operands: Any) -> None: pass

    def holds(self, tensor: Any) -> bool:
        own = getattr(tensor, "_local_tensor", tensor)
        return getattr(own, "fake_device", own.device).type == "cuda"
