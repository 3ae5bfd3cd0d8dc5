"""`moorage demo`: runs requests of a real cluster's trace, and counts broken promises.

It starts an embedded server, a scheduler and simulated hosts like those of the trace. Several hundred requests run,
each as a real process that checks its own environment, and the scheduler is killed in the middle. At the end the jobs'
own records are checked for lost jobs, attempts started twice and GPUs leased twice.
"""

from __future__ import annotations

import asyncio
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec

from moorage.bus.errors import BusError
from moorage.bus.transport import Delivery
from moorage.cli.demo.stack import Stack
from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.console import try_print_err
from moorage.cli.framework.interrupts import end_in_order
from moorage.client.client import AsyncClient
from moorage.client.errors import ClientError, NoScheduler, Overloaded, Rejected
from moorage.client.follow.follower import decode_events
from moorage.schemas.job import TERMINAL

if TYPE_CHECKING:
    from moorage.testing.demo.drawn_jobs import Planned
    from moorage.testing.demo.judge import Verdict

TENANT: Final = "demo"
#: until all hosts have joined
JOIN_S_MAX: Final = 30.0
#: for each answer, a takeover included; and after the last request until all jobs are over
PATIENCE_S: Final = 90.0
KILL_AT: Final = 0.4
ASK_EVERY_S: Final = 1.0
ASK_S_MAX: Final = 2.0
EXIT_BROKEN_PROMISE: Final = 1


class Following:
    """Keeps the states of all jobs, from the tenant's event frames and from answers of `ls`, since a frame may be
    lost."""

    def __init__(self) -> None:
        self.states: dict[str, str] = {}
        self.revs: dict[str, int] = {}
        self.changed = asyncio.Event()

    def on_events(self, delivery: Delivery) -> None:
        for event in decode_events(delivery.data).jobs:
            self.see(event.job, event.rev, event.state)

    def see(self, job: str, rev: int, state: str) -> None:
        if rev > self.revs.get(job, 0):
            self.revs[job], self.states[job] = rev, state
            self.changed.set()

    def over(self) -> int:
        return sum(1 for state in self.states.values() if state in TERMINAL)


