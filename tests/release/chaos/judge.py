"""What a fault run must not show. Pure: a history in, violations out; planted ones are found in `test_judge.py`.

The set checker holds the callers' own list of accepted ids against what became of them. The interval checker takes
leases and lives from the workers' own records; the scheduler's word is judged, never used as evidence of a lease.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from moorage.schemas.job import TERMINAL
from moorage.testing.demo.intervals import Holders, Span, overlaps
from tests.release.chaos.records import AttemptKey, Hold, Life, Line

SHOWN_MAX: Final = 20


class Planned(msgspec.Struct, frozen=True):
    """What the load asked for: a job, and what may become of it."""

    tenant: str
    job: str
    replicas: int = 1
    gang: bool = False
    may_be_cancelled: bool = False


class Outcome(msgspec.Struct, frozen=True):
    """What a leader says of a job at the end. `moves` are (revision, replica, attempt, state)."""

    state: str
    moves: list[tuple[int, int, int, str]] = []
    losses: int = 0


class History(msgspec.Struct):
    """All that a run left behind."""

    accepted: list[Planned] = []
    finals: dict[str, Outcome] = {}  # by tenant/job
    holds: list[Hold] = []  # each worker's in the order of its journal
    lines: list[Line] = []  # in the order of the file
    lives: list[Life] = []


class Verdict(msgspec.Struct):
    """Counts of violations, each with a few words; all 0 is what was promised."""

    accepted: int = 0
    succeeded: int = 0
    cancelled: int = 0
    lost: int = 0
    double_leases: int = 0
    half_started_gangs: int = 0
    two_live_attempts: int = 0
    not_one_success: int = 0
    failed: int = 0
    #: runs to their end that no success records, as their worker was lost before it could say so
    repeated_after_loss: int = 0
    attempts: int = 0
    losses: int = 0
    gangs_started: int = 0
    found: list[str] = []

    @property
    def kept(self) -> bool:
        return not (
            self.lost
            or self.double_leases
            or self.half_started_gangs
            or self.two_live_attempts
            or self.not_one_success
            or self.failed
        )


def judge(history: History) -> Verdict:
    verdict = Verdict(accepted=len(history.accepted), found=[])
    _sets(history, verdict)
    _leases_by_journal(history.holds, verdict)
    _by_lines(history.lines, verdict)
    _lives(history.lives, verdict)
    _gangs(history, verdict)
    verdict.found = verdict.found[:SHOWN_MAX]
    return verdict


def _sets(history: History, verdict: Verdict) -> None:
    """Every accepted id is in exactly one terminal state, with one recorded success a replica where it succeeded."""
    ran_whole = Counter(line.attempt[:3] for line in history.lines if line.word == "end")
    verdict.attempts = len({line.attempt for line in history.lines})
    for planned in history.accepted:
        name = f"{planned.tenant}/{planned.job}"
        final = history.finals.get(name)
        if final is None or final.state not in TERMINAL:
            verdict.lost += 1
            verdict.found.append(f"lost: {name} is {final.state if final is not None else 'unknown'}")
            continue
        verdict.losses += final.losses
        if final.state == "CANCELLED" and planned.may_be_cancelled:
            verdict.cancelled += 1
            continue
        if final.state != "SUCCEEDED":
            verdict.failed += 1
            verdict.found.append(f"failed: {name} is {final.state}")
            continue
        verdict.succeeded += 1
        successes = Counter(replica for _, replica, _, state in final.moves if state == "SUCCEEDED")
        for replica in range(planned.replicas):
            if successes[replica] != 1:
                verdict.not_one_success += 1
                verdict.found.append(f"successes: {name}/{replica} has {successes[replica]} recorded")
            whole = ran_whole[(planned.tenant, planned.job, replica)]
            if whole == 0:
                verdict.not_one_success += 1
                verdict.found.append(f"successes: {name}/{replica} is recorded, and no run of it came to its end")
            verdict.repeated_after_loss += max(0, whole - 1)


def _leases_by_journal(holds: Iterable[Hold], verdict: Verdict) -> None:
    """By each worker's journal no slot is taken while another attempt has it. An entry may be there twice."""
    now: Holders[tuple[str, int], AttemptKey] = Holders()
    slots_of: dict[tuple[str, AttemptKey], tuple[int, ...]] = {}
    over: set[tuple[str, AttemptKey]] = set()
    for hold in holds:
        key = (hold.worker, hold.attempt)
        if hold.word == "placed":
            if key in slots_of or key in over:
                continue
            slots_of[key] = hold.slots
            for slot in hold.slots:
                if others := now.take((hold.worker, slot), hold.attempt):
                    verdict.double_leases += 1
                    verdict.found.append(f"lease: {hold.worker} slot {slot} of {others} is given to {hold.attempt}")
        elif hold.word != "claimed":
            over.add(key)
            for slot in slots_of.get(key, ()):
                now.leave((hold.worker, slot), hold.attempt)


