"""Masks that are constants, whatever their type, are what they are in a real run; random ones are likely."""

import sys
from pathlib import Path
from typing import Any

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.data.experts import Known
from foretrace.tracer.rehearse.data.numbers import MOST_ELEMENTS, Numbers
from foretrace.tracer.rehearse.data.stated import Stated
from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.tracer.rehearse.tape.calls import storage_key
from foretrace.tracer.rehearse.tape.watch import following
from foretrace.traces.rehearsal import rehearsal_folder

torch = pytest.importorskip("torch")
fakes = pytest.importorskip("torch._subclasses.fake_tensor")

SCRIPT = Path(__file__).parent / "constants.py"
OF_ACTIVATIONS = "of activations: "


def test_what_is_asked_of_constants_is_answered_as_in_a_real_run(tmp_path: Path, ranks: Any) -> None:
    """All, any, sums, and comparisons with bounds that decide; what activations were written to is not."""
    real = ranks.run([sys.executable, str(SCRIPT), "cpu"], ranks.env(), 1)
    assert real.status == (0,), real.errors
    asked = Asked(command=(str(SCRIPT),), world_size=1, ranks=(0,), warmup=0, steps=2)
    rehearse(asked, tmp_path / "run")
    said = (rehearsal_folder(tmp_path / "run") / "rank-00000" / "output.log").read_text().splitlines()
    expected = real.output.splitlines()
    assert len(expected) == 2 * (4 * 12 + 3 + 1)
    for one, other in zip(said, expected, strict=True):
        assert one == (f"{OF_ACTIVATIONS}nan" if one.startswith(OF_ACTIVATIONS) else other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("name", ["zeros", "ones", "full_like", "new_full", "fill_", "zero_"])
def test_a_constant_is_what_torch_makes_of_its_operator(name: str, dtype: Any) -> None:
    """Whatever its strides, as long as it has all of its storage; a part of one is left as it was."""
    args = {"zeros": ([3, 2],), "ones": ([3, 2],), "full_like": (5,), "new_full": ([3, 2], 5), "fill_": (5,)}
    numbers, packet, call = Numbers(), getattr(torch.ops.aten, name), args.get(name, ())
    is_in_place, takes_tensor = name.endswith("_"), name not in {"zeros", "ones"}
    with fakes.FakeTensorMode():
        made = torch.empty(3, 2, dtype=dtype)
        made, part = made.t() if is_in_place else made, torch.empty(6, dtype=dtype)[:2]
    numbers.follow(f"aten.{name}", packet, (made, *call) if takes_tensor else call, {}, made)
    empty = torch.empty(made.shape, dtype=dtype)
    expected = packet(empty, *call) if takes_tensor else packet(*call, dtype=dtype)
    assert torch.equal(numbers.of(made), expected)
    if is_in_place:
        overload = {"fill_": torch.ops.aten.fill_.Scalar, "zero_": torch.ops.aten.zero_.default}[name]
        numbers.follow(f"aten.{name}", overload, (part, *call), {}, part)
        assert numbers.of(part) is None


def test_what_is_written_over_leaves_no_mean_and_no_numbers() -> None:
    """Of a storage that an unknown operator writes to nothing is known any more."""
    stated = Stated()
    with fakes.FakeTensorMode():
        ones, copied = torch.ones(4), torch.empty(4)
    stated.numbers.follow("aten.ones", torch.ops.aten.ones.default, ([4],), {}, ones)
    stated.note("aten.clone", (ones,), copied)
    assert stated.of(copied).mean == 1.0
    stated.forget([ones, copied])
    assert stated.of(copied).mean is None
    assert stated.of(ones).mean is None
    assert storage_key(ones) != storage_key(copied)


def test_large_constants_are_left_out() -> None:
    numbers = Numbers()
    with fakes.FakeTensorMode():
        large = torch.empty(MOST_ELEMENTS + 1)
    numbers.follow("aten.zeros", torch.ops.aten.zeros.default, ([MOST_ELEMENTS + 1],), {}, large)
    assert numbers.of(large) is None


def _elements(stated: Stated, tensor: Any) -> list[int]:
    """Return what is known of the elements of *tensor*."""
    found: list[int] = stated.numbers.of(tensor).tolist()  # type: ignore[union-attr]
    return found


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("index_add_", lambda data, places, rows: ((data, 0, places, rows), {})),
        ("index_copy_", lambda data, places, rows: ((data, 0, places, rows), {})),
        ("index_fill_.int_Tensor", lambda data, places, rows: ((data, 0, places, rows[0, 0]), {})),
        ("put_", lambda data, places, rows: ((data, places, rows[0, :2]), {})),
        ("_foreach_addcmul_.Scalar", lambda data, places, rows: (([data], [places], [rows]), {})),
        ("index_select.out", lambda data, places, rows: ((rows, 0, places), {"out": data})),
        ("multinomial.out", lambda data, places, rows: ((rows, 3), {"out": data})),
    ],
)
def test_what_an_operator_only_reads_stays_known(name: str, call: Any) -> None:
    """Of the operands of one that writes, those that it is told where, and of which it takes what it adds.

    A table of how often each word was seen is counted up at the words of a batch, which is then sorted: told
    were ones, or no size at all.
    """
    stated = Stated()
    with fakes.FakeTensorMode():
        data, rows, places = torch.empty(4, 3), torch.empty(2, 3), torch.empty(2, dtype=torch.int64)
    stated.numbers.keep(data, torch.zeros(4, 3))
    stated.numbers.keep(places, torch.tensor([0, 2]))
    base, _, overload = name.partition(".")
    func = getattr(getattr(torch.ops.aten, base), overload or "default")
    handler = following(stated, f"aten.{base}", func, lambda func, args, kwargs: data)
    handler(func, *call(data, places, rows))
    assert stated.numbers.of(data) is None
    assert _elements(stated, places) == [0, 2]


