"""What is known of numbers follows them through views, copies, writes and collectives, and no further."""

from contextlib import nullcontext
from typing import Any

import pytest

from foretrace.tracer.rehearse.data.experts import EXCHANGE, Known, share
from foretrace.tracer.rehearse.data.numbers import MOST_ELEMENTS, Numbers
from foretrace.tracer.rehearse.data.stated import Stated
from foretrace.tracer.rehearse.errors import UnroutedError
from foretrace.tracer.rehearse.tape.watch import following

torch = pytest.importorskip("torch")
fakes = pytest.importorskip("torch._subclasses.fake_tensor")

aten, LONG = torch.ops.aten, torch.int64


def fake(*shape: int, dtype: Any = LONG) -> Any:
    """Return a tensor of which nothing is known."""
    with fakes.FakeTensorMode():
        return torch.empty(shape, dtype=dtype)


def kept(numbers: Numbers, *values: int, is_shared: bool = False) -> Any:
    """Return a tensor whose elements are known."""
    made = fake(len(values))
    numbers.keep(made, torch.tensor(values), is_shared=is_shared)
    return made


def elements(numbers: Numbers, tensor: Any) -> Any:
    """Return what is known of the elements of *tensor*, None if that is nothing."""
    found = numbers.of(tensor)
    return None if found is None else found.tolist()


def test_bits_that_are_read_as_another_type_are_those_of_the_numbers() -> None:
    """As the state of a generator, of which ranks make a seed."""
    numbers = Numbers()
    made = kept(numbers, 1, 2)
    assert elements(numbers, made.view(torch.int32)) == torch.tensor([1, 2]).view(torch.int32).tolist()
    seven = fake(7, dtype=torch.uint8)
    numbers.keep(seven, torch.zeros(7, dtype=torch.uint8))
    assert elements(numbers, seven[:4].view(torch.int32)) is None
    assert elements(numbers, made.view(2, 1)) == [[1], [2]]


def test_a_view_of_a_real_tensor_has_its_numbers_and_a_large_one_those_of_its_parts() -> None:
    """As of pictures in a file: nobody reads all of them at once, and what is written into is unknown."""
    for n in (3, MOST_ELEMENTS + 1):
        numbers, real = Numbers(), torch.arange(n)
        with fakes.FakeTensorMode(allow_non_fake_inputs=True) as mode:
            view = mode.from_tensor(real)
        numbers.adopt(view, real)
        assert elements(numbers, view) == (list(range(n)) if n == 3 else None)
        with mode:
            part = view[1:3]
        assert elements(numbers, part) == [1, 2]
        numbers.follow("aten.mul_", aten.mul_.Tensor, (view, 2), {}, view)
        assert elements(numbers, part) == ([2, 4] if n == 3 else None)
        assert real[1] == 1


def test_a_copy_over_all_is_known_and_one_over_a_part_changes_that_part() -> None:
    numbers = Numbers()
    source, whole, unknown = kept(numbers, 7), kept(numbers, 1, 2, 3), fake(1)
    for target in (whole[2:], unknown):
        numbers.follow("aten.copy_", aten.copy_.default, (target, source), {}, target)
    assert elements(numbers, whole) == [1, 2, 7]
    assert elements(numbers, unknown) == [7]


def test_what_is_filled_and_then_changed_in_place_is_both() -> None:
    numbers, made = Numbers(), fake(2)
    numbers.follow("aten.fill_", aten.fill_.Scalar, (made, 3), {}, made)
    numbers.follow("aten.add_", aten.add_.Tensor, (made, 1), {}, made)
    assert elements(numbers, made) == [4, 4]


def test_what_is_written_into_by_name_is_not_what_it_was() -> None:
    """``torch.add(x, 1, out=made)``, of which nothing or all is known."""
    numbers = Numbers()
    made, x = kept(numbers, 1, 2), kept(numbers, 5, 6)
    numbers.follow("aten.add", aten.add.out, (x, 1), {"out": made}, made)
    assert elements(numbers, made) == [6, 7]
    numbers.follow("aten.add", aten.add.out, (fake(2), 1), {"out": made}, made)
    assert elements(numbers, made) is None


def test_a_truth_that_decides_of_a_part_says_nothing_wrong_of_the_whole() -> None:
    numbers, made, ones = Numbers(), fake(4, dtype=torch.bool), fake(2, dtype=torch.bool)
    numbers.keep(made, torch.zeros(4, dtype=torch.bool))
    numbers.keep(ones, torch.ones(2, dtype=torch.bool))
    part = made[:2]
    numbers.follow("aten.logical_or_", aten.logical_or_.default, (part, ones), {}, part)
    assert elements(numbers, made) in (None, [True, True, False, False])


