"""The second depth: what the profiler saw of chosen steps, as a run beside the recording."""

import json
import re
import sys
from pathlib import Path
from typing import Any

from traces.store import open_run


def test_kernels_of_chosen_steps_become_a_run(tmp_path: Path, ranks: Any, config: Path, example: Any) -> None:
    path = tmp_path / "run"
    script = str(ranks.root / "examples" / "train_ddp.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", script]
    torchrun += "--steps 3 --micro-batch 2 --seq-len 16".split()
    command = [sys.executable, "-m", "foretrace", "record", "-o", str(path), "--depth", "kernels", "--json"]
    command += ["--steps", "1:3", "--", *torchrun, "--config", str(config)]
    (result,) = ranks.launch(command, fresh=path)
    assert result.returncode == 0, result.stderr
    assert re.findall(r"loss +(-?[0-9.e+-]+)", result.stderr) == example("ddp").plain.losses
    assert json.loads(result.stdout)["kernels"] == str(path / "kernels")
    light, kernels = open_run(path), open_run(path / "kernels")
    assert light.warnings == ()
    for rank in (0, 1):
        coarse, fine = (run.spans([rank]).to_pylist() for run in (light, kernels))
        for rows in (coarse, fine):
            assert [row["step"] for row in rows if row["category"] == "step"] == [1, 2]
        reduced = [
            [row["size_bytes"] for row in rows if row["kind"] == "all_reduce" and row["step"] == 2]
            for rows in (coarse, fine)
        ]
        assert reduced[0] == reduced[1]
        assert sum(row["category"] == "compute" for row in fine) > 5 * len(coarse)
