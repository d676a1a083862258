"""The front of a search: the fastest layout for every amount of memory, as simulating all has it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.simulator.predicted import simulate

from foretrace.cli import main
from foretrace.simulator.models.sources import load_model
from foretrace.simulator.search import cli as search_cli
from foretrace.simulator.search.best import PARTS_OF_MEMORY, TOO_SLOW, front
from foretrace.simulator.search.space import Space
from foretrace.topologies.catalog import load_cluster

pytest.importorskip("numba")


def test_the_front_is_that_of_simulating_everything() -> None:
    space = Space(
        model=load_model("llama2-7b"),
        cluster=load_cluster("dgx-a100", 8),
        global_batch=16,
        seq_len=4096,
        micro_batch=(1,),
        schedule=("1f1b", "zb-v"),
    )
    every = [simulate(job, engine="compiled").summary for job in space.jobs()]
    pairs = sorted((one["step_time_s"], one["peak_memory_bytes"]) for one in every if one["fits"])
    memory_bytes = space.cluster.device.memory_bytes
    wanted: list[tuple[float, int]] = []
    for step_s, peak_bytes in pairs:
        less = memory_bytes // PARTS_OF_MEMORY if wanted else 0
        if (
            step_s <= TOO_SLOW * pairs[0][0]
            and peak_bytes <= (wanted[-1][1] if wanted else peak_bytes) - less
        ):
            wanted.append((step_s, peak_bytes))
    found = [
        (one.summary["step_time_s"], one.summary["peak_memory_bytes"]) for one in front(space.families())
    ]
    assert found == wanted
    assert len(found) > 3


def test_the_page_has_what_is_listed_and_the_front(tmp_path: Path) -> None:
    page = tmp_path / "layouts.html"
    args = "search --model llama2-7b --cluster dgx-a100 --gpus 8 --global-batch 16 --tp 1,2 --top 2 --json"
    done = CliRunner().invoke(main, [*args.split(), "--report", str(page)], catch_exceptions=False)
    said = json.loads(done.stdout)
    meta = re.search(r'id="meta">(.*?)</script>', page.read_text("utf-8"), re.DOTALL)
    assert meta
    shown = json.loads(meta[1])["layouts"]
    assert [one["rank"] for one in shown[:3]] == [1, 2, None]
    assert all((one["schedule"] is None) == (one["pp"] == 1) for one in shown)
    assert said["front"][0]["step_time_s"] == said["layouts"][0]["step_time_s"]
    steps = [one["step_time_s"] for one in shown]
    assert {one["step_time_s"] for one in [*said["layouts"], *said["front"]]} == set(steps)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--tokens nan", "not a number of tokens"),
        ("-o FILE/best.toml", "best.toml: Not a directory; nothing was done"),
        ("--report FILE/best.html", "best.html: Not a directory; nothing was done"),
    ],
)
def test_what_its_answer_would_end_in_is_said_before_a_search(
    flags: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "FILE").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(search_cli, "_searched", lambda *_, **__: pytest.fail("searched"))
    args = f"search --model llama3-8b --cluster dgx-h100 --gpus 8 {flags}"
    refused = CliRunner().invoke(main, args.split())
    assert refused.exit_code == 2
    assert said in refused.stderr
