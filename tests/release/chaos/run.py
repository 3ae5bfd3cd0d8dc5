"""Fault runs on real processes: `python -m tests.release.chaos.run`, some five minutes; with `--long` the figures.

One line repeats a run's plan: `python -m tests.release.chaos.run --seed SEED --only one`. The order of faults, what
they hit and how long they last come from the seed; when exactly a process is hit is the machine's own doing. What was
seen is judged by `judge.py`; with a violation, or an error, the whole history and every process's words are kept in a
folder.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import msgspec

from moorage.bus.embedded import EmbeddedServer
from moorage.testing.conformance import plain_nats
from tests.cluster import Cluster
from tests.disk import mount_small, unmount
from tests.release.chaos.faults import Faults
from tests.release.chaos.judge import History, Verdict, as_table, judge
from tests.release.chaos.load import Nuisance, Tenant
from tests.release.chaos.records import lines_in
from tests.release.chaos.world import ONE_NODE, THREE_NODES, OneServer, Servers, ThreeServers, World
from tests.system.live.stack import Caller, Stack, caller, unique_prefix

TENANTS: Final = ("acme", "beta", "gamma")
#: between two submits of a tenant, on average
PACE_S: Final = {"one": 0.25, "disk": 0.25, "three": 0.3}
NUMBERS: Final = {"one": ONE_NODE, "disk": ONE_NODE, "three": THREE_NODES}
#: what is done in each world; `three` is the cluster, `disk` a server on a small file system
SHORT: Final[dict[str, dict[str, int]]] = {
    "one": {"leader-kill": 12, "server-kill": 5, "worker-kill": 12, "pause": 5, "partition": 4},
    "disk": {"disk-full": 2, "leader-kill": 2, "worker-kill": 2},
    "three": {"server-kill": 1, "both-leaders": 1, "worker-kill": 3, "partition": 1},
}
LONG: Final[dict[str, dict[str, int]]] = {
    "one": {"leader-kill": 48, "server-kill": 22, "worker-kill": 48, "pause": 21, "partition": 12},
    "disk": {"disk-full": 4, "leader-kill": 3, "worker-kill": 3},
    "three": {"server-kill": 6, "both-leaders": 5, "worker-kill": 8, "partition": 3, "pause": 2},
}


class _Where(msgspec.Struct):
    """The servers of a world, and where it lies."""

    folder: Path
    servers: Any
    disk: Path | None = None


@contextlib.asynccontextmanager
async def _servers(kind: str, folder: Path) -> AsyncIterator[_Where | None]:
    """The servers of one world; None, with a word, where this machine cannot have it."""
    disk = folder / "disk"
    if kind == "disk" and not mount_small(disk):
        print("disk: skipped, as this user may not mount a file system of its own")
        yield None
        return
    servers: Servers
    if kind == "three":
        servers = ThreeServers(await Cluster.start(folder / "nats"))
    else:
        servers = OneServer(await EmbeddedServer.start((disk if kind == "disk" else folder) / "nats"))
    try:
        yield _Where(folder, servers, disk if kind == "disk" else None)
    finally:
        await servers.stop()
        if kind == "disk":
            unmount(disk)


class _Address(msgspec.Struct):
    """The servers as a `Stack` knows them."""

    url: str
    ledger_url: str
    port: int


async def run_world(kind: str, plan: dict[str, int], seed: str, keep: Path) -> tuple[Verdict | None, dict[str, int]]:
    """One world from its start to its verdict; what it leaves behind is kept in `keep` if it broke a promise."""
    # A short path: a supervisor's socket lies in it, whose path may have some 100 characters (unix(7)).
    folder = Path(tempfile.mkdtemp(prefix="mc-"))
    history = History([], {}, [], [], [])
    verdict: Verdict | None = None
    counts: dict[str, int] = {}
    try:
        async with _servers(kind, folder) as where:
            if where is None:
                return None, {}
            verdict = await _judged(kind, plan, seed, where, history, counts)
    except BaseException:
        _keep(folder, keep, history, None)
        raise
    finally:
        if verdict is not None and not verdict.kept:
            _keep(folder, keep, history, verdict)
        shutil.rmtree(folder, ignore_errors=True)
    return verdict, counts


async def _judged(
    kind: str, plan: dict[str, int], seed: str, where: _Where, history: History, counts: dict[str, int]
) -> Verdict:
    servers: Servers = where.servers
    ports = servers.ports()
    address = _Address(servers.url_at(ports), servers.ledger_url_at(ports), ports[0])
    made = Stack(address, where.folder, unique_prefix())
    world = World(made, servers, NUMBERS[kind], where.disk)
    lines = where.folder / "lines"
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(world.close)
        callers = [await stack.enter_async_context(caller(made, tenant)) for tenant in TENANTS]
        operator = await stack.enter_async_context(caller(made, "operator"))
        await world.open(operator)
        nuisance = await _nuisance(stack, made, address, seed)
        tenants = [Tenant(each, lines, seed, PACE_S[kind]) for each in callers]
        faults = Faults(world, operator, plan, f"{seed} {kind}", print)
        try:
            async with asyncio.TaskGroup() as group:
                load = [group.create_task(tenant.run()) for tenant in tenants]
                noise = group.create_task(nuisance.run())
                await faults.run()
                for tenant in tenants:
                    tenant.stop()
                await asyncio.gather(*load)
                noise.cancel()
            for tenant in tenants:
                history.finals |= await tenant.settle()
            await operator.all_free()
        finally:
            world.read_journals()
            history.accepted = [planned for tenant in tenants for planned in tenant.accepted]
            history.holds = world.holds
            history.lives = [life for supervisor in world.supervisors for life in supervisor.lives.values()]
            history.lines = lines_in(lines)
            (where.folder / "ledger.txt").write_text(await _ledger_words(operator))
        assert history.lives, "the judge must not believe in supervisors' journals that it did not find"
        counts |= dict(faults.done)
        counts |= {"garbage": nuisance.garbage, "repeats": nuisance.repeats, "ledger-junk": nuisance.junk}
        return judge(history)


async def _nuisance(stack: contextlib.AsyncExitStack, made: Stack, address: _Address, seed: str) -> Nuisance:
    options: dict[str, Any] = {"reconnect_time_wait": 0.2, "max_reconnect_attempts": -1}
    users = await plain_nats.connect(address.url.split(","), **options)
    stack.push_async_callback(users.close)
    ledger = await plain_nats.connect(address.ledger_url.split(","), **options)
    stack.push_async_callback(ledger.close)
    return Nuisance(users, made.subjects.prefix, ledger, made.subjects.ledger_record, seed)


async def _ledger_words(operator: Caller) -> str:
    """The fleet and the audit as the last leader tells them, for whoever looks into a kept history."""
    with contextlib.suppress(Exception):
        return msgspec.json.encode([await operator.fleet(), await operator.admin("audit")]).decode()
    return "nobody leads"


def _keep(folder: Path, keep: Path, history: History, verdict: Verdict | None) -> None:
    """The history and what the processes said, without the servers' data."""
    keep.mkdir(parents=True, exist_ok=True)
    for file in (*folder.glob("*.log"), *folder.glob("lines"), *folder.glob("ledger.txt")):
        shutil.copy(file, keep)
    for log in folder.rglob("server.log"):
        shutil.copy(log, keep / f"{log.parent.name}-server.log")
    (keep / "history.json").write_bytes(msgspec.json.encode(history))
    (keep / "verdict.json").write_bytes(msgspec.json.encode(verdict))
    print(f"kept in {keep}")


