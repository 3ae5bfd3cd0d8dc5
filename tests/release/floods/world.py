"""Two tenants or a worker that flood, from processes of their own, beside quiet tenants, operators and workers with
running jobs.

`python -m tests.release.floods.world --seconds 45` prints what the others waited for their answers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from moorage.bus.connection import Connection
from moorage.bus.errors import BusError
from moorage.schemas.subjects import FLEET, Subjects
from tests.servers import ANSWER_S
from tests.sites import RunningSite, running
from tests.system.live.scripted_worker import ScriptedWorker, scripted_worker
from tests.system.live.stack import RealProcess
from tests.waiting import until

SUBJECTS: Final = Subjects()
#: by key: the kind of its messages
OF_TENANTS: Final = {"submitter.loud": "explains", "submitter.heavy": "submits"}
QUIET: Final = tuple(f"quiet-{number}" for number in range(1, 6))
WORKERS: Final = tuple(f"w{number:02}" for number in range(1, 21))
#: one that floods has no job and no session
STRAY: Final = "stray"
#: between two questions of one tenant, or of an operator
PAUSE_S: Final = 0.1
#: one try of a question, as the SDK has it
TRY_S: Final = 3.0
NICE_MOST: Final = 19


class Figures(NamedTuple):
    """What a flood did: answers' times in seconds, tries in vain, and what the fleet said."""

    tenants_s: list[float]
    operators_s: list[float]
    in_vain: int
    renewals_s: float  # the longest time between two answered renewals of one worker
    fleet: list[str]
    jobs: list[str]  # states of the jobs that ran before
    refused: dict[str, int]  # messages, by tenant
    rationed: list[str]  # tenants, while they flooded
    cuts: int  # of connections, by the server

    def words(self) -> str:
        return (
            f"tenants: {_words(self.tenants_s)}; operators: {_words(self.operators_s)}; tries in vain: {self.in_vain};"
            f" longest without a renewal: {self.renewals_s:.2f} s; fleet: {sorted(set(self.fleet))}; jobs:"
            f" {sorted(set(self.jobs))}; refused: {self.refused}; rationed: {self.rationed}; cuts: {self.cuts}"
        )


def _words(times_s: list[float]) -> str:
    times = sorted(times_s)
    at = {name: times[min(len(times) - 1, int(len(times) * part))] for name, part in (("p50", 0.5), ("p99", 0.99))}
    return f"{len(times)} answers, p50 {at['p50']:.3f} s, p99 {at['p99']:.3f} s, most {times[-1]:.3f} s"


class World:
    def __init__(self, site: RunningSite, folder: Path) -> None:
        self.site = site
        self.folder = folder
        self.environment = {**os.environ, **site.environment}

    @contextlib.asynccontextmanager
    async def process(self, name: str, *words: str, **more: str) -> AsyncIterator[RealProcess]:
        log = self.folder / f"{name}.log"
        with log.open("ab") as out:
            started = await asyncio.create_subprocess_exec(
                sys.executable, *words, env=self.environment | more, stdout=out, stderr=out
            )
        process = RealProcess(started, log)
        try:
            yield process
        finally:
            await process.kill()

    def cuts(self) -> int:
        return (self.site.folder / "server-0.log").read_text().count("Slow Consumer")


async def _asks(connection: Connection, subject: str, times_s: list[float], until_s: float) -> int:
    """Ask again and again; return how many tries were in vain."""
    in_vain = 0
    while time.monotonic() < until_s:
        began_s = time.monotonic()
        while True:
            try:
                await connection.request(subject, b"{}", TRY_S)
                break
            except BusError:
                in_vain += 1
                await asyncio.sleep(PAUSE_S)
        times_s.append(time.monotonic() - began_s)
        await asyncio.sleep(PAUSE_S)
    return in_vain


async def _watch_renewals(workers: list[ScriptedWorker], until_s: float) -> float:
    """Return the longest time in which one of the workers got no answer to a renewal."""
    heard = {worker.worker: (0, time.monotonic()) for worker in workers}
    longest_s = 0.0
    while time.monotonic() < until_s:
        await asyncio.sleep(PAUSE_S)
        for worker in workers:
            answers, since_s = heard[worker.worker]
            if len(worker.answers) > answers:
                heard[worker.worker] = len(worker.answers), time.monotonic()
            longest_s = max(longest_s, time.monotonic() - since_s)
    return longest_s


