"""A seeded world around `Driving`: messages are lost, doubled and late, leaders and workers restart, callers cancel.

The workers are honest and keep their own clocks: a lease counts from the sending of the renewal that was answered. What
really runs is known here, and no replica may ever run twice at once.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.ledger.acts import Preempt
from moorage.scheduler.core.ledger.finished import job_key
from moorage.scheduler.core.ledger.record import decode_record
from moorage.scheduler.core.ledger.records import STEP_WIDTH, Op
from moorage.scheduler.core.ledger.state import IS_TERMINAL
from moorage.schemas.codec import decode_request
from moorage.schemas.frames import FactFrame, Goodbye, Join, Renew, Wanted
from moorage.schemas.job import TERMINAL
from tests.scheduler.driving import Driving
from tests.scheduler.honest_worker import Worker

LEASE_MS: Final = 20_000
RENEW_MS: Final = 2_000
RESEND_MS: Final = 1_500
LATE_MS: Final = 6_000


@dataclass
class Clock:
    """A worker's own timers."""

    base_ms: int = 0  # sending of the last answered renewal or join
    renew_ms: int = 0
    fact_ms: int = 0
    join_ms: int = 0
    joining_n: int = 0  # the join whose answer is awaited
    cut_until_ms: int = 0  # partitioned until then


