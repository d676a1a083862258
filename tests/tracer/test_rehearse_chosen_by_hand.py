"""Choices of experts that a script reads on the host: all tokens chose one expert, in words of a list."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.rehearsing import Asked, rehearse
from foretrace.tracer.rehearse.world.acting import Loaded
from foretrace.tracer.rehearse.world.classes import differing
from foretrace.tracer.rehearse.world.letters import Address
from foretrace.traces.rehearsal import Rehearsal

pytest.importorskip("torch")

SCRIPT = Path(__file__).parent / "chosen_by_hand.py"
COUNTED = Path(__file__).parent / "counted_by_hand.py"
EXPERTS, TOP_K, TOKENS = 4, 2, 24


def _rehearsed(folder: Path, loaded: Loaded, load: str, n_ranks: int, *how: str) -> tuple[Rehearsal, Any]:
    """Return a rehearsal of all ranks, and by rank how many rows it has."""
    written = folder / "written"
    written.mkdir(parents=True)
    command = (str(SCRIPT), load, str(written), *how)
    asked: Any = {"world_size": n_ranks, "warmup": 0, "expert_load": load}
    return rehearse(Asked(command=command, **asked), folder / "run", on=loaded), _rows(written)


def _rows(folder: Path) -> dict[int, list[int]]:
    return {int(file.stem): json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("*.json")}


@pytest.mark.parametrize("load", ["1.0", "zipf:0.7"])
def test_ranks_have_the_rows_of_a_run_on_gloo_whose_routers_choose_so(
    tmp_path: Path, ranks: Any, loaded: Loaded, load: str
) -> None:
    """Lists, masks made of them, what ranks gather of each other, and what comes back agree."""
    found, rows = _rehearsed(tmp_path / "fake", loaded, load, 2)
    real = tmp_path / "real"
    real.mkdir()
    done = ranks.run([sys.executable, str(SCRIPT), load, str(real)], ranks.env(), 2, fresh=real)
    assert done.status == (0, 0), done.errors
    assert rows == _rows(real)
    assert any("chooses 2 of 4 experts" in told for told in found.stated)
    assert not any("as if other ranks" in told for told in found.stated)


def test_every_token_is_at_the_experts_it_chose_and_comes_back(tmp_path: Path, loaded: Loaded) -> None:
    """Rows of all experts add up to all choices; each rank takes back as many rows as it has sent."""
    loaded.start()
    process = loaded._process
    found, rows = _rehearsed(tmp_path, loaded, "1.0", EXPERTS)
    assert loaded._process is process  # though all ranks were begun anew
    assert found.ranks == tuple(range(EXPERTS))
    sent = TOKENS * TOP_K
    assert [own[-1] for own in rows.values()] == [sent] * EXPERTS
    assert [own[1] for own in rows.values()] == [sent] * EXPERTS
    assert "needs which experts are chosen: rehearsed as with --expert-load zipf:0" in "".join(found.notes)


def test_choices_that_a_script_tells_apart_are_made_up_evenly(
    tmp_path: Path, ranks: Any, loaded: Loaded
) -> None:
    """What is as large as they are many ended the rehearsal in a line, where reading one began it anew."""
    fake, real = tmp_path / "fake", tmp_path / "real"
    fake.mkdir()
    real.mkdir()
    asked = Asked(command=(str(COUNTED), str(fake)), world_size=2, warmup=0)
    found = rehearse(asked, tmp_path / "run", on=loaded)
    done = ranks.run([sys.executable, str(COUNTED), str(real)], ranks.env(), 2, fresh=real)
    assert done.status == (0, 0), done.errors
    assert _rows(real) == {rank: [TOKENS * TOP_K // EXPERTS] * EXPERTS for rank in range(2)}
    assert _rows(fake)[0] == _rows(real)[0]
    assert "needs which experts are chosen: rehearsed as with --expert-load zipf:0" in "".join(found.notes)


def test_choices_that_nothing_calls_experts_are_none(tmp_path: Path, loaded: Loaded) -> None:
    """They may be words, or classes: a list of shares says that they are experts."""
    with pytest.raises(RehearsalError, match=r"chosen_by_hand\.py:\d+: .* depends on numbers"):
        _rehearsed(tmp_path / "unsaid", loaded, "1.0", 2, "silent")
    _, rows = _rehearsed(tmp_path / "said", loaded, "1,1,1,1", 2, "silent")
    assert [own[-1] for own in rows.values()] == [TOKENS * TOP_K] * 2


def test_a_load_of_a_rank_says_nothing_of_choices(tmp_path: Path, loaded: Loaded) -> None:
    """They would be even, whatever was asked."""
    with pytest.raises(
        RehearsalError, match=r"which experts are chosen, which --expert-load 1\.5 does not say"
    ):
        _rehearsed(tmp_path, loaded, "1.5", 2)


def test_numbers_of_ranks_differ_only_where_they_were_told_at_once() -> None:
    """The second of one may be other than the first of another."""

    def address(sender: int, sequence: int) -> Address:
        return Address("all_gather", 7, sender, -1, sequence)

    assert differing({address(0, 0): b"a", address(1, 0): b"a", address(0, 1): b"b"}) == set()
    assert differing({address(0, 0): b"a", address(1, 0): b"b"}) == {7}
