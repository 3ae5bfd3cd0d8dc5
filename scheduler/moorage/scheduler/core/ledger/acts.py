"""Folding of acts: what happens to workers, tenants, cursors, snapshots and reigns, and what operators order.

As `fold`: no policy, clock, randomness, floats or set order in here.
"""

from __future__ import annotations

from typing import Any

from moorage.scheduler.core import fairshare
from moorage.scheduler.core.finished import job_key
from moorage.scheduler.core.ledger.folding import FoldError, Folding
from moorage.scheduler.core.records import Act
from moorage.scheduler.core.state import (
    AVOID_MAX,
    HELD,
    PARTS_MAX,
    PRIORITY,
    RELEASED,
    STORY_KEPT,
    Job,
    Window,
    Worker,
    extra_of,
)
from moorage.schemas.job import STATES


class FoldingActs(Folding):
    __slots__ = ()

    def _act(self, act: list[Any]) -> None:
        state, kind = self.state, act[0]
        if kind == Act.JOIN:
            _, num, boot, n, session, no, hello = act
            worker = state.worker_by_num[num]
            before = worker.hello.get("gpu_pool", [])
            worker.boot, worker.n, worker.session, worker.no, worker.hello = boot, n, session, no, hello
            worker.joined_ms = self.time
            self._keep_health(worker, before)
            self._touch_worker(worker)
        elif kind == Act.WORKER:
            _, num, worker_id, machine = act
            existing = state.workers.get(worker_id)
            if existing is not None:
                existing.machine = machine
                self._touch_worker(existing)
            else:
                if num != len(state.worker_by_num):
                    raise FoldError(f"record {self.seq}: worker number {num} is not the next")
                worker = Worker(num, worker_id, machine)
                state.workers[worker_id] = worker
                state.worker_by_num.append(worker)
                self._touch_worker(worker)
        elif kind == Act.GONE:
            worker = state.worker_by_num[act[1]]
            worker.session = ""
            worker.left_ms = self.time
            self._touch_worker(worker)
        elif kind == Act.FLAG:
            worker = state.worker_by_num[act[1]]
            worker.flag, worker.by = act[2], act[3]
            self._touch_worker(worker)
        elif kind == Act.UNQUARANTINE:
            worker = state.worker_by_num[act[1]]
            worker.quarantined &= ~act[2]
            self._touch_worker(worker)
        elif kind == Act.HEALTH:
            _, num, slot, ailment, detail, ends = act
            worker = state.worker_by_num[num]
            if ailment:
                was = worker.unwell.get(slot)
                since_ms = was[2] if was is not None and was[0] == ailment else self.time
                worker.unwell[slot] = (ailment, detail, since_ms, ends)
                worker.unwell_mask |= 1 << slot
            else:
                self._well(worker, 1 << slot)
            self._touch_worker(worker)
        elif kind == Act.WELL:
            worker = state.worker_by_num[act[1]]
            worker.well = act[2]
            worker.well_n = self.seq if act[2] else worker.well_n
            self._well(worker, act[2])
            self._touch_worker(worker)
        elif kind == Act.AVOID:
            self._avoid(act[1], act[2], act[3])
        elif kind == Act.WINDOW:
            worker = state.worker_by_num[act[1]]
            worker.window = Window(*act[2:7]) if act[3] else None
            if worker.window is not None:
                state.windows[worker.num] = worker
            else:
                state.windows.pop(worker.num, None)
            self._touch_worker(worker)
        elif kind == Act.CURSOR:
            self._cursor(act[1], act[2], act[3])
        elif kind == Act.TOMBSTONE:
            tenant = state.tenant(act[1])
            tenant.tombstones[act[2]] = act[3] or -self.time
            self.rows[tenant] = None
        elif kind == Act.UNTOMB:
            tenant = state.tenant(act[1])
            tenant.tombstones.pop(act[2], None)
            self.rows[tenant] = None
        elif kind in (Act.HOLD, Act.UNHOLD):
            self._hold(act[1], act[2], act[3], act[4], on=kind == Act.HOLD)
        elif kind == Act.PRIORITY:
            _, num, priority, by, why = act
            job = self._ordered(num, PRIORITY, by, f"{priority}: {why}" if why else str(priority))
            job.priority = priority
        elif kind == Act.LIMIT:
            _, name, gpus, jobs, by, why = act
            tenant = state.tenant(name)
            tenant.gpus_max, tenant.jobs_max = gpus, jobs
            tenant.limit = (by, why, self.time) if gpus or jobs else None
            self.rows[tenant] = None
        elif kind == Act.SHARE:
            _, name, weight, guaranteed, by, why = act
            tenant = state.tenant(name)
            tenant.weight, tenant.guaranteed = weight, guaranteed
            tenant.share = (by, why, self.time) if weight or guaranteed else None
            self.rows[tenant] = None
        elif kind == Act.PREEMPT:
            self._preempt(act[1], tuple(act[2]), tuple(act[3]))
        elif kind == Act.HALF_LIFE:
            fairshare.begin(state, act[1])
            self.rows.update(dict.fromkeys(state.tenants.values()))
        elif kind == Act.COMPACT:
            self._compact(act[1], act[2] if len(act) > 2 else [])
        elif kind == Act.PART:
            self._part(act[1], act[2], act[3], act[4])
        elif kind == Act.EXPIRE:
            before = state.finished.row
            for _ in range(act[1]):
                state.finished.drop_oldest()
            state.digest = (state.digest + state.finished.row - before) & 0xFFFFFFFFFFFFFFFF
        elif kind == Act.SNAPSHOT:
            state.snapshot_before, state.snapshot = state.snapshot, (act[1], act[2], act[3])
        elif kind == Act.RESIGN:
            state.leader = ""
        elif kind == Act.EPOCH:
            if state.ledger_id and state.ledger_id != act[1]:
                raise FoldError(f"record {self.seq} belongs to ledger {act[1]}, this state to {state.ledger_id}")
            if not state.ledger_id:
                state.level = self.record.format  # a new ledger begins at what its first leader writes
            state.ledger_id, state.leader = act[1], act[2]
            state.epoch, state.epoch_seq = self.record.epoch, self.seq
        elif kind == Act.LEVEL:
            state.level = act[1]
        elif kind == Act.BEHIND:
            state.behind = act[1]
        elif kind == Act.RESTORED:
            state.behind = ""
            state.former_id, state.restored_ms, state.restored_epoch = act[1], self.time, self.record.epoch
        else:
            raise FoldError(f"record {self.seq} holds act {kind!r}, which this release does not know")

    @staticmethod
    def _well(worker: Worker, mask: int) -> None:
        worker.unwell = {slot: ailment for slot, ailment in worker.unwell.items() if not mask >> slot & 1}
        worker.unwell_mask &= ~mask

    def _keep_health(self, worker: Worker, before: list[Any]) -> None:
        """What was said of a device holds for it alone: where another one stands in its slot, nothing is known."""
        now = worker.hello.get("gpu_pool", [])
        for slot in list(worker.unwell):
            same = slot < len(now) and slot < len(before) and now[slot].get("uuid") == before[slot].get("uuid")
            if not same:
                self._well(worker, 1 << slot)

    def _avoid(self, num: int, worker_num: int, mask: int) -> None:
        job = self.state.jobs.get(num)
        if job is None:
            raise FoldError(f"record {self.seq}: a device that failed under job {num}, which is not there")
        avoid = dict(job.avoid)
        avoid[worker_num] = avoid.get(worker_num, 0) | mask
        if not mask:
            del avoid[worker_num]
        job.avoid = tuple(sorted(avoid.items())[-AVOID_MAX:])
        self.out.jobs[num] = job

    def _hold(self, name: str, num: int, by: str, why: str, *, on: bool) -> None:
        order = (by, why, self.time) if on else None
        if num:
            self._ordered(num, HELD if on else RELEASED, by, why).hold = order
        else:
            tenant = self.state.tenant(name)
            tenant.hold = order
            self.rows[tenant] = None

    def _preempt(self, num: int, workers: tuple[int, ...], jobs: tuple[int, ...]) -> None:
        job = self.state.jobs.get(num)
        if job is None:
            raise FoldError(f"record {self.seq} preempts for job {num}, which is not there")
        self.state.preempting.pop(num, None)
        job.preempts = (workers, jobs) if workers else None
        if workers:
            self.state.preempting[num] = job
        self.out.jobs[num] = job

    def _ordered(self, num: int, word: int, by: str, why: str) -> Job:
        """An operator's act on a job, as a revision of its own."""
        job = self.state.jobs.get(num)
        if job is None:
            raise FoldError(f"record {self.seq} acts on job {num}, which is not there")
        job.rev += 1
        self._tell(job, (job.rev, self.time, -1, 0, word, -1, 0, 0, why, 0, by))
        self.out.jobs[num] = job
        return job

    def _cursor(self, name: str, which: str, through: int) -> None:
        tenant = self.state.tenant(name)
        if which == "submit":
            tenant.submit_cursor = through
            # a cancel that came by the queue has met every submit before it: its tombstone has done its work
            for job in [job for job, at in tenant.tombstones.items() if 0 < at <= through]:
                del tenant.tombstones[job]
        else:
            tenant.cancel_cursor = through
        self.rows[tenant] = None

    def _part(self, num: int, seq: int, first: int, last: int) -> None:
        """A part of a job's story stands in the history: memory keeps what is newer, and the last few."""
        job = self.state.jobs.get(num)
        if job is None:
            raise FoldError(f"record {self.seq}: a part of job {num}, which is not there")
        job.parts = (*job.parts, (seq, first, last))[-PARTS_MAX:]
        story = job.story
        if story:
            del story[: max(0, min(len(story) - STORY_KEPT, last - story[0][0] + 1))]

    def _compact(self, flat: list[Any], kept: list[int]) -> None:
        state = self.state
        digest, before = state.digest, state.finished.row
        for at in range(0, len(flat), 2):
            num = flat[at]
            if not state.ended or state.ended.popleft() != num:
                raise FoldError(f"record {self.seq}: job {num} is not the oldest ended one")
            job = state.jobs.pop(num)
            extra = extra_of(len(job.replicas), len(job.body))
            state.extra -= extra
            state.extra_ended -= extra
            del state.tenants[job.tenant].jobs[job.name]
            final = job.replicas[0].state if len(job.replicas) == 1 else STATES.index(job.state)
            ended_ms = job.story[-1][1] if job.story else self.time
            where = kept[at // 2] if kept else 0
            state.finished.add(job.key or job_key(job.tenant, job.name), flat[at + 1], ended_ms, final, where)
            digest -= job.row
            for replica in job.replicas:
                digest -= replica.row
                del replica.job  # they point at each other: so they go at once, and leave the collector nothing
        state.digest = (digest + state.finished.row - before) & 0xFFFFFFFFFFFFFFFF
