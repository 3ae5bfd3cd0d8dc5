"""What nats-server itself answers, it answers on whatever subject the asker names: in the users' account, on none but
the asker's own inbox.

Tried for every role, in every layout, directly and through a leaf node: with every verb of JetStream's API on every
stream of a site, every object, what discovery and the system answer, and whatever of that the product lists as a right.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from moorage.bus import jetstream as jetstream_module
from moorage.bus import passed_on as passed_on_module
from moorage.bus.connection import Connection, connect
from moorage.bus.contexts import Context
from moorage.bus.embedded import find_binary
from moorage.bus.errors import BusError, PermissionRefused
from moorage.bus.jetstream import JetStream
from moorage.bus.object_store import ObjectStore, checkpoints_store, files_store, schedules_store
from moorage.bus.passed_on import through_schedulers
from moorage.bus.results import ResultStore, results_bucket
from moorage.bus.server_users import RIGHTS, SYSTEM, connections
from moorage.bus.site import LEAVES_BEHIND, Identity, Server, Site
from moorage.bus.transport import Delivery
from moorage.scheduler.buckets import passing as passing_module
from moorage.scheduler.buckets.passing import passing
from moorage.schemas.handler import Result
from moorage.schemas.roles import inbox
from moorage.schemas.subjects import Subjects
from tests.jwt_sites import running_jwt
from tests.leftover import ends_with_the_test
from tests.ports import free_ports
from tests.sites import RunningSite, allows_all, running, settled
from tests.waiting import until

USERS: Final = "MOORAGE"
LAYOUTS: Final[dict[str, dict[str, Any]]] = {
    "account-per-tenant": {},
    "shared-account": {"shared": True, "persons": ()},
    "shared-commands": {"shared": True, "persons": (), "execs": ("acme",)},
    "commands": {"execs": ("acme",)},
    "two-places": {"leaves": {"far": Server("127.0.0.1", 7499)}, "behind": {"w2": "far"}},
    "some-tenants": {"serves": {"w1": ("acme",)}},
    "without-buckets": {"results": False},
    "cluster": {"servers": 3},
    "cluster-shared": {"servers": 3, "shared": True, "persons": ()},
    "cluster-without-buckets": {"servers": 3, "results": False},
    "jwt": {"persons": ()},
    "jwt-shared": {"shared": True, "persons": ()},
}
#: everybody but the tenants, workers, operators and observers of each site
OTHERS: Final[dict[str, Any]] = {"callers": ("acme.door",), "persons": ("acme.lena",), "pools": {"spot": 1}}
#: by role: what the owner of a key may say, given the tenant or else the name, so that it is heard behind all questions
LAST: Final = {
    "submitter": "moorage.api.{}.ls",
    "service": "moorage.calls.{}.s.load",
    "caller": "moorage.api.{}.services",
    "worker": "moorage.load.{}",
    "operator": "moorage.admin.{}.fleet",
    "pool": "moorage.join.{}",
    "joiner": "moorage.admin.joiner.admit",
}
#: by kind of bucket
BUCKETS: Final = ("FILES", "RESULT", "SCHEDULES", "CHECKPOINTS")
TENANTS: Final = ("acme", "beta")
SUBJECTS: Final = Subjects()
#: what each question says: harmless, and enough for an answer
FIRST: Final = b'{"seq":1}'
#: subjects on which no asker may publish, nor hear
REPLIES: Final = ("elsewhere.1", "moorage.admin.ben.nonsense", f"{inbox('worker', 'other')}.x.1")


def streams() -> list[str]:
    found = ["MOORAGE_REQUEST", "MOORAGE_REQUEST_acme", "MOORAGE_DLQ", "MOORAGE_HISTORY", "MOORAGE_LEDGER"]
    return found + [f"OBJ_MOORAGE_{kind}_{tenant}" for kind in BUCKETS for tenant in TENANTS]


def questions() -> list[str]:
    """What a server of JetStream answers, one way or the other."""
    found = ["$JS.API.INFO", "$JS.API.STREAM.NAMES", "$JS.API.STREAM.LIST"]
    for stream in streams():
        found += [f"$JS.API.STREAM.{verb}.{stream}" for verb in ("INFO", "MSG.GET")]
        found += [f"$JS.API.DIRECT.GET.{stream}", f"$JS.API.DIRECT.GET.{stream}.moorage.history.acme"]
        found += [f"$JS.API.CONSUMER.{verb}.{stream}" for verb in ("NAMES", "LIST", "CREATE")]
        found += [f"$JS.API.CONSUMER.{verb}.{stream}.c" for verb in ("CREATE", "INFO", "MSG.NEXT", "DELETE")]
    for kind in BUCKETS:
        for tenant in TENANTS:
            found += [f"$O.MOORAGE_{kind}_{tenant}.{part}.x" for part in "CM"]
    found += [f"$SRV.{verb}" for verb in ("PING", "INFO", "STATS")]
    found += ["$SYS.REQ.USER.INFO", "$SYS.REQ.SERVER.PING", "$SYS.REQ.ACCOUNT.PING"]
    found += ["moorage.request.acme.submit", "moorage.request.acme.cancel"]
    return found


def passed_on(worker: str) -> list[str]:
    """The same, as workers have schedulers ask it, and what no scheduler may ask for them."""
    head = f"moorage.worker.{worker}"
    found = [f"{head}.fetch.{each.removeprefix('$JS.API.')}" for each in questions() if each.startswith("$JS.API.")]
    for verb in ("store", "result"):
        found += [f"{head}.{verb}.{each.removeprefix('$O.')}" for each in questions() if each.startswith("$O.")]
    return found


def asked_by(site: Site, who: Identity) -> list[str]:
    """What one user asks: all of it, as it has no right to most."""
    may = site.rights_of(who)
    assert may is not None
    rights = [each.replace("*", "x").replace(">", "x") for each in may.publish if each.startswith("$")]
    workers = [each.name for each in site.users_behind(who) if each.role == "worker"] if who.role == "leaf" else []
    workers += [who.name] if who.role == "worker" else []
    return [*questions(), *rights, *(subject for worker in workers for subject in passed_on(worker))]


def may_not_ask(site: Site) -> list[Identity]:
    return [each for each in site.identities if each.role not in ("scheduler", "ledger")]


async def made(users: Connection, replicas: int) -> None:
    """Streams as schedulers make them, each with a message."""
    jetstream = JetStream(users)
    for name, subjects in (("HISTORY", ["moorage.history.*"]), ("REQUEST_acme", ["moorage.request.acme.>"])):
        await jetstream.ensure_stream({"name": f"MOORAGE_{name}", "subjects": subjects, "allow_direct": True})
    await jetstream.append("moorage.history.acme", b"first")
    for tenant in TENANTS:
        for store in buckets(jetstream, tenant, replicas):
            await store.make_of(64 << 20)
            await store.append(store.subject("x"), b"first")


def buckets(jetstream: JetStream, tenant: str, replicas: int = 1) -> list[ObjectStore]:
    made_of = [store_of(jetstream, SUBJECTS, tenant, replicas) for store_of in (files_store, checkpoints_store)]
    made_of.append(schedules_store(jetstream, SUBJECTS, tenant, replicas))
    return [*made_of, results_bucket(jetstream, "moorage", tenant, replicas=replicas)]


@contextlib.asynccontextmanager
async def passing_site(*, jwt: bool = False, **settings: Any) -> AsyncIterator[tuple[RunningSite, Connection]]:
    """A site with streams, whose scheduler passes on what workers ask, and the witness in the users' account."""
    async with (
        running_jwt(**settings) if jwt else running(**settings) as site,
        await site.witness(USERS) as users,
        await site.connect("scheduler.main") as scheduler,
    ):
        await made(users, settings.get("servers", 1))
        await allows_all(scheduler)
        async with passing(scheduler, scheduler, SUBJECTS):
            yield site, users


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_no_answer_of_the_server_reaches_a_subject_that_is_not_the_askers(layout: str) -> None:
    settings = {**OTHERS, "jwt": layout.startswith("jwt"), **LAYOUTS[layout]}
    async with passing_site(**settings) as (site, users), contextlib.AsyncExitStack() as opened:
        heard: list[Delivery] = []
        for reply in REPLIES:
            await users.subscribe(reply, heard.append)
        end = await users.subscribe("end.*", heard.append)
        await settled(users)
        asked = 0
        for identity in may_not_ask(site.site):
            if identity.role == "leaf":  # no client connects with its key: see below
                continue
            user = await opened.enter_async_context(await site.connect(identity.key, on_error=lambda _: None))
            for subject in asked_by(site.site, identity):
                await user.send([(subject, FIRST, reply) for reply in REPLIES])
                asked += len(REPLIES)
            await settled(user)
        # behind all that was passed on or answered
        scheduler = await opened.enter_async_context(await site.connect("scheduler.main"))
        with contextlib.suppress(BusError):
            await scheduler.request("$JS.API.STREAM.INFO.MOORAGE_HISTORY", b"", 5.0)
        await settled(scheduler, users)
        await users.send([("end.1", b"", "")])
        await until(lambda: any(each.subject == "end.1" for each in heard))
        assert end.subject == "end.*"
        assert [(each.subject, each.data[:80]) for each in heard if not each.subject.startswith("end.")] == []
        assert asked > 1_000


