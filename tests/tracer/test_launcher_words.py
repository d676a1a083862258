"""Which words of a command line are the script's: those that the launcher's own parser leaves to it."""

from __future__ import annotations

from itertools import product

import pytest

from foretrace.tracer.rehearse.world.launchers import before_script, launchers_of, script_of

OPTIONS = ((), ("--standalone", "--nproc_per_node=8"), ("--nproc-per-node", "8", "--"))
SCRIPTS = (("train.py",), ("-m", "package.train"))
WORDS = ((), ("--lr", "1"), ("--", "--depth=20"), ("--", "--", "x"), ("config.yaml", "--", "--lr=1"), ("--",))


@pytest.mark.parametrize(("options", "script", "words"), [*product(OPTIONS, SCRIPTS, WORDS)])
def test_a_script_is_given_what_torchrun_gives_it(
    options: tuple[str, ...], script: tuple[str, ...], words: tuple[str, ...]
) -> None:
    run = pytest.importorskip("torch.distributed.run")
    if options[-1:] == ("--",) and script[0] == "-m":
        pytest.skip("what is behind the dashes is no option of torchrun's")

    args = run.get_args_parser().parse_args([*options, *script, *words])

    assert script_of(["torchrun", *options, *script, *words]) == (
        (args.training_script, *args.training_script_args),
        args.module,
    )


@pytest.mark.parametrize("before", [("python",), ("srun", "python"), ("mpirun", "-n", "2", "python3")])
def test_python_hands_every_word_behind_a_script_on(before: tuple[str, ...]) -> None:
    command = [*before, "train.py", "--", "--depth=20"]

    assert script_of(command) == (("train.py", "--", "--depth=20"), False)
    assert before_script(command) == before


@pytest.mark.parametrize("words", [("train.py", "--", "-v"), ("-m", "package.train", "--", "-v")])
def test_dashes_behind_a_script_do_not_hide_what_starts_it(words: tuple[str, ...]) -> None:
    assert launchers_of(["accelerate", "launch", *words]) == ("accelerate",)
