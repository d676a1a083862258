"""Operators of a trace become a rehearsal, and calibrate the machine that they ran on: one step is enough."""

import json
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from foretrace.cli import main
from foretrace.simulator.compute.timing import COPY_START_S, ComputeModel
from foretrace.simulator.errors import CalibrationError
from foretrace.simulator.recorded.calibrate import Calibrated
from foretrace.simulator.recorded.calibration import read_calibration
from foretrace.simulator.recorded.operators import COMMUNICATION_PART, PAUSES, UNTOLD, Trace, calibrate_traced
from foretrace.simulator.rehearsed.works import op_of
from foretrace.topologies.catalog import load_cluster
from foretrace.tracer.ingest.ingest import ingest
from foretrace.traces.analysis.kernels import kernels
from foretrace.traces.rehearsal import (
    WHAT,
    RankTables,
    read_measured,
    read_rank,
    read_rehearsal,
    rehearsal_folder,
)
from foretrace.traces.store import open_run

from .test_ingest_kineto import REAL, Event, event, info, kineto_text, metadata, needs_real

pytest.importorskip("torch")

Operator = tuple[str, list[Any], list[str], list[str]]
"""Name, shapes, types and values of the inputs, as a trace has them."""

BF16 = "c10::BFloat16"
LAYERS, BATCH, SEQ, HIDDEN, HEADS, WIDE, VOCAB = 3, 4, 512, 1024, 16, 4096, 32000
TOKENS = BATCH * SEQ


def product(m: int, k: int, n: int) -> Operator:
    return "aten::mm", [[m, k], [k, n]], [BF16, BF16], ["", ""]


def added(*shape: int) -> Operator:
    return "aten::add", [list(shape), list(shape), []], [BF16, BF16, "Scalar"], ["", "", "1"]


