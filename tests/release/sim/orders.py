"""What operators and callers said must hold of every placement, told record by record by the judge.

Nothing is placed on a worker that is cordoned or drained, on a device that is out of use or that a job avoids, of a job
or a tenant that is held, beyond a tenant's limit, or of a job whose cancel was answered. What is set and taken back by
the very record that places may come in either order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from moorage.scheduler.core.ledger.state import Attempt, Job, State, Worker

#: a window that begins is seen at the next look, once a second
WINDOW_LOOK_MS: Final = 1_500


class _Closed(NamedTuple):
    """Of a worker before a record: whether it takes nothing new, and which of its slots do not."""

    why: str
    mask: int


_OPEN: Final = _Closed("", 0)


class Orders:
    """`before` and `after` each record, on the judge's own state; `violated` is the judge's."""

    def __init__(self, violated: Callable[[str], None]) -> None:
        self._violated = violated
        self._cancelled: dict[tuple[str, str], int] = {}  # job -> the record with which its cancel was answered
        self._lifted = set[tuple[str, str]]()
        self._from_seq = 0  # the ledger's first record: what was answered with an older one is of another ledger
        self._closed: dict[int, _Closed] = {}
        self._held: set[int] = set()
        self._avoided: dict[int, tuple[tuple[int, int], ...]] = {}
        self._tenants: dict[str, tuple[bool, int]] = {}  # whether it is held, and its limit of GPUs

    def cancelled(self, tenant: str, job: str, ledger: int) -> None:
        """A caller was told that a job is cancelled, by that record."""
        if ledger >= self._from_seq and (tenant, job) not in self._lifted:
            self._cancelled.setdefault((tenant, job), ledger)

    def uncancelled(self, tenant: str, job: str) -> None:
        """A caller asks to lift the cancel of an unknown job: from now on it may run, or be cancelled."""
        self._lifted.add((tenant, job))
        self._cancelled.pop((tenant, job), None)

    def restored(self, taken_seq: int, from_seq: int) -> None:
        """The ledger begins anew at `from_seq` with what it was at `taken_seq`: what was said behind that is gone."""
        self._from_seq = from_seq
        self._cancelled = {unit: ledger for unit, ledger in self._cancelled.items() if ledger <= taken_seq}
        self._closed, self._held, self._avoided, self._tenants = {}, set(), {}, {}

    def before(self, state: State) -> None:
        self._closed = {worker.num: _closed(worker, state.time_ms) for worker in state.workers.values()}
        self._held = {num for num, job in state.jobs.items() if job.hold is not None}
        self._avoided = {num: job.avoid for num, job in state.jobs.items() if job.avoid and not job.over}
        self._tenants = {row.name: (row.hold is not None, row.gpus_max) for row in state.tenants.values()}

    def after(self, state: State) -> None:
        for worker in state.workers.values():
            for attempt in worker.attempts.values():
                if attempt.fence == state.seq:
                    self._check(state, worker, attempt)

    def _check(self, state: State, worker: Worker, attempt: Attempt) -> None:
        job, row = attempt.replica.job, state.tenants[attempt.replica.job.tenant]
        closed, now = self._closed.get(worker.num, _OPEN), _closed(worker, state.time_ms)
        held, limit = self._tenants.get(job.tenant, (False, 0))
        if closed.why and now.why:
            self._wrong(job, attempt, f"on {worker.id}, which is {now.why}")
        if attempt.mask & closed.mask & now.mask:
            self._wrong(job, attempt, f"on devices {attempt.mask & now.mask:b} of {worker.id} that are out of use")
        if (held and row.hold is not None) or (job.num in self._held and job.hold is not None):
            self._wrong(job, attempt, "while it is held")
        if limit and row.gpus_max and attempt.mask and row.gpus > max(limit, row.gpus_max):
            self._wrong(job, attempt, f"beyond its tenant's limit of {row.gpus_max} GPUs: they are {row.gpus}")
        for num, mask in self._avoided.get(job.num, ()):
            if num == worker.num and (mask & attempt.mask or not attempt.mask) and (num, mask) in job.avoid:
                self._wrong(job, attempt, f"on {worker.id}, or devices of it, that it avoids")
        if (ledger := self._cancelled.get((job.tenant, job.name))) is not None and ledger < attempt.fence:
            self._wrong(job, attempt, f"though its cancel was answered with record {ledger}")

    def _wrong(self, job: Job, attempt: Attempt, how: str) -> None:
        self._violated(f"{job.tenant}/{job.name}/{attempt.replica.index}@{attempt.fence} was placed {how}")


def _closed(worker: Worker, time_ms: int) -> _Closed:
    window = worker.window
    if worker.flag != "open":
        why = worker.flag
    else:
        why = "in its window" if window is not None and window.from_ms + WINDOW_LOOK_MS <= time_ms else ""
    return _Closed(why, worker.quarantined | worker.unwell_mask)
