"""What trainings seldom do: groups that are split, states that rank 0 tells."""

import inspect
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.tracer.seldom import OUT, ROWS, WIDTH

from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.rehearsing import Asked, rehearse
from foretrace.tracer.rehearse.world.acting import Loaded
from foretrace.tracer.rehearse.world.launchers import environment
from foretrace.traces.rehearsal import Rehearsal, read_rank, rehearsal_folder

SCRIPT, N_RANKS = Path(__file__).parent / "seldom.py", 8


class Found:
    """Some ranks of a rehearsal of one kind."""

    def __init__(
        self, kind: str, folder: Path, loaded: Loaded, ranks: tuple[int, ...], n_ranks: int = N_RANKS
    ) -> None:
        asked = Asked(command=(str(SCRIPT), kind), world_size=n_ranks, ranks=ranks)
        self.rehearsal: Rehearsal = rehearse(asked, folder, on=loaded)
        self._folder = rehearsal_folder(folder)

    def _rows(self, rank: int, what: int) -> list[dict[str, Any]]:
        tables = read_rank(self._folder, rank)
        rows = (tables.works if what == 0 else tables.messages).to_pylist()
        return [rows[event["item"]] for event in tables.events.to_pylist() if event["what"] == what]

    def sent(self, rank: int) -> list[tuple[str, tuple[int, ...], int]]:
        """Return kind, ranks and bytes of each collective of a rank, in order."""
        groups = {group.id: group.ranks for group in self.rehearsal.groups}
        return [(one["kind"], groups[one["group"]], one["size_bytes"]) for one in self._rows(rank, 1)]

    def products(self, rank: int) -> Counter[tuple[int, int, int]]:
        """Count the products of a rank, by shape."""
        works = self._rows(rank, 0)
        return Counter((one["m"], one["n"], one["k"]) for one in works if one["kind"] == "gemm")


def test_split_groups_are_places_in_their_parent(tmp_path: Path, loaded: Loaded) -> None:
    """The first two of the even and of the odd ranks sum; the others have no such group."""
    found = Found("split", tmp_path / "run", loaded, (0, 3, 5))
    size = ROWS * WIDTH * 4
    assert found.sent(0) == [("all_reduce", (0, 2), size)]
    assert found.sent(3) == [("all_reduce", (1, 3), size)]
    assert found.sent(5) == []


def test_operators_on_symmetric_memory_are_refused(tmp_path: Path, loaded: Loaded) -> None:
    with pytest.raises(RehearsalError, match="symm_mem::one_shot_all_reduce sends through symmetric memory"):
        Found("other", tmp_path / "run", loaded, (0,))


@pytest.mark.parametrize(
    ("kind", "n_ranks", "said"),
    [
        ("gather_of_eight", 16, "output tensor size must be equal to world_size times input"),
        ("gather_of_eight", 4, "output tensor size must be equal to world_size times input"),
        ("scatter_of_eight", 16, "input tensor must be the same size as output size times world size"),
        ("gather_as_another", 8, "output tensor must have the same type as input tensor"),
        ("splits_left_over", 8, "Split sizes doesn't match total dim 0 size: 15 against 16"),
        ("splits_not_there", 8, "Split sizes doesn't match total dim 0 size: 17 against 16"),
        ("splits_too_few", 8, "Number of tensor splits not equal to group size: 4 against 8"),
        ("permuted", 8, "Split sizes doesn't match total dim 0 size: 512 against 16"),
    ],
)
def test_operands_that_do_not_fit_the_group_are_refused_as_torch_does(
    kind: str, n_ranks: int, said: str, tmp_path: Path, loaded: Loaded
) -> None:
    """A script that was written for eight ranks ends on more, or fewer, as a real run does."""
    with pytest.raises(RehearsalError, match=said):
        Found(kind, tmp_path / "run", loaded, (0,), n_ranks)


@pytest.mark.parametrize("kind", ["gather_of_eight", "scatter_of_eight"])
def test_operands_that_fit_go_through(kind: str, tmp_path: Path, loaded: Loaded) -> None:
    assert Found(kind, tmp_path / "run", loaded, (0,)).sent(0)[-1][2] == 8 * ROWS * WIDTH * 4


def test_a_row_is_permuted_as_torch_does(tmp_path: Path, loaded: Loaded) -> None:
    """All elements to one rank, and those of one rank: splits that fit go through."""
    assert Found("permuted_row", tmp_path / "run", loaded, (0,)).sent(0)[-1][::2] == ("all_to_all", 4 * WIDTH)