@pytest.mark.parametrize("is_named", [True, False])
def test_a_mean_is_lost_where_numbers_are_written_and_nowhere_else(is_named: bool) -> None:
    """``torch.add(counts, 1, out=other)`` writes to *other*, ``counts.add_(1)`` to *counts*."""
    stated = Stated()
    with fakes.FakeTensorMode():
        counts, other = torch.empty(4), torch.empty(4)
    for one in (counts, other):
        stated._set(one, Known(mean=8.0))
    func = torch.ops.aten.add.out if is_named else torch.ops.aten.add_.Tensor
    name, kwargs = ("aten.add", {"out": other}) if is_named else ("aten.add_", {})
    written, read = (other, counts) if is_named else (counts, other)
    following(stated, name, func, lambda func, args, kwargs: written)(func, (counts, 1), kwargs)
    assert stated.of(written).mean is None
    assert stated.of(read).mean == 8.0


def test_ranks_hear_what_they_send_to_each_other() -> None:
    """Of an exchange that all begin with the same numbers, the second of two hears its part from each."""
    stated = Stated()
    with fakes.FakeTensorMode():
        counts, heard, words, sent = (torch.empty(n, dtype=torch.int64) for n in (2, 2, 47, 10))
    stated.numbers.keep(counts, torch.tensor([42, 5]))
    stated.numbers.keep(words, torch.arange(47))
    assert stated.deal(counts, [heard], rank=3, ranks=(1, 3), sizes=None)
    assert _elements(stated, heard) == [5, 5]
    assert stated.deal(words, [sent], rank=3, ranks=(1, 3), sizes=[42, 5])
    assert _elements(stated, sent) == [*range(42, 47)] * 2
    with fakes.FakeTensorMode():
        unknown = torch.empty(2, dtype=torch.int64)
    assert not stated.deal(unknown, [heard], rank=3, ranks=(1, 3), sizes=None)


@pytest.mark.parametrize("count", [100, MOST_ELEMENTS + 1])
def test_one_element_that_is_written_says_nothing_of_the_others(count: int) -> None:
    """Of numbers that nobody has; what is written to all of a storage is known of all of it."""
    stated, copy = Stated(), torch.ops.aten.copy_.default
    handler = following(stated, "aten.copy_", copy, lambda func, args, kwargs: args[0])

    def write(into: Any) -> None:
        stated.note("aten.copy_", (into, three), handler(copy, (into, three), {}))

    with fakes.FakeTensorMode():
        into, three = torch.empty(count), torch.empty(())
    stated.numbers.keep(three, torch.tensor(3.0))
    write(into[5])
    assert stated.of(into).mean is None
    write(into)
    assert stated.of(into).mean == 3.0
    write(into[5:7])
    assert stated.of(into).mean == (3.0 if count <= MOST_ELEMENTS else None)
