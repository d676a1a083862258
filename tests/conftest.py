"""What every test shares: property tests are deterministic, and patient with a loaded machine."""

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

import pytest
from _pytest.doctest import DoctestModule
from hypothesis import given, settings
from hypothesis.strategies import none
from tests import forked

settings.register_profile("suite", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("suite")

# The processes that tests start would compile all of foretrace, each of them, where bytecode is not kept.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell that starts the suite behind an & makes Ctrl-C nothing to it and all that it starts; tests press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Leave out of collections of garbage what all tests load: each would look at it for a second."""
    # At its first test hypothesis asks the collector who holds its generator: nobody whom that leaves out.
    given(none())(lambda _: None)()
    gc.collect()
    gc.freeze()


class Doctests:
    """Looks for doctests only where an example is: to look through all that a file names takes long."""

    @pytest.hookimpl(wrapper=True)
    def pytest_collect_file(
        self, file_path: Path
    ) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
        found = yield
        if file_path.suffix != ".py" or b"\n>>> " in file_path.read_bytes().replace(b"    ", b""):
            return found
        return [one for one in found if not isinstance(one, DoctestModule)]


def pytest_configure(config: pytest.Config) -> None:
    """Have that seen to in every folder, and torch loaded once for all processes that run tests."""
    config.pluginmanager.register(Doctests())
    if config.getoption("numprocesses", None) and find_spec("torch") is not None:
        forked.share()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out what only tests start: scripts that train would do so if they were searched for doctests."""
    is_script = collection_path.suffix == ".py" and not collection_path.name.startswith("test_")
    return True if is_script else None


LONGEST = (
    *("tracer/test_rehearse_verify.py", "tracer/test_rehearse_compiled_memory.py"),
    *("simulator/test_planner_browser.py", "tracer/test_same_process.py", "tracer/test_deaths.py"),
    *("tracer/test_rehearse_real.py", "simulator/test_search.py", "test_fuzzing.py"),
    *("traces/browser/test_areas.py", "tracer/test_rehearse_compiled.py", "simulator/test_every_option.py"),
    *("tracer/test_on_cpu.py", "traces/browser/test_pointer.py", "tracer/test_recorded_examples.py"),
    *("simulator/test_one_answer.py", "simulator/test_cookbook.py", "test_processes.py", "test_planted.py"),
)
"""Files that take longest, by the time of processors, the longest first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, then those whose tests start processes: others are short.

    So the processes among which the files are dealt out end together.
    """
    here = Path(__file__).parent
    places = {here / name: place for place, name in enumerate(LONGEST)}
    items.sort(
        key=lambda item: (places.get(item.path, len(places)), not item.path.is_relative_to(here / "tracer"))
    )


OTHER_MODULES = ("foretrace", "sitecustomize", "usercustomize")
"""What Python imports unasked, and what no list of packages names where it is installed to be edited."""


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Enter a folder in which somebody has put a module of every name; none has been imported, at the end."""
    folder, imported = tmp_path / "planted", tmp_path / "imported"
    folder.mkdir()
    known = {*sys.stdlib_module_names, *packages_distributions(), *OTHER_MODULES}
    for name in {one.partition("/")[0] for one in known}:  # some packages list modules within others
        (folder / f"{name}.py").write_text(
            f"import sys; open({str(imported)!r}, 'a').write({name!r} + str(sys.argv))"
        )
    monkeypatch.chdir(folder)
    yield folder
    assert not imported.exists(), imported.read_text()
