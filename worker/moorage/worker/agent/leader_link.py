"""Send a worker's frames to the leader: reports, renewals, joins and the goodbye, journalled first where needed."""

from __future__ import annotations

from typing import Final, Protocol

from moorage.schemas.codec import encode
from moorage.schemas.frames import Goodbye, Join, Renew, Stopped, Unwell
from moorage.schemas.subjects import WORKER_VERBS, Subjects
from moorage.worker.agent.attempt_claims import AttemptClaims
from moorage.worker.agent.journal import MemoryJournal
from moorage.worker.agent.reporter import Reporter
from moorage.worker.devices.device_watch import DeviceWatch
from moorage.worker.devices.pool import GpuPool
from moorage.worker.session.attempt_messages import SendGoodbye, SendJoin, SendRenew, SendReports
from moorage.worker.session.lease_session import LeaseSession
from moorage.worker.session.restoring import device_names

#: why nothing new is started, for the leader and the log
STATE_GONE: Final = "the worker's state folder was removed or replaced under it: start the worker again"


class Post(Protocol):
    """A function that queues a message for the write at the end of this turn of the loop."""

    def __call__(self, subject: str, payload: bytes, reply: str = "") -> None: ...


class LeaderLink:
    """Sends one worker's frames to the leader.

    Answers come to `<inbox>.<worker>.<verb>.<join>.<number>`, so the subject says what they answer.
    """

    def __init__(
        self,
        post: Post,
        inbox: str,
        subjects: Subjects,
        session: LeaseSession,
        journal: MemoryJournal,
        reporter: Reporter,
        pool: GpuPool,
        watch: DeviceWatch,
        claims: AttemptClaims,
    ) -> None:
        worker = reporter.worker
        self._post = post
        self._inbox = f"{inbox}.{worker}"
        self._subjects = {verb: subjects.worker(worker, verb) for verb in WORKER_VERBS}
        self._session = session
        self._journal = journal
        self._reporter = reporter
        self._pool = pool
        self._watch = watch
        self._claims = claims
        self._join = b""

    def _ask(self, verb: str, number: int, payload: bytes) -> None:
        self._post(self._subjects[verb], payload, f"{self._inbox}.{verb}.{self._session.join_n}.{number}")

    def send_reports(self, command: SendReports) -> None:
        if not command.again:
            self._journal.reports(command.frame)
            self._journal.flush()
        if self._journal.is_behind:
            return  # they are sent again, and then they are on the disk
        self._ask("fact", command.frame.no, encode(command.frame, json=False))

    def send_renew(self, command: SendRenew) -> None:
        pool = self._pool
        renew = Renew(
            command.session,
            command.n,
            command.no,
            pool.generation,
            command.held,
            pool.busy_slots(),
            pool.pending_claimers() > 0,
            unwell=self._unwell(),
            well_n=self._watch.health.well_n,
            epoch=self._session.epoch,
            resized=command.resized,
            down=self._reporter.drivers_down(),
            use=self._reporter.usage.newest(),
            stopped=[Stopped(*name, count) for name, count in self._reporter.stopped.items()],
            leaving_s=command.leaving_s,
            reported=self._reporter.told_reports(),
        )
        self._ask("renew", command.n, encode(renew, json=False))

    def _unwell(self) -> list[Unwell]:
        """Return the devices that must not be given out: all of them once the state folder is gone."""
        if self._journal.is_in_place():
            return self._watch.told
        return [Unwell(slot, "state-gone", STATE_GONE) for slot in range(len(self._reporter.devices))]

    def send_join(self, command: SendJoin) -> None:
        if not command.again:
            session, reporter = self._session, self._reporter
            join = Join(
                reporter.facts.machine,
                reporter.boot,
                command.n,
                reporter.hello_to_the_leader(),
                reports=command.reports,
                holding=command.holding,
                epoch=session.epoch,
                ledger=session.ledger,
            )
            self._journal.join(command.n, command.reports, device_names(reporter.devices), self._claims.left)
            self._join = encode(join, json=False)
        self._journal.flush()
        if self._journal.is_behind:
            return  # the next agent must know this number
        self._ask("join", command.n, self._join)

    def send_goodbye(self, command: SendGoodbye) -> None:
        self._ask("join", 0, encode(Goodbye(command.session), json=False))
