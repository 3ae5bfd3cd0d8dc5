"""Streams through the HTTP door, beside the same streams straight from the engine: first token, and time a token.

    python -m bench.door
    python -m bench.door --tokens 300 --delay-ms 0     # as fast as it goes

One fake engine behind `moorage serve --http` and `moorage door`, each in a process of its own, over a real nats-server.
Streams of as many tokens begin at one instant: 1, 16 and 64 of them. Each part of a stream is counted, and none may be
missing. Rounds go by turns, engine and door, and the medians of their differences and ratios are told: so both have the
same noise. CPU is that of the door and of the member, a token; bytes are what nats-server has read and written,
a token.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import aiohttp

from bench.book import busy_percent
from moorage.bus.embedded import EmbeddedServer
from moorage.system.loops import loop_factory

STREAMS: Final = (1, 16, 64)
ROUNDS: Final = 5
#: milliseconds until the first token beside the engine's own, by streams; times a token beside it
FIRST_MS_MAX: Final = {1: 2.5, 64: 40.0}
EACH_MAX: Final = {64: 1.02}
#: microseconds of CPU a token of the door and of the member, and bytes of the broker
CPU_US_MAX: Final = 40.0
BROKER_BYTES_MAX: Final = 600.0
READY_S: Final = 60.0


async def stream(http: aiohttp.ClientSession, url: str, tokens: int, delay_ms: float) -> tuple[float, float]:
    """Return when the first token came, and the mean time from one to the next, in milliseconds."""
    body = {"model": "tiny", "stream": True, "max_tokens": tokens, "delay_ms": delay_ms}
    began, first, text = time.perf_counter(), 0.0, b""
    async with http.post(url, json=body) as answer:
        async for piece in answer.content.iter_any():
            first = first or time.perf_counter()
            text += piece
    assert text.count(b"data: ") == tokens + 2, "no part is missing"
    return (first - began) * 1e3, (time.perf_counter() - first) * 1e3 / max(1, tokens - 1)


async def streams(url: str, number: int, tokens: int, delay_ms: float) -> tuple[float, float, float]:
    """Return the medians of `stream` of so many at once, and tokens a second."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        began = time.perf_counter()
        found = await asyncio.gather(*(stream(http, url, tokens, delay_ms) for _ in range(number)))
        rate = number * tokens / (time.perf_counter() - began)
    return statistics.median(each[0] for each in found), statistics.median(each[1] for each in found), rate


@contextlib.asynccontextmanager
async def _running(*words: str, says: str, cwd: Path) -> AsyncIterator[tuple[str, int]]:
    """A command, once it has written what ends with this; yields what it wrote, and its pid."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "moorage.cli", *words, cwd=cwd, stderr=asyncio.subprocess.PIPE
    )
    try:
        assert process.stderr is not None
        async with asyncio.timeout(READY_S):
            text = ""
            while says not in text:
                text += (await process.stderr.readline()).decode()
        yield text, process.pid
    finally:
        process.terminate()
        await process.wait()


def _cpu_s(pid: int) -> float:
    """The time of the CPU that a process has had."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _io_bytes(pid: int) -> int:
    """What a process has read and written, of files and sockets."""
    counts = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(counts["rchar"]) + int(counts["wchar"])


def _judged(what: str, found: float, most: float | None, unit: str = "") -> str:
    if most is None:
        return f"{what} {found:.2f}{unit}"
    return f"{what} {found:.2f}{unit} ({'within' if found <= most else 'beyond'} {most:g}{unit})"


async def measured(tokens: int, delay_ms: float, rounds: int) -> None:
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moorage-door-")))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        server = await EmbeddedServer.start(folder / "nats")
        stack.push_async_callback(server.stop)
        engine = [sys.executable, "-m", "moorage.testing.fake_engine", str(port)]
        serving = ["serve", "--http", "/health", "--name", "chat", "--concurrency", "256", "--nats", server.url]
        _, member = await stack.enter_async_context(
            _running(*serving, "--", *engine[:-1], "{port}", says="serves", cwd=folder)
        )
        told, door = await stack.enter_async_context(
            _running("door", "--listen", "0", "--nats", server.url, says="door at", cwd=folder)
        )
        bare = await asyncio.create_subprocess_exec(*engine)
        try:
            found = re.search(r"(http://\S+)/v1", told)
            assert found is not None
            await _answers(f"http://127.0.0.1:{port}/health")
            urls = {"bare": f"http://127.0.0.1:{port}/v1", "door": f"{found[1]}/svc/chat/v1"}
            began = {"door": _cpu_s(door), "member": _cpu_s(member)}, _io_bytes(server.pid)
            for number in STREAMS:
                found_of: dict[str, list[tuple[float, float, float]]] = {"bare": [], "door": []}
                for _ in range(rounds):
                    for who, url in urls.items():
                        found_of[who].append(await streams(f"{url}/chat/completions", number, tokens, delay_ms))
                for who, each in found_of.items():
                    first, token, rate = map(statistics.median, zip(*each, strict=True))
                    times = f"first token {first:6.1f} ms, each {token:6.3f} ms"
                    print(f"{number:3} streams, {who}: {times}, {rate:8,.0f} tokens/s", flush=True)
                pairs = list(zip(found_of["bare"], found_of["door"], strict=True))
                later = statistics.median(through[0] - alone[0] for alone, through in pairs)
                ratio = statistics.median(through[1] / alone[1] for alone, through in pairs)
                first_words = _judged("first token later by", later, FIRST_MS_MAX.get(number), " ms")
                print(f"{number:3} streams, of pairs: {first_words}, {_judged('each', ratio, EACH_MAX.get(number))}")
            parts = rounds * sum(STREAMS) * (tokens + 2)
            for who, pid in (("door", door), ("member", member)):
                print(_judged(f"{who}, CPU a token:", (_cpu_s(pid) - began[0][who]) / parts * 1e6, CPU_US_MAX, " µs"))
            print(_judged("broker, a token:", (_io_bytes(server.pid) - began[1]) / parts, BROKER_BYTES_MAX, " bytes"))
        finally:
            bare.terminate()
            await bare.wait()


async def _answers(url: str) -> None:
    async with asyncio.timeout(READY_S), aiohttp.ClientSession() as http:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with http.get(url) as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.05)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--delay-ms", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    asked = parser.parse_args()
    print(f"the machine is busy to {busy_percent():.0f} % by others")
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(measured(asked.tokens, asked.delay_ms, asked.rounds))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
