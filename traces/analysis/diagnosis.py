"""Why a recording hangs, or what ended it: who has not come to which communication, and who failed first.

Nothing that a rank leaves behind is enough by itself. Its spans are complete up to the last batch, its note
of what is under way (section 7 of docs/timeline-format.md) may be seconds old, its last calls (section 8) are
exact and say nothing of their ends, and how its process ended (section 9) is known to its launcher, or to
itself if it raised. They are put together here, the newest of each, and the ranks are compared:

* A rank that others wait for, and that waits for nobody, is the one that holds up or has failed the others.
* If ranks are only a moment apart, as in every training, that says nothing. Then whoever ended by itself
  comes before those that a launcher ended, and a process that was killed before those that raised: a rank
  whose peer is gone raises, too.
* Who raised once a communication of its had failed, or inside of one that others have not come to, or call
  differently, is no cause of it. A call behind which it has gone on is none of these.
* Who came to a communication that others had given up after a long wait has made them fail.
* Whom somebody else than its launcher killed before any gave up has ended the job, be it while it waited.
* If all have ended alike, or all for the sake of others, nobody is named.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from foretrace.traces.analysis.mismatch import Mismatch, mismatches
from foretrace.traces.columns import int64, is_one_of
from foretrace.traces.info import Process, RunInfo, merged, rank_list, read_info
from foretrace.traces.layout import AXES
from foretrace.traces.pending import P2P, Ended, Key, Pending, communication, read_ended, read_pending
from foretrace.traces.report.format import format_si, format_time
from foretrace.traces.run import Run

Track = tuple[int, int, int]
"""Group, sender and receiver of communications that are numbered together; -1 for both of collectives."""

LONG_NS: Final = 1_000_000_000
"""Time from which on a rank counts as waiting: until then ranks are as far apart as in any training."""

MOST_CLAUSES: Final = 3  # most calls in which ranks wait that a sentence lists
MOST_CALLS: Final = 64  # last calls of a rank that are kept (section 8 of docs/timeline-format.md)
MOST_LETTERS: Final = 120  # most characters of an exception that a sentence shows

ONE_SIDED: Final = ("broadcast", "reduce", "gather", "scatter", "send")
"""Communications that a rank may have behind it before all others have come."""

CRASHES: Final = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 11: "SIGSEGV"}
"""Signals that a process brings upon itself."""


@dataclass(slots=True, kw_only=True)
class Evidence:
    """What is known of one rank, out of all that it has left."""

    rank: int  # which
    counts: dict[Track, int] = field(default_factory=dict)  # by track, how many communications it has issued
    # by track, up to which one its spans show that they are over
    ended: dict[Track, int] = field(default_factory=dict)
    # communications by key, in columns of a timeline
    rows: dict[Key, Mapping[str, Any]] = field(default_factory=dict)
    last: Mapping[str, Any] | None = None  # the last that it has issued, None if unknown
    last_ns: int = -1  # when
    seen_ns: int = -1  # its last sign of life, on the clock of the run
    noted_ns: int = -1  # when it last said what is under way
    is_exact: bool = False  # whether *counts* are those at its end, and not those of its last batch or note
    unseen: frozenset[Track] = frozenset()  # tracks of which it is not known what it has issued
    is_blind: bool = False  # whether nothing is known of its calls, e.g. because the recorder had stopped
    under_way: tuple[Key, ...] = ()  # keys of what had not ended when it last said so
    place: str = ""  # where its main thread was, "" if unknown
    process: Process = field(default_factory=Process)  # its process, as it describes itself
    ended_by: Ended | None = None  # how its parent saw it end, None if unknown

    @property
    def was_sent_away(self) -> bool:
        """Whether its launcher has ended it, as launchers do once another rank has failed."""
        if self.ended_by is None or not self.ended_by.signals_sent:
            return False
        return not self.is_killed or -self.ended_by.status in self.ended_by.signals_sent

    @property
    def is_killed(self) -> bool:
        """Whether a signal ended it that somebody has sent."""
        return self.ended_by is not None and self.ended_by.status < 0 and -self.ended_by.status not in CRASHES

    @property
    def is_killed_by_others(self) -> bool:
        """Whether neither it nor its launcher has ended it, so that no peer can be the cause."""
        return (self.is_killed and not self.was_sent_away) or self.is_wordless

    @property
    def ended_itself(self) -> bool:
        """Whether it is known to have ended badly for a reason of its own."""
        has_failed = self.ended_by is not None and self.ended_by.status != 0 and not self.was_sent_away
        return bool(self.process.error) or has_failed

    @property
    def end(self) -> str:
        """How it ended, in words; "" if nobody knows or it has not."""
        status = None if self.ended_by is None else self.ended_by.status
        if self.process.error:
            said = self.process.error
            return f"ended with {said[:MOST_LETTERS].rstrip('.')}{'...' if len(said) > MOST_LETTERS else ''}"
        if status is None:
            return "had ended its recording" if self.process.is_finished else ""
        if -status in CRASHES:
            return f"crashed (signal {-status}, {CRASHES[-status]})"
        return f"was killed (signal {-status})" if status < 0 else f"exited (status {status})"

    @property
    def is_gone(self) -> bool | None:
        """Whether its process is no more; None if it ran elsewhere, so that nobody can look."""
        if self.ended_by is not None:
            return True
        here = Process.here()
        is_here = (self.process.host, self.process.namespace) == (here.host, here.namespace)
        if not is_here or not here.namespace:
            return None
        return not Path(f"/proc/{self.process.pid}").exists()

    @property
    def is_wordless(self) -> bool:
        """Whether it may have ended without anybody saying how; a recorder that had stopped says nothing."""
        return not self.end and self.process.sees_calls and self.is_gone is not False

    def add(self, row: Mapping[str, Any], at_ns: int) -> None:
        """Take note of one communication that it has issued at *at_ns*."""
        key = communication(self.rank, row)
        self.rows[key] = {**self.rows.get(key, {}), **row}  # only spans tell how long
        if key[1] >= 0:
            self.reach(_track(key), key[1] + 1)
        if at_ns > self.last_ns:
            self.last, self.last_ns = row, at_ns
        self.seen_ns = max(self.seen_ns, at_ns)

    def reach(self, track: Track, count: int) -> None:
        """Take note that it has issued so many communications of *track*."""
        self.counts[track] = max(self.counts.get(track, 0), count)

    def to_dict(self) -> dict[str, Any]:
        """Return what a reader of the JSON may want to check the diagnosis by."""
        return {
            "rank": self.rank,
            "last_call": "" if self.last is None else _called(self.last),
            "last_call_ns": self.last_ns,
            "seen_ns": self.seen_ns,
            "is_exact": self.is_exact,
            "end": self.end,
            "exit_status": None if self.ended_by is None else self.ended_by.status,
            "signals_sent": () if self.ended_by is None else self.ended_by.signals_sent,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """One communication that some have come to, and others not.

    Attributes:
        kind, axis, group, size_bytes, dtype, step: as in the timeline.
    """

    kind: str
    axis: str
    group: int
    sequence: int  # -1 for a receive from whichever rank sends first
    size_bytes: int
    dtype: str
    step: int
    waiting: tuple[int, ...]  # ranks that have come
    missing: tuple[int, ...]  # members that have not
    silent: tuple[int, ...]  # members of whom that is not known
    age_s: float  # how long the first of them had waited when one of the ranks last gave a sign of life
    state: str  # how far the device is with it, "" if nobody says
    places: Mapping[int, str]  # by missing rank, where it is
    is_open: bool = False  # whether the group may have members of which nobody tells
    # by missing rank that came once another one had given up, how long after that
    late_ns: Mapping[int, int] = field(default_factory=dict)

    @property
    def call(self) -> str:
        """The communication, e.g. ``"all_reduce 12 of world"``."""
        return _called({name: getattr(self, name) for name in ("kind", "sequence", "axis", "group")})

    @property
    def text(self) -> str:
        """What is known, in a sentence for a person."""
        size = f", {format_si(self.size_bytes, 'B')}" if self.size_bytes else ""
        plural = "" if len(self.waiting) > 1 else "s"
        state = f" ({self.state})" if self.state else ""
        said = f"rank {rank_list(self.waiting)} wait{plural} in {self.call}{size}{state}"
        said += f" for {format_time(self.age_s)}" if self.age_s > 0 else ""
        said += f", step {self.step}" if self.step >= 0 else ""
        if self.sequence < 0 and not self.missing:  # a receive from anybody
            return f"{said}; no rank has sent to it"
        if self.late_ns:
            said += (
                f"; rank {rank_list(self.late_ns)} came {format_time(max(self.late_ns.values()) / 1e9)} later"
            )
        elif self.missing:
            said += f"; rank {rank_list(self.missing)} {'has' if len(self.missing) == 1 else 'have'} not come"
            at = sorted({place for place in self.places.values() if place})
            said += f": {'; '.join(at[:2])}" if at else ""
        if self.silent:
            said += f"; nothing is known of rank {rank_list(self.silent)}"
        if self.is_open and not self.missing:
            others = " and any others" if self.silent else "; nothing is known of any ranks but these"
            said += f"{others}: the members are not listed"
        elif not self.missing and not self.silent:
            said += "; all have come, so that data moves or a link is stuck"
        return said

    def to_dict(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return asdict(self) | {"text": self.text}


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Why a run hangs or what ended it; false if nothing is known to be wrong."""

    mismatches: tuple[Mismatch, ...] = ()  # communications that ranks have called differently
    failed: tuple[int, ...] = ()  # the ranks that failed first, or fell silent
    # who that is, how it ended, and where the others waited, in a sentence; "" if nobody has failed
    text: str = ""
    waits: tuple[Wait, ...] = ()  # communications that are waited for, what holds up others first
    ranks: tuple[Evidence, ...] = ()  # what is known of each rank

    def __bool__(self) -> bool:
        return bool(self.lines)

    @property
    def lines(self) -> list[tuple[str, str]]:
        """What to tell a person: ``"mismatch"``, ``"failure"`` or ``"hang"``, and a sentence."""
        said = [("mismatch", one.text) for one in self.mismatches]
        if self.text:
            return [*said, ("failure", self.text)]
        return [*said, *(("hang", wait.text) for wait in self.waits)]

    def to_dict(self) -> dict[str, Any]:
        """Return it as entries of a JSON object."""
        return {
            "failure": {"text": self.text, "failed": self.failed} if self.text else None,
            "evidence": [one.to_dict() for one in self.ranks],
            "hang": [wait.to_dict() for wait in self.waits],
            "mismatches": [one.to_dict() for one in self.mismatches],
        }


