"""An operator's order to start what waits of a job on one worker now, also on a cordoned one.

Such placements are those of a pass but for three things: the worker is named, its cordon does not count, and neither
do jobs that come before this one, nor reservations. Limits of the tenant, what the job asks for, and planned drains do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.host import Host
from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.ledger.records import BORROWED, GUARANTEED, RIGHT_LEVEL
from moorage.scheduler.core.ledger.state import Job
from moorage.scheduler.core.queue.order import QueueOrder
from moorage.scheduler.core.queue.queue import Group
from moorage.scheduler.core.rank.ranker import Pack
from moorage.scheduler.core.request_reader import RequestReader
from moorage.scheduler.core.schedule.indexing import Indexing
from moorage.scheduler.core.schedule.placing import Placing
from moorage.schemas.errors import Problem, problem
from moorage.schemas.names import word_of
from moorage.schemas.operate import Done, PlaceAct

#: the flags of workers that take what an operator names
_OPEN_BY_NAME: Final = ("open", "cordoned")


class PlacingByName:
    """Places jobs on a worker that an order names. `may_place` says whether the ledger may place anything now."""

    def __init__(
        self,
        fleet: Fleet,
        order: QueueOrder,
        reader: RequestReader,
        indexing: Indexing,
        may_place: Callable[[Draft], bool],
    ) -> None:
        self._fleet = fleet
        self._order = order
        self._reader = reader
        self._indexing = indexing
        self._may_place = may_place
        self._placing = Placing(fleet, order, Pack())  # one host needs no ranker, which may not be ready

    def place(self, draft: Draft, job: Job, asked: PlaceAct, by: str) -> Done | Problem:
        """Place as many replicas of a job as wait and have room on the worker, or its whole gang. Refused for none."""
        worker, state = draft.state.workers.get(asked.on), job.state
        if worker is None or worker.is_unlisted:
            return problem("not-found", f"no worker {asked.on} has joined", found=asked.on, next="moorage fleet")
        host, shape = self._fleet.hosts.get(worker.num), self._reader.shape_of(job)
        self._fleet.distinguish(shape)
        group = self._group_of(job)
        if why := self._why_not(draft, job, shape, group, host):
            return _refused(job, asked.on, *why)
        assert host is not None
        assert group is not None
        placed = 0
        with draft.by(by), self._fleet.uncordoned(host):
            placed = self._place_all(draft, job, group, host)
        if not placed:
            return _refused(job, asked.on, *self._why_none(draft, job, shape, host))
        return Done("place", True, worker=asked.on, tenant=job.tenant, job=job.name, state=state, members=placed)

    def _group_of(self, job: Job) -> Group | None:
        group = self._order.queue.group_of(*self._reader.kind_of(job))
        return group if group is not None and job.num in group.jobs else None

    def _why_not(
        self, draft: Draft, job: Job, shape: Shape, group: Group | None, host: Host | None
    ) -> tuple[str, str] | None:
        """Return why nothing of a job may be placed on a host now, and what to do; None if something may."""
        if host is None or not (host.heard and host.stays and host.worker.session) or host.stale:
            return "the worker is not connected, or was not heard from lately", "moorage fleet"
        flag = host.worker.flag
        if flag not in _OPEN_BY_NAME:
            return f"the worker is {flag}: jobs are to leave it", f"moorage uncordon {host.worker.id}"
        if (reason := self._indexing.why_unqueued(job)) is not None:
            return f"{reason.name}: {reason.means}", reason.fix.format(job=word_of(job.name), asks="the request")
        if group is None or not self._order.waits(job.num):
            return "nothing of it waits for a worker now", f"moorage show {word_of(job.name)}"
        if not host.replicas_of(shape, "ever"):
            return "the worker could never run it: it lacks what the job asks for", f"moorage fleet {host.worker.id}"
        if not self._may_place(draft):
            return "nothing is placed until the workers have reported to this leader", "try again in a minute"
        if (room := self._order.room_of(job.tenant, shape, job.fair)) < 1:
            what = "is on hold" if room < 0 else "has reached a limit"
            return f"tenant {job.tenant} {what}", "moorage admin tenants"
        return None

    def _place_all(self, draft: Draft, job: Job, group: Group, host: Host) -> int:
        order, shape, num = self._order, group.shape, job.num
        if shape.data:
            order.data.begin(draft.time_ms)
        order.begin()
        self._placing.begin()
        others = frozenset(self._fleet.hosts) - {host.worker.num}
        right = 0
        if draft.state.level >= RIGHT_LEVEL:
            right = BORROWED if order.turns.borrows(job.tenant, shape) else GUARANTEED
        placed, left = 0, 0
        while order.waits(num) and not draft.full and order.room_of(job.tenant, shape, job.fair) >= 1:
            closed = others | order.closed_by_limits(job.tenant, shape)
            choice = self._placing.place(draft, shape, num, closed)
            if choice is None:
                break
            placed, left = placed + shape.together, choice.left
            if not order.queue.placed(group, num, draft.time_ms):
                break
        if placed:
            draft.evidence += (num, placed | right, len(self._fleet.hosts), left)
        return placed

    def _why_none(self, draft: Draft, job: Job, shape: Shape, host: Host) -> tuple[str, str]:
        worker = host.worker
        if worker.num in self._order.barred_from(draft, job.num, shape):
            return "it is kept from the worker: by a planned drain, as it failed there, or by its data", (
                f"moorage explain {word_of(job.name)}"
            )
        whole = " for all its ranks" if shape.is_gang else ""
        return f"the worker has no room for it now{whole}", f"moorage fleet {worker.id}"


def _refused(job: Job, worker: str, why: str, fix: str) -> Problem:
    return problem(
        "failed-precondition",
        f"job {job.name} cannot start on {worker}: {why}",
        field="$.on",
        found=worker,
        job=job.name,
        next=fix,
    )
