"""The parts of a rehearsal that need no training: sizes of operators, classes of ranks, mistakes."""

from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis.strategies import integers, lists, sampled_from

from foretrace import cli
from foretrace.tracer.rehearse.device.memory import rounded
from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.rehearsing import Asked, free_directory, rehearse, wanted_ranks
from foretrace.tracer.rehearse.tape.calls import Call
from foretrace.tracer.rehearse.tape.works import work_of
from foretrace.tracer.rehearse.words import explain
from foretrace.tracer.rehearse.world.classes import Classes, differences
from foretrace.tracer.rehearse.world.launchers import script_of
from foretrace.traces.layout import Group, Layout
from foretrace.traces.rehearsal import EVENTS, MESSAGES, PLACES, WORKS, RankTables

sizes = integers(min_value=1, max_value=4096)


class Type(str):
    """The type of elements."""

    __slots__ = ()

    is_floating_point = True


BF16 = Type("torch.bfloat16")


@dataclass
class Tensor:
    """What a formula asks of a tensor."""

    shape: tuple[int, ...]
    dtype: Any = BF16
    width: int = 2

    def numel(self) -> int:
        found = 1
        for side in self.shape:
            found *= side
        return found

    @property
    def nbytes(self) -> int:
        return self.numel() * self.width

    def element_size(self) -> int:
        return self.width

    def stride(self) -> tuple[int, ...]:
        """Return elements from one place to the next along each dimension: rows lie one after another."""
        found = [1]
        for side in reversed(self.shape[1:]):
            found.append(found[-1] * side)
        return tuple(reversed(found))


def call(name: str, *args: Any, out: Any = None, **named: Any) -> Call:
    """Return a call of an operator."""
    return Call(name, args, named, out)


@given(m=sizes, n=sizes, k=sizes)
def test_a_product_is_two_operations_per_multiply_add(m: int, n: int, k: int) -> None:
    found = work_of(call("aten.mm", Tensor((m, k)), Tensor((k, n)), out=Tensor((m, n))))
    assert (found.kind, found.m, found.n, found.k) == ("gemm", m, n, k)
    assert found.flops == 2 * m * n * k
    assert found.bytes_moved == 2 * (m * k + k * n + m * n)


@given(m=integers(2, 300), n=integers(2, 300), k=integers(2, 300))
def test_a_product_is_aligned_if_rows_of_its_matrices_begin_every_16_bytes(m: int, n: int, k: int) -> None:
    """Rows of the first matrix have k elements of two bytes, those of the second and of the result n."""
    found = work_of(call("aten.mm", Tensor((m, k)), Tensor((k, n)), out=Tensor((m, n))))
    assert found.aligned is (n % 8 == 0 and k % 8 == 0)
    batch = work_of(call("aten.bmm", Tensor((3, m, k)), Tensor((3, k, n)), out=Tensor((3, m, n))))
    assert batch.aligned is found.aligned


@pytest.mark.parametrize(("row", "reads"), [(7, 1), (1024, 1), (2048, 1), (2049, 3), (32768, 3)])
def test_a_softmax_reads_a_row_again_that_does_not_stay_on_the_chip(row: int, reads: int) -> None:
    x = Tensor((5, row))
    for name in ("aten._softmax", "aten._log_softmax"):
        assert work_of(call(name, x, -1, False, out=x)).bytes_moved == (reads + 1) * 2 * 5 * row


@given(batch=integers(1, 64), m=sizes, n=sizes, k=sizes)
def test_a_batch_of_products_is_that_many(batch: int, m: int, n: int, k: int) -> None:
    one = work_of(call("aten.mm", Tensor((m, k)), Tensor((k, n)), out=Tensor((m, n))))
    many = Tensor((batch, m, k)), Tensor((batch, k, n))
    found = work_of(call("aten.bmm", *many, out=Tensor((batch, m, n))))
    assert (found.flops, found.bytes_moved) == (batch * one.flops, batch * one.bytes_moved)


@pytest.mark.parametrize(("plain", "adding", "batch"), [("mm", "addmm", ()), ("bmm", "baddbmm", (3,))])
def test_what_is_added_to_a_product_is_read_unless_it_counts_nothing(
    plain: str, adding: str, batch: tuple[int, ...]
) -> None:
    a, b, out = (Tensor((*batch, *shape)) for shape in ((8, 16), (16, 24), (8, 24)))
    alone = work_of(call(f"aten.{plain}", a, b, out=out)).bytes_moved
    added = call(f"aten.{adding}", Tensor((24,)), a, b, out=out)
    assert work_of(added).bytes_moved == alone + 24 * a.element_size()
    assert work_of(added._replace(named={"beta": 0})).bytes_moved == alone


