"""``python -m foretrace``, and the command ``foretrace``."""

from foretrace import interrupts


def main() -> None:
    """Run the command line."""
    interrupts.loading_begins()
    from foretrace.cli import main as verbs  # noqa: PLC0415 - after the handler is there

    try:
        verbs(prog_name="foretrace")
    except KeyboardInterrupt:
        interrupts.end()


if __name__ == "__main__":
    main()
