"""A leader serves workers, operators and tenants on connections of their own: a cut of one costs those alone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec
import pytest

from moorage.bus.connection import Connection, connect
from moorage.bus.errors import BusError
from moorage.bus.transport import Delivery
from moorage.scheduler.core.config import Config
from moorage.scheduler.leader.door import Door
from moorage.scheduler.leader.intake import Intake
from moorage.scheduler.leader.service import Scheduler
from moorage.scheduler.leader.term import Term
from moorage.schemas.subjects import FLEET, Subjects
from tests.release.chaos.proxy import Proxy
from tests.servers import ANSWER_S
from tests.sites import RunningSite, running
from tests.system.live.scripted_worker import ScriptedWorker, scripted_worker
from tests.waiting import until

SUBJECTS: Final = Subjects()
#: a lease is soon over; the smallest numbers that keep the rule between them
NUMBERS: Final = Config(
    renew_s=0.2, takeover_s=1.5, heartbeat_s=0.1, renewal_append_s=0.05, lease_s=3.0, grace_s=0.3, margin_s=0.2
)
#: the least `max_pending` that a server takes with the payload of a site
PENDING_BYTES: Final = 2 * 1024 * 1024
SERVES: Final = ("workers", "operators", "tenants", "out")


class Serving:
    """A leader, with a door that can be cut before each of its connections."""

    def __init__(self, scheduler: Scheduler, doors: dict[str, Proxy]) -> None:
        self.scheduler = scheduler
        self.doors = doors
        links = (scheduler.world, scheduler.operators, scheduler.tenants, scheduler.out)
        self.connections = dict(zip(SERVES, links, strict=True))

    @property
    def term(self) -> Term:
        assert self.scheduler.term is not None
        return self.scheduler.term


@contextlib.asynccontextmanager
async def serving(site: RunningSite) -> AsyncIterator[Serving]:
    doors = {name: Proxy(site.site.servers[0].port) for name in SERVES}
    async with contextlib.AsyncExitStack() as ends:
        links: dict[str, Connection] = {}
        for name, door in doors.items():
            await door.open()
            ends.push_async_callback(door.close)
            context = msgspec.structs.replace(site.context("scheduler.main"), url=f"nats://127.0.0.1:{door.port}")
            links[name] = await ends.enter_async_context(await connect(context, f"the leader's for {name}"))
        ledger = await ends.enter_async_context(await site.connect("ledger.main"))
        scheduler = Scheduler(
            links["workers"],
            ledger,
            operators=links["operators"],
            tenants=links["tenants"],
            out=links["out"],
            config=NUMBERS,
            subjects=SUBJECTS,
        )
        leading = asyncio.create_task(scheduler.run())
        try:
            await until(scheduler.leading.is_set, ANSWER_S, "the scheduler leads")
            yield Serving(scheduler, doors)
        finally:
            leading.cancel()
            await asyncio.gather(leading, return_exceptions=True)


@contextlib.asynccontextmanager
async def worker_of(site: RunningSite) -> AsyncIterator[ScriptedWorker]:
    async with (
        await site.connect("worker.w1") as connection,
        scripted_worker(connection._client, SUBJECTS, "w1", 2) as worker,
    ):
        yield worker


async def fleet_events(site: RunningSite, ends: contextlib.AsyncExitStack) -> list[str]:
    """The words for what happens to the fleet, as they come."""
    told: list[str] = []
    ana = await ends.enter_async_context(await site.connect("operator.ana"))
    await ana.subscribe(
        SUBJECTS.events(FLEET), lambda delivery: told.append(msgspec.json.decode(delivery.data)["what"])
    )
    return told


async def asks(connection: Connection, subject: str, body: bytes = b"{}") -> dict[str, Any]:
    return dict(msgspec.json.decode((await connection.request(subject, body, ANSWER_S)).data))


@contextlib.asynccontextmanager
async def job_lives_on(tenant: Connection, name: str, worker: ScriptedWorker) -> AsyncIterator[None]:
    """A job that runs on the worker, and does so at the end of the block by the same attempt."""
    request = b'{"job":"lives","gpu":{},"run":{"argv":["true"]}}'
    assert (await asks(tenant, SUBJECTS.api(name, "submit"), request))["kind"] == "accepted"
    await worker.wants("lives")
    await worker.step("lives", "claimed", "started")
    placed = worker.fences("lives")
    yield
    shown = await asks(tenant, SUBJECTS.api(name, "show"), b'{"job":"lives"}')
    assert shown["data"]["state"] == "RUNNING"
    assert worker.fences("lives") == placed


async def test_who_is_answered_by_a_new_leader_finds_all_of_it_subscribed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators were answered before there was a subscription for tenants: their requests had no responders."""
    opens, puts = Door.open, Intake.put
    came, answers, early = list[str](), list[bytes](), list[bytes]()

    async with (
        running() as site,
        await site.connect("operator.ana") as ana,
        await site.connect("submitter.acme") as acme,
    ):
        inbox = "_INBOX.operator.ana.early"
        await ana.subscribe(inbox, lambda delivery: answers.append(delivery.data))

        def put(self: Intake, delivery: Delivery) -> None:
            came.append(delivery.subject)
            puts(self, delivery)

        async def open_late(self: Door) -> None:
            if self._kind == "worker":
                return await opens(self)
            await ana.publish(SUBJECTS.admin("fleet", "ana"), b"{}", inbox, {})
            await until(lambda: SUBJECTS.admin("fleet", "ana") in came, what="the question is there")
            for _ in range(5):  # time for an answer that is made before it should be
                await ana.flush()
            early.extend(answers)
            return await opens(self)

        monkeypatch.setattr(Intake, "put", put)
        monkeypatch.setattr(Door, "open", open_late)
        async with serving(site):
            await until(lambda: answers, what="the answer")
            assert early == []
            assert (await asks(acme, SUBJECTS.api("acme", "ls")))["kind"] == "answer"


