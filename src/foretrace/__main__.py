"""``python -m foretrace``, which is ``foretrace`` on the command line."""

from foretrace.cli import main

if __name__ == "__main__":
    main(prog_name="foretrace")
