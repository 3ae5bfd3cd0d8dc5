"""Trainings whose hosts die at random moments, with all that they ran and their disks, by seed.

Each next attempt begins with a whole checkpoint, of no earlier step than the last that the scheduler had been told of.
In the end the losses of each training are, to the last bit, those of one that nothing has disturbed.

    python -m tests.release.checkpoints.deaths --deaths 50
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
from tests.system.live.checkpoint_training import asked, lose_host, said, training, undisturbed
from tests.system.live.stack import BRIEF, Caller, RealProcess, Stack, caller, stack
from tests.waiting import until

STEPS: Final = 240
PAUSE_S: Final = 0.05
#: a host dies so long after its attempt began to run, at most
MOMENT_S: Final = 5.0
#: of a loss, and of the next attempt's start on a busy machine
WAIT_S: Final = 120.0


class Outcome(msgspec.Struct):
    """What has happened: deaths, those among them whose attempt had stored nothing yet, trainings, and by how many
    steps the next attempts were behind what was on the disks."""

    deaths: int = 0
    nothing_stored: int = 0
    trainings: int = 0
    behind: list[int] = msgspec.field(default_factory=list)


class _World:
    def __init__(self, made: Stack, acme: Caller, rng: random.Random, deaths: int) -> None:
        self.undisturbed = ""  # the losses of a training to which nothing happens
        self._made, self._acme, self._rng = made, acme, rng
        self._left = deaths
        self._names: Iterator[int] = itertools.count()
        self._agents: dict[str, RealProcess] = {}
        self.outcome = Outcome()

    async def host(self) -> None:
        name = f"h{next(self._names)}"
        self._agents[name] = await self._made.agent(name, "1xH100", worker=name, drivers=["process"])

    async def train(self) -> None:
        """Run trainings one after another, each with the deaths that come to it, until no more are left."""
        while self._left > 0:
            job = f"train{next(self._names)}"
            await self._acme.submit(job, *training(STEPS, PAUSE_S), run=asked(), retries_on_lost=1000)
            self.outcome.trainings += 1
            attempt = 0
            while self._left > 0:
                attempt += 1
                await until(lambda job=job, at=attempt: self._at(job, at), WAIT_S, f"attempt {attempt} of {job}")
                await asyncio.sleep(self._rng.uniform(0, MOMENT_S))
                if not await self._dies(job, attempt):
                    break
            await self._acme.reaches(job, "SUCCEEDED")
            page = (await self._acme.api("logs", {"job": job}))["data"]
            assert said(page["text"])[1] == self.undisturbed, f"{job} has other losses than one undisturbed: {page}"

    async def _at(self, job: str, attempt: int) -> dict[str, Any] | None:
        """The row of a training once this attempt runs or the training is over; None before."""
        [row] = (await self._acme.show(job))["replica_states"]
        runs = row["attempt"] == attempt and row["state"] == "RUNNING"
        assert row["state"] not in ("FAILED", "CANCELLED", "TIMED_OUT"), f"{job}: {row}"
        return row if runs or row["state"] == "SUCCEEDED" else None

    async def _dies(self, job: str, attempt: int) -> bool:
        """End the host of an attempt and see where the next one begins; False if the training was over before."""
        shown = await self._acme.show(job)
        [row] = shown["replica_states"]
        worker = shown["worker"]
        if row["state"] != "RUNNING" or self._left <= 0:
            return False
        self._left -= 1
        told = row.get("checkpoint", {})
        floor = max(told.get("step") or 0, told.get("from_step") or 0)
        on_disk = self._saved(worker, job)
        await lose_host(self._made, self._agents.pop(worker), worker)
        await self.host()
        after = await until(lambda: self._at(job, attempt + 1), WAIT_S, f"{job} after the death of {worker}")
        began = (after.get("checkpoint") or {}).get("from_step") or 0
        if after["attempt"] == attempt + 1:
            assert began >= floor, f"{job}: attempt {attempt + 1} began at {began}, and {floor} was stored"
            self.outcome.behind.append(max(on_disk - began, 0))
        self.outcome.deaths += 1
        self.outcome.nothing_stored += not floor
        return True

    def _saved(self, worker: str, job: str) -> int:
        """The last step that a training has on the disk of its host."""
        found = (self._made.folder / worker).glob("folders/**/ck/step-*.npz")
        return max((int(path.stem.removeprefix("step-")) for path in found if job in str(path)), default=0)


async def world(server: Server, prefix: str, seed: int, deaths: int, at_once: int = 2) -> Outcome:
    """Run so many deaths over `at_once` trainings, and return what has happened. Raises AssertionError."""
    async with stack(server, prefix) as made, caller(made) as acme:
        await made.scheduler(config=BRIEF)
        await acme.leader()
        of = _World(made, acme, random.Random(seed), deaths)
        for _ in range(at_once + 1):
            await of.host()
        of.undisturbed = await undisturbed(acme, STEPS)
        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(of.train())
        return of.outcome


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deaths", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=2)
    asked_for = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = await EmbeddedServer.start(Path(folder))
        try:
            found = await world(server, f"d{secrets.token_hex(4)}", asked_for.seed, asked_for.deaths, asked_for.at_once)
        finally:
            await server.stop()
    behind = sorted(found.behind)
    print(
        f"{found.deaths} deaths over {found.trainings} trainings, {found.nothing_stored} before anything was stored; "
        f"steps lost: median {behind[len(behind) // 2] if behind else 0}, most {behind[-1] if behind else 0}; "
        "all losses are those of an undisturbed training"
    )


if __name__ == "__main__":
    asyncio.run(main())