def attended() -> Operator:
    q = [BATCH, HEADS, SEQ, HIDDEN // HEADS]
    kinds = [BF16, BF16, BF16, "Scalar", "Scalar", "Scalar", ""]
    return (
        "aten::_scaled_dot_product_flash_attention",
        [q, q, q, [], [], [], []],
        kinds,
        ["", "", "", "0.", "True", "False", ""],
    )


def looked_up() -> Operator:
    kinds = [BF16, "long int", "Scalar", "Scalar", "Scalar"]
    return (
        "aten::embedding",
        [[VOCAB, HIDDEN], [BATCH, SEQ], [], [], []],
        kinds,
        ["", "", "-1", "False", "False"],
    )


def transformer() -> list[tuple[str, Operator]]:
    """The forward of a small transformer: modules, and operators in them."""
    found = [("Net_0/Embedding_0", looked_up())]
    for layer in range(LAYERS):
        at = f"Net_0/Block_{layer}"
        square = product(TOKENS, HIDDEN, HIDDEN)
        found += [(f"{at}/Attention_{layer}", square)] * 3
        found += [(f"{at}/Attention_{layer}", attended()), (f"{at}/Attention_{layer}", square)]
        found += [(at, added(BATCH, SEQ, HIDDEN))]
        found += [
            (f"{at}/Mlp_{layer}", product(TOKENS, HIDDEN, WIDE)),
            (f"{at}/Mlp_{layer}", added(TOKENS, WIDE)),
        ]
        found += [(f"{at}/Mlp_{layer}", product(TOKENS, WIDE, HIDDEN)), (at, added(TOKENS, 2 * HIDDEN))]
    return [*found, ("Net_0/Head_0", product(TOKENS, HIDDEN, VOCAB))]


def traced(
    operators: Sequence[tuple[str, Operator]], took_us: Callable[[int], float], *, host_us: float = 30.0
) -> list[Event]:
    """One step: the host launches an operator every *host_us*, the device runs them one after another."""
    found: list[Event] = []
    free = 0.0
    for at, (path, (name, dims, kinds, values)) in enumerate(operators):
        ts = 100 + host_us * at
        names = path.split("/") if path else []
        inner = enumerate(names)
        found += [event("python_function", f"nn.Module: {one}", ts - 9 + i, 25 - 2 * i) for i, one in inner]
        said: dict[str, Any] = {"Input Dims": dims, "Input type": kinds, "Concrete Inputs": values}
        found.append(event("cpu_op", name, ts, 12, **(said if dims else {})))
        found.append(event("cuda_runtime", "cudaLaunchKernel", ts + 3, 4, correlation=at + 1))
        begin = max(free, ts + 10)
        free = begin + took_us(at)
        found.append(
            event(
                "kernel", f"kernel_of_{name}", begin, took_us(at), 7, stream=7, device=0, correlation=at + 1
            )
        )
    step = event("user_annotation", "ProfilerStep#3", 80, max(free - 80, host_us * len(operators) + 20))
    return [step, *found]


def taken(folder: Path, events: Sequence[Event], header: dict[str, Any] | None = None) -> Path:
    source = folder / "trace.json"
    source.write_text(kineto_text(events, {"deviceProperties": [{"name": "NVIDIA H100"}]} | (header or {})))
    ingest([source], folder / "run", explain=True)
    return folder / "run"


def tables_of(run: Path) -> RankTables:
    return read_rank(rehearsal_folder(run), 0)


def predicted_us(run: Path) -> list[float]:
    """Return what the catalogue says of each operator of *run*."""
    tables = tables_of(run)
    compute = ComputeModel(load_cluster("dgx-h100", 1).device, "bf16")
    works = [compute.op_s(op_of(row, compute.device)) * 1e6 for row in tables.works.to_pylist()]
    return [works[item] for item in tables.events["item"].to_pylist()]


def calibrated(run: Path, machine: str = "dgx-h100") -> Calibrated:
    return calibrate_traced(open_run(run), lambda n: load_cluster(machine, n))


def test_operators_are_counted_as_in_a_rehearsal(tmp_path: Path) -> None:
    tables = tables_of(taken(tmp_path, traced(transformer(), lambda _: 20.0)))
    rows = tables.works.to_pylist()
    works, places = [rows[item] for item in tables.events["item"].to_pylist()], tables.places.to_pylist()
    assert len(works) == len(transformer())
    flops = sum(work["flops"] for work in works if work["kind"] == "gemm")
    assert flops == 2 * TOKENS * HIDDEN * (LAYERS * (4 * HIDDEN + 2 * WIDE) + VOCAB)
    scores = next(work for work in works if work["kind"] == "attention")
    assert (scores["m"], scores["k"], scores["batch"], scores["causal"]) == (SEQ, 64, BATCH * HEADS, True)
    first = next(work for work in works if work["name"] == "aten.add")
    assert first["bytes_moved"] == 3 * TOKENS * HIDDEN * 2  # two are read, one is written
    assert [places[at]["name"] for at in tables.events["place"].to_pylist()] == [
        path for path, _ in transformer()
    ]


def test_the_operator_that_torch_does_not_take_apart_is_the_one_that_counts(tmp_path: Path) -> None:
    """A convolution is one operator, whatever library runs it inside; a linear layer is the product in it."""
    kinds = [BF16, BF16, "", *["ScalarList"] * 3, "Scalar", "ScalarList", "Scalar"]
    sizes = [[8, 16, 32, 32], [24, 16, 3, 3], *[[]] * 7]
    values = ["", "", "", "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1"]
    said: dict[str, Any] = {"Input Dims": sizes, "Input type": kinds, "Concrete Inputs": values}
    nested = [
        event("cpu_op", "aten::conv2d", 100, 30),
        event("cpu_op", "aten::convolution", 101, 28, **said),
        event("cpu_op", "aten::_convolution", 102, 26),
        event("cpu_op", "aten::some_library_convolution", 103, 24),
        event("cuda_runtime", "cudaLaunchKernel", 104, 4, correlation=1),
        event("cuda_runtime", "cudaLaunchKernel", 110, 4, correlation=2),
        event("kernel", "a", 120, 5, 7, stream=7, device=0, correlation=1),
        event("kernel", "b", 126, 5, 7, stream=7, device=0, correlation=2),
    ]  # fmt: skip
    run = taken(tmp_path, nested)
    (work,) = tables_of(run).works.to_pylist()
    assert (work["name"], work["kernels"]) == ("aten.convolution", 2)
    assert work["flops"] == 2 * (8 * 16 * 16) * 24 * 16 * 9  # pixels of the result, channels, neighbourhoods
    measured = read_measured(rehearsal_folder(run), 0)
    assert measured is not None
    assert measured["device_ns"].to_pylist() == [11_000]  # both, and the pause of 1 µs between them


@pytest.mark.parametrize("factor", [0.8, 1.0, 1.7])
def test_factors_of_one_step_are_found_again(tmp_path: Path, factor: float) -> None:
    (tmp_path / "first").mkdir()
    us = predicted_us(taken(tmp_path / "first", traced(transformer(), lambda _: 20.0)))
    run = taken(tmp_path, traced(transformer(), lambda at: factor * us[at], host_us=10.0))
    found = calibrated(run)
    products, step = found.calibration.compute["products"], found.errors[0]
    assert products.value == pytest.approx(factor, rel=0.05)
    assert step.after_s == pytest.approx(step.measured_s, rel=0.03)
    assert max(abs(one.off_after) for one in found.operators) < 0.1  # those that were held back
    for part in found.errors[1:]:
        if part.measured_s > 0.05 * step.measured_s:
            assert part.after_s == pytest.approx(part.measured_s, rel=0.2), part.name


def test_a_host_that_launches_slowly_is_told(tmp_path: Path) -> None:
    run = taken(tmp_path, traced(transformer(), lambda _: 3.0, host_us=200.0))
    found = calibrated(run)
    step = found.errors[0]
    assert step.measured_s == pytest.approx(200e-6 * len(transformer()), rel=0.05)
    assert step.after_s == pytest.approx(step.measured_s, rel=0.05)
    # The host is that of the trace before anything is fitted; what else may run there needs its factor.
    assert step.before_s == pytest.approx(step.measured_s, rel=0.05)
    assert found.calibration.compute["launch"].value > 2


def test_the_host_of_a_trace_launches_as_fast_on_any_machine(tmp_path: Path) -> None:
    """Where kernels are short, a step takes what its host needs for them; a faster device changes nothing."""
    run = taken(tmp_path, traced(transformer(), lambda _: 3.0, host_us=200.0))
    step_s = 200e-6 * len(transformer())
    for machine in ("dgx-h100", "mi300x", "dgx-a100"):
        shown = CliRunner().invoke(main, ["simulate", "--like", str(run), "--cluster", machine, "--json"])
        found = json.loads(shown.stdout)
        assert found["step_time_s"] == pytest.approx(step_s, rel=0.1)
        (said,) = (line for line in found["rests_on"] if line.startswith("host: "))
        assert said.endswith("per kernel, as in the trace, on any machine")


def test_operators_that_differ_from_others_of_their_class_are_told(tmp_path: Path) -> None:
    """Half of the shapes take ten times as long: no factor holds for the other half."""
    us = {add: 3.0 * 10**at for at, add in enumerate((HIDDEN, WIDE, 2 * HIDDEN))}
    sizes = [op[1][0][-1] if op[0] == "aten::add" else 0 for _, op in transformer()]
    run = taken(tmp_path, traced(transformer(), lambda at: us.get(sizes[at], 50.0)))
    found = calibrated(run).calibration
    assert any("holds for the shapes of this run only" in said for said in found.not_identified)
    assert "memory" in found.own


@pytest.mark.parametrize(("each_us", "own"), [(60.0, False), (20.0, True)])
def test_a_factor_that_takes_a_device_beyond_its_peak_is_of_its_run_alone(
    tmp_path: Path, each_us: float, own: bool
) -> None:
    """A product of 34 GFLOP takes an H100 35 µs at least."""
    cluster, operators = load_cluster("dgx-h100", 1), [product(2048, 1024 * n, 8192) for n in range(1, 8)]
    run = taken(tmp_path, traced([("", one) for one in operators], lambda at: each_us * (at + 1)))
    (tmp_path / "cal.toml").write_text(calibrated(run).calibration.to_toml())
    found = read_calibration(tmp_path / "cal.toml")
    assert ("products" in found.own) == own
    elsewhere, here = found.applied(cluster), found.applied(cluster, like=found.run)
    assert ("products" in elsewhere.device.factors) == (not own)
    assert "products" in here.device.factors
    assert any(one.startswith("not calibrated: products") for one in elsewhere.calibrated) == own


def test_without_shapes_nothing_is_told(tmp_path: Path) -> None:
    bare: list[tuple[str, Operator]] = [(path, (name, [], [], [])) for path, (name, *_) in transformer()]
    run = taken(tmp_path, traced(bare, lambda _: 20.0))
    assert any("record_shapes=True" in warning for warning in open_run(run).warnings)
    with pytest.raises(CalibrationError, match="record_shapes=True"):
        calibrated(run)


def test_operators_of_unknown_work_take_what_they_took_or_are_too_many(tmp_path: Path) -> None:
    strange: Operator = ("mine::fused", [[TOKENS, HIDDEN]], [BF16], [""])
    some = [*transformer(), ("", strange)]
    run = taken(tmp_path, traced(some, lambda _: 20.0))
    assert next(e for e in calibrated(run).errors if e.name == "operators of unknown work").off_after == 0
    (tmp_path / "many").mkdir()
    run = taken(tmp_path / "many", traced([*some, *[("", strange)] * len(some)], lambda _: 20.0))
    with pytest.raises(CalibrationError, match=r"80 % are needed. Most of the rest: mine.fused [\d.]+ ms"):
        calibrated(run)


def test_the_model_is_told_by_shapes_and_modules(tmp_path: Path) -> None:
    run = open_run(taken(tmp_path, traced(transformer(), lambda _: 20.0)))
    shape: dict[str, Any] = {
        "n_layers": LAYERS,
        "hidden": HIDDEN,
        "n_heads": HEADS,
        "n_kv_heads": HEADS,
        "vocab": VOCAB,
    }
    shape |= {"ffn_hidden": WIDE, "gated": False, "dtype": "bf16", "causal": True, "tied_embeddings": False}
    assert (run.info.model or {}).items() >= shape.items()
    job = run.info.job or {}
    assert (job["input_shape"], job["forwards_per_step"]) == ([BATCH, SEQ], 1)
    told = (run.info.job or {})["explained"]
    assert told["explained"] == 1.0
    assert told["model"]["layers"].startswith("3 (modules of the kind Block")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (lambda path, op: ("", op), "no names of modules"),
        (lambda path, op: (path.replace("Attention", "Mixer"), op), "no module that is repeated"),
        (lambda path, op: (path, added(4, 4) if op[0] == "aten::embedding" else op), "no table of tokens"),
        (lambda path, op: (path, added(4, 4) if "flash" in op[0] else op), "no fused attention"),
    ],
)
def test_a_model_that_is_not_told_is_unknown(tmp_path: Path, changed: Any, why: str) -> None:
    run = open_run(taken(tmp_path, traced([changed(*one) for one in transformer()], lambda _: 20.0)))
    assert "n_layers" not in (run.info.model or {})
    assert ("name" in (run.info.model or {})) == (why != "no names of modules")
    looked_up = 1 if why == "no fused attention" else None  # its tokens are there all the same
    assert (run.info.job or {}).get("forwards_per_step") == looked_up
    assert any(why in said for said in (run.info.job or {})["explained"]["not_told"])


