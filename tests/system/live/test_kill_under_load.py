"""Real /bin/sh jobs on simulated GPUs, through the real supervisor, while what runs them is killed and stopped."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

from moorage.schemas.job import TERMINAL
from tests.servers import Server
from tests.system.live.stack import BRIEF, Caller, caller, is_alive, stack
from tests.waiting import until

pytestmark = pytest.mark.any_server

JOBS: Final = 150
TENANTS: Final = ("acme", "beta", "gamma")
#: every line is one O_APPEND write, so that the file's order is the order in which it happened
SCRIPT: Final = """
say() { echo "$1 $MOORAGE_TENANT/$MOORAGE_JOB $MOORAGE_FENCE $MOORAGE_GPU_UUIDS $$" >> {log}; }
say start; sleep 0.03; say beat; sleep 0.03; say end
"""
_LINE: Final = re.compile(r"(?P<word>start|beat|end) (?P<job>\S+) (?P<fence>\d+) (?P<uuids>\S+) (?P<pid>\d+)")


class Lines:
    """What the jobs wrote."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def all(self) -> list[re.Match[str]]:
        if not self.log.exists():
            return []
        found = [_LINE.fullmatch(line) for line in self.log.read_text().splitlines()]
        assert all(found), "a line was torn"
        return [line for line in found if line is not None]

    def ended(self) -> int:
        return sum(1 for line in self.all() if line["word"] == "end")

    def check(self) -> None:
        """Each attempt ran at most once, and no two attempts overlap on a device."""
        lines = self.all()
        starts = Counter(line["fence"] + line["job"] for line in lines if line["word"] == "start")
        assert set(starts.values()) == {1}, [key for key, count in starts.items() if count > 1]
        holder: dict[str, str] = {}
        was: dict[str, set[str]] = {}
        for at, line in enumerate(lines):
            for uuid in line["uuids"].split(","):
                attempt = f"{line['job']} {line['fence']}"
                if holder.get(uuid) != attempt:
                    on_it = [each[0] for each in lines[:at] if uuid in each[0]]
                    assert attempt not in was.setdefault(uuid, set()), f"{line[0]} after {on_it[-6:]}"
                    assert line["word"] == "start", f"{line[0]} without its start on {uuid}"
                    holder[uuid] = attempt
                    was[uuid].add(attempt)


