"""Routes questions of tenants and operators, and operators' orders, by verb.

Questions are answered from memory, the history stream, a worker or a copy of this process: at once while no other
scheduler can have taken over yet, else after the next acknowledged record, which proves that this one still leads.
Orders go to the core, for the next record.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol

import msgspec

from moorage.bus.connection import Connection
from moorage.bus.jetstream import JetStream
from moorage.bus.transport import Delivery
from moorage.scheduler.answers import views
from moorage.scheduler.answers.counts import Counts
from moorage.scheduler.answers.demand import demand
from moorage.scheduler.answers.history_reader import REPLICAS_SHOWN_MAX, HistoryReader, Place, check_page
from moorage.scheduler.answers.storing import may_store
from moorage.scheduler.answers.waiting import waiting_by_reason
from moorage.scheduler.arguments import check_fields, replicas_asked
from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.events import Ask, Order
from moorage.scheduler.core.outputs.outputs import Message
from moorage.scheduler.durable.dead_letters import DeadLetters
from moorage.scheduler.follower.beside import FollowerBeside
from moorage.scheduler.follower.follower import Question
from moorage.scheduler.questions.agains import Agains, again_asked
from moorage.scheduler.questions.foresight import Foresight
from moorage.scheduler.questions.inspection import Inspection, device_drift
from moorage.scheduler.questions.job_lists import JobLists, jobs_asked
from moorage.scheduler.questions.question_queue import contained
from moorage.scheduler.questions.relay import ASKED, Asked, Reader, Relay, page_asked
from moorage.scheduler.questions.schedules import ScheduleVerb
from moorage.scheduler.questions.standing import Standings
from moorage.schemas.answers.fleet import FleetAnswer
from moorage.schemas.answers.jobs import ServicesAnswer
from moorage.schemas.answers.operators import Audit, TenantsAnswer
from moorage.schemas.codec import Decoder, encode
from moorage.schemas.errors import Problem, Refused, refuse
from moorage.schemas.frames import Answer, Looked
from moorage.schemas.names import TENANT, is_tenant
from moorage.schemas.operate import ACTS, ADMIN_VERBS, FeatureLevelAct, act_of
from moorage.schemas.passed_on import StoreAsked
from moorage.schemas.ranges import Ranges
from moorage.schemas.roles import INBOX
from moorage.schemas.schedules import ScheduleAsked
from moorage.schemas.subjects import Subjects

_decode_store: Final[Decoder[StoreAsked]] = Decoder(StoreAsked)


class Leader(Protocol):
    """What answering questions needs of the term."""

    @property
    def engine(self) -> Engine:
        """The core of this term."""

    @property
    def counts(self) -> Counts:
        """What this term counts for monitors."""

    @property
    def follower(self) -> FollowerBeside:
        """The follower of the ledger in this term."""

    def is_fresh(self) -> bool:
        """Return whether the last acknowledged append is so recent that no other scheduler can lead yet."""

    def mono_ms(self) -> int:
        """Return this process's monotonic time in ms."""

    def time_ms(self) -> int:
        """Return the ledger time now."""

    def answer_now(self, reply: str, payload: bytes) -> None:
        """Send an answer that needs no record, at once."""

    def send_soon(self, messages: list[Message]) -> None:
        """Send messages soon, without waiting until they are sent."""

    def add_figures(self, fleet: FleetAnswer) -> FleetAnswer:
        """Add to the answer `fleet` how the term, the ledger and the queue do."""