async def run(plans: dict[str, dict[str, int]], seed: str, keep: Path) -> bool:
    """Every world in turn. Prints as it goes; returns whether every promise was kept."""
    kept, began_s = True, time.monotonic()
    totals: dict[str, int] = {}
    for kind, plan in plans.items():
        print(f"== {kind}: {' '.join(f'{name}={count}' for name, count in plan.items())}; numbers {NUMBERS[kind]}")
        world_began_s = time.monotonic()
        verdict, counts = await run_world(kind, plan, seed, keep / kind)
        if verdict is None:
            continue
        for name, count in counts.items():
            totals[f"{kind}.{name}"] = count
        print(f"{kind}: {time.monotonic() - world_began_s:.0f} s, faults {counts}")
        print(f"{kind}: {'kept' if verdict.kept else 'BROKEN'} {as_table(verdict)}")
        for what in verdict.found:
            print(f"  {what}")
        kept = kept and verdict.kept
    print(
        f"chaos {'kept every promise' if kept else 'BROKE A PROMISE'} in {time.monotonic() - began_s:.0f} s: {totals}"
    )
    print(f"again: python -m tests.release.chaos.run --seed {seed}{' --long' if plans == LONG else ''}")
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--long", action="store_true", help="the figures: some 25 minutes on two quiet cores")
    parser.add_argument("--seed", default="", help="of the plan; at random, and printed, where it is not given")
    parser.add_argument("--only", choices=sorted(SHORT), help="one world alone")
    parser.add_argument("--faults", default="", help="another plan for --only: leader-kill=3,pause=1")
    parser.add_argument("--keep", type=Path, default=Path(".chaos"), help="where histories of failures go")
    given = parser.parse_args()
    plans = LONG if given.long else SHORT
    if given.only:
        plans = {given.only: plans[given.only]}
        if given.faults:
            plans = {given.only: {k: int(n) for k, n in (pair.split("=") for pair in given.faults.split(","))}}
    seed = given.seed or secrets.token_hex(4)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    logging.getLogger("nats").setLevel(logging.CRITICAL)  # it prints a traceback for every server that is away
    print(f"seed {seed}, pid {os.getpid()}")
    sys.exit(0 if asyncio.run(run(plans, seed, given.keep / seed)) else 1)


if __name__ == "__main__":
    main()
