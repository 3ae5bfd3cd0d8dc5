"""The acts of a record: what happens in it beside its steps. Each act is one class, with all that is known of it.

On the wire an act is the list `[tag, field, ...]`. Tags and the order of fields are in every ledger ever written: none
may change. A new act is a new class with the feature level that it needs, and a line in `AnyAct`; a new field comes
last and has a default. As in `fold`: no policy, clock, randomness, floats or set order in here.

Jobs and workers are named by their numbers, devices by masks of slots. `by` is an actor as `records.actor` writes it.
"""

from __future__ import annotations

from itertools import islice
from typing import Any, ClassVar, Final

import msgspec

from moorage.scheduler.core import fairshare
from moorage.scheduler.core.digests import TUPLE_HASH
from moorage.scheduler.core.ledger.compacting import compact
from moorage.scheduler.core.ledger.folding import Checking, FoldError, Folding
from moorage.scheduler.core.state import (
    AVOID_MAX,
    HELD,
    PARTS_MAX,
    PRIORITY,
    RELEASED,
    REV,
    STORY_KEPT,
    StandingOrder,
    Worker,
)
from moorage.scheduler.core.state import Window as WorkerWindow


class _Act(msgspec.Struct, array_like=True, gc=False):
    """An act of a record."""

    #: the feature level that the ledger must have before a record may hold it: schedulers that know only the level
    #: before could not fold it
    LEVEL: ClassVar[int] = 1
    #: whether it is a decision, which the reader of decisions shows with its fields
    IS_DECISION: ClassVar[bool] = False

    @property
    def tag(self) -> str:
        """The word that it begins with in a record."""
        return str(self.__struct_config__.tag)

    def check(self, checking: Checking) -> None:
        """Raise `FoldError` where `fold` could not follow; change nothing but `checking`."""

    def fold(self, folding: Folding) -> None:
        """Do to the state what it says."""
        raise NotImplementedError


class Unknown(_Act):
    """An act that this release cannot read. It is in no record that this release writes."""

    name: str
    why: str

    def check(self, checking: Checking) -> None:
        raise FoldError(f"act {self.name!r} is not known: {self.why}")

    def fold(self, folding: Folding) -> None:
        raise FoldError(
            f"record {folding.seq} holds act {self.name!r}, in a form which this release does not know: {self.why}"
        )


# ------------------------------------------------------------------------------------------------------------ workers


class OfWorker(_Act):
    """An act on a worker that is known."""

    worker: int

    def check(self, checking: Checking) -> None:
        if not 0 <= self.worker < checking.workers:
            raise FoldError(f"act {self.tag} of worker {self.worker}, which is not known")


class Known(_Act, tag="worker"):
    """A worker gets its number, or a known one is on another machine."""

    worker: int
    id: str
    machine: str

    def check(self, checking: Checking) -> None:
        if self.id not in checking.ids and self.id not in checking.state.workers:
            if self.worker != checking.workers:
                raise FoldError(f"worker number {self.worker} is not the next")
            checking.ids.add(self.id)
            checking.workers += 1

    def fold(self, folding: Folding) -> None:
        state = folding.state
        worker = state.workers.get(self.id)
        if worker is not None:
            worker.machine = self.machine
        else:
            if self.worker != len(state.worker_by_num):
                raise FoldError(f"record {folding.seq}: worker number {self.worker} is not the next")
            worker = state.workers[self.id] = Worker(self.worker, self.id, self.machine)
            state.worker_by_num.append(worker)
        folding.touch_worker(worker)


class Join(OfWorker, tag="join"):
    """A worker's session begins. `hello` is its inventory as a map, with `lost_ms`; `no` its last fact frame, 0."""

    boot: str
    n: int
    session: str
    no: int
    hello: dict[str, Any]

    def fold(self, folding: Folding) -> None:
        worker = folding.worker(self.worker)
        before = worker.hello.get("gpu_pool", [])
        worker.boot, worker.n, worker.session, worker.no, worker.hello = (
            self.boot, self.n, self.session, self.no, self.hello,
        )  # fmt: skip
        worker.joined_ms = folding.time
        # what was said of a device holds for it alone: where another one stands in its slot, nothing is known
        now = worker.hello.get("gpu_pool", [])
        for slot in list(worker.unwell):
            same = slot < len(now) and slot < len(before) and now[slot].get("uuid") == before[slot].get("uuid")
            if not same:
                _forget_ailments(worker, 1 << slot)


