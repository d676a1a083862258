"""The verb ``foretrace serve``: runs and the what-if page in a browser on this machine."""

from __future__ import annotations

import threading
import webbrowser
from pathlib import Path

import click

from foretrace.interrupts import leave


@click.command()
@click.argument("folder", metavar="[DIR]", default=".", type=click.Path(exists=True, file_okay=False))
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8642,
    help="Port; 0 takes a free one. [default: 8642]",
)
@click.option("--open/--no-open", "opens", default=False, help="Open the page in the browser.")
def serve(folder: str, port: int, *, opens: bool) -> None:
    """Browse the runs below DIR, and try out layouts, in a browser on this machine.

    The server listens on 127.0.0.1 alone, reads nothing outside DIR and writes nothing. Reports of any size
    are sent in parts. The what-if page, at /plan, simulates every change.
    """
    from foretrace.simulator.what_if.planner import Planner
    from foretrace.traces.serving.runs import Runs
    from foretrace.traces.serving.server import Server

    runs, planner = Runs(Path(folder)), Planner()
    with Server({**runs.routes(), **planner.routes()}, port) as server:
        click.echo(f"runs below {runs.root}: {server.address}")
        click.echo(f"what if:  {server.address}plan")
        click.echo("Ctrl-C ends it")
        if opens:
            webbrowser.open(server.address)
        try:
            threading.Thread(target=planner.warm, daemon=True).start()
            server.serve_forever()
        except KeyboardInterrupt:
            click.echo("")
            leave(0)
