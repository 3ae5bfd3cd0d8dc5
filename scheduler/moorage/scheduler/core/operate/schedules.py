"""Tenants' schedules: what they ask of them, and what becomes of a run.

nats-server counts the time. A run is decided once, by its number, and the record that accepts its job says so: after a
takeover it is neither lost nor made again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.events import ScheduleOrder, ScheduleRun, Submit
from moorage.scheduler.core.ledger import acts
from moorage.scheduler.core.ledger.schedules import Schedule
from moorage.scheduler.core.ledger.state import State
from moorage.schemas.codec import encode, same_request
from moorage.schemas.errors import Problem, problem
from moorage.schemas.frames import Answer
from moorage.schemas.job import AFTER_MAX
from moorage.schemas.printable import shortened
from moorage.schemas.schedules import SCHEDULES_MAX, ScheduleDone, ScheduleRan
from moorage.schemas.signed import person_in, signed, unsigned

WHY_CHARS_MAX: Final = 200
#: in the words for a run that was left out: between the last run's job and its state
_LAST_RUN: Final = ", the last run, was "
#: and behind their number, for a run that would have to wait for too many
_TOO_MANY: Final = " runs before it are not over, and no run is to wait for more"


class Schedules:
    """Carries out what tenants ask of schedules, on the state and this record's draft."""

    def __init__(self, state: State, malformed: Callable[[Submit], Problem | None]) -> None:
        self.state = state
        self.malformed = malformed

    def act(self, draft: Draft, event: ScheduleOrder) -> Answer | Problem:
        """Carry out `add`, `pause`, `resume` or `remove` in the draft. Return the answer or a problem."""
        asked, tenant, name = event.asked, event.tenant, event.asked.name
        row = self.row(tenant, name)
        if event.submit is not None:
            return self._add(draft, event, event.submit, row)
        if row is None:
            return no_schedule(tenant, name)
        changed = asked.act == "remove" or row.paused != (asked.act == "pause")
        if asked.act == "remove":
            draft.add(acts.RemoveSchedule(tenant, name, event.by))
        elif changed:
            draft.add(acts.PauseSchedule(tenant, name, not row.paused, event.by))
        return self._answer(row, event, changed=changed)

    def _add(self, draft: Draft, event: ScheduleOrder, submit: Submit, row: Schedule | None) -> Answer | Problem:
        asked, tenant, name = event.asked, event.tenant, event.asked.name
        if (malformed := self.malformed(submit)) is not None:
            return malformed
        if row is not None:
            same = (row.cron, row.tz, row.overlap) == (asked.cron, asked.tz, asked.overlap)
            if same and same_request(row.body, submit.body):
                return self._answer(row, event, changed=False)
            return problem(
                "conflict",
                f"tenant {tenant} has a schedule {name} with other content",
                field="$.name",
                found=name,
                next=f"choose another name, or first moorage schedule remove {name}",
            )
        if len(self.state.schedules.get(tenant, ())) >= SCHEDULES_MAX:
            return problem(
                "failed-precondition",
                f"tenant {tenant} has {SCHEDULES_MAX} schedules, and may have no more",
                found=SCHEDULES_MAX,
                allowed=f"at most {SCHEDULES_MAX} schedules",
                next="moorage schedule ls shows them; remove those that are not needed",
            )
        draft.add(acts.AddSchedule(tenant, name, asked.cron, asked.tz, asked.overlap, submit.body, event.by))
        return self._answer(self.state.schedules[tenant][name], event, changed=True)

    def begin(self, draft: Draft, event: ScheduleRun) -> bytes | str | None:
        """Return the request of the job that a run is to make; else why it makes none, or None if nothing is to be
        done: it was decided before, or is of a schedule that was changed since.

        After a crash nats-server publishes a run again under another number: the next one is due when it was before.

        While the last run goes on, a run is left out, or is to start behind all that still wait or run: one of those
        that wait may be cancelled. One that cannot wait for all of them is left out.
        """
        row = self.row(event.tenant, event.name)
        if row is None or row.wish != event.wish or event.sequence <= row.through:
            return None
        is_too_far = 0 < event.latest_ms < row.next_ms
        if event.next_ms and event.next_ms <= row.next_ms and not is_too_far:
            return None
        jobs = ((name, self.state.job(event.tenant, name)) for name in (*row.live, row.job))
        live = {name: job.state for name, job in jobs if job is not None and job.live}
        if not live:
            return row.body
        if row.overlap != "queue":
            return f"job {row.job}{_LAST_RUN}{live[row.job]}"
        return f"{len(live)}{_TOO_MANY}" if len(live) >= AFTER_MAX else _behind(row.body, live)

    def end(self, draft: Draft, event: ScheduleRun, why: str) -> Answer | Problem:
        """Note in the draft what became of a run: `why` it made no job, "" if it did. Return the answer to who asked
        for it."""
        row = self.row(event.tenant, event.name)
        assert row is not None
        why = shortened(why, WHY_CHARS_MAX)
        draft.add(acts.Ran(event.tenant, event.name, event.sequence, why, event.next_ms))
        return self.answer_to(row, event)

    def answer_to(self, row: Schedule | None, event: ScheduleRun) -> Answer | Problem:
        """Return the answer to who asked for a run that was decided."""
        if row is None:
            return no_schedule(event.tenant, event.name)
        job = f"{row.name}-{event.sequence}"
        if row.job == job or self.state.job(event.tenant, job) is not None:
            return Answer("schedule", 0, ScheduleRan(name=row.name, job=job, changed=True))
        return problem(
            "failed-precondition",
            f"this run of schedule {row.name} made no job: {row.why or 'the schedule was changed meanwhile'}",
            job=row.job,
            next=_next(row.why),
        )

    # ------------------------------------------------------------------------------------------------------- inside

    def row(self, tenant: str, name: str) -> Schedule | None:
        return self.state.schedule(tenant, name)

    def _answer(self, row: Schedule, event: ScheduleOrder, *, changed: bool) -> Answer:
        done = ScheduleDone(name=row.name, changed=changed)
        if event.shown is not None:
            done = msgspec.structs.replace(done, schedule=event.shown(self.state, row))
        return Answer("schedule", 0, done)


def _behind(body: bytes, jobs: Iterable[str]) -> bytes:
    """Return a request that starts after these jobs, whatever their ends."""
    asked = {**msgspec.json.decode(unsigned(body)), "after": [{"job": job, "when": "any"} for job in jobs]}
    return signed(encode(asked), person_in(body))


def _next(why: str) -> str:
    """Return what to do about a run that made no job."""
    if _LAST_RUN in why:
        return "once it is over, run it again; or cancel it, or add the schedule with overlap queue"
    if _TOO_MANY in why:
        return "once some of them are over, run it again; or cancel those that are not needed"
    return "run it again; if that does not help, remove the schedule and add it with another request"


def no_schedule(tenant: str, name: str) -> Problem:
    return problem(
        "not-found", f"tenant {tenant} has no schedule {name}", found=name, next="moorage schedule ls shows them"
    )