class Gone(OfWorker, tag="gone"):
    """A worker's session ends. `why` is lost, `records.GOODBYE` or joined-anew."""

    IS_DECISION: ClassVar[bool] = True
    why: str

    def fold(self, folding: Folding) -> None:
        worker = folding.worker(self.worker)
        worker.session = ""
        worker.left_ms, worker.left_why = folding.time, self.why


class Flag(OfWorker, tag="flag"):
    """A worker is open, cordoned or draining."""

    IS_DECISION: ClassVar[bool] = True
    flag: str
    by: str

    def fold(self, folding: Folding) -> None:
        worker = folding.worker(self.worker)
        worker.flag, worker.by = self.flag, self.by


class Window(OfWorker, tag="window"):
    """A worker's maintenance window in ledger ms, see `state.Window`; all 0 takes it back."""

    LEVEL: ClassVar[int] = 2
    IS_DECISION: ClassVar[bool] = True
    from_ms: int = 0
    leave_ms: int = 0
    until_ms: int = 0
    by: str = ""
    why: str = ""

    def fold(self, folding: Folding) -> None:
        worker, windows = folding.worker(self.worker), folding.state.windows
        if self.leave_ms:
            worker.window = WorkerWindow(self.from_ms, self.leave_ms, self.until_ms, self.by, self.why)
            windows[worker.num] = worker
        else:
            worker.window = None
            windows.pop(worker.num, None)


class Unquarantine(OfWorker, tag="unquarantine"):
    """Devices that did not become free are used again."""

    slots: int
    by: str

    def fold(self, folding: Folding) -> None:
        folding.worker(self.worker).quarantined &= ~self.slots


class Health(OfWorker, tag="health"):
    """What a worker reports of a device: an ailment (empty: it is well again), and whether jobs have to leave it."""

    LEVEL: ClassVar[int] = 2
    slot: int
    ailment: str
    detail: str
    ends: int

    def fold(self, folding: Folding) -> None:
        worker, slot = folding.worker(self.worker), self.slot
        if not self.ailment:
            _forget_ailments(worker, 1 << slot)
            return
        was = worker.unwell.get(slot)
        since_ms = was[2] if was is not None and was[0] == self.ailment else folding.time
        worker.unwell[slot] = (self.ailment, self.detail, since_ms, self.ends)
        worker.unwell_mask |= 1 << slot


class Well(OfWorker, tag="well"):
    """An operator says that devices are well; with no slots, the worker has taken that."""

    LEVEL: ClassVar[int] = 2
    slots: int
    by: str

    def fold(self, folding: Folding) -> None:
        worker = folding.worker(self.worker)
        worker.well = self.slots
        if worker.well:
            worker.well_n = folding.seq
        _forget_ailments(worker, worker.well)


def _forget_ailments(worker: Worker, mask: int) -> None:
    worker.unwell = {slot: ailment for slot, ailment in worker.unwell.items() if not mask >> slot & 1}
    worker.unwell_mask &= ~mask


# --------------------------------------------------------------------------------------------------------------- jobs


class OfJob(_Act):
    """An act on a job that is in memory."""

    job: int

    def check(self, checking: Checking) -> None:
        if self.job not in checking.state.jobs:
            raise FoldError(f"act {self.tag} of job {self.job}, which is not there")


class Avoid(OfJob, tag="avoid"):
    """A job is not placed on these slots of a worker, which failed under it; none lifts that."""

    LEVEL: ClassVar[int] = 2
    IS_DECISION: ClassVar[bool] = True
    worker: int
    slots: int

    def fold(self, folding: Folding) -> None:
        job = folding.job(self.job, "avoids a device for")
        avoid = dict(job.avoid)
        avoid[self.worker] = avoid.get(self.worker, 0) | self.slots
        if not self.slots:
            del avoid[self.worker]
        job.avoid = tuple(sorted(avoid.items())[-AVOID_MAX:])
        folding.out.jobs[job.num] = job


class Preempt(OfJob, tag="preempt"):
    """Workers are reserved for a job, and these jobs end for it; without workers that is given up."""

    LEVEL: ClassVar[int] = 2
    IS_DECISION: ClassVar[bool] = True
    workers: list[int]
    victims: list[int]

    def fold(self, folding: Folding) -> None:
        job, preempting = folding.job(self.job, "preempts for"), folding.state.preempting
        preempting.pop(job.num, None)
        job.preempts = (tuple(self.workers), tuple(self.victims)) if self.workers else None
        if self.workers:
            preempting[job.num] = job
        folding.out.jobs[job.num] = job


