"""A fleet of simulated GPUs in trouble: a hundred jobs of ten kinds, sick GPUs, a lost worker, a drain.

For tests of screens, and to look at: `python -m tests.troubled FOLDER` starts it on a port of its own, prints where it
is, and ends it with Ctrl-C. Then, in another shell: `MOORAGE_HOME=FOLDER/node moorage top`.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import msgspec

from moorage.cli.local.local_tools import end_jobs_now
from moorage.client import AsyncClient
from tests.system.cli.node import Node, node_on, start
from tests.waiting import NeverHappened, until

#: each kind of trouble has so many jobs
EACH: Final = 10
#: the kinds, and the tenant whose jobs have it
KINDS: Final = {
    "never": "audio",  # it asks for a model that the fleet does not have
    "gang": "llm",  # it needs two whole hosts at once
    "busy": "bio",  # all GPUs of its model are leased
    "limit": "search",  # its tenant may lease no more
    "held": "ops",  # an operator holds its queue
    "fails": "vision",  # it fails, and is tried again and again
    "idle": "notebooks",  # it holds a GPU and does nothing
    "stalled": "train",  # it does nothing, and says nothing, where that is no use of a GPU
    "leaves": "batch",  # its worker is drained
    "lost": "render",  # its worker is gone
}
LIMIT: Final = 4
LOST: Final = "n17"
CORDONED: Final = "n12"
#: a process without a lease is on one of its GPUs
TAKEN: Final = "n08"
WAIT_S: Final = 60.0

_HOSTS: Final = {
    "host": [
        *({"name": f"n{number:02}", "gpus": "8xH100"} for number in range(1, 9)),
        *({"name": f"n{number:02}", "gpus": "8xA100"} for number in range(9, 13)),
        *({"name": f"n{number:02}", "gpus": "8xL40S"} for number in range(13, 17)),
    ]
}
_FAULTS: Final[dict[str, dict[str, Any]]] = {
    "n03": {"1": {"xid": 79}, "3": {"uncorrected_errors": 12}, "5": {"missing": True}},
    TAKEN: {"7": {"process": {"pid": 8812, "name": "python", "user": "bob", "memory_mib": 900}}},
    "n14": {"0": {"slowed_down": True}},
}
_SLEEP: Final = {"argv": ["sleep", "86400"]}


def requests(kind: str) -> list[dict[str, Any]]:
    """The jobs of a kind."""
    kinds: dict[str, dict[str, Any]] = {
        "never": {"gpu": {"model": ["B200"], "count": 2}, "on_no_match": "wait"},
        "gang": {"gpu": {"model": ["H100"], "count": 8, "scheduling": "gang"}, "replicas": 2},
        "busy": {"gpu": {"model": ["A100"], "count": 8}},
        "limit": {"gpu": {"model": ["L40S"]}},
        "held": {"gpu": {"model": ["L40S"]}},
        "fails": {"gpu": {"model": ["L40S"]}, "run": {"argv": ["false"]}, "retries": 99},
        "idle": {"gpu": {"model": ["A100"]}},
        "stalled": {"gpu": {"model": ["H100"]}, "run": {**_SLEEP, "stall_s": 2}},
        "leaves": {"gpu": {"model": ["H100"]}},
        "lost": {"gpu": {"model": ["H100"]}, "requires": {"room": ["far"]}, "on_partition": "keep"},
    }
    return [
        {"run": _SLEEP, **kinds[kind], "job": f"{kind}-{number}", "labels": {"kind": kind}} for number in range(EACH)
    ]


class Troubled:
    """The fleet, running; `node` has its address."""

    def __init__(self, node: Node, other: asyncio.subprocess.Process) -> None:
        self.node = node
        self._other = other
        self._faults = {worker: dict(slots) for worker, slots in _FAULTS.items()}

    async def begin(self) -> None:
        """Bring all of it into trouble; returns once it is."""
        await self._taken()
        await self._works()
        for kind in ("idle", "stalled", "limit", "lost", "leaves", "busy", "gang", "never", "held", "fails"):
            if kind == "limit":
                await self._run("admin", "limit", "--gpus", str(LIMIT), tenant=KINDS[kind])
            if kind == "held":
                await self._run("admin", "hold", "--queue", "--why", "month end", tenant=KINDS[kind])
            async with AsyncClient(self.node.url, tenant=KINDS[kind]) as client:
                await client.submit_many(requests(kind))
        for kind in ("idle", "stalled"):
            await self._runs(kind, EACH)
        await self._runs("lost", 8)
        await self._runs("leaves", EACH)
        self._other.send_signal(signal.SIGKILL)
        await self._other.wait()
        await self._run("drain", await self._most_of("leaves"), "--within", "2h", "--why", "new disks")
        await self._run("cordon", CORDONED)
        self._play(self._faults)
        await self._is_seen()

    async def _is_seen(self) -> None:
        async with AsyncClient(self.node.url) as client:

            async def is_told() -> bool:
                # a GPU that fails now may have been one of a stalled job's
                fleet = (await client.fleet.show()).data
                rows = {row["worker"]: row for row in fleet["workers"]}
                seen.clear()
                seen.update({worker: rows[worker]["troubles"] for worker in _FAULTS})
                seen.update({LOST: rows[LOST]["state"], "stalled": fleet["stalled"]})
                return (
                    all(seen[worker] for worker in _FAULTS)
                    and seen[LOST] in ("lost", "stale", "not-heard")
                    and len(seen["stalled"]) >= EACH // 2
                )

            seen: dict[str, Any] = {}
            try:
                await until(is_told, WAIT_S, "the faults, the lost worker and the stalls are seen")
            except NeverHappened as error:
                raise NeverHappened(f"{error}: {seen}") from None

    async def _taken(self) -> None:
        """Have a process without a lease on a GPU before any job: once the GPU is leased, it is no trouble of it."""
        async with AsyncClient(self.node.url) as client:

            async def is_told() -> bool:
                self._play({TAKEN: _FAULTS[TAKEN]})  # for a host that was not up yet, too
                rows = {row["worker"]: row for row in (await client.fleet.show()).data["workers"]}
                return TAKEN in rows and bool(rows[TAKEN]["troubles"])

            await until(is_told, WAIT_S, f"a process without a lease is seen on {TAKEN}")

    async def _works(self) -> None:
        """Fill most of the fleet with jobs that work; on simulated GPUs that is played."""
        async with AsyncClient(self.node.url, tenant="vision") as client:
            for model, jobs, count in (("H100", 9, 4), ("A100", 4, 4), ("L40S", 12, 2)):
                wanted = {"gpu": {"model": [model], "count": count}, "run": _SLEEP}
                await client.submit_many([{**wanted, "job": f"works-{model.lower()}-{at}"} for at in range(jobs)])

            async def run() -> list[Any] | None:
                rows = (await client.ls(states=["RUNNING"], limit=1000)).jobs
                return rows if len(rows) == 25 else None

            for at, row in enumerate(await until(run, WAIT_S, "what works runs")):
                for replica in (await client.job(row.job).show()).data["replica_states"]:
                    slots = self._faults.setdefault(replica["worker"], {})
                    for each, index in enumerate(sorted(used["index"] for used in await self._used(client, row.job))):
                        slots.setdefault(str(index), {"percent": 60 + (7 * at + 3 * each) % 39, "power_w": 400})
        self._play(self._faults)

    async def _used(self, client: AsyncClient, job: str) -> list[dict[str, Any]]:
        async def found() -> list[dict[str, Any]] | None:
            rows = (await client.job(job).show()).data["replica_states"]
            return rows[0].get("use") or None

        return list(await until(found, WAIT_S, f"use of {job} is read"))

    async def _most_of(self, kind: str) -> str:
        """Return the worker that has most jobs of a kind."""
        async with AsyncClient(self.node.url, tenant=KINDS[kind]) as client:
            return Counter(row.worker for row in (await client.ls(states=["RUNNING"])).jobs).most_common(1)[0][0]

    def _play(self, faults: dict[str, dict[str, Any]]) -> None:
        for folder in (self.node.folder / "workers").iterdir():
            if folder.is_dir():
                (folder / "faults.json").write_bytes(msgspec.json.encode(faults))

    async def _run(self, *argv: str, tenant: str = "") -> None:
        ran = await self.node.run(*argv, tenant=tenant)
        assert ran.code == 0, ran.err

    async def _runs(self, kind: str, jobs: int) -> None:
        async with AsyncClient(self.node.url, tenant=KINDS[kind]) as client:

            async def run() -> bool:
                return len((await client.ls(states=["RUNNING"], labels={"kind": kind})).jobs) >= jobs

            await until(run, WAIT_S, f"{jobs} jobs {kind} run")


@contextlib.asynccontextmanager
async def troubled(folder: Path) -> AsyncIterator[Troubled]:
    """The fleet in trouble; it ends with the block. The worker that is lost has an agent of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    hosts, one = folder / "hosts.json", folder / "one.json"
    hosts.write_bytes(msgspec.json.encode(_HOSTS))
    one.write_bytes(msgspec.json.encode({"host": [{"name": LOST, "gpus": "8xH100"}]}))
    async with node_on(folder / "node", simulate=str(hosts)) as node:
        state = folder / "other"
        words = ("--simulate", str(one), "--state", str(state), "--nats", node.url, "--label", "room=far")
        other = await start("worker", *words, env=node.env())
        try:
            async with AsyncClient(node.url) as client:

                async def is_up() -> bool:
                    return any(row.worker == LOST for row in (await client.fleet.show()).workers)

                await until(is_up, WAIT_S, f"{LOST} is up")
            made = Troubled(node, other)
            await made.begin()
            yield made
        finally:
            if other.returncode is None:
                other.kill()
                await other.wait()
            await end_jobs_now(state)  # its supervisor outlives it, as it should


async def main() -> None:
    folder = Path(sys.argv[1])
    async with troubled(folder) as made:
        print(f"MOORAGE_HOME={made.node.folder} moorage top", flush=True)
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, ended.set)
        await ended.wait()


if __name__ == "__main__":
    asyncio.run(main())
