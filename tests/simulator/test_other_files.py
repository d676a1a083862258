"""A file that is no job, given as one: one line says what it is, and which flag takes it."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from foretrace.cli import main
from foretrace.simulator.config import other_file
from foretrace.simulator.recorded.calibration import Calibration
from foretrace.simulator.settings import KINDS, TABLES

ROOT = Path(__file__).parents[2]
CATALOG = ROOT / "topologies" / "catalog"
FILES = {
    "--cluster": sorted(CATALOG.glob("*.toml")),
    "device = ": sorted((CATALOG / "devices").glob("*.toml")),
    "[intra] or [nic]": sorted((CATALOG / "links").glob("*.toml")),
    "--model": sorted((ROOT / "simulator" / "presets").glob("*.toml")),
}


def refused(path: Path, verb: str = "config") -> str:
    done = CliRunner().invoke(main, [verb, str(path)])
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    return done.stderr


@pytest.mark.parametrize("goes", FILES)
def test_every_file_of_the_catalogue_is_told_from_a_job(goes: str) -> None:
    assert FILES[goes]
    for path in FILES[goes]:
        assert goes in refused(path), path


@pytest.mark.parametrize("verb", ["config", "simulate", "memory"])
def test_a_machine_of_ones_own_goes_to_another_flag(verb: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('base = "dgx-h100"\nnic = "roce-200"\n', encoding="utf-8")
    said = refused(path, verb)
    assert f"{path} describes a machine, not a job: give it as --cluster {path};" in said


def test_a_calibration_goes_to_another_flag(tmp_path: Path) -> None:
    path = tmp_path / "factors.toml"
    factors = Calibration(
        run="a", cluster="localhost", device="cpu", precision="fp32", compute={}, network={}
    )
    path.write_text(factors.to_toml(), encoding="utf-8")
    assert f"give it as --calibration {path}" in refused(path)


@pytest.mark.parametrize("key", [*KINDS, *TABLES])
def test_no_setting_of_a_job_tells_of_another_file(key: str) -> None:
    assert other_file("run.toml", {key: {}}) == ""


def test_a_key_that_is_like_no_setting_is_one_short_line(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('description = "mine"\n', encoding="utf-8")
    said = refused(path)
    assert "unknown key 'description'; foretrace simulate --help lists" in said
    assert len(said) < 160 + len(str(path))