def diagnose(path: str | Path, run: Run | None) -> Diagnosis:
    """Return why the recording at *path* hangs or what ended it.

    Args:
        path: the run directory.
        run: the run; None if no span of it can be read.
    """
    info = _described(path) if run is None else run.info
    differing = tuple(mismatches(path, run))
    if info is not None and (info.origin != "recorded" or _came_to_its_end(info, run)):
        return Diagnosis(mismatches=differing)
    groups = {} if info is None else {group.id: group.ranks for group in info.groups}
    known = _evidence(path, run, info)
    found = judge(known, groups, differing)
    absent = () if info is None else [rank for rank in info.recorded_ranks if rank not in known]
    if not found.text or not absent:
        return found
    here = f"of the ranks here ({rank_list(known)})"
    return replace(found, text=f"{here} {found.text}; nothing is known of rank {rank_list(absent)}")


def judge(
    known: Mapping[int, Evidence],
    groups: Mapping[int, Sequence[int]],
    differing: Sequence[Mismatch] = (),
    *,
    is_stuck: bool = False,
    unlisted: Collection[int] = (),
) -> Diagnosis:
    """Return why ranks hang or have died.

    Args:
        known: what is known of each rank.
        groups: by number of a process group, its members; of one that is not in it everybody is a member.
        differing: where ranks do not agree, which explains that nothing goes on in that group.
        is_stuck: nothing went on any more when all of it was written, and every rank was there to write it.
        unlisted: groups that may have more members than *groups* says.
    """
    names = _name_alike(known)
    differing = [replace(one, axis=names.get(one.group, one.axis)) for one in differing]
    ends = [one for one in known.values() if one.ended_itself]
    # Waiting counts until the first rank has ended, else until the last sign of life of any.
    until_ns = min(
        (one.process.error_ns or one.seen_ns for one in ends),
        default=0 if is_stuck else max((one.seen_ns for one in known.values()), default=0),
    )
    blocking = [one for one in differing if is_stuck or _blocks(known, one)]
    settled = {one.group: one.sequence for one in blocking}
    waits = [
        replace(one, is_open=one.group in unlisted and one.kind not in P2P)
        for one in _waits(known, groups, until_ns)
    ]
    found = [wait for wait in waits if wait.sequence < settled.get(wait.group, wait.sequence + 1)]
    roots = _roots(found)
    # Waits behind a call that does not agree are due to it, however short.
    caught = {rank for one in blocking for _, who in one.calls for rank in who if rank in known}
    caught |= {rank for rank, one in known.items() if one.process.call_failed}
    caught |= {
        r for wait in waits if wait not in found or _is_long(wait) for r in wait.waiting if wait.missing
    }
    caught = {rank for rank in caught if known[rank].process.error}
    late = set() if _killed_first(known) else {rank for wait in found for rank in wait.late_ns} & roots
    failed: tuple[int, ...] = ()
    text = ""
    if not is_stuck:
        failed, text = _sentence(known, found, late) if late else _failure(known, found, roots, caught)
        text = text or (
            ""
            if blocking or any(map(_is_long, waits))
            else _all_caught([one for one in ends if one.process.call_failed])
        )
    stuck = {rank for wait in found for rank in wait.waiting}
    long = [wait for wait in found if is_stuck or _is_long(wait)]
    # Waits in which all have come are told only where there are no others.
    shown = [wait for wait in long if wait.missing or wait.silent] or long
    # First those whose missing ranks wait in no other call, and of these the longest.
    shown.sort(key=lambda wait: (bool(set(wait.missing) & stuck), -wait.age_s))
    return Diagnosis(
        mismatches=tuple(differing),
        failed=failed,
        text=text,
        waits=tuple(shown),
        ranks=tuple(known[rank] for rank in sorted(known)),
    )


