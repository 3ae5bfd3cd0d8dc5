"""Sites with sweeps of many replicas, seen by those who must not wait for them: deadlines are kept, answers come.

By a seed hosts are drained until a time, GPUs fail, sweeps are cancelled, and ids are used again, while other workers
report in every second. What is judged are promises alone:

- nothing goes on on a drained worker past its deadline without having been asked to end;
- a GPU that its worker reports as failed is recorded, and the jobs on it are asked to leave;
- whoever submits a job under a new id is answered, whatever another tenant waits for.

Each within so many seconds as a site of this size takes.
"""

from __future__ import annotations

import random
from typing import Final

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.ledger.state import AT_MS, MAY_END, Worker
from moorage.schemas.frames import Unwell
from tests.unit.scheduler.driving import Driving

CROWDS_FROM: Final = 1_000_000
HOSTS: Final = 6
GPUS: Final = 8
SECONDS: Final = 50
#: a deadline counts as kept so many looks later
LOOKS: Final = 4
#: a record that is not answered by so many later ones is not answered in time
RECORDS: Final = 12


class Crowds(Driving):
    """A site by seed. `run` raises AssertionError where a promise does not hold."""

    def __init__(self, seed: int) -> None:
        super().__init__(Config(ended_max=10_000, finished_keep=15.0, ranker="pack"))
        self.random = random.Random(seed)
        self._late: dict[str, int] = {}  # by worker: how many looks in a row it was to be empty, or without a device
        self._asked: dict[str, int] = {}  # by reply: the record in which it was asked
        self._ids = 0
        for number in range(HOSTS):
            self.worker(f"w{number}", GPUS)

    def run(self) -> None:
        for _ in range(SECONDS):
            self._happens()
            self._reports()
            self.tick(1_000)
            for _ in range(3):
                self.tick()
            self._judge()

    def _happens(self) -> None:
        chance = self.random.random
        if chance() < 0.3:
            self._ids += 1
            count = self.random.choice((8, 40, 120))
            gpu: dict[str, object] | None = {} if chance() < 0.7 else None
            self.offer_submit(f"sweep{self._ids}", replicas=count, tenant="large", gpu=gpu)
        if chance() < 0.3:
            name = f"w{self.random.randrange(HOSTS)}"
            if self.state.workers[name].flag == "open":
                self.offer_operate("drain", name, within_s=self.random.choice((1, 3, 6)))
                self.workers[name].auto = chance() < 0.5  # else it does not end what it is asked to end
        if chance() < 0.1:
            name = f"w{self.random.randrange(HOSTS)}"
            self.workers[name].auto = True
            self.offer_operate("uncordon", name)
        if chance() < 0.15:
            worker = self.workers[f"w{self.random.randrange(HOSTS)}"]
            worker.unwell = [Unwell(self.random.randrange(GPUS), "xid", "Xid 79", True)]
        if chance() < 0.1 and self._ids:
            self.offer_cancel(f"sweep{self.random.randint(1, self._ids)}", tenant="large")
        for number in range(5):
            self.offer_submit(f"short{self._ids}-{number}", tenant="again")
        before_ms = self.now - round(self.config.finished_keep * 1000)
        jobs = (self.state.jobs[num] for num in self.state.ended)
        free = [job.name for job in jobs if job.tenant == "again" and job.history[-1][AT_MS] < before_ms]
        if chance() < 0.2 and free:  # an id that is free again
            self.offer_submit(free[-1], tenant="again", priority=self.random.randrange(50))
        self._ids += 1
        for tenant in ("small", "other"):
            reply = self.offer_submit(f"one{self._ids}", tenant=tenant)
            self._asked[reply] = len(self.records)

    def _reports(self) -> None:
        for name, worker in self.workers.items():
            if worker.session:
                self.send(name, worker.renew_frame())
            running = [key for key, held in worker.held.items() if held.phase == "running"]
            for key in self.random.sample(running, min(len(running), 3)) if worker.auto else ():
                worker.finish(key)
            if worker.session and (frame := worker.report_frame()) is not None:
                self.send(name, frame)
                worker.report_answered(frame.no)

    def _judge(self) -> None:
        for worker in self.state.workers.values():
            late = self._late[worker.id] = self._late.get(worker.id, 0) + 1 if self._goes_on(worker) else 0
            assert late <= LOOKS, f"{worker.id} was to be left {late} s ago, and what runs there goes on"
        for reply, at in list(self._asked.items()):
            if reply in self.answers:
                del self._asked[reply]
                continue
            records = len(self.records) - at
            assert records <= RECORDS, f"a new job is not answered after {records} records"

    def _goes_on(self, worker: Worker) -> bool:
        """Whether something goes on on a worker that its drain, or a device that it reports, is to end."""
        window, unwell = worker.window, {each.slot for each in self.workers[worker.id].unwell}
        if unwell - worker.unwell.keys():
            return True
        failed = sum(1 << slot for slot in unwell)
        is_over = window is not None and worker.flag == "draining" and self.state.time_ms >= window.leave_ms
        return any(
            attempt.replica.attempt is attempt and attempt.replica.state in MAY_END
            for attempt in worker.attempts.values()
            if is_over or attempt.home & failed
        )
