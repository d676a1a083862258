"""The machines, devices and links that come with the product, and the one way to load any of them.

Clusters are ``catalog/*.toml``, devices ``catalog/devices/*.toml``, links ``catalog/links/*.toml``. A user's
own file has the same keys as a cluster of the catalogue and may name its devices and links.

An entry says what else it is called: a machine lists its other names (``called``), a device gives the pattern
of what GPUs and people call it, and its PCI ids (``pci_ids``: the PCI ID Repository; A100, Hopper and
Blackwell also in the nvidia-migmanager of bottlerocket-os).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

from foretrace.topologies.cluster import Cluster
from foretrace.topologies.device import Device
from foretrace.topologies.errors import CatalogError, TopologyError
from foretrace.topologies.link import LinkSpec
from foretrace.topologies.parse import cluster_from, device_from, link_from
from foretrace.topologies.reader import Section, read_toml

_HOME: Final = Path(__file__).parent

MOST_LISTED: Final = 12
"""Most names that an error lists where none of them is near."""

_LISTS: Final = {
    "cluster": "topology list",
    "device": "topology list --devices",
    "link": "topology list --links",
}
"""Which verb lists all names of a kind."""

_CALLED: Final = ("called", "pci_ids")
"""What an entry of the catalogue says of its names; a file of one's own is called by its path."""

WITHOUT: Final = (
    (r"tpu|v5p|v6e|trillium", "TPUs", "times of XLA's kernels and of collectives on their torus"),
    (r"trn[12]|trainium|inf2", "Trainium", "times of the Neuron compiler's kernels and of its collectives"),
    (r"gaudi", "Gaudi", "times of its kernels and of its collectives"),
)
"""Machines that people ask for and that are not there: names, what they are, what no source was found for."""


def names() -> list[str]:
    """Return the names of the clusters in the catalogue."""
    return _names(_HOME)


def device_names() -> list[str]:
    """Return the names of the devices in the catalogue."""
    return _names(_HOME / "devices")


def link_names() -> list[str]:
    """Return the names of the links in the catalogue."""
    return _names(_HOME / "links")


@cache
def aliases() -> dict[str, str]:
    """Return by what else people call a machine, as ``plain`` writes it, its name in the catalogue."""
    return {other: name for name in names() for other in read_toml(_HOME / f"{name}.toml").get("called", ())}


@cache
def _devices() -> tuple[dict[str, str], dict[str, str]]:
    """Return the devices of the catalogue by the pattern of what they are called, and by PCI id."""
    files = {name: read_toml(_HOME / "devices" / f"{name}.toml") for name in device_names()}
    patterns = {file["called"]: name for name, file in files.items() if "called" in file}
    return patterns, {pci_id: name for name, file in files.items() for pci_id in file.get("pci_ids", ())}


def device_of_pci_id(pci_id: str) -> str:
    """Return the name of the device with *pci_id*, empty if the catalogue has none.

    >>> device_of_pci_id("0x2330"), device_of_pci_id("0x0000")
    ('h100-sxm', '')
    """
    return _devices()[1].get(pci_id.lower(), "")


def plain(name: str) -> str:
    """Return *name* as the catalogue writes names: in lower case, words joined by hyphens.

    >>> plain("Standard_ND96isr_H100_v5"), plain("P5.48xlarge"), plain("RTX 4090")
    ('nd96isr-h100-v5', 'p5-48xlarge', 'rtx-4090')
    """
    return re.sub(r"[ _.]+", "-", name.strip().lower()).removeprefix("standard-")


def load_cluster(name_or_path: str | Path, n_gpus: int | None = None) -> Cluster:
    """Return a cluster of the catalogue by name, or of a TOML file by path, with *n_gpus* devices.

    Anything that ends in ``.toml`` or contains a slash is a path. A name may be one of ``aliases``, too.

    Raises:
        CatalogError: the name is unknown, the file does not describe a machine, or it cannot have *n_gpus*.
        UnitError: a quantity in the file has no unit that fits.
    """
    wanted = str(name_or_path)
    path = Path(wanted) if wanted.endswith(".toml") or "/" in wanted else _machine(wanted)
    with _naming(path):
        cluster = _own(path) if path.parent == _HOME else _read_cluster(path)
    return cluster if n_gpus is None else cluster.sized(n_gpus)


