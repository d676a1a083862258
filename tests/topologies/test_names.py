"""What people call machines, and a link over another."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from foretrace.topologies import catalog
from foretrace.topologies.catalog import (
    aliases,
    device_named,
    device_names,
    load_cluster,
    load_device,
    load_link,
    names,
    plain,
)
from foretrace.topologies.cluster import Cluster
from foretrace.topologies.errors import CatalogError, TopologyError
from foretrace.topologies.wiring import fabric


def test_every_alias_is_plain_and_stands_for_a_machine() -> None:
    others = aliases()
    assert {plain(alias) for alias in others} == set(others)
    assert not set(others) & set(names())


def test_no_name_and_no_pci_id_stands_for_two() -> None:
    """Each entry of the catalogue says what it is called, and knows nothing of the others."""
    said = [tomllib.loads(path.read_text("utf-8")) for path in Path(catalog.__file__).parent.rglob("*.toml")]
    # A device has one pattern, a machine a list.
    machines = [other for one in said if isinstance(one.get("called"), list) for other in one["called"]]
    assert len(machines) == len(set(machines)) == len(aliases())
    pci_ids = [pci_id for one in said for pci_id in one.get("pci_ids", ())]
    assert len(pci_ids) == len(set(pci_ids))


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA B200", "b200-sxm"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("AMD Instinct MI300X OAM", "mi300x"),
    ],
)
def test_a_device_is_found_by_the_pattern_that_says_most_of_its_name(said: str, meant: str) -> None:
    assert device_named(said).name == meant


def test_names_are_of_the_catalogue_alone(tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(CatalogError, match="unknown key 'called'"):
        written(tmp_path_factory, 'base = "dgx-h100"\ncalled = ["mine"]\n')


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("h100", "dgx-h100"),
        ("H100", "dgx-h100"),
        ("rtx4090", "rtx4090-8"),
        ("RTX 4090", "rtx4090-8"),
        ("p5.48xlarge", "aws-p5"),
        ("Standard_ND96isr_H100_v5", "azure-ndv5"),
        ("a3-megagpu-8g", "gcp-a3-mega"),
        ("HGX_H200", "dgx-h200"),
        ("nvl72", "gb200-nvl72"),
    ],
)
def test_a_machine_is_found_by_what_people_type(typed: str, meant: str) -> None:
    assert load_cluster(typed) == load_cluster(meant)
    assert load_cluster(typed).name == meant


ASKED_FOR = (
    "v100 a100 a100-40gb a100-pcie h100 h100-pcie h100-96gb h800 h200 b200 b300 gb200 gb300 mi300x l40s a40 "
    "rtx4090 dgx-a100 hgx-h100 p4d p4de p5 p5en p6 ndv4 ndv5 a3-high a3-mega a3-ultra a4 jean-zay ethernet "
    "nvl72"
)


@pytest.mark.parametrize("name", ASKED_FOR.split())
def test_every_machine_that_is_asked_for_exists_by_a_plain_name(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.n_gpus >= 2
    assert fabric(cluster.sized(2 * cluster.gpus_per_node)).number_of_nodes() > 2 * cluster.gpus_per_node


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("h10", r"did you mean dgx-h100"),
        ("rtx4080", r"did you mean rtx4090-8"),
        ("gb20", r"did you mean gb200-nvl72"),
        ("zzzz", r"foretrace topology list shows all \d+\."),
        ("mi250x", r"is a device, and no machine of the catalogue has it: .*device = \"mi250x\""),
    ],
)
def test_near_misses_are_told_the_nearest(typed: str, says: str) -> None:
    with pytest.raises(CatalogError, match=says) as caught:
        load_cluster(typed)
    assert "\n" not in str(caught.value)


def written(folder: pytest.TempPathFactory, text: str) -> Cluster:
    """Return the machine that *text* describes."""
    path = folder.mktemp("machines") / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return load_cluster(path)


def test_a_machine_with_another_device_has_not_the_price_of_its_base(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    same = written(tmp_path_factory, 'base = "h100"\n')
    other = written(tmp_path_factory, 'base = "dgx-h100"\ndevice = "a40"\n')
    assert same.price_usd_per_gpu_hour == load_cluster("dgx-h100").price_usd_per_gpu_hour is not None
    assert (other.device.name, other.price_usd_per_gpu_hour) == ("a40", None)
    given = written(tmp_path_factory, 'base = "dgx-h100"\ndevice = "a40"\nprice_per_gpu = "1 USD/h"\n')
    assert given.price_usd_per_gpu_hour == 1.0


@pytest.mark.parametrize("name", names())
def test_a_file_that_only_names_its_base_is_that_machine(
    tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    assert replace(written(tmp_path_factory, f'base = "{name}"\n'), name=name) == load_cluster(name)


def test_a_link_over_another_keeps_what_it_does_not_change(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Half as wide an NVLink: what was measured stays that of the width that was measured."""
    text = 'base = "dgx-h100"\nintra = { base = "nvlink4", bandwidth = "225 GB/s" }\n'
    halved, whole = written(tmp_path_factory, text).intra, load_link("nvlink4")
    assert (halved.bandwidth_bytes_per_s, halved.latency_s, halved.reduces) == (225e9, whole.latency_s, True)
    assert halved.tables == whole.tables
    slow = 'base = "dgx-h100"\nnic = { base = "ib-ndr", gpu_direct = false, flow = "10 Gb/s" }\n'
    nic = written(tmp_path_factory, slow).nic
    assert nic is not None
    assert (nic.bandwidth_bytes_per_s, nic.gpu_direct, nic.flow_bytes_per_s) == (50e9, False, 1.25e9)


