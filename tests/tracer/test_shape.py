"""What a recording notes of a model is what the model is, however it is wrapped or called."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import foretrace
from foretrace.tracer import internals, shape
from foretrace.tracer.parallelism import data_parallel
from foretrace.tracer.shape import describe_model, find_blocks, untimed
from foretrace.traces.info import joined_models
from foretrace.traces.store import open_run

torch = pytest.importorskip("torch")
nn = torch.nn
Module: Any = nn.Module


class Layer(Module):  # type: ignore[misc]  # torch is untyped here
    """A layer with a number that no parameter tells."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.n_heads = 4
        self.up = nn.Linear(width, 2 * width)

    def forward(self, x: Any) -> Any:
        return x + self.up(x)[..., : x.shape[-1]]


class Net(Module):  # type: ignore[misc]  # torch is untyped here
    """Embedding, layers, head, called with keywords as Hugging Face models are."""

    def __init__(self, width: int = 8, n_layers: int = 3) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            to_dict=lambda: {"model_type": "llama", "hidden_size": width, "nested": {}}
        )
        self.embed = nn.Embedding(32, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(n_layers))
        self.head = nn.Linear(width, 32, bias=False)

    def forward(self, *, tokens: Any) -> Any:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_equal_layers_share_an_entry() -> None:
    """Shapes, numbers and layers of each path; plain values of the configuration."""
    found = describe_model(Net())
    assert found["structure"]["layers.*.up"]["shapes"] == {"weight": [16, 8], "bias": [16]}
    assert found["structure"]["layers.*.up"]["layers"] == [0, 1, 2]
    assert found["structure"]["layers.*"]["numbers"] == {"n_heads": 4}
    assert found["config"] == {"model_type": "llama", "hidden_size": 8}
    assert (found["dtype"], found["n_params"]) == ("fp32", 32 * 8 * 2 + 3 * (16 * 8 + 16))


def test_layers_that_differ_have_entries_of_their_own() -> None:
    """A wider layer among others."""
    model = Net()
    model.layers[1].up = nn.Linear(8, 24)
    structure = describe_model(model)["structure"]
    assert structure["layers.*.up"]["layers"] == [0, 2]
    assert structure["layers.*.up (2)"]["layers"] == [1]


def test_stages_of_a_pipeline_make_up_the_model() -> None:
    """Parts join to the whole; the part of another replica adds nothing."""
    whole, first, last = describe_model(Net()), Net(), Net()
    del first.layers[2], first.head
    last.layers = nn.ModuleDict({"2": last.layers[2]})
    del last.embed
    parts = [describe_model(part) for part in (first, last)]
    joined = joined_models([parts[0], parts[1], parts[0]])
    assert joined is not None
    assert joined["structure"] == whole["structure"]
    assert joined["n_params"] == whole["n_params"]


class DistributedDataParallel(Module):  # type: ignore[misc]  # torch is untyped here
    """A wrapper of this name."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module, self.process_group = module, "group"


class OptimizedModule(Module):  # type: ignore[misc]  # torch is untyped here
    """What ``torch.compile`` makes, whose import warns."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self._orig_mod = module


def test_a_compiled_model_is_described_as_it_was() -> None:
    """Whatever was wrapped first."""
    plain, names = describe_model(Net()), {block.name for block in find_blocks(Net()).values()}
    for wrap in (
        OptimizedModule,
        lambda net: OptimizedModule(DistributedDataParallel(net)),
        lambda net: DistributedDataParallel(OptimizedModule(net)),
    ):
        model = wrap(Net())
        assert describe_model(model) == plain
        assert {block.name for block in find_blocks(model).values()} == names
        if wrap is not OptimizedModule:
            assert data_parallel(model) == ({"sharding": "ddp"}, ["group"])


def test_stages_may_count_their_layers_from_0(tmp_path: Path) -> None:
    """Equal ones are different layers of the whole; replicas of a stage are not."""
    whole, ends = describe_model(Net(n_layers=4)), [Net(n_layers=1), Net(n_layers=1)]
    del ends[0].head, ends[1].embed
    middle = [nn.ModuleDict({"layers": nn.ModuleList([Layer(8)])}) for _ in range(2)]
    stages = [ends[0], *middle, ends[1]]
    parts = [describe_model(part) | {"stages": [at]} for at, part in enumerate(stages)]
    ranks = [joined_models([parts[0], parts[3]]), joined_models(parts[1:3])]  # as of a V
    for joined in (joined_models([*ranks, *ranks]), joined_models([*parts, *parts])):
        assert joined is not None
        assert joined["n_params"] == whole["n_params"]
        assert sorted(joined["structure"]["layers.*.up"]["layers"]) == [0, 1, 2, 3]
        assert joined["stages"] == [0, 1, 2, 3]


@pytest.mark.parametrize("way", [1, 2])
def test_the_precision_of_products_is_what_fsdp_was_told(way: int) -> None:
    """The first tells it to its wrapper, the second to what it makes of a module; parts may be told alone."""
    if way == 1:
        told = type(internals.FSDP1, (nn.Linear,), {})(2, 2)
        told.mixed_precision = SimpleNamespace(param_dtype=torch.bfloat16)
    else:
        told = nn.Linear(2, 2)
        policy = SimpleNamespace(param_dtype=torch.bfloat16)
        told._get_fsdp_state = lambda: SimpleNamespace(_mp_policy=policy)
    assert shape._dtype(nn.Sequential(nn.Linear(2, 2), told)) == "bf16"
    assert shape._dtype(nn.Sequential(nn.Linear(2, 2))) == "fp32"


def test_inputs_that_are_given_by_name_are_noted(tmp_path: Path) -> None:
    """The first call says how many sequences of how many tokens."""
    with foretrace.record(tmp_path / "run"):
        model = Net()
        for _ in range(2):
            model(tokens=torch.zeros(2, 5, dtype=torch.long)).sum().backward()
    info = open_run(tmp_path / "run").info
    assert info.job is not None
    assert info.job["input_shape"] == [2, 5]
    assert info.model is not None
    assert info.model["structure"]["embed"]["shapes"] == {"weight": [32, 8]}
    assert info.cluster is not None
    assert info.cluster["device"]["kind"] in {"cpu", "gpu"}


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        ([], ""),
        (["cpu", "cuda:1"], ""),  # some of it offloaded
        (["cuda:1", "cuda:1"], ""),
        (["cuda:1", "cuda:0"], "one process computes on 2 GPUs: its computation is timed on cuda:0 only"),
        (["xpu:0"], "the model is on xpu: times are those of the host, which only issues its work"),
    ],
)
def test_what_is_not_timed_where_it_runs_is_said(devices: list[str], said: str) -> None:
    parameters = [SimpleNamespace(device=torch.device(device)) for device in devices]
    assert untimed(SimpleNamespace(parameters=lambda: parameters)) == said
