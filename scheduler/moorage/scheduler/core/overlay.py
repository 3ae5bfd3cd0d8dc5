"""Rows of the state as a record that is being built will leave them.

Each has the fields of its row of the state that a record can change before it is folded, under the same names: what
asks the draft reads one like the other.
"""

from __future__ import annotations

from moorage.scheduler.core.state import Job, Member, Replica, StandingOrder, Tenant, Window, Worker


class DraftTenant:
    """A tenant with what this record accepts, leases and frees, and with what operators order in it."""

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
        self.load = 0  # what the jobs that this record accepts count towards the bound of memory


class DraftWorker:
    """A worker with what operators order and its renewal reports in this record."""

    __slots__ = ("examined", "flag", "session", "unwell_mask", "well", "window")

    def __init__(self, row: Worker) -> None:
        self.flag = row.flag
        self.session = row.session  # empty once this record ends it
        self.unwell_mask = row.unwell_mask
        self.well = row.well
        self.window: Window | None = row.window
        self.examined = False  # whether this record has taken in what it reports of its devices


class DraftJob:
    """A job with what operators order in this record, and the phase of its gang."""

    __slots__ = ("after", "count", "gang", "hold", "part", "priority")

    def __init__(self, row: Job) -> None:
        self.gang = row.gang
        self.after = row.after
        self.count = row.count
        self.hold: StandingOrder | None = row.hold
        self.priority = row.priority
        self.part = row.part


class DraftReplica:
    """A replica with the steps of this record."""

    __slots__ = ("member", "not_before", "state")

    def __init__(self, row: Replica) -> None:
        self.state = row.state
        self.member: Member | None = row.member
        self.not_before = row.not_before