MINE = """
device = "h100-sxm"
gpus_per_node = 8
n_gpus = 16
intra = "nvlink4"
nic = "ib-ndr"
nics_per_node = 8
"""


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ('[fabric]\nkind = "rail"\nnodes_per_leaf = 0', "nodes_per_leaf = 0: at least 1"),
        ('[fabric]\nkind = "rail"\noversubscription = nan', "oversubscription = nan: must be a number"),
        ('[fabric]\nkind = "torus"\nshape = [3, 3]', r"torus of 9 nodes, but cluster mine has 2"),
        ('[fabric]\nkind = "torus"\nshape = "2x1"', "shape = '2x1': must be a list of whole numbers"),
        ('[fabric]\nkind = "two-site"\ngroup_nodes = 1\ngroup_bandwidth = "0 GB/s"', "both above zero"),
        ('fabric = "rail"', r"fabric = 'rail' must be a table, \[fabric\]"),
        ('node = { kind = "pairs" }', "'pairs' needs host"),
        ('[[others]]\nmachine = "dgx-a10"\nnodes = 1', "did you mean dgx-a100"),
        ('[[others]]\nmachine = "dgx1-v100"\nnodes = 1', "have nics_per_node = 4, its own 8"),
        (
            '[[links]]\nbetween = ["gpu:0"]',
            r"\[\[links\]\] number 1: between = \['gpu:0'\]: must name two ends",
        ),
        ('[[links]]\nbetween = ["gpu:0", "gpu:0"]', "mine.toml: link gpu:0 - gpu:0: both ends are the same"),
        ('[[links]]\nbetween = ["gpu:0", "gpu:99"]', "gpu:99 is not one of gpu:0 to gpu:15"),
        ("nics_used = 9", "from 0, all of them, to nics_per_node = 8"),
        ('cpu = "sparc"', "one of amd, arm, intel"),
        ('price_per_gpu = "3 EUR/h"', "is not a price"),
        ('base = "mine.toml"', "a name of the catalogue, not a file"),
        ('[nic]\nbase = "ib-nrd"', "is not TOML"),
    ],
)
def test_a_machine_that_cannot_be_is_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, more: str, says: str
) -> None:
    with pytest.raises(TopologyError, match=says) as caught:
        fabric(written(tmp_path_factory, f"{MINE}{more}\n"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("nic", "says"),
    [
        ('{ base = "ib-nrd" }', "no link 'ib-nrd' .* did you mean ib-ndr"),
        ('{ base = "ib-ndr", bandwith = "3 GB/s" }', "unknown key 'bandwith'; did you mean bandwidth"),
        ('{ base = "ib-ndr", bandwidth = "-3 GB/s" }', "is not a bandwidth"),
        ('{ base = "ib-ndr", bandwidth = "0 GB/s" }', "must be above zero"),
        ('{ base = "ib-ndr", protocols = ["fast"] }', "protocol 'fast'"),
        ('{ bandwidth = "3 GB/s" }', "latency is missing"),
    ],
)
def test_a_link_that_cannot_be_is_refused(
    tmp_path_factory: pytest.TempPathFactory, nic: str, says: str
) -> None:
    with pytest.raises(TopologyError, match=says):
        written(tmp_path_factory, MINE.replace('"ib-ndr"', nic))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("n_gpus = 16", "n_gpus = 1000000", "1,000,000 GPUs is not built"),
        ("n_gpus = 16", "n_gpus = 100000000", "cluster mine: 100000000 GPUs: at most 4,194,304"),
        (
            "nics_per_node = 8",
            "nics_per_node = 8000000\nfabric = { kind = 'rail' }",
            "16,000,000 NICs is not built",
        ),
        ("gpus_per_node = 8", "gpus_per_node = 16\nnode = { kind = 'full-mesh' }", ""),
        (
            "gpus_per_node = 8\nn_gpus = 16",
            "gpus_per_node = 9000\nnode = { kind = 'full-mesh' }",
            "at most 256",
        ),
    ],
)
def test_a_fabric_too_large_to_build_is_refused_before_it_is(
    tmp_path_factory: pytest.TempPathFactory, old: str, new: str, says: str
) -> None:
    text = MINE.replace(old, new)
    if not says:
        assert fabric(written(tmp_path_factory, text)).number_of_edges() == 16 * 15
        return
    with pytest.raises(TopologyError, match=says):
        fabric(written(tmp_path_factory, text))


@pytest.mark.parametrize("name", device_names())
def test_every_device_is_consistent_with_itself(name: str) -> None:
    """Fewer bits are never slower (but bf16 and tf32 where they run as fp32), and memory fits the name."""
    device = load_device(name)
    peaks = device.peak_flops_per_s
    order = [peaks[dtype] for dtype in ("fp4", "fp8", "fp16", "tf32", "fp32") if dtype in peaks]
    assert order == sorted(order, reverse=True)
    assert peaks["fp16"] >= peaks["bf16"] >= peaks["fp32"]
    assert 0.25e12 < device.memory_bytes_per_s < 10e12 or name == "cpu-core"
    assert device.reserved_bytes < device.memory_bytes / 10
