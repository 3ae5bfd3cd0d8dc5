"""What TLS costs: the endpoint's rate and a submit that is alone, with TLS beside without, in turns of one run.

    python -m bench.tls [--rounds 3] [--jobs 8000]

The same server, scheduler, simulated fleet and callers, as in `bench.run`; with TLS, all of them connect by a context
that names the authority. Certificates are those that `nats-config` makes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final, NamedTuple

import uvloop

from bench.book import busy_percent, keep
from bench.callers import Callers, quantile
from bench.stack import HERE, Stack, until_up
from moorage.bus.certificates import certificates
from moorage.bus.connection import connect
from moorage.bus.embedded import EmbeddedServer, find_binary
from moorage.bus.site import Server, Site
from moorage.cli.local.local_tools import end_jobs_now
from tests.ports import free_ports
from tests.waiting import until

TITLE: Final = "TLS"
RATE: Final = "endpoint, 1,000 callers, jobs/s"
ALONE: Final = "one in flight, submit→start p50 ms"
#: of server, scheduler, fleet and callers together: other work on the machine moves it less
CPU: Final = "all processes, CPU µs a job"
HOST: Final = "127.0.0.1"


class OurServer(NamedTuple):
    """A nats-server by a configuration of ours."""

    pid: int
    url: str = "bench-users"
    ledger_url: str = "bench-ledger"


@contextlib.asynccontextmanager
async def stack(*, tls: bool) -> AsyncIterator[Stack]:
    """`bench.stack.stack`, whose server has TLS or not, and is the same but for that."""
    with tempfile.TemporaryDirectory(prefix="moorage-bench-") as name:
        folder = Path(name)
        first = await EmbeddedServer.start(folder / "nats", free_ports(1)[0])
        urls = {"bench-users": first.url, "bench-ledger": first.ledger_url}
        await first.stop()
        (folder / "tls").mkdir()
        certificates(folder / "tls", Site(tenants=("bench",), servers=(Server(HOST),), tls="only"))
        file = folder / "nats/nats.conf"
        if tls:
            own = f'cert_file: "{folder}/tls/server.1.pem", key_file: "{folder}/tls/server.1.key"'
            file.write_text(f"{file.read_text()}\ntls {{ {own}, handshake_first: auto }}\n")
        (folder / "nats/context").mkdir()
        for context, url in urls.items():
            fields = {"url": url.replace("nats://", "tls://"), "ca": f"{folder}/tls/ca.pem"} if tls else {"url": url}
            (folder / f"nats/context/{context}.json").write_text(json.dumps(fields))
        os.environ["XDG_CONFIG_HOME"] = str(folder)
        (folder / "nats/server.log").write_text("")
        with (folder / "server.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(find_binary(), "-c", str(file), stdout=log, stderr=log)
        it = Stack(OurServer(process.pid), folder)
        try:
            await until(lambda: "Server is ready" in (folder / "nats/server.log").read_text(), what="the server is up")
            await it.start_scheduler()
            await it.start("worker", [str(HERE / "fleet.py"), it.url, str(folder / "worker"), "256x8xH100", "noop"])
            async with await connect(it.url, "bench ready") as connection:
                await until_up(connection, folder, asked=True)
            yield it
        finally:
            await it.end()
            await end_jobs_now(folder / "worker")
            process.terminate()
            await process.wait()


async def once(jobs: int, *, tls: bool) -> dict[str, float]:
    async with stack(tls=tls) as it:
        callers = await Callers.open(it)
        await callers.closed_loop(500, 1)
        await callers.until_ended(500)
        await callers.waits_ms()
        await callers.closed_loop(1_000, 1)
        await callers.until_ended(1_500)
        alone = quantile(await callers.waits_ms(), 0.5)
        await callers.closed_loop(2_000, 1_000)
        await callers.until_ended(3_500)
        before = sum(map(it.cpu_s, it.pids))
        began = time.monotonic()
        await callers.closed_loop(jobs, 1_000)
        await callers.until_ended(3_500 + jobs)
        took = time.monotonic() - began
        cpu_us = (sum(map(it.cpu_s, it.pids)) - before) / jobs * 1e6
        await callers.close()
    return {ALONE: alone, RATE: jobs / took, CPU: cpu_us}


async def measure(rounds: int, jobs: int) -> dict[str, list[float]]:
    """Return every figure's value of each round, and the ratio of both ways in it."""
    figures: dict[str, list[float]] = {}
    for _ in range(rounds):
        found = {tls: await once(jobs, tls=tls) for tls in (False, True)}
        for name in (ALONE, RATE, CPU):
            figures.setdefault(f"without TLS, {name}", []).append(found[False][name])
            figures.setdefault(f"with TLS, {name}", []).append(found[True][name])
            figures.setdefault(f"with / without TLS, {name.partition(',')[0]}", []).append(
                found[True][name] / found[False][name]
            )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=8_000)
    asked = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    busy = busy_percent()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        figures = runner.run(measure(asked.rounds, asked.jobs))
    for name, values in figures.items():
        print(f"{name}: {', '.join(f'{value:.3g}' for value in values)}")
    keep("tls", "python -m bench.tls", {TITLE: figures}, busy)


if __name__ == "__main__":
    main()
