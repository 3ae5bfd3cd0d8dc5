"""Acts on tenants' schedules."""

from __future__ import annotations

from typing import ClassVar

from moorage.scheduler.core.ledger.acts.base import Act
from moorage.scheduler.core.ledger.folding import FoldError, Folding
from moorage.scheduler.core.ledger.schedules import Schedule
from moorage.scheduler.core.ledger.state import State


class OfSchedule(Act):
    """An act on a schedule that is there, unless this record adds it."""

    tenant: str
    name: str

    def found(self, folding: Folding) -> Schedule:
        found = folding.state.schedule(self.tenant, self.name)
        if found is None:
            raise FoldError(f"record {folding.seq} names schedule {self.tenant}/{self.name}, which is not there")
        return found


class AddSchedule(OfSchedule, tag="schedule"):
    """A tenant adds a schedule: what it runs, and when."""

    IS_DECISION: ClassVar[bool] = True
    cron: str
    tz: str
    overlap: str
    body: bytes
    by: str

    def fold(self, folding: Folding) -> None:
        if folding.state.schedule(self.tenant, self.name) is not None:
            raise FoldError(f"act {self.tag} adds schedule {self.tenant}/{self.name} twice")
        added = Schedule(self.tenant, self.name, self.cron, self.tz, self.overlap, self.body, self.by)
        added.wish, added.since_ms = folding.seq, folding.time
        folding.state.schedules.setdefault(self.tenant, {})[self.name] = added
        folding.state.wishes = folding.seq
        put(folding.state, added)


class PauseSchedule(OfSchedule, tag="schedule-pause"):
    """A tenant pauses a schedule, or with `on` false lets it run again."""

    IS_DECISION: ClassVar[bool] = True
    on: bool
    by: str

    def fold(self, folding: Folding) -> None:
        found = self.found(folding)
        found.paused, found.wish, found.next_ms = self.on, folding.seq, 0
        folding.state.wishes = folding.seq
        put(folding.state, found)


class RemoveSchedule(OfSchedule, tag="schedule-remove"):
    """A tenant removes a schedule; jobs that it made are not touched."""

    IS_DECISION: ClassVar[bool] = True
    by: str

    def fold(self, folding: Folding) -> None:
        state, found = folding.state, self.found(folding)
        del state.schedules[self.tenant][self.name]
        if not state.schedules[self.tenant]:
            del state.schedules[self.tenant]
        state.wishes = folding.seq
        state.digest = (state.digest - found.row) & 0xFFFFFFFFFFFFFFFF


class Ran(OfSchedule, tag="ran"):
    """A run of a schedule was decided: with `why` it made no job, else this record accepts `<name>-<sequence>`.

    `next_ms` is when the next one is due, in milliseconds since 1970, 0 if that is not known.
    """

    sequence: int
    why: str
    next_ms: int

    def fold(self, folding: Folding) -> None:
        found, state = self.found(folding), folding.state
        if found.live:
            jobs = [(name, state.job(self.tenant, name)) for name in found.live]
            found.live = [name for name, job in jobs if job is not None and not job.over]
        found.ran(self.sequence, self.why, self.next_ms, folding.time)
        state.ran_through = max(state.ran_through, self.sequence)
        put(state, found)


def put(state: State, changed: Schedule) -> None:
    """Replace a schedule's part of the state's digest."""
    new = changed.digest_row(state.level)
    state.digest = (state.digest + new - changed.row) & 0xFFFFFFFFFFFFFFFF
    changed.row = new


ScheduleAct = AddSchedule | PauseSchedule | RemoveSchedule | Ran
