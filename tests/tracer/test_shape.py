"""What a recording notes of a model is what the model is, however it is wrapped or called."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import foretrace
from tracer.shape import describe_model, untimed
from traces.model_parts import joined_models
from traces.store import open_run

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