#: what nobody but a scheduler hears, in whatever account it is said
SECRET: Final = (
    "moorage.api.acme.ls", "moorage.admin.ben.fleet", "moorage.worker.other.wanted", "moorage.ledger.record",
    "_INBOX.scheduler.main.x", "_INBOX.worker.other.x", "$O.MOORAGE_FILES_acme.C.x", "$JS.API.INFO", "_R_.x",
)  # fmt: skip


async def heard_by(client: Connection, site: RunningSite, account: str) -> set[str]:
    """Return what of `SECRET`, said in an account, a client hears that asks for all of it."""
    heard: list[Delivery] = []
    mine = f"{client.inbox_prefix}.of-a-leaf.x"
    for subject in (*SECRET, ">", mine):
        await client.subscribe(subject, heard.append)
    async with await site.witness(account) as witness:

        async def is_told() -> bool:
            await witness.send([(subject, b"secret", "") for subject in (*SECRET, mine)])
            await settled(witness, client)
            return any(each.subject == mine for each in heard)

        await until(is_told, what="its own inbox hears")
        await is_told()
    return {each.subject for each in heard if each.data == b"secret"} - {mine}


@contextlib.asynccontextmanager
async def leaf_of(site: RunningSite, who: Identity, port: int, folder: Path) -> AsyncIterator[Connection]:
    """A client without a key of a server that connects with a user's, as a leaf node, to a port of the site."""
    [own], key = free_ports(1), who.key
    seed = (site.folder / "keys" / f"{key}.nk").read_text().strip()
    configuration, log = folder / f"{key}.conf", folder / f"{key}.log"
    configuration.write_text(
        f'server_name: "leaf-{key}"\nlisten: "127.0.0.1:{own}"\n'
        f'leafnodes {{ remotes: [ {{ url: "nats-leaf://127.0.0.1:{port}", nkey: $LEAF_KEY }} ] }}\n'
    )
    with log.open("wb") as out:
        configured = (find_binary(), "-c", str(configuration))
        environment = {**os.environ, "LEAF_KEY": seed}
        server = ends_with_the_test(
            await asyncio.create_subprocess_exec(*configured, stdout=out, stderr=out, env=environment)
        )
    try:
        await until(lambda: "Leafnode connection created" in log.read_text(), what=f"the leaf node of {key}")
        of = site.site.users_behind(who)[0] if who.role == "leaf" else who
        prefix = site.context(of.key).inbox_prefix
        context = Context(url=f"nats://127.0.0.1:{own}", source="test")
        async with await connect(context, "leaf", inbox_prefix=prefix, on_error=lambda _: None) as client:
            yield client
    finally:
        server.terminate()
        await server.wait()


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["account-per-tenant", "shared-account", "cluster", "cluster-shared", "two-places"])
async def test_nor_does_one_through_a_leaf_node(layout: str, tmp_path: Path) -> None:
    """Whose server connects with somebody's key, while its clients have none."""
    [port] = free_ports(1)
    is_own = "leaves" in LAYOUTS[layout]  # it has a port for leaf nodes
    async with passing_site(leaf_port=0 if is_own else port, **{**OTHERS, **LAYOUTS[layout]}) as (site, users):
        if is_own:
            port = site.site.servers[0].port + LEAVES_BEHIND
        heard: list[Delivery] = []
        for reply in REPLIES:
            await users.subscribe(reply, heard.append)
        last: list[Delivery] = []
        await settled(users)
        for identity in may_not_ask(site.site):
            of = site.site.users_behind(identity)[0] if identity.role == "leaf" else identity
            end = LAST.get(of.role, "").format(of.tenant or of.name)
            if end:
                await users.subscribe(end, last.append)

            async def arrives(client: Connection, words: bytes, end: str = end) -> bool:
                await client.send([(end, words, "")] if end else [])
                await settled(client)
                return not end or any((each.subject, each.data) == (end, words) for each in last)

            async with leaf_of(site, identity, port, tmp_path) as client:
                # until its server knows who hears what
                await until(partial(arrives, client, b"first"), what=f"the first of {identity.key}")
                for subject in asked_by(site.site, identity):
                    await client.send([(subject, FIRST, reply) for reply in REPLIES])
                await until(partial(arrives, client, b"last"), what=f"the last of {identity.key}")
                assert await heard_by(client, site, site.site.account_of(identity)) == set(), identity.key
                if identity.role == "worker" and site.site.has_buckets:  # its own question arrives
                    mine = files_store(JetStream(through_schedulers(client, "moorage")), SUBJECTS, "acme")
                    assert await mine.find("nothing") is None
        await settled(users)
        assert [(each.subject, each.data[:80]) for each in heard] == []


