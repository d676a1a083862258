"""Reads how one node is wired from what its tools print: NCCL's topology XML, ``nvidia-smi topo -m``."""

from __future__ import annotations

from pathlib import Path

from foretrace.topologies.discover.found import Wiring
from foretrace.topologies.discover.machine import to_toml
from foretrace.topologies.discover.matrix import from_matrix
from foretrace.topologies.discover.nccl_xml import from_xml
from foretrace.topologies.errors import CatalogError

__all__ = ["Wiring", "discover", "to_toml"]


def discover(path: str | Path) -> Wiring:
    """Return the wiring that a file describes: XML, or the text of ``nvidia-smi topo -m``.

    Raises:
        CatalogError: it cannot be read, is neither, is cut off, or says in words what should be a number.
    """
    path = Path(path)
    try:
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        raise CatalogError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise CatalogError(
            f"{path} is not text; give NCCL_TOPO_DUMP_FILE's XML or `nvidia-smi topo -m`"
        ) from None
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
    return found
