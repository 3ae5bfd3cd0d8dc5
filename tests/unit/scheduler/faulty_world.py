"""A seeded world around `Driving`: messages are lost, doubled and late, leaders and workers restart, callers cancel.

The workers are honest and keep their own clocks: a lease counts from the sending of the renewal that was answered. What
really runs is known here, and no replica may ever run twice at once.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.events import Cancel, Wake
from moorage.scheduler.core.ledger.acts import Preempt
from moorage.scheduler.core.ledger.finished import job_key
from moorage.scheduler.core.ledger.record import decode_record
from moorage.scheduler.core.ledger.records import STEP_WIDTH, Op
from moorage.scheduler.core.ledger.state import IS_TERMINAL, WHY
from moorage.scheduler.core.lifecycle.max_running import wanted_of
from moorage.schemas.attempt import AttemptName
from moorage.schemas.codec import decode_request
from moorage.schemas.frames import Goodbye, Join, Renew, ReportFrame, Wanted
from moorage.schemas.job import STATES, TERMINAL
from moorage.schemas.ranges import parse_ranges
from moorage.schemas.service import MemberLoad
from moorage.testing.requests import beside
from tests.unit.scheduler.driving import Driving
from tests.unit.scheduler.honest_worker import Worker
from tests.unit.scheduler.readiness_judge import ReadinessJudge
from tests.unit.scheduler.restarts_judge import RestartsJudge

LEASE_MS: Final = 20_000
RENEW_MS: Final = 2_000
RESEND_MS: Final = 1_500
LATE_MS: Final = 6_000


@dataclass
class Clock:
    """A worker's own timers."""

    base_ms: int = 0  # sending of the last answered renewal or join
    renew_ms: int = 0
    report_ms: int = 0
    join_ms: int = 0
    joining_n: int = 0  # the join whose answer is awaited
    cut_until_ms: int = 0  # partitioned until then