@pytest.mark.parametrize("servers", [1, pytest.param(3, marks=pytest.mark.slow)])
async def test_a_worker_reads_and_writes_its_tenants_buckets_through_a_scheduler(servers: int) -> None:
    data = bytes(range(256)) * 8_000
    async with passing_site(servers=servers) as (site, users), await site.connect("worker.w1") as worker:
        by_scheduler = JetStream(through_schedulers(worker, "moorage"))
        for store_of in (files_store, checkpoints_store):
            mine = store_of(by_scheduler, SUBJECTS, "acme")
            await mine.put("code", [data], {}, lambda _: None, also="same")
            info = await mine.find("same")
            assert info is not None
            assert b"".join([piece async for piece in mine.get(info)]) == data
        room = await checkpoints_store(by_scheduler, SUBJECTS, "acme").room()
        assert room is not None
        assert 60 << 20 < room < 63 << 20
        results = ResultStore(by_scheduler, "moorage")
        await results.put("acme", "j.0.1", Result("text/plain", data))
        whole = ResultStore(JetStream(users), "moorage")
        assert await whole.get("acme", "j.0.1") == Result("text/plain", data)
        schedules = schedules_store(by_scheduler, SUBJECTS, "acme")
        assert await schedules.find("nothing") is None
        with pytest.raises(PermissionRefused):  # those of a schedule are the tenant's to write
            await schedules.append(schedules.subject("x"), b"")