async def test_a_tenants_flood_that_cuts_a_connection_costs_tenants_alone(caplog: pytest.LogCaptureFixture) -> None:
    async with (
        running(pending=PENDING_BYTES) as site,
        serving(site) as leader,
        worker_of(site) as worker,
        await site.connect("operator.ana") as ana,
        await site.connect("submitter.acme") as acme,
        await site.connect("submitter.beta") as beta,
        job_lives_on(beta, "beta", worker),
    ):
        epoch, session = leader.term.engine.state.epoch, worker.session
        leader.doors["tenants"].cut()
        log = site.folder / "server-0.log"
        for _ in range(100):  # each is nearly half of what the server holds for a connection
            await acme.send([(SUBJECTS.api("acme", "explain"), bytes(900_000), "")])
            await acme.flush()
        await until(lambda: "Slow Consumer" in log.read_text(), what="the server cuts the connection")
        answered = len(worker.answers)
        await until(lambda: len(worker.answers) > answered + 3, what="renewals are answered meanwhile")
        assert (await asks(ana, SUBJECTS.admin("fleet", "ana")))["kind"] == "answer"
        leader.doors["tenants"].reset()
        leader.doors["tenants"].heal()
        await until(lambda: leader.connections["tenants"].reconnects, what="the leader is back for tenants")
        await leader.connections["tenants"].flush()
        assert (await asks(beta, SUBJECTS.api("beta", "ls")))["kind"] == "answer"
        assert [leader.connections[name].reconnects for name in ("workers", "operators")] == [0, 0]
        assert (leader.term.engine.state.epoch, leader.term.engine.state.workers["w1"].session) == (epoch, session)
        assert worker.session == session


