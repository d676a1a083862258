"""Tokens are counted where a table looks up all of a row, of each text that a step trains on, and once."""

from pathlib import Path

import pytest
from tests.rehearsals import rehearse, rows_and_tokens

from foretrace.tracer.rehearse.data.learning import LENGTHS, MODELS
from foretrace.tracer.rehearse.data.loaders import FRAMES, NO_TOKENS, SAMPLES, SEVERAL
from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.traces.batch import batch_in

pytest.importorskip("torch")

ROWS, RANKS = 4, 2

SCRIPT = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

class Words(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.other = torch.nn.Embedding(50, 8), torch.nn.Embedding(50, 8)
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, {arguments}):
        return self.layer({found})

class Loss(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, texts):
        return sum(self.model(**text).square().mean() for text in texts)

wrapped = lambda model: DistributedDataParallel(model.cuda(), find_unused_parameters=True)
dist.init_process_group("nccl")
data = [torch.arange(i, i + 60) % 50 for i in range(100)]
make = lambda samples: samples
loader = DataLoader(data, batch_size=4)
model, second = wrapped(Words()), wrapped(Words())
{made}
optimizer = torch.optim.SGD([*model.parameters(), *second.parameters()], lr=0.1)
for step, batch in zip(range(3), loader):
    batch = batch.cuda() if hasattr(batch, "cuda") else batch
{step}
    optimizer.step()
"""
PLAIN = ("ids", "self.table(ids)")
BOTH = ("source, target", "self.table(source).mean(1) + self.table(target).mean(1)")
TABLES = ("ids, kinds", "self.table(ids) + self.other(kinds)")
KINDS = ("ids, kinds", "self.table(ids) + self.other(ids) + self.table(kinds)")
INTO = ("ids, kinds", "self.table(ids).add_(self.table(kinds))")
INNER = ("ids", "self.table(ids).mean(1) + self.table(ids[:, :7].flip(0)).mean(1)")
SLICED = ("ids", "self.table(ids[:, 12:24])")
COLUMNS = ("ids", "sum(self.table(ids[:, i]) for i in range(60))")
NUMBERS = ("ids", "ids.float()[:, :8] + self.table.weight[0]")
NAMED = ("labels, ids", "self.table(ids).mean(1) + labels.float().mean()")
PICTURES = ("pictures, ids", "self.table(ids).mean(1) + pictures.mean()")
FRACTIONS = ("frames", "frames")
GIVEN = "    model({}).sum().backward()"


@pytest.mark.parametrize(
    ("words", "made", "step", "tokens", "note"),
    [
        (PLAIN, "", GIVEN.format("batch"), 60, ""),
        (BOTH, "", GIVEN.format("batch[:, :40], batch[:, 40:]"), 60, ""),
        (TABLES, "", GIVEN.format("batch, torch.zeros_like(batch)"), 60, ""),
        (KINDS, "", GIVEN.format("batch, torch.zeros_like(batch)"), 60, ""),
        (INTO, "", GIVEN.format("batch, torch.zeros_like(batch)"), 60, ""),
        (SLICED, "", GIVEN.format("batch"), 12, ""),
        (COLUMNS, "", GIVEN.format("batch"), 0, ""),
        (NUMBERS, "", GIVEN.format("batch"), 0, NO_TOKENS),
        (NAMED, "", GIVEN.format("batch[:, :9], batch[:, 9:]"), 51, ""),
        (NAMED, "", GIVEN.format("labels=batch[:, :9], ids=batch[:, 9:]"), 51, ""),
        (PICTURES, "", GIVEN.format("torch.ones(4, 3, 8, 8).cuda(), batch"), 0, ""),
        (INNER, "", GIVEN.format("batch"), 60, LENGTHS.format(beside=7, counted=60)),
        (FRACTIONS, "", GIVEN.format("torch.ones(4, 9, 8).cuda()"), 9, FRAMES.format(n=9, width=8)),
        (FRACTIONS, "", GIVEN.format("torch.ones(3, 9, 8).cuda()"), 0, ""),
        (
            PLAIN,
            "",
            "    (model(batch[:, :20]).mean() + second(batch[:, 20:]).mean()).backward()",
            60,
            MODELS.format(n=2, tokens="80, 160"),
        ),
        (PLAIN, "", "    (model(batch) - second(batch)).sum().backward()", 60, ""),
        (
            PLAIN,
            "second.requires_grad_(False)",
            "    (model(batch) - second(batch + 0)).sum().backward()",
            60,
            "",
        ),
        (
            PLAIN,
            "loss = Loss(model)",
            "    loss([{'ids': batch[:, :20]}, {'ids': batch[:, 20:50]}, {'ids': batch[:, 50:]}]).backward()",
            60,
            "",
        ),
    ],
)
def test_tokens_are_what_is_looked_up(  # noqa: PLR0917 - a table
    words: tuple[str, str], made: str, step: str, tokens: int, note: str, tmp_path: Path
) -> None:
    """*tokens* of a row: of a pair, a part or a whole, but none of columns, numbers, or beside pictures."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(arguments=words[0], found=words[1], made=made, step=step))
    found = rehearse(Asked(command=(str(script),), world_size=RANKS, ranks=(0,)), tmp_path / "run")
    assert rows_and_tokens(found)[1] == ROWS * tokens * RANKS
    mine = [one for one in found.notes if "throughput" in one or "tokens" in one]
    assert mine == [note] * bool(note)