def _name_alike(known: Mapping[int, Evidence]) -> dict[int, str]:
    """Give each group one name in all calls, and return it: what it is for may be known only to some.

    A rank learns that by what flows over the group, and one that dies at once takes it along.
    """
    names: dict[int, str] = {}
    for one in known.values():
        for row in one.rows.values():
            if row["axis"] in AXES or int(row["group"]) not in names:
                names[int(row["group"])] = str(row["axis"])
    for one in known.values():
        one.rows = {key: {**row, "axis": names[int(row["group"])]} for key, row in one.rows.items()}
        if one.last is not None:
            one.last = {**one.last, "axis": names.get(int(one.last["group"]), one.last["axis"])}
    return names


def _is_long(wait: Wait) -> bool:
    """Whether the first that came to it has waited for longer than ranks are apart in any training."""
    return wait.age_s * 1e9 >= LONG_NS


def _blocks(known: Mapping[int, Evidence], one: Mismatch) -> bool:
    """Whether those that call *one* differently have not gone on after it: some go on with wrong numbers."""
    callers = [known[rank] for _, who in one.calls for rank in who if rank in known]
    track = (one.group, one.sender, one.receiver)
    if any(caller.counts.get(track, 0) <= one.sequence + 1 for caller in callers):
        return True
    steps = {-1 if caller.last is None else int(caller.last["step"]) for caller in callers}
    return one.step >= 0 and steps == {one.step}  # more may be issued before the first is waited for


