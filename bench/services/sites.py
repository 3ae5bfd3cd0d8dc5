"""A call in the NATS that you have: from the account of the member, from another account, and through a leaf node.

One server has two accounts: the member's exports its calls, and the other one imports them. Another server on the same
machine is a leaf node of it, in the member's account. The same member answers all three callers, which are in one
process and take turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from bench.callers import warmed
from bench.layers import ECHO, SUBJECT, calls, cpu_s
from moorage.bus.connection import Connection, connect
from moorage.bus.embedded import find_binary
from tests.ports import free_ports

HUB: Final = """
listen: "127.0.0.1:%d"
leafnodes { listen: "127.0.0.1:%d" }
accounts {
  BENCH {
    users: [ { user: bench, password: bench } ]
    exports: [ { service: "moorage.call.bench.>" } ]
  }
  SHOP {
    users: [ { user: shop, password: shop } ]
    imports: [ { service: { account: BENCH, subject: "moorage.call.bench.>" } } ]
  }
}
"""
LEAF: Final = """
listen: "127.0.0.1:%d"
leafnodes { remotes: [ { url: "nats-leaf://bench:bench@127.0.0.1:%d" } ] }
"""
DIRECT: Final = "in the member's account"
TURNS: Final = 5
ONE_BY_ONE: Final = 300


async def measure() -> dict[str, float]:
    waits: dict[str, list[float]] = {}
    rates: dict[str, list[float]] = {}
    cpus: dict[str, list[float]] = {}
    async with _site() as (links, servers):
        for _ in range(TURNS):
            for name, link in links.items():

                async def call(data: bytes, link: Connection = link) -> bytes:
                    return (await link.request(SUBJECT, data, 60.0)).data

                for number in range(ONE_BY_ONE):
                    began_s = time.perf_counter()
                    assert await call(b"%d" % number) == b"%d" % number
                    waits.setdefault(name, []).append(time.perf_counter() - began_s)
                cpu_before_s, began_s = sum(map(cpu_s, servers)), time.perf_counter()
                answered = len(await calls(call, 64))
                rates.setdefault(name, []).append(answered / (time.perf_counter() - began_s))
                cpus.setdefault(name, []).append((sum(map(cpu_s, servers)) - cpu_before_s) / answered * 1e6)
    p50 = {name: statistics.median(values) * 1e6 for name, values in waits.items()}
    rate = {name: statistics.median(values) for name, values in rates.items()}
    cpu = {name: statistics.median(values) for name, values in cpus.items()}
    return {
        **{f"a caller {name}, p50 µs": value for name, value in p50.items()},
        **{f"64 callers {name}, calls/s": value for name, value in rate.items()},
        **{f"CPU µs a call of all servers, callers {name}": value for name, value in cpu.items()},
        **{f"p50, a caller {name} / {DIRECT}": p50[name] / p50[DIRECT] for name in p50 if name != DIRECT},
        **{f"calls/s, 64 callers {name} / {DIRECT}": rate[name] / rate[DIRECT] for name in rate if name != DIRECT},
    }


@contextlib.asynccontextmanager
async def _site() -> AsyncIterator[tuple[dict[str, Connection], list[int]]]:
    """Two servers and a member; yield the callers by where they are, and the servers' pids."""
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moorage-sites-")))
        hub, leaf, between = free_ports(3)
        (folder / "hub.conf").write_text(HUB % (hub, between))
        (folder / "leaf.conf").write_text(LEAF % (leaf, between))
        (folder / "served.py").write_text(ECHO)
        own = f"nats://bench:bench@127.0.0.1:{hub}"
        member = ("-m", "moorage.cli", "serve", "served:echo", "--name", "echo", "--tenant", "bench", "--queue", "64")
        pids = []
        for argv in (
            (find_binary(), "-c", "hub.conf"),
            (find_binary(), "-c", "leaf.conf"),
            (sys.executable, *member, "--nats", own),
        ):
            quiet = asyncio.subprocess.DEVNULL
            process = await asyncio.create_subprocess_exec(*argv, cwd=folder, stdout=quiet, stderr=quiet)
            stack.push_async_callback(process.wait)
            stack.callback(process.terminate)
            pids.append(process.pid)
        urls = {
            DIRECT: own,
            "in another account": f"nats://shop:shop@127.0.0.1:{hub}",
            "at a leaf node": f"nats://127.0.0.1:{leaf}",
        }
        links = {}
        for name, url in urls.items():
            links[name] = await stack.enter_async_context(await connect(url, "caller"))
            await warmed(links[name], SUBJECT, b"0")
        yield links, pids[:2]
