"""Every role on every subject of the table, publishing, hearing and asking, on the real server.

The table here is written by hand from the contract, not read from the code that makes the configuration.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import pytest

from moorage.bus.connection import Connection
from moorage.bus.errors import BusError, JetStreamRefused, NoResponders, PermissionRefused
from moorage.bus.jetstream import JetStream
from moorage.bus.link import OnError
from moorage.bus.object_store import ObjectStore, files_store, schedules_store
from moorage.bus.passed_on import through_schedulers
from moorage.bus.results import ResultStore
from moorage.bus.transport import Delivery
from moorage.scheduler.buckets.passing import passing
from moorage.schemas.handler import Result, line_of
from moorage.schemas.operate import ADMIN_VERBS
from moorage.schemas.roles import inbox
from moorage.schemas.subjects import API_VERBS, Subjects
from tests.sites import RunningSite, allows_all, running, settled
from tests.waiting import until

USERS: Final = "MOORAGE"
LEDGER: Final = "MOORAGE_LEDGER"
#: short names of the identities that act in the matrix
WHO: Final = {
    "acme": "submitter.acme",
    "beta": "submitter.beta",
    "w1": "worker.w1",
    "w2": "worker.w2",
    "sched": "scheduler.main",
    "ana": "operator.ana",
    "graf": "observer.graf",
}
#: the layouts: settings of the site, and whether submitters have the durable queue
LAYOUTS: Final[dict[str, tuple[dict[str, Any], bool]]] = {
    "account-per-tenant": ({"results": False}, True),
    "shared-account": ({"shared": True}, False),
    "cluster": ({"servers": 3, "results": False}, False),
    "cluster-shared": ({"servers": 3, "shared": True}, False),
}


class Row(NamedTuple):
    """Who may publish to a subject, and who may hear it; the names of `WHO`."""

    subject: str
    writes: str = ""
    hears: str = ""


def rows(queue: bool) -> Iterable[Row]:
    """The contract's table, with two tenants and two workers in it, and what nobody may touch."""
    for tenant, other in (("acme", "beta"), ("beta", "acme")):
        assert other in WHO
        for verb in (*API_VERBS, "nonsense"):
            reading = " ana" if verb in ("show", "ls", "explain", "history", "usage") else ""
            writes = "" if verb == "exec" else f"{tenant}{reading}"  # a right of its own: test_exec_rights.py
            yield Row(f"moorage.api.{tenant}.{verb}", writes, "sched")
        for verb in ("submit", "cancel"):
            yield Row(f"moorage.request.{tenant}.{verb}", tenant if queue else "", "sched")
        yield Row(f"moorage.request.{tenant}.other", "", "sched")
        yield Row(f"moorage.events.{tenant}", "sched", f"{tenant} ana")
        yield Row(f"moorage.event.{tenant}.job-1", "sched", f"{tenant} ana")
        yield Row(f"moorage.history.{tenant}", "sched", "sched ana")
        yield Row(f"moorage.log.{tenant}.job-1.0", "w1 w2", tenant)
        yield Row(f"moorage.dlq.{tenant}", "sched", "ana")
        for worker in ("w1", "w2"):
            yield Row(f"moorage.tty.{tenant}.{worker}.5e55.in", "", worker)
            yield Row(f"moorage.tty.{tenant}.{worker}.5e55.out", worker, "")
    for worker, other in (("w1", "w2"), ("w2", "w1")):
        assert other in WHO
        for said in ("hello", "load"):
            yield Row(f"moorage.{said}.{worker}", worker, "sched graf ana")
        for verb in ("join", "renew", "fact", "looked"):
            yield Row(f"moorage.worker.{worker}.{verb}", worker, "sched")
        for verb in ("wanted", "logs"):
            yield Row(f"moorage.worker.{worker}.{verb}", "sched", worker)
    for verb in (*ADMIN_VERBS, "nonsense"):
        yield Row(f"moorage.admin.ana.{verb}", "ana", "sched")
        for other in (".ben", "._"):  # another operator's name, and none
            yield Row(f"moorage.admin{other}.{verb}", "", "sched")
    yield Row("moorage.events._fleet", "sched", "ana")
    yield Row("moorage.fleet.frame", "sched", "graf ana")
    yield Row("moorage.fleet.detail", "sched", "ana")
    yield Row("moorage.fleet.rollcall", "sched", "w1 w2")
    yield Row("moorage.fleet.look", "sched", "w1 w2")
    yield Row("moorage.fleet.maystore", "sched", "sched")
    for name in ("ledger.record", "ledger.epoch", "ledger.snapshot", "snapshot.1", "other", "api", "api.acme"):
        yield Row(f"moorage.{name}")
    for stream in ("MOORAGE_REQUEST", "MOORAGE_DLQ", "MOORAGE_HISTORY"):
        for verb in ("CREATE", "UPDATE", "INFO", "PURGE", "MSG.GET", "MSG.DELETE"):
            yield Row(f"$JS.API.STREAM.{verb}.{stream}", "sched")
        yield Row(f"$JS.API.DIRECT.GET.{stream}", "sched")
        for verb in ("DELETE", "SNAPSHOT", "RESTORE", "LEADER.STEPDOWN", "PEER.REMOVE"):
            yield Row(f"$JS.API.STREAM.{verb}.{stream}")
        yield Row(f"$JS.API.CONSUMER.CREATE.{stream}")
        yield Row(f"$JS.API.DIRECT.GET.{stream}.moorage.history.acme")
    for stream in ("MOORAGE_LEDGER", "MOORAGE_SNAPSHOT", "OBJ_MOORAGE_RESULT_acme"):
        for verb in ("CREATE", "INFO", "PURGE", "MSG.GET", "DELETE"):
            yield Row(f"$JS.API.STREAM.{verb}.{stream}")
        yield Row(f"$JS.API.DIRECT.GET.{stream}")
    for subject in (
        "$JS.API.INFO",
        "$JS.API.STREAM.NAMES",
        "$JS.API.STREAM.LIST",
        "$JS.ACK.MOORAGE_REQUEST.c.1.1.1.1.1",
    ):
        yield Row(subject)
    yield Row("$O.MOORAGE_RESULT_acme.C.x")
    yield Row("$KV.bucket.key")
    yield Row("$SYS.REQ.SERVER.PING")
    yield Row("$SYS.ACCOUNT.MOORAGE.CONNECT")
    for verb in ("PING", "INFO", "STATS"):
        for behind in ("", ".moorage", ".moorage.abc"):
            yield Row(f"$SRV.{verb}{behind}", "ana", "sched")
    yield Row("$SRV.PING.other")
    for name, key in WHO.items():
        role, _, own = key.partition(".")
        yield Row(f"_INBOX.{role}.{own}.x.1", "sched", name)
    yield Row("_INBOX.x.1", "sched")


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_every_role_on_every_subject(layout: str) -> None:
    settings, queue = LAYOUTS[layout]
    table = list(rows(queue))
    assert len({row.subject for row in table}) == len(table)
    async with running(**settings) as site, contextlib.AsyncExitStack() as open_ones:
        users, heard = await _witnesses(site, open_ones)
        refused: dict[str, set[str]] = defaultdict(set)
        acting: dict[str, Connection] = {}
        for name, key in WHO.items():
            acting[name] = await open_ones.enter_async_context(await site.connect(key, on_error=_noting(refused, name)))
        wrong: list[str] = []
        for name, connection in acting.items():
            wrong += await _publishing(name, connection, table, users, heard, refused[name])
            wrong += await _hearing(name, connection, table, users)
            wrong += await _asking(name, connection, table, users)
        assert not wrong, "\n".join(wrong)
        cells = len(acting) * len(table) * 3
        print(f"{layout}: {cells} cells")


