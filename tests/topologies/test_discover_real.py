"""What tools print on real machines: storage NICs, wrapped lines, templates of clouds, other NVLinks."""

from pathlib import Path

import pytest

from foretrace.topologies.catalog import load_cluster, load_link
from foretrace.topologies.cluster import Cluster
from foretrace.topologies.discover import discover, to_toml
from foretrace.topologies.discover.known import CAPABILITIES, FAMILIES, LINKS_TO_SWITCH, NICS, family
from foretrace.topologies.errors import CatalogError

UNDERLINED = (
    "\x1b[4m\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tNIC2\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
)


def read(folder: Path, text: str, device: str = "") -> Cluster:
    """Return the machine that *text* becomes."""
    source, target = folder / "topo.txt", folder / "mine.toml"
    source.write_text(text, encoding="utf-8")
    target.write_text(to_toml(discover(source), device), encoding="utf-8")
    return load_cluster(target)


def matrix(nvlinks: str, nics: list[str], n_gpus: int = 4) -> str:
    """Return the text of n GPUs with *nvlinks* between all, and a line of entries for each of *nics*."""
    gpus = [f"GPU{i}" for i in range(n_gpus)]
    names = [f"NIC{j}" for j in range(len(nics))]
    lines = ["\t" + "\t".join([*gpus, *names, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])]
    for i, gpu in enumerate(gpus):
        to_gpus = [" X " if i == j else nvlinks for j in range(n_gpus)]
        to_nics = [line.split()[i] for line in nics]
        lines.append("\t".join([gpu, *to_gpus, *to_nics, "0-31,64-95", "0", "N/A"]))
    for j, name in enumerate(names):
        others = [" X " if j == k else nics[j].split()[n_gpus + k] for k in range(len(nics))]
        lines.append("\t".join([name, *nics[j].split()[:n_gpus], *others]))
    return "\n".join(
        [
            *lines,
            "",
            "Legend:",
            "  X    = Self",
            "  PIX  = a single PCIe bridge",
            "NIC Legend:",
            "  NIC0: mlx5_0",
        ]
    )


STORAGE = ["PXB PXB SYS SYS X PXB SYS", "SYS SYS PXB PXB PXB X SYS", "SYS SYS SYS SYS SYS SYS X"]
FUNCTIONS = [f"PIX NODE SYS SYS {' '.join('X' if j == k else 'PIX' for k in range(8))}" for j in range(8)]
FAR = ["NODE NODE SYS SYS X SYS", "SYS SYS NODE NODE SYS X"]


def test_nics_that_no_gpu_is_beside_do_not_count(tmp_path: Path) -> None:
    """A DGX A100 lists eight NICs for computing and two for storage."""
    cluster = read(tmp_path, matrix("NV12", STORAGE))
    assert (cluster.gpus_per_node, cluster.nics_per_node, cluster.device.name) == (4, 2, "a100-80gb")
    assert "# 1 more serve no GPU" in (tmp_path / "mine.toml").read_text(encoding="utf-8")


def test_where_no_nic_is_beside_a_gpu_the_nearest_count(tmp_path: Path) -> None:
    assert read(tmp_path, matrix("SYS", FAR), "l40s").nics_per_node == 2


def test_virtual_functions_of_one_card_are_one_nic(tmp_path: Path) -> None:
    assert read(tmp_path, matrix("NV18", FUNCTIONS)).nics_per_node == 1


def test_a_matrix_in_the_midst_of_a_log_is_read(tmp_path: Path) -> None:
    log = f"GPU 0: NVIDIA H100\nNVIDIA Topology: \n{matrix('NV18', STORAGE)}\nulimit soft: 1048576\n"
    assert read(tmp_path, log).nics_per_node == 2


def test_entries_that_a_terminal_glued_or_wrapped_are_told_apart(tmp_path: Path) -> None:
    text = matrix("NV18", STORAGE)
    glued = text.replace("PXB\tPXB", "PXBPXB").replace("SYS\tSYS", "SYSSYS")
    wrapped = text.replace("SYS\t0-31,64-95", "\nSYS\t0-31,64-95")
    assert "SYSSYS" in glued
    assert "\nSYS" in wrapped
    for changed in (glued, wrapped, text.replace("\t", "  "), UNDERLINED + text.partition("\n")[2]):
        assert read(tmp_path, changed).nics_per_node == 2


@pytest.mark.parametrize("kept", [1, 2, 4])
def test_a_matrix_that_was_cut_off_is_refused(tmp_path: Path, kept: int) -> None:
    cut = tmp_path / "cut.txt"
    cut.write_text("\n".join(matrix("NV18", STORAGE).splitlines()[:kept]), encoding="utf-8")
    with pytest.raises(CatalogError, match=r"cut.txt: row GPU\d of the matrix has 0 entries for 7 columns"):
        discover(cut)


