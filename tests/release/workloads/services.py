"""Random sites with services: hosts are drained, workers leave, come back or die, members crash, checks flap, leaders
change, next versions, good and bad ones, and urgent jobs come, and at the next feature level numbers of members change.

Every record is checked as in all worlds. Besides: a member that moves ends once its replacement serves. In calm worlds,
where nothing but drains without a deadline, new leaders and workers that take their time to leave happen, never fewer
members serve than before; in those with room for both, nor while next versions come, fail and are cancelled. Whoever
comes first leaves a service its `min`. In the end no member moves, each job has as many replicas as its request says,
and a service that nothing replaces wants all of them.
"""

from __future__ import annotations

import random
import re
from typing import Any, Final

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.events import ChangeOrder, Wake
from moorage.scheduler.core.ledger import records
from moorage.scheduler.core.ledger.state import MAY_END, Job
from moorage.schemas.operate import ChangeAsked
from moorage.schemas.service import MemberLoad, Scale
from tests.levels import NEXT, raise_level
from tests.unit.scheduler.driving import H100
from tests.unit.scheduler.honest_worker import HeldAttempt
from tests.unit.scheduler.lifecycle.test_services_stay_up import READY, WARM_MS, Site

SERVICES_FROM: Final = 700_000
#: for how long a site settles in the end
REST_S: Final = 150
ACTS: Final = (
    "drain", "drain", "open", "leave", "leave", "join", "lead", "crash", "limit", "version", "cancel", "urgent",
    "urgent", "over", "wake", "wake", "wait", "wait", "version", "cancel", "flap", "die", "bound",
)  # fmt: skip
#: of these, what happens in worlds with room for two versions of all
ROLLS: Final = ("version", "version", "cancel", "lead", "wait", "wait", "bound")
#: what members of a version do: good ones stay, the others end by themselves after so many ms
MANNERS: Final = {
    "good": (10**9, ""),
    "fails at its start": (0, "exit"),
    "fails its check": (4_000, "not-ready"),
    "ends soon": (WARM_MS + 3_000, "exit"),
}
MOVED: Final = re.compile(r"moved to replica (\d+): ")
PREEMPTS: Final = Config(preempt_priority=80, preempt_after=10.0)
NO_CHECK: Final = {name: value for name, value in READY.items() if name != "ready"}


