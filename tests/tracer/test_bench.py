"""Timing kernels on this machine: rows that the simulator reads, a device that it takes, and laws of both."""

from __future__ import annotations

import csv
import itertools
import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("torch")

from foretrace.cli import main
from foretrace.simulator.compute.benched import promise
from foretrace.simulator.validate.kernels import validate_kernels
from foretrace.topologies.catalog import load_cluster, load_device
from foretrace.tracer.bench import device as bench_device
from foretrace.tracer.bench import kernels as bench_kernels
from foretrace.tracer.bench.device import device_of, sustained_share, to_toml
from foretrace.tracer.bench.kernels import (
    SIZES,
    Bench,
    Case,
    Kernel,
    Sizes,
    bench,
    burst_s,
    cases,
    line,
    sustained_s,
    table_text,
    timed,
)
from foretrace.tracer.bench.world import OTHER_BYTES, PRODUCTS, SIZES_BYTES, _elsewhere
from foretrace.tracer.errors import RecordError

TINY = Sizes(
    tokens=(16, 64),
    linears=((32, 64), (64, 32)),
    squares=(64,),
    sequences=(32,),
    heads=4,
    kv_heads=2,
    head_dim=16,
    hidden=32,
    ffn_hidden=64,
    params=1000,
    stream=100_000,
)


@pytest.fixture(scope="module")
def measured() -> Bench:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_kernels, "CPU_S", 0.001)
        return bench("cpu", "fp32", lasting_s=0.01, sizes=TINY)


@pytest.mark.parametrize("device", sorted(SIZES))
def test_the_three_products_of_a_linear_layer_do_the_same_work(device: str) -> None:
    products = [case for case in cases(SIZES[device], device, "bf16") if case.row.kernel == "gemm"]
    layers = [products[at : at + 3] for at in range(0, len(products) - 1, 3)]
    assert all(len({case.flops for case in layer}) == 1 for layer in layers)
    assert all(len({case.moved for case in layer}) == 1 for layer in layers)
    assert [case.row.direction for case in layers[0]] == ["fwd", "bwd_grad_act", "bwd_grad_w"]


def test_every_kernel_is_timed_and_large_products_also_under_lasting_load(measured: Bench) -> None:
    kinds = {one.kernel for one in measured.kernels}
    assert kinds == {"gemm", "attention", "norm", "activation", "stream", "optimizer", "launch"}
    assert all(one.time_us > 0 and one.hardware == "cpu" for one in measured.kernels)
    lasting = [one for one in measured.kernels if one.load == "sustained"]
    assert {one.direction for one in lasting} == {"fwd", "bwd_grad_act", "bwd_grad_w"}
    assert all(one.kernel == "gemm" for one in lasting)
    work = {
        one.direction: one.tflops * one.time_us for one in lasting if one.m * one.n * one.k == 64 * 32 * 64
    }
    assert len({round(value, 9) for value in work.values()}) == 1


def test_a_table_is_read_by_validate_kernels_and_the_device_predicts_it(
    measured: Bench, tmp_path: Path
) -> None:
    table, device = tmp_path / "kernels.csv", tmp_path / "device.toml"
    table.write_text(table_text(measured), encoding="utf-8")
    device.write_text(to_toml(measured), encoding="utf-8")
    found = validate_kernels(table, device=str(device))
    assert not found.failures
    assert len(found.rows) == len(measured.kernels)
    by_id = {row.id: row.measured for row in found.rows}
    assert by_id["bench-001"] == pytest.approx(measured.kernels[0].time_us)
    with table.open(encoding="utf-8", newline="") as file:
        assert next(csv.DictReader(file))["hardware"] == "cpu"


def test_a_device_has_the_figures_that_were_measured(measured: Bench, tmp_path: Path) -> None:
    path = tmp_path / "device.toml"
    path.write_text(to_toml(measured), encoding="utf-8")
    device, figures = load_device(str(path)), device_of(measured)
    products = [one for one in measured.kernels if one.kernel == "gemm" and one.load == "burst"]
    assert device.peak("fp32") == pytest.approx(max(one.tflops for one in products) * 1e12, rel=1e-3)
    assert device.sustained_clock_fraction == pytest.approx(figures.sustained_clock, abs=1e-3)
    assert (device.kind, device.sources["gemm.efficiency"][:4]) == ("cpu", "line")


