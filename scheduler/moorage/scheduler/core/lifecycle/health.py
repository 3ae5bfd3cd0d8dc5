"""Workers' reports of unhealthy devices, and what follows: the devices close, and the jobs on failed ones leave.

A worker judges its own devices and reports the unhealthy ones with every renewal. The
ledger records changes, so that a takeover knows them at once. An operator's order that a device is healthy overrides
the worker's report until the worker has received it; from then on the worker judges again.
"""

from __future__ import annotations

from collections.abc import Container
from functools import reduce
from operator import or_
from typing import Final

from moorage.scheduler.core.draft import Draft, steps_to_end
from moorage.scheduler.core.fleet.host import EXCLUSIVE, Host
from moorage.scheduler.core.ledger import acts
from moorage.scheduler.core.ledger.records import Count
from moorage.scheduler.core.ledger.state import Job, State, Worker
from moorage.scheduler.core.lifecycle.refusals import avoids_all, was_refused
from moorage.scheduler.core.lifecycle.transitions import Lifecycle
from moorage.schemas import actors
from moorage.schemas.frames import Renew, Unwell
from moorage.schemas.printable import stripped

KIND_CHARS_MAX: Final = 16
DETAIL_CHARS_MAX: Final = 120
#: the kind of a device that an operator has cordoned
CORDONED: Final = "cordoned"
#: the most jobs that one join lets try a worker again; further ones wait for the next join, or an operator
LIFTED_MAX: Final = 500