class Priority(OfJob, tag="priority"):
    """An operator gives a job another priority."""

    IS_DECISION: ClassVar[bool] = True
    priority: int
    by: str
    why: str

    def fold(self, folding: Folding) -> None:
        said = f"{self.priority}: {self.why}" if self.why else str(self.priority)
        folding.ordered(self.job, PRIORITY, self.by, said).priority = self.priority
        folding.state.reprioritized += 1


class Part(OfJob, tag="part"):
    """Revisions `first` to `last` of a job stand in the history at `seq`: memory keeps what is newer, and the last."""

    seq: int
    first: int
    last: int

    def fold(self, folding: Folding) -> None:
        job = folding.job(self.job, "holds a part of")
        job.parts = (*job.parts, (self.seq, self.first, self.last))[-PARTS_MAX:]
        story = job.story
        if story:
            del story[: max(0, min(len(story) - STORY_KEPT, self.last - story[0][REV] + 1))]


class Compact(_Act, tag="compact"):
    """The oldest jobs that are over leave memory.

    `flat` has for each its number and its request's digest, `kept` where its history stands, 0 for nowhere.
    """

    flat: list[int | bytes]
    kept: list[int] = []

    def check(self, checking: Checking) -> None:
        jobs, nums = checking.state.jobs, self.flat[::2]
        at = checking.compacted
        if nums != list(islice(checking.state.ended, at, at + len(nums))):
            raise FoldError("jobs that are not the oldest ended ones leave memory")
        checking.compacted += len(nums)
        checking.gone.update((job.tenant, job.name) for job in [jobs[int(num)] for num in nums])

    def fold(self, folding: Folding) -> None:
        compact(folding, self.flat, self.kept)


class Expire(_Act, tag="expire"):
    """So many of the oldest rows of finished jobs go."""

    rows: int

    def check(self, checking: Checking) -> None:
        checking.expired += self.rows
        if checking.expired > len(checking.state.finished) + checking.compacted:
            raise FoldError(f"{checking.expired} rows of finished jobs expire, which are not there")

    def fold(self, folding: Folding) -> None:
        state = folding.state
        before = state.finished.row
        for _ in range(self.rows):
            state.finished.drop_oldest()
        state.digest = (state.digest + state.finished.row - before) & 0xFFFFFFFFFFFFFFFF


# ------------------------------------------------------------------------------------------------------------ tenants


class OfQueue(_Act):
    """An act on a job, or with job 0 on all that a tenant has waiting."""

    IS_DECISION: ClassVar[bool] = True
    tenant: str
    job: int
    by: str
    why: str

    def check(self, checking: Checking) -> None:
        if self.job and self.job not in checking.state.jobs:
            raise FoldError(f"act {self.tag} of job {self.job}, which is not there")

    def put(self, folding: Folding, word: int, order: StandingOrder | None) -> None:
        if self.job:
            folding.ordered(self.job, word, self.by, self.why).hold = order
        else:
            folding.tenant(self.tenant).hold = order


class Hold(OfQueue, tag="hold"):
    """An operator holds it: none of it is placed."""

    def fold(self, folding: Folding) -> None:
        self.put(folding, HELD, StandingOrder(self.by, self.why, folding.time))


class Unhold(OfQueue, tag="unhold"):
    """An operator releases what `Hold` holds."""

    def fold(self, folding: Folding) -> None:
        self.put(folding, RELEASED, None)


class Limit(_Act, tag="limit"):
    """A tenant's bounds; 0 is none."""

    IS_DECISION: ClassVar[bool] = True
    tenant: str
    gpus: int
    jobs: int
    by: str
    why: str

    def fold(self, folding: Folding) -> None:
        tenant = folding.tenant(self.tenant)
        tenant.gpus_max, tenant.jobs_max = self.gpus, self.jobs
        tenant.limit = StandingOrder(self.by, self.why, folding.time) if self.gpus or self.jobs else None


class Share(_Act, tag="share"):
    """A tenant's weight and guaranteed GPUs; 0 is none set."""

    LEVEL: ClassVar[int] = 2
    IS_DECISION: ClassVar[bool] = True
    tenant: str
    weight: int
    gpus: int
    by: str
    why: str

    def fold(self, folding: Folding) -> None:
        tenant = folding.tenant(self.tenant)
        tenant.weight, tenant.guaranteed = self.weight, self.gpus
        tenant.share = StandingOrder(self.by, self.why, folding.time) if self.weight or self.gpus else None


