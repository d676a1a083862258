"""Damaged inputs and absurd flags, made from a seed: whatever they are, one line and status 2, or an answer.

``make fuzz`` tries 10,000 in two processes; a part runs in the suite (``test_fuzzing.py``). One case again:
``python -m tests.fuzzing --only 4711``. What can go wrong is a ``Fault``: a traceback, an error of several
lines, more than ``MOST_S`` or ``MOST_BYTES``, ``--json`` that is no JSON, a figure that changed in silence.
"""

from __future__ import annotations

import argparse
import atexit
import copy
import gzip
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import click
from click.testing import CliRunner, Result
from tests.simulator.config_files import BESIDE, CALCULON_MODEL, FILES, SIMUMAX_MODEL
from tests.simulator.rehearsal_tables import GROUPS, tables
from tests.simulator.rehearsal_tables import run as rehearse
from tests.tracer.test_ingest_tools import WRITERS

from foretrace import cli
from foretrace.simulator.config import job_from
from foretrace.simulator.simulate import simulate
from foretrace.simulator.what_if.planner import DEFAULTS, NAMES, Planner
from foretrace.traces.export import export
from foretrace.traces.serving.server import Query
from foretrace.traces.store import SpanWriter, open_run, write_info

CORPUS: Final = Path(__file__).parent / "corpus"
MOST_S: float = 10
MOST_BYTES = 2 << 30

JOB: Final = "--model gpt2 --cluster dgx-h100 --gpus 8 --global-batch 8 --seq-len 64"
SMALL: Final = JOB.replace("gpt2", f"{CORPUS}/shape.model.toml").replace(" --gpus 8", "")
MACHINE: Final = "--cluster dgx-h100 --gpus 8 --global-batch 32"
OTHERS: Final = ("astra", "calculon", "primus", "simumax")
"""Tools of which no file is in the corpus: their examples are those of other tests."""

BESIDE_FLAGS: Final = {
    tool: " ".join(f"--{name.replace('_', '-')} {value}" for name, value in beside.items())
    for tool, beside in BESIDE.items()
}

TAKEN: Final = "ingest {} -o taken --json && analyze taken --json"
READERS: Final[dict[str, tuple[str, ...]]] = {
    "dump_rank": (TAKEN, "analyze {} --json"),
    "kineto.trace.json": (TAKEN, TAKEN.replace(" -o", " --explain -o")),
    ".trace": (TAKEN, f"{TAKEN} && report taken -o page.html"),
    **{FILES[tool][0]: (f"config {{}} --cluster dgx-h100 {BESIDE_FLAGS[tool]} --json",) for tool in OTHERS},
    "simumax-model": ("config {made}/strategy.json {} --cluster dgx-h100 --json",),
    "calculon-model": ("config {made}/execution.json {} --cluster dgx-h100 --json",),
    ".sh": ("config {} --cluster dgx-h100 --json", "simulate {} --cluster dgx-h100 --json"),
    ".config": (
        *(f"memory --model {{}} {MACHINE} --json", f"config {{}} {MACHINE} --json"),
        "model show {} --json",
    ),
    ".model": (f"simulate {JOB.replace('gpt2', '{}')} --json", "model check {} 20.5M --json"),
    ".run": ("simulate {} --json", "memory {} --json", "config {} --json"),
    ".cluster": (
        *("topology check {} --json", "topology show {} --json", "topology cost {} all_reduce 1MB"),
        *("topology draw {}", "simulate --model gpt2 --cluster {} --global-batch 128 --seq-len 64 --json"),
    ),
    ".wiring": (
        "topology read {} -o mine.toml --device h100-sxm --json && topology check mine.toml --json",
        "topology read {} -o mine.toml",
    ),
    ".schedule": (f"simulate {JOB} --pp 2 --dp 4 --global-batch 16 --schedule {{}} --json",),
    ".placement": (f"simulate {JOB} --placement {{}} --json",),
    ".calibration": (f"simulate {JOB} --calibration {{}} --json",),
    "collectives": ("validate collectives {} --json",),
    "kernels": ("validate kernels {} --json",),
    "memory": ("validate memory {} --json",),
    "fits": ("validate fit {} --json",),
    "steps": ("validate steps {} --json", f"simulate {JOB} --measured {{}} --json"),
    "": (f"config {{}} --model gpt2 {MACHINE} --json", f"simulate {{}} --model gpt2 {MACHINE} --json"),
}
"""Verbs that read a file, by what is in its name; the first that fits counts."""

