"""What torch breaks by itself is started again, anew; whatever else fails is not."""

from pathlib import Path

import pytest

from tests.processes import MOST_RUNS, Runner

FAILING = """
mkdir made/run || exit 99
echo >> runs
if [ $(wc -l < runs) -le {n_failures} ]; then
    echo {says} >&2
    exit 134
fi
"""
"""Fails as often as it is told to, and differently where something is left of the time before."""


@pytest.mark.parametrize(
    ("says", "n_failures", "n_runs"),
    [
        ("terminate called without an active exception", 1, 2),
        ("terminate called without an active exception", 9, MOST_RUNS),
        ("terminate called after throwing an instance of foretrace::Fault", 9, 1),
        ("AssertionError", 9, 1),
        ("terminate called without an active exception", 0, 1),
    ],
)
def test_only_what_torch_breaks_is_started_again(
    tmp_path: Path, says: str, n_failures: int, n_runs: int
) -> None:
    made = tmp_path / "made"
    made.mkdir()
    command = ["sh", "-c", FAILING.format(n_failures=n_failures, says=says)]
    (done,) = Runner.launch(command, cwd=tmp_path, fresh=made)
    assert (tmp_path / "runs").read_text().count("\n") == n_runs
    assert done.returncode == (0 if n_runs > n_failures else 134)