def test_like_a_trace_and_the_same_model_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    us = predicted_us(taken(tmp_path / "first", traced(transformer(), lambda _: 20.0)))
    run = taken(tmp_path, traced(transformer(), lambda at: 1.3 * us[at]))
    file = tmp_path / "cal.toml"
    command = CliRunner().invoke(
        main, ["calibrate", str(run), "--cluster", "dgx-h100", "-o", str(file), "--json"]
    )
    assert command.exit_code == 0, command.output
    like = ["simulate", "--like", str(run), "--json"]
    own = CliRunner().invoke(main, [*like, "--cluster", "dgx-h100", "--calibration", str(file)])
    document = json.loads(own.stdout)
    against = {row["name"]: row for row in document["against"]}
    assert abs(against["step"]["error_after"]) < 0.05
    applied = read_calibration(file).compute
    assert {"fixed", "launch"} < applied.keys()
    rests_on = document["rests_on"]
    unsaid = [
        name for name, one in applied.items() if f"calibrated: {name} x {one.value:.3f}" not in rests_on
    ]
    assert unsaid == ["launch"]  # the host of this very run is taken as it was
    other = json.loads(CliRunner().invoke(main, [*like, "--cluster", "mi300x"]).stdout)
    assert "against" not in other  # nobody measured that
    assert other["peak_memory_bytes"] is None  # a trace does not say what its ranks hold
    trained = CliRunner().invoke(main, [*like, "--cluster", "dgx-h100", "--gpus", "8", "--tp", "2"])
    assert trained.exit_code == 0, trained.output
    document = json.loads(trained.stdout)
    assert document["step_time_s"] > 0
    assert any("marks a backward pass" in warning for warning in document["warnings"])


