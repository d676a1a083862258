"""Mistakes that simulators have been seen to swallow are refused by name, with what would work.

Each is a mistake that ASTRA-sim 518bd513 answers with exit status 0 and a wrong time, or with a crash that
names nothing.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis.strategies import integers, sampled_from
from tests.simulator.made_programs import program_of

from foretrace.cli import main
from foretrace.simulator.engine import compiled, contended, contended_compiled, event
from foretrace.simulator.errors import ProgramError, SimulationError
from foretrace.simulator.network.cost import Network
from foretrace.simulator.network.fluid import Fluid
from foretrace.simulator.network.nccl import choice
from foretrace.simulator.program import Label, Program, Transfer
from foretrace.topologies.catalog import load_cluster
from foretrace.topologies.errors import TopologyError
from foretrace.topologies.fabric import FabricSpec
from foretrace.topologies.link import LinkSpec
from foretrace.topologies.placement import place
from foretrace.traces.errors import TraceError
from foretrace.traces.store import open_run

MINE = 'device = "h100-sxm"\ngpus_per_node = 8\nn_gpus = 16\nintra = "nvlink4"\nnics_per_node = 8\n'
NIC = 'nic = { bandwidth = "400 Gb/s", latency = "2 us" }\n'
PAIR = 'device = "h100-sxm"\ngpus_per_node = 4\nintra = "nvlink4"\n'
ONE_LINK = '[[links]]\nbetween = ["gpu:0", "gpu:1"]\nbandwidth = "50 GB/s"\nlatency = "1 us"\n'
FABRIC = '[fabric]\nkind = "rail"\n'


def refused(tmp_path: Path, text: str) -> str:
    """Return what the command says of a machine, in one line with exit status 2."""
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    result = CliRunner().invoke(main, ["topology", "check", str(path)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert len(result.stderr.strip().splitlines()) == 1
    assert "mine.toml" in result.stderr or "mine" in result.stderr
    return result.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            MINE + NIC + "[fabric]\nkind = 'torus'\nshape = [2, 2]\n",
            r"torus of 4 nodes, but cluster mine has 2",
        ),
        (MINE + NIC + "[fabric]\nkind = 'rail'\nnodes_per_leav = 2\n", "did you mean nodes_per_leaf"),
        (MINE + NIC + "oversubscripton = 2.0\n", "unknown key 'oversubscripton'"),
        (MINE + NIC.replace('bandwidth = "400 Gb/s", ', "") + FABRIC, "bandwidth is missing"),
        (MINE.replace('intra = "nvlink4"\n', "") + NIC + FABRIC, "intra is missing"),
        (MINE + NIC.replace('"400 Gb/s"', "400") + FABRIC, "bandwidth = 400: give a unit|bandwidth = 400"),
        (MINE + NIC + FABRIC + "kind = [\n", "is not TOML"),
        ((MINE + NIC + FABRIC)[:60], "is not TOML|is missing"),
        (MINE + FABRIC, "no NICs"),
        (MINE + NIC, "fabric of kind 'node'"),
        (MINE + NIC.replace("400", "-400") + FABRIC, "bandwidth = '-400 Gb/s'"),
        (MINE + NIC + FABRIC + "oversubscription = nan\n", "oversubscription = nan: must be a number"),
        ("base = './mine.toml'\n", "a base is a name of the catalogue, not a file"),
        (
            MINE.replace("n_gpus = 16", "n_gpus = 1_000_000") + NIC + FABRIC,
            "of 1,000,000 GPUs is not built",
        ),
        (PAIR + ONE_LINK, "gpu:2, gpu:3 cannot reach gpu:0"),
        (PAIR + ONE_LINK.replace("gpu:1", "gpu:0"), "both ends are the same"),
    ],
    ids=[
        "dimensions that do not multiply to the nodes",
        "a misspelt key of a table",
        "a misspelt key of the file",
        "a bandwidth left out",
        "a link left out",
        "a number without unit",
        "a malformed file",
        "a file cut off",
        "nodes without network",
        "nodes without fabric",
        "a bandwidth below zero",
        "a figure that is no number",
        "a file that is its own base",
        "a machine too large to check",
        "GPUs that no link reaches",
        "a link to itself",
    ],
)
def test_a_machine_with_a_mistake(tmp_path: Path, text: str, said: str) -> None:
    assert re.search(said, refused(tmp_path, text))


def test_a_file_that_is_not_there() -> None:
    result = CliRunner().invoke(main, ["topology", "check", "nowhere.toml"])
    assert result.exit_code == 2
    assert "nowhere.toml" in result.stderr


def test_a_misspelt_option() -> None:
    result = CliRunner().invoke(main, ["simulate", "--nccl-alg", "ring", "--model", "llama3-8b"])
    assert result.exit_code == 2
    assert "--nccl-algo" in result.stderr


@pytest.mark.parametrize("world_size", [0, 65, 128])
def test_more_ranks_than_gpus_and_none(world_size: int) -> None:
    with pytest.raises(TopologyError, match=f"{world_size} ranks do not fit on the 64 GPUs"):
        place(world_size, load_cluster("dgx-h100", 64))


def test_fewer_places_than_ranks(tmp_path: Path) -> None:
    path = tmp_path / "ranks.txt"
    path.write_text("0 1 2", encoding="utf-8")
    with pytest.raises(TopologyError, match="placement of 3 ranks; there are 4"):
        place(4, load_cluster("dgx-h100", 8), str(path))


def test_a_collective_that_does_not_exist() -> None:
    with pytest.raises(SimulationError, match="collective 'all_reduced': one of all_reduce"):
        Network(load_cluster("dgx-h100", 8)).collective("all_reduced", 1024, range(8))


def test_an_algorithm_for_one_dimension_of_a_machine_with_two() -> None:
    """Asked for switches inside a node only, another simulator reduces inside each node and stops there."""
    with pytest.raises(SimulationError, match="none does an all_reduce over 8 nodes"):
        Network(load_cluster("dgx-h100", 64), choice=choice("nvls")).collective("all_reduce", 1, range(64))


def program(ranks: Sequence[int], participants: int, deps: Sequence[Sequence[int]] = ()) -> Program:
    """Return one all-reduce of *participants*, of which *ranks* have a task."""
    nothing = [0] * len(ranks)
    return program_of(
        rank=ranks,
        stream=nothing,
        label=nothing,
        duration_ns=nothing,
        instance=nothing,
        deps=deps or [()] * len(ranks),
        streams=("dp",),
        labels=(Label("collective", "all_reduce", "gradients", "dp"),),
        transfers=[Transfer(10, 20, "ring/simple", 0.0, 1.0)],
        instance_participants=np.array([participants], np.int32),
    )


@pytest.mark.parametrize("engine", [event, compiled, contended, contended_compiled], ids=lambda e: e.NAME)
def test_a_rank_that_never_joins_a_collective(engine: ModuleType) -> None:
    """Another simulator says that one rank has finished."""
    with pytest.raises(ProgramError, match=r"all_reduce 0 of group 7 .* 3 of 4 participants came"):
        engine.run(program([0, 1, 2], 4))


@pytest.mark.parametrize("engine", [event, compiled, contended, contended_compiled], ids=lambda e: e.NAME)
def test_dependencies_in_a_circle(engine: ModuleType) -> None:
    with pytest.raises(ProgramError, match="cannot run"):
        engine.run(program([0, 1], 2, [[1], [0]]))


def test_a_run_that_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "cut.arrow"
    path.write_bytes(b"ARROW1\0\0")
    with pytest.raises(TraceError, match=r"cut\.arrow"):
        open_run(path)


@cache
def plain(n_gpus: int, algorithm: str) -> Network:
    """Return nodes of eight GPUs on links of which nothing is measured, under one algorithm."""
    inside = LinkSpec(name="inside", kind="nvlink", bandwidth_bytes_per_s=483.18e9, latency_s=1e-6)
    cluster = replace(load_cluster("dgx-h100", n_gpus), fabric_spec=FabricSpec(kind="rail"), intra=inside)
    return Network(cluster, choice=choice(algorithm, "simple"))


@given(
    n_gpus=sampled_from((8, 64, 512)),
    parts=integers(1, 64),
    power=integers(24, 34),
    algorithm=sampled_from(("ring", "tree")),
)
def test_the_answer_does_not_depend_on_how_an_array_is_cut(
    n_gpus: int, parts: int, power: int, algorithm: str
) -> None:
    """On the same links, parts of an array that set off together end when the whole would.

    ASTRA-sim's answers for one array differ 21-fold by how it is cut. Each part is priced on its own; inside
    a node there is only the ring, and every link is plain, so that bytes take what they take in any array.
    """
    network = plain(n_gpus, algorithm)
    whole = network.collective("all_reduce", 2**power, range(n_gpus))
    edges = [2**power * part // parts for part in range(parts + 1)]
    fluid = Fluid()
    for part, (start, end) in enumerate(pairwise(edges)):
        wire_ns = network.collective("all_reduce", end - start, range(n_gpus)).wire_ns
        fluid.start(part, wire_ns, {"far": 1.0})
    end_ns = 0
    while (found := fluid.next_end_ns()) is not None:
        end_ns = found
        fluid.advance(found)
    assert abs(end_ns - whole.wire_ns) <= parts
