"""Where tenants have accounts of their own, each has a stream of its own for the durable queue, bounded by itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, Final

import msgspec
import pytest

from moorage.bus.connection import Connection, connect
from moorage.bus.errors import BusError, JetStreamRefused
from moorage.bus.jetstream import JetStream
from moorage.scheduler.core.ledger.state import State, Tenant
from moorage.scheduler.durable import queue_reader
from moorage.scheduler.durable.queue_streams import BYTES_MIN, info_of, stream_config
from moorage.scheduler.leader.service import Scheduler
from moorage.scheduler.ledger.backup import BackupRefused, _check_queue
from moorage.schemas.subjects import Subjects
from tests.servers import ANSWER_S, Server
from tests.sites import RunningSite, running
from tests.waiting import until

SUBJECTS: Final = Subjects()
USERS: Final = "MOORAGE"


@contextlib.asynccontextmanager
async def leads(site: RunningSite) -> AsyncIterator[Scheduler]:
    """A scheduler in this process, with the key of the site's own."""
    async with await site.connect("scheduler.main") as world, await site.connect("ledger.main") as ledger:
        scheduler = Scheduler(world, ledger, subjects=SUBJECTS)
        running = asyncio.create_task(scheduler.run())
        leading = asyncio.create_task(scheduler.leading.wait())
        try:
            await asyncio.wait([running, leading], timeout=ANSWER_S, return_when=asyncio.FIRST_COMPLETED)
            assert scheduler.leading.is_set(), running
            yield scheduler
            await scheduler.resign()
        finally:
            leading.cancel()
            running.cancel()
            await asyncio.gather(running, leading, return_exceptions=True)


def state_of(scheduler: Scheduler) -> State:
    assert scheduler.term is not None
    return scheduler.term.engine.state


async def publish(of: Connection, tenant: str, job: str | None, size: int = 0, message_id: str = "") -> dict[str, Any]:
    """One request that waits for ever; what the server answers."""
    body: dict[str, Any] = {"gpu": {"model": "none"}, "run": {"argv": ["true"]}, "labels": {"x": "x" * size}}
    if job is not None:
        body["job"] = job
    subject = SUBJECTS.request(tenant, "submit")
    headers = {"Nats-Msg-Id": message_id} if message_id else None
    answer = await of.request(subject, msgspec.json.encode(body), 5.0, headers)
    return dict(msgspec.json.decode(answer.data))


async def test_a_tenant_that_fills_its_queue_fills_nobody_elses() -> None:
    async with (
        running() as site,
        await site.witness(USERS) as users,
        await site.connect("submitter.acme") as acme,
        await site.connect("submitter.beta") as beta,
        leads(site) as scheduler,
    ):
        js = JetStream(users)
        own = {"name": SUBJECTS.request_stream_of("acme"), "max_bytes": 100_000}
        await js.ensure_stream(own, frozenset(own))
        answers = [await publish(acme, "acme", f"j{number}", 10_000) for number in range(30)]
        assert any(answer.get("error", {}).get("code") == 503 for answer in answers), answers
        assert "error" not in await publish(beta, "beta", "train-1", message_id="j1")
        await until(lambda: state_of(scheduler).job("beta", "train-1"), what="beta's job")
        queue = state_of(scheduler)
        await until(lambda: queue.job("acme", "j0"), what="acme's first job")
        term = scheduler.term
        assert term is not None
        filled = term.queue_reader.figures()
        assert filled is not None
        assert filled.tenant in ("acme", "beta")


async def test_what_waits_in_the_stream_of_an_older_release_is_read_first_and_once() -> None:
    async with (
        running() as site,
        await site.witness(USERS) as users,
        await site.connect("submitter.acme") as acme,
        await site.connect("submitter.beta") as beta,
    ):
        js = JetStream(users)
        old = stream_config(SUBJECTS, 1)
        del old["duplicate_window"]
        await js.ensure_stream(old)
        for number in range(3):
            await publish(acme, "acme", f"old-{number}")
            await publish(beta, "beta", f"old-{number}")
        unnamed = [f"q{(await publish(acme, 'acme', None))['seq']}"]
        async with leads(site) as scheduler:
            unnamed.append(f"q{(await publish(acme, 'acme', None))['seq']}")
            await publish(acme, "acme", "new")
            await until(lambda: state_of(scheduler).job("acme", "new"), what="what came after the move")
            state = state_of(scheduler)
            names = ["old-0", "old-1", "old-2", *unnamed, "new"]
            assert len(set(names)) == 6
            found = [state.job("acme", name) for name in names]
            assert [job.num for job in found if job is not None] == sorted(job.num for job in found if job is not None)
            assert None not in found
            await until(lambda: state.job("beta", "old-2"), what="the other tenant's")
            assert (await js.stream_info(old["name"])).config["subjects"] == [SUBJECTS.request_none]
            live = state.live
        async with leads(site) as scheduler:
            await publish(beta, "beta", "later")
            await until(lambda: state_of(scheduler).job("beta", "later"), what="under the next leader")
            assert state_of(scheduler).live == live + 1


