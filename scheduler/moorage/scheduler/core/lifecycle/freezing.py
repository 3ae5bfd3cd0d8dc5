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
    state, host = replica.state, fleet.hosts.get(member.worker.num)
    answers = state == FROZEN and member.mask != 0 and fact.code == member.leased
    if kind == "frozen":
        if state == RUNNING:
            draft.freeze(replica, FROZEN)
            if host is not None:
                fleet.freeze(host, member)
    elif kind == "resumed":
        if answers:
            draft.freeze(replica, RUNNING)
    elif kind == "not-resumed":
        if answers:
            draft.resume(replica, f"not resumed: {fact.detail}", leased=False)
            if host is not None:
                host.keep(member.home)
                fleet.freeze(host, member)
    elif kind == "not-frozen":
        if state == RUNNING and member.freeze:
            _write(draft, member, NOT_FROZEN, shown(fact.detail)[:NOTE_CHARS_MAX])
    elif kind == "freeze-due":
        if state == RUNNING and not member.freeze and replica.job.gang == GangPhase.NONE:
            _write(draft, member, FREEZE, f"idle for {min(max(fact.code, 0), IDLE_S_MAX)} s")
    elif state in RUNS and member.wakes:
        _write(draft, member, RESUME, "it is used again")


def _write(draft: Draft, member: Member, word: int, why: str) -> None:
    replica = member.replica
    draft.add(Freeze(replica.job.num, replica.index, word, BY_WORKER, why))
