"""What scripts do to keep their states: collect those of shards, read what they saved, share memory."""

from pathlib import Path

import pytest
from tests.rehearsals import rehearse
from tests.tracer import keeping_states

from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.traces.rehearsal import RankTables, read_rank, rehearsal_folder

torch = pytest.importorskip("torch")


def _rehearsed(folder: Path, how: str, ranks: tuple[int, ...]) -> tuple[list[str], list[RankTables]]:
    """Return what the first of *ranks* printed, and what each of them did."""
    command = (str(keeping_states.__file__), how, str(folder))
    rehearse(Asked(command=command, world_size=2, ranks=ranks, warmup=0, steps=2), folder / "run")
    tables = rehearsal_folder(folder / "run")
    said = (tables / f"rank-{ranks[0]:05d}" / "output.log").read_text().splitlines()
    return said, [read_rank(tables, rank) for rank in ranks]


def test_states_of_parameters_in_other_shards_are_collected(tmp_path: Path) -> None:
    """All ranks gather both moments of the whole flat parameter, though some parameters are in one shard."""
    said, tables = _rehearsed(tmp_path, "collected", (0, 1))
    assert said[-1] == "['0.bias', '0.weight', '1.bias', '1.weight']"
    size = sum((keeping_states.WIDTH * keeping_states.WIDTH + keeping_states.WIDTH, keeping_states.WIDTH + 1))
    size += size % 2  # of two shards of one size
    for table in tables:
        messages, places = table.messages.to_pylist(), table.places.to_pylist()
        found = [
            messages[event["item"]]["kind"]
            for event in table.events.to_pylist()
            if event["what"] == 1
            and places[event["place"]]["step"] == 1
            and messages[event["item"]]["size_bytes"] == 4 * size
        ]
        assert found.count("all_gather") == 1 + 2  # the parameters, and both moments after the step before


@pytest.mark.parametrize(
    ("how", "name"), [("read", r"state\.pt"), ("opened", r"state\.pt"), ("buffer", "a buffer")]
)
def test_what_a_script_has_saved_itself_cannot_be_read(tmp_path: Path, how: str, name: str) -> None:
    """Nothing was written, and that is said, not that there is no such file, nor that it is empty."""
    said = rf"{name}, which it has saved itself.* keep only steps before that \(--warmup 0 --steps 1\)"
    with pytest.raises(RehearsalError, match=said):
        _rehearsed(tmp_path, how, (0,))


@pytest.mark.parametrize("how", ["read", "opened", "buffer"])
def test_steps_before_a_script_reads_what_it_has_saved_are_kept(tmp_path: Path, how: str) -> None:
    """As the line says, also those of a rank that reads what another one would have saved."""
    command = (str(keeping_states.__file__), how, str(tmp_path))
    rehearse(Asked(command=command, world_size=2, ranks=(0, 1), warmup=0, steps=1), tmp_path / "run")
    for rank in (0, 1):
        places = read_rank(rehearsal_folder(tmp_path / "run"), rank).places.to_pylist()
        assert {place["step"] for place in places} == {0}


def test_a_script_that_reads_what_it_saved_before_any_step_is_told_how_to_mark_them(tmp_path: Path) -> None:
    """A loop that updates parameters by its own hand has no step that could be kept."""
    script = tmp_path / "train.py"
    script.write_text(BY_HAND)
    (tmp_path / "state.pt").touch()  # of an earlier run: a copy is written, which the line does not name
    with pytest.raises(RehearsalError, match=r"reads state\.pt, .*saved itself.*call foretrace\.step\(\)"):
        rehearse(Asked(command=(str(script), str(tmp_path / "state.pt")), world_size=1), tmp_path / "run")


BY_HAND = """
import sys, torch

model = torch.nn.Linear(8, 8).cuda()
model(torch.randn(2, 8, device="cuda")).sum().backward()
for one in model.parameters():
    one.data.add_(one.grad, alpha=-0.1)
with open(sys.argv[1], "wb") as file:
    torch.save(model, file)
with open(sys.argv[1], "rb") as file:
    torch.load(file)
"""


def test_memory_that_processes_share_is_memory(tmp_path: Path) -> None:
    """Tensors and modules of the host go there and stay what they are."""
    said, _ = _rehearsed(tmp_path, "shared", (0,))
    assert said[-1] == "1"