@given(
    rows=lists(integers(0, 300), min_size=2, max_size=6).filter(any),
    side=sampled_from("mnk"),
    name=sampled_from(["aten._grouped_mm", "aten._scaled_grouped_mm"]),
    spare=integers(0, 50),
)
def test_a_product_of_experts_is_one_of_the_rows_of_each(
    rows: list[int], side: str, name: str, spare: int
) -> None:
    """Operations and bytes add up, but for weights without rows, and rows to spare, which nobody reads."""
    sides = {"m": 48, "n": 80, "k": 32}
    each = [{**sides, side: n} for n in rows]
    products = [
        work_of(
            call("aten.mm", Tensor((s["m"], s["k"])), Tensor((s["k"], s["n"])), out=Tensor((s["m"], s["n"])))
        )
        for s in each
    ]
    m, n, k = ({**sides, side: sum(rows) + spare}[of] for of in "mnk")
    e, ends = len(rows), tuple(accumulate(rows))
    shapes = {
        "m": ((m, k), (e, k, n), (m, n)),
        "n": ((e, m, k), (k, n), (m, n)),
        "k": ((m, k), (k, n), (e, m, n)),
    }
    a, b, out = map(Tensor, shapes[side])
    found = work_of(call(name, a, b, out=out)._replace(ends=ends))
    unread = 0 if side == "k" else 2 * rows.count(0) * {"m": k * n, "n": m * k}[side]
    assert (found.rows, found.along, found.batch) == (tuple(rows), side, e)
    assert found.bytes_moved == sum(one.bytes_moved for one in products) - unread
    assert found.flops == sum(one.flops for one in products) * (sum(rows) + spare) // sum(rows)
    if not spare and len(set(rows)) == 1:
        assert work_of(call(name, a, b, out=out)) == found._replace(rows=(), along="")
    assert not work_of(call(name, a, b, out=out)._replace(ends=ends[1:])).rows  # those are of other experts


@given(heads=integers(1, 64), tokens=integers(1, 512), width=integers(1, 128))
def test_attention_backward_is_two_and_a_half_forwards(heads: int, tokens: int, width: int) -> None:
    q = Tensor((1, heads, 2 * tokens, width))
    name = "aten._scaled_dot_product_flash_attention_for_cpu"
    forward = work_of(call(name, q, q, q, out=[q]))
    backward = work_of(call(f"{name}_backward", q, q, q, q, out=[q, q, q]))
    assert 2 * backward.flops == 5 * forward.flops
    causal = work_of(call(name, q, q, q, out=[q], is_causal=True))
    assert 2 * causal.flops == forward.flops == 4 * heads * (2 * tokens) ** 2 * width


@given(n=sizes)
def test_what_reads_two_and_writes_one_moves_three(n: int) -> None:
    x = Tensor((n,))
    assert work_of(call("aten.add", x, Tensor((n,)), out=Tensor((n,)))).bytes_moved == 3 * 2 * n
    assert work_of(call("aten.zero_", x, out=x)).bytes_moved == 2 * n


def test_an_embedding_reads_the_rows_that_it_gives() -> None:
    table, tokens, out = Tensor((100_000, 64)), Tensor((10,)), Tensor((10, 64))
    assert work_of(call("aten.embedding", table, tokens, out=out)).bytes_moved == 2 * 2 * 640 + 20


def test_what_is_put_somewhere_is_moved_once_for_each_time_that_it_is_touched() -> None:
    """Added to it is read, and read and written where it goes; else read and written; a copy is of all."""
    whole, rows, places = Tensor((1000, 8)), Tensor((10, 8)), Tensor((10,))
    named = {"self": whole, "indices": [places], "values": rows}
    put = call("aten.index_put_", whole, [places], rows, out=whole, **named)
    added = call("aten.index_put_", whole, [places], rows, True, out=whole, **named, accumulate=True)
    assert work_of(put).bytes_moved == (2 * 80 + 10) * 2
    assert work_of(added).bytes_moved == (3 * 80 + 10) * 2
    named = {"self": whole, "dim": 0, "index": places, "source": rows}
    new = call("aten.index_add", whole, 0, places, rows, out=whole, **named)
    assert work_of(new).bytes_moved == (3 * 80 + 10 + 2 * 8000) * 2