def simulated(run: Path, *flags: str) -> dict[str, Any]:
    command = CliRunner().invoke(
        main, ["simulate", "--like", str(run), "--cluster", "dgx-h100", *flags, "--json"]
    )
    assert command.exit_code == 0, command.output
    found: dict[str, Any] = json.loads(command.stdout)
    return found


@pytest.mark.parametrize(("times", "ranks", "dp"), [(1, 1, 1), (3, 1, 1), (2, 2, 2), (2, 2, 6)])
def test_the_batch_of_a_trace_is_what_all_its_ranks_look_up(
    tmp_path: Path, times: int, ranks: int, dp: int
) -> None:
    """Tokens of every forward of a step, and of every replica, however many there are."""
    operators = transformer() * times
    events = [*traced(operators, lambda _: 20.0), *(reduced() if ranks > 1 else [])]
    run = taken(tmp_path, events, info(0, ranks) if ranks > 1 else None)
    assert (open_run(run).info.job or {})["forwards_per_step"] == times
    found = simulated(run, *(["--dp", str(dp), "--gpus", str(dp)] if dp > ranks else []))
    assert found["tokens_per_step"] == TOKENS * times * dp
    assert found["rows_per_step"] == BATCH * times * dp
    assert found["tokens_per_s"] == pytest.approx(TOKENS * times * dp / found["step_time_s"])