REFUSED: Final = {
    *("bomb.yaml", "merged.yaml", "self.yaml", "infinite.ds.json", "huge.ds.json", "layers.config.json"),
    *("kind.config.json", "memo.trace.pkl"),
}
"""What is in the corpus because it was heavy once; all else is whole until it is damaged."""

OF_RUNS: Final = (
    *("analyze {} --json", "analyze {} --json", "analyze {} --json --partial", "compare {} {} --json"),
    *("compare {} {run} --json", "compare {run} {} --json --partial"),
    *("report {} -o page.html", "report {} -o  ", "report {} {} -o two.html"),
    *(f"export {{}} -o {name}" for name in ("s.csv.gz", "t.json", "t.pftrace", "t.et.zip", "t.parquet")),
    "export {} -o t.pt.trace.json",
    *(
        "goodput {} --tokens 1B --tokens-per-step 512 --json",
        "simulate --like {} --model gpt2 --cluster dgx-h100 --json",
    ),
    "calibrate {} --model gpt2 --cluster dgx-h100 -o cal.toml --json",
)
"""Verbs that read a run."""

OF_REHEARSALS: Final = (
    "simulate --rehearsal {} --cluster dgx-h100 --json",
    "simulate --rehearsal {} --cluster dgx-h100 -o timed",
)

BASES: Final[dict[str, str]] = {
    **dict.fromkeys(("simulate", "memory"), JOB),
    **dict.fromkeys(("search", "advise"), f"{SMALL} --gpus 2"),
    "bubble": "--stages 4 --micro-batches 8",
    **dict.fromkeys(("analyze", "report", "calibrate"), "{run}"),
    "goodput": "{run} --tokens 1B --tokens-per-step 4096",
    "compare": "{run} {run}",
    "export": "{run} -o spans.csv",
    "config": f"{{corpus}}/ds.json --model gpt2 {MACHINE}",
    "ingest": "{corpus}/kineto.trace.json -o taken",
    "topology show": "dgx-h100",
    "topology cost": "dgx-h100 all_reduce 1MB",
    "topology draw": "dgx-h100 --gpus 8",
    "topology list": "",
    "topology check": "{corpus}/small.cluster.toml",
    "topology read": "{corpus}/nccl.wiring.xml",
    **{
        f"validate {name}": f"{{corpus}}/{name}.table.csv"
        for name in ("kernels", "collectives", "memory", "steps")
    },
    "validate fit": "{corpus}/fits.table.csv",
    "model list": "",
    "model show": "gpt2",
    "model check": "gpt2 124M",
}
"""Arguments of the verbs whose flags are drawn, which are then run; those of ``PARSED`` are only parsed."""

PARSED: Final = (
    *("record", "rehearse", "serve", "bench kernels", "bench collectives", "bench clock", "topology detect"),
)
OF_OTHER_WORK: Final = ("--open", "--workers", "--html")
"""Flags that start processes or browsers, and those that write where the user says."""