async def _answer(connection: Connection, subject: str, body: Any) -> dict[str, Any]:
    answer = await connection.request(subject, msgspec.json.encode(body), ANSWER_S)
    return dict(msgspec.json.decode(answer.data))


async def flooded(seconds: float, floods: Mapping[str, str] = OF_TENANTS, *, aside: bool = False) -> Figures:
    """Flood for so long, and return what the others saw of it. With `aside` the programs that flood have what the
    others leave of the processors, nearly as if they were on machines of their own."""
    async with contextlib.AsyncExitStack() as ends:
        tenants = ("loud", "heavy", *QUIET)
        site = await ends.enter_async_context(running(tenants=tenants, workers=(*WORKERS, STRAY)))
        world = World(site, Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="moorage-flood-"))))
        await ends.enter_async_context(
            world.process("scheduler", "-m", "moorage.cli", "scheduler", "--nats", "scheduler.main",
                          MOORAGE_LEDGER_URL="ledger.main")
        )  # fmt: skip

        async def connected(key: str) -> Connection:
            return await ends.enter_async_context(await site.connect(key))

        ana = await connected("operator.ana")
        told: list[str] = []
        await ana.subscribe(SUBJECTS.events(FLEET), lambda each: told.append(msgspec.json.decode(each.data)["what"]))
        workers = []
        for name in WORKERS:
            nc = (await connected(f"worker.{name}"))._client
            workers.append(await ends.enter_async_context(scripted_worker(nc, SUBJECTS, name, 1)))
        askers = {tenant: await connected(f"submitter.{tenant}") for tenant in QUIET}
        jobs: list[tuple[str, str]] = []
        for at in range(len(workers)):
            tenant, job = QUIET[at % len(QUIET)], f"j{at}"
            request = {"job": job, "gpu": {}, "run": {"argv": ["true"]}}
            answer = await _answer(askers[tenant], SUBJECTS.api(tenant, "submit"), request)
            assert answer["kind"] == "accepted", answer
            placed = await until(
                lambda job=job: [each for each in workers if each.fences(job)], what=f"a place of {job}"
            )
            await placed[0].step(job, "claimed", "started")
            jobs.append((tenant, job))
        told.clear()
        before, ended_s = world.cuts(), time.monotonic() + seconds
        tenants_s: list[float] = []
        operators_s: list[float] = []
        asking = [_asks(askers[tenant], SUBJECTS.api(tenant, "ls"), tenants_s, ended_s) for tenant in QUIET]
        fleet = SUBJECTS.admin("fleet", "ana")
        async with contextlib.AsyncExitStack() as flood:
            for key, kind in floods.items():
                words = ("-m", "tests.release.floods.flooder", key, kind)
                program = await flood.enter_async_context(world.process(f"flood-{key}", *words))
                if aside:
                    os.setpriority(os.PRIO_PROCESS, program.pid, NICE_MOST)
            *in_vain, _, renewals_s = await asyncio.gather(
                *asking, _asks(ana, fleet, operators_s, ended_s), _watch_renewals(workers, ended_s)
            )
            rates = (await _answer(ana, fleet, {}))["data"].get("rates") or []
        print((world.folder / "scheduler.log").read_text()[-6000:])
        states = []
        for tenant, job in jobs:
            shown = await _answer(askers[tenant], SUBJECTS.api(tenant, "show"), {"job": job})
            states.append(shown["data"]["state"])
        refused = {row["tenant"]: row["refused"] for row in rates}
        return Figures(
            tenants_s,
            operators_s,
            int(sum(in_vain)),
            float(renewals_s),
            told,
            states,
            refused,
            [row["tenant"] for row in rates if row["rationed"]],
            world.cuts() - before,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=45)
    parser.add_argument("--quiet", action="store_true", help="without any flood, to compare")
    kinds = "renewals", "facts", "loads", "looks"
    parser.add_argument("--worker", choices=kinds, help="a worker floods with these, and no tenant does")
    parser.add_argument("--aside", action="store_true", help="the programs that flood have the lowest priority")
    given = parser.parse_args()
    floods = {} if given.quiet else {f"worker.{STRAY}": given.worker} if given.worker else OF_TENANTS
    print(asyncio.run(flooded(given.seconds, floods, aside=given.aside)).words())


if __name__ == "__main__":
    main()