def _noting(refused: dict[str, set[str]], name: str) -> OnError:
    def on_error(error: BusError) -> None:
        if isinstance(error, PermissionRefused) and error.operation == "publish":
            refused[name].add(error.subject)

    return on_error


async def _witnesses(
    site: RunningSite, open_ones: contextlib.AsyncExitStack
) -> tuple[Connection, dict[bytes, set[str]]]:
    """The users' witness, and what arrives anywhere but in a tenant's own account: subjects by payload."""
    heard: dict[bytes, set[str]] = defaultdict(set)
    found: dict[str, Connection] = {}
    for account in (USERS, LEDGER):
        witness = found[account] = await open_ones.enter_async_context(await site.witness(account))
        await witness.subscribe(">", lambda delivery: heard[delivery.data].add(delivery.subject))
    return found[USERS], heard


async def _publishing(
    name: str,
    connection: Connection,
    table: list[Row],
    users: Connection,
    heard: dict[bytes, set[str]],
    refused: set[str],
) -> list[str]:
    """Each publish that is allowed arrives, each other is refused and arrives nowhere."""
    payloads = {row.subject: f"{name} says {row.subject}".encode() for row in table}
    allowed = {row.subject for row in table if name in row.writes.split()}
    for subject, payload in payloads.items():
        await connection.send([(subject, payload, "")])
    await settled(connection)
    with contextlib.suppress(AssertionError):
        await until(lambda: all(subject in heard[payloads[subject]] for subject in allowed))
    # behind everything that was let through, on the way that it would have taken
    end = f"{name} is done".encode()
    await users.send([("moorage.end", end, "")])
    await until(lambda: heard[end])
    wrong = []
    for subject, payload in payloads.items():
        arrived, told = subject in heard[payload], subject.lower() in refused
        if (arrived, told) != (subject in allowed, subject not in allowed):
            wrong.append(f"{name} publishes {subject}: arrived {arrived}, refused {told}")
    return wrong