@pytest.mark.parametrize(
    ("nvlinks", "n_gpus", "device", "wiring"),
    [
        ("NV8", 8, "h800", ("switch", 200)),
        ("NV8", 8, "a100-80gb", ("switch", 200)),  # an A800
        ("NV18", 4, "gb200", ("switch", 900)),  # a tray
        ("NV4", 4, "a100-80gb", ("full-mesh", 300)),  # a board of four
        ("NV6", 4, "h100-sxm", ("full-mesh", 450)),
        ("NV2", 4, "v100-32gb", ("full-mesh", 150)),
        ("NV4", 2, "rtx-3090", ("pairs", 56.25)),
        ("NV4", 2, "a40", ("pairs", 56.25)),
    ],
)
def test_as_many_links_as_fit_no_peer_mean_a_switch(
    tmp_path: Path, nvlinks: str, n_gpus: int, device: str, wiring: tuple[str, float]
) -> None:
    cluster = read(tmp_path, matrix(nvlinks, [], n_gpus), device)
    assert (cluster.node.kind, cluster.intra.bandwidth_bytes_per_s / 1e9) == wiring


@pytest.mark.parametrize(
    ("device", "link"), [("h100-pcie", "pcie5"), ("l40s", "pcie4"), ("v100-16gb", "pcie3")]
)
def test_without_nvlinks_the_pcie_is_that_of_the_device(tmp_path: Path, device: str, link: str) -> None:
    assert read(tmp_path, matrix("NODE", []), device).intra.name == link


DUMP = """<system version="1"><cpu numaid="0" arch="x86_64" vendor="GenuineIntel">
<pci busid="0000:18:00.0" class="0x030200" vendor="0x10de" device="0x2335" link_speed="32.0 GT/s PCIe">
<gpu dev="0" sm="90" rank="0" gdr="1"><nvlink target="0000:07:00.0" count="18" tclass="0x068000"/></gpu></pci>
<pci busid="0000:19:00.0" class="0x020000" vendor="0x15b3">
<nic><net name="mlx5_0" speed="400000" gdr="1"/></nic></pci>
<pci busid="0000:20:00.0" class="0x020000" vendor="0x15b3">
<nic><net name="mlx5_1" speed="25000" gdr="1"/></nic></pci>
</cpu></system>"""


def test_the_pci_id_says_which_device_and_the_class_which_network(tmp_path: Path) -> None:
    cluster = read(tmp_path, DUMP)
    assert (cluster.device.name, cluster.cpu, cluster.nics_per_node) == ("h200-sxm", "intel", 1)
    assert cluster.nic == load_link("roce-400")
    infiniband = read(tmp_path, DUMP.replace('class="0x020000"', 'class="0x020700"'))
    assert infiniband.nic == load_link("ib-ndr")
    amazon = read(tmp_path, DUMP.replace('vendor="0x15b3"', 'vendor="0x1d0f"').replace("mlx5_0", "rdmap82s0"))
    assert amazon.nic == load_link("efa-p6")
    sockets = read(tmp_path, DUMP.replace("mlx5_", "eth"))
    assert sockets.nic is not None
    assert (sockets.nic.kind, sockets.nic.bandwidth_bytes_per_s) == ("ethernet", 50e9)


PLACES = "".join(
    f"<pci busid='ffff:ff:0{i}.0' class='0x060400'><pci busid='000{i}:00:00.0' class='0x030200'/>"
    f"<pci busid='010{i}:00:00.0' class='0x020700'/></pci>"
    for i in range(8)
)
TEMPLATE = f"<!-- of a cloud --><system version='1'><cpu vendor='AuthenticAMD'>{PLACES}</cpu></system>"


def test_the_file_of_a_cloud_names_places_and_the_device_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match="give --device"):
        read(tmp_path, TEMPLATE)
    cluster = read(tmp_path, TEMPLATE, "a100-40gb")
    assert (cluster.gpus_per_node, cluster.nics_per_node, cluster.cpu, cluster.intra.name) == (
        8,
        8,
        "amd",
        "nvlink3",
    )
    assert read(tmp_path, TEMPLATE, "v100-32gb").node.kind == "cube-mesh"
    assert read(tmp_path, TEMPLATE, "l40s").intra.name == "pcie4"


@pytest.mark.parametrize(
    ("kind", "gbps", "name"),
    [(kind, gbps, name) for kind, names in NICS.items() for gbps, name in names.items()],
)
def test_a_nic_is_taken_for_the_link_of_its_kind_and_rate(kind: str, gbps: int, name: str) -> None:
    link = load_link(name)
    assert (link.kind, link.bandwidth_bytes_per_s) == (kind, gbps * 1e9 / 8)


@pytest.mark.parametrize("device", FAMILIES)
def test_a_device_has_as_many_nvlinks_as_its_link_is_wide(device: str) -> None:
    """A bridge is one link of the catalogue however few of its NVLinks a card has."""
    name, each_gb_per_s, nic_gbps = FAMILIES[device]
    n_links = load_link(name).bandwidth_bytes_per_s / each_gb_per_s / 1e9
    assert "bridge" in name or n_links in {6, 8, *LINKS_TO_SWITCH}
    assert nic_gbps in NICS["infiniband"]
    assert all(family(CAPABILITIES[of]) for of, _ in LINKS_TO_SWITCH.values())


def test_an_unknown_device_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match=r"no device 'h100'.*did you mean"):
        read(tmp_path, TEMPLATE, "h100")


@pytest.mark.parametrize("n_digits", [7, 400])
def test_more_links_than_there_are_is_one_line_however_many(tmp_path: Path, n_digits: int) -> None:
    with pytest.raises(CatalogError, match=r"9{7}.* links, or Gb/s, of one GPU: from 0 to 100,000"):
        read(tmp_path, matrix(f"NV{'9' * n_digits}", []), "h100-sxm")
