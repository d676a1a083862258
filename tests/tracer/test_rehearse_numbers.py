"""Numbers that a script makes by itself are what they are on a GPU; those of other ranks it is told."""

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis.strategies import integers, lists
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.data.numbers import MOST_ELEMENTS, Numbers
from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.tracer.rehearse.world.launchers import accelerate_flags, tell_accelerate
from foretrace.traces.rehearsal import read_rank, rehearsal_folder

torch = pytest.importorskip("torch")
fakes = pytest.importorskip("torch._subclasses.fake_tensor")

SCRIPT = Path(__file__).parent / "by_numbers.py"

CUT = """
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("nccl")
text = torch.tensor([letter % 7 for letter in range(300_000)])
starts = torch.arange(0, len(text) - 17)


def collated(places):
    return torch.stack([text[place : place + 16] for place in places])


model = torch.nn.Embedding(7, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(starts, batch_size=4, sampler=DistributedSampler(starts), collate_fn=collated)
for _, batch in zip(range(2), loader):
    print(tuple(batch.shape))
    model(batch.cuda()).sum().backward()
    optimizer.step()
"""


def test_numbers_of_the_script_decide_its_shapes(tmp_path: Path) -> None:
    """Rows are cut, masked, counted and exchanged as they would be; only what others sent is told."""
    asked = Asked(command=(str(SCRIPT),), world_size=16, ranks=(2,))
    found = rehearse(asked, tmp_path / "run")
    folder = rehearsal_folder(tmp_path / "run")
    first, second = (folder / "rank-00002" / "output.log").read_text().splitlines()[:2]
    assert (
        first
        == (
            "tokens (4, 64); kept 192; longest 7; counts [0, 2, 0, 0, 1]; distinct [5, 6, 7]; "
            "rows [0, 0, 2, 2, 2]; addresses 12; numpy [[0, 2, 4], [6, 8, 10]]"
        )
        or "kept 191" in first
    )  # a row may begin with the token that is taken for padding
    assert second == "filled [0, 2, 2, 0]; broadcast 9; chosen nan; written 9.0 nan"
    told = "; ".join(found.stated)
    assert "told 7 (as if other ranks had what this one has)" in told
    assert "told 9 (as if other ranks had what this one has)" in told
    assert len(found.stated) == 3
    names = {work["name"] for work in read_rank(folder, 2).works.to_pylist()}
    assert {"aten.bincount", "aten._unique2", "aten.repeat_interleave", "aten.index"} <= names


def elements(numbers: Numbers, tensor: Any) -> list[int]:
    """Return what is known of the elements of *tensor*."""
    found: list[int] = numbers.of(tensor).tolist()  # type: ignore[union-attr]
    return found


@given(values=lists(integers(-9, 9), min_size=1, max_size=8), added=integers(-9, 9))
def test_what_is_computed_of_numbers_is_what_torch_computes(values: list[int], added: int) -> None:
    """Out of place, through a view, and in place; a write of unknown numbers makes them unknown."""
    numbers, aten, mode = Numbers(), torch.ops.aten, fakes.FakeTensorMode()
    with mode:
        made, result, unknown = (torch.empty(len(values), dtype=torch.int64) for _ in range(3))
        last = made[len(values) - 1 :]
    numbers.keep(made, torch.tensor(values))
    numbers.follow("aten.add", aten.add.Tensor, (made, added), {}, result)
    assert elements(numbers, result) == [value + added for value in values]
    numbers.follow("aten.mul_", aten.mul_.Tensor, (last, 2), {}, last)
    assert elements(numbers, made) == [*values[:-1], 2 * values[-1]]
    numbers.follow("aten.add_", aten.add_.Tensor, (made, unknown), {}, made)
    assert numbers.of(made) is None
    assert elements(numbers, result) == [value + added for value in values]


