"""Launch scripts are read without running them."""

from __future__ import annotations

from typing import Any

import pytest

from simulator.configs.shell import arguments

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
