"""Foretrace: rehearse a distributed training run, record the real one, and see where the two differ.

``foretrace`` on the command line, ``import foretrace`` in Python. Both load what they need when it is asked
for: a training that is recorded imports this package, and simulating never imports torch.

    import foretrace

    with foretrace.record("runs/real"):      # around a training loop, on every rank
        train()

    run = foretrace.open_run("runs/real")
    for row in foretrace.breakdown(run):
        print(row.rank, row.shares)
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:  # what a type checker knows of the names that are imported on first use
    from foretrace.simulator.job import Job as Job
    from foretrace.simulator.models.sources import load_model as load_model
    from foretrace.simulator.recorded.calibrate import calibrate as calibrate
    from foretrace.simulator.recorded.calibration import read_calibration as read_calibration
    from foretrace.simulator.recorded.like import job_like as job_like
    from foretrace.simulator.simulate import simulate as simulate
    from foretrace.simulator.simulate import simulate_many as simulate_many
    from foretrace.topologies.catalog import load_cluster as load_cluster
    from foretrace.tracer.callbacks import lightning_callback as lightning_callback
    from foretrace.tracer.callbacks import trainer_callback as trainer_callback
    from foretrace.tracer.record import record as record
    from foretrace.tracer.record import step as step
    from foretrace.traces import figures as figures
    from foretrace.traces.analysis.everything import analysis as analysis
    from foretrace.traces.analysis.findings import findings as findings
    from foretrace.traces.analysis.metrics import breakdown as breakdown
    from foretrace.traces.analysis.metrics import summarize as summarize
    from foretrace.traces.compare import compare as compare
    from foretrace.traces.layout import Layout as Layout
    from foretrace.traces.report.html import report_html as report_html
    from foretrace.traces.store import open_run as open_run

    __version__: str
else:  # from which it would conclude that there is every name

    def __getattr__(name: str) -> Any:
        """Return a public name, importing its module on first use."""
        if name == "__version__":
            return _version()
        if name not in API:
            raise AttributeError(f"module 'foretrace' has no attribute {name!r}")
        module = import_module(f"{__name__}.{API[name]}")
        return module if name == "figures" else getattr(module, name)


API: Final[Mapping[str, str]] = MappingProxyType(
    {
        "Job": "simulator.job",
        "Layout": "traces.layout",
        "analysis": "traces.analysis.everything",
        "breakdown": "traces.analysis.metrics",
        "calibrate": "simulator.recorded.calibrate",
        "compare": "traces.compare",
        "figures": "traces.figures",
        "findings": "traces.analysis.findings",
        "job_like": "simulator.recorded.like",
        "lightning_callback": "tracer.callbacks",
        "load_cluster": "topologies.catalog",
        "load_model": "simulator.models.sources",
        "open_run": "traces.store",
        "read_calibration": "simulator.recorded.calibration",
        "record": "tracer.record",
        "report_html": "traces.report.html",
        "simulate": "simulator.simulate",
        "simulate_many": "simulator.simulate",
        "step": "tracer.record",
        "summarize": "traces.analysis.metrics",
        "trainer_callback": "tracer.callbacks",
    }
)
"""Public names and the module of this package that each one comes from."""

__all__ = sorted(API)  # noqa: PLE0605 - sorted() of str keys is a list of str


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return [*__all__, "__version__"]


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415 - not in every training

    try:
        return version("foretrace")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "0+unknown"