def _killed_first(known: Mapping[int, Evidence]) -> bool:
    """Whether somebody else than its launcher has killed a rank before, for all we know, any had raised."""
    first_ns = min((one.process.error_ns for one in known.values() if one.process.error), default=None)
    killed = [one.seen_ns for one in known.values() if one.is_killed and not one.was_sent_away]
    return any(first_ns is None or seen_ns < first_ns for seen_ns in killed)


def _failure(
    known: Mapping[int, Evidence], found: Sequence[Wait], roots: set[int], caught: set[int]
) -> tuple[tuple[int, ...], str]:
    """Return the ranks that failed first, and the sentence about them; no rank if nobody is known to.

    *caught* are those that raised where others did not do their part.
    """
    everybody = sorted(known)
    long_ns = max((wait.age_s * 1e9 for wait in found if set(wait.missing) & roots), default=0.0)
    came_ns = min((known[rank].last_ns for wait in found for rank in wait.waiting), default=0)
    # Who lives on while others wait for it has not died then, however it ended later.
    lived = any(known[rank].seen_ns - came_ns >= LONG_NS for rank in roots)
    failed = {rank for rank, one in known.items() if one.ended_itself}
    ended = failed - caught
    if alike := _end_of_all(known):
        if len(everybody) == 1:
            return _sentence(known, found, set(everybody))
        if long_ns < LONG_NS:
            return (), f"ranks {rank_list(everybody)} {alike}: no rank is known to have gone first"
        erred = {rank for rank in roots if known[rank].process.error}
        return ((), "") if lived and not erred else _sentence(known, found, erred or roots)
    # While others say how they ended, or their launcher does, one that says nothing was killed or is stuck.
    suspects = ended | {rank for rank, one in known.items() if failed and one.is_wordless}
    killed = {rank for rank in suspects if known[rank].is_killed_by_others}
    over = {rank for rank in roots if known[rank].process.is_finished and not known[rank].ended_itself}
    if chosen := (roots & killed) or (roots & suspects) or over:
        return _sentence(known, found, (killed & chosen) or _first_to_end(known, chosen))
    if roots and long_ns >= LONG_NS and not _killed_first(known):
        # Who stands still while its launcher looks on is a hang; the launcher that ends it ends that, too.
        is_over = bool(caught) and all(known[rank].was_sent_away for rank in roots)
        return ((), "") if lived and not is_over else _sentence(known, found, roots)
    return _sentence(known, found, killed or _first_to_end(known, ended)) if ended else ((), "")