def test_every_rank_hears_the_states_that_the_first_one_tells(tmp_path: Path, loaded: Loaded) -> None:
    """Each parameter whole, by a broadcast, though others hold no state: as rank 0 sends them."""
    found = Found("states", tmp_path / "run", loaded, (0, 3))
    first, other = ([row for row in found.sent(rank) if row[0] == "broadcast"] for rank in (0, 3))
    assert first == other
    assert sum(size for _, _, size in other) == 4 * (WIDTH * WIDTH + WIDTH + OUT * WIDTH + OUT)


def test_objects_that_one_rank_sends_another_are_not_in_the_timeline(tmp_path: Path, loaded: Loaded) -> None:
    """On either side; that the receiver was told what another sender says is listed."""
    found = Found("objects", tmp_path / "run", loaded, (0, 3))
    assert found.sent(0) == found.sent(3) == [("all_reduce", tuple(range(N_RANKS)), 4 * WIDTH)]
    told = f"told what a rank as far from its receiver sends, [{WIDTH}, 'rows']"
    assert sum(told in line for line in found.rehearsal.stated) == 1


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("heard", r"hears objects: told what it has itself, \[None\]"),
        ("dealt", r"gets an object of another rank: told what it has itself, \[None\]"),
    ],
)
def test_an_object_that_a_rank_lacks_is_named_where_it_fails(
    kind: str, said: str, tmp_path: Path, loaded: Loaded
) -> None:
    """Only rank 0 has it, so that rank 3 ends where it takes a size out of it."""
    assert not any(
        "told what it has" in line for line in Found(kind, tmp_path, loaded, (0,)).rehearsal.stated
    )
    with pytest.raises(RehearsalError, match=f"rank 3: .*; before that, seldom.py:[0-9]+ {said}"):
        Found(kind, tmp_path / "run", loaded, (3,))


def test_objects_of_other_ranks_are_named_where_a_script_finds_them_all_the_same(
    tmp_path: Path, loaded: Loaded
) -> None:
    """Each rank is told its own for all: an error about that is the rehearsal's, and says so."""
    said = rf"before that, seldom.py:\d+ gathers objects of {N_RANKS} ranks: told what it has itself"
    with pytest.raises(RehearsalError, match=said):
        Found("gathered", tmp_path / "run", loaded, (0,))


def test_a_size_that_another_rank_sends_is_not_made_up(tmp_path: Path, loaded: Loaded) -> None:
    """Also where the receiver had numbers of its own in that place."""
    said = r"seldom\.py:\d+ reads a number that a rank has sent .* rehearse also 2 \(--ranks\)"
    with pytest.raises(RehearsalError, match=said):
        Found("size", tmp_path / "run", loaded, (3,))


def test_all_micro_batches_are_run_where_the_script_has_its_own_actions(
    tmp_path: Path, loaded: Loaded
) -> None:
    """They may be in threads that wait for each other: none is left out, and the products are the same."""
    own, plain = (
        Found(kind, tmp_path / kind, loaded, (0,), 2) for kind in ("own-pipeline", "plain-pipeline")
    )
    said = [any("micro-batches of a stage" in note for note in one.rehearsal.notes) for one in (own, plain)]
    assert said == [False, True]
    assert own.products(0) == plain.products(0) != Counter()


def test_a_script_is_told_what_torchrun_tells(tmp_path: Path, loaded: Loaded) -> None:
    """All that the agent of torch sets for a worker, but where to meet it: there is none."""
    agent = pytest.importorskip("torch.distributed.elastic.agent.server.local_elastic_agent")
    source = inspect.getsource(agent.LocalElasticAgent)
    names = set(re.findall(r'^ +"([A-Z_]+)": ', source, re.MULTILINE))
    told = environment({"rank": 11, "world_size": 12, "local_world_size": 8, "launchers": ()})
    assert {"RANK", "GROUP_WORLD_SIZE"} < names - {"TORCHELASTIC_USE_AGENT_STORE"} <= set(told)
    places = ("LOCAL_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE")
    assert [told[name] for name in places] == ["3", "1", "2", "11", "12"]
    assert Found("launched", tmp_path / "run", loaded, (3,)).sent(3)[-1][2] == 4 * (1 + 3)