class HalfLife(_Act, tag="half-life"):
    """From now on usage is counted, and decays with this half-life."""

    LEVEL: ClassVar[int] = 2
    ms: int

    def fold(self, folding: Folding) -> None:
        fairshare.begin(folding.state, self.ms)
        folding.rows.update(dict.fromkeys(folding.state.tenants.values()))


class Cursor(_Act, tag="cursor"):
    """A tenant's durable queue was read through a sequence; `which` is submit or cancel."""

    tenant: str
    which: str
    through: int

    def fold(self, folding: Folding) -> None:
        tenant = folding.tenant(self.tenant)
        if self.which != "submit":
            tenant.cancel_cursor = self.through
            return
        tenant.submit_cursor = self.through
        # a cancel that came by the queue has met every submit before it: its tombstone has done its work
        for name in [name for name, at in tenant.tombstones.items() if 0 < at <= self.through]:
            del tenant.tombstones[name]


class Tombstone(_Act, tag="tombstone"):
    """A cancel of a job that is not known yet is remembered; `sequence` is its place in the durable queue, or 0."""

    tenant: str
    name: str
    sequence: int

    def fold(self, folding: Folding) -> None:
        folding.tenant(self.tenant).tombstones[self.name] = self.sequence or -folding.time


class Untomb(_Act, tag="untomb"):
    """The cancel of a job that is not known is forgotten."""

    tenant: str
    name: str

    def fold(self, folding: Folding) -> None:
        folding.tenant(self.tenant).tombstones.pop(self.name, None)


# --------------------------------------------------------------------------------------------------- the ledger itself


class Epoch(_Act, tag="epoch"):
    """A leader's term begins; `digests` names the hash of the digests from here on."""

    IS_DECISION: ClassVar[bool] = True
    ledger_id: str
    scheduler: str
    wall_s: float
    digests: str = TUPLE_HASH

    def fold(self, folding: Folding) -> None:
        state = folding.state
        if state.ledger_id and state.ledger_id != self.ledger_id:
            raise FoldError(f"record {folding.seq} belongs to ledger {self.ledger_id}, this state to {state.ledger_id}")
        if not state.ledger_id:
            state.level = folding.format  # a new ledger begins at what its first leader writes
        state.ledger_id, state.leader = self.ledger_id, self.scheduler
        state.epoch, state.epoch_seq = folding.epoch, folding.seq


class Resign(_Act, tag="resign"):
    """The leader stops for good: nobody need wait for its silence."""

    def fold(self, folding: Folding) -> None:
        folding.state.leader = ""


class Level(_Act, tag="level"):
    """The feature level from this record on."""

    IS_DECISION: ClassVar[bool] = True
    level: int
    by: str
    why: str

    def fold(self, folding: Folding) -> None:
        folding.state.level = self.level


class Snapshot(_Act, tag="snapshot"):
    """A snapshot counts from now on: its name, the sequence that it stands at, the BLAKE2b digest of its bytes."""

    name: str
    seq: int
    digest: str

    def fold(self, folding: Folding) -> None:
        state = folding.state
        state.snapshot_before, state.snapshot = state.snapshot, (self.name, self.seq, self.digest)


class Behind(_Act, tag="behind"):
    """This ledger is an older backup that nobody may lead."""

    IS_DECISION: ClassVar[bool] = True
    why: str

    def fold(self, folding: Folding) -> None:
        folding.state.behind = self.why


class Restored(_Act, tag="restored"):
    """This ledger was restored from a backup; `formerly` is the id that it had before."""

    IS_DECISION: ClassVar[bool] = True
    formerly: str

    def fold(self, folding: Folding) -> None:
        state = folding.state
        state.behind = ""
        state.former_id, state.restored_ms, state.restored_epoch = self.formerly, folding.time, folding.epoch


AnyAct = (
    Known | Join | Gone | Flag | Window | Unquarantine | Health | Well
    | Avoid | Preempt | Priority | Part | Compact | Expire
    | Hold | Unhold | Limit | Share | HalfLife | Cursor | Tombstone | Untomb
    | Epoch | Resign | Level | Snapshot | Behind | Restored
)  # fmt: skip

encode_act: Final = msgspec.msgpack.Encoder().encode