class FaultyWorld:
    """`run(steps)` with faults, then `heal()`: everything must come to an end."""

    def __init__(self, seed: int, workers: int = 3, driving: type[Driving] = Driving) -> None:
        self.random = random.Random(seed)
        preempts = seed % 2 == 0  # drawn beside the seed's own numbers: what they led to before, they do again
        config = Config(
            ended_max=15, jobs_max=60, tombstones_max=20, preempt_priority=60 if preempts else 101, preempt_after=0.05,
            reclaim=preempts, ageing=36_000 if seed % 3 == 1 else 0,
            reserve_after=0 if seed % 5 == 4 else 2 if seed % 7 == 2 else 30,
        )  # fmt: skip
        self.drive = driving(config)
        self.faulty = True
        self.clocks: dict[str, Clock] = {}
        self.mail: list[tuple[int, int, str, Any]] = []  # due ms, tie, to, what
        self.sent: dict[str, tuple[str, Any, int]] = {}  # reply -> worker, frame, sent ms
        self.answered: set[tuple[str, str]] = set()  # jobs whose acceptance was told
        self.succeeded: Counter[tuple[str, str, int]] = Counter()
        self.lingering: list[tuple[Worker, Any]] = []
        self.renew_sent: dict[tuple[str, str, int], int] = {}
        self.waiting: dict[str, tuple[str, str]] = {}
        self.requeued: Counter[tuple[str, str]] = Counter()  # acts of operators that ended an attempt
        self.preempted: Counter[int] = Counter()  # by job number
        self._read = 0  # records of which the acts are known
        self.placed = 0  # placements, and those of a tenant with a limit
        self.limited = 0
        self._checked = 0
        self._told = 0
        self._ties = 0
        self._jobs = 0
        for index in range(workers):
            worker = self.drive.worker(
                f"w{index}",
                self.random.choice((1, 2, 4)),
                auto=False,
                cpu_milli=self.random.choice((0, 8000)),
                memory_mib=self.random.choice((0, 32_768)),
            )
            self.clocks[worker.id] = Clock(base_ms=self.drive.now)

    # ---------------------------------------------------------------------------------------------- time

    def step(self) -> None:
        chance = self.random.random
        ms = self.random.choice((5, 50, 400, 1_000)) if self.faulty else 500
        if self.faulty:
            self._callers()
            self._accidents()
        self._work()
        self._timers()
        self._deliver()
        if not self.faulty or chance() < 0.93:
            out = self.drive.tick(ms, obey=False)
            assert out is not None
            for frame in self.drive.wanted:
                self._post(frame.worker, frame)
            for reply in [reply for reply in self.sent if reply in self.drive.answers]:
                name, frame, sent_ms = self.sent.pop(reply)
                self._post(name, (frame, sent_ms, self.drive.answers.pop(reply)))
            self._events()
        else:
            self.drive.now += ms
        self._check()

    def _post(self, to: str, what: Any) -> None:
        """Into the net: lost, doubled or late, unless the faults are over."""
        self._ties += 1
        now, roll = self.drive.now, self.random.random()
        if self.faulty and self.clocks[to].cut_until_ms > now:
            return
        if self.faulty and roll < 0.12:
            return
        late = self.random.randrange(LATE_MS) if self.faulty and roll > 0.8 else 0
        self.mail.append((now + late, self._ties, to, what))
        if self.faulty and 0.12 < roll < 0.2:
            self.mail.append((now + self.random.randrange(LATE_MS), self._ties, to, what))

    def _deliver(self) -> None:
        due = [entry for entry in self.mail if entry[0] <= self.drive.now]
        self.mail = [entry for entry in self.mail if entry[0] > self.drive.now]
        if self.faulty:
            self.random.shuffle(due)
        for _, _, to, what in due:
            worker, clock = self.drive.workers[to], self.clocks[to]
            if isinstance(what, Wanted):
                if worker.session and self.drive.now < clock.base_ms + LEASE_MS // 2:
                    worker.obey(what)
            elif isinstance(what, Join | Renew | FactFrame | Goodbye):
                self.sent[self.drive.send(to, what)] = (to, what, self.drive.now)
            else:
                self._answer(worker, clock, *what)

    # ------------------------------------------------------------------------------------------- workers

    def _answer(self, worker: Worker, clock: Clock, frame: Any, sent_ms: int, answer: dict[str, Any]) -> None:
        kind = answer["kind"]
        if isinstance(frame, Join):
            if kind == "joined" and frame.n == clock.joining_n and not worker.session:
                clock.joining_n = 0
                worker.joined(answer["session"], len(frame.facts))
                clock.base_ms = clock.join_ms - RENEW_MS  # the first sending of this number
                clock.renew_ms = 0
        elif frame.session != worker.session:
            return
        elif kind == "error" and answer["code"] == "session-over":
            worker.fence()
        elif isinstance(frame, Renew) and kind == "renewed":
            clock.base_ms = max(clock.base_ms, self.renew_sent.pop((worker.id, frame.session, frame.n), 0))
        elif isinstance(frame, FactFrame) and kind == "recorded":
            worker.fact_answered(answer["no"])

    def _timers(self) -> None:
        now = self.drive.now
        for worker in self.drive.workers.values():
            clock = self.clocks[worker.id]
            if worker.session and now >= clock.base_ms + LEASE_MS:
                worker.fence()
            if not worker.session:
                if now >= clock.join_ms:
                    clock.join_ms = now + RENEW_MS
                    frame = worker.join_frame()
                    clock.joining_n = frame.n
                    self._post(worker.id, frame)
                continue
            if now >= clock.renew_ms:
                clock.renew_ms = now + RENEW_MS
                renewal = worker.renew_frame()
                self.renew_sent[(worker.id, renewal.session, renewal.n)] = now
                self._post(worker.id, renewal)
            if now >= clock.fact_ms or worker.flying is None:
                facts = worker.fact_frame()
                if facts is not None:
                    clock.fact_ms = now + RESEND_MS
                    self._post(worker.id, facts)
            if self.random.random() < 0.3:
                self.drive.load(worker.id)

    def _work(self) -> None:
        """Some of what runs exits, some of what exited is seen free."""
        for worker in self.drive.workers.values():
            for key, held in list(worker.held.items()):
                if held.phase == "running" and self.random.random() < (0.12 if self.faulty else 0.6):
                    roll = self.random.random()
                    code = 0 if not self.faulty or roll < 0.7 else 1
                    detail = "timeout" if self.faulty and roll > 0.95 else "exit"
                    worker.finish(key, code if detail == "exit" else -9, detail, freed=self.random.random() < 0.7)
                elif held.phase == "exited" and self.random.random() < 0.4:
                    worker.free(key)

    def _accidents(self) -> None:
        drive, chance = self.drive, self.random.random
        for worker in drive.workers.values():
            roll, clock = chance(), self.clocks[worker.id]
            if roll < 0.006:
                worker.die()
                clock.joining_n = 0
                clock.join_ms = drive.now + self.random.randrange(4_000)
            elif roll < 0.012:  # the agent restarts, its jobs live on
                worker.session = ""
                clock.joining_n = 0
            elif roll < 0.02:
                clock.cut_until_ms = drive.now + self.random.choice((3_000, 25_000, 50_000))
            elif roll < 0.035:
                slot = self.random.randrange(len(worker.hello.gpu_pool))
                if slot in worker.local:
                    worker.local.discard(slot)
                elif not any(slot in held.place.slots for held in worker.held.values()):
                    worker.local.add(slot)
            elif roll < 0.04:
                worker.waiting = not worker.waiting
            elif roll < 0.045:
                drive.load(worker.id, **({"s0": "ecc"} if chance() < 0.5 else {"f0": "pid 7"}))
        if chance() < 0.01:
            drive.take_snapshot()
        if chance() < 0.01:
            drive.lead()
            self.sent.clear()  # what the old leader had not answered, it never will
        if chance() < 0.02:
            verb = self.random.choice(("cordon", "drain", "uncordon", "uncordon", "release"))
            drive.operate(verb, self.random.choice(list(drive.workers)))
            self._events()
        if chance() < 0.06:
            self._orders()
        if chance() < 0.003:
            drive.now += 40_000  # the leader's machine was stopped for a while

    def _orders(self) -> None:
        """An operator acts on a job or a tenant, alone or several at once."""
        pick, state = self.random.choice, self.drive.state
        live = [(job.tenant, job.name) for job in state.jobs.values() if not job.over]
        verbs = ("hold", "release", "requeue", "priority", "limit", "share")
        for verb in self.random.sample(verbs, pick((1, 1, 2, 3))):
            tenant, job = pick(live) if live and self.random.random() < 0.9 else (pick("tu"), "j1")
            asked: dict[str, Any] = {"tenant": tenant}
            if verb == "limit":
                asked["gpus"] = pick((0, 1, 2, 4))
            elif verb == "share":
                asked |= {"weight": pick((0, 1, 3)), "gpus": pick((0, 0, 1, 2))}
            elif verb in ("requeue", "priority") or self.random.random() < 0.8:
                asked["job"] = job
            if verb == "priority":
                asked["priority"] = pick((0, 50, 60, 100))
            self.drive.offer_order(verb, **asked)

    # ------------------------------------------------------------------------------------------- callers

    def _callers(self) -> None:
        drive, pick, chance = self.drive, self.random.choice, self.random.random
        while chance() < 0.35:
            if chance() < 0.8 or not self._jobs:
                self._jobs += 1
                name = f"j{self._jobs}"
            else:
                name = f"j{self.random.randrange(self._jobs) + 1}"
            fields: dict[str, Any] = {
                "gpu": pick(
                    (
                        None,
                        {},
                        {"count": 2},
                        {"scheduling": "gang"},
                        {"scheduling": "gang", "count": 2},
                        {"scheduling": "spread"},
                        {"sharing": "mps"},
                        {"sharing": "mps", "share": {"memory_mib": 30_000, "compute_percent": 40}},
                        {"sharing": "time-slice"},
                        {"sharing": "time-slice", "time_slice_index": 0},
                    )
                ),
                "replicas": pick((1, 1, 1, 2, 3)),
                "priority": pick((50, 50, 60)),
                "retries": pick((0, 1, 2)),
                "retries_on_lost": pick((0, 3)),
                "on_partition": pick(("kill", "kill", "keep")),
            }
            if fields["gpu"] is None or fields["gpu"].get("scheduling") == "gang":
                fields["on_partition"] = "kill"
            if chance() < 0.2:
                fields["resources"] = {"cpu_milli": 2000, "memory_mib": 4096}
            if chance() < 0.15:
                fields["deadline_s"] = pick((2, 20, 90))
            if chance() < 0.15:
                fields["start_within_s"] = pick((1, 10))
            if chance() < 0.1:
                fields["on_no_match"] = "reject"
            tenant = pick("ttu")
            self._submitted(drive.offer_submit(name, tenant=tenant, **fields), tenant, name)
        if chance() < 0.12 and self._jobs:
            drive.offer_cancel(f"j{self.random.randrange(self._jobs + 3) + 1}", tenant=pick("ttu"))

    def _submitted(self, reply: str, tenant: str, name: str) -> None:
        self.waiting[reply] = (tenant, name)

    def _events(self) -> None:
        for reply in [reply for reply in self.waiting if reply in self.drive.answers]:
            name, answer = self.waiting.pop(reply), self.drive.answers.pop(reply)
            if answer["kind"] == "accepted":
                self.answered.add(name)
        for event in self.drive.events[self._told :]:
            for change in event["changes"]:
                if change.get("why", "").startswith("requeued"):
                    self.requeued[(event["tenant"], event["job"])] += 1
                if change["state"] == "SUCCEEDED":
                    self.succeeded[(event["tenant"], event["job"], change["replica"])] += 1
        self._told = len(self.drive.events)

    # -------------------------------------------------------------------------------------------- checks

    def _check(self) -> None:
        state = self.drive.state
        running: Counter[tuple[str, str, int]] = Counter()
        for worker in self.drive.workers.values():
            for tenant, job, index, _ in (key for key, held in worker.held.items() if held.phase == "running"):
                known = state.job(tenant, job)
                if known is not None and IS_TERMINAL[known.replicas[index].state]:
                    continue  # given up by its caller while its worker is away: nobody runs beside it
                running[(tenant, job, index)] += 1
        twice = [unit for unit, count in running.items() if count > 1]
        assert not twice, f"two live attempts of {twice}"
        for tenant, name in self.answered:
            known = state.job(tenant, name)
            assert known is not None or state.finished.find(job_key(tenant, name)) is not None, f"{name} was lost"
        self._check_orders()
        for payload in self.drive.records[self._read :]:
            for act in decode_record(payload).acts:
                if isinstance(act, Preempt):
                    self.preempted.update(act.victims)
        self._read = len(self.drive.records)
        assert all(count == 1 for count in self.succeeded.values()), self.succeeded
        for live in state.jobs.values():
            request = decode_request(live.body)
            for replica in live.replicas:
                assert replica.retries <= request.retries
                assert replica.losses <= request.retries_on_lost
                used = live.replicas[0] if live.gang else replica  # a gang counts on its first rank
                again = self.requeued[(live.tenant, live.name)] + self.preempted[live.num]
                assert replica.attempt <= 1 + used.retries + used.losses + used.refusals + again

    def _check_orders(self) -> None:
        """Of what this record placed nothing is held, and its tenant is within its limit."""
        state, record = self.drive.state, decode_record(self.drive.records[-1])
        if record.epoch != state.epoch or self._checked == state.seq:
            return
        self._checked = state.seq
        for at in range(0, len(record.steps), STEP_WIDTH):
            if record.steps[at] != Op.PLACE:
                continue
            job = state.jobs[record.steps[at + 1]]
            tenant = state.tenants[job.tenant]
            self.placed += 1
            assert job.hold is None, f"{job.name} is held and was placed"
            assert tenant.hold is None, f"{tenant.name} is held and {job.name} was placed"
            limit = tenant.gpus_max or 10**9
            assert tenant.gpus <= limit or not record.steps[at + 4], f"{tenant.name} has {tenant.gpus} of {limit} GPUs"
            self.limited += tenant.gpus_max > 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def heal(self, steps: int = 1_500) -> None:
        """Faults stop. Raises AssertionError unless every job ends and every GPU is free in the end."""
        self.faulty = False
        drive = self.drive
        for name in ("t", "u"):
            drive.order("release", tenant=name)
            drive.order("limit", tenant=name, gpus=0)
        for job in list(drive.state.jobs.values()):
            drive.order("release", tenant=job.tenant, job=job.name)
        for worker in drive.workers.values():
            worker.local.clear()
            worker.waiting = False
            self.clocks[worker.id].cut_until_ms = 0
            drive.operate("uncordon", worker.id)
            drive.load(worker.id)
        self._events()
        for _ in range(steps):
            self.step()
            if self._all_over():
                break
        stuck = {
            (job.tenant, job.name): drive.states(job.name, job.tenant)
            for job in drive.state.jobs.values()
            if job.state not in TERMINAL
        }
        infeasible = {name for name in stuck if not self._feasible(*name)}
        assert set(stuck) == infeasible, {name: stuck[name] for name in set(stuck) - infeasible}
        assert not list(drive.state.members())
        assert drive.free_gpus() == sum(len(worker.hello.gpu_pool) for worker in drive.workers.values())
        for tenant, name in infeasible:
            drive.cancel(name, tenant=tenant)
        assert drive.state.live == 0

    def _feasible(self, tenant: str, name: str) -> bool:
        job = self.drive.job(name, tenant)
        return self.drive.engine.admission.could_ever(self.drive.engine.shape_of(job))

    def _all_over(self) -> bool:
        state = self.drive.state
        if any(worker.held or not worker.session for worker in self.drive.workers.values()):
            return False
        return all(job.over or not self._feasible(job.tenant, job.name) for job in state.jobs.values()) and not list(
            state.members()
        )