def test_products_of_a_busy_machine_make_a_device_that_loads(measured: Bench, tmp_path: Path) -> None:
    """Where larger products took less time than smaller ones, nothing is lost beside the fastest."""
    products = [one for one in measured.kernels if one.kernel == "gemm"]
    turned = min(one.time_us for one in products) * max(one.time_us for one in products)
    time_us = {one: turned / one.time_us for one in products}
    kernels = [
        replace(one, time_us=time_us[one], tflops=one.tflops * one.time_us / time_us[one])
        if one in time_us
        else one
        for one in measured.kernels
    ]
    path = tmp_path / "device.toml"
    path.write_text(to_toml(replace(measured, kernels=kernels)), encoding="utf-8")
    assert load_device(str(path)).gemm_efficiency == 1.0


def test_lasting_load_at_half_the_speed_is_half_the_clock(measured: Bench) -> None:
    product = next(one for one in measured.kernels if one.kernel == "gemm")
    slow = replace(product, load="sustained", time_us=2 * product.time_us)
    assert sustained_share(replace(measured, kernels=[product, slow])) == 0.5
    assert sustained_share(replace(measured, kernels=[product])) == 1.0


def test_a_promise_is_what_the_simulator_takes_at_the_clock_of_the_measurement() -> None:
    rows = [
        {"kernel": "gemm", "dtype": "bf16", "m": 8192, "n": 8192, "k": 8192, "time_us": 1.0, "load": load}
        for load in ("burst", "sustained")
    ]
    found = promise("NVIDIA H100 80GB HBM3", [*rows, {**rows[0], "dtype": "fp4"}])
    assert found.device == "h100-sxm"
    burst, lasting, unknown = found.times_us
    assert burst is not None
    assert lasting is not None
    assert 1000 < burst <= lasting
    assert unknown is None


def test_both_clocks_agree_on_a_processor() -> None:
    def run() -> int:
        return sum(range(20_000))

    assert sustained_s(run, "cpu", 0.01) > 0.2 * burst_s(run, "cpu", 0.001)


def test_a_line_goes_through_points_on_a_line_and_not_below_the_origin() -> None:
    assert line([(1.0, 5.0), (2.0, 7.0), (4.0, 11.0)]) == pytest.approx((2.0, 3.0))
    assert line([(1.0, 1.0), (2.0, 3.0)])[1] == 0.0


@pytest.mark.parametrize(
    ("device", "dtype", "words"), [("tpu", "fp32", "torch sees"), ("cpu", "fp8", "one of")]
)
def test_what_is_not_there_is_refused(device: str, dtype: str, words: str) -> None:
    with pytest.raises(RecordError, match=words):
        bench(device, dtype)


def test_the_verb_prints_shares_of_what_is_promised(measured: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_kernels, "bench", lambda *_, **__: measured)
    shown = CliRunner().invoke(main, ["bench", "kernels", "--against", "localhost"], standalone_mode=False)
    assert "of the speed that cpu-core promises:\n  gemm" in shown.output
    assert "weight gradient" in shown.output
    printed = CliRunner().invoke(main, ["bench", "kernels", "--against", "dgx-h100", "--json"])
    document = json.loads(printed.output)
    assert (document["against"], len(document["kernels"])) == ("h100-sxm", len(measured.kernels))
    assert all("promised_us" in one for one in document["kernels"])
    plain = CliRunner().invoke(main, ["bench", "kernels"])
    assert "nothing to compare with" in plain.output
    refused = CliRunner().invoke(main, ["bench", "kernels", "--against", "nonsense"])
    assert (refused.exit_code, "nonsense" in refused.output) == (2, True)


def made_up(slower: float) -> list[dict[str, Any]]:
    """Return kernels of a process of 100 GFLOP/s and 5 µs a product, all *slower* than that."""

    def row(kind: str, time_s: float, flops: float = 0, moved: float = 0, way: str = "fwd") -> dict[str, Any]:
        case = Case(Kernel(kernel=kind, dtype="fp32", direction=way), flops, moved, lambda: lambda: None)
        return asdict(timed(case, slower * time_s, "cpu-core", "burst"))

    products = [2.0 * math.prod(shape) for shape, _ in PRODUCTS]
    return [
        *(row("gemm", flops / 1e11 + 5e-6, flops) for flops in products),
        *(row("attention", 0.01, flops, way=way) for way, flops in (("fwd", 4e8), ("bwd", 6e8))),
        *(row(kind, 0.002, moved=1e7) for kind in ("optimizer", "norm")),
        row("stream", 0.01, moved=1e8),
        row("launch", 3e-6),
    ]


