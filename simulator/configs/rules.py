"""What a setting of another tool means here: rules, one per setting, and how a document is read with them.

A reader is a table from the name of a setting to a rule. ``Use`` gives a *fact*: a setting of a job by its
name, a field of the model (``model.hidden``), a convention of the framework (``convention.async_tp``), or one
of ``SETTLED``, from which ``simulator.configs.settle`` works out settings. ``Leave`` says why a setting does
not count. Nothing is dropped in silence: what no rule knows is listed as such.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from foretrace.door import MOST_WHOLE, counted, own_table, shown
from foretrace.simulator.errors import ConfigError

MODEL: Final = "model."
CONVENTION: Final = "convention."

SETTLED: Final = (
    *("nodes", "gpus_per_node", "accumulation", "local_batch", "shard_degree", "replicate_degree"),
    *("offload_optimizer", "offload_states", "offload_activations", "layers_per_virtual_stage"),
    *("pad_vocab_to", "first_stage_layers", "last_stage_layers", "distributed", "form"),
)
"""Facts that are not settings, but from which some settings follow."""

UNKNOWN: Final = "not a setting that this reader knows"

MOST_SETTINGS: Final = 4000
"""Settings of a file, at most: the tool with the most has a few hundred."""


Read = Callable[[Any], Any]
"""Turns the value of a setting into that of a fact."""


class Use(NamedTuple):
    """The setting counts.

    Attributes:
        fact: what it gives; empty where its value is only checked.
        read: turns its value into that of the fact; None says that nothing follows, a ``Leave`` that it does
            not count after all, an ``Instead`` that it gives another fact. Raises ValueError with the values
            that would work.
    """

    fact: str
    read: Read


class Instead(NamedTuple):
    """The setting gives another fact than it usually does.

    Attributes:
        fact: the fact that it gives.
        value: value of that fact.
    """

    fact: str
    value: Any


class Leave(NamedTuple):
    """The setting does not count.

    Attributes:
        reason: why it does not.
    """

    reason: str


Rule = Use | Leave

_SHARED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "learns": "learning rates and their like: every step takes as long",
        "logs": "says what is logged or measured; not how long a step takes",
        "data": "data is loaded beside the steps; --set step_host_s gives what waits for it",
        "writes": "where checkpoints are and how they are written",
        "length": "how many steps, not how long one takes: goodput --tokens",
        "launch": "where processes start; not how long a step takes",
    }
)
"""What settings of many tools are for that do not count, by the word for it in their tables."""


class Used(NamedTuple):
    """A setting that counted: its name, its value, and the facts that follow."""

    key: str
    value: Any
    fact: str
    gave: Any


class Ignored(NamedTuple):
    """A setting that did not count, and why."""

    key: str
    value: Any
    reason: str


class Assumed(NamedTuple):
    """A fact that the file does not give, the value that was taken instead, and why."""

    fact: str
    value: Any
    reason: str


@dataclass(slots=True)
class Reading:
    """What a file said.

    Attributes:
        tool: whose file it is, a key of ``simulator.configs.read.TOOLS``.
        where: the file.
        facts: what it gives, by name.
        used, ignored, assumed: what became of its settings.
    """

    tool: str
    where: str
    facts: dict[str, Any] = field(default_factory=dict)
    used: list[Used] = field(default_factory=list)
    ignored: list[Ignored] = field(default_factory=list)
    assumed: list[Assumed] = field(default_factory=list)

    def assume(self, fact: str, value: Any, reason: str) -> None:
        """Take *value* for a fact that the file does not give."""
        if fact not in self.facts:
            self.facts[fact] = value
            self.assumed.append(Assumed(fact, value, reason))

    def ignore(self, facts: Collection[str], reason: str) -> None:
        """Leave out *facts*, which the file gives, for a *reason*."""
        for used in [one for one in self.used if one.fact in facts]:
            self.used.remove(used)
            self.ignored.append(Ignored(used.key, used.value, reason))
        for fact in facts:
            self.facts.pop(fact, None)


def text(value: Any) -> str:
    """Read a text that may be any."""
    if not isinstance(value, str):
        raise ValueError("a text")
    return value


def words(**allowed: Any) -> Read:
    """Return a reader of a word that is one of *allowed*, case and dashes aside.

    >>> words(full="fsdp")("FULL")
    'fsdp'
    """
    spelled = {_plain(word): value for word, value in allowed.items()}

    def read(value: Any) -> Any:
        if _plain(value) not in spelled:
            raise ValueError(f"one of {', '.join(allowed)}")
        return spelled[_plain(value)]

    return read


def some_words(**allowed: Any) -> Read:
    """Return a reader of a word of which nothing follows unless it is one of *allowed*."""
    return lambda value: allowed.get(str(value))


def numbered(values: Sequence[Any]) -> Read:
    """Return a reader of a number, from 0 on, that stands for one of *values*."""

    def read(value: Any) -> Any:
        number = counted(value) if isinstance(value, str) else value
        # To Python True is 1.
        if isinstance(value, bool) or number not in range(len(values)):
            raise ValueError(f"one of {', '.join(map(str, range(len(values))))}")
        return values[int(number)]

    return read


def switch(what: Any) -> Read:
    """Return a reader of a switch: where it is on it gives *what*, else nothing."""
    return lambda value: what if str(value).lower() in ("true", "1") else None


_OPTIMIZERS: Final = {
    **dict.fromkeys(("adam", "adamw", "fusedadam", "cpuadam"), "adamw"),
    **dict.fromkeys(("adam8bit", "adamw8bit"), "adamw-8bit"),
    "adafactor": "adafactor",
    "muon": "muon",
    "sgd": "sgd-momentum",  # whoever trains with it has a momentum
}


def optimizer(value: Any) -> str | Leave:
    """Return the optimizer that a file calls so; of one that is not known, what is done instead.

    >>> optimizer("AdamW"), optimizer("Lion").reason
    ('adamw', 'not simulated: its states are taken as those of AdamW')
    """
    if found := _OPTIMIZERS.get(_plain(value)):
        return found
    return Leave("not simulated: its states are taken as those of AdamW")


def whole(value: Any) -> int:
    """Return a whole number from 1 on; text and round floats (``5e8``) are read as such."""
    try:
        number = float(value)
    # A number too large for a float counts as none.
    except (TypeError, ValueError, OverflowError):
        number = 0.0
    if isinstance(value, bool) or not 1 <= number <= MOST_WHOLE or number != int(number):
        raise ValueError("a whole number from 1 on")
    return int(number)


def some(value: Any) -> int | None:
    """Return a whole number from 1 on; nothing follows from 0, which is none of them."""
    return None if str(value) == "0" else whole(value)


def flag(value: Any) -> bool:
    """Return true or false, also as text."""
    if isinstance(value, bool):
        return value
    if str(value).lower() in ("true", "false"):
        return str(value).lower() == "true"
    raise ValueError("true or false")


def gives(what: Any, otherwise: Any = None) -> Read:
    """Return a reader of a flag that gives *what* where it is true, and else what there is *otherwise*."""
    return lambda value: what if flag(value) else otherwise


def above_zero(value: Any) -> bool:
    """Return whether a number is above zero."""
    return float(value) > 0


def negated(value: Any) -> bool:
    """Return the opposite of a flag."""
    return not flag(value)


def several(value: Any) -> int | None:
    """Return a whole number above 1; nothing follows from 1, which is none of them."""
    return found if (found := whole(value)) > 1 else None


_READERS: Final[Mapping[str, Read]] = MappingProxyType(
    {
        "above_zero": above_zero,
        "as_is": lambda value: value,
        "flag": flag,
        "negated": negated,
        "number": float,
        "optimizer": optimizer,
        "several": several,
        "some": some,
        "text": text,
        "whole": whole,
    }
)
_MADE: Final[Mapping[str, Callable[[Any], Read]]] = MappingProxyType(
    {
        "gives": lambda values: gives(*values),
        "numbered": numbered,
        "on": switch,
        "some_words": lambda allowed: some_words(**allowed),
        "words": lambda allowed: words(**allowed),
    }
)


def rules_in(tool: str, own: Mapping[str, Read]) -> dict[str, Rule]:
    """Return the rules that are listed for a *tool*, in the file of its name beside this one.

    A heading is a reader: one that needs nothing (``_READERS``, and the tool's *own*), under which each
    setting has the fact that it gives; or one that is made (``_MADE``), under which it has, too, of what.
    ``[leave]`` lists settings that do not count by the reason. All rules of a ``base`` hold beside its own,
    and settings of a table were those of the tables where they stood ``formerly``. ``presets`` are no rules.
    """
    document = table_of(tool)
    document.pop("presets", None)
    found = rules_in(base, own) if (base := document.pop("base", "")) else {}
    formerly = document.pop("formerly", {})
    for reason, keys in document.pop("leave").items():
        found |= dict.fromkeys(keys, Leave(_SHARED.get(reason, reason)))
    readers = {**_READERS, **own}
    for heading, settings in document.items():
        for key, gives_ in settings.items():
            if heading in _MADE:
                ((fact, of),) = gives_.items()
                found[key] = Use(fact, _MADE[heading](of))
            else:
                found[key] = Use(gives_, readers[heading])
    for table, others in formerly.items():
        inside = {key.removeprefix(table): rule for key, rule in found.items() if key.startswith(f"{table}.")}
        found |= {f"{other}{key}": rule for other in others for key, rule in inside.items()}
    return found


def table_of(tool: str) -> dict[str, Any]:
    """Return what the file of a *tool* lists, as it stands there."""
    return own_table(f"simulator/configs/{tool}.toml")


def words_for(tool: str, setting: str) -> dict[Any, str]:
    """Return the word that a *setting* of a *tool* has for each value of its fact, the first if several."""
    (given,) = table_of(tool)["words"][setting].values()
    return {value: word for word, value in reversed(given.items())}


_SAYS: Final = {
    **{
        name: name for name in ("tp", "pp", "cp", "ep", "expert_tp", "seq_len", "micro_batch", "global_batch")
    },
    **dict.fromkeys(("gpus", "nodes", "gpus_per_node"), "gpus"),
    **dict.fromkeys(("virtual_stages", "layers_per_virtual_stage"), "virtual_stages"),
    "accumulation": "global_batch",
}
"""Facts that scripts often have from outside, and the setting that says each or what follows from it."""

_VARIABLE: Final = re.compile(r"\$\{?\w+\}?")
"""A variable of a shell that nothing in the file has set."""


def apply(
    rules: Mapping[str, Rule], flat: Mapping[str, Any], tool: str, where: str, given: Container[str] = ()
) -> Reading:
    """Return the reading of *flat*, settings by name, according to *rules*.

    A rule of the name of a table (``optimizer``) holds for all settings in it that have none of their own. A
    variable that is set elsewhere does not matter where its fact is *given*.

    Raises:
        ConfigError: a setting has a value that it cannot have, two settings contradict each other, or
            there are more than any tool has.
    """
    if len(flat) > MOST_SETTINGS:
        raise ConfigError(f"{where}: {len(flat):,} settings; no tool has more than {MOST_SETTINGS:,}")
    reading, giver = Reading(tool, where), dict[str, str]()
    for key, value in flat.items():
        rule = _rule(rules, key)
        if value is None:
            rule = Leave("empty")
        elif value == "auto":
            rule = Leave("auto: the training script decides it; give it as a flag")
        elif isinstance(rule, Use) and isinstance(value, str) and _VARIABLE.fullmatch(value):
            rule = _set_elsewhere(rule.fact, f"{where}: {key} = {value}", given)
        if isinstance(rule, Use):
            gave = _read(rule, key, value, where)
            if isinstance(gave, Leave):
                rule = gave
            else:
                fact, gave = gave if isinstance(gave, Instead) else (rule.fact, gave)
                _give(reading, giver, key, fact, gave)
                reading.used.append(Used(key, value, fact, gave))
        if isinstance(rule, Leave):
            reading.ignored.append(Ignored(key, value, rule.reason))
    return reading


def _set_elsewhere(fact: str, said: str, given: Container[str]) -> Leave:
    """Return why a variable is left out. Raises ConfigError with what *said* so if nothing else gives it."""
    table, _, name = fact.rpartition(".")
    if table == "convention":
        return Leave(f"set outside of this file; --set {name}=... says it")
    says = _SAYS.get(fact, fact)
    if says in given:
        return Leave("set outside of this file; a flag says it")
    flag_ = f": --{says.replace('_', '-')} says it" if says in _SAYS.values() else ""
    raise ConfigError(f"{said} is set outside of this file{flag_}")


def flattened(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the settings of nested tables by their path, ``zero_optimization.stage``."""
    found: dict[str, Any] = {}
    for key, value in document.items():
        # An empty table stays a setting: otherwise nothing would be said of it.
        if isinstance(value, Mapping) and value:
            found |= flattened(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _rule(rules: Mapping[str, Rule], key: str) -> Rule:
    """Return the rule of *key*, or of the innermost table around it that has one."""
    if key in rules:
        return rules[key]
    around = key
    while "." in around:
        around = around.rpartition(".")[0]
        # A ``Use`` is of its own name only; what is inside a table is something else.
        if isinstance(rule := rules.get(around), Leave):
            return rule
    near = difflib.get_close_matches(key, rules, n=1, cutoff=0.85)
    return Leave(f"{UNKNOWN}; did you mean {near[0]}?" if near else UNKNOWN)


def _read(rule: Use, key: str, value: Any, where: str) -> Any:
    try:
        return rule.read(value)
    except ValueError as error:
        raise ConfigError(f"{where}: {key} = {value!r}: {error}") from None
    # Whatever a file holds ends in a message, not in a traceback.
    except (TypeError, AttributeError, KeyError, ArithmeticError):
        raise ConfigError(f"{where}: {key} = {shown(value)}: a value of another type is needed") from None


def _give(reading: Reading, giver: dict[str, str], key: str, fact: str, gave: Any) -> None:
    """Note a fact; two settings may give the same one if they agree."""
    if gave is None:
        return
    if fact in reading.facts and reading.facts[fact] != gave:
        raise ConfigError(
            f"{reading.where}: {giver[fact]} and {key} contradict each other: they say {fact} is "
            f"{reading.facts[fact]!r} and {gave!r}; leave one out"
        )
    reading.facts[fact] = gave
    giver[fact] = key


def _plain(word: Any) -> str:
    return str(word).lower().replace("-", "_")