def test_places_that_are_not_there_and_large_operands_leave_the_result_unknown() -> None:
    """What other ranks are taken to have need not fit."""
    numbers = Numbers()
    rows, places = kept(numbers, 1, 2), kept(numbers, 9)
    assert numbers.computed(aten.index_select.default, (rows, 0, places), {}) is None
    large = torch.zeros(MOST_ELEMENTS + 1, dtype=LONG)
    assert numbers.computed(aten.add.Tensor, (large, 1), {}) is None


@pytest.mark.parametrize(
    ("kind", "factor", "shape", "dtype", "expected"),
    [
        ("all_reduce", 4.0, 2, LONG, [4, 8]),
        ("all_gather", 1.0, 4, LONG, [1, 2, 1, 2]),
        ("all_gather", 1.0, 3, LONG, None),
        ("all_to_all", 1.0, 4, LONG, None),
        ("all_reduce", 1.0, 2, torch.float64, None),
        ("reduce_scatter", None, 2, LONG, None),
    ],
)
def test_others_are_taken_to_have_sent_what_this_rank_has(
    kind: str, factor: float | None, shape: int, dtype: Any, expected: list[int] | None
) -> None:
    """Where sizes and types allow it; what comes of it in place or out of it is theirs, too."""
    numbers, out, after = Numbers(), fake(shape, dtype=dtype), fake(shape, dtype=dtype)
    source = kept(numbers, 1, 2)
    assert numbers.exchange(kind, source, [out], factor) == (expected is not None)
    assert elements(numbers, out) == expected
    if expected is not None:
        own = kept(numbers, *expected)
        numbers.follow("aten.add", aten.add.Tensor, (out, 1), {}, after)
        numbers.follow("aten.add_", aten.add_.Tensor, (own, out), {}, own)
        assert [numbers.is_shared(one) for one in (source, out, after, own)] == [False, True, True, True]


def test_parts_of_a_storage_are_filled_if_they_are_all_of_it() -> None:
    numbers, real = Numbers(), torch.tensor([5, 6])
    for n, n_parts, expected in ((4, 2, [5, 6, 5, 6]), (6, 2, None)):
        whole = fake(n)
        assert numbers.fill(whole.view(-1, 2)[:n_parts].unbind(), real) == (expected is not None)
        assert elements(numbers, whole) == expected
    assert not numbers.fill([fake(2, dtype=torch.float64)], real)
    assert not numbers.fill([fake(3)], real)


def noted(stated: Stated, name: str, *args: Any, out: Any) -> Any:
    """Follow an operator; return what it has made."""
    stated.note(f"aten.{name}", args, out)
    return out


def counted(stated: Stated, mean: int, n: int = 4) -> Any:
    """Return counts of choices, of a known mean."""
    return noted(stated, "bincount", chosen(stated, mean * n, n), out=fake(n))


def chosen(stated: Stated, n: int, n_values: int) -> Any:
    """Return *n* choices among as many as *n_values*."""
    choices = fake(n)
    stated._set(choices, Known(n_values=n_values))
    return choices


def test_counts_compared_with_a_bound_say_nothing() -> None:
    stated = Stated()
    found = noted(stated, "lt", counted(stated, 8), 9, out=fake(4, dtype=torch.bool))
    assert stated.of(found).mean is None


def test_a_copy_into_counts_has_the_mean_of_what_is_copied() -> None:
    stated = Stated()
    eight, two = counted(stated, 8), counted(stated, 2)
    assert stated.of(noted(stated, "copy_", eight, two, out=eight)).mean == 2


def test_a_mean_is_summed_and_copied_by_collectives() -> None:
    stated, (summed, sent) = Stated(), (fake(4), fake(4))
    stated.exchange("all_reduce", counted(stated, 8), [summed], 4.0)
    stated.exchange("broadcast", counted(stated, 8), [sent], None)
    assert (stated.of(summed).mean, stated.of(sent).mean) == (32, 8)


def test_what_a_collective_has_written_to_is_no_constant_any_more() -> None:
    stated = Stated()
    with fakes.FakeTensorMode():
        out = torch.tensor(1)
    stated.exchange("all_reduce", fake(1), [out], 4.0)
    assert stated.of(out).mean is None


def test_nothing_is_the_mean_of_no_elements() -> None:
    stated, empty = Stated(), fake(0)
    stated.numbers.keep(empty, torch.empty(0, dtype=LONG))
    assert stated.of(empty).mean is None


def test_what_was_received_is_not_more_when_it_is_sent_on() -> None:
    """Of the fullest rank: it gets half as much again, once."""
    stated, (received, back) = Stated(1.5), (fake(4), fake(4))
    stated.note(EXCHANGE, (counted(stated, 8),), received)
    stated.note(EXCHANGE, (received,), back)
    assert [stated.of(one).mean for one in (received, back)] == [12, 12]


