"""Calls with one affinity key, to real members: which of them gets them, and what becomes of calls as it leaves."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from moorage.cli.door.models import Models
from moorage.cli.door.server import Door, serving
from moorage.client import AsyncClient, Rejected
from moorage.schemas.service import MEMBER
from tests.system.services.members import Gate, MemberProcess, member
from tests.system.services.test_calling import client
from tests.waiting import until

KEYS = [f"user-{number}" for number in range(24)]


@contextlib.asynccontextmanager
async def members(
    url: str, folder: Path, prefix: str, *words: str, count: int = 3
) -> AsyncIterator[list[MemberProcess]]:
    async with contextlib.AsyncExitStack() as stack:
        made = [await stack.enter_async_context(member(url, folder, *words, prefix=prefix)) for _ in range(count)]
        await asyncio.gather(*(each.ready() for each in made))
        yield made


async def who(moorage: AsyncClient, service: str, key: str, data: bytes = b"x") -> str:
    """The member that has answered a call with this key."""
    answer = await moorage.service(service, affinity=key).answer(data, idempotent=True)
    return answer.headers[MEMBER]


async def by_key(moorage: AsyncClient, service: str) -> dict[str, str]:
    """The member of each key, once the client knows them."""
    found: dict[str, str] = {}

    async def is_stable() -> bool:
        before = dict(found)
        found.update({key: await who(moorage, service, key) for key in KEYS})
        return found == before

    await until(is_stable, what="each key has its member")
    return found


async def test_calls_with_one_key_go_to_one_member_by_all_clients_and_keys_are_spread(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    async with (
        members(nats_url, tmp_path, unique, "functions:echo", "--name", "echo"),
        client(nats_url, unique) as one,
        client(nats_url, unique) as other,
    ):
        found = await by_key(one, "echo")
        assert len(set(found.values())) == 3
        assert await by_key(other, "echo") == found
        await _by_the_door(one, found)
        assert await one.service("echo", affinity="a").call(bytes(3_000_000)) == bytes(3_000_000), "in parts as well"
        for key in ("", "x" * 513, 7):
            with pytest.raises(Rejected, match="the affinity of a call"):
                one.service("echo", affinity=key)  # type: ignore[arg-type]


async def _by_the_door(moorage: AsyncClient, found: dict[str, str]) -> None:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    async with (
        serving(Door({"default": Models(moorage)}, None), [listener]),
        aiohttp.ClientSession(f"http://127.0.0.1:{listener.getsockname()[1]}") as http,
    ):
        for key in KEYS:
            async with http.post("/svc/echo/x", data=b"x", headers={"X-Moorage-Affinity": key}) as answer:
                assert answer.headers["X-Moorage-Member"] == found[key]


async def test_a_member_without_a_free_place_gives_the_call_to_another_one(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    async with (
        members(nats_url, tmp_path, unique, "functions:held", "--name", "held", "--queue", "0", count=2),
        client(nats_url, unique) as moorage,
    ):
        done = Gate(tmp_path)
        done.open()
        found: dict[str, str] = {}

        async def is_stable() -> bool:
            before = dict(found)
            found.update({key: await who(moorage, "held", key, done.data) for key in KEYS})
            return found == before

        await until(is_stable, what="each key has its member")
        gate = Gate(tmp_path)
        first = asyncio.create_task(who(moorage, "held", KEYS[0], gate.data))
        await gate.runs()
        assert await who(moorage, "held", KEYS[0], done.data) not in ("", found[KEYS[0]])
        gate.open()
        assert await first == found[KEYS[0]]


@pytest.mark.parametrize(
    "how", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.long)], ids=["leaves", "dies"]
)
async def test_no_call_is_lost_as_a_member_leaves_or_dies_and_its_keys_move(
    nats_url: str, unique: str, tmp_path: Path, how: signal.Signals
) -> None:
    async with (
        members(nats_url, tmp_path, unique, "functions:echo", "--name", "echo", count=2) as made,
        client(nats_url, unique) as moorage,
    ):
        before = await by_key(moorage, "echo")
        answered, is_over = 0, asyncio.Event()

        async def calls(key: str) -> None:
            nonlocal answered
            while not is_over.is_set():
                await who(moorage, "echo", key)
                answered += 1

        async def answers(more: int) -> None:
            upto = answered + more
            await until(lambda: answered >= upto, what="calls are answered")

        async with asyncio.TaskGroup() as group:  # a call that fails ends the test
            for key in KEYS:
                group.create_task(calls(key))
            await answers(200)
            made[0].process.send_signal(how)
            await made[0].ended()
            await answers(200)
            is_over.set()
        after = await by_key(moorage, "echo")
        [left] = set(after.values())
        assert left in before.values(), "its own keys stay"