class Questions:
    """Tenants' verbs (`read`) and operators' verbs (`admin`). The term runs `inspection` and `foresight` as tasks."""

    def __init__(
        self,
        leader: Leader,
        out: Connection,
        tenants: Connection,
        jetstream: JetStream,
        subjects: Subjects,
        standings: Standings,
        letters: DeadLetters,
        schedules: ScheduleVerb,
        *,
        forks: bool,
    ) -> None:
        self._schedules = schedules
        self._leader = leader
        self._engine = engine = leader.engine
        self._standings = standings
        self._letters = letters
        self._history = HistoryReader(jetstream, subjects, engine, self._where, self._answer_read)
        self._agains = Agains(engine, self._history)
        self._lists = JobLists(jetstream, subjects, engine, self._written, self._answer_read)
        self._relay = Relay(tenants, subjects, engine, self._history, leader.answer_now, self._note_read)
        self.inspection = Inspection(out, subjects, self._to_inspect, engine.state.epoch)
        self.foresight = Foresight(
            engine,
            leader.time_ms,
            partial(self._ask, "explain"),
            leader.send_soon,
            self._answer_plain,
            forks=forks,
            promises=lambda: leader.counts.promises,
            sized=lambda tenant, request: leader.counts.sizes.of(tenant, request),
        )

    async def close(self) -> None:
        """Cancel the questions in progress; they get no answer."""
        self.foresight.close()
        await self._schedules.close()
        await self._relay.close()
        await self._lists.close()
        await self._history.close()

    def read(self, tenant: str, verb: str, arguments: dict[str, Any], reply: str, json: bool, came: str) -> None:
        """Answer a tenant's question, now or later; `came` is the way of the request. Raises `Refused` for an invalid
        question."""
        check_fields(verb, arguments)
        if verb in ASKED:
            self._page(tenant, verb, arguments, reply, json, came)
            return
        if verb == "plan":
            # only while this scheduler surely leads: a former leader would plan with an old state
            self._ask(verb, partial(self.foresight.plan, tenant, tenant, arguments, reply, json), reply, json)
            return
        if verb == "ls":
            asked = jobs_asked(arguments, operator=False)
            self._ask(verb, partial(self._lists.ask, tenant, tenant, asked, reply, json), reply, json)
        elif verb == "services":
            self._ask(verb, partial(self._services, tenant), reply, json)
        elif verb == "usage" and arguments.get("sizes"):
            self._ask(verb, partial(self._leader.counts.sizes.answer, tenant), reply, json)
        elif verb == "usage" and arguments.get("promises"):
            self._ask(verb, partial(self._leader.counts.promises.answer, tenant), reply, json)
        elif verb == "usage":
            self._ask(verb, partial(self._ask_follower, verb, tenant, arguments, reply, json), reply, json)
        elif verb == "schedule":
            self._schedule(tenant, ScheduleAsked.of(arguments), reply, json, came)
        elif verb in ("show", "explain", "history", "again"):
            self._about_a_job(tenant, verb, arguments, reply, json)
        else:
            raise refuse(
                "unknown-verb",
                f"{verb} is not served by this release",
                found=verb,
                allowed="show, ls, explain, plan, history, again, logs, use, rescue, usage, schedule, services",
            )

    def on_may_store(self, delivery: Delivery) -> None:
        """Answer a scheduler that asks for a worker: only while this one surely leads, else with the next record."""
        try:
            asked = _decode_store(delivery.data)
        except Refused:
            return
        if delivery.reply.startswith(f"{INBOX}."):
            may = partial(may_store, self._engine.state, self._relay.rescues, asked)
            self._ask("maystore", may, delivery.reply, json=True)

    def _schedule(self, tenant: str, asked: ScheduleAsked, reply: str, json: bool, came: str) -> None:
        if asked.act not in ("ls", "show"):
            self._schedules.act(tenant, asked, reply, json, came)
            return
        answer = partial(self._schedules.read, tenant, asked)
        if asked.act == "ls" or self._engine.state.schedule(tenant, asked.name) is not None:
            self._ask("schedule", answer, reply, json)
        else:
            self._ask_behind_a_record("schedule", answer, reply, json)

    def _about_a_job(self, tenant: str, verb: str, arguments: dict[str, Any], reply: str, json: bool) -> None:
        job = arguments.get("job")
        if not isinstance(job, str):
            raise refuse("invalid-argument", f"{verb} needs a job id", field="$.job", found=job)
        answer: Callable[[], Any]
        if verb == "show":
            follow = arguments.get("events") != "tenant"
            only = replicas_asked(arguments, REPLICAS_SHOWN_MAX)
            answer = partial(self._show, tenant, job, reply, json, follow=follow, only=only)
        elif verb == "history":
            check_page(arguments)
            answer = partial(self._history.history, tenant, arguments, reply, json)
        elif verb == "again":
            answer = partial(self._agains.ask, tenant, again_asked(arguments), reply, json)
        else:
            answer = partial(self.foresight.explain, tenant, job, reply, json)
        if self._engine.state.job(tenant, job) is None:
            # "unknown job" may only be answered after a record that was acknowledged after the question arrived
            self._ask_behind_a_record(verb, answer, reply, json)
        else:
            self._ask(verb, answer, reply, json)

    def _show(self, tenant: str, job: str, reply: str, json: bool, *, follow: bool, only: Ranges | None) -> Any:
        found = self._history.show(tenant, job, reply, json, follow=follow, only=only)
        if isinstance(found, Problem) and found.code == "not-found":
            return self._letters.refusal(tenant, job) or found
        return found

    def _note_read(self, reader: Reader, tenant: str, asked: Asked) -> None:
        """Have the follower note that a person read the output of another one's job; nobody waits for that."""
        verb = next(verb for verb, kind in ASKED.items() if isinstance(asked, kind))
        row = {"by": reader.by, "came": reader.came, "verb": verb, "job": asked.job}
        self._leader.follower.ask(Question("read", self._engine.state.seq, tenant, row), lambda _: None)

    def _page(self, tenant: str, verb: str, arguments: dict[str, Any], reply: str, json: bool, came: str) -> None:
        """Let the relay answer, at once or behind a record; nothing happens without a reply subject.

        Raises `Refused` for invalid arguments.
        """
        asked = page_asked(verb, arguments)
        if not reply:
            return
        begin = partial(self._relay.ask, tenant, asked, reply, json, came)  # the relay sends the answer itself
        if self._leader.is_fresh() and self._engine.state.job(tenant, asked.job) is not None:
            begin()
        else:
            self._ask_behind_a_record(verb, begin, reply, json)

    def _services(self, tenant: str) -> ServicesAnswer:
        """Return a tenant's live services, with what this leader has heard of their calls."""
        calls, now_ms = self._leader.counts.calls, self._leader.mono_ms()
        rows = self._engine.services.listed(tenant).services
        used = [msgspec.structs.replace(row, use=calls.use(tenant, row.service, now_ms)) for row in rows]
        return ServicesAnswer(services=used)

    def _ask(self, verb: str, answer: Callable[[], Any], reply: str, json: bool) -> None:
        if self._leader.is_fresh():
            self._answer_read(verb, contained(answer), reply, json)
        else:
            self._ask_behind_a_record(verb, answer, reply, json)

    def _ask_behind_a_record(self, verb: str, answer: Callable[[], Any], reply: str, json: bool) -> None:
        """Offer a question to the core, to be answered with the next record.

        Questions are offered only here, with exceptions contained: one in the answer would end the term.
        """
        self._engine.offer(Ask(lambda: self._framed(verb, contained(answer)), reply, json))

    def _ask_follower(
        self, verb: str, tenant: str | None, arguments: dict[str, Any], reply: str, json: bool
    ) -> Problem | None:
        """Ask the follower, which answers later; return the problem if it cannot be asked now."""
        question = Question(verb, self._engine.state.seq, tenant, arguments)
        return self._leader.follower.ask(question, lambda data: self._answer_read(verb, data, reply, json))

    async def _where(self, tenant: str, job: str) -> Place:
        """Return where the history of a job is, as the follower says. Raises `Refused`."""
        answer = await self._leader.follower.asked(Question("where", self._engine.state.seq, tenant, {"job": job}))
        if isinstance(answer, Problem):
            raise Refused(answer)
        return answer["parts"], answer["seq"]

    async def _written(self) -> Problem | None:
        """Wait until the history has all that left memory; return the problem if that takes too long."""
        answer = await self._leader.follower.asked(Question("written", self._engine.state.seq, None, {}))
        return answer if isinstance(answer, Problem) else None

    def _answer_plain(self, reply: str, frame: Any, json: bool) -> None:
        if reply:
            self._leader.answer_now(reply, encode(frame, json=json))

    def _answer_read(self, verb: str, data: Any, reply: str, json: bool) -> None:
        if data is not None and reply:
            self._leader.answer_now(reply, encode(self._framed(verb, data), json=json))

    def _framed(self, verb: str, data: Any) -> Any:
        """Return the frame of an answer; None, too, for one that is sent later."""
        return data if data is None or isinstance(data, Problem) else Answer(verb, self._engine.state.seq, data)

    def admin(self, operator: str, verb: str, arguments: dict[str, Any], reply: str, json: bool, came: str) -> None:
        """Answer an operator's question, or offer the order to the core. Raises `Refused` for an invalid one.

        `operator` is the name in the subject, `came` the way of the request.
        """
        check_fields(verb, arguments)
        if verb == "fleet":
            self._fleet(arguments, reply, json)
        elif verb == "audit":
            self._audit(reply, json)
        elif verb == "dlq":
            self._letters.ask(operator, arguments, self._leader.answer_now, reply, json)
        elif verb == "ls":
            asked = jobs_asked(arguments, operator=True)
            self._ask(verb, partial(self._lists.ask, "", asked.tenant, asked, reply, json), reply, json)
        elif verb == "plan":
            fields = dict(arguments)
            tenant = fields.pop("tenant", "")
            if not isinstance(tenant, str) or not is_tenant(tenant):
                why = "an operator's plan names the tenant of the job that it is about"
                raise refuse("invalid-argument", why, field="$.tenant", found=tenant, allowed=TENANT.pattern)
            self._ask(verb, partial(self.foresight.plan, "", tenant, fields, reply, json), reply, json)
        elif verb == "tenants":
            self._ask(verb, self._tenants, reply, json)
        elif verb == "usage" and arguments.get("sizes"):
            self._ask(verb, partial(self._leader.counts.sizes.answer, None), reply, json)
        elif verb == "usage" and arguments.get("promises"):
            self._ask(verb, partial(self._leader.counts.promises.answer, None), reply, json)
        elif verb in ("usage", "acts"):
            self._ask(verb, partial(self._ask_follower, verb, None, arguments, reply, json), reply, json)
        elif verb in ACTS:
            self._engine.offer(self._order(operator, verb, arguments, reply, json, came))
        else:
            why = f"{verb} is not served by this release"
            raise refuse("unknown-verb", why, found=verb, allowed=", ".join(ADMIN_VERBS))

    def _tenants(self) -> TenantsAnswer:
        found = views.tenants(self._engine, self._leader.counts)
        found.waiting = waiting_by_reason(self._engine)
        found.demand = demand(self._engine, self._leader.counts.idle, self._engine.built_ms)
        return found

    def _fleet(self, arguments: dict[str, Any], reply: str, json: bool) -> None:
        after, only = arguments.get("after", ""), arguments.get("worker", "")
        for field, name in (("after", after), ("worker", only)):
            if not isinstance(name, str):
                raise refuse(
                    "invalid-argument", f"{field} must be a string, the id of a worker", field=f"$.{field}", found=name
                )

        def answer() -> FleetAnswer:
            return self._leader.add_figures(views.fleet(self._engine, self._leader.mono_ms(), after, only))

        self._ask("fleet", answer, reply, json)

    def _order(self, operator: str, verb: str, arguments: dict[str, Any], reply: str, json: bool, came: str) -> Order:
        act, announced = act_of(verb, arguments), dict[str, int]()
        if isinstance(act, FeatureLevelAct):
            announced = {said.scheduler: said.level for said in self._standings.lately()}
        return Order(verb, act, reply, json, announced, operator, came)

    def _to_inspect(self) -> set[str]:
        """Return the workers that can be asked to inspect their devices."""
        return {host.worker.id for host in self._engine.fleet.hosts.values() if host.heard and host.worker.session}

    def _audit(self, reply: str, json: bool) -> None:
        """Compare the ledger with the workers' last renewals; workers compare their devices with their leases."""

        def told(answers: dict[str, Looked], silent: list[str]) -> None:
            def answer() -> Audit:
                found = views.audit(self._engine)
                found.drift += device_drift(answers)
                found.looked, found.not_looked = len(answers), silent
                found.left_out = sum(frame.more for frame in answers.values())
                return found

            self._ask("audit", answer, reply, json)

        self.inspection.ask(told)