def test_bags_read_a_row_for_each_place() -> None:
    """Not the whole table; its gradient is written once, and rows are added to it."""
    table, places, starts, sums = Tensor((1000, 8)), Tensor((20,)), Tensor((5,)), Tensor((5, 8))
    assert work_of(call("aten._embedding_bag", table, places, starts, out=(sums,))).bytes_moved == 2 * (
        20 * 8 + 20 + 5 + 40
    )
    back = call("aten._embedding_bag_backward", sums, places, starts, out=table)
    assert work_of(back).bytes_moved == 2 * (3 * 20 * 8 + 40 + 20 + 5 + 8000)


def test_fused_adam_reads_four_lists_and_writes_three() -> None:
    lists = [[Tensor((1000,))] for _ in range(4)]
    found = work_of(call("aten._fused_adamw_", *lists))
    assert found.bytes_moved == 7 * 2 * 1000


def test_an_operator_of_somebody_else_is_not_known() -> None:
    x = Tensor((8,))
    assert not work_of(call("mine.kernel", x, out=x)).is_known
    assert work_of(call("aten.mul", x, out=x)).is_known


@given(n=integers(min_value=0, max_value=2**40))
def test_the_allocator_rounds_up_to_its_blocks(n: int) -> None:
    assert 0 <= rounded(n) - n < 512
    assert rounded(n) % 512 == 0


def pipeline(layout: Layout) -> list[Group]:
    """Return the groups of a layout's pipelines."""
    return [Group(id=i, axis="pp", ranks=ranks) for i, ranks in enumerate(layout.groups("pp"))]


@given(pp=integers(2, 6), dp=integers(1, 6))
def test_a_rank_stands_for_those_at_its_place_of_the_pipeline(pp: int, dp: int) -> None:
    layout = Layout(pp=pp, dp=dp)
    classes = Classes(layout.world_size, pipeline(layout))
    found = classes.representatives(classes.pipeline)
    assert [layout.coord(stands).pp for stands in found] == [layout.coord(r).pp for r in range(pp * dp)]
    assert Counter(found) == dict.fromkeys(classes.pipeline, dp)


def test_of_other_pipelines_nothing_need_be_known() -> None:
    layout = Layout(pp=4, dp=3)
    classes = Classes(layout.world_size, pipeline(layout)[:1])
    assert classes.representatives(classes.pipeline) == [0, 0, 0, 3, 3, 3, 6, 6, 6, 9, 9, 9]


def test_without_a_pipeline_one_stands_for_all_and_the_last_is_the_sample() -> None:
    classes = Classes(8, [])
    assert classes.representatives([0]) == [0] * 8
    assert list(classes.samples(1)) == [(7, 0)]


@given(tp=integers(2, 4), dp=integers(2, 4))
def test_ranks_are_checked_along_every_group(tp: int, dp: int) -> None:
    """The last rank of the world, if it has been acted out, differs from one end along the other axis."""
    layout = Layout(dp=dp, tp=tp)
    groups = [group for group in layout.process_groups(("tp", "dp")) if 0 in group.ranks]
    last = layout.world_size - 1
    acted = [group for group in layout.process_groups(("tp", "dp")) if last in group.ranks]
    classes = Classes(layout.world_size, groups)
    assert {rank for rank, _ in classes.samples(1)} == {tp - 1, last - tp + 1, last}
    found = [rank for rank, _ in classes.samples(1, acted)]
    assert len(found) == 2
    assert last in found
    assert found[0] in {tp - 1, last - tp + 1}


def issued(n_ops: int) -> RankTables:
    """Return a rank that does *n_ops* operations."""
    event = {"what": 0, "item": 0, "place": 0, "stream": 0, "number": -1, "allocated_bytes": 0}
    row = {"name": "aten.mm", "kind": "gemm", "shapes": "8x8", "dtype": "bf16", "flops": 1, "bytes_moved": 1}
    work = {**row, "m": 1, "n": 1, "k": 1, "batch": 1, "v_dim": 0, "causal": False, "kernels": 1}
    return RankTables(
        pa.Table.from_pylist([event] * n_ops, EVENTS),
        pa.Table.from_pylist([{**work, "is_known": True, "rows": (), "along": "", "aligned": True}], WORKS),
        MESSAGES.empty_table(),
        PLACES.empty_table(),
    )


