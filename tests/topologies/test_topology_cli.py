"""The verbs about machines, as a person and as a program reads them."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from foretrace.topologies.catalog import device_names, link_names, load_cluster, names
from foretrace.topologies.cli import topology
from foretrace.topologies.errors import CatalogError, FabricError


def printed(*arguments: str) -> str:
    """Return what ``foretrace topology`` prints; errors come through as they are."""
    result = CliRunner().invoke(topology, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_the_list_names_every_machine() -> None:
    text = printed("list")
    assert all(name in text for name in names())
    assert [row["name"] for row in json.loads(printed("list", "--json"))["clusters"]] == names()


def test_the_list_fits_a_terminal_and_says_prices() -> None:
    rows = printed("list").splitlines()
    assert max(map(len, rows)) <= 80
    assert "…" not in printed("list")
    line = next(line for line in rows if line.split()[:1] == ["aws-p5"])
    assert line.split()[-1] == f"{load_cluster('aws-p5').price_usd_per_gpu_hour:.2f}"
    assert next(line for line in rows if line.split()[:1] == ["hgx-h20"]).split()[-1] == "?"
    assert "not known, --price gives one" in printed("show", "hgx-h20")


@pytest.mark.parametrize("arguments", ["list", "list --devices", "list --links", "show dgx-h100"])
def test_lines_of_a_pipe_end_with_their_words(arguments: str) -> None:
    rows = printed(*arguments.split()).splitlines()
    assert rows == [row.rstrip() for row in rows]
    assert len(rows) > 10


@pytest.mark.parametrize(
    ("fabric", "says"),
    [
        ('kind = "torus"\nshape = [2, 2]', {"fabric.shape": "2 x 2", "fabric.kind": "torus"}),
        (
            'kind = "two-site"\ngroup_nodes = 2\ngroup_bandwidth = "10 GB/s"\ngroup_latency = "5 ms"',
            {"fabric.group_nodes": "2", "fabric.group_bandwidth": "10 GB/s", "fabric.group_latency": "5 ms"},
        ),
    ],
)
def test_a_fabric_is_shown_by_what_its_kind_needs(tmp_path: Path, fabric: str, says: dict[str, str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f'base = "dgx1-v100"\nn_gpus = 32\n[fabric]\n{fabric}\n', encoding="utf-8")
    lines = [line.split() for line in printed("show", str(path)).splitlines()]
    shown = {words[0]: " ".join(words[1:]) for words in lines if words}
    assert all(shown[key].startswith(value) for key, value in says.items())
    assert shown["node.kind"].startswith("cube-mesh")
    assert ("fabric.nodes_per_leaf" in shown) == ("shape" not in fabric)


def test_devices_and_links_that_a_file_may_name_are_listed() -> None:
    devices = json.loads(printed("list", "--devices", "--json"))["devices"]
    assert [row["name"] for row in devices] == device_names()
    links = json.loads(printed("list", "--links", "--json"))["links"]
    assert [row["name"] for row in links] == link_names()
    assert [
        row["name"] for row in json.loads(printed("list", "H100", "pcie", "--devices", "--json"))["devices"]
    ] == ["h100-pcie"]
    assert printed("list", "zzz", "--links") == "no link of the catalogue has zzz in its name\n"
    for text in (printed("list", "--devices"), printed("list", "--links")):
        assert "…" not in text
        assert max(len(line) for line in text.splitlines()) <= 80


def test_the_list_is_narrowed_by_words() -> None:
    found = [row["name"] for row in json.loads(printed("list", "H100", "efa", "--json"))["clusters"]]
    assert found == ["aws-p5"]
    assert "no machine of the catalogue has h100 and tpu" in printed("list", "h100", "tpu")


@pytest.mark.parametrize("name", names())
def test_a_machine_is_shown_with_its_sources(name: str) -> None:
    """Every source is printed once, under the number that stands beside its figures."""
    text = printed("show", name)
    cluster = load_cluster(name)
    for source in cluster.device.sources.values():
        assert text.count(f"] {source}\n") == 1
    assert ("inside its node" in text) == (cluster.gpus_per_node > 1)


@pytest.mark.parametrize(("name", "what"), [("tpu-v5p", "TPUs"), ("v6e", "TPUs"), ("trn2", "Trainium")])
def test_a_machine_without_sources_is_refused_with_what_is_missing(name: str, what: str) -> None:
    with pytest.raises(CatalogError, match=f"no source was found for .*, and peaks alone do not .* {what}"):
        load_cluster(name)


def test_a_machine_is_shown_as_one_json_object() -> None:
    shown = json.loads(printed("show", "dgx-h100", "--gpus", "512", "--json"))
    assert shown["n_gpus"] == 512
    assert [(tier["tier"], tier["bytes_per_s"]) for tier in shown["tiers"]] == [
        ("node", 450e9),
        ("leaf", 50e9),
        ("spine", 50e9),
    ]
    assert shown["device"]["sources"]["memory_bytes_per_s"]


def test_a_file_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('device = "h100-sxm"\ngpus_per_node = 8\nintra = "nvlink4"\n', encoding="utf-8")
    assert "8 GPUs in 1 NVLink domain, 1 switch, 8 links; every GPU" in printed("check", str(path))
    assert json.loads(printed("check", str(path), "--json"))["n_links"] == 8


def test_a_file_with_a_gpu_cut_off_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'device = "h100-sxm"\ngpus_per_node = 8\nn_gpus = 9\nintra = "nvlink4"\n', encoding="utf-8"
    )
    with pytest.raises(FabricError, match="gpu:8 cannot reach gpu:0"):
        printed("check", str(path))


def test_an_unknown_machine_is_an_error_for_the_root_to_show() -> None:
    with pytest.raises(CatalogError, match="no cluster 'dgx'"):
        printed("show", "dgx")


def test_what_a_file_calls_things_is_never_markup(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'name = "[bold]mine[/nope]"\ndevice = "h100-sxm"\ngpus_per_node = 8\nn_gpus = 16\nnics_per_node = 8\n'
        'intra = { name = "[/i] wire", bandwidth = "450 GB/s", latency = "1 us" }\n'
        'nic = { name = "[blink]x", bandwidth = "400 Gb/s", latency = "2 us" }\n[fabric]\nkind = "rail"\n',
        encoding="utf-8",
    )
    text = printed("show", str(path))
    assert "[bold]mine[/nope]" in text
    assert "link [/i] wire" in text
    assert "link [blink]x" in text


def test_a_machine_shows_what_its_software_leaves_unused() -> None:
    """Of four Omni-Path ports NCCL uses two, in one ring, and copies through the host; sockets have flows."""
    shown = CliRunner().invoke(topology, ["show", "jean-zay-a100"]).stdout.splitlines()
    facts = {line.split()[0]: line for line in shown if line.startswith(" ") and len(line.split()) > 1}
    assert [facts[key].split()[1] for key in ("nics_per_node", "nics_used", "rings_out")] == ["4", "2", "1"]
    assert "copies through the host" in facts["gpu_direct"]
    assert "1.25 GB/s per connection" in CliRunner().invoke(topology, ["show", "azure-nc-a100-v4"]).stdout