def _by_lines(lines: list[Line], verdict: Verdict) -> None:
    """By what the jobs wrote: from an attempt's first line to its last nobody else is on its devices or its replica."""
    starts = Counter(line.attempt for line in lines if line.word == "start")
    for attempt, count in starts.items():
        if count > 1:
            verdict.two_live_attempts += 1
            verdict.found.append(f"attempt: {attempt} was started {count} times")
    last = {line.attempt: at for at, line in enumerate(lines)}
    first = {line.attempt: (at, line) for at, line in reversed(list(enumerate(lines)))}
    devices = [Span(uuid, attempt, at, last[attempt]) for attempt, (at, line) in first.items() for uuid in line.uuids]
    for late, others in overlaps(devices):
        verdict.double_leases += 1
        verdict.found.append(f"lease: {late.holder} began on {late.thing} while {others} ran there")
    replicas = [Span(attempt[:3], attempt, at, last[attempt]) for attempt, (at, _) in first.items()]
    for began, running in overlaps(replicas):
        verdict.two_live_attempts += 1
        verdict.found.append(f"attempt: {began.holder} began while {running} ran")


def _lives(lives: list[Life], verdict: Verdict) -> None:
    """By the supervisors' journals no attempt of a replica begins before the one before it was over."""
    for late, others in overlaps(Span(life.attempt[:3], life, life.began_s, life.ended_s) for life in lives):
        for earlier in others:
            verdict.two_live_attempts += 1
            verdict.found.append(
                f"{late.holder.attempt} began on {late.holder.worker} {(earlier.ended_s or 0) - late.began:.3f}"
                f" s before {earlier.attempt} was over on {earlier.worker}"
            )


def _gangs(history: History, verdict: Verdict) -> None:
    """No rank of a gang runs unless each rank of that attempt was claimed, by the workers' own journals."""
    sizes = {(each.tenant, each.job): each.replicas for each in history.accepted if each.gang}
    claimed: dict[tuple[str, str, int], set[int]] = defaultdict(set)
    for hold in history.holds:
        if hold.word == "claimed":
            tenant, job, replica, attempt, _ = hold.attempt
            claimed[(tenant, job, attempt)].add(replica)
    started: dict[tuple[str, str, int], set[int]] = defaultdict(set)
    for line in history.lines:
        tenant, job, replica, attempt, _ = line.attempt
        if (tenant, job) in sizes:
            started[(tenant, job, attempt)].add(replica)
    verdict.gangs_started = len(started)
    for key, ranks in started.items():
        held = claimed[key]
        if len(held) != sizes[key[:2]]:
            verdict.half_started_gangs += 1
            verdict.found.append(f"gang: {key} ran ranks {sorted(ranks)} though only {sorted(held)} were claimed")


def as_table(verdict: Verdict) -> dict[str, Any]:
    """For a report."""
    return {name: value for name, value in msgspec.to_builtins(verdict).items() if name != "found"}