def test_operands_come_back_when_others_have_filled_the_caches() -> None:
    used, number = list[int](), itertools.count()

    def prepare() -> Callable[[], None]:
        return partial(used.append, next(number))

    case = Case(Kernel(kernel="gemm", dtype="fp32"), 0.0, OTHER_BYTES / 4, prepare)
    run = _elsewhere(case).prepare()
    for _ in range(6):
        run()
    assert used == [0, 1, 2, 3, 0, 1]


def test_a_machine_is_described_by_the_medians_of_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = [1e-4 * 2**at for at in range(len(SIZES_BYTES))]
    kinds = {kind: {"2": times} for kind in ("all_reduce", "all_gather", "p2p")}
    said = {
        "torch": "2.13", "kernels": [made_up(slower) for slower in (1.0, 9.0, 0.5)],
        "times_s": {**kinds, "reduce_scatter": {"2": [times[0], 2 * times[2], *times[2:]]}},
    }  # fmt: skip
    monkeypatch.setattr(bench_device, "started", lambda *_, **__: said)
    path = tmp_path / "here.toml"
    done = CliRunner().invoke(main, ["topology", "detect", "-o", str(path), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    keys = {"path", "n_processes", "cores", "memory_bytes", "torch", "compute", "times_s", "sizes_bytes"}
    assert found.keys() == keys
    peak = 2 * 1024**3 / (2 * 1024**3 / 1e11 + 5e-6)
    expected = {
        "peak_flops_per_s": peak, "gemm_efficiency": 1.0, "gemm_latency_s": 5e-6, "memory_bytes_per_s": 1e10,
        "memory_fraction": 0.5, "operation_s": 3e-6, "attention_forward": 4e10 / peak,
        "attention_backward": 6e10 / peak,
    }  # fmt: skip
    assert found["compute"] == pytest.approx(expected)
    assert found["times_s"]["reduce_scatter"]["2"] == [times[0], times[2], *times[2:]]  # without falls

    device = load_cluster(str(path), 2).device
    assert device.peak("fp32") == pytest.approx(peak, rel=1e-3)
    assert device.memory_bytes_per_s == pytest.approx(1e10)
    assert (device.kind, device.launch_s) == ("cpu", 3e-6)
    assert device.gemm_latency_s == pytest.approx(5e-6)
    shown = CliRunner().invoke(main, ["topology", "detect", "-o", str(path)])
    assert "one process: 100 GFLOP/s, 3 µs an operation\nmemory: 10.0 GB/s," in shown.output


@pytest.mark.gpu
def test_on_a_gpu_a_burst_is_timed_by_events() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    found = bench("cuda", "bf16", lasting_s=0.2)
    product = max((one for one in found.kernels if one.kernel == "gemm"), key=lambda one: one.tflops)
    assert 10 < product.tflops < 10_000
    assert all(one.time_us > 0 for one in found.kernels)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("bench collectives --backend nccl --processes 99", "needs a GPU for each of 99 processes"),
        ("bench kernels -o FOLDER", "FOLDER: Is a directory"),
        ("bench kernels --device-file /dev/null/x.toml", "cannot write /dev/null/x.toml"),
        ("topology detect -o /dev/null/x.toml", "cannot write /dev/null/x.toml"),
    ],
)
def test_what_cannot_come_to_an_end_is_not_begun(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measuring takes a quarter of a minute and more: what is wrong with a command is said before."""
    (tmp_path / "FOLDER").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench_kernels, "bench", lambda *_, **__: pytest.fail("measured"))
    monkeypatch.setattr("foretrace.tracer.bench.device.measure", lambda _: pytest.fail("measured"))
    refused = CliRunner().invoke(main, words.split())
    assert refused.exit_code == 2, refused.output
    assert said in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["FOLDER"]
