"""Launch scripts are read without running them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foretrace.simulator.config import job_from
from foretrace.simulator.configs.read import read_files
from foretrace.simulator.configs.shell import arguments
from foretrace.simulator.errors import ConfigError

NESTED = """
D=${3:-"MOCK"}
X=()
if [[ "$D" == "MOCK" ]] || [[ -z "$D" ]]; then
    X+=(
        "--b 1"
        "--c 9,1"
    )
fi
if [ "$D" = y ] && [ 1 = 1 ]; then
    X+=(--d)
fi
if [ ! -f "$P" ]; then
    exit 1
fi
A=(--a)
A+=("${X[@]}")
P="t.py"
torchrun "$P" \\
    ${A[@]}

set +x
"""


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("--a 1 --b --c-d=x", {"a": "1", "b": True, "c-d": "x"}),
        ("readonly A=3\ndeclare -r B=4\ntorchrun t.py --a $A --b ${B}", {"a": "3", "b": "4"}),
        ("A=1; B=2; export C=3;\ntorchrun t.py --a $A --b $B --c $C", {"a": "1", "b": "2", "c": "3"}),
        ('A="1; B=2"\ntorchrun t.py --b ${B:-5}', {"b": "5"}),
        ("A=1\nif [[ ! -z ${NO} && ! -z $A ]]; then\nA=2\nfi\ntorchrun t.py --a $A", {"a": "1"}),
        ("B=1\nA=1\nif [[ ! -z ${B} && -n $A ]]; then\nA=2\nfi\ntorchrun t.py --a $A", {"a": "2"}),
        ('if [ -z "$A" ]; then\nA=6\nfi\ntorchrun t.py --a $A', {"a": "6"}),
        ("N=3\nM=$((N*2+1))\npython train.py --n $M", {"n": "7"}),
        ('X=("--a 1"\n"--b 2")\ntorchrun x.py "${X[@]}"', {"a": "1", "b": "2"}),
        ("torchrun t.py \\\n  --a ${A:-5} \\\n  --lr -1e-4 # rate\n", {"a": "5", "lr": "-1e-4"}),
        (
            'if [ -z "$1" ]; then\nA=1\nelif [ 1 = 2 ]; then\nA=2\nelse\nA=3\nfi\ntorchrun t.py --a $A',
            {"a": "3"},
        ),
        (NESTED, {"a": True, "b": "1", "c": "9,1"}),
        ("ARGS=(--a 1)\nARGS+=(--b 2)", {"a": "1", "b": "2"}),
        ("# --a 1\nmkdir --parents x\ntorchrun t.py --split 99,1,0", {"split": "99,1,0"}),
        ("torchrun t.py --c $((1/0))", {"c": "1/0"}),
    ],
)
def test_scripts_are_read_without_running_them(script: str, expected: dict[str, Any]) -> None:
    assert arguments(script) == expected


def test_slurm_says_how_many_nodes_and_quoted_commands_are_read_to_their_redirection() -> None:
    lines = ("#SBATCH --nodes=48", "N=$SLURM_NNODES", 'CMD="pretrain_gpt.py --nnodes $N --pp 4 &> x.log"')
    assert arguments("\n".join((*lines, 'srun -c "$CMD"'))) == {"nnodes": "48", "pp": "4"}


def test_two_stages_may_both_be_ends_with_a_number_of_their_own(tmp_path: Path) -> None:
    """43 layers in 21 and 22, as launch scripts have it; 20 and 22 leave one to nobody."""
    flags = "--num-layers 43 --hidden-size 64 --num-attention-heads 4 --vocab-size 512 --seq-length 64 --bf16"
    flags += " --pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 4"
    script = tmp_path / "train.sh"
    for first, stages in ((21, (21, 22)), (20, None)):
        ends = f"--decoder-first-pipeline-num-layers {first} --decoder-last-pipeline-num-layers 22"
        script.write_text(f"torchrun --nproc_per_node 8 pretrain_gpt.py {flags} {ends}")
        if stages is None:
            with pytest.raises(ConfigError, match="leave 1 for 0 stages"):
                read_files([script], {"cluster": "dgx-h100"})
        else:
            settings = read_files([script], {"cluster": "dgx-h100"}).settings
            assert job_from(settings).layers_per_stage == stages


@pytest.mark.parametrize(("said", "expected"), [("FULL_SHARD", True), ("SHARD_GRAD_OP", False)])
def test_accelerate_takes_words_where_fsdp_2_has_a_flag(said: str, expected: object, tmp_path: Path) -> None:
    path = tmp_path / "fsdp.yaml"
    path.write_text(
        "distributed_type: FSDP\nnum_processes: 8\nmixed_precision: bf16\n"
        f"fsdp_config: {{fsdp_version: 1, fsdp_reshard_after_forward: {said}}}\n"
    )
    given = {"model": "llama3-8b", "cluster": "dgx-h100", "micro_batch": 1, "seq_len": 4096}
    job = job_from(read_files([path], given).settings)
    assert (job.sharding, job.profile.reshard_after_forward) == ("fsdp", expected)


@pytest.mark.parametrize(
    ("said", "copied", "prefetched"),
    [
        ("", False, False),
        ("fsdp_version: 2", True, True),
        ("fsdp_backward_prefetch: BACKWARD_PRE", False, True),
    ],
)
def test_accelerate_is_fsdp_1_without_prefetch_unless_told(
    said: str, copied: object, prefetched: object, tmp_path: Path
) -> None:
    path = tmp_path / "fsdp.yaml"
    path.write_text(f"distributed_type: FSDP\nnum_processes: 8\nfsdp_config: {{{said}}}\n")
    given = {"model": "llama3-8b", "cluster": "dgx-h100", "micro_batch": 1, "seq_len": 4096}
    profile = job_from(read_files([path], given).settings).profile
    assert profile.name == "transformers"
    assert (profile.copies_gathered, profile.prefetch_backward) == (copied, prefetched)
    assert profile.joins_gradients is not copied


LISTED = """
ENV_VARS: {S: 64}
MODEL_ARGS:
  --num-layers: 4
  --hidden-size: 64
  --num-attention-heads: 4
  --vocab-size: 512
  --seq-length: ${S}
  --bf16: true
  --fp16: false
  --micro-batch-size: 1
  --global-batch-size: 8
  --tensor-model-parallel-size: ${TP}
  --nnodes: ${NODES}
  --cp-comm-type: ${HOW}
  --recompute-granularity: selective
  --recompute-modules: "[mlp layernorm]"