class Demo:
    def __init__(self, stack: Stack, plans: list[Planned], quiet: bool) -> None:
        self.stack = stack
        self.plans = plans
        self.quiet = quiet
        self.following = Following()
        self.submitted_ns: dict[str, int] = {}
        self.refused: dict[str, str] = {}
        self.kills = 0
        self.began = 0.0

    async def run(self) -> None:
        async with AsyncClient(self.stack.url, tenant=TENANT, timeout=PATIENCE_S, name="moorage demo") as client:
            await client._wire.subscribe(client._wire.subjects.events(TENANT), self.following.on_events)
            await self._until_ready(client)
            self.began = time.monotonic()
            background = [asyncio.create_task(self._ask(client)), asyncio.create_task(self._cancel_endless(client))]
            try:
                killing = asyncio.create_task(self._kill_in_the_middle())
                background.append(killing)  # it would start a scheduler behind the end
                await asyncio.gather(*(self.submit(client, plan) for plan in self.plans))
                await self._until_over()
                await killing
            finally:
                for task in background:
                    task.cancel()
                await asyncio.gather(*background, return_exceptions=True)

    async def _until_ready(self, client: AsyncClient) -> None:
        """Wait until all hosts of the fleet have joined."""
        wanted = len(msgspec.json.decode((self.stack.folder / "fleet.json").read_bytes())["host"])
        deadline = time.monotonic() + JOIN_S_MAX
        up = 0
        while up < wanted:
            if self.stack.failed() or time.monotonic() > deadline:
                raise RuntimeError(self.stack.failed() or f"only {up} of {wanted} workers joined")
            try:
                async with asyncio.timeout(ASK_EVERY_S):  # no longer: what must live may have ended
                    up = sum(worker.state == "up" for worker in (await client.fleet.show()).workers)
            except TimeoutError:
                continue
            await asyncio.sleep(0.05)

    async def submit(self, client: AsyncClient, plan: Planned) -> None:
        """Submit a request and note whether it was accepted or refused. The client sends it again, with the same id,
        until it is answered."""
        self.submitted_ns[plan.name] = time.time_ns()
        try:
            job = await client.submit(plan.request)
        except Rejected as refused:
            self.refused[plan.name] = refused.code
        else:
            self.following.see(plan.name, 1, job.state if job.state in TERMINAL else "QUEUED")

    async def _cancel_endless(self, client: AsyncClient) -> None:
        """Cancel the endless job once it runs."""
        while self.following.states.get("endless") != "RUNNING":
            self.following.changed.clear()
            await self.following.changed.wait()
        await client.job("endless").cancel("seen enough")

    async def _kill_in_the_middle(self) -> None:
        while self.following.over() < KILL_AT * len(self.plans):
            self.following.changed.clear()
            await self.following.changed.wait()
        self._print(
            f"the scheduler is killed (kill -9) after {self.following.over()} of {len(self.plans)} jobs have "
            "ended; another scheduler starts"
        )
        await self.stack.kill_scheduler()
        self.kills += 1

    async def _ask(self, client: AsyncClient) -> None:
        """Ask for the states of all jobs now and then, since event frames may be lost."""
        while True:
            await asyncio.sleep(ASK_EVERY_S)
            self._progress()
            try:
                async with asyncio.timeout(ASK_S_MAX):
                    for job in (await client.ls(limit=1000)).jobs:
                        self.following.see(job.job, job.rev, job.state)
            except (TimeoutError, NoScheduler, Overloaded):
                continue  # nobody leads at the moment

    async def _until_over(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        wanted = len(self.plans) - len(self.refused)
        while self.following.over() < wanted and time.monotonic() < deadline:
            if self.stack.failed():
                raise RuntimeError(self.stack.failed())
            self.following.changed.clear()
            try:
                async with asyncio.timeout(ASK_EVERY_S):
                    await self.following.changed.wait()
            except TimeoutError:
                continue

    def _progress(self) -> None:
        states = Counter(self.following.states.values())
        parts = "  ".join(f"{name.lower()} {number}" for name, number in sorted(states.items()))
        self._print(f"{time.monotonic() - self.began:5.1f} s  {parts}")

    def _print(self, text: str) -> None:
        if not self.quiet:
            try_print_err(text)


def table(verdict: Verdict, demo: Demo, fleet_words: str) -> str:
    waits = sorted(verdict.waits_ms) or [0.0]
    rows = [
        ("fleet (SIMULATED GPUs)", fleet_words),
        ("jobs accepted", str(verdict.accepted)),
        ("jobs succeeded", str(verdict.succeeded)),
        ("jobs failed, as planned", str(verdict.failed_as_intended)),
        ("jobs cancelled", str(verdict.cancelled)),
        ("requests refused, as planned", str(verdict.refused)),
        ("kills of the scheduler", str(demo.kills)),
        ("jobs with another end than planned", str(len(verdict.unexpected))),
        ("accepted jobs without an end", str(verdict.lost)),
        ("attempts started twice", str(verdict.started_twice)),
        ("GPUs given to two jobs at once", str(verdict.double_leases)),
        ("processes with a wrong environment", str(len(verdict.bad))),
        ("processes started", str(verdict.runs)),
        ("placements per second, with the kill", f"{verdict.placements_per_s:.0f}"),
        (
            "time from submit to start, ms",
            f"p50 {statistics.median(waits):.0f}  p99 {waits[int(len(waits) * 0.99)]:.0f}",
        ),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name.ljust(width)}  {value}" for name, value in rows)


TRY_NEXT: Final = """try next
  moorage up --simulate 4x8xH100     a simulated fleet that runs until Ctrl-C
  moorage run --gpu 2xH100 -- env    run a job and print its output
  moorage explain JOB                why a job waits"""


def main(
    *,
    jobs: Annotated[int, Parameter(help="Requests drawn from the trace.")] = 400,
    workers: Annotated[int, Parameter(help="Simulated hosts.")] = 14,
    seed: Annotated[int, Parameter(help="The seed of the random choice of requests and hosts.")] = 1,
    json: Annotated[bool, Parameter(help="Print the result as one JSON object.")] = False,
    keep: Annotated[bool, Parameter(help="Keep the folder with logs and records.")] = False,
) -> int:
    """Run 400 requests of a real cluster's trace, each a real process on simulated GPUs, and kill the scheduler midway.

    Then each accepted job must have ended, and as planned. By the records that the jobs wrote, none may have been
    started more often than planned, and no GPU may have been given to two jobs at once, except where jobs share it.

    The exit code is 1 if any promise was broken. Ctrl-C ends everything, and then nothing is judged.
    """
    by: list[int] = []

    def ending(number: int) -> None:
        by.append(number)
        try_print_err("ending …" if len(by) == 1 else "the demo still ends its processes; it leaves none running")

    async def until_a_signal() -> int:
        end_in_order(ending)
        folder = Path(tempfile.mkdtemp(prefix="moorage-demo-"))
        try:
            return await _run(folder, jobs, workers, seed, json)
        finally:
            if keep:
                try_print_err(f"kept: {folder}")
            else:
                shutil.rmtree(folder, ignore_errors=True)

    try:
        return asyncio.run(until_a_signal())
    except asyncio.CancelledError:
        return 128 + by[0]


async def _run(folder: Path, jobs: int, workers: int, seed: int, json: bool) -> int:
    # imported late: the room testing needs the extra server
    from moorage.testing.demo.drawn_jobs import fleet_file, hosts, planned
    from moorage.testing.demo.judge import judge

    stack = Stack(folder)
    fleet = hosts(workers, seed)
    plans = list(planned(fleet, jobs, seed, stack.record))
    gpus = sum(len(host.devices) for host in fleet)
    words = f"{len(fleet)} hosts, {gpus} GPUs of {len({d.name for h in fleet for d in h.devices})} models"
    demo = Demo(stack, plans, quiet=json)
    if not json:
        print(
            f"moorage demo  {words}, SIMULATED; {len(plans)} requests of a real trace, each a real process", flush=True
        )
    try:
        await stack.start(fleet_file(fleet))
        await demo.run()
    except (RuntimeError, BusError, ClientError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BROKEN_PROMISE
    finally:
        await stack.stop()
    verdict = judge(plans, demo.following.states, demo.refused, demo.submitted_ns, stack.record.read_text())
    if json:
        result: dict[str, Any] = msgspec.to_builtins(verdict)
        result["simulated"] = True
        print(msgspec.json.encode(result).decode())
    else:
        print(table(verdict, demo, words))
        for line in [*verdict.unexpected, *verdict.bad][:10]:
            print(f"  ! {line}")
        print(TRY_NEXT)
    return 0 if verdict.kept and demo.kills else EXIT_BROKEN_PROMISE
