"""Records frameworks' own examples, and compares them with runs that are not recorded.

python benchmarks/record_frameworks.py CHECKOUTS [NAME ...] [--python PYTHON]

CHECKOUTS holds the repositories of ``CASES``, each in a folder of its name without the owner, at the commit
that is given there. Nothing is fetched. Each example is run twice with the same seed, as it is and recorded.
A witness in each process notes the value of every loss and a digest of all parameters after every step of an
optimizer: they must be the same to the last bit. ``benchmarks/tables/record_frameworks.toml`` gets a row for
each example, and the table of docs/recording-evidence.md is made of all rows; without CHECKOUTS only that.
"""

# ruff: noqa: PLC0415 - a process of an example loads what that needs, and this command no framework

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import runpy
import subprocess
import sys
import tempfile
import textwrap
import tomllib
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs" / "recording-evidence.md"
TABLE: Final = Path(__file__).parent / "tables" / "record_frameworks.toml"
LIMIT_S: Final = 400


def _texts(folder: Path) -> None:
    """Write 400 texts, and a choice of the first FSDP."""
    draw = random.Random(0)
    words = [f"w{n}" for n in range(50)]
    lines = [json.dumps({"text": " ".join(draw.choices(words, k=40))}) for _ in range(400)]
    (folder / "data").mkdir()
    (folder / "fsdp1.json").write_text('{"version": 1, "state_dict_type": "SHARDED_STATE_DICT"}')
    (folder / "data" / "train.jsonl").write_text("\n".join(lines))


def _model(folder: Path) -> None:
    """Write texts, a tiny GPT-2 with random weights and a tokenizer of its words."""
    import tokenizers
    import transformers

    _texts(folder)
    known = {word: n for n, word in enumerate(["<unk>", "<pad>", "</s>", *(f"w{n}" for n in range(50))])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "</s>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=64, **special)
    tokenizer.save_pretrained(folder / "tiny")
    transformers.set_seed(0)
    shape = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 64}
    config = transformers.GPT2Config(vocab_size=len(known), **shape)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder / "tiny")


def _script(folder: Path, page: Path) -> Path:
    """Write the code of a *page* of a tutorial, which is in blocks, as a script into *folder*."""
    blocks = re.findall(r"^\.\. code:: python\n\n((?:(?:   .*)?\n)+)", page.read_text(encoding="utf-8"), re.M)
    script = folder / f"{page.stem}.py"
    script.write_text("\n".join(map(textwrap.dedent, blocks)), encoding="utf-8")
    return script


