"""Throughput counts the rows that a step trains on: once, however many passes take them."""

from pathlib import Path

import pytest
from tests.rehearsals import rehearse, rows_and_tokens

from foretrace.simulator.rehearsed.notes import model_flops
from foretrace.tracer.rehearse.data.loaders import AGAIN
from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.traces.batch import batch_in
from foretrace.traces.rehearsal import read_rank, rehearsal_folder

pytest.importorskip("torch")

ROWS, RANKS = 6, 4

SCRIPT = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

dist.init_process_group("nccl")
data = [torch.ones({shape}) for _ in range(200)]
loader, other = DataLoader(data, batch_size=6), DataLoader(data, batch_size=10)
{made}
generator, critic = (DistributedDataParallel(one.cuda()) for one in made())
of_generator, of_critic = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (generator, critic))
batches = iter(loader)
for step in range(3):
{step}
"""
FLAT = "made = lambda: (torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))"
PICTURES = "made = lambda: (torch.nn.Conv2d(3, 3, 1), torch.nn.Conv2d(3, 1, 1))"
WORDS = "made = lambda: (torch.nn.Embedding(9, 4), torch.nn.Embedding(9, 4))"

GAN = """
    real = next(batches).cuda()
    fake = generator(torch.randn_like(real))
    (critic(real).mean() - critic(fake.detach()).mean()).backward()
    of_critic.step()
    critic(fake).mean().backward()
    of_generator.step()
"""
VIEWS = """
    real = next(batches).cuda()
    (critic(real) - critic(real + 1)).sum().backward()
    of_critic.step()
"""
SAMPLED = "    next(iter(other))\n" + VIEWS
GATHERED = """
    for _ in range(2):
        critic(next(batches).cuda()).sum().backward()
    of_critic.step()
"""
PARTS = """
    for part in next(batches).cuda().split(2):
        critic(part).sum().backward()
    of_critic.step()
"""
PAIRS = """
    words = next(batches).long().cuda()
    (critic(words) - critic(words)).sum().backward()
    of_critic.step()
"""


@pytest.mark.parametrize(
    ("data", "step", "rows", "passes"),
    [
        ((FLAT, "8"), GAN, ROWS, 3),
        ((PICTURES, "3, 4, 4"), GAN, ROWS, 3),
        ((PICTURES, "3, 4, 4"), VIEWS, ROWS, 2),
        ((PICTURES, "3, 4, 4"), SAMPLED, ROWS, 2),
        ((PICTURES, "3, 4, 4"), GATHERED, 2 * ROWS, 0),
        ((PICTURES, "3, 4, 4"), PARTS, ROWS, 0),
        ((WORDS, "8"), PAIRS, 2 * ROWS, 0),
    ],
)
def test_rows_are_those_of_the_loader(
    data: tuple[str, str], step: str, rows: int, passes: int, tmp_path: Path
) -> None:
    """Where passes take the same rows; micro-batches have rows of their own, of words every pass counts."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(made=data[0], shape=data[1], step=step.strip("\n")))
    found = rehearse(Asked(command=(str(script),), world_size=RANKS, ranks=(0,)), tmp_path / "run")
    assert rows_and_tokens(found)[0] == rows * RANKS
    assert list(found.notes) == [AGAIN.format(rows=ROWS, n=passes)] * bool(passes)


EVALUATED = """
    critic(next(batches).cuda()).sum().backward()
    of_critic.step()
    with torch.no_grad():
        for few in DataLoader(data[:4], batch_size=2):
            critic.eval()(few.cuda())
    critic.train()
"""


@pytest.mark.parametrize(("shape", "step", "tokens"), [("5, 8", VIEWS, 5), ("8", EVALUATED, 0)])
def test_rows_are_those_of_the_loader_of_passes_that_train(
    shape: str, step: str, tokens: int, tmp_path: Path
) -> None:
    """Also where a row has many places; not those of the loader of an evaluation after the step before."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(made=FLAT, shape=shape, step=step.strip("\n")))
    found = rehearse(Asked(command=(str(script),), world_size=RANKS, ranks=(0,)), tmp_path / "run")
    assert rows_and_tokens(found) == (ROWS * RANKS, ROWS * RANKS * tokens)


TEXTS = """
import torch