def _all_caught(ranks: Sequence[Evidence]) -> str:
    """Return what is to be said of *ranks* whose communication had failed, and nobody knows why."""
    calls = {_called(one.last) for one in ranks if one.last is not None}
    where = calls.pop() if len(calls) == 1 else "communication"
    who = f"rank{'s' if len(ranks) > 1 else ''} {rank_list(one.rank for one in ranks)}"
    return f"{who} ended as {where} failed: no rank is known to have gone first" if ranks else ""


def _first_to_end(known: Mapping[int, Evidence], ended: set[int]) -> set[int]:
    """Return those of *ended* that nobody else can have made fail: the abrupt, or else who raised first."""
    abrupt = {rank for rank in ended if not known[rank].process.error and not known[rank].process.is_finished}
    if abrupt:
        return abrupt
    raised = {rank: known[rank].process.error_ns for rank in ended if known[rank].process.error}
    return {min(raised, key=raised.__getitem__)} if raised else ended


def _end_of_all(known: Mapping[int, Evidence]) -> str:
    """Return how all ranks have ended, if that was the same for all of them and none can be the cause."""
    ranks = list(known.values())
    if not ranks:
        return ""
    if len({one.process.error for one in ranks}) == 1 and ranks[0].process.error:
        return ranks[0].end
    statuses = {0 if one.ended_by is None else one.ended_by.status for one in ranks}
    is_same = len(statuses) == 1 and len({one.was_sent_away for one in ranks}) == 1
    if is_same and all(one.is_killed for one in ranks):
        return f"were killed (signal {-statuses.pop()}) together"
    return "ended, and nobody saw how" if all(one.is_wordless and one.is_gone for one in ranks) else ""


def _sentence(
    known: Mapping[int, Evidence], found: Sequence[Wait], failed: set[int]
) -> tuple[tuple[int, ...], str]:
    """Return *failed* and who they are, how they ended, after which call, and where the others waited.

    Of those that came late it says to which call and by how much.
    """
    late = {rank: (wait.call, ns) for wait in found for rank, ns in wait.late_ns.items()}
    alike: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank in sorted(failed):
        one = known[rank]
        is_silent = one.was_sent_away and not one.process.error  # what its launcher did came later
        end = "" if is_silent else one.end
        end = end or ("ended without a word" if one.is_gone and not is_silent else "fell silent")
        came_ns = min((known[other].last_ns for wait in found for other in wait.waiting), default=one.seen_ns)
        if is_silent and one.seen_ns - came_ns >= LONG_NS:
            end = "stood still"
        after = ""
        if one.last is not None:
            held = [wait for wait in found if rank in wait.waiting and wait.missing and _is_long(wait)]
            step = held[0].step if held else int(one.last.get("step", -1))
            after = f" {'in' if held else 'after'} {held[0].call if held else _called(one.last)}"
            after += f", step {step}" if step >= 0 else ""
            after += "" if one.is_exact else ", the last that is known of it"
            after += f", for which rank {rank_list(held[0].missing)} had not come" if held else ""
        elif one.is_exact:
            after = " before its first communication"
        if is_silent:
            signal = f" (signal {-one.ended_by.status})" if one.ended_by and one.ended_by.status < 0 else ""
            after += f" ({one.place})" if one.place else ""
            after += f", until ended by the launcher{signal}"
        if rank in late:
            call, ns = late[rank]
            end, after = f"came to {call} {format_time(ns / 1e9)} after others had given up", ""
        alike[end, after].append(rank)
    clauses = []
    for (end, after), ranks in list(alike.items())[:MOST_CLAUSES]:
        is_one = len(ranks) == 1
        verb = end if is_one else end.replace("was ", "were ", 1).replace(" its ", " their ", 1)
        clauses.append(f"rank{'' if is_one else 's'} {rank_list(ranks)} {verb}{after}")
    if len(failed) > 1 and all(known[rank].is_wordless for rank in failed):
        clauses.append("which of them went first is not known")
    axes = {str(one.last["axis"]) for one in map(known.__getitem__, failed) if one.last is not None}
    direct = sorted(found, key=lambda wait: not set(wait.missing) & failed)
    told: set[int] = set(failed)
    waited: dict[str, list[int]] = {}
    for wait in direct:
        ranks = [rank for rank in wait.waiting if rank not in told]
        if ranks and (wait.missing or wait.silent):
            call = wait.call.removesuffix(f" of {wait.axis}") if {wait.axis} == axes else wait.call
            waited.setdefault(call, []).extend(ranks)
            told.update(ranks)
    for call, ranks in list(waited.items())[:MOST_CLAUSES]:
        clauses.append(f"rank{'s' if len(ranks) > 1 else ''} {rank_list(ranks)} waited in {call}")
    return tuple(sorted(failed)), "; ".join(clauses)