@pytest.mark.parametrize("how", ["silent", "reset"])
async def test_no_lease_runs_out_while_the_leader_is_cut_off_from_its_workers(how: str) -> None:
    """Then the deadline counts from when they could be heard; one that says nothing then is lost as ever."""
    async with contextlib.AsyncExitStack() as ends:
        site = await ends.enter_async_context(running())
        leader = await ends.enter_async_context(serving(site))
        told = await fleet_events(site, ends)
        async with worker_of(site) as worker:
            door, term = leader.doors["workers"], leader.term
            await until(lambda: worker.answers, what="a renewal is answered")
            (door.cut if how == "silent" else door.reset)()
            deadline_ms = term.mono_ms() + 2 * NUMBERS.lost_ms
            await until(lambda: term.mono_ms() > deadline_ms, what="twice the time after which a worker is lost")
            door.heal()
            answered = len(worker.answers)
            await until(lambda: len(worker.answers) > answered, what="the worker is heard again")
            assert "lost" not in told
            assert leader.scheduler.term is term, "nor did the leader step down"
            worker._closing.set()
        await until(lambda: "lost" in told, what="a worker that is silent while it could be heard is lost")


async def test_operators_are_answered_while_the_connection_for_tenants_is_away() -> None:
    async with running() as site, serving(site) as leader, await site.connect("operator.ana") as ana:
        leader.doors["tenants"].reset()
        await until(lambda: not leader.connections["tenants"].is_connected, what="the leader sees it")
        assert (await asks(ana, SUBJECTS.admin("fleet", "ana")))["kind"] == "answer"
        with pytest.raises(BusError):
            async with await site.connect("submitter.acme") as acme:
                await acme.request(SUBJECTS.api("acme", "ls"), b"{}", 1.0)
        leader.doors["tenants"].heal()
        await until(lambda: leader.connections["tenants"].is_connected, what="the leader is back")
        await leader.connections["tenants"].flush()
        async with await site.connect("submitter.acme") as acme:
            assert (await asks(acme, SUBJECTS.api("acme", "ls")))["kind"] == "answer"


async def test_tenants_and_operators_are_answered_while_the_connection_for_workers_is_away() -> None:
    async with (
        running() as site,
        serving(site) as leader,
        await site.connect("operator.ana") as ana,
        await site.connect("submitter.acme") as acme,
    ):
        told: list[str] = []
        await acme.subscribe(SUBJECTS.events("acme"), lambda delivery: told.append(delivery.subject))
        leader.doors["workers"].reset()
        await until(lambda: not leader.connections["workers"].is_connected, what="the leader sees it")
        assert (await asks(ana, SUBJECTS.admin("fleet", "ana")))["kind"] == "answer"
        request = b'{"job":"j","gpu":{},"on_no_match":"wait","run":{"argv":["true"]}}'
        assert (await asks(acme, SUBJECTS.api("acme", "submit"), request))["kind"] == "accepted"
        await until(lambda: told, what="its tenant hears of it")
        assert not leader.connections["workers"].is_connected


@pytest.mark.parametrize("verb", ["renew", "looked"])
async def test_a_worker_that_floods_is_rationed_by_the_server_and_others_are_heard(verb: str) -> None:
    async with (
        running() as site,
        serving(site) as leader,
        worker_of(site) as worker,
        await site.connect("worker.w2") as flood,
        await site.connect("submitter.acme") as acme,
        job_lives_on(acme, "acme", worker),
    ):
        rates, session = leader.term.intake.worker_rates, worker.session

        async def is_rationed() -> bool:
            await flood.send([(SUBJECTS.worker("w2", verb), b"{}", "")] * 10_000)
            await flood.flush()
            await leader.connections["workers"].flush()  # the leader has read as much as it is to read of them
            return "w2" in rates.rationed

        await until(is_rationed, ANSWER_S, "the server rations it")
        answered = len(worker.answers)
        await until(lambda: len(worker.answers) > answered + 3, what="renewals of the other one are answered")
        assert (await asks(acme, SUBJECTS.api("acme", "ls")))["kind"] == "answer"
        await until(lambda: not rates.rationed, ANSWER_S, "it floods no more")
        assert worker.session == session