model, texts = torch.nn.Embedding(9, 4).cuda(), iter({lengths})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    for _ in range({passes}):
        model(torch.zeros(2, next(texts), dtype=torch.int64).cuda()).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("lengths", "passes", "steps", "tokens"),
    [
        ([3, 9, 5, 7, 13, 3, 8, 8, 8], 3, 1, 2 * (7 + 13 + 3)),
        ([3, 9, 5, 7, 13, 3, 8, 8, 8], 3, 2, (2 * (7 + 13 + 3) + 2 * 3 * 8) / 2),
        ([3, 9, 5], 1, 2, (2 * 9 + 2 * 5) / 2),
        ([3, 9, 5], 1, 1, 2 * 9),
    ],
)
def test_texts_of_several_lengths_count_with_the_tokens_of_each(
    lengths: list[int], passes: int, steps: int, tokens: float, tmp_path: Path
) -> None:
    """Of the steps that are kept, on average, whatever the length of the first text is."""
    script = tmp_path / "train.py"
    script.write_text(TEXTS.format(lengths=lengths, passes=passes))
    asked = Asked(command=(str(script),), world_size=1, ranks=(0,), steps=steps)
    assert rows_and_tokens(rehearse(asked, tmp_path / "run")) == (2 * passes, tokens)


GIVEN = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

class Objective(torch.nn.Module):
    def forward(self, model, batch):
        return model(batch).square().mean()

dist.init_process_group("nccl")
flip, objective = torch.nn.Flatten(), {objective}
model = DistributedDataParallel(torch.nn.Linear(8, 8).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    objective(model, flip(torch.ones(6, 2, 4)).cuda()).backward()
    optimizer.step()
"""


@pytest.mark.parametrize("objective", ["Objective()", "lambda model, batch: model(batch).square().mean()"])
def test_a_model_that_a_loss_is_given_is_the_one_that_trains(objective: str, tmp_path: Path) -> None:
    """A function calls it, or a module without parameters: layout, rows and FLOPs are the same."""
    script = tmp_path / "train.py"
    script.write_text(GIVEN.format(objective=objective))
    found = rehearse(Asked(command=(str(script),), world_size=RANKS, ranks=(0,)), tmp_path / "run")
    assert found.layout is not None
    assert (found.layout.dp, (found.model or {})["n_params"]) == (RANKS, 8 * 8 + 8)
    assert rows_and_tokens(found) == (ROWS * RANKS, 0)
    tables = {0: read_rank(rehearsal_folder(tmp_path / "run"), 0)}
    assert model_flops(found, tables) == RANKS * 2 * 2 * ROWS * 8 * 8


SPECTRA = """
import torch

model = torch.nn.ConvTranspose1d(8, 4, 3).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.ones(6, 8, 16).cuda()).sum().backward()
    optimizer.step()
"""


def test_channels_of_spectra_are_no_tokens(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SPECTRA)
    found = rehearse(Asked(command=(str(script),), world_size=1, ranks=(0,)), tmp_path / "run")
    assert rows_and_tokens(found) == (ROWS, 0)


TWICE = """
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")


class Own(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.module = model

    def forward(self, x):
        return self.module(x)


model = nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for wrap in (Own, nn.parallel.DistributedDataParallel):
    around = wrap(model)
    for _ in range(3 if {steps} else 1):
        model(torch.ones(6, 8).cuda()).sum().backward()
        around(torch.ones(2, 8).cuda()).sum().backward()
        optimizer.step() if {steps} else None
"""


@pytest.mark.parametrize(("steps", "warmup"), [(True, 4), (False, 0)])
def test_a_model_is_one_with_what_is_around_it_and_without(steps: bool, warmup: int, tmp_path: Path) -> None:
    """Rows of both are counted; where no step ends, inputs of two shapes say nothing of one."""
    script = tmp_path / "train.py"
    script.write_text(TWICE.format(steps=steps))
    asked = Asked(command=(str(script),), world_size=RANKS, ranks=(0,), warmup=warmup)
    batch = batch_in(rehearse(asked, tmp_path / "run").job)
    assert batch.rows == ((6 + 2) * RANKS if steps else None)
    assert ("take inputs of 2 x 8 and 6 x 8" in batch.unknown) is not steps