def _roots(found: Sequence[Wait]) -> set[int]:
    """Return the ranks that others wait for, if only through others, and that wait for nobody."""
    needs: dict[int, set[int]] = defaultdict(set)
    # A send is often waited for much later: who waits for something else is held up by that.
    busy = {rank for wait in found if wait.kind != "send" and wait.missing for rank in wait.waiting}
    for wait in found:
        for rank in wait.waiting:
            if wait.kind != "send" or rank not in busy:
                needs[rank].update(wait.missing)
    waiting = {rank for rank, others in needs.items() if others}
    return {rank for others in needs.values() for rank in others} - waiting


def _waits(known: Mapping[int, Evidence], groups: Mapping[int, Sequence[int]], until_ns: int) -> list[Wait]:
    """Return each communication that some have issued and others have not, or that has not ended."""
    sees = {rank: one for rank, one in known.items() if not one.is_blind}
    tracks = sorted({track for one in sees.values() for track in one.counts})
    keys: dict[Key, set[int]] = {}
    late_ns: dict[Key, dict[int, int]] = {}
    gave_up = {rank: one.process.error_ns for rank, one in sees.items() if one.process.call_failed}
    counted: dict[Track, dict[int, int]] = {}
    common: dict[Track, int] = {}
    for track in tracks:
        group, sender, receiver = track
        members = (sender, receiver) if sender >= 0 else groups.get(group) or sorted(sees)
        told = [sees[rank] for rank in members if rank in sees and track not in sees[rank].unseen]
        counted[track] = {one.rank: one.counts.get(track, 0) for one in told}
        if told and len(told) == len(members):
            common[track] = min(counted[track].values())
    went_on = {
        rank: [_issued_ns(row) for key, row in one.rows.items() if 0 <= key[1] < common.get(_track(key), 0)]
        for rank, one in sees.items()
    }
    went_ns = {rank: max(times, default=-1) for rank, times in went_on.items()}
    for track, counts in counted.items():
        group, sender, receiver = track
        placed: set[int] = set()
        if gave_up and track in common:
            key, behind_ns = _late(sees, gave_up, track, common[track])
            if behind_ns:
                late_ns[key], keys[key] = behind_ns, set(counts) - set(behind_ns)
        # At the highest count nobody has gone further: only below it somebody is missing.
        for number in sorted(set(counts.values()))[:-1]:
            key = (group, number, sender, receiver)
            come = {rank for rank, count in counts.items() if count > number} - placed
            waiting = {rank for rank in come if _is_held(sees, sees[rank], key, come, went_ns[rank])}
            placed |= waiting
            if waiting:
                keys[key] = waiting
    for rank, one in sees.items():
        for key in one.under_way:
            if key[1] < 0 or key[1] >= one.ended.get(_track(key), 0):
                keys.setdefault(key, set()).add(rank)
    return [
        _wait(key, waiting, sees, groups, until_ns=until_ns, late_ns=late_ns.get(key, {}))
        for key, waiting in keys.items()
    ]


