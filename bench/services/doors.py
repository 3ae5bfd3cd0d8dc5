"""Doors to a service: what one call costs as a process of its own, and how fast 64 MiB go into a call.

A process starts, connects, calls `echo` once and ends: `moorage call`, the SDK in Python, a request of nats-py, and
the callers of the docs in Node and Go, where these languages and their NATS libraries are here. The bytes of a call in
parts are compared by their digest. Beside it, the same bytes are published in messages of the same size to a process
that makes a digest, too, and put into the object store of the server, which syncs each message.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

import nats

from moorage.bus.embedded import EmbeddedServer
from moorage.client import AsyncClient
from tests.system.docs.driver import environment, has
from tests.unit.docs.markdown import DOCS, page

CALLS: Final = 12
BYTES: Final = 64 << 20
PART: Final = 512 << 10
FUNCTIONS: Final = """
import hashlib

def echo(data):
    return data

def digest(data):
    return hashlib.sha256(data).hexdigest()
"""
SINK: Final = """
import asyncio, hashlib, sys
import nats, uvloop

async def main():
    link = await nats.connect(sys.argv[1])
    seen, size = hashlib.sha256(), 0

    async def take(message):
        nonlocal seen, size
        seen.update(message.data)
        size += len(message.data)
        if size == int(sys.argv[2]):
            await link.publish("bench.sunk", seen.hexdigest().encode())
            seen, size = hashlib.sha256(), 0

    await link.subscribe("bench.sink", cb=take)
    await link.flush()
    print("ready", flush=True)
    await asyncio.Event().wait()

uvloop.run(main())
"""
SDK: Final = "from moorage.client import Client\nwith Client() as moorage:\n    print(moorage.call('echo', 'x'))"
BARE: Final = """
import asyncio, os
import nats

async def main():
    link = await nats.connect(os.environ["NATS_URL"])
    print((await link.request("moorage.call.default.echo", b"x")).data.decode())
    await link.close()

asyncio.run(main())
"""
BARE_NAME: Final = "a bare request of nats-py"
NODE: Final = "npm install --no-audit --no-fund --silent @nats-io/transport-node@3"


async def measure() -> dict[str, float]:
    async with _services() as (url, folder):
        return {**await _starts(url, folder), **await _parts(url, folder)}


@asynccontextmanager
async def _services() -> AsyncIterator[tuple[str, Path]]:
    """A server, and a member of `echo` and of `digest`."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moorage-doors-")))
        (folder / "functions.py").write_text(FUNCTIONS)
        (folder / "sink.py").write_text(SINK)
        server = await EmbeddedServer.start(folder / "nats")
        stack.push_async_callback(server.stop)
        quiet = asyncio.subprocess.DEVNULL
        for name in ("echo", "digest"):
            words = ("serve", f"functions:{name}", "--name", name, "--nats", server.url)
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "moorage.cli", *words, cwd=folder, stdout=quiet, stderr=quiet
            )
            stack.push_async_callback(process.wait)
            stack.callback(process.terminate)
        yield server.url, folder


def _callers(folder: Path, env: dict[str, str]) -> dict[str, list[str]]:
    """Return the command of each caller; those of a language that is not here are left out."""
    found = {
        BARE_NAME: [sys.executable, "-c", BARE],
        "moorage call": [str(Path(sys.executable).parent / "moorage"), "call", "echo", "x"],
        "the SDK in Python": [sys.executable, "-c", SDK],
    }
    if has("go") and has("nats.go"):
        subprocess.run(["go", "build", "-o", "call", DOCS / "examples" / "call.go"], cwd=folder, env=env, check=True)
        found["the page's caller in Go"] = [str(folder / "call"), "echo", "x"]
    if shutil.which("node") and shutil.which("npm"):
        blocks = page(DOCS / "how-to" / "serve-a-model-to-any-language.md").blocks
        [code] = [block.body for block in blocks if block.title == "call.mjs"]
        (folder / "call.mjs").write_text(code)
        if subprocess.run(NODE.split(), cwd=folder, env=env).returncode == 0:
            found["the page's caller in Node"] = ["node", str(folder / "call.mjs"), "echo", "x"]
    return found


async def _starts(url: str, folder: Path) -> dict[str, float]:
    """Return the median time of a process of each caller, and its ratio to that of the bare one; in turns."""
    env = environment(folder, NATS_URL=url)
    callers = await asyncio.to_thread(_callers, folder, env)
    took: dict[str, list[float]] = {name: [] for name in callers}
    async with AsyncClient(url, timeout="60s") as moorage:
        for name in ("echo", "digest"):
            await moorage.call(name, b"x")  # waits until somebody serves
        for turn in range(CALLS + 1):
            for name, argv in callers.items():
                began_s = time.perf_counter()
                process = await asyncio.create_subprocess_exec(
                    *argv, cwd=folder, env=env, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
                )
                out, _ = await process.communicate()
                assert out.strip() in (b"x", b"b'x'"), (name, out)
                if turn:  # the first one warms the file cache
                    took[name].append((time.perf_counter() - began_s) * 1e3)
    medians = {name: statistics.median(values) for name, values in took.items()}
    bare_ms = medians[BARE_NAME]
    ratios = {name: value / bare_ms for name, value in medians.items() if name != BARE_NAME}
    return {
        **{f"a process, {name}, ms": value for name, value in medians.items()},
        **{f"a process, {name} / {BARE_NAME}": value for name, value in ratios.items()},
    }


async def _parts(url: str, folder: Path) -> dict[str, float]:
    """Return how many MB a second go into a call, to a bare subscriber, and into an object; in turns, the best of 3."""
    data = os.urandom(BYTES)
    digest = hashlib.sha256(data).hexdigest()
    rates: dict[str, list[float]] = {"into a call": [], "to a bare subscriber": [], "into an object": []}
    async with AsyncClient(url, timeout="60s") as moorage, _sink(url, folder):
        link = await nats.connect(url)
        store = await link.jetstream().create_object_store("bench")
        sunk = await link.subscribe("bench.sunk")

        async def publish() -> None:
            for at in range(0, BYTES, PART):
                await link.publish("bench.sink", data[at : at + PART])
                if at % (8 * PART) == 0:
                    await link.flush()
            assert (await sunk.next_msg(60)).data.decode() == digest

        async def call() -> None:
            assert await moorage.call("digest", data) == digest

        async def put() -> None:
            await store.put(f"data-{len(rates['into an object'])}", data)

        for _ in range(3):
            for name, send in zip(rates, (call, publish, put), strict=True):
                began_s = time.perf_counter()
                await send()
                rates[name].append(BYTES / 1e6 / (time.perf_counter() - began_s))
        await link.close()
    best = {name: max(values) for name, values in rates.items()}
    ratios = {name: best["into a call"] / value for name, value in best.items() if name != "into a call"}
    return {
        **{f"64 MiB {name}, MB/s": value for name, value in best.items()},
        **{f"64 MiB into a call / {name}": value for name, value in ratios.items()},
    }


@asynccontextmanager
async def _sink(url: str, folder: Path) -> AsyncIterator[None]:
    """A process that makes a digest of all that is published to it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "sink.py", url, str(BYTES), cwd=folder, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    await process.stdout.readline()
    try:
        yield
    finally:
        process.kill()
        await process.wait()
