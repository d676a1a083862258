"""The catalogue: every machine loads, every figure has a source, and mistakes are named."""

import json
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foretrace.topologies.catalog import (
    _over,
    device_named,
    device_names,
    link_names,
    load_cluster,
    load_device,
    load_link,
    names,
)
from foretrace.topologies.cluster import digest
from foretrace.topologies.errors import CatalogError, FabricError, TopologyError, UnitError
from foretrace.topologies.facts import parts
from foretrace.topologies.reach import Reach
from foretrace.topologies.wiring import fabric

HOME = Path(__file__).parents[2] / "topologies" / "catalog"
FILES = sorted(HOME.rglob("*.toml"))

SMALL = """
device = "h100-sxm"
gpus_per_node = 8
n_gpus = 16
intra = "nvlink4"
nic = { bandwidth = "200 Gb/s", latency = "5 us" }
nics_per_node = 4

[fabric]
kind = "fat-tree"
oversubscription = 2.0
"""


def written(folder: Path, text: str) -> str:
    """Return the path of a file that holds *text*."""
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


UNSOURCED = {"sources", "times_us", "sizes", "source", "description", "assumed"}
"""Keys that need no source: they are one, or text, or belong to a table that has one."""


def with_base(path: Path) -> dict[str, Any]:
    """Return the tables of a file of the catalogue over those of its base."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    base = table.get("base")
    return _over(with_base(path.with_name(f"{base}.toml")), table) if base else table


def figures(table: dict[str, Any], where: str = "") -> Iterator[tuple[str, object]]:
    """Yield every value of a file that is, or holds, a number."""
    for key, value in table.items():
        inner = f"{where}{key}"
        if isinstance(value, dict) and not {"value", "source"} & set(value) and key not in UNSOURCED:
            yield from figures(value, f"{inner}.")
        elif key not in UNSOURCED:
            yield inner, value


def test_the_machines_that_people_ask_for_are_there() -> None:
    wanted = {"dgx-a100", "dgx-a100-40gb", "dgx-h100", "dgx-h200", "dgx-b200", "gb200-nvl72", "localhost"}
    assert wanted <= set(names())


@pytest.mark.parametrize("name", names())
def test_every_machine_loads_and_describes_itself_in_json(name: str) -> None:
    cluster = load_cluster(name)
    described = json.loads(json.dumps(cluster.describe()))
    assert described["name"] == name
    assert described["device"]["memory_bytes"] == cluster.device.memory_bytes
    assert all(
        described["device"]["sources"][key] for key in ("memory_bytes", "peak_flops_per_s", "gemm_efficiency")
    )
    assert fabric(cluster).number_of_edges() >= 2 * (cluster.n_gpus - 1)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_figure_of_the_catalogue_has_a_source(path: Path) -> None:
    """Text may stand alone; a number, or text that begins with one, needs to say where it comes from.

    The source of a table of the base says nothing about a figure that a file puts in its place.
    """
    bare = [
        key
        for key, value in figures(tomllib.loads(path.read_text(encoding="utf-8")))
        if not isinstance(value, dict | bool)
        and str(value)[:1].isdigit()
        # How many processes `localhost` has is the user's choice; what a device is called is a name.
        and key not in {"gpus_per_node", "n_gpus", "called"}
    ]
    assert bare == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_source_that_is_named_is_written_out_and_used(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    own, known = set(tomllib.loads(text).get("sources", {})), set(with_base(path).get("sources", {}))
    used = {part.split('"')[1] for part in text.split("source = ")[1:]}
    assert own <= used <= known


DOCUMENTED = (Path(__file__).parents[2] / "docs" / "topologies.md").read_text(encoding="utf-8")
EXAMPLES = [block.split("```")[0] for block in DOCUMENTED.split("```toml\n")[1:]]


@pytest.mark.parametrize("name", names())
def test_every_number_that_is_shown_of_a_machine_has_a_source(name: str) -> None:
    """Also what a file leaves out: a host link of 25 GB/s once stood there without."""
    bare = [
        f"{title}: {key}"
        for title, facts, sources in parts(load_cluster(name))
        for key, value in facts.items()
        if value[:1].isdigit()
        and not any(known.partition(".")[0] == key or known == key for known in sources)
    ]
    assert set(bare) <= {"machine: gpus_per_node", "machine: nics_per_node"}
    assert name == "localhost" or not bare


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_files_in_the_documentation_describe_machines(tmp_path: Path, example: str) -> None:
    cluster = load_cluster(written(tmp_path, example))
    everybody = Reach(fabric(cluster), range(cluster.n_gpus)).shape(range(cluster.n_gpus))
    assert everybody.n_ranks == cluster.n_gpus > cluster.gpus_per_node


def test_the_documentation_shows_files() -> None:
    assert len(EXAMPLES) == 3


def test_names_of_devices_and_links_load() -> None:
    assert [load_device(name).name for name in device_names()] == device_names()
    assert [load_link(name).name for name in link_names()] == link_names()


@pytest.mark.parametrize(
    ("device", "bf16", "memory_gb"),
    [
        ("a100-80gb", 312e12, 80),
        ("h100-sxm", 989.4e12, 80),
        ("h200-sxm", 989.4e12, 141),
        ("b200-sxm", 2.25e15, 180),
    ],
)
def test_published_peaks_and_memories(device: str, bf16: float, memory_gb: float) -> None:
    """Memory is what the device reports: 0 to 9 % more than the name says."""
    found = load_device(device)
    assert found.peak("bf16") == pytest.approx(bf16, rel=1e-3)
    assert 1.0 <= found.memory_bytes / (memory_gb * 1e9) < 1.09


def test_an_unknown_name_lists_its_neighbours() -> None:
    with pytest.raises(CatalogError, match=r"no cluster 'dgx-h10'.* did you mean .*dgx-h100"):
        load_cluster("dgx-h10")


def test_a_name_like_no_other_is_told_what_lists_them_all() -> None:
    with pytest.raises(CatalogError, match=rf"foretrace topology list shows all {len(names())}\."):
        load_cluster("zzzzzz")


def test_ten_lines_make_a_machine(tmp_path: Path) -> None:
    cluster = load_cluster(written(tmp_path, SMALL))
    assert (cluster.name, cluster.n_gpus, cluster.n_nodes) == ("mine", 16, 2)
    assert cluster.nic is not None
    assert cluster.nic.bandwidth_bytes_per_s == 25e9
    assert cluster.sized(64).n_nodes == 8


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"200 Gb/s"', '"200"', r"bandwidth = '200' is not a bandwidth"),
        ('"h100-sxm"', '"h100"', r"no device 'h100' .*did you mean .*h100-sxm"),
        (
            "nics_per_node = 4",
            "nics_per_nodes = 4",
            r"unknown key 'nics_per_nodes'; did you mean nics_per_node\?",
        ),
        ("gpus_per_node = 8", "", r"gpus_per_node is missing"),
        ("gpus_per_node = 8", "gpus_per_node = 8.5", r"gpus_per_node = 8.5: must be a whole number"),
        ("gpus_per_node = 8", "gpus_per_node = 0", r"gpus_per_node = 0, at least 1"),
        ('"fat-tree"', '"tree"', r"fabric kind 'tree': one of node, rail, .* or list \[\[links\]\]"),
        ('"fat-tree"', '"torus"', r"shape = \[\]: a torus, and nothing else, has one"),
        ('"fat-tree"', '"two-site"', r"fabric kind 'two-site' needs group_nodes and group_bandwidth"),
        ("2.0", "0.5", r"oversubscription = 0.5"),
        ("[fabric]", "[fabrik]", r"unknown key 'fabrik'; did you mean fabric\?"),
        ("[fabric]", "[fabric", r"is not TOML"),
    ],
)
def test_a_mistake_in_a_file_is_named_with_the_file(tmp_path: Path, old: str, new: str, says: str) -> None:
    path = written(tmp_path, SMALL.replace(old, new))
    with pytest.raises(TopologyError, match=says) as caught:
        load_cluster(path)
    assert str(caught.value).startswith(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(CatalogError, match=r"nowhere.toml cannot be read: No such file"):
        load_cluster("nowhere.toml")


def test_a_binary_file_is_not_toml(tmp_path: Path) -> None:
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe\x00ARROW1")
    with pytest.raises(CatalogError, match="is not text"):
        load_cluster(path)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('memory = "0 GB"', "memory = 0 must be above zero"),
        ("sustained_clock_fraction = 1.5", "is a share, above 0 and at most 1"),
        ("training_clock_fraction = 0", "is a share, above 0 and at most 1"),
        ('reserved = "30 GB"', "give less than the memory"),
    ],
)
def test_a_device_that_cannot_be_is_refused(tmp_path: Path, line: str, says: str) -> None:
    text = (HOME / "localhost.toml").read_text(encoding="utf-8")
    key = line.partition(" = ")[0]
    lines = [entry for entry in text.splitlines() if not entry.startswith(f"{key} =")]
    lines.insert(lines.index("[device]") + 1, line)
    with pytest.raises(CatalogError, match=says):
        load_cluster(written(tmp_path, "\n".join(lines)))


def test_two_nodes_without_nics_name_the_gpu_that_is_cut_off(tmp_path: Path) -> None:
    text = SMALL.replace("nics_per_node = 4", "")
    with pytest.raises(FabricError, match=r"gpu:8 cannot reach gpu:0.* no NICs"):
        fabric(load_cluster(written(tmp_path, text)))


def test_a_peak_that_a_device_does_not_have_is_refused() -> None:
    with pytest.raises(CatalogError, match="a100-80gb has no peak for 'fp8'; it has bf16"):
        load_device("a100-80gb").peak("fp8")


@pytest.mark.parametrize("n_processes", [1, 2, 3, 4, 8])
def test_processes_share_the_cores_of_a_machine(n_processes: int) -> None:
    """Two cores: up to two processes run at full speed, four at half; memory is divided among all."""
    alone, crowd = load_cluster("localhost", 1), load_cluster("localhost", n_processes)
    share = min(1.0, alone.cores / n_processes)
    assert crowd.n_nodes == 1
    assert crowd.device.peak("fp32") == pytest.approx(share * alone.device.peak("fp32"))
    assert crowd.device.launch_s == pytest.approx(alone.device.launch_s / share)
    assert crowd.device.memory_bytes * n_processes == pytest.approx(
        alone.device.memory_bytes, abs=n_processes
    )
    assert (crowd.turn_s > 0) == (n_processes > alone.cores)


def test_resizing_forgets_the_way_there() -> None:
    assert load_cluster("localhost", 4).sized(2) == load_cluster("localhost", 2)
    assert load_cluster("dgx-h100", 512).sized(8) == load_cluster("dgx-h100")


@pytest.mark.parametrize("n_gpus", [0, -8])
def test_a_machine_of_no_gpus_is_refused(n_gpus: int) -> None:
    with pytest.raises(CatalogError, match="at least 1"):
        load_cluster("dgx-h100", n_gpus)


def test_a_bare_number_in_the_catalogue_would_be_refused(tmp_path: Path) -> None:
    text = (HOME / "localhost.toml").read_text(encoding="utf-8").replace('"36 GB/s"', "36")
    with pytest.raises(UnitError, match="memory_bandwidth = 36 is not a bandwidth"):
        load_cluster(written(tmp_path, text))


DERIVED = [path for path in sorted((HOME / "devices").glob("*.toml")) if "\nbase = " in path.read_text()]


@pytest.mark.parametrize("path", DERIVED, ids=lambda path: path.stem)
def test_what_a_device_takes_from_another_names_it(path: Path) -> None:
    own, bases, above = tomllib.loads(path.read_text()), list[str](), path
    while base := tomllib.loads(above.read_text()).get("base"):
        bases.append(base)
        above = path.with_name(f"{base}.toml")
    for key, said in load_device(path.stem).sources.items():
        table = own.get(key.partition(".")[0], {})
        is_own = key in own or key.partition(".")[2] in table if isinstance(table, dict) else True
        if is_own or said.startswith("not given"):
            assert not said.startswith(tuple(f"as {one}: " for one in bases)), key
        elif not isinstance(table, dict) or "source" not in str(table):
            assert said.startswith(tuple(f"as {one}: " for one in bases)), key


@pytest.mark.parametrize(
    ("memory", "device"),
    [(42_505_273_344, "a100-40gb"), (85_000_000_000, "a100-80gb"), (0, "a100-80gb"), (10**9, "a100-80gb")],
)
def test_devices_that_call_themselves_alike_are_told_by_their_memory(memory: int, device: str) -> None:
    """As two A100s do, which differ in bandwidth by a quarter; a slice of one is taken for the whole."""
    assert device_named("NVIDIA A100-PG509-200", memory).name == device


@pytest.mark.parametrize(
    ("other", "is_the_same"),
    [
        *(({name: value}, False) for name, value in {"n_gpus": 32, "gpus_per_node": 4, "cores": 8}.items()),
        *(({name: value}, False) for name, value in {"nics_per_node": 4, "nics_used": 4}.items()),
        *(
            ({name: value}, False)
            for name, value in {"rings_out": 3, "time_slice_s": 0.1, "cpu": "arm"}.items()
        ),
        ({"intra": load_link("nvlink3")}, False),
        ({"nic": load_link("ib-xdr")}, False),
        ({"device": load_device("a100-80gb")}, False),
        ({"name": "ours", "description": "ours", "node_power_w": 20e3}, True),
        ({"transfer_factors": {"near.others.wire": 2.0}}, True),
    ],
)
def test_the_digest_of_a_machine_is_of_all_that_a_time_depends_on(
    other: dict[str, Any], is_the_same: bool
) -> None:
    machine = load_cluster("dgx-h100", 16)
    assert (digest(replace(machine, **other)) == digest(machine)) is is_the_same