async def _hearing(name: str, connection: Connection, table: list[Row], users: Connection) -> list[str]:
    """Each subscription that is allowed hears what is said in the users' account, each other is refused."""
    got: set[bytes] = set()
    refused: set[str] = set()
    opened = []

    async def subscribe(subject: str) -> None:
        try:
            opened.append(await connection.subscribe(subject, lambda delivery: got.add(delivery.data)))
        except PermissionRefused:
            refused.add(subject)

    for row in table:
        await subscribe(row.subject)
    await settled(users, connection)
    payloads = {row.subject: f"{name} hears {row.subject}".encode() for row in table}
    for subject, payload in payloads.items():
        if not subject.startswith("$"):  # those are the server's own to hear
            await users.send([(subject, payload, "")])
    await settled(users, connection)
    allowed = {row.subject for row in table if name in row.hears.split()}
    audible = {subject for subject in allowed if not subject.startswith(("$", "_INBOX.submitter"))}
    with contextlib.suppress(AssertionError):
        await until(lambda: all(payloads[subject] in got for subject in audible))
    for each in opened:
        await each.unsubscribe()
    wrong = []
    for subject, payload in payloads.items():
        if (subject in refused) == (subject in allowed):
            wrong.append(f"{name} subscribes to {subject}: refused {subject in refused}")
        if payload in got and subject not in allowed:
            wrong.append(f"{name} heard {subject}")
        if payload not in got and subject in audible:
            wrong.append(f"{name} did not hear {subject}")
    # nor by a wildcard that holds more than its own
    for wide in (">", "moorage.>", "moorage.*.*", "_INBOX.>", "_INBOX.*.*.>", "moorage.worker.>", "$JS.>", "$SYS.>"):
        try:
            await (await connection.subscribe(wide, lambda _: None)).unsubscribe()
            wrong.append(f"{name} subscribes to {wide}")
        except PermissionRefused:
            pass
    return wrong


async def _asking(name: str, connection: Connection, table: list[Row], users: Connection) -> list[str]:
    """Each question that may be asked is answered in the asker's own inbox; any other is refused at once."""
    allowed = {row.subject for row in table if name in row.writes.split()}

    def answer(delivery: Delivery) -> None:
        if delivery.reply:
            asyncio.get_running_loop().create_task(users.send([(delivery.reply, b"answer", "")]))

    serving = [await users.subscribe("moorage.>", answer), await users.subscribe("_INBOX.*.*.x.*", answer)]
    serving.append(await users.subscribe("$SRV.>", answer))
    await settled(users)
    wrong = []

    async def ask(row: Row) -> None:
        try:
            await connection.request(row.subject, b"?", 60.0)
        except PermissionRefused:
            if row.subject in allowed:
                wrong.append(f"{name} may not ask {row.subject}")
            return
        except NoResponders:
            pass
        except BusError as error:
            wrong.append(f"{name} asks {row.subject}: {error!r}")
        if row.subject not in allowed:
            wrong.append(f"{name} asks {row.subject}, and may")

    # what the server itself would answer on is asked elsewhere
    await asyncio.gather(*(ask(row) for row in table if not row.subject.startswith(("$JS", "_INBOX.x"))))
    for each in serving:
        await each.unsubscribe()
    return wrong


