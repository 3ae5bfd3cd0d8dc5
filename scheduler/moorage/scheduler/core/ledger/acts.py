"""Folding of acts: what happens to workers, tenants, cursors, snapshots and reigns, and what operators order.

As `fold`: no policy, clock, randomness, floats or set order in here. What the fields of an act are, `records.Act` says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

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
    StandingOrder,
    Tenant,
    Window,
    Worker,
)
from moorage.schemas.job import STATES


class FoldingActs(Folding):
    __slots__ = ()

    def _act(self, act: list[Any]) -> None:
        fold_act = _BY_KIND.get(act[0])
        if fold_act is None:
            raise FoldError(f"record {self.seq} holds act {act[0]!r}, which this release does not know")
        fold_act(self, act)

    # -------------------------------------------------------------------------------------- workers

    def _worker(self, num: int) -> Worker:
        """A worker that this record changes."""
        worker = self.state.worker_by_num[num]
        self._touch_worker(worker)
        return worker

    def _known(self, act: list[Any]) -> None:
        _, num, worker_id, machine = act
        state = self.state
        worker = state.workers.get(worker_id)
        if worker is not None:
            worker.machine = machine
        else:
            if num != len(state.worker_by_num):
                raise FoldError(f"record {self.seq}: worker number {num} is not the next")
            worker = state.workers[worker_id] = Worker(num, worker_id, machine)
            state.worker_by_num.append(worker)
        self._touch_worker(worker)

    def _join(self, act: list[Any]) -> None:
        _, num, boot, n, session, no, hello = act
        worker = self._worker(num)
        before = worker.hello.get("gpu_pool", [])
        worker.boot, worker.n, worker.session, worker.no, worker.hello = boot, n, session, no, hello
        worker.joined_ms = self.time
        self._keep_health(worker, before)

    def _keep_health(self, worker: Worker, before: list[Any]) -> None:
        """What was said of a device holds for it alone: where another one stands in its slot, nothing is known."""
        now = worker.hello.get("gpu_pool", [])
        for slot in list(worker.unwell):
            same = slot < len(now) and slot < len(before) and now[slot].get("uuid") == before[slot].get("uuid")
            if not same:
                self._well(worker, 1 << slot)

    def _gone(self, act: list[Any]) -> None:
        worker = self._worker(act[1])
        worker.session = ""
        worker.left_ms, worker.left_why = self.time, str(act[2])

    def _flag(self, act: list[Any]) -> None:
        worker = self._worker(act[1])
        worker.flag, worker.by = act[2], act[3]

    def _window(self, act: list[Any]) -> None:
        worker, windows = self._worker(act[1]), self.state.windows
        if act[3]:
            worker.window = Window(*act[2:7])
            windows[worker.num] = worker
        else:
            worker.window = None
            windows.pop(worker.num, None)

    # -------------------------------------------------------------------------------------- devices

    def _unquarantine(self, act: list[Any]) -> None:
        self._worker(act[1]).quarantined &= ~act[2]

    def _health(self, act: list[Any]) -> None:
        _, num, slot, ailment, detail, ends = act
        worker = self._worker(num)
        if not ailment:
            self._well(worker, 1 << slot)
            return
        was = worker.unwell.get(slot)
        since_ms = was[2] if was is not None and was[0] == ailment else self.time
        worker.unwell[slot] = (ailment, detail, since_ms, ends)
        worker.unwell_mask |= 1 << slot

    def _said_well(self, act: list[Any]) -> None:
        worker = self._worker(act[1])
        worker.well = act[2]
        if worker.well:
            worker.well_n = self.seq
        self._well(worker, worker.well)

    @staticmethod
    def _well(worker: Worker, mask: int) -> None:
        worker.unwell = {slot: ailment for slot, ailment in worker.unwell.items() if not mask >> slot & 1}
        worker.unwell_mask &= ~mask

    # ----------------------------------------------------------------------------------------- jobs

    def _job(self, num: int, does: str) -> Job:
        job = self.state.jobs.get(num)
        if job is None:
            raise FoldError(f"record {self.seq} {does} job {num}, which is not there")
        return job

    def _avoid(self, act: list[Any]) -> None:
        job = self._job(act[1], "avoids a device for")
        worker_num, mask = act[2], act[3]
        avoid = dict(job.avoid)
        avoid[worker_num] = avoid.get(worker_num, 0) | mask
        if not mask:
            del avoid[worker_num]
        job.avoid = tuple(sorted(avoid.items())[-AVOID_MAX:])
        self.out.jobs[job.num] = job

    def _preempt(self, act: list[Any]) -> None:
        job, preempting = self._job(act[1], "preempts for"), self.state.preempting
        workers, jobs = tuple(act[2]), tuple(act[3])
        preempting.pop(job.num, None)
        job.preempts = (workers, jobs) if workers else None
        if workers:
            preempting[job.num] = job
        self.out.jobs[job.num] = job

    def _priority(self, act: list[Any]) -> None:
        _, num, priority, by, why = act
        job = self._ordered(num, PRIORITY, by, f"{priority}: {why}" if why else str(priority))
        job.priority = priority
        self.state.reprioritized += 1

    def _hold(self, act: list[Any]) -> None:
        """Or UNHOLD: of one job, or of a tenant's whole queue."""
        kind, name, num, by, why = act[:5]
        order = StandingOrder(by, why, self.time) if kind == Act.HOLD else None
        if num:
            self._ordered(num, RELEASED if order is None else HELD, by, why).hold = order
        else:
            self._tenant(name).hold = order

    def _ordered(self, num: int, word: int, by: str, why: str) -> Job:
        """An operator's act on a job, as a revision of its own."""
        job = self._job(num, "acts on")
        job.rev += 1
        self._tell(job, (job.rev, self.time, -1, 0, word, -1, 0, 0, why, 0, by))
        self.out.jobs[num] = job
        return job

    def _part(self, act: list[Any]) -> None:
        """A part of a job's story stands in the history: memory keeps what is newer, and the last few."""
        job = self._job(act[1], "holds a part of")
        seq, first, last = act[2:5]
        job.parts = (*job.parts, (seq, first, last))[-PARTS_MAX:]
        story = job.story
        if story:
            del story[: max(0, min(len(story) - STORY_KEPT, last - story[0][0] + 1))]

    def _compact(self, act: list[Any]) -> None:
        """The oldest jobs that are over leave memory for a row each."""
        state = self.state
        flat: list[Any] = act[1]
        kept: list[int] = (act[2] if len(act) > 2 else None) or [0] * (len(flat) // 2)
        ended, jobs, tenants = state.ended, state.jobs, state.tenants
        digest, before = state.digest, state.finished.row
        rows: list[tuple[bytes, bytes, int, int, int]] = []
        pairs = iter(flat)
        for num, request, where in zip(pairs, pairs, kept, strict=True):
            if not ended or ended.popleft() != num:
                raise FoldError(f"record {self.seq}: job {num} is not the oldest ended one")
            job = jobs.pop(num)
            tenant, name, story, replicas = job.tenant, job.name, job.story, job.replicas
            if job.extra:
                state.extra -= job.extra
                state.extra_ended -= job.extra
            del tenants[tenant].jobs[name]
            final = replicas[0].state if len(replicas) == 1 else STATES.index(job.state)
            ended_ms = story[-1][1] if story else self.time
            rows.append((job.key or job_key(tenant, name), request, ended_ms, final, where))
            digest -= job.row
            for replica in replicas:
                digest -= replica.row
                del replica.job  # they point at each other: so they go at once, and leave the collector nothing
        state.finished.add_all(rows)
        state.digest = (digest + state.finished.row - before) & 0xFFFFFFFFFFFFFFFF

    def _expire(self, act: list[Any]) -> None:
        state = self.state
        before = state.finished.row
        for _ in range(act[1]):
            state.finished.drop_oldest()
        state.digest = (state.digest + state.finished.row - before) & 0xFFFFFFFFFFFFFFFF

    # -------------------------------------------------------------------------------------- tenants

    def _tenant(self, name: str) -> Tenant:
        """A tenant that this record changes."""
        tenant = self.state.tenant(name)
        self.rows[tenant] = None
        return tenant

    def _cursor(self, act: list[Any]) -> None:
        tenant, which, through = self._tenant(act[1]), act[2], act[3]
        if which != "submit":
            tenant.cancel_cursor = through
            return
        tenant.submit_cursor = through
        # a cancel that came by the queue has met every submit before it: its tombstone has done its work
        for job in [job for job, at in tenant.tombstones.items() if 0 < at <= through]:
            del tenant.tombstones[job]

    def _tombstone(self, act: list[Any]) -> None:
        self._tenant(act[1]).tombstones[act[2]] = act[3] or -self.time

    def _untomb(self, act: list[Any]) -> None:
        self._tenant(act[1]).tombstones.pop(act[2], None)

    def _limit(self, act: list[Any]) -> None:
        _, name, gpus, jobs, by, why = act
        tenant = self._tenant(name)
        tenant.gpus_max, tenant.jobs_max = gpus, jobs
        tenant.limit = StandingOrder(by, why, self.time) if gpus or jobs else None

    def _share(self, act: list[Any]) -> None:
        _, name, weight, guaranteed, by, why = act
        tenant = self._tenant(name)
        tenant.weight, tenant.guaranteed = weight, guaranteed
        tenant.share = StandingOrder(by, why, self.time) if weight or guaranteed else None

    def _half_life(self, act: list[Any]) -> None:
        fairshare.begin(self.state, act[1])
        self.rows.update(dict.fromkeys(self.state.tenants.values()))

    # ------------------------------------------------------------------------------ the ledger itself

    def _snapshot(self, act: list[Any]) -> None:
        self.state.snapshot_before, self.state.snapshot = self.state.snapshot, (act[1], act[2], act[3])

    def _epoch(self, act: list[Any]) -> None:
        state = self.state
        if state.ledger_id and state.ledger_id != act[1]:
            raise FoldError(f"record {self.seq} belongs to ledger {act[1]}, this state to {state.ledger_id}")
        if not state.ledger_id:
            state.level = self.record.format  # a new ledger begins at what its first leader writes
        state.ledger_id, state.leader = act[1], act[2]
        state.epoch, state.epoch_seq = self.record.epoch, self.seq

    def _resign(self, act: list[Any]) -> None:
        self.state.leader = ""

    def _level(self, act: list[Any]) -> None:
        self.state.level = act[1]

    def _behind(self, act: list[Any]) -> None:
        self.state.behind = act[1]

    def _restored(self, act: list[Any]) -> None:
        state = self.state
        state.behind = ""
        state.former_id, state.restored_ms, state.restored_epoch = act[1], self.time, self.record.epoch


_BY_KIND: Final[dict[str, Callable[[FoldingActs, list[Any]], None]]] = {
    Act.WORKER: FoldingActs._known,
    Act.JOIN: FoldingActs._join,
    Act.GONE: FoldingActs._gone,
    Act.FLAG: FoldingActs._flag,
    Act.WINDOW: FoldingActs._window,
    Act.UNQUARANTINE: FoldingActs._unquarantine,
    Act.HEALTH: FoldingActs._health,
    Act.WELL: FoldingActs._said_well,
    Act.AVOID: FoldingActs._avoid,
    Act.PREEMPT: FoldingActs._preempt,
    Act.PRIORITY: FoldingActs._priority,
    Act.HOLD: FoldingActs._hold,
    Act.UNHOLD: FoldingActs._hold,
    Act.PART: FoldingActs._part,
    Act.COMPACT: FoldingActs._compact,
    Act.EXPIRE: FoldingActs._expire,
    Act.CURSOR: FoldingActs._cursor,
    Act.TOMBSTONE: FoldingActs._tombstone,
    Act.UNTOMB: FoldingActs._untomb,
    Act.LIMIT: FoldingActs._limit,
    Act.SHARE: FoldingActs._share,
    Act.HALF_LIFE: FoldingActs._half_life,
    Act.SNAPSHOT: FoldingActs._snapshot,
    Act.EPOCH: FoldingActs._epoch,
    Act.RESIGN: FoldingActs._resign,
    Act.LEVEL: FoldingActs._level,
    Act.BEHIND: FoldingActs._behind,
    Act.RESTORED: FoldingActs._restored,
}


def known_act(kind: str) -> bool:
    """Whether this release folds acts of this kind."""
    return kind in _BY_KIND