NUMBERS: Final = (
    *("0", "1", "2", "3", "7", "8", "64", "-1", "1e400", "nan", "inf", "-inf", "1e308", "0.5", "2147483647"),
    *("2147483648", "9223372036854775807", "9223372036854775808", "1" + "0" * 23, "1" + "0" * 400, "1e-320"),
    *("\N{ARABIC-INDIC DIGIT THREE}", "\N{SUPERSCRIPT TWO}", "9" * 5000, "1_000", "0x10", "-0", "+1"),
    *("1e3", "1,5", "1.", "-1e-9"),
)
WORDS: Final = (
    *("", " ", "none", "full", "fsdp", "zb-v", "é", "\udcff", "a" * 5000, "../..", "/dev/zero", "/"),
    *(":", "3:1.5", "[1]", "[[1]]", "0,1", "{", "<b>", "1e400", "null", "auto", "%s", "x=[1]"),
    *("~", "[]", "{}", "true", "1979-05-27", "07:32:00", "!!binary aGk=", "*a", "&a", "@", "\x1b[31m"),
)
WELL_SAID: Final = (
    *(
        "0-3",
        "0,7",
        "3:1.5",
        "2 h",
        "90 s",
        "$2.50",
        "16 GiB",
        "10 GB/s",
        "1B",
        "tp=2",
        "0:2,50:52",
        "zipf:0.5",
    ),
    *(
        "2026-01-01",
        "400 gCO2/kWh",
        "nodes=2",
        "1e-5 per hour",
        "4,8,16",
        "step 3: links 0.5",
        "8x",
        "dp:0.5@2-3",
    ),
)
"""What some flags take; changed by a letter, it is nearly right."""

VALUES: Final[tuple[Any, ...]] = (
    *(None, True, -1, 0, 1, 0.5, 1e308, 10**23, 10**400, 2**63, -(2**63), "", "7", "\ud800", [], {}, [[]]),
    *([1, "a"], {"a": {}}, float("nan"), float("inf"), "a" * 5000, [2**80], "[0, 1, ...]", [-1], [None]),
    *(-0.0, 1e-320, 2**31, -7, 3, "1e400", "\0", "/dev/zero", {"": 0}, [0] * 5000, [[[]]] * 3, [{}], [True]),
    *({"0": 1}, {"-1": []}, [1.5, 2], ["a"], [[1, 2]], json.loads("[" * 90 + "]" * 90)),
)
GZIPPED: Final = b"\x1f\x8b"
PARTS: Final = (b"[", b"{", b'{"a":', b"(", b"\xff", b"\0", b'"', b"\n", b"<!--")


MISPLACED: Final = ("endless", "pipe", "folder", "device", "link to itself")
"""What may be in place of a file that is read."""

OUTPUTS: Final = (
    *(
        "",
        ".",
        "/",
        "/dev/null",
        "/dev/full",
        "/proc/made",
        "made/deep/in",
        "made/",
        "a" * 300,
        "é\udcff.html",
    ),
    *("run", "file", "link", "nowhere", "-", "made.csv", "made.json"),
)
"""What may be written to: in the folder of a case are a file, and links to it and to nothing."""

COMPILED: Final = {"model": "gpt2", "cluster": "dgx-h100", "gpus": 1, "global_batch": 1, "seq_len": 64}
NOT_FIGURES: Final = {"run", "warnings", "evidence", "failure", "mismatches"}
"""What differs between two places, and what the notes of ranks that died say, which have no checksums."""


class Case(NamedTuple):
    """One command: the run that it reads, damaged; whether its flags are only taken apart."""

    words: list[str]
    run: str = ""
    parses: bool = False


class Fault(NamedTuple):
    """What went wrong with a case."""

    number: int
    words: list[str]
    what: str


class Hang(BaseException):
    """The time of a case is over."""


