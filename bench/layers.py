"""The path of one call, layer by layer: what the SDK's caller and the member add to a bare request and service.

    python -m bench.layers              # one round
    python -m bench.layers --rounds 5

Four pairs in turns, over one nats-server: a caller is `nats-py`'s own `request` or the SDK, a service `nats.micro` or
`moorage serve`. Each answers with what it was sent. The figures are calls a second and processor time a call, by
process, with 64 callers at once; and the median time of one call alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Final

import nats
from nats.errors import NoRespondersError

from bench.book import busy_percent
from moorage.bus.embedded import EmbeddedServer
from moorage.client import AsyncClient
from moorage.schemas.errors import MoorageError
from moorage.system.loops import loop_factory
from moorage.system.proctree import children

SECONDS: Final = 2.0
AT_ONCE: Final = 64
WARM_CALLS: Final = 300
SUBJECT: Final = "moorage.call.bench.echo"
ECHO: Final = "def echo(data):\n    return data\n"
MICRO: Final = f"""
import asyncio, sys
import nats, nats.micro, uvloop

async def main():
    link = await nats.connect(sys.argv[1])
    service = await nats.micro.add_service(link, name="echo", version="1.0.0")

    async def answer(request):
        await request.respond(request.data)

    await service.add_endpoint(name="call", subject="{SUBJECT}", handler=answer)
    await link.flush()
    await asyncio.Event().wait()

uvloop.run(main())
"""
SERVE: Final = "-m moorage.cli serve served:echo --name echo --tenant bench --queue 64 --nats URL"
SERVICES: Final = {"nats.micro": ("-m", "micro", "URL"), "moorage": tuple(SERVE.split())}
Call = Callable[[bytes], Awaitable[bytes]]


def cpu_s(pid: int) -> float:
    """Return the processor time of a process so far, in seconds; that of threads which have ended is missing."""
    return sum(int(each.read_text().split()[0]) for each in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


@contextlib.asynccontextmanager
async def service(words: tuple[str, ...]) -> AsyncIterator[tuple[EmbeddedServer, int]]:
    """A server, and one member of a service by its pid."""
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moorage-layers-")))
        (folder / "served.py").write_text(ECHO)
        (folder / "micro.py").write_text(MICRO)
        server = await EmbeddedServer.start(folder / "nats")
        stack.push_async_callback(server.stop)
        argv = [server.url if word == "URL" else word for word in words]
        quiet = asyncio.subprocess.DEVNULL
        member = await asyncio.create_subprocess_exec(sys.executable, *argv, cwd=folder, stdout=quiet, stderr=quiet)

        async def end() -> None:
            member.terminate()
            await member.wait()

        stack.push_async_callback(end)
        yield server, member.pid


@contextlib.asynccontextmanager
async def bare(url: str) -> AsyncIterator[Call]:
    link = await nats.connect(url)

    async def call(data: bytes) -> bytes:
        return (await link.request(SUBJECT, data, timeout=60)).data

    yield call
    await link.close()


@contextlib.asynccontextmanager
async def sdk(url: str) -> AsyncIterator[Call]:
    async with AsyncClient(url, tenant="bench", timeout="60s") as moorage:
        called = moorage.service("echo")

        async def call(data: bytes) -> bytes:
            answer = await called.call(data)
            assert isinstance(answer, bytes)
            return answer

        yield call


async def calls(call: Call, at_once: int) -> list[float]:
    """Call for `SECONDS`, and return how long each call took."""
    waits: list[float] = []
    ends = time.perf_counter() + SECONDS

    async def caller(number: int) -> None:
        while (began := time.perf_counter()) < ends:
            data = b"%d" % number
            assert await call(data) == data
            waits.append(time.perf_counter() - began)
            number += at_once

    await asyncio.gather(*map(caller, range(at_once)))
    return waits


async def answers(call: Call) -> None:
    """Wait until the service answers, and warm it."""
    while True:
        with contextlib.suppress(NoRespondersError, MoorageError):  # nobody serves yet
            await call(b"0")
            break
        await asyncio.sleep(0.1)
    for _ in range(WARM_CALLS):
        await call(b"0")


async def pair(
    caller: Callable[[str], contextlib.AbstractAsyncContextManager[Call]], words: tuple[str, ...]
) -> dict[str, float]:
    """Return what one caller and one service take."""
    async with service(words) as (server, member), caller(server.url) as call:
        await answers(call)
        groups = {"caller": [os.getpid()], "member": [member], "program": children(member), "server": [server.pid]}
        before = {name: sum(map(cpu_s, group)) for name, group in groups.items()}
        began = time.perf_counter()
        waits = await calls(call, AT_ONCE)
        took = time.perf_counter() - began
        found = {f"{AT_ONCE} calls/s": len(waits) / took}
        spent = {name: (sum(map(cpu_s, group)) - before[name]) / len(waits) * 1e6 for name, group in groups.items()}
        found |= {f"{name} µs": value for name, value in spent.items() if groups[name]}
        found["all µs"] = sum(spent.values())
        found["1 p50 µs"] = statistics.median(await calls(call, 1)) * 1e6
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1)
    asked = parser.parse_args()
    print(f"machine {busy_percent():.0f} % busy before")
    pairs = [(caller, name) for name in SERVICES for caller in (bare, sdk)]
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        for _ in range(asked.rounds):
            for caller, name in pairs:
                found = runner.run(pair(caller, SERVICES[name]))
                print(
                    f"{caller.__name__:5} -> {name:11}",
                    *(f"{key} {value:,.0f}" for key, value in found.items()),
                    sep="  ",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