def _late(
    sees: Mapping[int, Evidence], gave_up: Mapping[int, int], track: Track, n_common: int
) -> tuple[Key, dict[int, int]]:
    """Return the first of the *n_common* calls of a track to which some came when others had given it up.

    Args:
        sees: what is known of the ranks.
        gave_up: when each rank of whom a communication had failed has raised.
        track: the track, to whose first *n_common* calls all have come.
        n_common: how many these are.

    Returns:
        Its key, and by rank how long after the first had given up, in ns; none: no call is so.
    """
    group, sender, receiver = track
    for number in range(max(n_common - MOST_CALLS, 0), n_common):
        key = (group, number, sender, receiver)
        issued = {rank: _issued_ns(one.rows[key]) for rank, one in sees.items() if key in one.rows}
        waited = [at for rank, at in gave_up.items() if rank in issued and at - issued[rank] >= LONG_NS]
        if late := {rank: at - min(waited) for rank, at in issued.items() if waited and at > min(waited)}:
            return key, late
    return (group, -1, sender, receiver), {}


def _is_held(sees: Mapping[int, Evidence], one: Evidence, key: Key, come: set[int], went_ns: int) -> bool:
    """Whether a rank that has issued *key* cannot go on before others have.

    At *went_ns* it issued the last call to which all have come: none that was over by then holds it, be it
    that it had failed and the training caught that.
    """
    own = one.rows.get(key, {})
    if "duration_ns" in own and int(own["start_ns"]) + int(own["duration_ns"]) <= went_ns:
        return False
    row = one.rows.get(key) or next((sees[rank].rows[key] for rank in come if key in sees[rank].rows), None)
    if row is not None and str(row["kind"]) not in ONE_SIDED:
        return True  # whatever its span says: a communication that failed is over, too
    is_last = one.last is not None and communication(one.rank, one.last) == key
    return is_last or one.ended.get(_track(key), 0) <= key[1]


def _wait(
    key: Key,
    waiting: set[int],
    sees: Mapping[int, Evidence],
    groups: Mapping[int, Sequence[int]],
    *,
    until_ns: int,
    late_ns: Mapping[int, int],
) -> Wait:
    """Return what is known of one communication in which *waiting* are, *late_ns* as in ``Wait``."""
    group, sequence, sender, receiver = key
    rows = [row for rank in sorted(waiting) if (row := sees[rank].rows.get(key)) is not None]
    row = rows[0] if rows else {}
    times = [at for one in rows if (at := _issued_ns(one)) >= 0]
    members: Sequence[int] = (sender, receiver)
    if sender < 0:  # of a receive from anybody nobody in particular is missing
        members = (groups.get(group) or sorted(sees)) if sequence >= 0 else ()
    missing: list[int] = []
    silent: list[int] = []
    for rank in members:
        one = sees.get(rank)
        if one is not None and one.counts.get(_track(key), 0) > sequence and rank not in late_ns:
            continue
        # Counts of a note or a batch tell nothing of what came after it.
        is_known = one is not None and (one.is_exact or one.seen_ns >= min(times, default=-1))
        is_known = is_known and one is not None and _track(key) not in one.unseen
        (missing if is_known else silent).append(rank)
    if not missing and not silent:  # only their notes tell that it goes on, and only until they were written
        until_ns = max(sees[rank].noted_ns for rank in waiting)
    return Wait(
        kind=str(row.get("kind", "collective" if sender < 0 else "transfer")),
        axis=str(row.get("axis", "")),
        group=group,
        sequence=sequence,
        size_bytes=int(row.get("size_bytes", 0)),
        dtype=str(row.get("dtype", "")),
        step=int(row.get("step", -1)),
        waiting=tuple(sorted(waiting)),
        missing=tuple(missing),
        silent=tuple(silent),
        age_s=max(until_ns - min(times, default=until_ns), 0) / 1e9,
        state=", ".join(sorted({str(one["state"]) for one in rows if one.get("state")})),
        places={rank: sees[rank].place for rank in missing},
        late_ns=late_ns,
    )


def _track(key: Key) -> Track:
    return key[0], key[2], key[3]


def _called(row: Mapping[str, Any]) -> str:
    """Return a communication in words, e.g. ``"all_reduce 12 of world"``."""
    number = f" {row['sequence']}" if int(row["sequence"]) >= 0 else ""
    return f"{row['kind']}{number} of {row['axis'] or 'group {}'.format(row['group'])}"


