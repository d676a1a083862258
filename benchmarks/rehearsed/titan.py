"""Trains with torchtitan's own trainer: ``titan.py NAME=VALUE ...``, see ``DEFAULTS``.

Writes the files that ``torchtitan.train`` is started with, in a folder of their own: its configuration, in
the TOML of torchtitan 0.2.2, a tokenizer of a few words, and texts under the name of its test set. Nothing of
torchtitan is changed, unless ``units=root`` asks for what it did before August 2025: embedding and head
belong to the outermost unit of FSDP, and the last layer stays gathered after its forward (issue 1091 of
torchtitan, changed by its pull request 1094).
"""

import importlib
import json
import os
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

DEFAULTS = {
    "flavor": "8B",
    "batch": "2",
    "sequence": "8192",
    "recompute": "op",  # full; 2: every second layer
    "compiled": "",  # model; model,loss
    "float8": "",  # tensorwise; rowwise
    "tp": "1",
    "cp": "1",
    "units": "own",  # root
    "optimizer": "fused",  # foreach, as before pull request 881 of February 2025
}
WORDS = [f"w{number}" for number in range(100)]

asked = DEFAULTS | dict(word.split("=") for word in sys.argv[1:])
folder = Path(tempfile.mkdtemp())

tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate([*WORDS, "<|end|>"])}, "w0"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer.add_special_tokens(["<|end|>"])
tokenizer.save(str(folder / "tokenizer.json"))
(folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
data = folder / "tests" / "assets" / "c4_test"
data.mkdir(parents=True)
(data / "data.jsonl").write_text(f"{json.dumps({'text': ' '.join(WORDS * 40)})}\n" * 400)

recompute, compiled, float8 = asked["recompute"], asked["compiled"], asked["float8"]
tables: dict[str, dict[str, object]] = {
    "job": {"dump_folder": str(folder)},
    "model": {"name": "llama3", "flavor": asked["flavor"], "hf_assets_path": str(folder)},
    "training": {
        "local_batch_size": int(asked["batch"]),
        "seq_len": int(asked["sequence"]),
        "steps": 4,
        "dataset": "c4_test",
    },
    "optimizer": {"implementation": asked["optimizer"]},
    "activation_checkpoint": {"mode": recompute if recompute == "full" else "selective"},
    "parallelism": {
        "tensor_parallel_degree": int(asked["tp"]),
        "context_parallel_degree": int(asked["cp"]),
    },
}
if recompute != "full":
    tables["activation_checkpoint"]["selective_ac_option"] = recompute
if compiled:
    tables["compile"] = {"enable": True, "components": compiled.split(",")}
if float8:
    tables["model"]["converters"] = ["quantize.linear.float8"]
    tables["quantize.linear.float8"] = {"filter_fqns": ["output"]}
if float8 == "tensorwise":
    tables["quantize.linear.float8"] |= {
        "enable_fsdp_float8_all_gather": True,
        "precompute_float8_dynamic_scale_for_fsdp": True,
    }
if float8 == "rowwise":
    tables["quantize.linear.float8"]["recipe_name"] = "rowwise"

lines = [
    line
    for table, values in tables.items()
    for line in (f"[{table}]", *(f"{name} = {json.dumps(value)}" for name, value in values.items()))
]
(folder / "job.toml").write_text("\n".join(lines))
os.chdir(folder)
sys.argv = ["train.py", "--job.config_file", str(folder / "job.toml")]
if asked["units"] == "root":
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    parallelize: Any = importlib.import_module("torchtitan.models.llama3.infra.parallelize")

    def apply_fsdp(model: Any, dp_mesh: Any, param_dtype: Any, reduce_dtype: Any, **_: Any) -> None:
        """Shard *model* by its layers, and what is left of it as one."""
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        *layers, last = model.layers.values()
        for layer in layers:
            fully_shard(layer, mesh=dp_mesh, mp_policy=policy, reshard_after_forward=True)
        fully_shard(last, mesh=dp_mesh, mp_policy=policy, reshard_after_forward=False)
        fully_shard(model, mesh=dp_mesh, mp_policy=policy)
        parallelize.disable_fsdp_gradient_division(model)

    parallelize.apply_fsdp = apply_fsdp

runpy.run_module("torchtitan.train", run_name="__main__", alter_sys=True)