def test_counts_of_one_mean_that_are_put_together_are_dealt_out_as_one() -> None:
    stated = Stated()
    parts = [noted(stated, "bincount", chosen(stated, 5, 2), out=fake(2)) for _ in range(3)]
    whole = noted(stated, "cat", parts, out=fake(6))
    assert [stated.scalar(whole[at]) for at in range(6)] == [share(2.5, at) for at in range(6)]


def test_counts_of_two_means_are_not_known_one_by_one_in_another_order() -> None:
    stated = Stated(1.5)
    sent, received = counted(stated, 8), fake(4)
    stated.note(EXCHANGE, (sent,), received)
    both = noted(stated, "stack", [sent, received], out=fake(2, 4))
    stated.scalar(both[0, 0])
    assert any("1.5 times even shares" in told for told in stated.told)
    turned = noted(stated, "permute", both, [1, 0], out=fake(4, 2))
    assert stated.of(turned).mean is None


def test_choices_are_equal_to_one_place_as_often_as_there_are_places() -> None:
    """And ones that are put where choices are add up to the choices."""
    stated, scores = Stated(), fake(16, 8, dtype=torch.float32)
    places = fake(16, 2)
    stated.note("aten.topk", (scores, 2), (fake(16, 2, dtype=torch.float32), places))
    assert stated.of(noted(stated, "eq", places, 3, out=fake(16, 2, dtype=torch.bool))).mean == 1 / 8
    zeros, most = fake(16, 8), fake(1 << 20, 8)
    stated.numbers.keep(zeros, torch.zeros(16, 8, dtype=torch.int64))
    spread = noted(stated, "scatter", zeros, 1, places, 1, out=fake(16, 8))
    assert stated.sum_of(spread) == 16 * 2
    assert stated.sum_of(noted(stated, "scatter", fake(16, 8), 1, places, 1, out=fake(16, 8))) is None
    stated.numbers.follow("aten.zeros", None, (most.shape,), {}, most)
    many = fake(1 << 20, 2)
    assert stated.sum_of(noted(stated, "scatter", most, 1, many, 1, out=fake(1 << 20, 8))) == many.numel()
    stated.numbers.follow("aten.add_", torch.ops.aten.add_.Tensor, (most, most), {}, most)
    assert stated.of(most).mean is None


@pytest.mark.parametrize(
    ("dtype", "dim", "is_choice"), [(torch.float32, -1, True), (torch.float32, 0, False), (LONG, -1, False)]
)
def test_experts_are_chosen_by_scores_along_the_last_dimension(dtype: Any, dim: int, is_choice: bool) -> None:
    stated, out = Stated("zipf:1"), fake(8 if dim else 4)
    router = type("Router", (torch.nn.Module,), {})()
    assert stated.routing is not None
    stated.choices.inside = lambda: router
    stated.note("aten.argmax", (fake(8, 4, dtype=dtype), dim), out)
    assert (stated.numbers.of(out) is not None) == is_choice


@pytest.mark.parametrize("is_of_router", [True, False])
def test_what_is_computed_of_choices_of_experts_needs_them_when_it_is_read(is_of_router: bool) -> None:
    """A mask of the tokens of expert 1, or places shifted by one: the rehearsal begins again with choices."""
    stated, places = Stated(), fake(8)
    router = type("Router", (torch.nn.Module,), {})()
    stated.choices.inside = lambda: router
    choice = (fake(8, 4, dtype=torch.float32), -1) if is_of_router else (fake(8, 4), -1)
    stated.note("aten.argmax", choice, places)
    for func, dtype in ((aten.eq.Scalar, torch.bool), (aten.add.Tensor, LONG)):
        name, out = func.name().replace("::", ".").rpartition(".")[0], fake(8, dtype=dtype)
        following(stated, name, func, lambda *_, out=out: out)(func, (places, 1), {})
        with stated.reading(), pytest.raises(UnroutedError) if is_of_router else nullcontext():
            stated.scalar(out[0])


def test_no_more_elements_are_true_than_there_are() -> None:
    stated = Stated()
    assert stated.count_true(counted(stated, 8)) == 4


@pytest.mark.parametrize("n", [4, MOST_ELEMENTS + 1])
def test_numbers_of_any_amount_are_finite(n: int) -> None:
    """A number differs from itself if it is not finite, and is below infinity if it is."""
    stated, truth = Stated(), torch.bool
    x = fake(n, dtype=torch.float32)
    for name, args in (
        ("isnan", (x,)),
        ("ne", (x, x)),
        ("gt", (x, float("inf"))),
        ("eq", (x, -float("inf"))),
    ):
        assert stated.count_true(noted(stated, name, *args, out=fake(n, dtype=truth))) == 0