def test_a_trace_without_tokens_is_advised_what_it_can_follow(tmp_path: Path) -> None:
    run = taken(tmp_path, traced([("", product(2048, 2048, 2048))] * 3, lambda _: 30.0))
    said = simulated(run)["batch"]
    assert "--tokens-per-step" in said
    assert "script" not in said
    assert simulated(run, "--tokens-per-step", "4096")["tokens_per_step"] == 4096


def test_operators_tell_what_their_kernels_reach(tmp_path: Path) -> None:
    """A sum reads two arrays and writes one; the device is known by the name that the file has."""
    source = tmp_path / "trace.json"
    device = {"deviceProperties": [{"name": "NVIDIA H100 80GB HBM3"}]}
    source.write_text(kineto_text(traced([("", added(1024, 1024))] * 3, lambda _: 20.0), device))
    for flags, rate in (((), None), (("--explain",), 3 * 2 * 1024**2 / 20e-6)):
        asked = ["ingest", str(source), "-o", str(tmp_path / f"run{len(flags)}"), *flags]
        assert CliRunner().invoke(main, asked).exit_code == 0
        (row,) = kernels(open_run(asked[3]), copies=False)
        assert row["bytes_per_s"] == (rate and pytest.approx(rate))
        assert row["of_peak"] == (
            rate and pytest.approx(rate / load_cluster("dgx-h100", 1).device.memory_bytes_per_s)
        )
        assert (row["nearest"], row["dtype"]) == (("bytes_per_s", "bf16") if rate else (None, ""))


def test_a_copy_has_what_the_file_says_of_it(tmp_path: Path) -> None:
    as_copy = {"cat": "gpu_memcpy", "name": "Memcpy DtoD (Device -> Device)"}
    events = [
        one | (as_copy if one["cat"] == "kernel" else {})
        for one in traced([("", added(8, 8))] * 2, lambda _: 9.0)
    ]
    (row,) = kernels(open_run(taken(tmp_path, [*events, *reduced()], info(0, 2))), copies=True)
    assert (row["count"], row["dtype"], row["bytes_per_s"]) == (2, "", None)


def test_what_wraps_a_model_is_not_its_name(tmp_path: Path) -> None:
    within = [(f"Wrapper_0/{path}", op) for path, op in transformer()]
    run = taken(tmp_path, traced([("Wrapper_0", added(8, 8)), *within], lambda _: 20.0))
    assert (open_run(run).info.model or {})["name"] == "Net"


@pytest.mark.parametrize(
    ("mark", "told", "missing"),
    [
        ("", None, "neither forward nor backward is marked"),
        ("forward", None, "no backward pass is marked"),
        ("backward", "forward and backward", ""),
    ],
)
def test_passes_are_told_by_marks_alone(tmp_path: Path, mark: str, told: str | None, missing: str) -> None:
    events = traced(transformer(), lambda _: 20.0)
    if mark:
        events.append(event("user_annotation", f"## {mark} ##", 85, 40 * len(transformer())))
    found = (open_run(taken(tmp_path, events)).info.job or {})["explained"]
    assert (told is None) == ("passes" not in found["model"])
    assert found["model"].get("passes", "").startswith(told or "")
    assert any(missing in one for one in found["not_told"] if "passes" in one) == bool(missing)


