"""Tables of published collectives: every row is run, in both forms of table, and none is lost."""

import json
from pathlib import Path
from statistics import median

import pytest
import validate
from click.testing import CliRunner
from measured.collectives import score_collectives

from foretrace.cli import main
from foretrace.simulator.errors import TableError
from foretrace.simulator.validate.scores import Validation

REPORTS = Path(__file__).parents[2] / "benchmarks/tables/collectives_reports.csv"
HEAD = "id,source_group,hardware,nodes,gpus,op,bytes,time_us,algbw_GBps,busbw_GBps,notes\n"
ROWS = (
    "a,x,A100-SXM (NVSwitch),1,8,all_reduce,1006632960,7692.7,130.86,229.0,\n"
    "b,x,A100-SXM (NVSwitch),1,8,all_reduce,67108864,,115.72,202.52,\n"
    'c,x,"A100, 8x200 Gb/s IB",2,16,all_gather,268435456,,,150,\n'
    "d,x,H100 DGX,1,2,send_recv,67108864,193,,,\n"
    "e,x,H100 DGX,2,16,alltoall,67108864,500,,,\n"
    "f,x,abacus,1,8,all_reduce,1024,10,,,\n"
    "g,x,H100 DGX,1,8,gossip,1024,10,,,\n"
    'h,y,"H800, CX7 400 Gb/s per GPU",2,16,ep_dispatch_ll,,173,,43,"128 tokens/batch, hidden 7168, top-8"\n'
    'i,y,"H800, CX7 400 Gb/s per GPU",8,64,ep_dispatch,,,,51,'
    '"4096 tokens/batch, hidden 7168, top-4 groups, top-8 experts"\n'
    'j,y,"H800, CX7 400 Gb/s per GPU",8,64,ep_dispatch,,,,51,"not said"\n'
)


@pytest.fixture(name="table")
def _table(tmp_path: Path) -> Path:
    path = tmp_path / "collectives.csv"
    path.write_text(HEAD + ROWS, encoding="utf-8")
    return path


def test_every_row_is_predicted_or_counted_as_failed(table: Path) -> None:
    found = score_collectives(table)
    assert [row.id for row in found.rows] == ["a", "b", "c", "d", "e", "h", "i"]
    assert {failed.id: failed.reason.split(";")[0] for failed in found.failures} == {
        "f": "hardware 'abacus' names no machine of the catalogue",
        "g": "operation 'gossip': one of all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, "
        "reduce, send_recv, scatter, gather, barrier, experts",
        "j": "the notes do not say how many tokens, how wide, and to how many experts",
    }
    assert {row.group for row in found.rows} == {"single-node", "multi-node"}


def test_a_bandwidth_stands_for_a_time(table: Path) -> None:
    rows = {row.id: row for row in score_collectives(table).rows}
    assert rows["b"].measured == pytest.approx(67108864 / 115.72e3)
    assert rows["c"].measured == pytest.approx(15 / 16 * 268435456 / 150e3)


def test_what_others_measured_comes_out(table: Path) -> None:
    """VIA-Research/vTrain f8dda84, microsoft/vidur 7d47513 and deepseek-ai/DeepEP 1a0c8f6."""
    rows = {row.id: row for row in score_collectives(table).rows}
    assert all(abs(rows[name].log_ratio) < 0.05 for name in ("a", "b", "d"))
    assert all(abs(rows[name].log_ratio) < 0.10 for name in ("h", "i"))


def test_a_family_is_source_hardware_operation_and_number_of_gpus(table: Path) -> None:
    families = {row.id: row.family for row in score_collectives(table).rows}
    assert families["a"] == families["b"] == "x · A100-SXM (NVSwitch) · all_reduce · 8 GPUs"
    assert len(set(families.values())) == 6


def test_one_node_sweeps_have_a_form_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "nccl.csv"
    path.write_text("gpu,op,n,bytes,us,nccl\nh100_sxm,alltoall,4,8388608,38.3,2.29.2\n", encoding="utf-8")
    (row,) = score_collectives(path).rows
    assert (row.group, row.measured) == ("single-node", 38.3)


