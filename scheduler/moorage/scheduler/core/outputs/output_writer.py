"""The record in flight, and its `Outputs`: events, answers to submits and joins, and frames for workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.events import Ask, Batch, FromWorker, Submit
from moorage.scheduler.core.fleet.host import Host
from moorage.scheduler.core.ledger.folding import Folded
from moorage.scheduler.core.ledger.record import Record
from moorage.scheduler.core.ledger.records import Mode
from moorage.scheduler.core.ledger.state import AT_EXITED, Attempt, Job, State, Worker
from moorage.scheduler.core.lifecycle.admission import NewJob
from moorage.scheduler.core.lifecycle.sessions import Sessions
from moorage.scheduler.core.outputs.outputs import Outputs, WantedFrames, enforced_on, event_of
from moorage.schemas.attempt import name_in
from moorage.schemas.codec import encode
from moorage.schemas.frames import (
    Accepted,
    Event,
    Exec,
    Held,
    Idle,
    Join,
    Joined,
    Renew,
    Report,
    Resized,
    Signal,
    Stalled,
)
from moorage.schemas.job import STATES, Request

#: the most digits of a number that a worker reports
SECONDS_DIGITS_MAX: Final = 9
#: explains why a new job waits, for the answer to its submit; None to leave that out
ExplainWaiting = Callable[[Job], dict[str, Any] | None]


@dataclass(slots=True, eq=False, repr=False)
class InFlight:
    """The record in flight; there is never more than one (ledger-rules H1)."""

    draft: Draft
    record: Record | None = None
    new: dict[int, NewJob] = field(default_factory=dict)  # by number
    replies: list[tuple[Any, str, bool]] = field(default_factory=list)  # frame, reply, json
    joined: list[tuple[FromWorker, str]] = field(default_factory=list)
    renewed: list[tuple[FromWorker, Renew, Host]] = field(default_factory=list)
    asks: list[Ask] = field(default_factory=list)
    #: commands to run in running attempts, and signals for them
    execs: list[tuple[Attempt, Exec | Signal]] = field(default_factory=list)
    awaiting: list[int] = field(default_factory=list)  # numbers of new jobs that wait for something else than a host
    # requests of batches whose answer this record decides, other than new jobs
    answered: list[tuple[Batch, int]] = field(default_factory=list)
    folded: Folded | None = None  # what it has changed; None until that is finished
    outputs: Outputs | None = None  # what is sent once it is acknowledged

    def reply_submit(self, event: Submit, outcome: Any) -> None:
        """Answer a request that is not a new job, at once or with its batch."""
        event.answer(outcome, self.replies)
        if event.batch is not None:
            self.answered.append((event.batch, event.position))


class OutputWriter:
    """Builds the outputs once the record is folded into the state."""

    def __init__(
        self,
        state: State,
        config: Config,
        sessions: Sessions,
        request_of: Callable[[Job], Request],
        explain_waiting: ExplainWaiting | None,
    ) -> None:
        self._explain_waiting = explain_waiting
        self._state = state
        self._config = config
        self._sessions = sessions
        self._request_of = request_of
        self._joined: list[Worker] = []  # workers that joined with the record whose events are to be added

    def add_events(self, folded: Folded, out: Outputs) -> None:
        """Add one event for each changed job, and for each whose worker rejoined with other levels of enforcement."""
        state, events = self._state, out.events
        for job in folded.jobs.values():
            if job.told < job.rev:
                own = job.own_subject
                if own is None:
                    own = self.own_subject(job)
                events.append((job.tenant, job.name, encode(event_of(state, job)), own))
        while self._joined:
            self._add_levels(self._joined.pop(), out)

    def own_subject(self, job: Job) -> bool:
        """Return whether this job's events also go to its own subject; `"events": "tenant"` turns that off."""
        if job.own_subject is None:
            job.own_subject = self._request_of(job).events == "job"
        return job.own_subject

    def answer_submits(self, flight: InFlight, accepted: list[Job], out: Outputs) -> None:
        seq, explain = self._state.seq, self._explain_waiting
        for job in accepted:
            made = flight.new[job.num]
            submit = made.submit
            batch = submit.batch
            # jobs of a batch are only in their tenant's frames, until a client follows one of them (`views.show`)
            job.own_subject = batch is None and submit.request.events == "job"
            waiting = None
            if batch is None and explain is not None and submit.reply and job.fresh:
                waiting = explain(job)
            state = "QUEUED" if made.stillborn is None else STATES[made.stillborn]
            answer = Accepted(job.name, seq, state, warnings=made.warnings, waiting=waiting)
            if batch is not None:
                if batch.decide(submit.position, answer):
                    out.answers.append((batch.reply, encode(batch.answers, json=batch.json)))
            elif submit.reply:
                out.answers.append((submit.reply, encode(answer, json=submit.json)))

    def answer_join(self, event: FromWorker, session: str, wanted: WantedFrames, out: Outputs) -> None:
        frame = event.frame
        assert isinstance(frame, Join)
        config, state = self._config, self._state
        joined = Joined(
            session,
            frame.n,
            state.epoch,
            config.renew_s,
            config.lease_of(frame.hello.lease_s),
            config.grace_s,
            state.ledger_id,
            formerly=state.former_of(frame.ledger),
        )
        out.answers.append((event.reply, encode(joined, json=event.json)))
        worker = state.workers[event.worker]
        self._joined.append(worker)
        self.want_differences(wanted, worker, frame.holding, 0, [])

    def _add_levels(self, worker: Worker, out: Outputs) -> None:
        """Add events for jobs on shared devices of a worker that rejoined with other levels of enforcement."""
        former = self._sessions.former.pop(worker.num, None)
        if former is None:
            return
        for attempt in worker.attempts.values():
            if attempt.mode <= Mode.EXCLUSIVE or attempt.phase == AT_EXITED:
                continue
            job = attempt.replica.job
            request = self._request_of(job)
            now = enforced_on(worker.inventory.capabilities, request)
            if now != enforced_on(former, request):
                event = Event(job.tenant, job.name, job.rev, job.state, self._state.seq, enforced=now)
                out.events.append((job.tenant, job.name, encode(event), self.own_subject(job)))

    def add_idle(self, reports: list[tuple[Attempt, Report]], out: Outputs) -> None:
        """Add events for jobs, if not over, whose GPUs are idle. These are no transitions, and not in the ledger."""
        for attempt, report in reports:
            job = attempt.replica.job
            if job.over:
                continue
            idle = Idle(_seconds(str(report.code)), _seconds(report.detail), attempt.replica.index)
            event = Event(job.tenant, job.name, job.rev, job.state, self._state.seq, idle=idle)
            out.events.append((job.tenant, job.name, encode(event), self.own_subject(job)))

    def add_stalls(self, stalls: list[tuple[Job, Stalled]], out: Outputs) -> None:
        """Add events for jobs, if not over, that stall or move again. These are no transitions either."""
        for job, stalled in stalls:
            if not job.over:
                event = Event(job.tenant, job.name, job.rev, job.state, self._state.seq, stalled=stalled)
                out.events.append((job.tenant, job.name, encode(event), self.own_subject(job)))

    def want_differences(
        self, wanted: WantedFrames, worker: Worker, held: list[Held], no: int, resized: list[Resized]
    ) -> list[Held]:
        """Repeat frames for differences between ledger and a worker's list; return the attempts unknown to the ledger.

        Unknown attempts that have not exited are asked to end.
        """
        again, unknown = self._sessions.differences(worker, held, no, resized)
        frozen = {name_in(entry) for entry in held if entry.phase == "frozen"}
        for attempt in again:
            wanted.add(attempt, is_frozen=attempt.name in frozen)
        for entry_ in unknown:
            if entry_.phase != "exited":
                wanted.end_unknown(worker, entry_)
        return unknown


def _seconds(word: str) -> int:
    """Return a worker's number of seconds; 0 if it is not one of at most `SECONDS_DIGITS_MAX` digits."""
    return int(word) if word.isascii() and word.isdigit() and len(word) <= SECONDS_DIGITS_MAX else 0