@pytest.mark.slow
async def test_every_job_ends_once_whatever_is_killed(nats_server: Server, unique: str) -> None:
    async with (
        stack(nats_server, unique) as made,
        caller(made, TENANTS[0]) as acme,
        caller(made, TENANTS[1]) as beta,
        caller(made, TENANTS[2]) as gamma,
    ):
        lines = Lines(made.folder / "lines")
        callers = (acme, beta, gamma)
        scheduler = await made.scheduler()
        agent = await made.agent("w", "4x4xH100")
        await acme.leader()
        await acme.workers_up(*(f"sim-{n:04d}" for n in range(4)))
        script = SCRIPT.replace("{log}", str(lines.log))

        async def submit(one: Caller) -> dict[str, str]:
            """Singly, as a caller does that knows no batch; an answer that does not come is asked for again."""
            accepted = {}
            for number in range(JOBS // len(callers)):
                gpus = (1, 1, 2, 4)[number % 4]
                answer = await one.submit(f"j{number}", "/bin/sh", "-c", script, gpu={"count": gpus})
                assert answer["kind"] == "accepted", answer
                accepted[answer["job"]] = one.tenant
            return accepted

        async def kills() -> None:
            nonlocal agent
            await until(lambda: lines.ended() > JOBS // 6, 150, "a sixth done")
            supervised = await made.supervisor("w")
            supervised.kill()
            await supervised.wait_gone()
            await until(lambda: lines.ended() > JOBS // 3, 150, "a third done")
            await scheduler.kill()
            await agent.kill()
            await made.scheduler()
            agent = await made.agent("w", "4x4xH100")

        killing = asyncio.create_task(kills())
        accepted = await asyncio.gather(*map(submit, callers))
        await killing
        for one, jobs in zip(callers, accepted, strict=True):
            assert len(jobs) == JOBS // len(callers)
            for job in jobs:
                await one.reaches(job, *TERMINAL, deadline_s=150)
        await acme.all_free()
        for one, jobs in zip(callers, accepted, strict=True):
            for job in jobs:
                shown = await one.check_history(job)
                assert shown["state"] == "SUCCEEDED", shown
                ends = [change["state"] for change in shown["changes"] if change["state"] in TERMINAL]
                assert ends == ["SUCCEEDED"], shown
                assert len(set(one.ended.get(job, ends))) == 1
        lines.check()
        assert lines.ended() >= JOBS
        assert not [line[0] for line in lines.all() if is_alive(int(line["pid"]))]
        assert sum([await losses(one) for one in callers]) > 0, "the supervisor had no job to lose"


async def losses(one: Caller) -> int:
    """Attempts of the tenant's jobs that ended with what ran them, charged or not: of several at once nobody knows
    which one killed it.
    """
    jobs = (await one.api("ls", {"limit": 1000}))["data"]["jobs"]
    shown = [await one.show(job["job"]) for job in jobs]
    return sum("lost" in change.get("why", "") for job in shown for change in job["changes"])


#: tells whether the attempt before it still lives, then says who it is and stays
STAYS: Final = """
if [ -e {pid} ] && kill -0 "$(cat {pid})" 2>/dev/null; then echo overlap >> {pid}.overlap; fi
echo $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 600
"""


@pytest.mark.slow
async def test_a_stopped_agents_job_is_gone_before_it_is_placed_elsewhere(nats_server: Server, unique: str) -> None:
    async with stack(nats_server, unique) as made, caller(made) as acme:
        await made.scheduler(config=BRIEF)
        first = await made.agent("w1", "4xH100", worker="w1")
        await acme.leader()
        await acme.workers_up("w1")
        pid_files = {job: made.folder / job for job in ("kill", "keep")}
        for job, file in pid_files.items():
            script = STAYS.replace("{pid}", str(file))
            await acme.submit(job, "/bin/sh", "-c", script, on_partition=job, run={"grace_s": 0.2})
        await acme.reaches("kill", "RUNNING")
        await acme.reaches("keep", "RUNNING")
        killed, kept = [await pid_in(file) for file in pid_files.values()]
        await made.agent("w2", "4xH100", worker="w2")
        await acme.workers_up("w2")

        first.stop()
        await until(lambda: not is_alive(killed), what="the job gone while its agent is stopped")
        await acme.reaches("keep", "LOST_KEPT")
        assert is_alive(kept)
        await until(lambda: pid_files["kill"].read_text().split() != [str(killed)], what="the next attempt")
        shown = await acme.reaches("kill", "RUNNING")
        history = [(change["state"], change.get("worker")) for change in shown["changes"][1:]]
        assert history == [
            ("PLACED", "w1"), ("CLAIMED", "w1"), ("RUNNING", "w1"), ("QUEUED", "w1"),
            ("PLACED", "w2"), ("CLAIMED", "w2"), ("RUNNING", "w2"),
        ]  # fmt: skip
        assert not (made.folder / "kill.overlap").exists()
        assert [row["state"] for row in (await acme.fleet())["workers"]] == ["lost", "up"]

        first.wake()
        await acme.reaches("keep", "RUNNING")
        assert is_alive(kept), "kept, and not started again"
        assert (await acme.show("keep"))["attempt"] == 1
        for job in pid_files:
            await acme.api("cancel", {"job": job})
            await acme.reaches(job, "CANCELLED")
        assert not is_alive(kept)
        await acme.all_free()


async def pid_in(file: Path) -> int:
    await until(file.exists, what=f"{file.name} running")
    return int(file.read_text())