def test_a_translated_table_has_the_same_score(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    validate.main(["collectives", str(table), "--write", str(tmp_path / "translated"), "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert (printed["rows"], printed["failures"]) == (10, 3)
    assert set(printed["score_by_class"]) == {"single-node", "multi-node"}
    assert printed["score"] > 0
    path = tmp_path / "translated" / table.name
    found = CliRunner().invoke(main, ["validate", "collectives", str(path), "--json"])
    assert json.loads(found.stdout)["score"] == printed["score"]


def test_a_machine_is_given_as_words_and_a_name(table: Path) -> None:
    with pytest.raises(SystemExit, match="WORDS=MACHINE"):
        validate.main(["collectives", str(table), "--machine", "dgx-a100"])


def test_a_table_without_operations_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(TableError, match="no column op, bytes"):
        score_collectives(path)


@pytest.mark.parametrize("column", ["nodes", "gpus"])
def test_a_misspelt_column_is_refused_and_not_taken_for_its_default(table: Path, column: str) -> None:
    header, _, rows = table.read_text(encoding="utf-8").partition("\n")
    table.write_text(f"{header.replace(column, column + 'x')}\n{rows}", encoding="utf-8")
    with pytest.raises(TableError, match=f"no column {column}; it has .*{column}x"):
        score_collectives(table)


def test_a_table_that_was_cut_off_is_refused_wherever_the_cut_is(table: Path) -> None:
    """At the end of a row or within its last cell nobody can tell."""
    whole = table.read_text(encoding="utf-8")
    last = whole.rstrip().rindex("\n") + 1
    for end in range(last + 1, whole.rstrip().rindex(",") + 1):
        table.write_text(whole[:end], encoding="utf-8")
        with pytest.raises(TableError, match=r"is the table cut off\?|unexpected end of data"):
            score_collectives(table)


def validated(tmp_path: Path, *rows: str) -> Validation:
    path = tmp_path / "table.csv"
    path.write_text(HEAD + "".join(f"{row}\n" for row in rows), encoding="utf-8")
    found = score_collectives(path)
    assert not found.failures
    return found


def test_the_trays_of_a_rack_are_not_nodes(tmp_path: Path) -> None:
    """Tables count the trays of an NVL72 rack, of 4 GPUs each, as nodes."""
    table = validated(
        tmp_path,
        "a,x,GB200 NVL72,18,72,all_reduce,1073741824,1000,,,",
        "b,x,GB200 NVL72,1,72,all_reduce,1073741824,1000,,,",
        "c,x,GB200 NVL72,36,144,all_reduce,1073741824,1000,,,",
    )
    one, same, two = (row.predicted for row in table.rows)
    assert one == same < two


def test_a_size_worked_back_from_both_directions_is_halved(tmp_path: Path) -> None:
    said = "all_reduce_bench.py; bytes back-computed from throughput and duration"
    table = validated(
        tmp_path,
        f"a,x,V100-SXM,1,4,all_reduce,8000000000,48500,,,{said}",
        "b,x,V100-SXM,1,4,all_reduce,4000000000,48500,,,",
    )
    assert table.rows[0].predicted == table.rows[1].predicted
    assert table.notes == ["1 rows: size halved: the throughput it comes from counts both directions"]


def test_a_kernel_in_a_profile_lasts_until_every_rank_has_launched(tmp_path: Path) -> None:
    said = "profiler kernel time"
    table = validated(
        tmp_path,
        f"a,x,H100 DGX,1,8,all_reduce,1024,36,,,{said}",
        f"b,x,A100 DGX,1,8,all_reduce,1024,58,,,{said}",
        f"c,x,H100 DGX,1,8,all_reduce,67108864,320,,,{said}",
        "d,x,H100 DGX,1,8,all_reduce,67108864,320,,,",
        f"e,x,H100 DGX,1,2,send_recv,1024,5,,,{said}",
    )
    times = [row.predicted for row in table.rows]
    assert times[:2] == [36.0, 58.0]
    assert times[2] == times[3]
    assert times[4] < 10


def test_a_send_over_a_socket_ends_when_its_bytes_are_in_buffers(tmp_path: Path) -> None:
    """microsoft/vidur 7d47513, two Azure NC nodes: the wire is felt once NCCL's 8 MiB are full."""
    head, said = "x,NC A100 v4,2,2,send_recv", "profiler kernel time"
    sizes = (1 << 20, 1 << 26)
    rows = [f"{size},{head},{size},{us},,,{said}" for size, us in zip(sizes, (137, 27066), strict=True)]
    small, large = validated(tmp_path, *rows, f"c,{head},1048576,137,,,").rows[:2]
    alone = validated(tmp_path, f"c,{head},1048576,137,,,").rows[0]
    assert small.predicted < 0.5 * alone.predicted
    assert large.predicted == pytest.approx(2**26 / 2.5e3, rel=0.03)
    assert all(abs(row.log_ratio) < 0.1 for row in (small, large))


def test_a_call_from_python_takes_its_time(tmp_path: Path) -> None:
    table = validated(
        tmp_path,
        "a,x,H200-SXM,1,8,all_reduce,32768,40,,,all_reduce_bench.py",
        "b,x,H200-SXM,1,8,all_reduce,32768,20,,,",
    )
    assert table.rows[0].predicted - table.rows[1].predicted == pytest.approx(20.0)


def test_switches_do_not_reduce_where_the_row_says_so(tmp_path: Path) -> None:
    table = validated(
        tmp_path,
        "a,x,H200-SXM,1,8,all_reduce,8589934592,40000,,,NCCL_NVLS_ENABLE=0",
        "b,x,H200-SXM,1,8,all_reduce,8589934592,40000,,,algo NVLS",
        "c,x,H200-SXM,1,4,all_reduce,8589934592,40000,,,algo Ring",
        "d,x,H200-SXM,1,4,all_reduce,8589934592,40000,,,",
    )
    off, on, four, same = (row.predicted for row in table.rows)
    assert off > 1.2 * on
    assert four == same


def test_the_middle_of_many_runs_is_slower_the_more_nodes_there_are(tmp_path: Path) -> None:
    """Of links shared with others ``N ** -0.5`` is left; alone, and inside a node, nothing changes."""

    def ratio(nodes: int) -> float:
        head = f"x,H100 AWS EFA,{nodes},{8 * nodes},all_reduce,4294967296,1000,,,"
        table = validated(tmp_path, f"a,{head}5-95 percentile 1-2", f"b,{head}")
        return table.rows[0].predicted / table.rows[1].predicted

    assert ratio(1) == 1.0
    assert 1.0 < ratio(2) < ratio(4) < ratio(16) <= 4.0


def test_gathers_of_a_framework_copy_the_array_once(tmp_path: Path) -> None:
    """256 MB, read and written at 82 % of 3.35 TB/s, on any number of nodes; an all-reduce copies nothing."""
    for op, extra_us in (("all_gather", 190.4), ("reduce_scatter", 190.4), ("all_reduce", 0.0)):
        head = f"x,H100 AWS EFA,1,8,{op},256000000,1000,,,"
        table = validated(tmp_path, f"a,{head}5-95 percentile 1-2", f"b,{head}")
        assert table.rows[0].predicted - table.rows[1].predicted == pytest.approx(extra_us, abs=0.1)


def test_sends_around_a_ring_go_no_faster_than_a_ring(tmp_path: Path) -> None:
    """li-plus/playground b85070f, sendrecv_perf among 8 A100; one send alone has the link to itself."""
    table = validated(
        tmp_path,
        "a,x,A100-SXM,1,8,send_recv,1073741824,5503.4,,,sendrecv_perf",
        "b,x,A100-SXM,1,2,send_recv,1073741824,4800,,,",
    )
    around, alone = (row.predicted for row in table.rows)
    assert around > alone
    assert abs(table.rows[0].log_ratio) < 0.1


def test_operations_have_many_names(tmp_path: Path) -> None:
    names = ("AllReduce", "All-Gather", "reduce_scatter_tensor", "AlltoAllv", "bcast", "SendRecv", "p2p")
    rows = [f"{name},x,H100 DGX,2,16,{name},1048576,50,,," for name in names]
    assert [row.id for row in validated(tmp_path, *rows).rows] == list(names)


def test_one_rank_deals_out_as_long_as_it_collects(tmp_path: Path) -> None:
    rows = [
        f"{kind}{at},x,H100 DGX,{at},{8 * at},{kind},67108864,50,,,"
        for kind in ("scatter", "gather")
        for at in (1, 2)
    ]
    took = {row.id: row.predicted for row in validated(tmp_path, *rows).rows}
    assert took["scatter1"] == took["gather1"]
    assert took["scatter2"] == took["gather2"] > took["scatter1"]
    assert took["scatter1"] > 7 / 8 * 67108864 / 450e9 * 1e6


def test_a_barrier_has_no_bytes(tmp_path: Path) -> None:
    (row,) = validated(tmp_path, "a,x,H100 DGX,2,16,barrier,0,50,,,").rows
    assert 20 < row.predicted < 60


def test_the_bus_bandwidth_of_a_send_is_its_bandwidth(tmp_path: Path) -> None:
    (row,) = validated(tmp_path, "a,x,H100 DGX,1,2,sendrecv,1000000,,,100,").rows
    assert row.measured == 10


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("a,x,H100 DGX,0,8,all_reduce,1024,10,,,", "8 GPUs in 0 nodes"),
        ("a,x,H100 DGX,16,8,all_reduce,1024,10,,,", "8 GPUs in 16 nodes"),
        ("a,x,H100 DGX,1,8,all_reduce,-1,10,,,", "-1 bytes"),
        ("a,x,H100 DGX,1,8,all_reduce,1024,0,,,", "µs against 0: there is nothing to compare"),
        ("a,x,H100 DGX,1,1,all_reduce,1024,10,,,", "0 µs against 10: there is nothing to compare"),
        ("a,x,H100 DGX,1,8,all_reduce,1024,,0,,", "algbw_GBps = 0: must be above 0"),
    ],
)
def test_a_row_that_cannot_be_is_counted_as_failed(tmp_path: Path, row: str, says: str) -> None:
    table = tmp_path / "table.csv"
    table.write_text(HEAD + row + "\n", encoding="utf-8")
    (failed,) = score_collectives(table).failures
    assert says in failed.reason


def test_a_node_is_as_large_as_the_largest_part_of_it_that_was_used(tmp_path: Path) -> None:
    """Four of four V100 have all six links each, four of eight only four."""
    row = "x,V100-SXM,1,4,all_reduce,4000000000,48500,,,"
    four = validated(tmp_path, f"a,{row}").rows[0]
    eight = validated(tmp_path, f"a,{row}", "b,x,V100-SXM,1,8,all_reduce,4000000000,60000,,,").rows[0]
    assert four.predicted < 0.7 * eight.predicted
    assert abs(four.log_ratio) < 0.1


def test_a_user_says_which_machine_is_meant(table: Path) -> None:
    plain = {row.id: row for row in score_collectives(table).rows}
    found = score_collectives(table, [("A100,", "hgx-a100-4nic"), ("abacus", "dgx-a100")])
    rows = {row.id: row for row in found.rows}
    assert rows["c"].predicted > 1.5 * plain["c"].predicted
    assert rows["a"].predicted == plain["a"].predicted
    assert "f" in rows
    assert "1 rows: hardware stated to be hgx-a100-4nic" in found.notes


def test_a_machine_for_hardware_that_no_row_has_is_refused(table: Path) -> None:
    with pytest.raises(TableError, match="machine 'B300': no hardware of the table begins so; A100-SXM"):
        score_collectives(table, [("B300", "dgx-b300")])


def test_unstated_hardware_is_taken_as_a_machine_and_counted(tmp_path: Path) -> None:
    table = validated(tmp_path, "a,x,not stated (4 nodes),4,32,all_reduce,1073741824,22000,,,")
    assert table.notes == ["1 rows: hardware not stated; taken as hgx-a100-4nic"]
    assert abs(table.rows[0].log_ratio) < 0.05


@pytest.mark.parametrize(
    ("notes", "way"),
    [
        ("NCCL_ALGO=Ring", "ring/"),
        ("run with NCCL_ALGO=Tree; NCCL_PROTO=Simple, 20 iterations", "tree/simple"),
        ('NCCL_ALGO="^ring,nvls_tree"', "tree/"),
        ("NCCL_PROTO: LL128", "ring/ll128"),
        ("Ring", "ring/"),
        ("", "nvls_tree/simple"),
    ],
)
def test_what_a_row_says_that_nccl_was_set_to_counts(tmp_path: Path, notes: str, way: str) -> None:
    path = tmp_path / "table.csv"
    row = f'a,x,"H100 DGX",8,64,all_reduce,268435456,,,300,"{notes.replace(chr(34), chr(34) * 2)}"\n'
    path.write_text(HEAD + row, encoding="utf-8")
    assert score_collectives(path).rows[0].by.startswith(way)


def test_an_algorithm_that_a_row_names_and_nccl_refuses_is_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text(HEAD + "a,x,H100 DGX,8,64,all_gather,1024,,,3,NCCL_ALGO=Tree\n", encoding="utf-8")
    assert "none does an all_gather over 8 nodes" in score_collectives(path).failures[0].reason


def test_clusters_of_which_no_constant_comes_but_those_of_trees_are_met() -> None:
    """Rings, switches that reduce and trees over 2 to 64 nodes of B200, an all-gather, and SHARP."""
    found = score_collectives(REPORTS)
    assert not found.failures
    errors = {
        way: median(abs(row.log_ratio) for row in found.rows if "slinky" in row.family and row.by == way)
        for way in ("ring/simple", "nvls_tree/simple", "tree/simple", "collnet/simple")
    }
    assert max(errors.pop("collnet/simple"), 0.1) < 0.15
    assert max(errors.values()) < 0.04
