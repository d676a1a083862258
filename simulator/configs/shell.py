"""Reads the arguments out of a launch script, without running it.

Enough of a shell for scripts as people write them around torchrun: variables with defaults, sums, arrays
that are added to, ``if`` on strings, comments and continued lines. What depends on more (``$1``, files,
loops) stays as it is written, and a setting whose value is not known is an error that names it.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from foretrace.door import counted
from foretrace.simulator.errors import ConfigError

_ASSIGNMENT: Final = re.compile(
    r"^(?:(?:export|local|readonly|declare|typeset)\s+(?:-\w+\s+)*)?([A-Za-z_]\w*)(\+?=)(.*)$", re.DOTALL
)
_NEXT_ASSIGNMENT: Final = re.compile(r"\s*;\s*(?=(?:export\s+)?[A-Za-z_]\w*\+?=)")
_POSITIONAL: Final = re.compile(r"\$\{?[1-9]\}?")
_BRANCH: Final = re.compile(r"[^\s()]+\)(\s|$)")
"""What a branch of ``case`` is for."""
_PRINTED: Final = r'(?:echo|printf)\s+(?:-\w+\s+)*"'
_SAYS: Final = re.compile(_PRINTED + r'[^"]*$')
_SAYS_ALL: Final = re.compile(_PRINTED)
"""A text that is printed: one that goes on in the next line, and any."""
_SUM: Final = re.compile(r"\$\(\((.*?)\)\)|\$\[(.*?)\]")
_VARIABLE: Final = re.compile(
    r"\$\{([A-Za-z_]\w*)(?:\[[@*]\])?(?::?-((?:[^{}]|\{[^{}]*\})*))?\}|\$([A-Za-z_]\w*)"
)
_WHOLE_ARRAY: Final = re.compile(r'"(\$\{\w+\[[@*]\]\})"')
_PARAMETER: Final = re.compile(r"\$\{\d+:?-([^{}]*)\}")
_TEST: Final = re.compile(r"^(?:if|elif)\s+\[{1,2}\s+(.*?)\s+\]{1,2}\s*;?\s*(?:then)?$")
_EITHER: Final = re.compile(r"\s*\]{1,2}\s*\|\|\s*\[{1,2}\s*")
_BOTH: Final = re.compile(r"\s*\]{1,2}\s*&&\s*\[{1,2}\s*")
_NODES: Final = re.compile(r"^#SBATCH\s+(?:--nodes[=\s]|-N\s*)\s*(\d+)", re.MULTILINE)
_REDIRECTS: Final = re.compile(r"[&\d]?>|\||<")
_PROGRAM: Final = re.compile(r"\b(pretrain|train|finetune|torchrun|torch\.distributed|deepspeed)")
_OF_NUMBERS: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
}
_COMPARES: Final = {"=": operator.eq, "==": operator.eq, "!=": operator.ne, **_OF_NUMBERS}
_MOST_LETTERS: Final = 1_000_000
_LONGEST_SUM: Final = 500  # letters
_ARITHMETIC: Final = re.compile(r"[\d\s+*/()%-]+")


def arguments(text: str) -> dict[str, str | bool]:
    """Return the arguments of a launch script, or of a file that lists them, by name.

    Names are spelled with dashes; an argument without a value is True.

    >>> arguments("torchrun pretrain_gpt.py --tensor_model_parallel_size 4 --bf16")
    {'tensor-model-parallel-size': '4', 'bf16': True}
    """
    variables = _of_slurm(text)
    commands: list[str] = []
    for line in _taken(_logical_lines(text), variables):
        if (assigned := _ASSIGNMENT.match(line)) is not None:
            _assign(variables, *assigned.groups())
        elif not _BRANCH.match(line):
            commands.append(_expanded(line, variables))
    found = [line for line in commands if "--" in line and (_PROGRAM.search(line) or line.startswith("--"))]
    if not found:  # a file that only sets variables: its arrays of arguments
        found = [value for value in variables.values() if value.lstrip().startswith("--")]
    if not found:  # another program
        found = [line for line in commands if " --" in line]
    return _named(token for line in found for token in _tokens(line))


def listed(given: Mapping[str, Any], variables: Mapping[str, Any]) -> dict[str, str | bool]:
    """Return arguments that are *given* by name, as ``arguments`` does; what is false is not given.

    >>> listed({"--num_layers": 32, "--seq-length": "${S}", "--bf16": True, "--fp16": False}, {"S": 4096})
    {'num-layers': '32', 'seq-length': '4096', 'bf16': True}
    >>> listed({"--recompute-modules": "[mlp moe_act]"}, {})
    {'recompute-modules': 'mlp moe_act'}
    """
    known = {name: str(value) for name, value in variables.items()}
    found: dict[str, str | bool] = {}
    for name, value in given.items():
        if value is not False:
            words = value if isinstance(value, list) else [value]
            text = _expanded(" ".join(map(str, words)), known)
            # Several words are written in brackets; so is a list in Python, which is one value.
            if (several := re.fullmatch(r"\[([\w ]*[a-z][\w ]*)\]", text)) is not None:
                text = several.group(1)
            found[name.lstrip("-").replace("_", "-")] = value is True or text
    return found


def _of_slurm(text: str) -> dict[str, str]:
    """Return the variables that Slurm sets from the directives of a script."""
    nodes = _NODES.search(text)
    return dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), nodes.group(1)) if nodes else {}


def _named(tokens: Iterator[str]) -> dict[str, str | bool]:
    """Return arguments by name; several values are joined by blanks."""
    found: dict[str, str | bool] = {}
    name = None
    for token in tokens:
        if token.startswith("--") and len(token) > 2:
            name, equals, value = token[2:].partition("=")
            name = name.replace("_", "-")
            found[name] = value if equals else True
        elif (
            # A single dash with a number is a value, such as -1.
            (token.startswith("-") and not re.match(r"-[\d.]", token))
            or token.endswith(".py")
            or _REDIRECTS.match(token)
        ):
            name = None
        elif name is not None:
            before = found[name]
            found[name] = token if before is True else f"{before} {token}"
    return found


def _tokens(line: str) -> list[str]:
    try:
        tokens = shlex.split(line, comments=True)
    except ValueError:  # a quotation that ends on another line
        # Quotation marks do not matter then; words do.
        tokens = line.replace('"', " ").replace("'", " ").split()
    return [
        part
        for token in tokens
        # Arrays are one word when they come, and hold several arguments.
        for part in (token.split() if token.startswith("--") or " --" in token else [token])
    ]


def _logical_lines(text: str) -> Iterator[str]:
    """Yield lines with continuations and arrays joined, comments left out."""
    open_until, held = "", ""
    for raw in text.splitlines():
        # A ``#`` within a word is none of a comment.
        line = re.sub(r"(^|\s)#.*$", "", raw).rstrip()
        # chr(92) is the backslash of a continued line.
        held = f"{held} {line.removesuffix(chr(92)).strip()}".strip()
        if not open_until:
            start = _ASSIGNMENT.match(held)
            value = start.group(3) if start else ""
            if value.startswith("(") and not value.rstrip().endswith(")"):
                open_until = ")"
            elif (value.count('"') == 1 and value.startswith('"')) or (
                _SAYS.match(held) and raw.count('"') % 2  # a comment may begin within it
            ):
                open_until = '"'
        elif line.rstrip().endswith(open_until) or (_SAYS_ALL.match(held) and '"' in line):
            open_until = ""
        if not open_until and not line.endswith(chr(92)):
            yield from _statements(held)
            held = ""
    yield from _statements(held)


def _statements(line: str) -> list[str]:
    """Return the assignments of a line that has several, or the line as it is."""
    parts = _NEXT_ASSIGNMENT.split(line) if _ASSIGNMENT.match(line) else [line]
    # A semicolon within a quotation is no end of a statement.
    is_whole = all(part.count('"') % 2 == 0 and part.count("'") % 2 == 0 for part in parts)
    return [part.removesuffix(";") for part in parts] if is_whole and line else [line] if line else []


def _taken(lines: Iterator[str], variables: dict[str, str]) -> Iterator[str]:
    """Yield the lines of the branches that run; a test whose outcome is not known counts as false."""
    branches: list[list[bool]] = []  # for each open ``if``: whether this branch runs, whether one has run
    for line in lines:
        word = line.split(None, 1)[0]
        if word in ("if", "elif"):
            holds = _holds(line, variables)
            if word == "if":
                branches.append([holds, holds])
            elif branches:
                # A branch runs only if none before it has.
                branches[-1] = [holds and not branches[-1][1], holds or branches[-1][1]]
        elif word == "else" and branches:
            branches[-1] = [not branches[-1][1], True]
        elif word == "fi" and branches:
            branches.pop()
        elif word != "then" and all(branch[0] for branch in branches):
            yield line


def _holds(line: str, variables: dict[str, str]) -> bool:
    """Return whether a test of strings holds."""
    found = _TEST.match(line)
    if found is None:
        return False
    either = _EITHER.split(found.group(1))
    if len(either) > 1:
        return any(_says(_tokens(_expanded(test, variables))) for test in either)
    return all(_says(_tokens(_expanded(test, variables))) for test in _BOTH.split(found.group(1)))


def _says(parts: list[str]) -> bool:
    """Return whether one test, given as its words, holds."""
    if parts[:1] == ["!"]:  # a test of files, of which nothing is known
        return parts[1:2] in (["-z"], ["-n"]) and not _says(parts[1:])
    if len(parts) == 3 and parts[1] in _COMPARES:
        left, how, right = parts
        numbers = how in _OF_NUMBERS
        # A variable that is not known stays as text, and no number.
        if numbers and min(map(counted, (left, right))) < 0:
            return False
        return bool(_COMPARES[how](*(map(counted, (left, right)) if numbers else (left, right))))
    value = parts[1] if len(parts) > 1 else ""
    if parts[:1] == ["-n"]:
        return bool(value) and not value.startswith("$")
    return parts[:1] == ["-z"] and (not value or _VARIABLE.fullmatch(value) is not None)


def _assign(variables: dict[str, str], name: str, how: str, value: str) -> None:
    value = value.strip()
    if not (value.startswith(("(", '"', "'")) or "$(" in value or "`" in value):
        value = value.partition(";")[0].strip()  # what follows is another command
    if name in variables and how == "=" and _POSITIONAL.fullmatch(value.strip("\"'")):
        return  # a script that is given no arguments keeps what it has
    if (value.startswith("(") and value.endswith(")")) or (
        len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
    ):
        value = value[1:-1]
    value = _expanded(value, variables).strip()
    variables[name] = f"{variables.get(name, '')} {value}".strip() if how == "+=" else value


def _expanded(text: str, variables: dict[str, str]) -> str:
    """Return *text* with variables and sums in place of their names; unknown names stay.

    Raises ConfigError if it becomes too long: a variable can hold two of the one before it, and so on.
    """
    n_letters = 0

    def value(found: re.Match[str]) -> str:
        nonlocal n_letters
        said = _value(found, variables)
        n_letters += len(said)
        if n_letters > _MOST_LETTERS:
            raise ConfigError(f"variables of the script hold more than {_MOST_LETTERS:,} letters")
        return said

    text = _WHOLE_ARRAY.sub(r"\1", text)
    for _ in range(4):  # defaults may hold variables
        before = text
        text = _PARAMETER.sub(lambda found: found.group(1).strip("\"'"), text)
        text = _VARIABLE.sub(value, text)
        text = _SUM.sub(lambda found: _sum(found.group(1) or found.group(2), variables), text)
        if text == before:
            break
    return text


def _value(found: re.Match[str], variables: dict[str, str]) -> str:
    name, default = found.group(1) or found.group(3), found.group(2)
    if name in variables:
        return variables[name]
    return default.strip("\"'") if default is not None else found.group(0)


def _sum(expression: str, variables: dict[str, str]) -> str:
    """Return the value of whole-number arithmetic, which is all that scripts use; else the text as it is."""
    if len(expression) > _LONGEST_SUM:
        return f"$(({expression}))"
    text = re.sub(r"[A-Za-z_]\w*", lambda found: variables.get(found.group(0), found.group(0)), expression)
    # Nothing but digits and operators is ever evaluated; powers could take for ever.
    if not _ARITHMETIC.fullmatch(text) or "**" in text or len(text) > _LONGEST_SUM:
        return f"$(({expression}))"
    return str(_evaluated(text))


def _evaluated(text: str) -> int | str:
    """Return the value of sums, products and quotients of whole numbers."""
    kinds = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Mod: operator.mod}
    # Shells divide whole numbers, and round down those above zero.
    kinds[ast.Div] = operator.floordiv

    def value(node: ast.AST) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in kinds:
            return int(kinds[type(node.op)](value(node.left), value(node.right)))
        raise ValueError(text)

    try:
        return value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return text