PACKED = "loader = DataLoader([text[:16] for text in data], batch_size=4, collate_fn=torch.cat)"
VIEWS = "loader = DataLoader([torch.arange(8.0) + i for i in range(100)], batch_size=4)"
NODES = (
    "loader = DataLoader([torch.ones(2 + i % 3, 8) for i in range(99)], batch_size=4, collate_fn=torch.cat)"
)
PAIRED = VIEWS + "\nother = iter(DataLoader([torch.arange(8.0) for _ in range(100)], batch_size=3))"
UNEVEN = VIEWS + "\nloader = [batch[: 4 - i] for i, batch in zip(range(9), loader)]"
LAYER = ("rows", "rows")
TWICE = """
    model(torch.cat([batch, batch])).sum().backward()
    model(torch.cat([batch] * 4)).sum().backward()"""
SUMMED = """
    for rows in (batch, batch[:1]):
        model(rows).sum().backward()"""


@pytest.mark.parametrize(
    ("words", "made", "step", "expected", "note"),
    [
        (PLAIN, PACKED, GIVEN.format("batch"), (4, 64), ""),
        (LAYER, VIEWS, TWICE, (4, 0), SAMPLES.format(rows=24, n=4)),
        (LAYER, NODES, GIVEN.format("batch"), (4, 0), "*"),
        (
            LAYER,
            PAIRED,
            GIVEN.format("torch.cat([batch, next(other).cuda(), batch])"),
            None,
            SEVERAL.format(n="4 and 3", rows=11),
        ),
        (LAYER, UNEVEN, SUMMED, (4, 0), ""),
    ],
)
def test_rows_are_the_samples_of_the_loader(  # noqa: PLR0917 - a table
    words: tuple[str, str], made: str, step: str, expected: tuple[int, int] | None, note: str, tmp_path: Path
) -> None:
    """Of texts one behind the other, of views, and of nodes; batches of several sizes count as they are."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(arguments=words[0], found=words[1], made=made, step=step))
    found = rehearse(Asked(command=(str(script),), world_size=RANKS, ranks=(0,)), tmp_path / "run")
    if expected is None:
        assert batch_in(found.job).unknown == note
        return
    assert rows_and_tokens(found) == (expected[0] * RANKS, expected[1] * RANKS)
    mine = [one for one in found.notes if "throughput" in one]
    assert len(mine) == bool(note)
    assert note in {"*", *mine, ""}