def test_a_small_copy_takes_as_long_as_its_start(tmp_path: Path) -> None:
    """A scalar that the host reads has a time of its own; of large copies the link decides."""
    events = traced(transformer(), lambda _: 20.0)
    last = max(e["ts"] + e["dur"] for e in events)
    for at, (size, took_us) in enumerate(((4, 2.2), (1 << 28, 5000.0))):
        begin = last + 10_000.0 * at
        events.append(event("cuda_runtime", "cudaMemcpyAsync", begin, 4, correlation=900 + at))
        where = {"stream": 7, "device": 0, "correlation": 900 + at, "bytes": size}
        events.append(event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", begin + 5, took_us, 7, **where))
    events[0] = event("user_annotation", "ProfilerStep#3", 80, last + 20_000)
    run = taken(tmp_path, events)
    assert any(one.startswith("copies to and from the host: 2 µs each") for one in simulated(run)["rests_on"])
    found = calibrated(run)
    copies = next(one for one in found.errors if one.name == "copies to and from the host")
    link_s = (1 << 28) / load_cluster("dgx-h100", 1).device.host_bytes_per_s
    assert copies.before_s == pytest.approx(link_s + 2 * COPY_START_S, rel=1e-6)
    assert copies.after_s == pytest.approx(5000e-6 + COPY_START_S, rel=1e-3)
    assert found.calibration.compute["link"].value == pytest.approx((5000e-6 - COPY_START_S) / link_s)


def reduced() -> list[Event]:
    """An all-reduce of two ranks behind everything else."""
    where = {"device": 0, "stream": 20, "correlation": 800}
    return [
        event("cuda_runtime", "cudaLaunchKernel", 180, 4, correlation=800),
        event("kernel", "ncclDevKernel_AllReduce(x)", 5000, 400, 20, **where, **metadata()),
    ]


def replicas() -> list[Event]:
    """One rank of two replicas: products, then an all-reduce that the next product waits for."""
    events = traced([("", product(2048, 2048, 2048))] * 3, lambda _: 30.0)
    numbers = count(50)
    end = max(e["ts"] + e["dur"] for e in events if e["cat"] == "kernel")
    where = {"device": 0, "stream": 20, "correlation": (n := next(numbers))}
    after = [
        event("cuda_runtime", "cudaLaunchKernel", 180, 4, correlation=n),
        event("kernel", "ncclDevKernel_AllReduce(x)", end, 400, 20, **where, **metadata()),
    ]  # fmt: skip
    return [*events, *after]


def test_one_rank_of_several_cannot_tell_waiting_from_transfer(tmp_path: Path) -> None:
    run = taken(tmp_path, replicas(), info(0, 2))
    assert read_rehearsal(run).layout is not None
    found = calibrated(run)
    assert any("1 of 2 ranks" in said for said in found.calibration.not_identified)
    assert not found.calibration.network  # all of it may be waiting: no other job is to be told by it
    (both,) = (one for one in found.errors if one.name == UNTOLD)
    assert both.before_s == both.after_s == pytest.approx(both.measured_s) == pytest.approx(400e-6)
    like = ["simulate", "--like", str(run), "--cluster", "dgx-h100", "--json"]
    own = json.loads(CliRunner().invoke(main, like).stdout)
    assert any("takes what it took" in one for one in own["rests_on"])
    wider = json.loads(CliRunner().invoke(main, [*like, "--dp", "16", "--gpus", "16"]).stdout)
    assert wider["world_size"] == 16
    assert not any("takes what it took" in one for one in wider["rests_on"])
    assert wider["step_time_s"] < own["step_time_s"] - 300e-6


def test_communication_of_an_unknown_group_takes_what_it_took(tmp_path: Path) -> None:
    """A single rank would have nobody to wait for, and nothing to send."""
    untold = [
        one | {"args": {key: value for key, value in one["args"].items() if not key[0].isupper()}}
        if one["name"].startswith("nccl")
        else one
        for one in replicas()
    ]
    found = calibrated(taken(tmp_path, untold))
    (communication,) = (one for one in found.errors if one.name in {COMMUNICATION_PART, UNTOLD})
    assert communication.after_s == pytest.approx(communication.measured_s) == pytest.approx(400e-6)


def late(events: list[Event], us: float) -> list[Event]:
    """The same, all of it later."""
    return [one | {"ts": one["ts"] + us} for one in events]


@pytest.mark.parametrize("late_us", [0.0, 3000.0])
def test_ranks_wait_for_one_that_begins_later(tmp_path: Path, late_us: float) -> None:
    """Of two ranks with equal work the first waits in the all-reduce as long as the other is late."""
    for rank, ts in enumerate((0.0, late_us)):
        # The one that comes first is in the all-reduce until the other one is done with it, too.
        waits = [
            one | {"dur": one["dur"] + late_us - ts} if one["name"].startswith("nccl") else one
            for one in replicas()
        ]
        text = kineto_text(late(waits, ts), {"deviceProperties": [{"name": "NVIDIA H100"}]} | info(rank, 2))
        (tmp_path / f"rank{rank}.json").write_text(text)
    ingest([tmp_path / f"rank{rank}.json" for rank in (0, 1)], tmp_path / "run", explain=True)
    found = calibrated(tmp_path / "run")
    errors = {one.name: one for one in found.errors}
    assert errors["step"].after_s == pytest.approx(errors["step"].measured_s, rel=0.1)
    for name in (COMMUNICATION_PART, PAUSES) if late_us else (COMMUNICATION_PART,):
        assert errors[name].after_s == pytest.approx(errors[name].measured_s, rel=0.1), name
    assert errors[COMMUNICATION_PART].measured_s == pytest.approx((400 + late_us / 2) * 1e-6, rel=0.01)
    noted = [one for one in simulated(tmp_path / "run")["warnings"] if "apart" in one]
    assert len(noted) == bool(late_us)


def test_ranks_that_never_meet_are_not_late(tmp_path: Path) -> None:
    """Their clocks may have nothing in common."""
    for rank in (0, 1):
        events = late(traced(transformer(), lambda _: 20.0), 1e6 * rank)
        text = kineto_text(events, {"deviceProperties": [{"name": "NVIDIA H100"}]} | info(rank, 2))
        (tmp_path / f"rank{rank}.json").write_text(text)
    ingest([tmp_path / f"rank{rank}.json" for rank in (0, 1)], tmp_path / "run", explain=True)
    facts = read_rehearsal(tmp_path / "run").job["traced"]
    assert [one["late_s"] for one in facts.values()] == [0.0, 0.0]


def test_ranks_that_issued_unlike_counts_of_operators_meet_in_their_communication(tmp_path: Path) -> None:
    """Its number is that within the group, whatever came before it."""
    numbers = []
    for n in (1, 5):
        events = traced([("", product(2048, 2048, 2048))] * n, lambda _: 30.0)
        (tmp_path / str(n)).mkdir()
        found = tables_of(taken(tmp_path / str(n), [*events, *reduced()], info(0, 2))).events
        numbers += [row["number"] for row in found.to_pylist() if WHAT[row["what"]] == "communication"]
    assert numbers == [0, 0]


def test_a_trace_that_is_taken_over_again_leaves_no_operators_of_before(tmp_path: Path) -> None:
    run = taken(tmp_path, traced(transformer(), lambda _: 20.0))
    ingest([tmp_path / "trace.json"], run)
    assert not (run / "rehearsal").exists()


@needs_real
@pytest.mark.parametrize(
    ("file", "machine"),
    [
        ("fresh/h100_eager_qwen1.5_0.5b.json.gz", "dgx-h100"),
        ("fresh/h100_eager_timesformer.json.gz", "dgx-h100"),
        ("fresh/h100_eager_vit_nsfw.json.gz", "dgx-h100"),
        ("fresh/h100_eager_bert_small.json.gz", "dgx-h100"),
        ("tracelens/mi300x8_rank0_resnet_ddp_rccl.json.gz", "mi300x"),
        ("param_dlrm_v100x8/kineto", "dgx1-v100"),
    ],
)
def test_the_loop_closes_on_real_traces(tmp_path: Path, file: str, machine: str) -> None:
    ingest([REAL / file], tmp_path / "run", explain=True)
    step, *parts = calibrated(tmp_path / "run", machine).errors
    assert step.after_s == pytest.approx(step.measured_s, rel=0.1)
    for part in parts:
        if part.measured_s > 0.05 * step.measured_s:
            assert part.after_s == pytest.approx(part.measured_s, rel=0.2), part.name


@pytest.mark.parametrize("machine", ["mi300x", "h100-pcie-8"])
def test_no_machine_with_another_device_is_calibrated(tmp_path: Path, machine: str) -> None:
    run = taken(tmp_path, traced(transformer(), lambda _: 20.0))
    with pytest.raises(CalibrationError, match=f"ran on NVIDIA H100, {machine} has"):
        calibrated(run, machine)


def test_what_a_trace_holds_is_read_back(tmp_path: Path) -> None:
    trace = Trace.read(str(taken(tmp_path, traced(transformer(), lambda _: 20.0))))
    compute = trace.compute_on(load_cluster("dgx-h100", 1))
    parts = trace.measured_parts(compute)
    assert parts["products"] == pytest.approx((6 * LAYERS + 1) * 20e-6, rel=0.01)
    assert parts["attention"] == pytest.approx(LAYERS * 20e-6, rel=0.01)


def named(events: Sequence[Event], vendor: str) -> list[Event]:
    """The same trace from a device whose kernels have other names."""
    return [e | {"name": f"{vendor}_{i}"} if e["cat"] == "kernel" else e for i, e in enumerate(events)]


def compared(tmp_path: Path, ours: Sequence[Event], theirs: Sequence[Event]) -> list[dict[str, Any]]:
    runs = []
    for name, events in (("a", ours), ("b", theirs)):
        (tmp_path / name).mkdir()
        runs.append(str(taken(tmp_path / name, events)))
    found = json.loads(CliRunner().invoke(main, ["compare", *runs, "--json"]).stdout)["operators"]
    shown = CliRunner().invoke(main, ["compare", *runs])
    assert "operator, on the device" in shown.output
    return list(found)


def test_two_devices_are_compared_operator_by_operator(tmp_path: Path) -> None:
    """No kernel has a name in common, and one device takes twice as long for every operator."""
    rows = compared(
        tmp_path,
        named(traced(transformer(), lambda _: 20.0), "cijk"),
        named(traced(transformer(), lambda _: 40.0), "sm90"),
    )
    assert {row["joined_by"] for row in rows} == {"module, operator, shape"}
    assert all(row["b_s"] == pytest.approx(2 * row["a_s"]) for row in rows)
    assert sum(row["a_calls"] for row in rows) == pytest.approx(len(transformer()))
    differences = [abs(row["b_s"] - row["a_s"]) for row in rows]
    assert differences == sorted(differences, reverse=True)


def test_what_only_one_of_two_traces_has_comes_last(tmp_path: Path) -> None:
    more = [*transformer(), ("", ("mine::fused", [[8]], [BF16], [""]))]
    other = [(path.replace("Block", "Layer"), op) for path, op in transformer()]
    rows = compared(tmp_path, traced(more, lambda _: 20.0), traced(other, lambda _: 20.0))
    assert [row["joined_by"] for row in rows].count("") == 1
    assert rows[-1] | {"joined_by": "", "name": "mine.fused", "b_calls": 0} == rows[-1]
    assert {row["joined_by"] for row in rows[:-1]} <= {"module, operator, shape", "operator, shape"}
    for side in ("a", "b"):
        total = sum(row[f"{side}_s"] for row in rows)
        assert total == pytest.approx(20e-6 * len(more if side == "a" else other), rel=0.01)


def test_kernels_of_two_vendors_are_compared_by_their_kind(tmp_path: Path) -> None:
    """Only one of the two says its operators, and no kernel has a name in common."""
    ours = named(traced(transformer(), lambda _: 20.0), "ampere_sgemm")
    bare = [
        one | {"args": {}} if one["cat"] == "cpu_op" else one for one in traced(transformer(), lambda _: 40.0)
    ]
    runs = []
    for name, events in (("a", ours), ("b", named(bare, "Cijk_Ailk"))):
        (tmp_path / name).mkdir()
        runs.append(str(taken(tmp_path / name, events)))
    found = json.loads(CliRunner().invoke(main, ["compare", *runs, "--json"]).stdout)
    (gemm,) = found["kernels"]
    assert (gemm["name"], gemm["a_calls"], gemm["b_calls"]) == (
        "gemm",
        len(transformer()),
        len(transformer()),
    )
    assert gemm["b_s"] == pytest.approx(2 * gemm["a_s"])
    assert not found["operators"]
    assert {row["kind"] for row in found["spans"]["kinds"]} == {"kernel"}  # why devices idle is no work
    assert "operators are not compared" in CliRunner().invoke(main, ["compare", *runs]).output


def test_two_traces_that_say_no_operators_are_compared_by_kernel_and_say_what_would_tell(
    tmp_path: Path,
) -> None:
    bare = [
        one | {"args": {}} if one["cat"] == "cpu_op" else one for one in traced(transformer(), lambda _: 40.0)
    ]
    runs = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        runs.append(str(taken(tmp_path / name, named(bare, "at::native::mine"))))
    shown = CliRunner().invoke(main, ["compare", *runs]).output
    assert "kernel, by its name" in shown
    assert "\nmine_" in shown
    assert "by module, operator and shape with ingest --explain of both" in shown
    assert "pieces of work joined" not in shown


def test_copies_over_the_link_are_joined_whatever_their_size(tmp_path: Path) -> None:
    sides = []
    for size in (1 << 20, 3 << 20):
        events = traced(transformer(), lambda _: 20.0)
        where = {"device": 0, "stream": 7, "correlation": 900, "bytes": size}
        events += [
            event("cuda_runtime", "cudaMemcpyAsync", 200, 4, correlation=900),
            event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 5000, 50, 7, **where),
        ]
        sides.append(events)
    (copies,) = (row for row in compared(tmp_path, *sides) if row["name"] == "copy.to_device")
    assert (copies["a_calls"], copies["b_calls"]) == (1, 1)
    assert copies["joined_by"]