@pytest.mark.parametrize("servers", [1, pytest.param(3, marks=pytest.mark.slow)])
async def test_no_answer_about_connections_leaves_the_account_of_their_reader(servers: int) -> None:
    """In the servers' own account an answer is an order, where JetStream's system API hears it."""
    orders = ("$JS.API.ACCOUNT.PURGE.MOORAGE_LEDGER", "$JS.API.META.LEADER.STEPDOWN", "moorage.api.acme.submit")
    replies = (*REPLIES, *orders, "$JS.API.STREAM.PURGE.MOORAGE_LEDGER", "$SYS.REQ.SERVER.PING.VARZ")
    async with running(servers=servers) as site, contextlib.AsyncExitStack() as opened:
        ledger = JetStream(await opened.enter_async_context(await site.connect("ledger.main")))
        await ledger.ensure_stream({"name": "MOORAGE_LEDGER", "subjects": ["ledger.*"], "num_replicas": servers})
        await ledger.append("ledger.1", b"first")
        inside: list[Delivery] = []
        outside: list[Delivery] = []
        witnesses = []
        for account in (*site.accounts, "SYS", "MOORAGE_SYSTEM"):
            witness = await opened.enter_async_context(await site.witness(account))
            for reply in replies:
                await witness.subscribe(reply, (inside if account == "MOORAGE_SYSTEM" else outside).append)
            witnesses.append(witness)
        await settled(*witnesses)
        reader = await opened.enter_async_context(await site.connect(SYSTEM))
        known, answered = await connections(reader, servers)
        assert answered == servers
        targets = ["PING", *sorted({each.server for each in known})]

        async def all_answer() -> bool:
            """Ask for each reply, again as long as a server may not know of the witnesses at the others yet."""
            for right in RIGHTS.publish:
                for target in targets:
                    await reader.send([(right.replace("*", target), b'{"cid":999999}', reply) for reply in replies])
            await settled(reader, *witnesses)
            heard = Counter(each.subject for each in inside if b'"connections"' in each.data)
            return bool(outside) or all(heard[reply] >= 2 * servers for reply in replies)

        await until(all_answer)  # each server answers for itself and for all
        _, answered = await connections(reader, servers)
        assert answered == servers
        await settled(reader, *witnesses)
        assert {each.subject for each in inside} == set(replies)
        assert [(each.subject, each.data[:80]) for each in outside] == []
        assert (await ledger.stream_info("MOORAGE_LEDGER")).messages == 1