def _deepspeed(folder: Path) -> None:
    """Write a configuration of DeepSpeed: ZeRO-2."""
    batch = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}
    config = {**batch, "optimizer": optimizer, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    (folder / "zero.json").write_text(json.dumps(config))


class Case(NamedTuple):
    """One example.

    Attributes:
        uses: what it is an example of.
        repository, commit, path: where it is; of a page in reStructuredText the blocks of code are run.
        args: its arguments.
        n: ranks.
        on_cpu: it is written for GPUs, and run by ``--on-cpu``.
        prepare: writes what it reads into the folder in which it runs.
        env: variables of its environment.
    """

    uses: str
    repository: str
    commit: str
    path: str
    args: str = ""
    n: int = 2
    on_cpu: bool = False
    prepare: Callable[[Path], None] | None = None
    env: Mapping[str, str] = {}


EXAMPLES: Final = ("pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8")
ACCELERATE: Final = ("huggingface/accelerate", "16cb6eb80dd9aa8b4df1a63ef57863e455d53b83")
LIGHTNING: Final = ("Lightning-AI/pytorch-lightning", "7f0c3436cd3f6ad3753125672024fc415cbcb414")
DEEPSPEED: Final = ("deepspeedai/DeepSpeedExamples", "45b4b7156c8794a3452a5a7d03dbd8d797068569")
MEGATRON: Final = ("NVIDIA/Megatron-LM", "d98e8a64ddf34856e74b24714e3bedb2f5a39553")
TUTORIALS: Final = ("pytorch/tutorials", "2662ccacff76e7210d9a02a836fce7381a8e7294")
TRL: Final = ("huggingface/trl", "f2cd57710ae345ea6428ae95363267fcf38a3dc8")

_SCRIPTS: Final = "src/accelerate/test_utils/scripts"
_ON_CPU: Final = {"ACCELERATE_USE_CPU": "true"}
"""What ``accelerate launch --cpu`` sets."""
_SFT: Final = (
    "--model_name_or_path tiny --dataset_name data --output_dir out --max_length 32 --max_steps 6 --use_cpu "
    "--bf16 False --per_device_train_batch_size 4 --seed 1 --save_strategy no --report_to none"
)
_PP: Final = (
    "--pipeline-model-parallel-size 2 --mock-data --tokenizer-type NullTokenizer --vocab-size 128 "
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 4 --lr 1e-4 --eval-iters 0 --eval-interval 100 "
    "--transformer-impl local --clip-grad 0 --no-gradient-accumulation-fusion --no-persist-layer-norm "
    "--log-interval 1"
)
_BF16: Final = "--hidden_dim 64 --num_layers 2 --num_heads 2 --vocab_size 200 --batch_size 2 --seq_length 32"

CASES: Final[Mapping[str, Case]] = {
    "ddp": Case("DDP", *EXAMPLES, "distributed/ddp/example.py", on_cpu=True),
    "ddp-tutorial": Case(
        "DDP, elastic", *EXAMPLES, "distributed/ddp-tutorial-series/multigpu_torchrun.py", "3 1", on_cpu=True
    ),
    "fsdp2": Case("FSDP2", *EXAMPLES, "distributed/FSDP2/example.py", "--explicit-prefetching", on_cpu=True),
    "fsdp2-mixed": Case(
        "FSDP2, bf16", *EXAMPLES, "distributed/FSDP2/example.py", "--mixed-precision", on_cpu=True
    ),
    "tp": Case("TP", *EXAMPLES, "distributed/tensor_parallelism/tensor_parallel_example.py", on_cpu=True),
    "sp": Case(
        "TP with sequence parallelism",
        *EXAMPLES,
        "distributed/tensor_parallelism/sequence_parallel_example.py",
        on_cpu=True,
    ),
    "fsdp2-tp": Case(
        "FSDP2 × TP", *EXAMPLES, "distributed/tensor_parallelism/fsdp_tp_example.py", n=4, on_cpu=True
    ),
    "pipelining": Case("Pipeline, GPipe", *TUTORIALS, "intermediate_source/pipelining_tutorial.rst"),
    "accelerate": Case("Accelerate", *ACCELERATE, f"{_SCRIPTS}/test_script.py", env=_ON_CPU),
    "accelerate-sync": Case(
        "Accelerate, accumulation of gradients", *ACCELERATE, f"{_SCRIPTS}/test_sync.py", env=_ON_CPU
    ),
    "lightning": Case(
        "Lightning", *LIGHTNING, "examples/pytorch/bug_report/bug_report_model.py", on_cpu=True
    ),
    "trainer": Case("Trainer of transformers, DDP", *TRL, "trl/scripts/sft.py", _SFT, prepare=_model),
    "trainer-fsdp": Case(
        "Trainer of transformers, FSDP2",
        *TRL,
        "trl/scripts/sft.py",
        f"{_SFT.replace('--use_cpu ', '')} --fsdp full_shard",
        on_cpu=True,
        prepare=_model,
    ),
    "trainer-fsdp1": Case(
        "Trainer of transformers, FSDP1",
        *TRL,
        "trl/scripts/sft.py",
        f"{_SFT.replace('--use_cpu ', '')} --fsdp full_shard --fsdp_config fsdp1.json",
        on_cpu=True,
        prepare=_model,
    ),
    "deepspeed": Case(
        "DeepSpeed, ZeRO-2",
        *DEEPSPEED,
        "training/bf16_master_weight/train.py",
        f"{_BF16} --num_steps 8 --deepspeed_config zero.json",
        on_cpu=True,
        prepare=_deepspeed,
    ),
    "megatron": Case("Megatron-core, TP", *MEGATRON, "examples/run_simple_mcore_train_loop.py", on_cpu=True),
    "megatron-pp": Case("Megatron-LM, pipeline 1F1B", *MEGATRON, "pretrain_gpt.py", _PP, on_cpu=True),
}


class Witness:
    """Notes in one process what it computes; *path* gets a line for each loss and each step.

    Args:
        path: file for the lines of this rank.
    """

    def __init__(self, path: Path) -> None:
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._file = path.open("w", encoding="utf-8", buffering=1)
        backward = torch.autograd.backward

        def noted(tensors: Any, *args: Any, **kwargs: Any) -> None:
            several = tensors if isinstance(tensors, tuple | list) else (tensors,)
            self._note("loss", several)
            backward(tensors, *args, **kwargs)

        torch.autograd.backward = noted
        to_empty = torch.nn.Module.to_empty

        def filled(module: Any, **kwargs: Any) -> Any:
            """Give values to what an example may leave uninitialised: one does, and no two runs are alike."""
            made = to_empty(module, **kwargs)
            for value in (*made.parameters(), *made.buffers()):
                own = value.detach()
                own = own.to_local() if hasattr(own, "to_local") else own
                if own.is_floating_point():
                    own.normal_(0, 0.02, generator=torch.Generator().manual_seed(0))
            return made

        torch.nn.Module.to_empty = filled
        register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        self._note("step", [p for group in optimizer.param_groups for p in group["params"]])

    def _note(self, what: str, tensors: Sequence[Any]) -> None:
        """Write a digest of the bytes of *tensors*, of those that are sharded of the own part."""
        import torch

        digest = hashlib.blake2b(digest_size=16)
        for tensor in tensors:
            own = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            plain = own.detach().cpu().contiguous().reshape(-1)
            digest.update(plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b"")
        self._file.write(f"{what} {digest.hexdigest()}\n")


def witness(folder: Path, script: str) -> None:
    """Run *script*, whose arguments are those of this process, under a witness that writes into *folder*."""
    if os.environ.get("FORETRACE_ON_CPU") and not os.environ.get("FORETRACE_RUN"):
        from foretrace.tracer.importing import Expectation
        from foretrace.tracer.on_cpu import install

        for name in ("torch._C", "torch"):
            Expectation(name, install)
    import numpy as np
    import torch

    random.seed(0)
    default_rng = np.random.default_rng
    np.random.default_rng = lambda seed=None: default_rng(0 if seed is None else seed)
    np.random.seed(0)
    torch.manual_seed(0)
    Witness(folder / f"rank{os.environ['RANK']}.txt")
    if sys.version_info < (3, 12):  # a file of Megatron-LM that is not used needs it
        vars(typing)["override"] = lambda function: function
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


def run(
    case: Case, checkouts: Path, python: str, out: Path, *, recorded: bool
) -> subprocess.CompletedProcess[str]:
    """Run *case* below *out*: there are then ``noted`` and, if it was *recorded*, ``run``."""
    work, noted = out / "work", out / "noted"
    for folder in (work, noted):
        folder.mkdir(parents=True)
    checkout = checkouts / case.repository.partition("/")[2]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
    env |= {"HF_HOME": str(out / "hub"), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'benchmarks'}:{checkout}"}
    env |= {"TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "0", "PYTHONWARNINGS": "ignore", **case.env}
    if case.prepare is not None:
        asked = (
            f"import record_frameworks, pathlib; record_frameworks.{case.prepare.__name__}(pathlib.Path())"
        )
        subprocess.run([python, "-c", asked], cwd=work, env=env, check=True)
    command = [
        python,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(case.n),
        __file__,
    ]
    script = checkout / case.path
    if script.suffix == ".rst":
        script = _script(work, script)
    command += ["--witness", str(noted), str(script), *case.args.split()]
    if recorded:
        flags = ["--on-cpu", str(case.n)] if case.on_cpu else []
        command = [python, "-m", "foretrace", "record", *flags, "-o", str(out / "run"), "--", *command]
    elif case.on_cpu:
        env["FORETRACE_ON_CPU"] = str(case.n)
    return subprocess.run(
        command, cwd=work, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def tried(name: str, checkouts: Path, python: str) -> dict[str, Any]:
    """Run the case *name* twice and return its row of the table."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        noted = []
        for recorded in (False, True):
            out = Path(folder, str(recorded))
            try:
                done = run(case, checkouts, python, out, recorded=recorded)
            except subprocess.TimeoutExpired:
                return {"name": name, "failed": "as it is" if not recorded else "recorded"}
            files = sorted((out / "noted").iterdir())
            noted.append([path.read_text(encoding="utf-8").splitlines() for path in files])
            if done.returncode:
                sys.stderr.write(
                    f"{name}: status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[:4000]}\n"
                )
                return {"name": name, "failed": "as it is" if not recorded else "recorded"}
        info = json.loads((Path(folder, "True", "run", "run.json")).read_text(encoding="utf-8"))
        shown = subprocess.run(
            [python, "-m", "foretrace", "analyze", "--json", str(Path(folder, "True", "run"))],
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True, check=True,
        )  # fmt: skip
    found = json.loads(shown.stdout)
    plain, watched = noted
    return {
        "name": name,
        "torch": info["versions"]["torch"],
        "spans": found["n_spans"],
        "losses": sum(line.startswith("loss") for rank in plain for line in rank),
        "steps": sum(line.startswith("step") for rank in plain for line in rank),
        "identical": plain == watched,
        "confirmed": found.get("audit", {}).get("lines", ["not audited"]),
        "warnings": [said for said in found["warnings"] if "--on-cpu" not in said],
    }


def _toml(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return *rows* as TOML."""
    text = "# Written by benchmarks/record_frameworks.py.\n"
    for row in rows:
        lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in row.items()]
        text += "\n".join(("\n[[example]]", *lines, ""))
    return text


def _lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table for people."""
    compared = ("losses and steps compared", "bit by bit", "confirmed by c10d")
    head = ("example of", "script", "ranks", "spans", *compared)
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        case = CASES[row["name"]]
        script = f"{case.repository} `{case.path}`" + (", `--on-cpu`" if case.on_cpu else "")
        if "failed" in row:
            cells = (f"fails {row['failed']}", "", "", "")
        else:
            n = f"{row['losses']:,} and {row['steps']:,}"
            same = "the same" if row["identical"] else "**differs**"
            confirmed = "; ".join(row["confirmed"]).replace(" confirmed by c10d", "")
            cells = (f"{row['spans']:,}", n, same, confirmed)
        lines.append("| " + " | ".join((case.uses, script, str(case.n), *cells)) + " |")
    return lines


def main() -> None:
    """Try the examples that are asked for, and write both tables."""
    from accuracy import replaced  # which a process of an example need not be able to load

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkouts", nargs="?", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--python", default=sys.executable, help="that of an environment with the frameworks")
    asked = parser.parse_args()
    rows = {}
    if TABLE.is_file():
        rows = {
            row["name"]: row for row in tomllib.loads(TABLE.read_text(encoding="utf-8")).get("example", [])
        }
    for name in asked.names or (CASES if asked.checkouts else ()):
        rows[name] = tried(name, asked.checkouts.absolute(), asked.python)
        print(json.dumps(rows[name], ensure_ascii=False), flush=True)
        kept = [rows[name] for name in CASES if name in rows]
        TABLE.write_text(_toml(kept), encoding="utf-8")
    kept = [rows[name] for name in CASES if name in rows]
    PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8"), "frameworks", _lines(kept)), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--witness"]:
        folder, script = sys.argv[2:4]
        sys.argv = sys.argv[3:]
        witness(Path(folder), script)
    else:
        main()