def _folder() -> Path:
    """Return a folder that goes with this process."""
    folder = tempfile.mkdtemp(prefix="foretrace-fuzz-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@cache
def run_folder() -> Path:
    """Return a folder of small runs of one training: simulated, recorded, killed, rehearsed."""
    folder = _folder()
    settings = {"model": "gpt2", "cluster": "dgx-h100", "gpus": 4, "pp": 2, "global_batch": 8, "seq_len": 64}
    run = open_run(simulate(job_from({**settings, "steps": 6})).write(folder / "simulated"))
    layered = {"layers": [0, 1]}
    structure = {
        "wte": {"kind": "Embedding", "shapes": {"weight": [50257, 768]}},
        "h.*.attn": {
            "kind": "A",
            "shapes": {"qkv.weight": [2304, 768]},
            "numbers": {"n_head": 12},
            **layered,
        },
        "h.*.mlp.up": {"kind": "Linear", "shapes": {"weight": [3072, 768]}, **layered},
    }
    about = replace(
        run.info,
        origin="recorded",
        representatives=None,
        job={"input_shape": [1, 64], "n_microbatches": 4, "sharding": "ddp", "recorded_ranks": [0, 2]},
        summary={},
        model={"name": "m", "n_params": 10**8, "structure": structure, "stages": [0]},
        cluster={"device": {"name": "NVIDIA H100", "kind": "gpu"}, "gpus_per_node": 8},
    )
    for name in ("recorded", "killed"):
        for rank in run.stored_ranks:
            writer = SpanWriter(folder / name, rank)
            spans = run.spans([rank])
            for first in range(0, len(spans), 600):
                writer.append_table(spans.slice(first, 600))
            write_info(folder / name, replace(about, finished=name == "recorded"), rank)
            if name == "recorded":
                writer.close()
            else:
                _leave(folder / name / "ranks", rank)
    write_info(folder / "recorded", about)
    rehearse(folder / "rehearsed", {0: tables([("op", 0, 0, -1), ("communication", 0, 0, 3)])}, [GROUPS[1]])
    return folder


@cache
def made_folder() -> Path:
    """Return a folder of what is not in the corpus: archives, traces in bytes, files of other tools."""
    folder = _folder()
    for name, write in WRITERS.items():
        path = write(folder)
        path.rename(folder / f"{name}.trace{''.join(path.suffixes)}")
    for name, text in (FILES[tool] for tool in OTHERS):
        (folder / name).write_text(text)
    for name, model in (("simumax-model.json", SIMUMAX_MODEL), ("calculon-model.json", CALCULON_MODEL)):
        (folder / name).write_text(json.dumps(model))
    for name in ("all.trace.et.zip", "kineto.pt.trace.json.gz"):
        export(open_run(run_folder() / "simulated"), folder / name)
    return folder


def _leave(folder: Path, rank: int) -> None:
    """Write what a rank leaves that was killed in a collective."""
    row = {"n": 1, "issued_ns": 5, "start_ns": 5, "kind": "all_reduce", "axis": "dp", "dtype": "bf16"}
    row |= {"group": 0, "sequence": 3, "peer": -1, "size_bytes": 64, "step": 1}
    pending = {"rank": rank, "t_ns": 9, "step": 1, "collectives": {"0": 4}, "transfers": [[0, 0, 2, 1]]}
    said = {
        "pending.json": json.dumps({**pending, "pending": [row], "stack": ["a:1"]}),
        "issued.jsonl": f"{json.dumps(row)}\n{json.dumps({**row, 'n': 2})}\n",
        "ended.json": '{"status": -9, "signals_sent": [15]}',
    }
    for name, text in said.items():
        (folder / f"rank-{rank:05d}.{name}").write_text(text)


def case(number: int, seed: int, folder: Path) -> Case:
    """Return case *number*; its file is written below *folder*."""
    luck = random.Random(f"{seed}:{number}")
    kind = luck.random()
    if kind < 0.25:
        return flags(luck)
    if kind < 0.5:
        return of_run(luck, folder)
    if kind < 0.55:
        return asked(luck)
    source = luck.choice([*sorted(CORPUS.iterdir()), *sorted(made_folder().iterdir())])
    path = folder / source.name
    path.write_bytes(damaged(source.read_bytes(), luck))
    if luck.random() < 0.05:
        misplace(path, luck.choice(MISPLACED))
    return Case(elsewhere(words_of(luck.choice(readers(source)), path), luck))


def elsewhere(words: list[str], luck: random.Random) -> list[str]:
    """Return *words*, of which the output is now and then another, perhaps an absurd one."""
    if "-o" in words and "&&" not in words and luck.random() < 0.3:
        at = words.index("-o") + 1
        return [*words[:at], luck.choice(OUTPUTS), *words[at + 1 :]]
    return words


def readers(source: Path) -> tuple[str, ...]:
    """Return the verbs that read *source*."""
    return next(found for name, found in READERS.items() if name in source.name)


def words_of(verb: str, path: Path | str = "") -> list[str]:
    """Return the words of a verb that reads *path*."""
    places = {"{}": path, "{run}": run_folder() / "simulated", "{corpus}": CORPUS, "{made}": made_folder()}
    # Two blanks have a word of none between them, as the name of an output.
    words = verb.split(" ")
    for place, stands in places.items():
        words = [word.replace(place, str(stands)) for word in words]
    return words


def of_run(luck: random.Random, folder: Path) -> Case:
    """Return a verb on a run of which one file is damaged."""
    path, source = folder / "run", luck.choice(sorted(run_folder().iterdir()))
    shutil.copytree(source, path)
    file = luck.choice(sorted(one for one in path.rglob("*") if one.is_file()))
    if luck.random() < 0.4 and (path / "run.json").exists():
        file = path / "run.json"
    if luck.random() < 0.1:
        misplace(file, luck.choice(MISPLACED))
    else:
        file.write_bytes(damaged(file.read_bytes(), luck))
    words = words_of(luck.choice(OF_REHEARSALS if source.name == "rehearsed" else OF_RUNS), path)
    return Case(elsewhere(words, luck), source.name)


def misplace(file: Path, by: str) -> None:
    """Put one of ``MISPLACED`` where *file* is."""
    if by == "endless":
        os.truncate(file, 1 << 40)  # takes no room on the disk
        return
    file.unlink()
    if by == "pipe":
        os.mkfifo(file)
    elif by == "folder":
        file.mkdir()
    else:
        file.symlink_to("/dev/zero" if by == "device" else file.name)


def asked(luck: random.Random) -> Case:
    """Return a question to the what-if page, of which some settings are absurd."""
    path = luck.choice(("figures", "figures", "picture", "best"))
    given = [("gpus", "8"), ("pp", "1"), ("global_batch", "8"), ("model", "gpt2"), ("seq_len", "64")]
    for name in luck.sample(sorted(DEFAULTS), luck.randint(1, 3)):
        names = NAMES.get(name, ())
        value = luck.choice(names) if names and luck.random() < 0.5 else luck.choice(NUMBERS + WORDS)
        given.append((name, value))
    words = (f"{name}={value}".encode(errors="replace").decode() for name, value in given)
    return Case(["/plan/" + path, *words, *(["--json"] if path != "picture" else [])])


def flags(luck: random.Random) -> Case:
    """Return a verb with some of its flags, of which most values are absurd; or one of its arguments is."""
    verb = luck.choice([*BASES, *PARSED])
    words = with_base(verb)
    own = [at for at in range(len(verb.split()), len(words)) if words[at - 1] != "-o" and words[at][0] != "-"]
    if own and luck.random() < 0.15:
        words[luck.choice(own)] = luck.choice(NUMBERS + WORDS)
    options = [one for one in command_of(verb).params if isinstance(one, click.Option) and not one.is_eager]
    for option in luck.sample(options, min(len(options), luck.randint(1, 3))):
        flag = luck.choice([*option.opts, *option.secondary_opts])
        if "output" not in (option.name or "") and flag not in OF_OTHER_WORK:
            words += [flag] if option.is_flag else [flag, value_of(option, luck)]
    return Case(elsewhere(words, luck), parses=verb in PARSED)


def with_base(verb: str) -> list[str]:
    """Return a verb with the arguments that it takes."""
    return words_of(f"{verb} {BASES.get(verb, '')}".strip())


def undamaged() -> Iterator[list[str]]:
    """Yield every command that the fuzzer damages the input or adds flags of, before it does."""
    for source in (*sorted(CORPUS.iterdir()), *sorted(made_folder().iterdir())):
        if source.name not in REFUSED:
            for verb in readers(source):
                yield from commands(words_of(verb, source))
    for source in sorted(run_folder().iterdir()):
        for verb in OF_REHEARSALS if source.name == "rehearsed" else OF_RUNS:
            if "-o  " not in verb:  # no output's name
                yield words_of(verb, source)
    yield from map(with_base, BASES)


def command_of(verb: str) -> click.Command:
    """Return the command of a verb of one or two words."""
    context = click.Context(cli.main)
    first, _, second = verb.partition(" ")
    command = cli.main.get_command(context, first)
    if second:
        command = cast("click.Group", command).get_command(context, second)
    assert command is not None, verb
    return command


def value_of(option: click.Option, luck: random.Random) -> str:
    """Return a value for *option*, now and then one that it takes."""
    if isinstance(option.type, click.Choice) and luck.random() < 0.7:
        return str(luck.choice(option.type.choices))
    kind = luck.random()
    if kind < 0.2:
        return (
            damaged(luck.choice(WELL_SAID).encode(), luck).decode(errors="surrogateescape").replace("\0", "")
        )
    return luck.choice(NUMBERS if kind < 0.7 else WORDS)


def damaged(data: bytes, luck: random.Random) -> bytes:
    """Return *data* with a value replaced, or bytes flipped, cut, repeated or nested; or as it is."""
    kind = luck.random()
    if kind < 0.08:
        return data
    if kind < 0.65:
        return replaced(data, luck)
    changed = bytearray(data)
    for _ in range(luck.choice((1, 1, 1, 3, 8))):
        at = luck.randrange(len(changed) + 1)
        how = luck.randrange(7)
        if how == 0 and at < len(changed):
            changed[at] ^= 1 << luck.randrange(8)
        elif how == 1:
            del changed[at:]
        elif how == 2:
            del changed[at : at + luck.randrange(1, 40)]
        elif how == 3:
            changed[at:at] = changed[at : at + luck.randrange(1, 400)] * luck.choice((1, 2, 50))
        elif how == 4:
            changed[at:at] = luck.choice(PARTS) * luck.choice((1, 3000))
        elif how == 5:
            changed[at:at] = luck.choice(NUMBERS).encode()
        else:
            text = bytes(changed).decode("utf-8", "replace")
            changed[:] = text.encode(luck.choice(("utf-8-sig", "utf-16", "utf-32", "latin-1")), "replace")
    return bytes(changed)


def replaced(data: bytes, luck: random.Random) -> bytes:
    """Return *data* with one or two values of its JSON, or numbers or words of its text, others or gone."""
    if data[:2] == GZIPPED:
        return gzip.compress(replaced(gzip.decompress(data), luck))
    try:
        document = json.loads(data)
    except ValueError:
        found = list(re.finditer(rb"[0-9][0-9.]*|[A-Za-z_]{2,}|\"[^\"\n]*\"", data))
        chosen = luck.sample(found, min(len(found), luck.choice((1, 1, 2))))
        for match in sorted(chosen, key=lambda one: -one.start()):
            value = luck.choice(NUMBERS + WORDS).encode("utf-8", "surrogateescape")
            data = data[: match.start()] + value + data[match.end() :]
        return data
    for _ in range(luck.choice((1, 1, 2))):
        if isinstance(document, dict | list) and (places := list(_places(document))):
            holder, key = luck.choice(places)
            how = luck.random()
            if how < 0.1:
                del holder[key]
                continue
            other, name = luck.choice(places)
            instead = luck.choice(VALUES) if how < 0.8 else other[name]
            holder[key] = copy.deepcopy(instead)  # it may be changed itself, next
    text = json.dumps(document)
    return (text.replace("0", "1e400", 1) if luck.random() < 0.1 else text).encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every place in *value* at which another could stand."""
    for key, one in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, key
        if isinstance(one, dict | list):
            yield from _places(one)


def tried(number: int, seed: int) -> Iterator[Fault]:
    """Yield what goes wrong with one case."""
    run_folder()
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("file").write_text("kept")
        Path("link").symlink_to("file")
        Path("nowhere").symlink_to("elsewhere")
        one = case(number, seed, Path(folder))
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak of memory
        held = peak_bytes()  # by what ran in this process before
        try:
            for what in wrong(one):
                yield Fault(number, one.words, what)
        except Hang:
            yield Fault(number, one.words, f"more than {MOST_S} s")
        finally:
            os.chdir(before)
        if (peak := peak_bytes() - held) > MOST_BYTES:
            yield Fault(number, one.words, f"{peak / 2**30:.1f} GiB")


def peak_bytes() -> int:
    """Return the most memory that this process has had since it was last forgotten."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def wrong(one: Case) -> Iterator[str]:
    """Run a case, and yield what it should not have done."""
    for words in commands(one.words):
        found = _ended(one._replace(words=words))
        yield from _judged(found, one._replace(words=words))
        if found.exit_code != 0:  # what the next one would read is not there
            return


def commands(words: list[str]) -> list[list[str]]:
    """Return the commands of which each reads what the one before wrote, with ``&&`` between them."""
    ends = [at for at, word in enumerate(words) if word == "&&"]
    return [words[first + 1 : last] for first, last in itertools.pairwise([-1, *ends, len(words)])]


def _ended(one: Case) -> Result:
    """Run the command of a case for as long as it may take."""
    signal.signal(signal.SIGPROF, _end)  # time of the processor: others may have the machine
    signal.setitimer(signal.ITIMER_PROF, MOST_S)
    try:
        made = _parsing if one.parses else _asking if one.words[0].startswith("/") else None
        command, words = (made(one.words), []) if made else (cli.main, one.words)
        return CliRunner().invoke(command, words)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _judged(found: Result, one: Case) -> Iterator[str]:
    """Yield what the answer to a case should not be."""
    if isinstance(found.exception, Hang):
        raise found.exception
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        yield "".join(traceback.format_exception(found.exception)[-6:])
        return
    if found.exit_code not in (0, 1, 2):
        yield f"exit status {found.exit_code}: {found.stderr[-300:]}"
    if found.exit_code == 2 and (found.stderr.count("\n") != 1 or not found.stderr.startswith("Error: ")):
        yield f"not one line: {found.stderr[:300]}"
    if found.exit_code == 2 and (file := Path("file")).exists() and file.read_text() != "kept":
        yield "a file is changed by what was refused"
    if left := sorted(Path().glob(".*.tmp")):
        yield f"left there: {left[0]}"
    if found.exit_code == 0 and "--json" in one.words and not one.parses:
        try:
            document = json.loads(found.stdout, parse_constant=_refuse)
        except ValueError as error:
            yield f"--json is no JSON: {error}: {found.stdout[:200]}"
            return
        if one.run and one.words[0] == "analyze":
            yield from _changed(document, _analysis(one.run))


def _changed(document: dict[str, Any], whole: dict[str, Any]) -> Iterator[str]:
    """Yield the figures of a damaged run that are others than before, if nothing is said of the damage."""
    if document.get("warnings") == whole.get("warnings"):
        for name in sorted({*document, *whole} - NOT_FIGURES):
            if document.get(name) != whole.get(name):
                yield f"{name} changed silently"


@cache
def _analysis(name: str) -> dict[str, Any]:
    found = CliRunner().invoke(cli.main, ["analyze", str(run_folder() / name), "--json", "--partial"])
    return cast("dict[str, Any]", json.loads(found.stdout or "{}"))


def _parsing(words: list[str]) -> click.Command:
    """Return a command that only takes the flags of a verb apart."""
    verb = words[0] if words[0] != "bench" else " ".join(words[:2])

    @click.command()
    def parse() -> None:
        try:
            command_of(verb).make_context(verb, words[len(verb.split()) :])
        except click.ClickException as error:
            click.echo(f"Error: {' '.join(error.format_message().split())}", err=True)
            sys.exit(2)

    return parse


def _asking(words: list[str]) -> click.Command:
    """Return a command that prints what the what-if page is answered."""

    @click.command()
    def ask() -> None:
        given = dict(word.split("=", 1) for word in words[1:] if word != "--json")
        click.echo(Planner().routes()[words[0]](Query(given)).body)

    return ask


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _end(*_: object) -> None:
    raise Hang


def prepare() -> None:
    """Load and compute once what many cases need: no case has to take the time of it."""
    made_folder()
    for one in run_folder().iterdir():
        _analysis(one.name)
    for engine in ("compiled", "contended-compiled"):
        simulate(job_from(COMPILED), engine=engine)


def _work(numbers: range, seed: int, at: Any, told: Any) -> None:
    """Try *numbers*, saying in *at* which one it is: a process that dies or stands still is named by it."""
    resource.setrlimit(resource.RLIMIT_DATA, (4 * MOST_BYTES, 4 * MOST_BYTES))
    for number in numbers:
        at.value = number
        until_s = math.ceil(time.process_time() + 3 * MOST_S)  # where no Python runs, no signal is handled
        resource.setrlimit(resource.RLIMIT_CPU, (until_s, resource.RLIM_INFINITY))
        for fault in tried(number, seed):
            told.put(fault)
    at.value = -1


def _cpu_ticks(pid: int | None) -> int:
    """Return how long a process has run so far: on a busy machine, one that stands still is told by it."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1
    return int(after_name[11]) + int(after_name[12])


def together(n_cases: int, seed: int, workers: int) -> Iterator[Fault]:
    """Try all cases in processes; one that stands still is ended, and another goes on behind its case."""
    prepare()
    context = multiprocessing.get_context("fork")
    told, places = context.SimpleQueue(), [context.Value("q", 0) for _ in range(workers)]
    running, since = {}, {}

    def begin(worker: int, first: int) -> None:
        places[worker].value = first
        asked = (range(first, n_cases, workers), seed, places[worker], told)
        running[worker] = context.Process(target=_work, args=asked)
        running[worker].start()
        since[worker] = ((first, 0), time.monotonic())

    for worker in range(workers):
        begin(worker, worker)
    while running:
        time.sleep(0.05)
        while not told.empty():
            yield told.get()
        for worker, process in list(running.items()):
            number, is_over = places[worker].value, not process.is_alive()
            state = number, 0 if is_over else _cpu_ticks(process.pid)
            if state != since[worker][0]:
                since[worker] = (state, time.monotonic())
            is_stuck = not is_over and time.monotonic() - since[worker][1] > 6 * MOST_S
            if not (is_stuck or is_over):
                continue
            process.kill()
            process.join()
            del running[worker]
            if number >= 0:
                with tempfile.TemporaryDirectory() as folder:
                    words = case(number, seed, Path(folder)).words
                yield Fault(number, words, "stands still" if is_stuck else f"ended by {process.exitcode}")
                if number + workers < n_cases:
                    begin(worker, number + workers)
    while not told.empty():
        yield told.get()


def main() -> None:
    """Try cases from the command line, and tell what went wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    begun = time.monotonic()
    one = given.only
    faults = []
    for fault in (
        tried(one, given.seed) if one is not None else together(given.cases, given.seed, given.workers)
    ):
        faults.append(fault)
        print(f"case {fault.number}: {' '.join(fault.words)[:300]!a}\n{fault.what}\n", flush=True)
    for what, n in Counter(fault.what.strip().splitlines()[-1][:160] for fault in faults).most_common():
        print(f"{n:5} {what}")
    print(f"{given.cases} cases, {len(faults)} faults, {time.monotonic() - begun:.0f} s")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
