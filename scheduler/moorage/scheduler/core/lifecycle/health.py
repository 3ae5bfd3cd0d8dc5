"""What workers say of their devices' health, and what follows: closed, left by what runs there, and kept from it.

A worker judges its own devices (`moorage.worker.device_health`) and says with every renewal which are unwell; the
ledger holds what differs from the time before, so that a takeover knows it at once. An operator's word that a device is
well stands above the worker's until the worker has taken it; from then on the worker judges anew.
"""

from __future__ import annotations

from typing import Final

from moorage.scheduler.core.draft import STEP_BYTES, Draft
from moorage.scheduler.core.host import Host
from moorage.scheduler.core.ledger import acts
from moorage.scheduler.core.lifecycle.transitions import Lifecycle
from moorage.scheduler.core.records import RECORD_BYTES_MAX, Count
from moorage.scheduler.core.state import WHY, Job, State, Worker, every_slot
from moorage.schemas.frames import ABOUT_THE_JOB, Renew, Unwell

KIND_CHARS_MAX: Final = 16
DETAIL_CHARS_MAX: Final = 120
#: the most that an act of this module fills of a record, for what is asked before it is written
ACT_BYTES: Final = 200
#: jobs that one join has asked for again: what more there are wait for the next one, or an operator's word
LIFTED_MAX: Final = 500


class Health:
    """Takes in what renewals say of devices. Of one worker once a record: it is said again."""

    def __init__(self, state: State, lifecycle: Lifecycle) -> None:
        self.state = state
        self.lifecycle = lifecycle
        self._shy: set[int] | None = None

    def heard(self, draft: Draft, host: Host, frame: Renew) -> None:
        """Write what is new of the worker's devices into the draft, and have what runs on failed ones leave."""
        worker = host.worker
        if not (frame.unwell or worker.unwell or worker.well):
            return
        if not draft.level_allows(acts.Health.LEVEL):
            return  # its load frames say that they are sick, as ever
        if draft.bytes + self._bytes(worker, frame) > RECORD_BYTES_MAX // 2 and not draft.empty:
            return  # it is said again with the next renewal
        row = draft.change_worker(worker)
        if row.examined:
            return
        row.examined = True
        if row.well != worker.well:
            pending = row.well  # said before it can have taken what an operator says in this record
        else:
            pending = worker.well if frame.well_n < worker.well_n else 0  # said before it took the operator's word
            if worker.well and not pending:
                draft.add(acts.Well(worker.num, 0, ""))
                row.well = 0
        devices = len(host.cls.devices)
        shown = {u.slot: _bounded(u) for u in frame.unwell if 0 <= u.slot < devices and not pending >> u.slot & 1}
        failed = 0
        for slot, (kind, detail, ends) in sorted(shown.items()):
            was = worker.unwell.get(slot)
            if was is None or (was[0], was[1], was[3]) != (kind, detail, ends):
                draft.add(acts.Health(worker.num, slot, kind, detail, ends))
            failed |= ends << slot
        for slot in worker.unwell:
            if slot not in shown:
                draft.add(acts.Health(worker.num, slot, "", "", 0))
        row.unwell_mask = sum(1 << slot for slot in shown)
        if failed:
            self._leave(draft, worker, failed, shown)

    def _leave(self, draft: Draft, worker: Worker, failed: int, shown: dict[int, tuple[str, str, int]]) -> None:
        """What runs on failed devices gets its notice, then ends; its job is not placed on them again."""
        stands = [
            (member, mask)
            for member in worker.members.values()
            if (mask := member.mask & failed) and self.lifecycle.is_on_worker(draft, member)
        ]
        for member, mask in stands:
            slot = (mask & -mask).bit_length() - 1
            job = member.replica.job
            if self.lifecycle.is_on_worker(draft, member):  # else it leaves with its gang already
                self.lifecycle.leave(
                    draft, member, f"GPU {slot} of {worker.id}: {shown[slot][1] or shown[slot][0]}", Count.LOSS
                )
            draft.avoid(job, worker, mask)

    def release(self, draft: Draft, worker: Worker, slots: int, by: str) -> int:
        """An operator's word that devices are well: they are open again, also to jobs that they failed under.

        `slots` is a mask, 0 for all that are in quarantine, unwell, or avoided by a job: a device that is well again by
        itself stays closed to the job that it failed under until this is said. What a renewal said in this same record
        counts: its load frame has shown it to the operator already. Returns the mask of those that were.
        """
        named = slots or -1
        row = draft.change_worker(worker)
        mask = (worker.quarantined | row.unwell_mask) & named
        self.lifecycle.release(draft, worker, mask)
        draft.add(acts.Unquarantine(worker.num, worker.quarantined & mask, by))
        if mask and draft.level_allows(acts.Well.LEVEL):
            row.well |= mask
            draft.add(acts.Well(worker.num, row.well, by))
            row.unwell_mask &= ~mask
        lifted = 0
        for num, kept in self._avoiding(draft, worker).items():
            if kept & named:
                lifted |= kept & named
                draft.avoid(self.state.jobs[num], worker, 0)
                if kept & ~named:
                    draft.avoid(self.state.jobs[num], worker, kept & ~named)
        return mask | lifted

    def _avoiding(self, draft: Draft, worker: Worker) -> dict[int, int]:
        """The jobs that may not have devices of a worker, by number, as masks, once this record is folded as it is."""
        avoiding = {
            job.num: mask
            for job in self.state.jobs.values()
            if job.avoid and not job.over and (mask := dict(job.avoid).get(worker.num, 0))
        }
        for act in draft.acts if draft.avoided else ():
            if isinstance(act, acts.Avoid) and act.worker == worker.num:
                avoiding[act.job] = avoiding.get(act.job, 0) | act.slots if act.slots else 0
        return avoiding

    def ask_anew(self, draft: Draft, worker: Worker) -> None:
        """A worker that was started anew, or says other things of itself, may run what it refused before.

        Only what it refused for what it runs: a device that failed under a job stays closed to that job.
        """
        if not draft.level_allows(acts.Avoid.LEVEL):
            return
        every, lifted = every_slot(worker), 0
        for num in sorted(self._shy_jobs()):
            job = self.state.jobs.get(num)
            if job is None or job.over or not job.avoid:
                self._shy_jobs().discard(num)
            elif dict(job.avoid).get(worker.num) == every and any(
                row[WHY].startswith(ABOUT_THE_JOB) for row in job.story
            ):
                draft.avoid(job, worker, 0)
                lifted += 1
                if lifted >= LIFTED_MAX:
                    return

    def avoids(self, job: Job) -> None:
        """A record has just said that a job avoids devices, or that it does no longer."""
        if self._shy is not None:
            self._shy.add(job.num)

    def _shy_jobs(self) -> set[int]:
        """The numbers of jobs that avoid devices, and of some that did: found by one walk over all jobs in a reign."""
        if self._shy is None:
            self._shy = {job.num for job in self.state.jobs.values() if job.avoid}
        return self._shy

    @staticmethod
    def _bytes(worker: Worker, frame: Renew) -> int:
        return ACT_BYTES * (len(frame.unwell) + len(worker.unwell) + 2) + len(worker.members) * (
            ACT_BYTES + 3 * STEP_BYTES
        )


def _bounded(said: Unwell) -> tuple[str, str, int]:
    """A worker's words go into the ledger and to people: short, printable, and never without a kind."""
    kind = "".join(char for char in said.kind if char.isprintable())[:KIND_CHARS_MAX] or "unwell"
    detail = "".join(char for char in said.detail if char.isprintable())[:DETAIL_CHARS_MAX]
    return kind, detail, int(said.ends)