@pytest.mark.slow
async def test_rights_that_name_a_tenants_stream_move_its_queue_there_under_a_leader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rights that an older release wrote name none: one stream is for all until they are made anew."""
    monkeypatch.setattr(queue_reader, "SWEEP_EVERY_S", 0.1)
    monkeypatch.setattr(queue_reader, "PURGE_EVERY_S", 0.1)
    async with running(tenants=("acme",)) as site, await site.connect("submitter.acme") as acme:
        own, file = SUBJECTS.request_stream_of("acme"), site.folder / "accounts.conf"
        rights = file.read_text()
        file.write_text(rights.replace(f"STREAM.CREATE.{own}", "STREAM.CREATE.NONE"))
        await site.reload()
        async with leads(site) as scheduler:
            state, taken = state_of(scheduler), list[str]()

            async def moved() -> bool:
                """Whether the server lays the next request into the tenant's own stream."""
                try:
                    ack = await publish(acme, "acme", f"j{len(taken)}")
                except BusError:  # while neither takes it
                    return False
                taken.append(f"j{len(taken)}")
                return bool(ack["stream"] == own)

            assert not await moved()
            file.write_text(rights)
            await site.reload()
            await until(moved, ANSWER_S, "the tenant's own stream")
            for job in taken:
                await until(lambda job=job: state.job("acme", job), what=job)
            former = partial(JetStream(scheduler.world).stream_info, SUBJECTS.request_stream)

            async def purged() -> bool:
                return (await former()).messages == 0

            await until(purged, ANSWER_S, "the former stream is empty")


async def test_a_tenant_for_whose_queue_there_is_no_room_stops_nobody_elses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Under a leader and at its start; once there is room, the tenant has its queue."""
    monkeypatch.setattr(queue_reader, "SWEEP_EVERY_S", 0.1)
    ensure, full = JetStream.ensure_stream_with_room, SUBJECTS.request_stream_of("acme")
    is_full = True

    async def with_room(self: JetStream, config: dict[str, Any], *rest: Any, **more: Any) -> Any:
        if is_full and config["name"] == full:
            raise JetStreamRefused(f"create stream {full}", 500, 10047, "insufficient storage resources available")
        return await ensure(self, config, *rest, **more)

    monkeypatch.setattr(JetStream, "ensure_stream_with_room", with_room)
    async with (
        running() as site,
        await site.connect("submitter.acme") as acme,
        await site.connect("submitter.beta") as beta,
        leads(site) as scheduler,
    ):
        js = JetStream(scheduler.world)
        assert "error" not in await publish(beta, "beta", "b1")
        await until(lambda: state_of(scheduler).job("beta", "b1"), what="beta's job")
        await until(lambda: "tenant acme has no durable queue now" in caplog.text, what="the log says it")
        assert caplog.text.count("tenant acme has no durable queue now") == 1
        await until(lambda: info_of(js, f"OBJ_{SUBJECTS.files_bucket('beta')}"), what="the buckets are made")
        is_full = False
        await until(lambda: info_of(js, full), what="acme's queue")
        assert "error" not in await publish(acme, "acme", "a1")
        await until(lambda: state_of(scheduler).job("acme", "a1"), what="acme's job")


async def test_a_restore_goes_by_each_tenants_own_stream(nats_server: Server, unique: str) -> None:
    """Its own one may be read on; another one that is empty is made anew behind the cursors, and a full one refused."""
    subjects, state = Subjects(unique), State()
    for tenant in ("acme", "beta"):
        row = state.tenants[tenant] = Tenant(tenant)
        row.submit_cursor = 2
    async with await connect(nats_server.url, "test") as users:
        js = JetStream(users)
        for tenant in ("acme", "beta"):
            await js.ensure_stream(stream_config(subjects, 1, tenant) | {"max_bytes": BYTES_MIN})
        for _ in range(2):
            await js.append(subjects.request("acme", "submit"), b"{}")
        own = frozenset({"acme", "beta"})
        assert await _check_queue(js, subjects, state, own) == (0, [subjects.request_stream_of("beta")])
        await js.append(subjects.request("beta", "submit"), b"{}")
        with pytest.raises(BackupRefused, match=f"{subjects.request_stream_of('beta')} ends at 1"):
            await _check_queue(js, subjects, state, own)
        state.tenants["gone"] = Tenant("gone")
        state.tenants["gone"].cancel_cursor = 7
        row.submit_cursor = 1
        assert await _check_queue(js, subjects, state, own) == (0, []), "no stream for all beside those"