def _long_range(*args: int) -> tuple[Numbers, Any]:
    """Return numbers that have followed ``torch.arange`` of *args*, and the fake tensor that it has made."""
    numbers, aten = Numbers(), torch.ops.aten
    with fakes.FakeTensorMode():
        made = torch.arange(*args)
    func = aten.arange.default if len(args) == 1 else aten.arange.start_step
    numbers.follow("aten.arange", func, args, {}, made)
    return numbers, made


@given(start=integers(-9, 9), step=integers(1, 5), first=integers(0, 99), count=integers(1, 4))
def test_parts_of_a_range_that_is_too_long_to_be_made_are_what_they_are(
    start: int, step: int, first: int, count: int
) -> None:
    """As the places of a text from which batches begin; none is known once one has been written into."""
    args = (start, start + step * (MOST_ELEMENTS + 100), step)
    numbers, made = _long_range(*args)
    real = torch.arange(*args)
    parts = (slice(first, first + count), slice(first, None, MOST_ELEMENTS // count), slice(-count, None))
    for part in parts:
        assert elements(numbers, made[part]) == real[part].tolist()
    assert elements(numbers, made[first]) == real[first].item()
    assert numbers.of(made) is None  # all of them are too many
    added = made[first].clone()
    numbers.follow("aten.add", torch.ops.aten.add.Tensor, (made[first], count), {}, added)
    assert elements(numbers, added) == real[first].item() + count
    numbers.follow("aten.add_", torch.ops.aten.add_.Tensor, (made[:1], 1), {}, made[:1])
    assert numbers.of(made[first]) is None


@given(start=integers(-9, 9), step=integers(1, 5), chosen=lists(integers(-99, 99), min_size=1, max_size=5))
def test_places_that_are_picked_out_of_a_long_range_are_what_they_are(
    start: int, step: int, chosen: list[int]
) -> None:
    """As a sampler's batch of a dataset that is a range; what is not among its places is unknown."""
    args = (start, start + step * (MOST_ELEMENTS + 100), step)
    numbers, made = _long_range(*args)
    pick, real = torch.ops.aten.index.Tensor, torch.arange(*args)
    for whole, row in ((made, real), (made[7::2], real[7::2])):
        with fakes.FakeTensorMode():
            result, beyond = torch.empty(len(chosen), dtype=torch.int64), torch.empty(1, dtype=torch.int64)
        numbers.follow("aten.index", pick, (whole, [torch.tensor(chosen)]), {}, result)
        assert elements(numbers, result) == row[chosen].tolist()
        numbers.follow("aten.index", pick, (whole, [torch.tensor([len(row)])]), {}, beyond)
        assert numbers.of(beyond) is None


def test_batches_that_are_cut_at_places_of_a_long_text_have_their_rows(tmp_path: Path) -> None:
    """A dataset that is the range of its places, sampled and cut: rows are as long as the script says."""
    script = tmp_path / "train.py"
    script.write_text(CUT)
    rehearse(Asked(command=(str(script),), world_size=2, ranks=(0,)), tmp_path / "run")
    log = rehearsal_folder(tmp_path / "run") / "rank-00000" / "output.log"
    assert log.read_text().split() == ["(4,", "16)"] * 2


@pytest.mark.parametrize("name", ["linspace", "logspace"])
@given(first=integers(-4, 4), last=integers(-4, 4), count=integers(1, 9))
def test_fractions_of_a_range_are_what_torch_makes_of_them(
    name: str, first: int, last: int, count: int
) -> None:
    """Models read rates of their layers out of them one by one: a rate of 1.0 drops everything."""
    operator, numbers = getattr(torch.ops.aten, name).default, Numbers()
    with fakes.FakeTensorMode():
        made = operator(first, last, count)
    numbers.follow(f"aten.{name}", operator, (first, last, count), {}, made)
    assert torch.equal(numbers.of(made), operator(first, last, count))


@pytest.mark.parametrize("name", ["bitwise_or", "logical_or", "bitwise_or_", "bitwise_and", "logical_and_"])
@pytest.mark.parametrize("first", [True, False])
def test_a_truth_that_decides_alone_is_known_whatever_the_other_is(name: str, first: bool) -> None:
    """True or anything is true, false and anything is false; the other way round nobody knows."""
    aten, decides = torch.ops.aten, "or" in name
    for value in (True, False):
        numbers = Numbers()
        with fakes.FakeTensorMode():
            known, unknown = torch.empty(3, dtype=torch.bool), torch.empty(3, dtype=torch.bool)
            made = (known if first else unknown) if name.endswith("_") else torch.empty(3, dtype=torch.bool)
        numbers.keep(known, torch.full((3,), value))
        operands = (known, unknown) if first else (unknown, known)
        func = next(iter(getattr(aten, name).overloads()))
        numbers.follow(f"aten.{name}", getattr(getattr(aten, name), func), operands, {}, made)
        assert (numbers.of(made) is not None) == (value == decides)
        assert value != decides or elements(numbers, made) == [decides] * 3


@pytest.mark.parametrize("known_is", ["truths", "numbers"])
def test_zero_and_any_number_is_zero_and_a_truth_does_not_decide_an_or_of_numbers(known_is: str) -> None:
    """Who counts sentences that are not done in whole numbers stops with the last token: 5 & false is 0."""
    aten, dtypes = torch.ops.aten, [torch.bool, torch.int64]
    for name, is_known in (("bitwise_and", True), ("bitwise_or", False)):
        numbers = Numbers()
        with fakes.FakeTensorMode():
            known, unknown = (
                torch.empty(3, dtype=dtype)
                for dtype in (dtypes if known_is == "truths" else reversed(dtypes))
            )
            made = torch.empty(3, dtype=torch.int64)
        numbers.keep(known, torch.full((3,), int(name == "bitwise_or"), dtype=known.dtype))
        numbers.follow(f"aten.{name}", getattr(aten, name).Tensor, (unknown, known), {}, made)
        assert (numbers.of(made) is not None) == is_known
        assert not is_known or elements(numbers, made) == [0] * 3


def test_numbers_go_with_their_tensor_and_large_ones_are_left_out() -> None:
    numbers = Numbers()
    with fakes.FakeTensorMode():
        small, large = torch.empty(2, dtype=torch.int64), torch.empty(MOST_ELEMENTS + 1, dtype=torch.int64)
    numbers.keep(small, torch.tensor([1, 2]))
    numbers.keep(large, torch.zeros(MOST_ELEMENTS + 1, dtype=torch.int64))
    assert numbers.of(large) is None
    assert len(numbers) == 1
    del small
    assert len(numbers) == 0


def test_what_accelerates_launcher_is_told_reaches_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A configuration file decides how a model is sharded; one that is not there is an error of one line."""
    pytest.importorskip("accelerate")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    config = tmp_path / "fsdp.yaml"
    config.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: bf16\n"
        "num_machines: 1\nnum_processes: 8\nfsdp_config:\n  fsdp_version: 2\n"
        "  fsdp_transformer_layer_cls_to_wrap: Block\n"
    )
    tell_accelerate(("--config_file", str(config)), 64)
    assert os.environ["ACCELERATE_USE_FSDP"] == "true"
    assert os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] == "Block"
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == "bf16"
    with pytest.raises(RehearsalError, match=re.escape("accelerate launch --config_file gone.yaml")):
        tell_accelerate(("--config_file", "gone.yaml"), 64)


def test_without_accelerate_its_launcher_is_an_error_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its flags are not passed over: what it would tell the script is not known then."""
    for name in ("accelerate", *(one for one in sys.modules if one.startswith("accelerate."))):
        monkeypatch.setitem(sys.modules, name, None)
    command = ["accelerate", "launch", "--config_file", "fsdp.yaml", "train.py"]
    flags = accelerate_flags(command)
    assert flags == ("--config_file", "fsdp.yaml")
    with pytest.raises(RehearsalError, match="install accelerate where foretrace is"):
        tell_accelerate(flags, 64)
