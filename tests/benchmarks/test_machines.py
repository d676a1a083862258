"""Which machine people mean."""

import pytest
from measured.machines import assumed, machine

from foretrace.topologies.catalog import names
from foretrace.topologies.errors import CatalogError

READ = [
    # words, GPUs, nodes, machine, NICs, Gb/s of one
    ("A100-SXM (NVSwitch)", 8, 1, "dgx-a100", 8, 200),
    ("A100-SXM-80GB p4de.24xlarge, EFA 400 Gb/s per node", 16, 2, "aws-p4de", 4, 100),
    ("H100-SXM-80GB p5.48xlarge, EFA 3200 Gb/s per node", 16, 2, "aws-p5", 32, 100),
    ("B200-SXM AWS p6-b200, EFAv4 8x400 Gb/s", 32, 4, "aws-p6-b200", 8, 400),
    ("A100-SXM-80GB Jean Zay, 4x100 Gb/s OPA per node", 32, 4, "jean-zay-a100", 4, 100),
    ("V100-SXM-32GB Jean Zay, OPA", 64, 16, "jean-zay-v100", 4, 100),
    ("V100-SXM-32GB; NVLink2 in node; Omni-Path between nodes", 8, 2, "jean-zay-v100", 4, 100),
    ("H800 (NVLink ~160 GB/s), CX7 400 Gb/s per GPU", 64, 8, "hgx-h800", 8, 400),
    ("A100 (8 per node), CX-6", 16, 2, "hgx-a100-4nic", 4, 200),
    ("H100, 8x200 Gb/s RoCE", 16, 2, "dgx-h100", 8, 200),
    ("gb200_nvl72", 72, 18, "gb200-nvl72", 72, 400),
    ("GB200 NVL72", 144, 36, "gb200-nvl72", 72, 400),
    ("a3-megagpu-8g", 64, 8, "gcp-a3-mega", 8, 200),
    ("AWS p6-b300.48xlarge", 16, 2, "aws-p6-b300", 16, 400),
    ("AWS p6-b200.48xlarge", 16, 2, "aws-p6-b200", 8, 400),
    ("h100_sxm", 4, 1, "dgx-h100", 8, 400),
    ("2 x H100 NVL", 2, 1, "azure-nc-h100-v5", 1, 80),
    ("A100-PCIe-80GB", 8, 1, "a40-8", 1, 200),
    ("V100-SXM2 Jean Zay, 8 per node", 16, 2, "jean-zay-v100", 4, 100),
]


@pytest.mark.parametrize("read", READ, ids=lambda read: read[0])
def test_words_name_a_machine_and_its_network(read: tuple[str, int, int, str, int, float]) -> None:
    words, n_gpus, n_nodes, name, n_nics, gbit = read
    cluster = machine(words, n_gpus, n_nodes)
    assert (cluster.name, cluster.nics_per_node) == (name, n_nics)
    assert cluster.nic is not None
    assert cluster.nic.bandwidth_bytes_per_s == pytest.approx(gbit * 1e9 / 8)
    assert cluster.n_gpus >= n_gpus


def test_a_server_of_v100_has_eight_unless_no_more_than_four_were_ever_used() -> None:
    found = [machine("V100-SXM", 4, 1, most).name for most in (0, 2, 4, 5, 8)]
    assert found == ["dgx1-v100", "jean-zay-v100", "jean-zay-v100", "dgx1-v100", "dgx1-v100"]
    assert machine("dgx1-v100", 4, 1, 4).name == "dgx1-v100"


@pytest.mark.parametrize("name", names())
def test_a_name_of_the_catalogue_stands_for_itself(name: str) -> None:
    assert machine(name, 2, 1).name == name


def test_hardware_that_nobody_knows_is_refused() -> None:
    with pytest.raises(CatalogError, match="hardware 'not stated' names no machine of the catalogue"):
        machine("not stated", 8, 1)


def test_words_that_say_nothing_are_taken_as_one_machine_and_only_where_it_fits() -> None:
    assert (assumed("not stated (4 nodes)"), assumed("H100, fabric not stated")) == ("hgx-a100-4nic", "")
    assert machine("not stated (4 nodes)", 32, 4).name == "hgx-a100-4nic"
    for n_gpus, n_nodes in ((8, 1), (16, 4)):
        with pytest.raises(CatalogError, match="names no machine"):
            machine("not stated (4 nodes)", n_gpus, n_nodes)


def test_switches_between_nodes_reduce_where_words_say_so() -> None:
    said = ("H100, 8x400 Gb/s NDR, SHARP", "H100, 8x400 Gb/s NDR, NVLink SHARP", "H100, 8x400 Gb/s NDR")
    assert [machine(words, 64, 8).nic.reduces for words in said] == [True, False, False]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("words", "name", "gbit", "n_nics"),
    [
        ("A100-80GB, InfiniBand", "ib-hdr", 200, 8),
        ("H100, InfiniBand", "ib-ndr", 400, 8),
        ("V100 x8 per node, IB 100 Gb/s", "ib-edr", 100, 1),
        ("A100, 4x100 Gb/s InfiniBand", "ib-hdr", 100, 4),
        ("A100, NDR InfiniBand", "ib-ndr", 400, 8),
        ("H100, 8x NDR 400Gb/s InfiniBand", "ib-ndr", 400, 8),
        ("A100; 8x HDR200 InfiniBand per node (said to be 800 Gb/s)", "ib-hdr", 200, 8),
        ("A100; 800 Gb/s per node InfiniBand (4x200 HDR)", "ib-hdr", 200, 4),
        ("H100, 4 x ConnectX-7 at 400 Gb/s", "ib-ndr", 400, 4),
        ("H200 SXM, ConnectX-7 400 Gb/s", "ib-ndr", 400, 8),
        ("H200 SXM, ConnectX-7 200 Gb/s", "ib-ndr", 200, 1),
    ],
)
def test_infiniband_is_of_the_time_of_the_machine(words: str, name: str, gbit: float, n_nics: int) -> None:
    cluster = machine(words, 16, 2)
    assert cluster.nic is not None
    assert (cluster.nic.name, cluster.nics_per_node) == (name, n_nics)
    assert cluster.nic.bandwidth_bytes_per_s == gbit * 1e9 / 8


@pytest.mark.parametrize(
    ("words", "direct"),
    [
        ("V100 x8 per node, IB 100 Gb/s", False),  # one card for eight
        ("A100, 1x200 Gb/s HDR", False),
        ("A100, 1x200 Gb/s HDR, GPUDirect", True),
        ("V100 x8 per node, IB 100 Gb/s per GPU", True),
        ("A100, 4x200 Gb/s HDR", True),
        ("A100, 4x200 Gb/s HDR without GPUDirect RDMA", False),
        ("A100 DGX", True),
    ],
)
def test_one_card_for_a_node_hangs_off_the_processor_unless_words_say_otherwise(
    words: str, direct: bool
) -> None:
    nic = machine(words, 16, 2).nic
    assert nic is not None
    assert nic.gpu_direct == direct