async def test_a_worker_answers_once_and_only_who_asked() -> None:
    async with (
        running() as site,
        await site.connect("scheduler.main") as scheduler,
        await site.connect("worker.w1") as worker,
    ):
        got: list[Delivery] = []
        asked: list[Delivery] = []
        await scheduler.subscribe(f"{inbox('scheduler', 'main')}.test.*", got.append)
        await worker.subscribe("moorage.worker.w1.logs", asked.append)
        reply = f"{inbox('scheduler', 'main')}.test.1"
        await worker.send([(reply, b"unasked", "")])
        await settled(worker, scheduler)
        await scheduler.send([("moorage.worker.w1.logs", b"?", reply)])
        await until(lambda: asked)
        await worker.send([(reply, b"first", ""), (reply, b"second", "")])
        await settled(worker, scheduler)
        assert [delivery.data for delivery in got] == [b"first"]


async def test_the_queue_and_its_acknowledgement_cross_accounts_and_nothing_else_does() -> None:
    """What is published with the server's word, and whose subject that word reaches: the publisher's own account."""
    async with (
        running() as site,
        await site.witness(USERS) as users,
        await site.witness("MOORAGE_TENANT_acme") as own,
        await site.connect("submitter.acme") as acme,
    ):
        await JetStream(users).ensure_stream({"name": "MOORAGE_REQUEST", "subjects": [Subjects().request_all]})
        subject = Subjects().request("acme", "submit")
        heard_by_users: list[Delivery] = []
        heard_by_own: list[Delivery] = []
        answer = await acme.request(subject, b"{}", 5.0)
        assert b'"seq":1' in answer.data.replace(b" ", b"")
        for target in (
            "moorage.worker.w1.wanted",
            "moorage.admin.ana.drain",
            "moorage.ledger.record",
            "moorage.dlq.beta",
        ):
            await users.subscribe(target, heard_by_users.append)
            await own.subscribe(target, heard_by_own.append)
            await settled(users, own)
            await acme.send([(subject, b"{}", target)])
        await until(lambda: len(heard_by_own) == 4, what="the acknowledgements in the tenant's own account")
        await settled(users)
        assert heard_by_users == []


@pytest.mark.slow
async def test_files_of_jobs_pass_between_a_tenant_and_the_workers_alone() -> None:
    """Over accounts; another tenant reads none of them, and neither side makes or empties a stream."""
    bucket, data = Subjects().files_bucket("acme"), os.urandom(700_000)

    def store(connection: Connection) -> ObjectStore:
        asked = through_schedulers(connection, "moorage")
        return files_store(JetStream(asked, connection.context.api_prefix), Subjects(), "acme")

    async with (
        running() as site,
        await site.connect("scheduler.main") as scheduler,
        await site.connect("worker.w1") as worker,
        await site.connect("submitter.acme") as acme,
        await site.connect("submitter.beta") as beta,
        passing(scheduler, scheduler, Subjects()),
    ):
        await allows_all(scheduler)
        with pytest.raises(BusError):
            await store(acme).put("x", [data], {}, lambda _: None)
        stream = {"name": f"OBJ_{bucket}", "subjects": [f"$O.{bucket}.>"]}
        await JetStream(scheduler).ensure_stream({**stream, "allow_direct": True, "allow_rollup_hdrs": True})
        for writer, reader, name in ((acme, worker, "code"), (worker, acme, "kept")):
            await store(writer).put(name, [data], {}, lambda _: None)
            info = await store(reader).find(name)
            assert info is not None
            assert b"".join([piece async for piece in store(reader).get(info)]) == data
        with pytest.raises(PermissionRefused):
            await store(beta).find("code")
        with pytest.raises(PermissionRefused):
            await store(beta).put("code", [data], {}, lambda _: None)
        for denied in (worker, acme):
            with pytest.raises(BusError):
                await JetStream(denied, denied.context.api_prefix).purge(f"OBJ_{bucket}")
        assert await store(worker).find("code") is not None
        info = await store(worker).find("kept")
        assert info is not None
        await store(worker).forget(store(worker).subject(info.nuid))
        assert await store(worker).find("kept") is None
        state = await JetStream(scheduler).stream_info(f"OBJ_{bucket}")
        assert state.size_bytes < 2 * len(data), "its pieces make room"