async def test_a_worker_waits_for_a_scheduler_that_passes_on_and_stores_once() -> None:
    """The first of them takes what it is to pass on, and ends; the second comes later."""
    async with (
        running() as site,
        await site.witness(USERS) as users,
        await site.connect("scheduler.main") as first,
        await site.connect("scheduler.main") as second,
        await site.connect("worker.w1") as worker,
    ):
        await made(users, 1)
        results = ResultStore(JetStream(through_schedulers(worker, "moorage")), "moorage")
        taken: list[Delivery] = []
        lost = await first.subscribe(SUBJECTS.worker_result_all, taken.append)
        storing = asyncio.create_task(results.put_together("acme", [b'{"result":"a","value":1}']))
        await until(lambda: taken)
        await lost.unsubscribe()
        async with passing(second, second, SUBJECTS):
            # as if the first had passed it on, and the answer was lost
            passed = taken[0]
            assert passed.headers is not None
            await second.publish("$O.MOORAGE_RESULT_acme.C.together", passed.data, "_INBOX.gone", passed.headers)
            assert await storing == 2
        assert (await JetStream(users).stream_info("OBJ_MOORAGE_RESULT_acme")).messages == 2


async def test_a_worker_stores_once_a_leader_says_whose_it_is_however_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was lost after eight tries, and at once where the worker's own connection broke meanwhile."""
    monkeypatch.setattr(passing_module, "LEADER_S", 0.01)
    monkeypatch.setattr(passed_on_module, "AGAIN_S", 0.01)
    async with (
        running() as site,
        await site.witness(USERS) as users,
        await site.connect("scheduler.main") as scheduler,
        await site.connect("worker.w1") as worker,
    ):
        await made(users, 1)
        asked: list[Delivery] = []
        silent = await scheduler.subscribe(SUBJECTS.may_store, asked.append)
        async with passing(scheduler, scheduler, SUBJECTS):
            mine = files_store(JetStream(through_schedulers(worker, "moorage")), SUBJECTS, "acme")
            storing = asyncio.create_task(mine.put("kept", [b"words"], {}, lambda _: None))
            await until(lambda: len(asked) > passed_on_module.TRIES_MAX, what="it is sent again and again")
            await worker.reconnect()
            again = len(asked) + passed_on_module.TRIES_MAX
            await until(lambda: len(asked) > again, what="and when the worker is back")
            await silent.unsubscribe()
            await allows_all(scheduler)
            await storing
            info = await mine.find("kept")
            assert info is not None
            assert b"".join([piece async for piece in mine.get(info)]) == b"words"
            assert (await JetStream(users).stream_info("OBJ_MOORAGE_FILES_acme")).messages == 1 + 2, "each once"


