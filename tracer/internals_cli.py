"""``python -m foretrace.tracer.internals_cli``: which private names of torch are missing."""

from __future__ import annotations

from importlib.util import find_spec

import click

from foretrace.tracer import internals


@click.command()
def main() -> None:
    """List the private names of torch that the tracer uses and that the torch of this environment lacks."""
    if find_spec("torch") is None:
        raise click.ClickException("torch is not installed")
    import torch

    lacking = internals.missing()
    for name, purpose in lacking:
        click.echo(f"{name}: to {purpose}")
    click.echo(f"torch {torch.__version__} lacks {len(lacking)} of {len(internals.RELIED_ON)} names")
    raise SystemExit(bool(lacking))


if __name__ == "__main__":
    main()
