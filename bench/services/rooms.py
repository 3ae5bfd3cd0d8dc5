"""The waiting room under overload: what two members with two places each answer in time at 2 and 4 times their rate.

Calls come by a Poisson process and take 20 ms on average (exponential). Their callers, bare ones, wait 500 ms each. A
room has 10 calls, or what it has without `--queue`. The bare micro service of nats-py runs two at a time in each of its
two processes, and takes all others, too. Then half of the calls have priority 100, the other half 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from bench.callers import quantile, warmed
from moorage.bus.connection import Connection, connect
from moorage.bus.embedded import EmbeddedServer
from moorage.bus.errors import RequestTimeout
from moorage.schemas.service import ERROR, PRIORITY, WAIT_MS

MEMBERS: Final = 2
PLACES: Final = 2
MEAN_S: Final = 0.02
WAIT_S: Final = 0.5
SECONDS: Final = 6.0
#: calls a second that all places answer, where none is ever empty
CEILING: Final = MEMBERS * PLACES / MEAN_S
SUBJECT: Final = "moorage.call.bench.sleeps"
FUNCTIONS: Final = """
import asyncio

async def sleeps(data):
    await asyncio.sleep(float(data))
    return data
"""
MICRO: Final = f"""
import asyncio, sys
import nats, nats.micro, uvloop
from functions import sleeps

async def main():
    link = await nats.connect(sys.argv[1])
    service = await nats.micro.add_service(link, name="sleeps", version="1.0.0")
    places = asyncio.Semaphore({PLACES})
    tasks = set()

    async def run(request):
        async with places:
            await request.respond(await sleeps(request.data))

    async def answer(request):
        tasks.add(task := asyncio.create_task(run(request)))
        task.add_done_callback(tasks.discard)

    await service.add_endpoint(name="call", subject="{SUBJECT}", handler=answer)
    await asyncio.Event().wait()

uvloop.run(main())
"""
WORDS: Final = "-m moorage.cli serve functions:sleeps --name sleeps --tenant bench --nats URL"
SERVE: Final = (*WORDS.split(), "--concurrency", str(PLACES))
KINDS: Final = {
    "room of 10": (*SERVE, "--queue", "10"),
    "usual room": SERVE,
    "nats.micro": ("-m", "micro", "URL"),
}


class Told:
    """What became of calls: how long, in ms, those took that were answered, and those that were refused."""

    def __init__(self) -> None:
        self.sent = 0
        self.answered: list[float] = []
        self.refused: list[float] = []


@contextlib.asynccontextmanager
async def _service(words: tuple[str, ...]) -> AsyncIterator[Connection]:
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moorage-rooms-")))
        (folder / "functions.py").write_text(FUNCTIONS)
        (folder / "micro.py").write_text(MICRO)
        server = await EmbeddedServer.start(folder / "nats")
        stack.push_async_callback(server.stop)
        argv = [server.url if word == "URL" else word for word in words]
        quiet = asyncio.subprocess.DEVNULL
        for _ in range(MEMBERS):
            process = await asyncio.create_subprocess_exec(
                sys.executable, *argv, cwd=folder, stdout=quiet, stderr=quiet
            )
            stack.push_async_callback(process.wait)
            stack.callback(process.terminate)
        link = await stack.enter_async_context(await connect(server.url, "callers"))
        await warmed(link, SUBJECT, b"0.001")
        yield link


async def _overload(link: Connection, times: float, priorities: tuple[int, ...]) -> dict[int, Told]:
    """Send calls at so many times the ceiling; return what became of them, by priority."""
    chance = random.Random(7)
    told = {priority: Told() for priority in priorities}

    async def one(priority: int, service_s: float) -> None:
        each, began_s = told[priority], time.perf_counter()
        each.sent += 1
        headers = {WAIT_MS: str(round(WAIT_S * 1000)), PRIORITY: str(priority)}
        with contextlib.suppress(RequestTimeout):
            answer = await link.request(SUBJECT, b"%.6f" % service_s, WAIT_S + 0.5, headers=headers)
            took_ms = (time.perf_counter() - began_s) * 1e3
            if ERROR in (answer.headers or {}):
                each.refused.append(took_ms)
            elif took_ms <= (WAIT_S + service_s) * 1e3:
                each.answered.append(took_ms)

    began_s, at_s = time.perf_counter(), 0.0
    async with asyncio.TaskGroup() as group:
        while at_s < SECONDS:
            at_s += chance.expovariate(CEILING * times)
            await asyncio.sleep(max(0.0, began_s + at_s - time.perf_counter()))
            group.create_task(one(chance.choice(priorities), chance.expovariate(1 / MEAN_S)))
    return told


async def measure() -> dict[str, float]:
    found: dict[str, float] = {}
    for times in (2, 4):
        for kind, words in KINDS.items():
            async with _service(words) as link:
                [told] = (await _overload(link, times, (50,))).values()
            answered, refused = sorted(told.answered), sorted(told.refused)
            name = f"{times} x, {kind}"
            found[f"{name}: answered in time / ceiling"] = len(answered) / SECONDS / CEILING
            found[f"{name}: share answered in time %"] = len(answered) / told.sent * 100
            if answered:
                found[f"{name}: p50 of the answered, ms"] = quantile(answered, 0.5)
                found[f"{name}: p99 of the answered, ms"] = quantile(answered, 0.99)
            if refused:
                found[f"{name}: a refusal, p50 ms"] = quantile(refused, 0.5)
                found[f"{name}: a refusal, p99 ms"] = quantile(refused, 0.99)
            found[f"{name}: share that hears nothing in time %"] = 100 * (
                1 - (len(answered) + len(refused)) / told.sent
            )
        room, bare = (found[f"{times} x, {kind}: answered in time / ceiling"] for kind in ("room of 10", "nats.micro"))
        found[f"{times} x, answered in time, room of 10 / nats.micro"] = room / bare
    async with _service(KINDS["room of 10"]) as link:
        told_by = await _overload(link, 2, (0, 100))
    for priority, told in told_by.items():
        found[f"2 x, priority {priority}: share answered in time %"] = len(told.answered) / told.sent * 100
        if told.answered:
            found[f"2 x, priority {priority}: p50 of the answered, ms"] = quantile(sorted(told.answered), 0.5)
    return found