def test_weights_that_are_read_from_a_file_are_the_hosts_until_they_are_moved(tmp_path: Path) -> None:
    """As safetensors reads them: a storage that lies over the file, and a tensor over that."""
    said, _ = _rehearsed(tmp_path, "mapped", (0,))
    assert said[-1] == f"['cpu', 'cuda:0'] {keeping_states.WIDTH}"


PRETRAINED = """
import sys, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForCausalLM

dist.init_process_group("nccl")
model = LlamaForCausalLM.from_pretrained(sys.argv[1])
optimizer = torch.optim.AdamW(model.parameters())
model.to("cuda")
tied = model.lm_head.weight is model.model.embed_tokens.weight
sys.stdout.write(f"{tied} {sorted({str(one.device) for one in model.parameters()})}\\n")
parallel = DistributedDataParallel(model, device_ids=[0])
for _ in range(2):
    tokens = torch.randint(0, 99, (2, 16), device="cuda")
    parallel(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_pretrained_model_is_moved_like_any_other(tmp_path: Path) -> None:
    """With its optimizer and its tied weights: all gradients are reduced, and each is stepped."""
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**shape, vocab_size=99, tie_word_embeddings=True)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "train.py").write_text(PRETRAINED)
    command = (str(tmp_path / "train.py"), str(tmp_path / "model"))
    found = rehearse(Asked(command=command, world_size=2, ranks=(0,), warmup=0, steps=2), tmp_path / "run")
    tables = rehearsal_folder(tmp_path / "run")
    said = (tables / "rank-00000" / "output.log").read_text().splitlines()
    assert "True ['cuda:0']" in said
    table = read_rank(tables, 0)
    messages, places = table.messages.to_pylist(), table.places.to_pylist()
    reduced = sum(
        messages[event["item"]]["size_bytes"]
        for event in table.events.to_pylist()
        if event["what"] == 1
        and places[event["place"]]["step"] == 1
        and messages[event["item"]]["kind"] == "all_reduce"
    )
    n_bytes = sum(4 * one.numel() for one in model.parameters())
    assert reduced == n_bytes
    held = found.memory["0"]["bytes"]
    assert held["parameters"] - n_bytes < 512 * len(list(model.parameters()))
    assert held["optimizer"] >= 2 * n_bytes


LOADS = """
import sys

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
path, where, when = sys.argv[1:]
model = torch.nn.Linear(64, 64, bias=False)
if when == "moved":
    model.cuda()
states = torch.load(path, map_location=eval(where))
print(states["weight"].device, torch.cuda.memory_allocated())
model.load_state_dict(states)
model.cuda()
print(torch.cuda.max_memory_allocated())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.randn(2, 64).cuda()).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    "mapped",
    [
        ("'cpu'", "both"),
        ("torch.device('cpu')", "both"),
        ("lambda storage, location: storage", "both"),
        ("lambda storage, location: torch.serialization.default_restore_location(storage, 'cpu')", "both"),
        ("{'cuda:0': 'cpu'}", "both"),
        ("'cuda'", "none"),
        ("lambda storage, location: storage.cuda(0)", "none"),
        ("{'cpu': 'cuda:0'}", "none"),
        ("None", "cpu"),
        ("{'cuda:1': 'cuda:0'}", "cpu"),
        ("lambda storage, location: None", "cpu"),
    ],
)
@pytest.mark.parametrize(("saved", "when"), [("cpu", "not yet"), ("cuda:0", "moved")])
def test_weights_of_a_real_run_are_loaded_where_it_had_them_or_the_script_maps_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mapped: tuple[str, str], saved: str, when: str
) -> None:
    """The device holds the model, once it is there, and states only if they were or are mapped there."""
    where, host = mapped
    is_host = host in {"both", saved}
    script, weights = tmp_path / "train.py", tmp_path / "weights.pt"
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: saved)
    torch.save(torch.nn.Linear(64, 64, bias=False).state_dict(), weights)
    script.write_text(LOADS)
    command = (str(script), str(weights), where, when)
    rehearse(Asked(command=command, world_size=2, ranks=(0,)), tmp_path / "run")
    log = rehearsal_folder(tmp_path / "run") / "rank-00000" / "output.log"
    first, peak = log.read_text().splitlines()[:2]
    size, states = 64 * 64 * 4, 0 if is_host else 64 * 64 * 4
    model = size if when == "moved" else 0
    assert first.split() == ["cpu" if is_host else "cuda:0", str(model + states)]
    assert int(peak) == size + states
