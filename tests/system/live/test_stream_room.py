"""A nats-server with little room to reserve: streams are as large as there is room, and lose nothing for want of it."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from moorage.bus.connection import connect
from moorage.bus.embedded import ACCOUNT, ACCOUNT_LEDGER, HOST, USER_LEDGER
from moorage.bus.errors import ERR_NO_ROOM, JetStreamRefused
from moorage.bus.jetstream import Ack, JetStream
from moorage.bus.own_login import USER
from moorage.scheduler.durable import dead_letters, queue_streams, tenant_buckets
from moorage.scheduler.durable.dead_letters import DeadLetters
from moorage.scheduler.durable.queue_streams import QueueStreams
from moorage.scheduler.durable.tenant_buckets import TenantBuckets
from moorage.scheduler.ledger.one_copy import try_copies
from moorage.scheduler.main import EXIT_UNREACHABLE
from moorage.schemas.subjects import Subjects
from tests.cluster import Node
from tests.ports import free_ports
from tests.system.live.stack import caller, stack
from tests.waiting import until

MIB: Final = 1024**2
ROOM: Final = 100 * MIB
MAY_CHANGE: Final = frozenset({"max_bytes"})
_CONFIG: Final = """\
listen: "{host}:{port}"
log_file: "{folder}/server.log"
max_pending: 256MB
jetstream {{ store_dir: "{folder}/jetstream", sync_interval: always, max_file_store: {room} }}
accounts {{
  {account}: {{ jetstream: enabled, users: [ {{ user: {user}, password: "{word}" }} ] }}
  {account_ledger}: {{ jetstream: enabled, users: [ {{ user: {user_ledger}, password: "{word}" }} ] }}
}}
no_auth_user: {user}
"""


class SmallServer:
    """A server that lets its streams reserve `ROOM` bytes in all."""

    def __init__(self, folder: Path) -> None:
        self.port = free_ports(1)[0]
        self.node = Node("small", folder, self.port)
        self._word = secrets.token_hex(16)
        text = _CONFIG.format(
            host=HOST, port=self.port, folder=folder, room=ROOM, account=ACCOUNT, user=USER, word=self._word,
            account_ledger=ACCOUNT_LEDGER, user_ledger=USER_LEDGER,
        )  # fmt: skip
        (folder / "nats.conf").write_text(text)
        self.node.start()

    @property
    def url(self) -> str:
        return f"nats://{HOST}:{self.port}"

    @property
    def ledger_url(self) -> str:
        return f"nats://{USER_LEDGER}:{self._word}@{HOST}:{self.port}"


@pytest.fixture
def small(tmp_path: Path) -> Iterator[SmallServer]:
    server = SmallServer(tmp_path)
    yield server
    server.node.kill()


@asynccontextmanager
async def opened(server: SmallServer) -> AsyncIterator[JetStream]:
    async with await connect(server.url, "test", give_up_after_s=90) as connection:
        yield JetStream(connection)


def stream(name: str, size: int) -> dict[str, Any]:
    return {"name": name, "subjects": [f"{name}.>"], "storage": "file", "discard": "old", "max_bytes": size}


async def test_a_stream_is_as_large_as_there_is_room(small: SmallServer) -> None:
    async with opened(small) as js:
        await js.ensure_stream(stream("other", 80 * MIB))
        made = await js.ensure_stream_with_room(stream("ours", 64 * MIB), MAY_CHANGE, MIB)
        assert made.config["max_bytes"] == 16 * MIB
        await js.delete_stream("other")
        made = await js.ensure_stream_with_room(stream("ours", 64 * MIB), MAY_CHANGE, MIB)
        assert made.config["max_bytes"] == 64 * MIB, "it grows when there is room"


async def test_a_stream_that_is_there_is_never_made_smaller_for_want_of_room(small: SmallServer) -> None:
    async with opened(small) as js:
        await js.ensure_stream(stream("ours", 24 * MIB))
        for _ in range(12):
            assert isinstance(await js.append("ours.x", bytes(MIB // 2)), Ack)
        await js.ensure_stream(stream("other", 70 * MIB))
        for wanted in (90 * MIB, 24 * MIB):
            made = await js.ensure_stream_with_room(stream("ours", wanted), MAY_CHANGE, MIB)
            assert made.config["max_bytes"] == 24 * MIB
        assert (await js.stream_info("ours")).messages == 12


async def test_queues_and_dead_letters_that_an_operator_enlarged_stay_as_large(
    small: SmallServer, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_streams, "BYTES_MAX", 16 * MIB)
    monkeypatch.setattr(queue_streams, "TENANT_BYTES_MAX", 16 * MIB)
    monkeypatch.setattr(dead_letters, "BYTES_MAX", MIB)
    shared, own = Subjects(unique), Subjects(f"{unique}-own")
    sizes = {shared.dead_letter_stream: 2, shared.request_stream: 24, own.request_stream_of("acme"): 24}

    async def first_seq() -> int:
        return 1

    async with opened(small) as js:
        of_tenants = QueueStreams(js, own, 1)
        of_tenants.tenants = frozenset({"acme"})

        async def start() -> None:
            await DeadLetters.ensure(js, shared, 1, 60.0)
            await QueueStreams(js, shared, 1).ensure(first_seq)
            await of_tenants.ensure(first_seq)

        await start()
        for name, size in sizes.items():
            await js.ensure_stream({"name": name, "max_bytes": size * MIB}, MAY_CHANGE)
        await start()
        assert {name: await reserved(js, name) // MIB for name in sizes} == sizes


@pytest.mark.parametrize("grown", [lambda bound: 2 * bound, lambda bound: -1])
async def test_each_bound_of_queue_and_dead_letters_that_an_operator_enlarged_stays_as_large(
    small: SmallServer, unique: str, monkeypatch: pytest.MonkeyPatch, grown: Callable[[int], int]
) -> None:
    monkeypatch.setattr(queue_streams, "BYTES_MAX", 16 * MIB)
    monkeypatch.setattr(dead_letters, "BYTES_MAX", MIB)
    subjects = Subjects(unique)
    streams = {
        subjects.dead_letter_stream: ("max_bytes", "max_msgs", "max_msgs_per_subject"),
        subjects.request_stream: ("max_bytes", "max_msgs_per_subject"),
    }

    async def first_seq() -> int:
        return 1

    async with opened(small) as js:

        async def start() -> None:
            await DeadLetters.ensure(js, subjects, 1, 60.0)
            await QueueStreams(js, subjects, 1).ensure(first_seq)

        await start()
        bounds: dict[str, dict[str, int]] = {}
        for name, keys in streams.items():
            made = (await js.stream_info(name)).config
            bounds[name] = {key: grown(made[key]) for key in keys}
            if made["discard"] == "new" and bounds[name]["max_msgs_per_subject"] < 0:
                del bounds[name]["max_msgs_per_subject"]  # the server refuses that
            await js.ensure_stream({"name": name, **bounds[name]}, frozenset(keys))
        await start()
        for name, asked in bounds.items():
            config = (await js.stream_info(name)).config
            assert {key: config[key] for key in asked} == asked, name


async def test_where_there_is_less_than_the_least_it_is_refused(small: SmallServer) -> None:
    async with opened(small) as js:
        await js.ensure_stream(stream("other", 96 * MIB))
        with pytest.raises(JetStreamRefused) as refused:
            await js.ensure_stream_with_room(stream("ours", 64 * MIB), MAY_CHANGE, 8 * MIB)
        assert refused.value.err_code in ERR_NO_ROOM
        assert "make room on the nats-server's disk" in refused.value.problem.next
        with pytest.raises(JetStreamRefused, match="not found"):
            await js.stream_info("ours")


async def reserved(js: JetStream, name: str) -> int:
    """What a stream reserves, in bytes; 0 while it is not there."""
    try:
        return int((await js.stream_info(name)).config["max_bytes"])
    except JetStreamRefused:
        return 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("taken", "kept"),
    [
        (0, {"request": 64, "dead_letter": 16, "history": 10}),
        (69, {"request": 16, "dead_letter": 4, "history": 10}),
        (82, {"request": 16, "dead_letter": 1}),
    ],
)
async def test_a_scheduler_starts_and_works_in_whatever_room_there_is(
    small: SmallServer, unique: str, taken: int, kept: dict[str, int]
) -> None:
    """MiB: what others have reserved, and what each of our streams then has; without any there is no history."""
    subjects = Subjects(unique)
    names = {
        "request": subjects.request_stream,
        "dead_letter": subjects.dead_letter_stream,
        "history": subjects.history_stream,
    }
    async with opened(small) as js:
        if taken:
            await js.ensure_stream(stream("other", taken * MIB))
        async with stack(small, unique) as made, caller(made) as acme:
            scheduler = await made.scheduler()
            await made.agent("w", "1xH100", worker="w1")
            await acme.leader()
            await acme.workers_up("w1")
            assert (await acme.submit("one"))["kind"] == "accepted"
            await acme.reaches("one", "SUCCEEDED")
            if "history" not in kept:
                await until(
                    lambda: "the ledger cannot be followed now; jobs are not affected" in scheduler.words(),
                    90,
                    "it is said",
                )
            for name, size in kept.items():
                assert await until(lambda name=name: reserved(js, names[name]), 90, name) == size * MIB, name


@pytest.mark.slow
@pytest.mark.parametrize("taken", [84, 90])
async def test_without_room_for_what_is_accepted_a_scheduler_says_what_to_do(
    small: SmallServer, unique: str, taken: int
) -> None:
    async with opened(small) as js:
        await js.ensure_stream(stream("other", taken * MIB))
        async with stack(small, unique) as made:
            scheduler = await made.scheduler()
            assert await scheduler.process.wait() == EXIT_UNREACHABLE
            assert "error[jetstream-refused]: create stream" in scheduler.words()
            assert "fix: make room on the nats-server's disk" in scheduler.words()


async def test_tenants_share_the_room_for_their_buckets(
    small: SmallServer, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest kind is made smaller, an operator's own bucket stays as it is, and a queue has room behind them."""
    monkeypatch.setattr(tenant_buckets, "BUCKET_BYTES_MIN", MIB)
    wanted = {"files": 8 * MIB, "results": 4 * MIB, "schedules": 4 * MIB, "checkpoints": 32 * MIB}
    monkeypatch.setattr(tenant_buckets, "WANTED", wanted)
    subjects, tenants = Subjects(unique), ["acme", "beta", "own"]
    async with opened(small) as js:
        own = f"OBJ_{subjects.checkpoints_bucket('own')}"
        await js.ensure_stream(stream(own, 2 * MIB))
        await js.ensure_stream(stream(subjects.history_stream, 4 * MIB))
        buckets = TenantBuckets(js, subjects, 1, lambda size: try_copies(js, subjects, 1, size))
        await buckets.ensure(frozenset(tenants))
        checkpoints = [await reserved(js, f"OBJ_{subjects.checkpoints_bucket(each)}") for each in tenants]
        assert checkpoints == [8 * MIB, 8 * MIB, 2 * MIB]
        files = [await reserved(js, f"OBJ_{subjects.files_bucket(each)}") for each in tenants]
        assert files == [8 * MIB] * 3
        await js.ensure_stream(stream("queue", 20 * MIB))
