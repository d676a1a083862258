"""Numbers as a person says them, for the texts of a report."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

_SI: Final = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_TIMES: Final = ((1.0, "s", 3), (1e-3, "ms", 2), (1e-6, "µs", 1))

_UNITS: Final = (
    ("_bytes_per_s", "B/s"),
    ("_flops_per_s", "FLOP/s"),
    ("_bytes", "B"),
    ("_flops", "FLOP"),
)
"""Units that end a name, longest first; times are formatted apart."""

_DEEPEST: Final = 3  # levels of a description that are shown; what lies deeper is for programs
_MANY: Final = 1e6  # from here on, a plain number is said with an SI prefix

Line = tuple[str, str, str]  # what, its value, and where the value comes from ("" if not said)

_PHASES: Final = {"evaluation": "evaluation", "checkpoint": "checkpoint save"}
"""What a phase that is no training is called."""


def format_time(seconds: float) -> str:
    """Return a duration in the largest unit that keeps it at 1 or more.

    >>> format_time(1.2345), format_time(0.0123)
    ('1.234 s', '12.30 ms')
    """
    for scale, unit, digits in _TIMES:
        if abs(seconds) >= scale:
            return f"{seconds / scale:.{digits}f} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def format_left_out(phases: Sequence[Mapping[str, Any]]) -> str:
    """Return what is no training, as ``traces.analysis.metrics.left_out`` has it, in words; "" if nothing.

    >>> phase = {"kind": "evaluation", "count": 3, "total_s": 1.2, "count_inside": 0, "total_inside_s": 0.0}
    >>> format_left_out([phase, phase | {"kind": "checkpoint", "count": 0, "count_inside": 1}])
    'left out: 3 evaluations (1.200 s); steps contain 1 checkpoint save (0 ns)'
    """
    said = []
    for intro, inside in (("left out:", ""), ("steps contain", "_inside")):
        named = [
            f"{n:,} {_PHASES.get(phase['kind'], phase['kind'])}{'s' * (n > 1)} "
            f"({format_time(phase[f'total{inside}_s'])})"
            for phase in phases
            if (n := phase[f"count{inside}"])
        ]
        said += [f"{intro} {', '.join(named)}"] if named else []
    return "; ".join(said)


def format_si(value: float, unit: str) -> str:
    """Return a quantity with an SI prefix and three significant digits.

    >>> format_si(80e9, "B"), format_si(512, "B")
    ('80 GB', '512 B')
    """
    for scale, prefix in _SI:
        # From here on three digits round up to 1.00 of the next prefix.
        if abs(value) >= scale * 0.9995:
            return f"{_three_digits(value / scale)} {prefix}{unit}"
    return f"{_three_digits(value)} {unit}"


def cut(text: str, letters: int) -> str:
    """Return *text*, or its first *letters* less one and an ellipsis."""
    return text if len(text) <= letters else f"{text[: letters - 1]}…"


def format_signed(ns: int) -> str:
    """Return a difference of two times in ns with its sign.

    >>> format_signed(-1_500_000)
    '−1.50 ms'
    """
    return f"{'+' if ns > 0 else '−' if ns < 0 else '±'}{format_time(abs(ns) / 1e9)}"


def format_share(share: float, form: str = ".1f") -> str:
    """Return a share of 1 as a percentage; *form* is how Python is to format the number.

    Everything that people read says a share through here.

    >>> format_share(0.1234), format_share(0.1234, "+.0f")
    ('12.3 %', '+12 %')
    """
    return f"{100 * share:{form}} %"


UNKNOWN: Final = "unknown"  # kind or axis of a communication of which nothing tells it


def along(axis: str) -> str:
    """Return between whom an *axis* communicates, as a sentence goes on; the world is everybody.

    >>> along("tp"), along("world"), along("host"), along("unknown")
    ('along tp', 'among all ranks', 'to and from the host', 'among unknown ranks')
    """
    told = {
        "world": "among all ranks",
        "host": "to and from the host",
        UNKNOWN: "among unknown ranks",
    }
    return told.get(axis, f"along {axis}")


def called(kind: str, axis: str) -> str:
    """Return what to call a span of a *kind*, of communication with its *axis*, as far as they are known.

    >>> called("all_reduce", "dp"), called("all_reduce", "unknown"), called("unknown", "unknown")
    ('all_reduce dp', 'all_reduce', 'communication')
    """
    known = "communication" if kind == UNKNOWN and axis else kind
    return f"{known} {'' if axis == UNKNOWN else axis}".strip()


def number(value: object) -> float | None:
    """Return *value* if it is a finite number, else None: descriptions come from files that anyone can write.

    >>> number(0.5), number("0.5"), number(True)
    (0.5, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def lines(description: Mapping[str, Any], *, under: str = "", depth: int = 0) -> Iterator[Line]:
    """Yield every figure of a nested description, with its source where the description has ``sources``.

    The ``structure`` of a model is left out: it is as long as the model is.
    """
    sources = description.get("sources")
    known = sources if isinstance(sources, Mapping) else {}
    for key, value in description.items():
        if key in ("sources", "structure") or value in (None, "", [], {}, ()):
            continue
        name = f"{under} {words(key)}".strip()
        source = str(known.get(key, ""))
        if isinstance(value, Mapping):
            if depth + 1 < _DEEPEST:
                inner = {k: v for k, v in value.items() if k != "sources"} if source else value
                for what, said, said_by in lines(_with_unit(key, inner), under=name, depth=depth + 1):
                    yield what, said, said_by or source
        else:
            yield name, quantity(key, value), source


def words(key: str) -> str:
    """Return the name of a figure without its unit, as words.

    >>> words("memory_bytes_per_s"), words("n_layers"), words("latency_s")
    ('memory', 'layers', 'latency')
    """
    for ending, _ in _UNITS:
        key = key.removesuffix(ending)
    key = key.removesuffix("_s").removesuffix("_ns").removeprefix("n_")
    return key.replace("_", " ")


def quantity(key: str, value: object) -> str:
    """Return a figure with the unit that its name says.

    >>> quantity("memory_bytes", 80_000_000_000), quantity("launch_s", 2e-6), quantity("n_layers", 80)
    ('80 GB', '2.0 µs', '80')
    """
    figure = number(value)
    if figure is None:
        return _said(value)
    for ending, unit in _UNITS:
        if key.endswith(ending):
            return format_si(figure, unit)
    if key.endswith(("_s", "_ns")):
        return format_time(figure / 1e9 if key.endswith("_ns") else figure)
    if abs(figure) >= _MANY:
        return format_si(figure, "").strip()
    return str(value) if isinstance(value, int) else f"{figure:.4g}"


def _said(value: object) -> str:
    """Return what is not a number as text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _with_unit(key: str, inner: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return *inner* with the unit of its own name on its keys: a table of peaks by dtype, for example."""
    ending = next((ending for ending, _ in _UNITS if key.endswith(ending)), "")
    if not ending:
        return inner
    return {k if k == "sources" else f"{k}{ending}": v for k, v in inner.items()}


def _three_digits(value: float) -> str:
    """Return *value* to three significant digits, without zeros that say nothing."""
    # What rounds to four digits, .3g would write as 1e+03.
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"