@cache
def _own(path: Path) -> Cluster:
    """Return a cluster of the catalogue, whose files do not change."""
    return _read_cluster(path)


def _read_cluster(path: Path) -> Cluster:
    table = _with_base(_tables(path), _HOME, "cluster")
    return cluster_from(Section(table, str(path)), path.stem, load_device, load_link, load_cluster)


def load_device(name: str) -> Device:
    """Return a device of the catalogue, or of a TOML file by path (a name that ends in ``.toml``).

    A file with ``base = "<device>"`` takes from that device whatever it does not give itself.

    Raises:
        CatalogError: there is none of that name, or the file does not describe one.
        UnitError: a quantity in the file has no unit that fits.
    """
    folder = _HOME / "devices"
    if not name.endswith(".toml"):
        return _own_device(_find(folder, name, "device"))
    return _read_device(Path(name))


@cache
def _own_device(path: Path) -> Device:
    """Return a device of the catalogue, whose files do not change."""
    return _read_device(path)


def _read_device(path: Path) -> Device:
    return device_from(Section(_with_base(_tables(path), _HOME / "devices", "device"), str(path)))


@cache
def device_named(hardware: str, memory_bytes: int = 0) -> Device:
    """Return the device that *hardware* names: of the catalogue, as a GPU calls itself, or in a TOML file.

    A machine of the catalogue, or the file of a machine, stands for its device. Of devices that call
    themselves alike, and compute alike, the one with *memory_bytes* is meant, if they are known.

    Raises:
        CatalogError: no device of the catalogue is meant, or a file does not describe a device or a machine.

    >>> device_named("NVIDIA H100 80GB HBM3").name, device_named("dgx-a100").name
    ('h100-sxm', 'a100-80gb')
    """
    if hardware.endswith(".toml"):
        is_machine = not read_toml(Path(hardware)).keys().isdisjoint(("device", "gpus_per_node"))
        return load_cluster(hardware).device if is_machine else load_device(hardware)
    name = hardware.lower().replace("_", "-")
    if name in names():
        return load_cluster(name).device
    if name in device_names():
        return load_device(name)
    # The pattern that says most of the name: "gb200" holds "b200", "h100 pcie" holds "h100".
    said = {
        len(found[0]): device
        for pattern, device in _devices()[0].items()
        if (found := re.search(pattern, name))
    }
    if said:
        return _with_memory(load_device(said[max(said)]), memory_bytes)
    raise CatalogError(f"hardware {hardware!r} is not a device of the catalogue")


SAME_MEMORY: Final = 0.1
"""Relative difference up to which a device has the memory that it says: drivers keep some of it."""


def _with_memory(found: Device, memory_bytes: int) -> Device:
    """Return *found*, or the device with its peaks that has *memory_bytes*, if it is another one."""

    def has_it(device: Device) -> bool:
        return abs(device.memory_bytes - memory_bytes) <= SAME_MEMORY * memory_bytes

    if not memory_bytes or has_it(found):
        return found
    others = (load_device(name) for name in device_names())
    alike = [one for one in others if one.peak_flops_per_s == found.peak_flops_per_s and has_it(one)]
    return alike[0] if len(alike) == 1 else found


def _tables(path: Path) -> dict[str, Any]:
    """Return the tables of a file; of one of the catalogue without its names, which are nobody else's."""
    own = _CALLED if path.is_relative_to(_HOME) else ()
    return {key: value for key, value in read_toml(path).items() if key not in own}


