"""Relays questions for what workers keep of jobs, output, use and folders: the leader finds the worker, asks it, and
passes its page on, beside the loop."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec

from moorage.bus.connection import Connection
from moorage.bus.errors import BusError, NoResponders
from moorage.scheduler.answers.history_reader import HistoryReader
from moorage.scheduler.answers.logs import Kept, find_in_history, find_log
from moorage.scheduler.answers.reported import find_reports
from moorage.scheduler.answers.use import find_use
from moorage.scheduler.arguments import check_job
from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.ledger.records import by_tenant
from moorage.scheduler.core.ledger.state import Worker
from moorage.scheduler.pacing.answering import Answering
from moorage.schemas.codec import Decoder, encode
from moorage.schemas.decode_errors import asked_as
from moorage.schemas.errors import Problem, Refused, problem
from moorage.schemas.frames import (
    Answer,
    LogPage,
    LogsAsked,
    ReadReports,
    ReadUse,
    ReportsAsked,
    ReportsPage,
    Rescue,
    RescueAsked,
    Rescued,
    UseAsked,
    UsePage,
)
from moorage.schemas.handler import rescued_object
from moorage.schemas.passed_on import StoreAsked
from moorage.schemas.signed import person_in
from moorage.schemas.subjects import Subjects
from moorage.schemas.ways import person_of

log = logging.getLogger("moorage.scheduler")

#: less than a client waits for one try
RELAY_S: Final = 2.0
#: questions to workers in progress at once: in all, and of one tenant
RELAYS_MAX: Final = 64
RELAYS_MAX_TENANT: Final = 16
#: rescues that workers were asked for last, whose objects they may store
RESCUES_MAX: Final = 1_024

Page = LogPage | UsePage | ReportsPage | Rescued
Asked = LogsAsked | UseAsked | ReportsAsked | RescueAsked
#: the questions by their verbs
ASKED: Final[dict[str, type[Asked]]] = {
    "logs": LogsAsked, "use": UseAsked, "reports": ReportsAsked, "rescue": RescueAsked
}  # fmt: skip
_VERBS: Final[dict[type[Page], str]] = {
    LogPage: "logs", UsePage: "use", ReportsPage: "reports", Rescued: "rescue"
}  # fmt: skip
_decode_page: Final[Decoder[Page | Problem]] = Decoder(Page | Problem)


class Reader(NamedTuple):
    """Who asks for output: the actor, the way of the question, and the person, "" if nothing proves one."""

    by: str
    came: str
    person: str


class Relay:
    """The relay of one term. `ask` begins, `answer` sends the answer, `close` cancels what is in progress.

    `noted` is told who has read the output of a job that another person submitted, once a worker has answered.
    """

    def __init__(
        self,
        world: Connection,
        subjects: Subjects,
        engine: Engine,
        history: HistoryReader,
        answer: Callable[[str, bytes], None],
        noted: Callable[[Reader, str, Asked], None],
    ) -> None:
        self._world = world
        self._history = history
        self._subjects = subjects
        self._engine = engine
        self._answer = answer
        self._noted = noted
        self.rescues: dict[StoreAsked, None] = {}  # the oldest first
        self._answers = Answering("questions to workers", RELAYS_MAX, RELAYS_MAX_TENANT)

    def ask(self, tenant: str, asked: Asked, reply: str, json: bool, came: str) -> None:
        """Answer now, or ask the worker first. Uses the current state, which the caller has made sure is fresh."""
        engine = self._engine
        found: Kept | Page | Problem | None
        if isinstance(asked, UseAsked):
            found = find_use(engine, tenant, asked)
        elif isinstance(asked, ReportsAsked):
            found = find_reports(engine, tenant, asked)
        else:
            found = find_log(engine, tenant, asked)
        if found is not None and not isinstance(found, Kept):
            self._send_answer(found, reply, json)
        elif (trouble := self._trouble(tenant, found)) is not None:
            self._send_answer(trouble, reply, json)
        else:
            reader = person_of(came, tenant)
            make = partial(self._find, tenant, asked, found, Reader(by_tenant(tenant, reader), came, reader))
            self._answers.begin(make, lambda page: self._send_answer(page, reply, json), tenant, asked.job)

    def _trouble(self, tenant: str, kept: Kept | None) -> Problem | None:
        if kept is not None and not kept.worker.session:
            return self._away(kept)
        return self._answers.overloaded(tenant)

    async def _find(self, tenant: str, asked: Asked, kept: Kept | None, reader: Reader) -> Page | Problem:
        """Ask the worker; a job that left memory is looked up in the history first."""
        found: Kept | Page | Problem
        job = self._engine.state.job(tenant, asked.job)
        of = "" if job is None else person_in(job.body)
        if kept is not None or isinstance(asked, UseAsked | ReportsAsked):
            assert kept is not None  # these are only of jobs in memory
            found = kept
        else:
            changes, request = await self._history.of_replica(tenant, asked.job, asked.replica)
            of = of or (request.person if request is not None else None) or ""
            found = find_in_history(self._engine, tenant, asked, changes, request)
        if not isinstance(found, Kept):
            return found
        page = await self._relay(found) if found.worker.session else self._away(found)
        has_read = isinstance(page, Rescued) or (isinstance(page, LogPage) and bool(page.text or page.data))
        if has_read and of != reader.person:
            self._noted(reader, tenant, asked)
        return page

    async def _relay(self, kept: Kept) -> Page | Problem:
        if isinstance(ask := kept.ask, Rescue):
            name = rescued_object(ask.job, ask.replica, ask.fence, ask.path)
            rescue = StoreAsked(kept.worker.id, ask.tenant, name)
            self.rescues.pop(rescue, None)
            self.rescues[rescue] = None
            if len(self.rescues) > RESCUES_MAX:
                del self.rescues[next(iter(self.rescues))]
        try:
            subject = self._subjects.worker(kept.worker.id, "logs")
            answer = await self._world.request(subject, encode(kept.ask, json=kept.worker.inventory.json), RELAY_S)
            page = _decode_page(answer.data)
        except (BusError, Refused) as error:
            if isinstance(error, NoResponders) and not keeps_output(kept.worker):
                return _not_kept(kept)
            log.info("worker %s gave no page: %s", kept.worker.id, error)
            return self._away(kept)
        if isinstance(page, LogPage | Rescued):
            return msgspec.structs.replace(page, worker=kept.worker.id, replica=kept.ask.replica)
        if isinstance(page, ReportsPage):
            return msgspec.structs.replace(page, worker=kept.worker.id)
        if isinstance(page, UsePage):
            simulated = kept.worker.pool_at(kept.ask.fence).simulated
            return msgspec.structs.replace(page, worker=kept.worker.id, simulated=simulated)
        return self._away(kept) if page.code == "session-over" else page

    def _away(self, kept: Kept) -> Problem:
        """Return the problem that the worker with the output does not answer: which worker, and since when."""
        worker, state = kept.worker, self._engine.state
        if worker.session:
            since = "does not answer now"
        elif worker.left_ms:
            since = f"was lost {max(state.time_ms - worker.left_ms, 0) // 1000} s ago"
        else:
            since = "was lost before this scheduler began to lead"
        ask = kept.ask
        return problem(
            "worker-lost",
            f"attempt {ask.attempt} of replica {ask.replica} of job {ask.job} ran on {worker.id}, which {since}",
            found=worker.id,
            job=ask.job,
            next="ask again when it is back; those who run this fleet see how it is: moorage fleet",
        )

    def _send_answer(self, found: Page | Problem, reply: str, json: bool) -> None:
        seq = self._engine.state.seq
        frame: Any = found if isinstance(found, Problem) else Answer(_VERBS[type(found)], seq, found)
        self._answer(reply, encode(frame, json=json))

    async def close(self) -> None:
        await self._answers.close()


def keeps_output(worker: Worker) -> bool:
    """Return whether a worker says of any of its drivers that it keeps output."""
    return any(can.keeps_output for can in worker.inventory.capabilities.values())


def _not_kept(kept: Kept) -> Problem:
    """Return the problem that a worker, perhaps of another program, keeps nothing that can be asked for."""
    if isinstance(kept.ask, Rescue):
        told, fix = "ran on {}, which stores no folder of its jobs", "submit it with --keep 'out/**'"
    elif isinstance(kept.ask, ReadReports):
        told, fix = "runs on {}, which does not tell what its jobs report", "read it in the job's own output"
    elif isinstance(kept.ask, ReadUse):
        told, fix = "runs on {}, which does not tell what its jobs use", "look on that host, with nvidia-smi"
    else:
        told, fix = (
            "ran on {}, which keeps no output of its jobs",
            "have the job write its output to a file or a bucket of its own",
        )
    worker = kept.worker.id
    return problem("not-kept", f"job {kept.ask.job} {told.format(worker)}", found=worker, job=kept.ask.job, next=fix)


def page_asked(verb: str, arguments: dict[str, Any]) -> Asked:
    """Return the checked arguments of a verb of `ASKED`. Raises `Refused`, naming the field."""
    kind = ASKED[verb]
    asked = asked_as(kind, arguments, f"moorage {verb} --help")
    check_job(verb, asked.job)
    return asked
