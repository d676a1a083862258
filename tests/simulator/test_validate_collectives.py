"""``foretrace validate collectives``: every row is run, in both forms of table, and none is lost."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from simulator.errors import TableError
from simulator.validate_cli import validate
from simulator.validate_collectives import validate_collectives

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
    found = validate_collectives(table)
    assert [row.id for row in found.rows] == ["a", "b", "c", "d", "e", "h", "i"]
    assert {failed.id: failed.reason.split(";")[0] for failed in found.failures} == {
        "f": "hardware 'abacus' names no machine of the catalogue",
        "g": "operation 'gossip': one of all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, "
        "reduce, send_recv",
        "j": "the notes do not say how many tokens, how wide, and to how many experts",
    }
    assert {row.group for row in found.rows} == {"single-node", "multi-node"}


def test_a_bandwidth_stands_for_a_time(table: Path) -> None:
    rows = {row.id: row for row in validate_collectives(table).rows}
    assert rows["b"].measured == pytest.approx(67108864 / 115.72e3)
    assert rows["c"].measured == pytest.approx(15 / 16 * 268435456 / 150e3)


def test_what_others_measured_comes_out(table: Path) -> None:
    """VIA-Research/vTrain f8dda84, microsoft/vidur 7d47513 and deepseek-ai/DeepEP 1a0c8f6."""
    rows = {row.id: row for row in validate_collectives(table).rows}
    assert all(abs(rows[name].log_ratio) < 0.05 for name in ("a", "b", "d"))
    assert all(abs(rows[name].log_ratio) < 0.10 for name in ("h", "i"))


def test_a_family_is_source_hardware_operation_and_number_of_gpus(table: Path) -> None:
    families = {row.id: row.family for row in validate_collectives(table).rows}
    assert families["a"] == families["b"] == "x · A100-SXM (NVSwitch) · all_reduce · 8 GPUs"
    assert len(set(families.values())) == 6


def test_one_node_sweeps_have_a_form_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "nccl.csv"
    path.write_text("gpu,op,n,bytes,us,nccl\nh100_sxm,alltoall,4,8388608,38.3,2.29.2\n", encoding="utf-8")
    (row,) = validate_collectives(path).rows
    assert (row.group, row.measured) == ("single-node", 38.3)


def test_the_verb_prints_one_json_object(table: Path) -> None:
    result = CliRunner().invoke(validate, ["collectives", str(table), "--json"], catch_exceptions=False)
    printed = json.loads(result.stdout)
    assert (printed["rows"], printed["failures"]) == (10, 3)
    assert set(printed["score_by_class"]) == {"single-node", "multi-node"}
    assert printed["score"] > 0


def test_a_table_without_operations_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(TableError, match="no column op, bytes"):
        validate_collectives(path)