def _issued_ns(row: Mapping[str, Any]) -> int:
    """Return when a communication was issued, -1 if a device had not come to it."""
    return int(row["issued_ns"] if "issued_ns" in row else row["start_ns"])


def _described(path: str | Path) -> RunInfo | None:
    """Return what the sidecars of a run say of which no span can be read."""
    parts = {}
    folder = Path(path) / "ranks"
    for file in sorted(folder.glob("rank-?????.json")) if folder.is_dir() else ():
        try:
            parts[int(file.stem[5:])] = read_info(file)
        except ValueError:
            continue
    return merged(None, parts) if parts else None


def _came_to_its_end(info: RunInfo, run: Run | None) -> bool:
    """Whether every rank has ended its recording, and none by an exception."""
    is_whole = run is None or not run.missing_ranks
    return info.finished and is_whole and not any(one.error for one in info.processes.values())


def _evidence(path: str | Path, run: Run | None, info: RunInfo | None) -> dict[int, Evidence]:
    """Return what the ranks of the recording at *path* have left."""
    notes = {one.rank: one for one in read_pending(path)}
    ends = read_ended(path)
    processes = {} if info is None else info.processes
    stored = () if run is None else run.stored_ranks
    found = {
        rank: _of_rank(
            rank, notes.get(rank), run if rank in stored else None, processes.get(rank), ends.get(rank)
        )
        for rank in sorted({*notes, *processes, *stored})
    }
    # A launcher that notes how ranks end leaves out those that end well.
    hosts = {one.process.host for one in found.values() if one.ended_by is not None}
    for one in found.values():
        if one.ended_by is None and one.process.is_finished and one.process.host in hosts and one.is_gone:
            one.ended_by = Ended(status=0)
    return found


def _of_rank(
    rank: int, note: Pending | None, run: Run | None, process: Process | None, ended: Ended | None
) -> Evidence:
    """Return what one rank has left: *note* with its last calls, and its spans in *run*."""
    found = Evidence(rank=rank, process=process or Process(), ended_by=ended)
    has_ring = note is not None and note.has_ring
    found.is_exact = has_ring or found.process.is_finished
    found.is_blind = not found.process.sees_calls or not (found.is_exact or note or run)
    spans_ns = _add_spans(found, run) if run is not None else -1
    if note is None:
        return found
    found.seen_ns, found.noted_ns = max(found.seen_ns, note.t_ns), note.t_ns
    for group, count in note.collectives.items():
        found.reach((group, -1, -1), count)
    for (group, sender, receiver), count in note.transfers.items():
        found.reach((group, sender, receiver), count)
    for row in (*note.under_way, *note.issued):
        found.add(row, _issued_ns(row))
    found.under_way = tuple(communication(rank, row) for row in note.under_way)
    if note.t_ns >= spans_ns:  # where it was before that explains nothing
        found.place = note.place
    return found


def _add_spans(found: Evidence, run: Run) -> int:
    """Add what the spans of a rank tell; return when the last of them ended."""
    table = run.spans([found.rank])
    end_ns = int(np.max(int64(table, "start_ns") + int64(table, "duration_ns"), initial=-1))
    found.seen_ns = max(found.seen_ns, end_ns)
    own = is_one_of(table, "category", ("collective", "p2p")) & (int64(table, "sequence") >= 0)
    at = np.flatnonzero(own)
    if not len(at):
        return end_ns
    group, peer, sequence = (int64(table, name)[at] for name in ("group", "peer", "sequence"))
    sends, is_p2p = is_one_of(table, "kind", ("send",))[at], is_one_of(table, "kind", P2P)[at]
    sender = np.where(is_p2p, np.where(sends, found.rank, peer), -1)
    receiver = np.where(is_p2p, np.where(sends, peer, found.rank), -1)
    tracks, which = np.unique(np.stack([group, sender, receiver]), axis=1, return_inverse=True)
    # See `communications`: the shape of the places differs between versions of NumPy.
    most = np.full(tracks.shape[1], -1, np.int64)
    np.maximum.at(most, which.reshape(-1), sequence)
    for (g, a, b), number in zip(tracks.T.tolist(), most.tolist(), strict=True):
        found.ended[g, a, b] = number + 1
        found.reach((g, a, b), number + 1)
    lately = at[np.argsort(int64(table, "start_ns")[at], kind="stable")[-MOST_CALLS:]]
    for row in table.take(lately).to_pylist():
        found.add(row, int(row["start_ns"]))
    return end_ns
