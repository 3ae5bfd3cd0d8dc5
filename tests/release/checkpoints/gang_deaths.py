"""Gangs that train while their hosts die at random moments, with all that they ran and their disks, by seed.

All ranks of the next attempt begin at one step: rank 0 ends the gang with code 99 where another rank is elsewhere. That
step is no earlier than the newest that all ranks had been told to have. In the end the losses of each rank are, to the
last bit, those of a gang that nothing has disturbed.

    python -m tests.release.checkpoints.gang_deaths --deaths 30
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from moorage.bus.embedded import EmbeddedServer
from tests.servers import Server
from tests.system.live.checkpoint_training import asked, lose_host, said
from tests.system.live.gang_training import gang_training
from tests.system.live.stack import BRIEF, Caller, RealProcess, Stack, caller, stack
from tests.waiting import until

RANKS: Final = 2
STEPS: Final = 160
PAUSE_S: Final = 0.05
#: a host dies so long after all ranks began to run, at most
MOMENT_S: Final = 6.0
WAIT_S: Final = 150.0
#: trainings whose folder names no step save less often, so that all ranks are quiet at some moments
MOMENTS: Final[dict[str, Any]] = {"checkpoint_step": None, "checkpoint_every_s": 2.0}
EVERY: Final = {True: 30, False: 5}
_GANG: Final[dict[str, Any]] = {"scheduling": "gang", "model": "H100", "distinct_hosts": True}


class Outcome(msgspec.Struct):
    """What has happened: deaths, those among them before all ranks had stored one step, gangs, and from which steps
    the attempts behind the deaths began."""

    deaths: int = 0
    nothing_stored: int = 0
    gangs: int = 0
    began: list[int] = msgspec.field(default_factory=list)


class _World:
    def __init__(self, made: Stack, acme: Caller, rng: random.Random, deaths: int, moments: bool) -> None:
        self._moments = moments
        self.undisturbed: list[str] = []
        self._made, self._acme, self._rng = made, acme, rng
        self._left = deaths
        self._names: Iterator[int] = itertools.count()
        self._agents: dict[str, RealProcess] = {}
        self.outcome = Outcome()

    async def host(self) -> None:
        name = f"h{next(self._names)}"
        self._agents[name] = await self._made.agent(name, "1xH100", worker=name, drivers=["process"])

    async def _submit(self, pause_s: float) -> str:
        job = f"gang{next(self._names)}"
        fields = {"replicas": RANKS, "gpu": _GANG, "retries": 1000, "retries_on_lost": 1000}
        run = asked(**MOMENTS) if self._moments else asked()
        await self._acme.submit(job, *gang_training(STEPS, pause_s, EVERY[self._moments]), run=run, **fields)
        return job

    async def digests(self, pause_s: float) -> list[str]:
        """The losses of a gang to which nothing happens, by rank."""
        job = await self._submit(pause_s)
        return await self._ended(job)

    async def _ended(self, job: str) -> list[str]:
        await self._acme.reaches(job, "SUCCEEDED", deadline_s=WAIT_S)
        pages = [(await self._acme.api("logs", {"job": job, "replica": rank}))["data"]["text"] for rank in range(RANKS)]
        assert "mixed" not in "".join(pages), f"{job}: {pages}"
        return [said(page)[1] for page in pages]

    async def train(self) -> None:
        while self._left > 0:
            job, attempt = await self._submit(PAUSE_S), 0
            self.outcome.gangs += 1
            while self._left > 0:
                rows = await until(lambda job=job, at=attempt: self._runs(job, at + 1), WAIT_S, f"{job} runs again")
                if not rows:
                    break
                attempt = rows[0]["attempt"]
                await asyncio.sleep(self._rng.uniform(0, MOMENT_S))
                if not await self._dies(job):
                    break
            assert await self._ended(job) == self.undisturbed, f"{job} has other losses than one undisturbed"

    async def _runs(self, job: str, attempt: int) -> list[dict[str, Any]] | None:
        """The rows of a gang once all ranks of this attempt or a later one run, [] once it is over; None before."""
        shown = await self._acme.show(job)
        assert shown["state"] not in ("FAILED", "CANCELLED", "TIMED_OUT"), f"{job}: {shown}"
        rows: list[dict[str, Any]] = shown["replica_states"]
        if shown["state"] == "SUCCEEDED":
            return []
        run = all(row["state"] == "RUNNING" and row["attempt"] >= attempt for row in rows)
        return rows if run and len({row["attempt"] for row in rows}) == 1 else None

    async def _dies(self, job: str) -> bool:
        """End the host of one rank and see where the next attempt begins; False if the gang was over before."""
        shown = await self._acme.show(job)
        rows = shown["replica_states"]
        if shown["state"] != "RUNNING" or any(not row.get("worker") for row in rows) or self._left <= 0:
            return False
        self._left -= 1
        floor = max(row.get("checkpoint", {}).get("from_step") or 0 for row in rows)
        worker = self._rng.choice(rows)["worker"]
        await lose_host(self._made, self._agents.pop(worker), worker)
        await self.host()
        after = await until(lambda: self._runs(job, rows[0]["attempt"] + 1), WAIT_S, f"{job} after {worker} died")
        self.outcome.deaths += 1
        if not after:
            return False
        began = {(row.get("checkpoint") or {}).get("from_step") or 0 for row in after}
        assert len(began) == 1, f"{job}: ranks begin at {began}"
        assert min(began) >= floor, f"{job}: it begins at {began}, and had begun at {floor} before"
        self.outcome.began.append(min(began))
        self.outcome.nothing_stored += not min(began)
        return True


async def world(
    server: Server, prefix: str, seed: int, deaths: int, gangs: int = 2, *, moments: bool = False
) -> Outcome:
    """Run so many deaths over `gangs` gangs at once, and return what has happened. Raises AssertionError."""
    async with stack(server, prefix) as made, caller(made) as acme:
        await made.scheduler(config=BRIEF)
        await acme.leader()
        of = _World(made, acme, random.Random(seed), deaths, moments)
        for _ in range(gangs * RANKS + 1):
            await of.host()
        of.undisturbed = await of.digests(0)
        async with asyncio.TaskGroup() as group:
            for _ in range(gangs):
                group.create_task(of.train())
        return of.outcome


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deaths", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--gangs", type=int, default=2)
    parser.add_argument("--moments", action="store_true", help="no names with steps: what all had as none wrote")
    asked_for = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = await EmbeddedServer.start(Path(folder))
        try:
            found = await world(
                server,
                f"d{secrets.token_hex(4)}",
                asked_for.seed,
                asked_for.deaths,
                asked_for.gangs,
                moments=asked_for.moments,
            )
        finally:
            await server.stop()
    print(
        f"{found.deaths} deaths over {found.gangs} gangs of {RANKS} ranks, {found.nothing_stored} before all had a "
        f"step; the attempts behind them began at {sorted(found.began)}; all losses are those of an undisturbed gang"
    )


if __name__ == "__main__":
    asyncio.run(main())
