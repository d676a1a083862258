"""Whether two tensors are equal is said where it follows; what is written to a part of known numbers, too."""

import sys
from pathlib import Path
from typing import Any

import pytest
from tests.processes import Runner

from foretrace.tracer.rehearse.data.numbers import Numbers
from foretrace.tracer.rehearse.rehearsing import Asked, rehearse
from foretrace.tracer.rehearse.world.acting import Loaded
from foretrace.traces.rehearsal import rehearsal_folder

torch = pytest.importorskip("torch")
fakes = pytest.importorskip("torch._subclasses.fake_tensor")

SCRIPT = Path(__file__).parent / "equality.py"


def test_equality_is_that_of_a_real_run(tmp_path: Path, loaded: Loaded, ranks: type[Runner]) -> None:
    """Of other shapes, of the same elements, of known numbers, of what ranks told each other; of windows.

    What torch reads from memory is answered, too.
    """
    real = ranks.run([sys.executable, str(SCRIPT), "cpu"], ranks.env())
    asked = Asked(command=(str(SCRIPT), "cuda"), world_size=2, ranks=(0,), warmup=0, steps=2)
    rehearse(asked, tmp_path / "run", on=loaded)
    said = (rehearsal_folder(tmp_path / "run") / "rank-00000" / "output.log").read_text()
    assert real.status == (0, 0), real.errors
    assert len(said.splitlines()) == 2 * 10
    assert real.output == said * 2


@pytest.mark.parametrize("name", ["bitwise_or_", "logical_or_", "bitwise_and_", "logical_and_"])
def test_a_truth_that_decides_alone_is_written_to_a_part_of_known_ones(name: str) -> None:
    """What is beside the part stays known, whether the other operand is known or not."""
    decided, numbers = "or" in name, Numbers()
    with fakes.FakeTensorMode():
        whole, unknown = torch.empty(3, dtype=torch.bool), torch.empty((), dtype=torch.bool)
        truth, part = torch.empty((), dtype=torch.bool), whole[1]
    numbers.keep(whole, torch.full((3,), not decided))
    numbers.keep(truth, torch.tensor(decided))
    packet = getattr(torch.ops.aten, name)
    func: Any = getattr(packet, packet.overloads()[0])
    numbers.follow(f"aten.{name}", func, (part, truth), {}, part)
    expected = torch.tensor([not decided, decided, not decided])
    assert torch.equal(numbers.of(whole), expected)
    numbers.follow(f"aten.{name}", func, (part, unknown), {}, part)
    assert torch.equal(numbers.of(whole), expected)
    numbers.follow(f"aten.{name}", func, (whole[0], unknown), {}, whole[0])
    assert numbers.of(whole) is None


@pytest.mark.parametrize("name", ["bartlett", "blackman", "hamming", "hann", "kaiser"])
@pytest.mark.parametrize("call", [(8,), (8, False), (8, True)])
def test_a_window_is_what_torch_makes_of_it(name: str, call: tuple[Any, ...]) -> None:
    """A periodic one is a part of a longer one, whose last element nobody sees."""
    packet, numbers = getattr(torch.ops.aten, f"{name}_window"), Numbers()
    func = packet.default if len(call) == 1 else packet.periodic
    with fakes.FakeTensorMode():
        made = func(*call)
    numbers.follow(f"aten.{name}_window", func, call, {}, made)
    assert torch.equal(numbers.of(made), getattr(torch, f"{name}_window")(*call))