def test_differences_are_said_in_numbers() -> None:
    assert not differences(issued(2), issued(2))
    assert differences(issued(2), issued(3)) == (
        "1 of 1 kinds of work and messages are done a different number of times (aten.mm (8x8): 2 against 3)"
    )


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["train.py", "--x"], (("train.py", "--x"), False)),
        (["accelerate", "launch", "--use_fsdp", "train.py"], (("train.py",), False)),
        (["torchrun", "-m", "pkg.train", "a"], (("pkg.train", "a"), True)),
        (["python", "-m", "torch.distributed.run", "train.py"], (("train.py",), False)),
    ],
)
def test_launchers_are_left_out(words: list[str], found: tuple[tuple[str, ...], bool]) -> None:
    assert script_of(words) == found


@pytest.mark.parametrize("first", ["#!/usr/bin/python3", "#!/bin/sh\n'''exec' /a/python \"$0\""])
def test_a_command_that_pip_has_installed_is_a_script(tmp_path: Path, first: str) -> None:
    """Its name ends in nothing; files that no Python runs, as those of settings, are none."""
    (tmp_path / "settings").write_text("python\n")
    script = tmp_path / "train"
    script.write_text(f"{first}\nprint()\n")
    words = [
        "torchrun",
        "--nproc-per-node",
        "8",
        "--config",
        str(tmp_path / "settings"),
        str(script),
        "--lr",
        "3",
    ]
    assert script_of(words) == ((str(script), "--lr", "3"), False)
    assert script_of(words[:-3]) == (tuple(words[:-3]), False)


@pytest.mark.parametrize("text", ["a", "1-", "-1", "3,x", "", "7-3"])
def test_ranks_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(RehearsalError, match="--ranks"):
        wanted_ranks(text, 8)


def test_mistakes_are_found_before_anything_runs(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    with pytest.raises(RehearsalError, match="no script"):
        rehearse(Asked(command=(), world_size=2), tmp_path / "run")
    with pytest.raises(RehearsalError, match="no such script"):
        rehearse(Asked(command=("gone.py",), world_size=2), tmp_path / "run")
    with pytest.raises(RehearsalError, match="sh: no such script; write the line of Python that it runs"):
        rehearse(Asked(command=("sh", "-c", "python train.py"), world_size=2), tmp_path / "run")
    with pytest.raises(RehearsalError, match="outside a world of 2"):
        rehearse(Asked(command=(str(script),), world_size=2, ranks=(2,)), tmp_path / "run")
    with pytest.raises(RehearsalError, match="no such stub"):
        rehearse(Asked(command=(str(script),), world_size=2, stub="gone.py"), tmp_path / "run")
    with pytest.raises(RehearsalError, match="other files"):
        rehearse(Asked(command=(str(script),), world_size=2), tmp_path)
    assert not (tmp_path / "run").exists()


def test_the_next_free_directory_bears_the_name_of_the_script() -> None:
    assert free_directory(["torchrun", "somewhere/train.py"]) == Path("runs/train-1")
    assert free_directory(["torchrun", "-m", "scripts.base_train", "-v"]) == Path("runs/scripts.base_train-1")


def test_a_report_without_a_machine_is_refused() -> None:
    with pytest.raises(Exception, match="name a machine"):
        CliRunner().invoke(
            cli.main,
            ["rehearse", "--world-size", "2", "--report", "x.html", "--", "train.py"],
            catch_exceptions=False,
            standalone_mode=False,
        )


class UnsupportedOperatorException(Exception):  # noqa: N818 - torch's name
    """As torch raises it."""


def test_a_custom_operator_is_named_with_its_stub() -> None:
    try:
        raise UnsupportedOperatorException("mine::kernel")
    except UnsupportedOperatorException as error:
        said = explain(error, {"log": "x.log", "command": ["train.py"]})
    assert '@torch.library.register_fake("mine::kernel")' in said
    assert "\n" not in said


def test_an_error_is_said_with_what_the_script_was_told_before() -> None:
    """A shape that other ranks send is not known here: what does not fit then comes of it."""
    told = ["train.py:2 reads counts: told 4", "train.py:3 reads a number: told 1 (nothing is known of it)"]
    said = explain(RuntimeError("sizes do not fit"), {"log": "x.log"}, told)
    assert f"RuntimeError: sizes do not fit; before that, {told[1]} (if that is why, say it in" in said
