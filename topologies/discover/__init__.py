"""Reads how one node is wired from what its tools print: NCCL's topology XML, ``nvidia-smi topo -m``."""

from __future__ import annotations

from pathlib import Path

from foretrace.door import read_text, shown
from foretrace.topologies.discover.found import Wiring
from foretrace.topologies.discover.machine import to_toml
from foretrace.topologies.discover.matrix import from_matrix
from foretrace.topologies.discover.nccl_xml import from_xml
from foretrace.topologies.errors import CatalogError

MOST_LINKS = 100_000  # Gb/s of a NIC; NVLinks of a GPU are some tens
MOST_BYTES = 1 << 24  # what NCCL writes of a node is some ten kilobytes

__all__ = ["Wiring", "discover", "to_toml"]


def discover(path: str | Path) -> Wiring:
    """Return the wiring that a file describes: XML, or the text of ``nvidia-smi topo -m``.

    Raises:
        CatalogError: it cannot be read, is neither, is cut off, or says in words what should be a number.
    """
    path = Path(path)
    content = read_text(path, CatalogError, MOST_BYTES)
    try:
        found = from_xml(content, path) if content.lstrip().startswith("<") else from_matrix(content)
    except ValueError as error:
        if isinstance(error, CatalogError):
            raise type(error)(
                str(error) if str(error).startswith(str(path)) else f"{path}: {error}"
            ) from None
        raise CatalogError(f"{path}: a count or speed is not a number: {error}") from None
    if not found.n_gpus:
        raise CatalogError(f"{path} names no GPU: give NCCL_TOPO_DUMP_FILE's XML or `nvidia-smi topo -m`")
    counts = [*found.to_switch.values(), *found.between.values(), *found.nics]
    if wrong := [count for count in counts if not 0 <= count <= MOST_LINKS]:
        raise CatalogError(f"{path}: {shown(wrong[0])} links, or Gb/s, of one GPU: from 0 to {MOST_LINKS:,}")
    return found
