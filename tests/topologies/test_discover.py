"""Machines read from what a node's own tools print."""

import json
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from foretrace.cli import main
from foretrace.topologies.catalog import load_cluster
from foretrace.topologies.discover import discover, to_toml
from foretrace.topologies.discover.matrix import from_matrix
from foretrace.topologies.errors import CatalogError
from foretrace.topologies.reach import Reach
from foretrace.topologies.wiring import fabric

HEAD = "\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\n"
SWITCHED = HEAD + "".join(
    f"GPU{a}\t" + "\t".join(" X " if a == b else "NV18" for b in range(4)) + "\tPIX\t0-51\t0\n"
    for a in range(4)
)
SWITCHED += "NIC0\tPIX\tPIX\tPIX\tPIX\t X \n\nLegend:\n\n  X    = Self\n  NV#  = bonded set of # NVLinks\n"
PAIRS = """
        GPU0    GPU1    GPU2    GPU3    CPU Affinity
GPU0     X      NV12    SYS     SYS     0-23
GPU1    NV12     X      SYS     SYS     0-23
GPU2    SYS     SYS      X      NV12    24-47
GPU3    SYS     SYS     NV12     X      24-47
"""
XML = """<system version="1"><cpu numaid="0"><pci busid="0000:10:00.0" class="0x060400">
<pci busid="0000:11:00.0" class="0x030200"><gpu dev="0" sm="80" rank="0" gdr="1">
<nvlink target="0000:aa:00.0" count="6" tclass="0x068000"/>
<nvlink target="0000:ab:00.0" count="6" tclass="0x068000"/>
</gpu></pci>
<pci busid="0000:12:00.0" class="0x030200"><gpu dev="1" sm="80" rank="1" gdr="1">
<nvlink target="0000:aa:00.0" count="12" tclass="0x068000"/></gpu></pci>
<pci busid="0000:13:00.0" class="0x020000"><nic><net name="mlx5_0" speed="200000" port="1"/></nic></pci>
</pci></cpu></system>"""
MESH = """<system version="1"><cpu numaid="0">
<pci busid="0000:11:00.0"><gpu dev="0" sm="70">
<nvlink target="0000:12:00.0" count="2" tclass="0x030200"/></gpu></pci>
<pci busid="0000:12:00.0"><gpu dev="1" sm="70">
<nvlink target="0000:11:00.0" count="2" tclass="0x030200"/></gpu></pci>
</cpu></system>"""


def written(folder: Path, text: str, name: str = "topo.txt") -> Path:
    """Return the path of a file that holds *text*."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def width(folder: Path, text: str, device: str = "", n_gpus: int = 2) -> float:
    """Return what GPUs get in a machine that was read from *text*, in GB/s."""
    cluster = load_cluster(written(folder, to_toml(discover(written(folder, text)), device), "mine.toml"))
    shape = Reach(fabric(cluster), range(cluster.n_gpus)).shape(range(n_gpus))
    return shape.intra_bytes_per_s / 1e9


def test_equal_links_between_all_pairs_mean_a_switch(tmp_path: Path) -> None:
    found = discover(written(tmp_path, SWITCHED))
    assert (found.n_gpus, found.capability, len(found.nics)) == (4, "90", 1)
    assert found.to_switch == dict.fromkeys(range(4), 18)
    assert width(tmp_path, SWITCHED, n_gpus=4) == 450


def test_blackwell_has_as_many_links_and_must_be_named(tmp_path: Path) -> None:
    assert width(tmp_path, SWITCHED, "b200-sxm", 4) == 900


def test_a_nic_without_a_distance_serves_no_gpu() -> None:
    lines = SWITCHED.replace("NIC0", "NIC0\tNIC1", 1).splitlines()
    lines = [line.replace("\tPIX", "\tPIX\tX", 1) if line.startswith("GPU") else line for line in lines]
    found = from_matrix("\n".join(lines))
    assert len(found.nics) == 1
    assert found.n_other_nics == 1


def test_bridged_pairs_stay_pairs(tmp_path: Path) -> None:
    found = discover(written(tmp_path, PAIRS))
    assert found.between == {(0, 1): 12, (2, 3): 12}
    with pytest.raises(CatalogError, match="does not say which GPU this is; give --device"):
        to_toml(found)
    assert width(tmp_path, PAIRS, "a100-80gb") == 300
    assert width(tmp_path, PAIRS, "a100-80gb", 4) == 32


BRIDGED = """
        GPU0    GPU1    GPU2    GPU3    NIC0    CPU Affinity