"""


def test_arguments_that_a_file_lists_by_name_are_those_of_a_script(tmp_path: Path) -> None:
    """A variable that is set elsewhere is what a flag says, of a convention what the framework does."""
    pytest.importorskip("yaml", reason="PyYAML is not installed")
    path = tmp_path / "model_config.yaml"
    path.write_text(LISTED)
    given = {"cluster": "dgx-h100", "tp": 2, "gpus": 8}
    found = read_files([path], given)
    job = job_from(found.settings | given)
    assert (job.model.n_layers, job.seq_len, job.precision, job.layout.tp) == (4, 64, "bf16", 2)
    assert job.recomputed_modules == {"mlp", "layernorm"}
    left = {one.key: one.reason for reading in found.readings for one in reading.ignored}
    assert left["tensor-model-parallel-size"] == "set outside of this file; a flag says it"
    assert left["nnodes"] == "set outside of this file; a flag says it"
    assert left["cp-comm-type"] == "set outside of this file; --set context=... says it"
    for missing, flag in (("tp", "--tp"), ("gpus", "--gpus")):
        with pytest.raises(ConfigError, match=f"is set outside of this file: {flag} says it"):
            read_files([path], {name: value for name, value in given.items() if name != missing})


GIVEN = """
stage=3
usage() {
  echo "Usage: $0 [options]
    --stage   one of 1, 2, 3: $stage
    --help    # this"
}
echo "see #SBATCH --nodes"
while [ $# -gt 0 ]; do
  case $1 in
    --stage|-s)
      stage=$2 ; shift;;
    *)
      other=$2; shift;;
  esac
done
torchrun train.py --stage $stage --other $other
"""


def test_a_script_without_arguments_has_its_own_values_and_what_it_prints_is_none() -> None:
    """What its loop over arguments would set is not set; only what nothing else sets is left open."""
    assert arguments(GIVEN) == {"stage": "3", "other": "$2"}


def test_variables_that_double_are_refused_before_they_fill_the_memory() -> None:
    with pytest.raises(ConfigError, match="more than 1,000,000 letters"):
        arguments("A=x\n" + "A=$A$A\n" * 60 + "torchrun t.py --n $A\n")
    assert arguments(f"torchrun t.py --n $(({'-' * 9999}1))\n")["n"] == f"$(({'-' * 9999}1))"
