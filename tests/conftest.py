"""What every test shares: property tests are deterministic, and patient with a loaded machine."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("suite", derandomize=True, deadline=None)
settings.load_profile("suite")

# The processes that tests start would compile all of foretrace, each of them, where bytecode is not kept.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell that starts the suite behind an & makes Ctrl-C nothing to it and all that it starts; tests press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out what only tests start: scripts that train would do so if they were searched for doctests."""
    is_script = collection_path.suffix == ".py" and not collection_path.name.startswith("test_")
    return True if is_script else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files whose tests start processes, which take long: those at the end are short.

    So the processes among which the files are dealt out end together.
    """
    long = Path(__file__).parent / "tracer"
    items.sort(key=lambda item: not item.path.is_relative_to(long))


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Enter a folder in which somebody has put modules that everybody imports; none has been, at the end."""
    folder = tmp_path / "planted"
    folder.mkdir()
    for name in ("foretrace", "json", "pickle", "runpy", "signal", "torch"):
        (folder / f"{name}.py").write_text(f"open({str(folder / 'was imported')!r}, 'w')\n")
    monkeypatch.chdir(folder)
    yield folder
    assert not (folder / "was imported").exists()