class Services(Site):
    """A site of one seed."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = random.Random(seed)
        self.calm = bool(seed % 2)
        self.rolls = seed % 4 == 1  # calm, and with room for two versions of all
        self.manners: dict[str, tuple[int, str]] = {}  # by job
        self.jobs = ["a"]
        self.seen = 0
        self.grows = records.FORMAT >= NEXT  # numbers of replicas change, too
        super().__init__(1, None if self.calm else PREEMPTS)
        self.before: dict[str, int] = {}  # by the first job of each service: how many serve at least
        self.hosts = ["w0"]
        for number in range(1, dice.randint(2, 4)):
            self.join_host(f"w{number}", dice.randint(1, 3))
            self.hosts.append(f"w{number}")
        if self.rolls:
            self.join_host("spare", 40)
        for number in range(dice.randint(1, 3)):
            most = dice.randint(1, 4)
            replicas: Any = dice.choice([most, {"min": dice.randint(0, most), "max": most + 2}])
            fields: dict[str, Any] = {"gpu": dice.choice([{}, {}, None]), "run": dice.choice([READY, READY, NO_CHECK])}
            self.serve(f"s{number}", service={"name": f"of{number}"}, replicas=replicas, **fields)
            self.jobs.append(f"s{number}")
        for number in range(dice.randint(0, 4)):
            self.submit(f"batch{number}", gpu={}, priority=dice.choice([10, 50, 90]))

    def join_host(self, name: str, gpus: int, model: str = H100) -> None:
        """A raised ledger fills its facts from the history once, so the level is raised before there is any."""
        if self.grows and not self.workers:
            raise_level(self)
        super().join_host(name, gpus, model)

    def run(self) -> None:
        self.pass_seconds(10)
        first = [job for job in self.jobs if self.calm and self.is_fixed(job)]
        before = self.before = {job: self.serving(job) for job in first}
        for _ in range(self.dice.randint(8, 30)):
            self.act()
            for _ in range(self.dice.randint(1, 12)):
                self.pass_seconds(1)
                now = {job: sum(map(self.serving, self.versions(job))) for job in first}
                fewer = {job: count for job, count in now.items() if count < before[job]}
                assert not fewer, f"fewer serve than {before}: {fewer}"
        for host in self.hosts:
            self.operate("uncordon", host)
            self.workers[host].leaving_s = None
            self.come_back(host)
        self.order("limit", gpus=0)
        for name in self.jobs:
            if self.manners.get(name, MANNERS["good"]) != MANNERS["good"]:
                self.cancel(name)
        self.pass_seconds(REST_S)
        for job in [self.job(name) for name in self.jobs]:
            if job.live:
                assert job.relocating is None, f"{job.name} moves {job.relocating}"
                assert job.size == self.engine.reader.request_of(job).copies, f"{job.name} has {job.numbers}"
                self.look_back(job)

    def versions(self, first: str) -> list[str]:
        """The jobs of the service of which this one is the first, so far."""
        return [job for job in self.jobs if job.rstrip("x") == first]

    def look_back(self, job: Job) -> None:
        """A service that no next version replaces wants all of its members."""
        request = self.engine.reader.request_of(job)
        if request.service is None or request.scale is not None:
            return
        if [each.name for each in self.engine.services.live("t", request.service.name)] == [job.name]:
            assert job.scaled is None or job.scaled.wanted == request.copies, f"{job.name} wants {job.scaled}"
            if self.rolls:
                may = min(request.copies, request.max_running or request.copies)
                assert self.serving(job.name) >= may, f"{job.name} serves with {self.serving(job.name)} of {may}"

    def is_fixed(self, job: str) -> bool:
        return self.engine.reader.request_of(self.job(job)).scale is None

    def least(self, job: Job) -> int:
        scale = self.engine.reader.request_of(job).scale
        return 0 if scale is None else scale.min

    def act(self) -> None:
        """Do one thing."""
        dice, host = self.dice, self.dice.choice(self.hosts)
        what = dice.choice((*(ROLLS if self.rolls else ACTS), *(["grow"] * 2 if self.grows else [])))
        if what == "drain":
            within: dict[str, Any] = {} if self.calm or dice.random() < 0.5 else {"within_s": dice.choice([1, 40])}
            self.operate("drain", host, **within)
        elif what == "open":
            self.operate("uncordon", host)
        elif what == "lead":
            self.lead()
            self.renew()
        elif what == "leave":
            self.tell_to_end(host, 10_000 if self.calm else dice.choice([1, 5, 40]))
        elif what == "join":
            self.come_back(host)
        elif what == "wake":
            for job in self.jobs:
                self.engine.offer(Wake("t", job.replace("s", "of")))
        elif what == "grow":
            self.grow(dice.choice(self.jobs))
        elif what == "bound" and (self.rolls or not self.calm):
            self.engine.offer(
                ChangeOrder("t", ChangeAsked(job=dice.choice(self.jobs[1:]), max_running=dice.randint(1, 6)), "", True)
            )
        elif self.rolls:
            self.roll(what)
        elif self.calm:
            return
        elif what == "flap":
            for held in [held for held in self.workers[host].held.values() if held.phase == "running"][:2]:
                self.workers[host].look(held, ready=False)
        elif what == "die":
            self.workers[host].die()
            self.workers[host].session = ""
        elif what == "crash":
            running = [held for held in self.workers[host].held.values() if held.phase == "running"]
            if running:
                self.workers[host].finish(dice.choice(running).name, dice.choice([0, 1]))
        elif what == "limit":
            self.order("limit", gpus=dice.choice([0, 2, 5]))
        elif what == "cancel":
            self.cancel(dice.choice(self.jobs))
            self.mend()
        elif what == "urgent":
            self.submit(f"urgent{self.now}", gpu={"count": dice.choice([1, 2, 4])}, priority=90)
        elif what == "over":
            for job in [job.name for job in self.state.jobs.values() if job.name.startswith("urgent") and job.live]:
                self.cancel(job)
        elif what == "version":
            self.replace(dice.choice(self.jobs))

    def come_back(self, host: str) -> None:
        if not self.workers[host].session:
            self.join(self.workers[host])

    def replace(self, old: str) -> None:
        request = self.engine.reader.request_of(self.job(old))
        if request.service is not None and self.state.job("t", f"{old}x") is None:
            replicas = request.copies if self.rolls else 2
            # a program of its own: that one version fails where the other does well says nothing of the host
            run = {**READY, "argv": ["serve", f"{old}x"]}
            fields = {"gpu": {}, "service": {"name": request.service.name}, "replicas": replicas, "run": run}
            if self.dice.random() < 0.3:
                fields["max_running"] = self.dice.randint(1, replicas)
            if self.dice.random() < 0.3:
                fields["run"] = {**run, "max_restarts": 2}
            manners = self.dice.choice(sorted(MANNERS))
            if self.submit(f"{old}x", instead_of=old, **fields)["kind"] == "accepted":
                self.jobs.append(f"{old}x")
                self.manners[f"{old}x"] = MANNERS[manners]

    def roll(self, what: str) -> None:
        """Let a next version come, or go again while the one before it lives."""
        newest = [self.versions(job)[-1] for job in self.jobs if not job.endswith("x")]
        name = self.dice.choice(newest)
        if what == "version":
            if self.job(name).live:
                self.replace(name)
        elif what == "cancel":
            before = [job for job in self.versions(name) if job != name and self.job(job).live]
            if before and "CANCELLING" not in self.states(before[-1]):
                self.cancel(name)

    def grow(self, job: str) -> None:
        """Ask for another number of members."""
        wanted = self.dice.randint(1, 6)
        bounds = Scale(max=wanted, min=self.dice.randint(0, wanted))
        replicas: int | Scale = bounds if self.dice.random() < 0.3 and not self.calm else wanted
        self.engine.offer(ChangeOrder("t", ChangeAsked(job=job, replicas=replicas), "grown", True))
        self.tick()
        if self.answers["grown"].get("kind") == "answer" and job.rstrip("x") in self.before:
            self.before[job.rstrip("x")] = min(self.before[job.rstrip("x")], wanted)

    def mend(self) -> None:
        """All versions are good from now on."""
        if self.dice.random() < 0.5:
            self.manners.clear()

    def pass_seconds(self, seconds: int) -> None:
        for _ in range(seconds):
            self.pass_time(1_000, step=500)
            for worker in self.workers.values():
                for held in [held for held in worker.held.values() if held.phase == "running"]:
                    ran_ms = self.now - self.since.setdefault(held.name, self.now)
                    ends_ms, how = self.manners.get(held.place.job, MANNERS["good"])
                    if ran_ms >= ends_ms:
                        worker.finish(held.name, 1, how)
                    elif how == "not-ready":
                        continue
                    elif ran_ms >= WARM_MS and not held.place.job.startswith(("batch", "urgent")):
                        worker.look(held, ready=True)
                        self.say(held)
            self.offer_reports()
            self.tick(self.dice.choice([1, 1_000]))  # with them the record may look at what moves, or not
            self.settle()
            self.leave()

    def say(self, held: HeldAttempt) -> None:
        """A member says what it has to do, for minutes much, and for minutes nothing."""
        place, calls = held.place, self.dice.choice([1, 2]) if self.now // 100_000 % 3 else 0
        name = place.job, place.replica, place.fence, place.attempt
        load = MemberLoad(f"m{place.fence}", 1, min(1, calls), calls // 2, 0, False, 0, 0, 0, 0, 0, 0, *name)
        self.engine.offer_member_load("t", place.job, load, self.now)

    def tick(self, ms: int = 1, *, obey: bool = True) -> Any:
        out = super().tick(ms, obey=obey)
        for event in self.events[self.seen :]:
            for change in event["changes"]:
                if (change.get("why") or "").endswith("and comes first") and change["state"] == "ENDING":
                    job = self.job(event["job"])
                    left = sum(row.state in MAY_END for row in job.rows.values())
                    assert left >= self.least(job), f"{event['job']}: {change}"
                moved = MOVED.search(change.get("why") or "")
                if moved and change["state"] in ("CANCELLING", "ENDING") and self.job(event["job"]).live:
                    row = self.job(event["job"]).rows.get(int(moved[1]))
                    assert row is not None, f"{event['job']}: {change}"
                    assert row.attempt is not None, f"{event['job']}: {change}"
        self.seen = len(self.events)
        return out