class FaultyWorld:
    """`run(steps)` with faults, then `heal()`: everything must come to an end."""

    def __init__(self, seed: int, workers: int = 3, driving: type[Driving] = Driving, *, jobs_max: int = 60) -> None:
        self.random = random.Random(seed)
        self.beside = random.Random(seed + 1_000_000)  # what came later: it changes nothing that the seed led to before
        self.behind = random.Random(seed + 3_000_000)  # the same, of jobs that start after others
        self.timed = random.Random(seed + 4_000_000)  # the same, of jobs that start at a time
        self.staying = random.Random(seed + 2_000_000)  # likewise
        self.calling = random.Random(seed + 4_000_000)  # likewise
        self.restarts = RestartsJudge()
        self.readiness = ReadinessJudge()
        preempts = seed % 2 == 0  # drawn beside the seed's own numbers: what they led to before, they do again
        config = Config(
            ended_max=15, jobs_max=jobs_max, tombstones_max=20, preempt_priority=60 if preempts else 101,
            preempt_after=0.05, reclaim=preempts, ageing=36_000 if seed % 3 == 1 else 0,
            scale_up_s=0.5, scale_down_s=2, reserve_after=0 if seed % 5 == 4 else 2 if seed % 7 == 2 else 30,
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
        self.followed = 0  # placements of jobs that were to start after others
        self.in_time = 0  # placements of jobs that were to start at a time
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
                capabilities={"process": {"answers_calls": True}},
            )
            self.clocks[worker.id] = Clock(base_ms=self.drive.now)

    # ---------------------------------------------------------------------------------------------- time

    def step(self) -> None:
        chance = self.random.random
        ms = self.random.choice((5, 50, 400, 1_000)) if self.faulty else 500
        if self.faulty:
            self._callers()
            self._calls()
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
            elif isinstance(what, Join | Renew | ReportFrame | Goodbye):
                self.sent[self.drive.send(to, what)] = (to, what, self.drive.now)
            else:
                self._answer(worker, clock, *what)

    # ------------------------------------------------------------------------------------------- workers

    def _answer(self, worker: Worker, clock: Clock, frame: Any, sent_ms: int, answer: dict[str, Any]) -> None:
        kind = answer["kind"]
        if isinstance(frame, Join):
            if kind == "joined" and frame.n == clock.joining_n and not worker.session:
                clock.joining_n = 0
                worker.joined(answer["session"], len(frame.reports))
                clock.base_ms = clock.join_ms - RENEW_MS  # the first sending of this number
                clock.renew_ms = 0
        elif frame.session != worker.session:
            return
        elif kind == "error" and answer["code"] == "session-over":
            worker.fence()
        elif isinstance(frame, Renew) and kind == "renewed":
            clock.base_ms = max(clock.base_ms, self.renew_sent.pop((worker.id, frame.session, frame.n), 0))
        elif isinstance(frame, ReportFrame) and kind == "recorded":
            worker.report_answered(answer["no"])

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
            if now >= clock.report_ms or worker.flying is None:
                reports = worker.report_frame()
                if reports is not None:
                    clock.report_ms = now + RESEND_MS
                    self._post(worker.id, reports)
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
                elif held.phase == "running" and self.looks(worker, key):
                    worker.look(held, ready=self.staying.random() < 0.7)
                elif held.phase == "exited" and self.random.random() < 0.4:
                    worker.free(key)

    def disturbed(self) -> list[Worker]:
        """The workers to which something happens."""
        return list(self.drive.workers.values())

    def _accidents(self) -> None:
        drive, chance = self.drive, self.random.random
        for worker in self.disturbed():
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
            verb = self.random.choice(("cordon", "drain", "uncordon", "uncordon", "release", "forget"))
            drive.operate(verb, self.random.choice(self.disturbed()).id)
            self._events()
        if chance() < 0.06:
            self._orders()
        if chance() < 0.003:
            drive.now += 40_000  # the leader's machine was stopped for a while

    def _orders(self) -> None:
        """An operator acts on a job or a tenant, alone or several at once."""
        pick, state = self.random.choice, self.drive.state
        live = [(job.tenant, job.name) for job in state.jobs.values() if not job.over and job.tenant in "tu"]
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
            if fields["replicas"] > 1 and (fields["gpu"] or {}).get("scheduling") != "gang":
                self._of_many(fields)
            if (fields["gpu"] or {}).get("scheduling") != "gang" and self.staying.random() < 0.2:
                self._of_staying(fields)
            tenant = pick("ttu")
            if self._jobs > 1 and self.behind.random() < 0.35:
                fields["after"] = self._after()
            if self.timed.random() < 0.2:
                seconds = self.timed.choice((0.5, 3, 20))
                if fields.get("deadline_s") is None or fields["deadline_s"] > seconds:
                    fields["start_after_s"] = seconds
            fields = beside({"run": {"driver": "noop"}, **fields})
            self._submitted(drive.offer_submit(name, tenant=tenant, **fields), tenant, name)
        if chance() < 0.12 and self._jobs:
            named, tenant = f"j{self.random.randrange(self._jobs + 3) + 1}", pick("ttu")
            how = self.beside.choice(("plain", "before", "before", "lifts"))
            drive.offer_cancel(named, tenant=tenant, before=how == "before", lifts=how == "lifts")
        if self.beside.random() < 0.1 and self._jobs:
            name, which = f"j{self.beside.randrange(self._jobs) + 1}", self.beside.choice(("1", "0-1", "5-8", "2, 101"))
            drive.engine.offer(Cancel(self.beside.choice("ttu"), name, "some", replicas=parse_ranges(which)))

    def _of_many(self, fields: dict[str, Any]) -> None:
        """Some jobs of several replicas have more of them, numbers of their own, and their own bounds."""
        pick, chance = self.beside.choice, self.beside.random
        if chance() < 0.3:
            fields["indices"] = pick(("3, 5-6", "0-11", "7", "100-104, 900000-900002"))
            del fields["replicas"]
        if chance() < 0.4:
            fields["max_running"] = pick((1, 2, 4))
        if chance() < 0.4:
            fields["max_failed"] = pick((1, 2, None))

    def _after(self) -> list[Any]:
        """One to three earlier jobs, or ones that are not known, and which end of each counts."""
        pick = self.behind.choice
        names = {f"j{max(1, self._jobs + 1 - self.behind.randrange(12))}" for _ in range(pick((1, 1, 2, 3)))}
        return [pick((name, {"job": name, "when": "any"}, {"job": name, "when": "failed"})) for name in sorted(names)]

    def _of_staying(self, fields: dict[str, Any]) -> None:
        """Some jobs stay: until they have ended well, or as often as they may."""
        pick = self.staying.choice
        fields["retries"] = 0
        fields["run"] = {"driver": "noop", "restart": pick(("on-failure", "always"))}
        if fields["run"]["restart"] == "always" or self.staying.random() < 0.3:
            fields["run"]["max_restarts"] = pick((1, 2, 4))  # else a world would have no end
        if self.staying.random() < 0.8:
            fields["run"] |= {"ports": 1, "ready": {"tcp": "PORT"}}

    def looks(self, worker: Worker, key: AttemptName) -> bool:
        """Whether a worker looks now whether an attempt is ready."""
        run = decode_request(worker.held[key].place.body).workload
        return run.ready is not None and self.staying.random() < 0.7

    def _calls(self) -> None:
        """Some jobs are services that follow their calls; members say this and that, callers wake them."""
        drive, pick, chance = self.drive, self.calling.choice, self.calling.random
        if chance() < 0.05:
            tenant, name = pick("tu"), f"s{self.calling.randrange(3)}"
            run = {"driver": "process", "argv": ["serve"]}
            scale = {"min": pick((0, 0, 1)), "max": pick((1, 2, 4))}
            gpu = pick((None, {}, {"count": 2}, {"sharing": "mps"}))
            fields: dict[str, Any] = {
                "run": run,
                "replicas": scale,
                "service": {"name": name},
                "gpu": gpu,
                "priority": pick((40, 50)),
            }
            self._submitted(drive.offer_submit(name, tenant=tenant, **beside(fields)), tenant, name)
        for job in list(drive.state.jobs.values()):
            if job.over or not job.name.startswith("s"):
                continue
            if chance() < 0.1:
                drive.engine.offer(Wake(job.tenant, job.name))
            for row in job.rows.values():
                if row.attempt is not None and chance() < 0.3:
                    calls = (pick((0, 0, 1, 2)), pick((0, 0, 3)), pick((0, 0, 900)), pick((False, False, True)))
                    sums = (drive.now // 7, 0, 0, drive.now // 3, drive.now // 9, drive.now)
                    load = MemberLoad(f"m{row.fence}", 1, *calls, *sums, job.name, row.index, row.fence)
                    drive.engine.offer_member_load(job.tenant, "s", load, drive.now)

    def _submitted(self, reply: str, tenant: str, name: str) -> None:
        self.waiting[reply] = (tenant, name)

    def _events(self) -> None:
        for reply in [reply for reply in self.waiting if reply in self.drive.answers]:
            name, answer = self.waiting.pop(reply), self.drive.answers.pop(reply)
            if answer["kind"] == "accepted":
                self.answered.add(name)
        for event in self.drive.events[self._told :]:
            if "changes" not in event:
                continue  # of a job that is not listed there are counts
            job = self.drive.state.job(event["tenant"], event["job"])
            run = decode_request(job.body).workload if job is not None else None
            self.readiness.told(event["tenant"], event["job"], event["changes"])
            self.restarts.told(event["tenant"], event["job"], run, event["changes"])
            for change in event["changes"]:
                if change.get("why", "").startswith(("requeued", "scaled to", "moved to")):
                    self.requeued[(event["tenant"], event["job"])] += 1
                if change["state"] == "SUCCEEDED":
                    self.succeeded[(event["tenant"], event["job"], change["replica"])] += 1
        self._told = len(self.drive.events)

    # -------------------------------------------------------------------------------------------- checks

    def _check(self) -> None:
        state = self.drive.state
        running: Counter[tuple[str, str, int]] = Counter()
        for worker in self.drive.workers.values():
            for tenant, job, index, *_ in (key for key, held in worker.held.items() if held.phase == "running"):
                known = state.job(tenant, job)
                if known is not None and IS_TERMINAL[known.state_of(index) or 0]:
                    continue  # given up by its caller while its worker is away: nobody runs beside it
                running[(tenant, job, index)] += 1
        twice = [unit for unit, count in running.items() if count > 1]
        assert not twice, f"two live attempts of {twice}"
        for tenant, name in self.answered:
            known = state.job(tenant, name)
            assert known is not None or state.finished.find(job_key(tenant, name)) is not None, f"{name} was lost"
        self._check_orders()
        self._check_after()
        for payload in self.drive.records[self._read :]:
            for act in decode_record(payload).acts:
                if isinstance(act, Preempt):
                    self.preempted.update(act.victims)
        self._read = len(self.drive.records)
        assert all(count == 1 for count in self.succeeded.values()), self.succeeded
        self.restarts.look(state)
        self.readiness.look(state, self.drive.workers.values())
        for live in state.jobs.values():
            request = decode_request(live.body)
            most, moving = request.max_running, live.relocating is not None  # one more, until it serves
            if request.scale is not None:
                most, wanted = request.scale.max, wanted_of(live, request) + moving
                stay = sum(STATES[row.state] in ("PLACED", "CLAIMED", "RUNNING") for row in live.rows.values())
                assert stay <= wanted, f"{live.name} has {stay} attempts, and {wanted} are wanted"
            assert most is None or live.on_workers <= most + moving, (
                f"{live.name} runs {live.on_workers} replicas of {most}"
            )
            for replica in live.replicas:
                assert replica.retries <= request.retries
                assert replica.losses <= request.retries_on_lost
                used = live.replicas[0] if request.is_gang else replica  # a gang counts on its first rank
                if request.is_gang and IS_TERMINAL[live.state_of(0) or 0]:
                    continue  # nothing is counted there any more
                if not live.is_listed:
                    continue  # its events are counts, which tell of no requeue
                again = self.requeued[(live.tenant, live.name)] + self.preempted[live.num]
                assert replica.attempt_no <= 1 + used.retries + used.losses + used.refusals + used.restarts + again

    def _end_of(self, tenant: str, name: str) -> str:
        """The final state of a job; "" of one that has not ended."""
        state = self.drive.state
        if (job := state.job(tenant, name)) is not None:
            return job.state if job.state in TERMINAL else ""
        row = state.finished.find(job_key(tenant, name))
        return "" if row is None else STATES[row[2]]

    def _check_after(self) -> None:
        """What the issue says of a job that starts after others, by the ends alone."""
        is_settled = not self.drive.engine.urgent  # else the next record tells of ends
        for job in self.drive.state.jobs.values():
            asked = [
                (each, "succeeded") if isinstance(each, str) else (each["job"], each.get("when", "succeeded"))
                for each in json.loads(job.body).get("after", ())
            ]
            ends = [(name, when, self._end_of(job.tenant, name)) for name, when in asked]
            wrong = [
                f"after {name}: {end}"
                for name, when, end in ends
                if end and when != "any" and (end == "SUCCEEDED") != (when == "succeeded")
            ]
            missing = [name for name, _, end in ends if not end]
            if job.attempt_no:
                assert not wrong, f"{job.name} was placed, and cannot be: {wrong}"
                assert not missing, f"{job.name} was placed before the end of {missing}"
            if not is_settled or job.state == "REJECTED":
                continue
            assert not (wrong and job.live), f"{job.name} still waits, and cannot start: {wrong}"
            if job.live and not missing:
                now_ms = self.drive.state.time_ms
                if job.num in self.drive.engine.indexing.left_out:  # it has no timer until its hold is released
                    now_ms = 0
                left = [num for num, until in job.awaits if num or until <= now_ms]
                assert not left, f"{job.name} waits for {job.awaits}, and all have ended"
            told = [row[WHY] for row in job.history if row[WHY].startswith("after ")]
            assert set(told) <= set(wrong), f"{job.name} says {told}, and has {wrong}"

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
            self.followed += b'"after"' in job.body
            if (seconds := json.loads(job.body).get("start_after_s", 0)) > 0:
                self.in_time += 1
                assert state.time_ms >= job.accepted_ms + seconds * 1000, f"{job.name} was placed before its time"
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
        for job in list(drive.state.jobs.values()):
            if decode_request(job.body).scale is not None and not job.over:
                drive.cancel(job.name, tenant=job.tenant)  # nobody calls it any more
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
        assert not list(drive.state.attempts())
        assert drive.free_gpus() == sum(len(worker.hello.gpu_pool) for worker in drive.workers.values())
        # who waits for others goes first
        for tenant, name in sorted(infeasible, key=lambda each: -drive.job(each[1], each[0]).num):
            drive.cancel(name, tenant=tenant)
        assert drive.state.live == 0

    def _feasible(self, tenant: str, name: str) -> bool:
        job, jobs = self.drive.job(name, tenant), self.drive.state.jobs
        if any(not self._feasible(tenant, jobs[num].name) for num, _ in job.awaits if num):
            return False
        return self.drive.engine.admission.could_ever(self.drive.engine.reader.shape_of(job))

    def _all_over(self) -> bool:
        state = self.drive.state
        if any(worker.held or not worker.session for worker in self.drive.workers.values()):
            return False
        return all(job.over or not self._feasible(job.tenant, job.name) for job in state.jobs.values()) and not list(
            state.attempts()
        )
