"""Rows of the state as they will be after the record that is being built.

Each has some of the fields of its state row, under the same names, so that code can read either one. It may have fields
of its own as well, such as `DraftTenant.load`.
"""

from __future__ import annotations

from moorage.scheduler.core.ledger.state import (
    Awaits,
    Bounds,
    Job,
    Member,
    Replica,
    StandingOrder,
    Tenant,
    Window,
    Worker,
)
from moorage.schemas.ranges import Ranges


class DraftTenant:
    """A tenant after the accepts, placements, frees and operators' orders of this record.

    The GPUs that it places are counted only for a tenant with queue groups of its own (`Group.tenant`).
    """

    __slots__ = (
        "gpus",
        "gpus_max",
        "guaranteed",
        "hold",
        "jobs_max",
        "limit",
        "live",
        "load",
        "rate_milli",
        "share",
        "weight",
    )

    def __init__(self, row: Tenant) -> None:
        self.gpus = row.gpus
        self.gpus_max = row.gpus_max
        self.guaranteed = row.guaranteed
        self.hold: StandingOrder | None = row.hold
        self.jobs_max = row.jobs_max
        self.limit: StandingOrder | None = row.limit
        self.live = row.live
        self.rate_milli = row.rate_milli
        self.share: StandingOrder | None = row.share
        self.weight = row.weight
        self.load = 0  # what the jobs accepted in this record count towards the memory bound


class DraftWorker:
    """A worker after the orders, the reports and the end of its session in this record."""

    __slots__ = ("examined", "flag", "session", "unwell_mask", "well", "why", "window")

    def __init__(self, row: Worker) -> None:
        self.flag = row.flag
        self.why = row.why  # the reason of its flag
        self.session = row.session  # empty if this record ends it
        self.unwell_mask = row.unwell_mask
        self.well = row.well
        self.window: Window | None = row.window
        self.examined = False  # whether its device report was already handled in this record


class DraftJob:
    """A job after the operators' orders in this record, with the phase of its gang.

    `fresh` is without the replicas that end in this record unplaced; those that it places are still in it.
    """

    __slots__ = ("after", "awaits", "bounds", "ceiling", "count", "fresh", "gang", "hold", "part", "priority")

    def __init__(self, row: Job) -> None:
        self.gang = row.gang
        self.after = row.after
        self.count = row.count
        self.awaits: Awaits = row.awaits
        self.fresh: Ranges = row.fresh
        self.hold: StandingOrder | None = row.hold
        self.priority = row.priority
        self.ceiling = row.ceiling
        self.bounds: tuple[Bounds, ...] = row.bounds
        self.part = row.part


class DraftReplica:
    """A replica after the steps of this record."""

    __slots__ = ("member", "not_before", "state")

    def __init__(self, row: Replica) -> None:
        self.state = row.state
        self.member: Member | None = row.member
        self.not_before = row.not_before
