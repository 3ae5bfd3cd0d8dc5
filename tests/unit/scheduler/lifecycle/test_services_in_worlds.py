"""Random worlds of a service, judged by its promise alone.

Rollouts, bad versions, flapping checks, drains, windows, deaths, preemption, scale by hand and by load, new leaders.

Of those that serve, the scheduler asks none to end while that leaves fewer than served before: but for one at a time
where there is no room for one more, and at a deadline. Once nothing happens any more, as many serve as are asked for.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

import pytest

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.events import ChangeOrder, Wake
from moorage.scheduler.core.ledger.state import LEAVING, MAY_END, RUNNING, Attempt
from moorage.scheduler.core.outputs.outputs import Outputs
from moorage.schemas.operate import ChangeAsked
from moorage.schemas.service import MemberLoad
from tests.levels import know_next, raise_level
from tests.turns import turns
from tests.unit.scheduler.driving import Driving
from tests.unit.scheduler.honest_worker import HeldAttempt
from tests.unit.scheduler.lifecycle.test_services_stay_up import DOES, READY, WARM_MS, Site

CONFIG: Final = Config(preempt_priority=80, preempt_after=60.0, scale_down_s=20.0)
SLEEPS_S: Final = 20.0
NOTICE_S: Final = 8.0
#: more than replicas of a service ever are at once, with those that are added by hand
NUMBERS: Final = 20
#: for so long nothing happens at the end: back-offs go up to 256 s, and a window to 100 s
QUIET_S: Final = 700


class World(Site):
    """A service of one live version, or of two, on three or four hosts."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        self.kind = chance.choice(["fixed", "fixed", "max_running", "follows", "sleeps"])
        self.asked = chance.randint(1, 4)  # how many serve at least, if nothing keeps them from it
        self.versions = ["a"]  # that live, as far as is known here
        self.base = 0  # how many the scheduler may not go below by itself
        self.calls = 0.0  # at a time
        self.ended: dict[Any, int] = {}
        self.judged = 0
        self.flapping: dict[Any, int] = {}  # by attempt, until when its check fails
        self.number = 0
        self.log: list[str] = []
        self.down: set[str] = set()
        self.called_back: set[str] = set()
        self.fences: dict[Any, int] = {}  # of attempts, by their names without it
        self.since, self.does, self.fewest, self.most = {}, {}, 0, 0
        Driving.__init__(self, CONFIG)
        raise_level(self)
        self.join_host("w0", self.asked)
        self.serve("a", **self.fields())
        self.watch(10)
        assert self.serving("a") == self.floor
        for host in range(1, chance.randint(2, 4)):
            self.join_host(f"w{host}", chance.randint(1, 4))

    def fields(self) -> dict[str, Any]:
        """What a version asks for."""
        restarts = {"restart_unready_s": 20.0} if self.chance.random() < 0.3 else {}
        run: dict[str, Any] = {**READY, **restarts, "grace_s": self.chance.choice([1.0, 10.0, 30.0])}
        if self.chance.random() < 0.3:
            run |= {"checkpoint_signal": "SIGUSR1", "checkpoint_before_s": NOTICE_S}
        service: dict[str, Any] = {"name": "embed"}
        if self.kind == "follows":
            return {"replicas": {"min": self.asked, "max": self.asked + 2}, "run": run, "service": service}
        if self.kind == "sleeps":
            service = {**service, "sleep_after_s": SLEEPS_S}
            return {"replicas": {"min": 0, "max": self.asked}, "run": run, "service": service}
        if self.kind == "max_running":
            return {"replicas": self.asked + 2, "max_running": self.asked, "run": run, "service": service}
        return {"replicas": self.asked, "run": run, "service": service}

    # ------------------------------------------------------------------------------------------- judging

    def serving_members(self) -> list[Attempt]:
        jobs = [job for job in self.state.jobs.values() if job.name in self.versions]
        rows = [row for job in jobs for row in job.rows.values() if row.state == RUNNING]
        return [row.attempt for row in rows if row.attempt is not None and row.attempt.ready]

    def rooms(self) -> int:
        """For how many members more there is a place now."""
        hosts = self.engine.fleet.hosts.values()
        return sum(host.open.bit_count() for host in hosts if host.usable and host.worker.window is None)

    def tick(self, ms: int = 1, *, obey: bool = True) -> Outputs:
        if not hasattr(self, "versions") or not hasattr(self, "engine"):
            return super().tick(ms, obey=obey)
        before, rooms = self.serving_members(), self.rooms()
        out = super().tick(ms, obey=obey)
        self.judge_deadlines()
        self.judge_numbers()
        after = self.serving_members()
        asked = [each for each in before if each.replica.attempt is each and each.replica.state in LEAVING]
        asked = [each for each in asked if not self.is_due(each)]
        lost = len(before) - len(asked) - sum(each in after for each in before)
        if lost > 0:
            self.base = max(0, self.base - lost)
        if asked and self.is_judged:
            self.judged += 1
            fewest = self.base - (1 if not rooms or not self.rooms() else 0)
            assert len(after) >= fewest, self.said(f"{[each.name for each in asked]} end: {len(after)} of {self.base}")
        if self.is_quiet():
            self.base = min(self.floor, len(after))
        self.base = min(self.base, self.floor)
        return out

    def judge_deadlines(self) -> None:
        """By the deadline of a drain all on its worker was asked to end."""
        for worker in self.state.windows.values():
            stays = [each.name for each in worker.attempts.values() if each.replica.state in MAY_END]
            assert worker.window is not None
            due_ms = worker.window.leave_ms + 2_000
            assert not stays or self.now < due_ms, self.said(f"{stays} are on {worker.id} since {due_ms / 1000:.0f} s")

    def judge_numbers(self) -> None:
        """A number is used again, but never with the same attempt."""
        for job in self.state.jobs.values():
            for row in job.rows.values():
                assert row.index < NUMBERS, self.said(f"{job.name} has a replica {row.index}")
                if row.attempt is not None:
                    name = (job.name, row.index, row.attempt.no)
                    assert self.fences.setdefault(name, row.attempt.fence) == row.attempt.fence, self.said(
                        f"{name} again"
                    )

    @property
    def floor(self) -> int:
        places = sum(len(worker.hello.gpu_pool) for worker in self.workers.values())
        return min(self.asked, places) if self.kind != "sleeps" else 0

    @property
    def is_judged(self) -> bool:
        return self.kind != "sleeps"

    def is_quiet(self) -> bool:
        """Whether no member moves, and no version takes another one's place."""
        live = [job for job in self.state.jobs.values() if job.name in self.versions and job.live]
        return len(live) == 1 and live[0].relocating is None

    def is_due(self, member: Attempt) -> bool:
        """Whether its tenant ends it, or a deadline: of a drain, its worker, the grace of a job with a better right."""
        if member.replica.job.name in self.called_back:
            return True
        worker = member.worker
        window, host = worker.window, self.workers[worker.id]
        if (
            worker.flag == "draining"
            and window is not None
            and self.now >= window.leave_ms - 30_000 - 1_000 * NOTICE_S - 2_000
        ):
            return True
        if host.leaving_s is not None or worker.flag == "shut":
            return True
        return any(job.name.startswith("urgent") for job in self.state.preempting.values())

    def said(self, what: str) -> str:
        return "\n".join([f"{self.kind}, {self.asked} asked", *self.log[-25:], f"{self.now / 1000:.0f} s: {what}"])

    # -------------------------------------------------------------------------------------------- what happens

    def _go_on(self, worker: str, held: HeldAttempt) -> None:
        if held.place.job not in self.versions:
            return
        ran_ms = self.now - self.since.setdefault(held.name, self.now)
        ends_ms, how = self.does.get(held.place.job, (10**9, ""))
        if ran_ms >= ends_ms:
            self.workers[worker].finish(held.name, 1, how)
            return
        if ran_ms < WARM_MS or how == "not-ready":
            return
        self.workers[worker].look(held, ready=self.now >= self.flapping.get(held.name, 0))
        count = max(1, len(self.serving_members()))
        mine = self.calls / count
        self.ended[held.name] = self.ended.get(held.name, 0) + round(mine * 25)
        ended = self.ended[held.name]
        name = held.place.job, held.place.replica, held.place.fence, held.place.attempt
        member = f"m{held.place.fence}-{held.place.replica}"
        load = MemberLoad(
            member, 1, min(1, int(mine)), max(0, int(mine) - 1), 0, False, 0, 0, 0, ended, 0, ended * 20, *name
        )
        self.engine.offer_member_load("t", held.place.job, load, self.now)

    def note(self, what: str) -> None:
        self.log.append(f"{self.now / 1000:.0f} s: {what}")

    def live(self) -> list[str]:
        return [name for name in self.versions if (job := self.state.job("t", name)) is not None and job.live]

    def roll_out(self) -> None:
        live = self.live()
        if len(live) != 1:
            return
        self.number += 1
        name = f"v{self.number}"
        does = self.chance.choice([None, None, *DOES])
        fields = self.fields()
        if self.kind == "fixed" and self.chance.random() < 0.2:
            fields["max_running"] = 1
        self.note(f"{name} replaces {live[0]}: {does or 'good'}, max_running {fields.get('max_running')}")
        self.versions.append(name)
        if does is not None:
            self.does[name] = DOES[does]
        self.serve(name, instead_of=live[0], **fields)

    def call_back(self) -> None:
        live = self.live()
        if len(live) == 2:
            self.note(f"{live[1]} is cancelled")
            self.called_back.add(live[1])
            self.cancel(live[1])

    def drain(self) -> None:
        host = self.chance.choice(list(self.workers))
        windows: list[dict[str, Any]] = [{}, {"within_s": 60}, {"from_s": 20, "within_s": 40, "for_s": 100}]
        window = self.chance.choice(windows)
        self.note(f"{host} is drained {window}")
        self.operate("drain", host, **window)

    def open(self) -> None:
        for host in self.workers:
            self.operate("uncordon", host)
        self.note("all hosts are open")

    def flap(self) -> None:
        members = self.serving_members()
        if members:
            name, ms = self.chance.choice(members).name, self.chance.choice([1_000, 3_000, 30_000])
            self.flapping[name] = self.now + ms
            self.note(f"{name} is not ready for {ms} ms")

    def die(self) -> None:
        host = self.workers[self.chance.choice(list(self.workers))]
        if host.session:
            self.note(f"{host.id} begins anew")
            host.die()
            self.join(host)

    def vanish(self) -> None:
        host = self.workers[self.chance.choice(list(self.workers))]
        if host.session and len(self.down) < len(self.workers) - 1:
            self.note(f"{host.id} is not heard")
            host.die()
            self.down.add(host.id)

    def come_back(self) -> None:
        for name in sorted(self.down):
            self.join(self.workers[name])
        self.down.clear()

    def tell_a_worker(self) -> None:
        host = self.chance.choice(list(self.workers))
        if self.workers[host].session and self.workers[host].leaving_s is None:
            self.note(f"{host} is told to end")
            self.tell_to_end(host, self.chance.choice([20, 60]))

    def change(self) -> None:
        live = self.live()
        if self.kind != "fixed" or len(live) != 1:
            return
        count = self.chance.randint(1, 4)
        self.note(f"{live[0]} is to have {count}")
        self.asked = count
        self.base = min(self.base, count)
        self.engine.offer(ChangeOrder("t", ChangeAsked(job=live[0], replicas=count), "", True))

    def call(self) -> None:
        self.calls = self.chance.choice([0.0, 0.3, 1.5, 3.0])
        self.note(f"{self.calls} calls at a time")

    def preempt(self) -> None:
        self.number += 1
        self.note("an urgent job")
        self.submit(f"urgent{self.number}", priority=90, gpu={"count": 1}, tenant="t")

    def add_batch(self) -> None:
        """A job of another tenant, which serves nobody."""
        self.number += 1
        grace_s = self.chance.choice([0.0, 5.0, 30.0])
        self.note(f"a job with a grace of {grace_s} s")
        run = {"driver": "process", "argv": ["work"], "grace_s": grace_s}
        self.submit(f"batch{self.number}", run=run, gpu={"count": 1}, tenant="others")

    def end_batch(self) -> None:
        for job in list(self.state.jobs.values()):
            if job.tenant == "others" and job.live:
                self.cancel(job.name, tenant="others")

    def end_urgent(self) -> None:
        for job in list(self.state.jobs.values()):
            if job.name.startswith("urgent") and job.live:
                self.cancel(job.name)

    def follow(self) -> None:
        self.note("a new leader")
        self.lead_from_snapshot() if self.chance.random() < 0.5 else self.lead()
        for name in self.workers:
            if self.workers[name].session:
                self.renew(name)

    def happen(self) -> None:
        acts: list[Callable[[], None]] = [
            self.roll_out, self.roll_out, self.call_back, self.drain, self.open, self.flap, self.die, self.vanish,
            self.come_back, self.tell_a_worker, self.change, self.call, self.preempt, self.end_urgent, self.follow,
            self.add_batch, self.end_batch,
        ]  # fmt: skip
        self.chance.choice(acts)()
        for worker in self.workers.values():  # a unit that was told to end comes back
            if not worker.session and worker.id not in self.down and worker.leaving_s is None:
                self.join(worker)

    def heal(self) -> None:
        """Nothing more happens, and nothing is wrong any more."""
        self.note("quiet")
        self.flapping.clear()
        self.calls = 0.0
        self.come_back()
        for worker in self.workers.values():
            worker.leaving_s = None
            if not worker.session:
                self.join(worker)
        self.open()
        self.end_urgent()
        self.end_batch()
        live = self.live()
        if len(live) == 2 and live[1] in self.does:  # where it had the place of another one, it is not tried again
            self.call_back()
        elif len(live) == 2 and self.kind == "fixed":  # a canary is to replace all now
            self.engine.offer(ChangeOrder("t", ChangeAsked(job=live[1], max_running=self.asked), "", True))
        self.does.clear()


@pytest.fixture(autouse=True)
def _next_level(monkeypatch: pytest.MonkeyPatch) -> None:
    know_next(monkeypatch)


@pytest.mark.parametrize("seed", turns(range(60), often=4, more=12))
def test_a_service_stays_up_and_comes_back_to_what_is_asked(seed: int) -> None:
    world = World(seed)
    for _ in range(world.chance.randint(8, 16)):
        world.happen()
        world.watch(world.chance.choice([1, 5, 20, 60]))
    world.heal()

    def is_well() -> bool:
        live = world.live()
        if len(live) != 1 and world.floor == world.asked:
            return False  # else some of the next version find no place, and the old one goes on
        if sum(world.serving(name) for name in live) != world.floor:
            return False
        job = world.job(live[0])
        return job.relocating is None and all(row.attempt is None or row.state == RUNNING for row in job.rows.values())

    assert world.watch(QUIET_S, is_well), world.said(f"{[(name, world.states(name)) for name in world.live()]}")
    world.watch(60)
    assert is_well(), world.said("it stays so")
    if world.kind == "sleeps":
        world.engine.offer(Wake("t", "embed", "woken", json=True))
        assert world.watch(60, lambda: world.serving(world.live()[0]) == 1), world.said("it is called")
