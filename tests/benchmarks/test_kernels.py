"""Tables of published kernels: what their notes and names mean, and how near predictions are."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import median

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from measured.kernels import load_of, validate_kernels

from foretrace.simulator.compute.benched import BURST, LASTING, REPEATED
from foretrace.simulator.validate.scores import Validation

TABLES = Path(__file__).parents[2] / "benchmarks" / "tables"
HEAD = (
    "id,source_group,hardware,kernel,dtype,direction,m,n,k,batch,seq,heads,kv_heads,head_dim,causal,impl,"
    "time_us,tflops,notes"
)


def found_in(path: Path) -> Validation:
    return validate_kernels(path)[0]


@pytest.mark.parametrize(
    ("notes", "load"),
    [("burst: 100 runs", BURST), ("sustained for 2 s", LASTING), ("20 groups", REPEATED), ("", REPEATED)],
)
def test_notes_of_a_row_say_the_load(notes: str, load: str) -> None:
    assert load_of(notes) == load


def test_narrow_heads_on_gb300() -> None:
    """Eleven forward passes of cuDNN, ten with heads 64 wide, that exponentials limit."""
    found = found_in(TABLES / "attention_gb300.csv")
    assert not found.failures
    ratios = sorted(row.predicted / row.measured for row in found.rows)
    assert ratios[len(ratios) // 2] == pytest.approx(1, abs=0.05)
    assert ratios == pytest.approx([1] * 11, abs=0.17)


def test_cudnn_as_nvidia_measures_it() -> None:
    """122 passes; those of B200, from which nothing was taken, are of a faster machine than its constants."""
    found = found_in(TABLES / "attention_cudnn.csv")
    assert not found.failures
    assert len(found.rows) == 122
    errors: dict[str, list[float]] = {}
    for row in found.rows:
        errors.setdefault(row.family, []).append(abs(math.log(row.predicted / row.measured)))
    worst = {name: median(own) for name, own in errors.items() if "B200-SXM" not in name}
    assert len(worst) == 6
    assert max(worst.values()) < 0.05


def test_every_row_is_predicted_or_refused_with_a_reason(tmp_path: Path) -> None:
    rows = (
        "k3,b,H100-SXM-80GB,attention,fp16/bf16,fwd,,,,1,16384,8,8,256,true,FlashAttention-3,,642.0,halved",
        "k4,c,B200-SXM-180GB,grouped_gemm,bf16,fwd,308,3072,5120,80,,,,,,TE,890.714,870.21,80 groups",
        "k5,d,TPU v5p,gemm,bf16,fwd,4096,4096,4096,,,,,,,XLA,300.0,458,",
        "k6,d,A100-SXM-80GB,gemm,fp8,fwd,4096,4096,4096,,,,,,,torch,300.0,458,",
        "k7,e,H100-SXM-80GB,gemm,bf16,fwd,8192,8192,8192,,,,,,,torch,,650,",
        "k8,e,A100-SXM-80GB,attention,bf16,fwd,,,,1,4096,8,8,128,true,FlashAttention-3,,642.0,",
    )
    path = tmp_path / "kernels.csv"
    path.write_text("\n".join([HEAD, *rows]), encoding="utf-8")
    found = found_in(path)
    assert [row.id for row in found.rows] == ["k3", "k4", "k7"]
    assert all(abs(row.log_ratio) < 0.35 for row in found.rows)
    reasons = {failed.id: failed.reason for failed in found.failures}
    for name, word in (("k5", "TPU v5p"), ("k6", "fp8"), ("k8", "flash3")):
        assert word in reasons[name]


def test_a_table_of_products_is_one_family_named_after_its_file_in_bursts(tmp_path: Path) -> None:
    path = tmp_path / "gemm_bf16_b200_sxm.parquet"
    pq.write_table(pa.table({"m": [8192], "n": [8192], "k": [8192], "us": [800.0]}), path)
    found, rows = validate_kernels(path)
    assert [spread.name for spread in found.families] == ["gemm_bf16_b200_sxm gemm"]
    assert [row["load"] for row in rows] == [BURST]
