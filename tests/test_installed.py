"""What an installation holds: one package, whole, whichever way it is built."""

import ast
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from hatchling import build

import foretrace

ROOT = Path(__file__).parents[1]
FOLDERS = ("simulator", "tracer", "topologies", "traces")


@pytest.fixture(scope="module")
def tracked() -> set[str]:
    """What git knows of the package, by the path that an installation has for it."""
    command = ["git", "ls-files", "--", *FOLDERS, "src/foretrace/*.py", "src/foretrace/py.typed"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no checkout of git: {done.stderr.strip()}")
    return {f"foretrace/{line.removeprefix('src/foretrace/')}" for line in done.stdout.splitlines()}


def test_a_wheel_holds_one_package_and_all_of_it(
    tmp_path: Path, tracked: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    with zipfile.ZipFile(tmp_path / build.build_wheel(str(tmp_path))) as wheel:
        names = wheel.namelist()
    assert {name.partition("-")[0].partition("/")[0] for name in names} == {"foretrace"}
    assert {name for name in names if not name.startswith("foretrace-")} == tracked


def test_a_source_distribution_holds_the_same_package(
    tmp_path: Path, tracked: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    with tarfile.open(tmp_path / build.build_sdist(str(tmp_path))) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {name.removeprefix("src/") for name in names if name.startswith("src/")} == tracked
    assert not {name for name in names if name.startswith(FOLDERS)}


def test_an_editable_install_puts_nothing_but_the_package_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    with zipfile.ZipFile(tmp_path / build.build_editable(str(tmp_path))) as wheel:
        (added,) = [name for name in wheel.namelist() if name.endswith(".pth")]
        assert wheel.read(added).decode().split() == [str(ROOT / "src")]
    assert {path.name for path in (ROOT / "src").iterdir()} == {"foretrace"}


def test_no_folder_is_importable_by_its_own_name(tmp_path: Path) -> None:
    code = f"import importlib.util as u; print([u.find_spec(name) for name in {FOLDERS!r}])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str([None] * len(FOLDERS))


def test_a_type_checker_knows_what_is_imported_on_first_use() -> None:
    tree = ast.parse((ROOT / "src" / "foretrace" / "__init__.py").read_text(encoding="utf-8"))
    (known,) = [node for node in tree.body if isinstance(node, ast.If)]
    said = {
        alias.asname: f"{node.module}.{alias.name}"
        for node in known.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    modules = {name: f"foretrace.{at}" for name, at in foretrace.API.items()}
    assert said == {name: at if name == "figures" else f"{at}.{name}" for name, at in modules.items()}


def test_the_front_door_loads_nothing_that_takes_time() -> None:
    code = "import sys, foretrace; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"numpy", "pyarrow", "torch", "click", "networkx"} & set(done.stdout.split())