class Health:
    """Handles the device reports of renewals: one of each worker in a record, as later renewals repeat the others."""

    def __init__(self, state: State, lifecycle: Lifecycle) -> None:
        self.state = state
        self.lifecycle = lifecycle
        self._shy: set[int] | None = None

    def on_renewal(self, draft: Draft, host: Host, frame: Renew) -> None:
        """Write what changed about the worker's devices into the draft, and make the jobs on failed ones leave.

        Do nothing if the record has no room, or it has handled a report of this worker.
        """
        worker = host.worker
        if worker.num in draft.examined or not (frame.unwell or worker.unwell or worker.well):
            return
        if not draft.has_room(0, len(frame.unwell) + len(worker.unwell) + 2):
            return  # the next renewal repeats it
        draft.examined.add(worker.num)
        # reported before the worker received the order
        pending = worker.well if frame.well_n < worker.well_n else 0
        if worker.well and not pending:
            draft.add(acts.Well(worker.num, 0, ""))
        devices, before = len(host.cls.devices), worker.out
        shown = {u.slot: _bounded(u) for u in frame.unwell if 0 <= u.slot < devices and not pending >> u.slot & 1}
        failed = 0
        for slot, (kind, detail, ends) in sorted(shown.items()):
            was = worker.unwell.get(slot)
            if was is not None and was[0] == CORDONED:
                failed |= ends << slot
                continue  # it is out as long as its operator says
            if was is None or (was[0], was[1], was[3]) != (kind, detail, ends):
                draft.add(acts.Health(worker.num, slot, kind, detail, ends))
            failed |= ends << slot
        for slot in worker.unwell:
            if slot not in shown and worker.unwell[slot][0] != CORDONED:
                draft.add(acts.Health(worker.num, slot, "", "", 0))
        self.lifecycle.fleet.out_changed(worker, before)
        if failed:
            self._leave(draft, worker, failed, shown)

    def _leave(self, draft: Draft, worker: Worker, failed: int, shown: dict[int, tuple[str, str, int]]) -> None:
        """End the attempts on failed devices with notice; their jobs are not placed on these devices again."""
        stands = [
            (attempt, mask)
            for attempt in worker.attempts.values()
            if (mask := attempt.home & failed) and self.lifecycle.is_on_worker(attempt)
        ]
        for attempt, mask in stands:
            if not draft.has_room(steps_to_end((attempt,)), 1):
                return  # the next renewal repeats it
            slot = (mask & -mask).bit_length() - 1
            job = attempt.replica.job
            if self.lifecycle.is_on_worker(attempt):  # else it leaves with its gang already
                why = f"GPU {slot} of {worker.id}: {shown[slot][1] or shown[slot][0]}"
                # a frozen attempt has nothing on the device that failed
                self.lifecycle.leave(draft, attempt, why, Count.LOSS if attempt.mask else Count.NONE)
            draft.avoid(job, worker, mask)

    def release(self, draft: Draft, worker: Worker, slots: int, by: str, why: str) -> int:
        """Carry out an operator's order that devices are healthy: all jobs may use them again. Return their mask.

        `slots` is a mask, 0 for all that are in quarantine, unhealthy, avoided by a job, or held by one that its worker
        cannot end; named slots that are none of these are left out of the result. A device that becomes healthy by
        itself stays excluded for the jobs under which it failed, until this order. Devices that a renewal of this same
        record reports as unhealthy are released too, since the operator saw the failure in a load frame.
        """
        named, before = slots or -1, worker.out
        mask = (worker.quarantined | worker.unwell_mask | self._stuck(worker)) & named
        self.lifecycle.release(draft, worker, mask)
        if mask:
            draft.add(acts.Well(worker.num, worker.well | mask, by))
        lifted = 0
        for num, kept in self._avoiding(draft, worker).items():
            if kept & named:
                lifted |= kept & named
                draft.avoid(self.state.jobs[num], worker, 0)
                if kept & ~named:
                    draft.avoid(self.state.jobs[num], worker, kept & ~named)
        if released := mask | lifted:
            draft.add(acts.Unquarantine(worker.num, released, by, why))
        self.lifecycle.fleet.out_changed(worker, before)
        return released

    def cordon(self, draft: Draft, worker: Worker, slots: int, by: str, why: str, *, opens: bool) -> int:
        """Carry out an operator's order that devices are given to no job, or are again; return which changed."""
        before, changed = worker.out, 0
        for slot in range(slots.bit_length()):
            was = worker.unwell.get(slot)
            is_cordoned = was is not None and was[0] == CORDONED
            if slots >> slot & 1 and is_cordoned == opens:
                said = actors.split(by)[1] or actors.split(by)[0]
                detail = f"by {said}: {why}" if why else f"by {said}"
                draft.add(acts.Health(worker.num, slot, "" if opens else CORDONED, detail, 0))
                changed |= 1 << slot
        self.lifecycle.fleet.out_changed(worker, before)
        return changed

    def _stuck(self, worker: Worker) -> int:
        """Return the devices of attempts that their worker cannot end: it says that these are in other use."""
        host = self.lifecycle.fleet.hosts.get(worker.num)
        if host is None:
            return 0
        return host.busy & reduce(or_, (each.mask for each in worker.attempts.values() if each.mode <= EXCLUSIVE), 0)

    def _avoiding(self, draft: Draft, worker: Worker) -> dict[int, int]:
        """Return, by job number, the masks of a worker's devices that jobs avoid, as of this draft."""
        nums = sorted(self._shy_jobs() | draft.avoided.keys())
        jobs = [job for num in nums if (job := self.state.jobs.get(num)) is not None and not job.over]
        return {job.num: mask for job in jobs if (mask := dict(job.avoid).get(worker.num, 0))}

    def ask_anew(self, draft: Draft, worker: Worker) -> None:
        """Let jobs that a worker refused try it again, after it restarted or changed its description.

        These are jobs that avoid all its devices and that it has refused, `LIFTED_MAX` at most. A job that avoids
        devices because they failed under it goes on avoiding them.
        """
        lifted = 0
        for num in sorted(self._shy_jobs()):
            job = self.state.jobs.get(num)
            if job is None or job.over or not job.avoid:
                self._shy_jobs().discard(num)
            elif avoids_all(job, worker) and was_refused(job, worker):
                draft.avoid(job, worker, 0)
                lifted += 1
                if lifted >= LIFTED_MAX:
                    return

    def avoids(self, job: Job) -> None:
        """Note that a record has changed which devices a job avoids."""
        if self._shy is not None:
            self._shy.add(job.num)

    def _shy_jobs(self) -> set[int]:
        """Return the numbers of jobs that avoid devices, or did; found by one walk over all jobs in a term."""
        if self._shy is None:
            self._shy = {job.num for job in self.state.jobs.values() if job.avoid}
        return self._shy


def drivers_down(frame: Renew, offered: Container[str]) -> dict[str, tuple[str, int]]:
    """Return why the engines of drivers do not answer, cut to a bound, and for how many seconds, by driver."""
    return {
        each.driver: (stripped(each.why, DETAIL_CHARS_MAX), max(0, each.for_s))
        for each in frame.down
        if each.driver in offered
    }


def _bounded(said: Unwell) -> tuple[str, str, int]:
    """Return a worker's report of a device cut to a bound: a printable kind and detail, and 1 if its attempts leave."""
    kind = stripped(said.kind, KIND_CHARS_MAX) or "unwell"
    kind = "unwell" if kind == CORDONED else kind  # that is an operator's word
    detail = stripped(said.detail, DETAIL_CHARS_MAX)
    return kind, detail, int(said.ends)
