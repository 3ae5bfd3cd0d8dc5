"""Handles reports of freezing: a member is frozen or runs again, cannot be frozen, or is due to freeze or resume."""

from __future__ import annotations

from typing import Final

from moorage.scheduler.core.draft import NOTE_CHARS_MAX, Draft
from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.ledger.acts import Freeze
from moorage.scheduler.core.ledger.records import BY_WORKER, GangPhase
from moorage.scheduler.core.ledger.state import FREEZE, FROZEN, NOT_FROZEN, RESUME, RUNNING, RUNS, Member
from moorage.schemas.frames import Fact
from moorage.schemas.printable import shown

FREEZING: Final = frozenset({"frozen", "resumed", "not-resumed", "not-frozen", "freeze-due", "resume-due"})
#: a longer time without use is not reported
IDLE_S_MAX: Final = 10**9


def on_freezing(draft: Draft, fleet: Fleet, member: Member, fact: Fact) -> None:
    """Write what follows from a report of a kind in `FREEZING`.

    Do nothing if the report does not fit the member's state.
    """
    kind, replica = fact.kind, member.replica
    state, host = draft.replica(replica).state, fleet.hosts.get(member.worker.num)
    answers = state == FROZEN and draft.mask_of(member) != 0 and fact.code == member.leased
    if kind == "frozen":
        if state == RUNNING:
            draft.freeze(replica, member, FROZEN)
            if host is not None:
                fleet.freeze(host, member)
    elif kind == "resumed":
        if answers:
            draft.freeze(replica, member, RUNNING)
    elif kind == "not-resumed":
        if answers:
            draft.resume(replica, member, f"not resumed: {fact.detail}", leased=False)
            if host is not None:
                host.keep(member.home)
                fleet.freeze(host, member)
    elif kind == "not-frozen":
        if state == RUNNING and stays_frozen(draft, member):
            _write(draft, member, NOT_FROZEN, shown(fact.detail)[:NOTE_CHARS_MAX])
    elif kind == "freeze-due":
        if state == RUNNING and not member.freeze and draft.job(replica.job).gang == GangPhase.NONE:
            _write(draft, member, FREEZE, f"idle for {min(max(fact.code, 0), IDLE_S_MAX)} s")
    elif state in RUNS and member.wakes:
        _write(draft, member, RESUME, "it is used again")


def stays_frozen(draft: Draft, member: Member) -> bool:
    """Return whether a member is to be frozen after the orders of this record."""
    for act in reversed(draft.freezes.get(member.replica.job.num, ())):
        if act.replica in (-1, member.replica.index):
            return act.word == FREEZE
    return member.freeze


def _write(draft: Draft, member: Member, word: int, why: str) -> None:
    replica = member.replica
    draft.add(Freeze(replica.job.num, replica.index, word, BY_WORKER, why))
