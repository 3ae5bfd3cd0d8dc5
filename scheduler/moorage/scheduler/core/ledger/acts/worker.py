"""Acts on workers and their devices."""

from __future__ import annotations

from typing import Any, ClassVar

from moorage.scheduler.core.ledger import holding
from moorage.scheduler.core.ledger.acts.base import Act
from moorage.scheduler.core.ledger.folding import FoldError, Folding
from moorage.scheduler.core.ledger.state import POOLS_MAX, Pool, Worker
from moorage.scheduler.core.ledger.state import Window as WorkerWindow
from moorage.schemas.reasons import STARTS_FAIL


class OfWorker(Act):
    """An act on a known worker."""

    worker: int


class Known(Act, tag="worker"):
    """A worker that the ledger did not know gets its number, or one that it knows is on another machine now."""

    worker: int
    id: str
    machine: str

    def fold(self, folding: Folding) -> None:
        state = folding.state
        worker = state.workers.get(self.id)
        if worker is not None:
            worker.machine = self.machine
        else:
            if self.worker != state.next_worker:
                raise FoldError(f"record {folding.seq}: worker number {self.worker} is not the next")
            worker = state.workers[self.id] = Worker(self.worker, self.id, self.machine)
            state.worker_by_num[worker.num] = worker
            state.next_worker += 1
        folding.touch_worker(worker)


class Join(OfWorker, tag="join"):
    """A worker's session begins. `hello` is its inventory as a map, with `lost_ms`.

    `no` is 0, as no report frame of the session is folded yet. The ailment of a device that is no longer in its slot is
    forgotten.
    """

    boot: str
    n: int
    session: str
    no: int
    hello: dict[str, Any]

    def fold(self, folding: Folding) -> None:
        worker = folding.worker(self.worker)
        had, is_known = worker.pool, bool(worker.hello)
        worker.boot, worker.n, worker.session, worker.no, worker.hello = (
            self.boot, self.n, self.session, self.no, self.hello,
        )  # fmt: skip
        worker.read_hello()
        if is_known and _shown(had) != _shown(worker.pool):
            former = (*worker.former, Pool(folding.seq, had.devices, had.simulated))
            if len(former) > POOLS_MAX:  # attempts of either of the two oldest are on devices that are forgotten
                former = (Pool(former[1].until, [], False), *former[2:])
            worker.former = former
            if not former[0].devices:
                holding.recount(folding.state, worker)
        worker.joined_ms = folding.time
        # an ailment belongs to a device: if another device is in its slot now, nothing is known of that
        before, now = had.devices, worker.pool.devices
        for slot in list(worker.unwell):
            same = slot < len(now) and slot < len(before) and now[slot].uuid == before[slot].uuid
            if not same:
                _forget_ailments(worker, 1 << slot)


def _shown(pool: Pool) -> tuple[bool, list[tuple[str, str, str, int]]]:
    """Return what answers show of the devices of an attempt: whether they are simulated, and their names and memory."""
    return pool.simulated, [(each.vendor, each.uuid, each.name, each.memory_mib) for each in pool.devices]


class Gone(OfWorker, tag="gone"):
    """A worker's session ends. `why` is "lost", `records.GOODBYE`, or that the worker has joined again."""

    IS_DECISION: ClassVar[bool] = True
    why: str

    def fold(self, folding: Folding) -> None:
        worker = folding.worker(self.worker)
        worker.session = ""
        worker.left_ms, worker.left_why = folding.time, self.why


class Forget(OfWorker, tag="forget"):
    """A worker leaves memory. It has no session, attempts, flag and window, and no job in memory names it.

    If it joins again, it is a new worker with another number.
    """

    IS_DECISION: ClassVar[bool] = True

    def fold(self, folding: Folding) -> None:
        state, worker = folding.state, folding.worker(self.worker)
        if not may_be_forgotten(worker):
            raise FoldError(f"record {folding.seq} forgets worker {worker.id}, which is in use")
        del state.workers[worker.id], state.worker_by_num[worker.num]
        del folding.rows[worker]
        state.digest = (state.digest - worker.row) & 0xFFFFFFFFFFFFFFFF
        folding.out.forgotten.append(worker)


def may_be_forgotten(worker: Worker) -> bool:
    """Return whether nothing goes on on a worker, and no order on it stands. A job in memory may name it still."""
    return not (worker.session or worker.attempts or worker.flag != "open" or worker.window is not None)


class Flag(OfWorker, tag="flag"):
    """A worker becomes open, cordoned (see `state.told_flag`) or draining; `by` says who ordered it, and `why`."""

    IS_DECISION: ClassVar[bool] = True
    flag: str
    by: str
    why: str = ""

    def fold(self, folding: Folding) -> None:
        worker = folding.worker(self.worker)
        if worker.flag != self.flag:
            worker.flag_ms = folding.time
        worker.flag, worker.by, worker.until_ms, worker.why = self.flag, self.by, 0, self.why
        if self.flag == "open" and self.by and worker.quick:
            worker.quick, worker.well_ms = (), folding.time  # an operator declares it well
        folding.state.shut.pop(worker.num, None)


class Shut(OfWorker, tag="shut"):
    """A worker gets no jobs until a ledger ms, since starts fail there; `why` is the reason of the last one."""

    IS_DECISION: ClassVar[bool] = True
    until_ms: int
    why: str

    def fold(self, folding: Folding) -> None:
        worker = folding.worker(self.worker)
        worker.flag, worker.by, worker.until_ms, worker.why = STARTS_FAIL.name, "", self.until_ms, self.why
        worker.flag_ms = folding.time
        folding.state.shut[worker.num] = worker


class Window(OfWorker, tag="window"):
    """A worker gets a maintenance window, in ledger ms (see `state.Window`), or with `leave_ms` 0 loses its window.

    One that is over, or that a later order replaces, is lost without a `by`.
    """

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
    """An operator releases devices: they are in no quarantine from now on. `Well` and `Avoid` say the rest of it."""

    IS_DECISION: ClassVar[bool] = True
    slots: int
    by: str
    why: str = ""

    def fold(self, folding: Folding) -> None:
        folding.worker(self.worker).quarantined &= ~self.slots


class Health(OfWorker, tag="health"):
    """A worker reports on a device: its ailment (empty: healthy again), and whether jobs have to leave it.

    One whose ailment is `CORDONED` an operator has cordoned; `detail` says by whom, also where one opens it again.
    """

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
    """An operator declares devices healthy; without slots, the worker has confirmed that."""

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


WorkerAct = Known | Join | Gone | Forget | Flag | Shut | Window | Unquarantine | Health | Well