async def test_a_worker_asks_again_if_what_it_reads_breaks_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where many fetched at once, some waited longer than they had patience, or were cut off, and their jobs failed."""
    monkeypatch.setattr(passed_on_module, "BATCH_S", 0.2)
    monkeypatch.setattr(passed_on_module, "BUSY_S", 0.01)
    monkeypatch.setattr(jetstream_module, "BATCH_IDLE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(passed_on_module, "READS_MAX", 100)
    async with (
        running() as site,
        await site.witness(USERS) as users,
        await site.connect("scheduler.main") as scheduler,
        await site.connect("worker.w1") as worker,
    ):
        await made(users, 1)
        await files_store(JetStream(users), SUBJECTS, "acme").put("kept", [b"words"], {}, lambda _: None)
        mine = files_store(JetStream(through_schedulers(worker, "moorage")), SUBJECTS, "acme")
        async with passing(scheduler, scheduler, SUBJECTS):
            info = await mine.find("kept")
            assert info is not None

        async def content() -> bytes:
            return b"".join([piece async for piece in mine.get(info)])

        asked: list[Delivery] = []
        silent = await scheduler.subscribe(SUBJECTS.worker_fetch_all, asked.append)
        reading = asyncio.create_task(content())
        await until(lambda: len(asked) > 1, what="it asks again")
        await worker.reconnect()
        again = len(asked) + 1
        await until(lambda: len(asked) > again, what="and when the worker is back")
        async with passing(scheduler, scheduler, SUBJECTS):
            await silent.unsubscribe()
            assert await reading == b"words"


async def test_no_piece_of_an_object_passes_another_one_on_its_way() -> None:
    """Several schedulers take them: so the next is sent once the one before is stored."""
    async with (
        running() as site,
        await site.witness(USERS) as users,
        await site.connect("scheduler.main") as scheduler,
        await site.connect("worker.w1") as worker,
    ):
        await made(users, 1)
        store = files_store(JetStream(through_schedulers(worker, "moorage")), SUBJECTS, "acme")
        taken: list[Delivery] = []
        await scheduler.subscribe(SUBJECTS.worker_store_all, taken.append)
        storing = asyncio.create_task(store.put("x", [bytes(3 << 20)], {}, lambda _: None))
        passed = 0
        while not storing.done():
            await until(lambda n=passed: len(taken) > n or storing.done())
            await settled(worker, scheduler)
            assert len(taken) <= passed + 1
            for piece in taken[passed:]:
                _, _, _, _, behind = piece.subject.split(".", 4)
                await scheduler.publish(f"$O.{behind}", piece.data, piece.reply, piece.headers or {})
                passed += 1
        await storing
        assert passed > 6
        assert await files_store(JetStream(users), SUBJECTS, "acme").find("x") is not None


async def test_a_worker_may_not_empty_a_bucket_by_a_header() -> None:
    async with passing_site() as (site, users), await site.connect("worker.w1") as worker:
        stored = JetStream(users)
        before = (await stored.stream_info("OBJ_MOORAGE_FILES_acme")).messages
        for headers in ({"Nats-Rollup": "all"}, {"Nats-Rollup": "sub", "Nats-Expected-Last-Sequence": "0"}):
            with pytest.raises(BusError):
                await worker.request("moorage.worker.w1.store.MOORAGE_FILES_acme.C.x", b"", 0.5, headers)
        assert (await stored.stream_info("OBJ_MOORAGE_FILES_acme")).messages == before
        await worker.request("moorage.worker.w1.store.MOORAGE_FILES_acme.C.x", b"", 5.0, {"Nats-Rollup": "sub"})
        assert (await stored.stream_info("OBJ_MOORAGE_FILES_acme")).messages == before
        # all small results have one subject, which no header may empty either
        results = "moorage.worker.w1.result.MOORAGE_RESULT_acme.C.together"
        for number in (1, 2):
            await worker.request(results, b'{"results":[]}', 5.0)
            with pytest.raises(BusError):
                await worker.request(results, b"", 0.5, {"Nats-Rollup": "sub"})
            assert (await stored.stream_info("OBJ_MOORAGE_RESULT_acme")).messages == 1 + number
