"""Validation: scores by hand, tables read and refused, every row accounted for, and the verb."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from foretrace.cli import main
from foretrace.simulator.compute.benched import LOADS
from foretrace.simulator.errors import TableError
from foretrace.simulator.table import read_table
from foretrace.simulator.validate.kernels import validate_kernels
from foretrace.simulator.validate.scores import Failed, Scored, Validation
from foretrace.topologies.catalog import device_named

HEAD = (
    "id,family,hardware,kernel,dtype,direction,m,n,k,batch,seq,heads,kv_heads,head_dim,causal,impl,"
    "time_us,load"
)
ROWS = (
    "k1,a,A100-SXM-80GB,gemm,fp16,fwd,4096,12288,4096,,,,,,,torch,1911.0,repeated",
    "k2,a,A100-SXM-80GB,gemm,fp16,fwd,1,4096,4096,,,,,,,torch,25.0,burst",
    "k3,b,H100-SXM-80GB,attention,bf16,fwd,,,,1,16384,8,8,256,true,flash3,1712.6,sustained",
    "k4,c,B200-SXM-180GB,grouped_gemm,bf16,fwd,308,3072,5120,80,,,,,,,890.714,repeated",
    "k5,d,TPU v5p,gemm,bf16,fwd,4096,4096,4096,,,,,,,XLA,300.0,burst",
    "k6,d,A100-SXM-80GB,gemm,fp8,fwd,4096,4096,4096,,,,,,,torch,300.0,burst",
    "k7,e,H100-SXM-80GB,gemm,bf16,fwd,8192,8192,8192,,,,,,,torch,1691.6,sustained",
    "k8,e,H100-SXM-80GB,grouped_gemm,bf16,sideways,512,4096,4096,8,,,,,,,300.0,burst",
    "k9,e,H100-SXM-80GB,convolution,bf16,fwd,512,4096,4096,8,,,,,,,300.0,burst",
    "k10,e,H100-SXM-80GB,gemm,bf16,fwd,512,4096,4096,,,,,,,,300.0,gently",
    "k11,e,H100-SXM-80GB,attention,bf16,fwd,,,,1,4096,8,8,128,true,abacus,300.0,burst",
)


def scored(family: str, predicted: float, measured: float = 1.0) -> Scored:
    return Scored(id="x", family=family, group="g", what="", predicted=predicted, measured=measured)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "kernels.csv"
    path.write_text("\n".join([HEAD, *ROWS]), encoding="utf-8")
    return path


def test_the_score_is_the_mean_over_families_of_their_medians() -> None:
    """Family a is 0, 1 and 2 off, family b 3: (1 + 3) / 2. A large family counts once."""
    rows = [scored("a", math.e**i) for i in (0, -1, 2)] + [scored("b", math.e**3)]
    found = Validation(
        kind="k", table="t", unit="us", rows=rows, failures=[Failed(id="y", family="b", reason="no")]
    )
    assert found.score == pytest.approx(2.0)
    assert [spread.name for spread in found.families] == ["b", "a"]
    assert [row.predicted for row in found.worst(2)] == [math.e**3, math.e**2]
    document = found.document()
    assert (document["rows"], document["predicted"], document["failures"]) == (5, 4, 1)
    assert document["failure_reasons"] == {"no": 1}
    assert document["families"][1]["bias"] == pytest.approx(0.0)


def test_a_table_without_predictions_has_no_score() -> None:
    found = Validation(kind="k", table="t", unit="us", rows=[], failures=[])
    assert found.score is None
    assert found.document()["families"] == []


def test_every_row_is_predicted_or_refused_with_a_reason(table: Path) -> None:
    found = validate_kernels(table)
    assert [row.id for row in found.rows] == ["k1", "k2", "k3", "k4", "k7"]
    assert all(abs(row.log_ratio) < 0.35 for row in found.rows)
    reasons = {failed.id: failed.reason for failed in found.failures}
    assert "TPU v5p" in reasons["k5"]
    assert "fp8" in reasons["k6"]
    assert "sideways" in reasons["k8"]
    assert "convolution" in reasons["k9"]
    assert "burst, sustained, repeated" in reasons["k10"]
    assert "abacus" in reasons["k11"]
    assert found.score_by_group().keys() == {"gemm", "attention", "grouped_gemm"}


def test_bursts_are_faster_than_lasting_load(tmp_path: Path) -> None:
    path = tmp_path / "kernels.parquet"
    row = {"hardware": "b200-sxm", "kernel": "gemm", "dtype": "bf16", "m": 8192, "n": 8192, "k": 8192}
    pq.write_table(pa.Table.from_pylist([{**row, "time_us": 800.0, "load": load} for load in LOADS]), path)
    burst, sustained, repeated = (row.predicted for row in validate_kernels(path).rows)
    assert burst < repeated < sustained
    assert [one.name for one in validate_kernels(path).families] == ["b200-sxm gemm bf16"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("none.csv", None, "cannot be read"),
        ("empty.csv", "kernel,dtype\n", "no rows"),
        ("other.csv", "a,b\n1,2\n", "no column kernel, dtype, load, time_us, hardware"),
        ("bad.parquet", "not parquet", "not a Parquet table"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused(
    tmp_path: Path, name: str, text: str | None, message: str
) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(TableError, match=message):
        validate_kernels(path)


def test_cells_are_typed(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,b,c\n1.5,,true\n", encoding="utf-8")
    row = read_table(path, ("a",))[0]
    assert (row.number_in("a"), row.integer("b", 7), row.flag("c", default=False)) == (1.5, 7, True)
    with pytest.raises(TableError, match="whole"):
        row.integer("a")
    with pytest.raises(TableError, match="b is not given"):
        row.integer("b")


@pytest.mark.parametrize(
    ("hardware", "device"),
    [
        ("A100-PCIe-80GB", "a100-pcie"),
        ("gemm_bf16_h200_sxm", "h200-sxm"),
        ("2x RTX 4090 24GB", "rtx-4090"),
        ("GB200-NVL72", "gb200"),
        ("V100-SXM-16GB", "v100-16gb"),
        ("l40s", "l40s"),
    ],
)
def test_hardware_is_recognised_as_people_write_it(hardware: str, device: str) -> None:
    assert device_named(hardware).name == device


def test_the_verb_prints_one_object_or_a_table(table: Path) -> None:
    run = CliRunner().invoke(main, ["validate", "kernels", str(table), "--json"])
    assert run.exit_code == 0
    document = json.loads(run.output)
    assert document["kind"] == "kernels"
    assert document["rows"] == 11
    shown = CliRunner().invoke(main, ["validate", "kernels", str(table)])
    assert "5 rows predicted, 6 failed" in shown.output


def test_a_missing_table_is_one_line(tmp_path: Path) -> None:
    run = CliRunner().invoke(main, ["validate", "kernels", str(tmp_path / "none.csv")])
    assert run.exit_code == 2
    assert run.output.startswith("Error: ")