GPU0     X      NV12    SYS     SYS     PIX     0-23
GPU1    NV12     X      SYS     SYS     PIX     0-23
GPU2    SYS     SYS      X      NV12    SYS     24-47
GPU3    SYS     SYS     NV12     X      SYS     24-47
NIC0    PIX     PIX     SYS     SYS      X
"""
UNEVEN = BRIDGED.replace("NV12     X      SYS     SYS", "NV12     X      NV4     SYS").replace(
    "SYS     SYS      X ", "SYS     NV4      X "
)


@pytest.mark.parametrize(("device", "link"), [("a100-pcie", "nvlink3"), ("h100-nvl", "nvlink4")])
def test_bridged_pairs_with_a_nic_become_several_nodes(tmp_path: Path, device: str, link: str) -> None:
    wiring = to_toml(discover(written(tmp_path, BRIDGED)), device)
    assert f'intra = "{link}-bridge"\nnode = {{ kind = "pairs"' in wiring
    several = written(tmp_path, wiring.replace("n_gpus = 4", "n_gpus = 16"), "several.toml")
    graph = fabric(load_cluster(several))
    assert Reach(graph, range(16)).shape(range(2)).intra_bytes_per_s == 300e9
    assert Reach(graph, range(16)).shape(range(16)).n_domains == 4


def test_a_bridge_between_two_cards_does_not_reduce(tmp_path: Path) -> None:
    mine = written(tmp_path, to_toml(discover(written(tmp_path, PAIRS)), "h100-nvl"), "mine.toml")
    assert not load_cluster(mine).intra.reduces


def test_links_without_a_name_are_listed_and_say_that_nics_are_left_out(tmp_path: Path) -> None:
    wiring = to_toml(discover(written(tmp_path, UNEVEN)), "a100-80gb")
    assert "# its 1 NICs are left out" in wiring
    assert wiring.count("[[links]]") == 7
    assert load_cluster(written(tmp_path, wiring, "mine.toml")).n_gpus == 4


def test_nics_that_do_not_reach_the_memory_of_gpus(tmp_path: Path) -> None:
    assert discover(written(tmp_path, XML)).gpu_direct
    copies = XML.replace('port="1"', 'port="1" gdr="0"')
    wiring = to_toml(discover(written(tmp_path, copies)))
    assert "gpu_direct = false" in wiring
    nic = load_cluster(written(tmp_path, wiring, "mine.toml")).nic
    assert nic is not None
    assert not nic.gpu_direct


def test_the_xml_of_nccl_says_device_links_and_speed(tmp_path: Path) -> None:
    found = discover(written(tmp_path, XML))
    assert (found.n_gpus, found.capability, found.nics) == (2, "80", [200.0])
    assert found.to_switch == {0: 12, 1: 12}
    assert width(tmp_path, XML) == 300
    assert 'nic = "roce-200"' in to_toml(found)


def test_links_between_gpus_come_with_their_number(tmp_path: Path) -> None:
    assert discover(written(tmp_path, MESH)).between == {(0, 1): 2}
    assert width(tmp_path, MESH) == 50


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hello", "names no GPU: give NCCL_TOPO_DUMP_FILE's XML or `nvidia-smi topo -m`"),
        ("<system><cpu>", "is not XML"),
        ("<system/>", "names no GPU"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(CatalogError, match=says):
        discover(written(tmp_path, text))
    with pytest.raises(CatalogError, match="cannot be read"):
        discover(tmp_path / "missing")


def test_the_verb_writes_a_machine_that_checks(tmp_path: Path) -> None:
    source, target = written(tmp_path, SWITCHED), tmp_path / "mine.toml"
    runner = CliRunner()
    printed = runner.invoke(main, ["topology", "read", str(source)], catch_exceptions=False).stdout
    assert printed.startswith('device = "h100-sxm" # 18 NVLinks: an H100;')
    assert "\ngpus_per_node = 4\n" in printed
    target.write_text("an older machine", encoding="utf-8")
    runner.invoke(main, ["topology", "read", str(source), "-o", str(target)], catch_exceptions=False)
    assert {*tmp_path.iterdir()} == {source, target}
    checked = runner.invoke(main, ["topology", "check", str(target)], catch_exceptions=False)
    assert "4 GPUs in 1 NVLink domain," in checked.stdout


def test_the_machine_as_one_json_object(tmp_path: Path) -> None:
    """With and without a file to write: the same machine as the TOML holds, and the TOML itself."""
    source, target = written(tmp_path, SWITCHED), tmp_path / "mine.toml"
    runner = CliRunner()
    text = runner.invoke(main, ["topology", "read", str(source)], catch_exceptions=False).stdout
    for words, file in (([], None), (["-o", str(target)], str(target))):
        done = runner.invoke(
            main, ["topology", "read", str(source), "--json", *words], catch_exceptions=False
        )
        assert json.loads(done.stdout) == {"machine": tomllib.loads(text), "toml": text, "file": file}
        assert done.stdout.count("\n") == 1
    assert target.read_text(encoding="utf-8") == text


def test_the_maker_of_the_processor_is_read(tmp_path: Path) -> None:
    said = XML.replace('<cpu numaid="0">', '<cpu numaid="0" arch="x86_64" vendor="AuthenticAMD">')
    wiring = to_toml(discover(written(tmp_path, said)))
    assert load_cluster(written(tmp_path, wiring, "mine.toml")).cpu == "amd"
    assert "cpu" not in to_toml(discover(written(tmp_path, XML)))


@pytest.mark.parametrize(
    ("old", "new"), [('count="12"', 'count="a dozen"'), ('speed="200000"', 'speed="fast"')]
)
def test_words_for_numbers_are_refused(tmp_path: Path, old: str, new: str) -> None:
    with pytest.raises(CatalogError, match="a count or speed is not a number"):
        discover(written(tmp_path, XML.replace(old, new)))