def _with_base(table: dict[str, Any], folder: Path, what: str) -> dict[str, Any]:
    """Return the tables of a file over those of the entry of *folder* that its ``base`` names.

    A machine with another device than its base has no price, power or host memory, and a device not the
    limit of its base: these are of the one board alone. Trays are those of nodes of one size. What a device
    takes from another names it in its source.
    """
    if (base := table.pop("base", None)) is None:
        return table
    if str(base).endswith(".toml"):
        raise CatalogError(f"base = {base!r}: a base is a name of the catalogue, not a file")
    path = _machine(str(base)) if what == "cluster" else _find(folder, str(base), what)
    below = _with_base(_tables(path), folder, what)
    own = {"device": ["power_limit"], "cluster": []}.get(what, [])
    if what == "cluster":
        own += ["price_per_gpu", "node_power", "node_memory"] if "device" in table else []
        own += ["gpus_per_tray"] if "gpus_per_node" in table else []
    for key in own:
        below.pop(key, None)
    if what == "device":
        known = below.get("sources", {})
        below = {**_as_of(below, path.stem, known), "sources": known}
    return _over(below, table)


def _as_of(table: dict[str, Any], base: str, known: dict[str, str]) -> dict[str, Any]:
    """Return *table* with the name of *base* before each source that has none yet; *known* are named ones."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            found[key] = _as_of(value, base, known)
        elif key == "source":
            said = known.get(value, value)
            found[key] = said if re.match(r"as \S+: ", said) else f"as {base}: {said}"
        else:
            found[key] = value
    return found


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Return *below* with the values of *above*; tables are joined, figures with their source replaced."""
    joined = dict(below)
    for key, value in above.items():
        old = joined.get(key)
        tables = isinstance(value, dict) and isinstance(old, dict) and "value" not in value
        joined[key] = _over(old, value) if tables and isinstance(old, dict) else value
    return joined


def load_link(name: str) -> LinkSpec:
    """Return a link of the catalogue, over that of its ``base``. Raises CatalogError if there is none."""
    path = _find(_HOME / "links", name, "link")
    return link_from(Section(_with_base(_tables(path), path.parent, "link"), str(path)), name)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Put the name of the file before an error that does not begin with it."""
    try:
        yield
    except TopologyError as error:
        if str(error).startswith(str(path)):
            raise
        raise type(error)(f"{path}: {error}") from None


def _names(folder: Path) -> list[str]:
    return list(_listed(folder))


@cache
def _listed(folder: Path) -> tuple[str, ...]:
    """Return the names of what is in a folder of the catalogue, which does not change."""
    return tuple(sorted(path.stem for path in folder.glob("*.toml")))


def _machine(name: str) -> Path:
    """Return the file of the machine that *name*, or what people call it, stands for."""
    wanted, known = plain(name), _names(_HOME)
    if wanted in known or wanted in aliases():
        return _HOME / f"{aliases().get(wanted, wanted)}.toml"
    if wanted in device_names():
        raise CatalogError(
            f"{name!r} is a device, and no machine of the catalogue has it: give a TOML file with "
            f'device = "{wanted}", docs/topologies.md has one of ten lines'
        )
    for pattern, what, missing in WITHOUT:
        if re.search(pattern, wanted):
            raise CatalogError(
                f"no cluster {name!r} in the catalogue: no source was found for {missing}, and peaks alone "
                f"do not price a step on {what}; a TOML file with figures measured on it would work"
            )
    named = difflib.get_close_matches(wanted, [*known, *aliases()], n=9, cutoff=0.7)
    near = list(dict.fromkeys(aliases().get(one, one) for one in named))[:3]
    hint = _hint(near, known, "cluster")
    raise CatalogError(
        f"no cluster {name!r} in the catalogue: {hint} A machine of your own is a path that ends in .toml"
    )


def _find(folder: Path, name: str, what: str) -> Path:
    known = _names(folder)
    if name in known:
        return folder / f"{name}.toml"
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    raise CatalogError(f"no {what} {name!r} in the catalogue: {_hint(near, known, what)}")


def _hint(near: list[str], known: list[str], what: str) -> str:
    if not near and len(known) > MOST_LISTED:
        return f"foretrace {_LISTS[what]} shows all {len(known)}."
    if not near:
        return f"there are {', '.join(known)}."
    *others, last = near
    return f"did you mean {', '.join(others)}{' or ' if others else ''}{last}?"