@pytest.mark.slow
async def test_a_tenant_makes_room_in_a_bucket_of_schedules_that_is_full() -> None:
    """It refuses new messages, so also those that take the place of older ones; another tenant empties nothing."""
    bucket = Subjects().schedules_bucket("acme")

    def store(connection: Connection) -> ObjectStore:
        return schedules_store(JetStream(connection, connection.context.api_prefix), Subjects(), "acme")

    async with (
        running() as site,
        await site.connect("scheduler.main") as scheduler,
        await site.connect("submitter.acme") as acme,
        await site.connect("submitter.beta") as beta,
    ):
        await store(scheduler).make_of(64 * 1024)
        with contextlib.suppress(JetStreamRefused):
            for number in itertools.count():
                await store(acme).put(f"files-{number}", [b"x" * 9_000], {}, lambda _: None)
        with contextlib.suppress(JetStreamRefused):
            while True:  # until not even an empty message has room
                await store(acme).append(store(acme).subject("rest"), b"")
        info = await store(acme).find("files-0")
        assert info is not None
        pieces = store(acme).subject(info.nuid)
        await store(beta).forget(pieces)
        assert await store(acme).find("files-0") is not None
        await store(acme).forget(pieces)
        assert await store(acme).find("files-0") is None
        await store(acme).put("files-new", [b"x" * 8_000], {}, lambda _: None)
        assert (await JetStream(scheduler).stream_info(f"OBJ_{bucket}")).size_bytes <= 64 * 1024


@pytest.mark.slow
async def test_results_of_functions_are_written_by_workers_and_read_by_their_tenant_alone() -> None:
    """Over accounts, in several pieces; a worker can make no stream, and nobody bends what the server answers."""
    prefix, name, result = "moorage", "train-1.0.7", Result("text/plain", b"x" * 300_000)
    async with (
        running() as site,
        await site.witness(USERS) as users,
        await site.connect("scheduler.main") as scheduler,
        await site.connect("worker.w1") as worker,
        await site.connect("submitter.acme") as acme,
        await site.connect("submitter.beta") as beta,
        passing(scheduler, scheduler, Subjects()),
    ):
        await allows_all(scheduler)
        by_worker = JetStream(through_schedulers(worker, prefix))
        with pytest.raises(BusError):
            await by_worker.ensure_stream({"name": f"OBJ_{Subjects().result_bucket('acme')}"})
        bucket = Subjects().result_bucket("acme")
        stream = {"name": f"OBJ_{bucket}", "subjects": [f"$O.{bucket}.>"]}
        config = {**stream, "allow_direct": True, "allow_rollup_hdrs": True}
        await JetStream(scheduler).ensure_stream(config)
        await ResultStore(by_worker, prefix).put("acme", name, result)
        found = await ResultStore(JetStream(acme, acme.context.api_prefix), prefix).get("acme", name)
        assert found == result
        small = Result("application/json", b"[1]")
        seq = await ResultStore(by_worker, prefix).put_together("acme", [line_of(name, small)])
        assert await ResultStore(JetStream(acme, acme.context.api_prefix), prefix).get("acme", name, seq) == small
        with pytest.raises(PermissionRefused):
            await ResultStore(JetStream(beta, beta.context.api_prefix), prefix).get("acme", name)
        with pytest.raises(PermissionRefused):
            await ResultStore(JetStream(beta, beta.context.api_prefix), prefix).get("acme", name, seq)
        with pytest.raises(PermissionRefused):  # tenants read what workers write
            await ResultStore(JetStream(acme), prefix).put_together("acme", [line_of(name, small)])
        # a direct get answers with bytes that the function chose: not on a subject of the users' account
        heard: list[Delivery] = []
        for target in ("moorage.admin.ana.drain", "moorage.worker.w1.wanted"):
            await users.subscribe(target, heard.append)
            await acme.send([(f"{acme.context.api_prefix}.DIRECT.GET.OBJ_{bucket}", b'{"seq":1}', target)])
            await acme.send([(f"{acme.context.api_prefix}.STREAM.MSG.GET.OBJ_{bucket}", b'{"seq":1}', target)])
        await settled(acme, users)
        assert (
            await ResultStore(JetStream(acme, acme.context.api_prefix), prefix).get("acme", name) == result
        )  # answered behind them
        await settled(users)
        assert heard == []
