"""Streams through the HTTP door, beside the same streams straight from the engine: first token, and time a token.

    python -m bench.door
    python -m bench.door --tokens 300 --delay-ms 0     # as fast as it goes

One fake engine behind `moorage serve --http` and `moorage door`, each in a process of its own, over a real nats-server.
Streams of as many tokens begin at one instant: 1, 16 and 64 of them. Each part of a stream is counted, and none may be
missing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
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
async def _running(*words: str, says: str, cwd: Path) -> AsyncIterator[str]:
    """A command, once it has written what ends with this; yields what it wrote."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "moorage.cli", *words, cwd=cwd, stderr=asyncio.subprocess.PIPE
    )
    try:
        assert process.stderr is not None
        async with asyncio.timeout(READY_S):
            text = ""
            while says not in text:
                text += (await process.stderr.readline()).decode()
        yield text
    finally:
        process.terminate()
        await process.wait()


async def measured(tokens: int, delay_ms: float) -> None:
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moorage-door-")))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        server = await EmbeddedServer.start(folder / "nats")
        stack.push_async_callback(server.stop)
        engine = [sys.executable, "-m", "moorage.testing.fake_engine", str(port)]
        serving = ["serve", "--http", "/health", "--name", "chat", "--concurrency", "256", "--nats", server.url]
        await stack.enter_async_context(_running(*serving, "--", *engine[:-1], "{port}", says="serves", cwd=folder))
        told = await stack.enter_async_context(
            _running("door", "--listen", "0", "--nats", server.url, says="door at", cwd=folder)
        )
        bare = await asyncio.create_subprocess_exec(*engine)
        try:
            found = re.search(r"(http://\S+)/v1", told)
            assert found is not None
            await _answers(f"http://127.0.0.1:{port}/health")
            urls = {"bare": f"http://127.0.0.1:{port}/v1", "door": f"{found[1]}/svc/chat/v1"}
            for number in STREAMS:
                for who, url in urls.items():
                    first, each, rate = await streams(f"{url}/chat/completions", number, tokens, delay_ms)
                    times = f"first token {first:6.1f} ms, each {each:6.3f} ms"
                    print(f"{number:3} streams, {who}: {times}, {rate:8,.0f} tokens/s", flush=True)
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
    asked = parser.parse_args()
    print(f"the machine is busy to {busy_percent():.0f} % by others")
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(measured(asked.tokens, asked.delay_ms))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
