"""The tracer is imported, and its verbs are started, without torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
MODULES = sorted(
    ".".join(path.relative_to(SOURCE).with_suffix("").parts)
    for path in (SOURCE / "foretrace" / "tracer").glob("*.py")
    if path.stem != "__init__"
)


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which importing torch is an error."""
    folder = tmp_path_factory.mktemp("hidden")
    (folder / "torch.py").write_text("raise ImportError('torch must not be imported')\n")
    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{SOURCE}"}


def test_importing_any_module_does_not_import_torch(without_torch: dict[str, str]) -> None:
    code = f"import sys, {', '.join(MODULES)}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env=without_torch)


def test_recording_a_command_needs_no_torch_of_our_own(without_torch: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "foretrace", "record", "-o", str(tmp_path / "run"), "--", "true"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=without_torch)
    assert result.returncode == 0, result.stderr
