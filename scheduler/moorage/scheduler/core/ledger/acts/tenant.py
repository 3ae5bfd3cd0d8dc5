"""Acts on tenants and their queues."""

from __future__ import annotations

from typing import ClassVar

from moorage.scheduler.core.ledger import fairshare, holding, limits
from moorage.scheduler.core.ledger.acts.base import Act
from moorage.scheduler.core.ledger.folding import FoldError, Folding
from moorage.scheduler.core.ledger.limits import ByModel
from moorage.scheduler.core.ledger.state import HELD, RELEASED, StandingOrder, State, Tenant


class OfQueue(Act):
    """An act on a job, or with job 0 on a tenant's whole queue."""

    IS_DECISION: ClassVar[bool] = True
    tenant: str
    job: int
    by: str
    why: str

    def put(self, folding: Folding, word: int, order: StandingOrder | None) -> None:
        if self.job:
            job = folding.ordered(self.job, word, self.by, self.why)
            job.hold = order
            folding.state.on_hold.pop(job.num, None)
            if order is not None:
                folding.state.on_hold[job.num] = job
        else:
            folding.tenant(self.tenant).hold = order


class Hold(OfQueue, tag="hold"):
    """An operator holds a job or a queue: nothing of it is placed."""

    def fold(self, folding: Folding) -> None:
        self.put(folding, HELD, StandingOrder(self.by, self.why, folding.time))


class Unhold(OfQueue, tag="unhold"):
    """An operator releases a held job or queue."""

    def fold(self, folding: Folding) -> None:
        self.put(folding, RELEASED, None)


class Limit(Act, tag="limit"):
    """An operator sets a tenant's limits; 0 for no limit."""

    IS_DECISION: ClassVar[bool] = True
    tenant: str
    gpus: int
    jobs: int
    by: str
    why: str

    def fold(self, folding: Folding) -> None:
        tenant = folding.tenant(self.tenant)
        tenant.gpus_max, tenant.jobs_max = self.gpus, self.jobs
        stands = self.gpus or self.jobs or tenant.limits is not None
        tenant.limit = StandingOrder(self.by, self.why, folding.time) if stands else None


class Limits(Act, tag="limits"):
    """An operator sets a tenant's limits beside those of GPUs and jobs, see `limits.Limits`; 0 for none."""

    LEVEL: ClassVar[int] = 2
    IS_DECISION: ClassVar[bool] = True
    tenant: str
    limits: list[int]
    by: str
    why: str
    gpus_of: ByModel = ()
    weights: ByModel = ()

    def fold(self, folding: Folding) -> None:
        tenant, before = folding.tenant(self.tenant), None
        if len(self.limits) < limits.NUMBERS or min(self.limits) < 0:
            raise FoldError(f"act {self.tag} of tenant {self.tenant} says {self.limits}")
        found = limits.Limits.of(self.limits, self.gpus_of, self.weights)
        if holding.spend(folding.state, tenant):
            before = tenant.spent
        tenant.limits = found if any(found) else None
        attempts = [attempt for job in tenant.jobs.values() for attempt in job.attempts]
        tenant.held = holding.held_by(attempts) if tenant.limits is not None else limits.NOTHING_HELD
        tenant.devices = holding.devices_of(attempts) if tenant.limits is not None else {}
        tenant.spent = before if found.budget_ms else None
        holding.spend(folding.state, tenant)
        others = folding.state.budgeted - {self.tenant}
        folding.state.budgeted = others | {self.tenant} if found.budget_ms else others
        others = folding.state.by_model - {self.tenant}
        folding.state.by_model = others | {self.tenant} if found.gpus_of else others
        order = StandingOrder(self.by, self.why, folding.time)
        tenant.limit = order if tenant.limits is not None or tenant.gpus_max or tenant.jobs_max else None


class Counter(Act, tag="counter"):
    """An operator sets how many there are of a counter, for the fleet or for each tenant; with 0 it is no more."""

    LEVEL: ClassVar[int] = 2
    IS_DECISION: ClassVar[bool] = True
    name: str
    most: int
    of_tenant: int
    by: str
    why: str

    def fold(self, folding: Folding) -> None:
        state = folding.state
        if self.most < 0 or self.of_tenant not in (0, 1):
            raise FoldError(f"act {self.tag} of {self.name} says {self.most}")
        counters = state.counters.copy()  # the table itself stays, as a record may be taken back
        gone = limits.counter_row(self.name, counters.pop(self.name, None))
        if self.most:
            counters[self.name] = limits.Counter(self.most, self.of_tenant, self.by, self.why, folding.time)
        state.counters = counters
        new = limits.counter_row(self.name, counters.get(self.name))
        state.digest = (state.digest + new - gone) & 0xFFFFFFFFFFFFFFFF


class Share(Act, tag="share"):
    """An operator sets a tenant's weight and guaranteed GPUs; 0 unsets either."""

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


class HalfLife(Act, tag="half-life"):
    """Usage is counted from now on, and decays with this half-life."""

    ms: int

    def fold(self, folding: Folding) -> None:
        fairshare.begin(folding.state, self.ms)
        folding.rows.update(dict.fromkeys(folding.state.tenants.values()))


class Cursor(Act, tag="cursor"):
    """A tenant's durable queue was read up to a sequence; `which` is submit or cancel.

    With submit, the cancels of unknown jobs that were queued up to there are forgotten. A lower sequence than before is
    that of another stream; what is remembered of the former one is then dropped by age.
    """

    tenant: str
    which: str
    through: int

    def fold(self, folding: Folding) -> None:
        tenant = folding.tenant(self.tenant)
        if self.which != "submit":
            tenant.cancel_cursor = self.through
            return
        if self.through < tenant.submit_cursor:  # another stream: the sequences in tombstones say nothing about it
            tenant.tombstones = {name: min(at, 0) or -folding.time for name, at in tenant.tombstones.items()}
        tenant.submit_cursor = self.through
        # all submits queued before such a cancel were read by now: its tombstone is no longer needed
        for name in [name for name, at in tenant.tombstones.items() if 0 < at <= self.through]:
            del tenant.tombstones[name]


class Tombstone(Act, tag="tombstone"):
    """The cancel of an unknown job is remembered; `sequence` is its place in the durable queue, 0 for none."""

    tenant: str
    name: str
    sequence: int

    def fold(self, folding: Folding) -> None:
        tombstones = folding.tenant(self.tenant).tombstones
        tombstones.pop(self.name, None)  # the dict stays in order of the last cancel
        tombstones[self.name] = self.sequence or -folding.time


class Untomb(Act, tag="untomb"):
    """The cancel of an unknown job is forgotten."""

    tenant: str
    name: str

    def fold(self, folding: Folding) -> None:
        folding.tenant(self.tenant).tombstones.pop(self.name, None)


class ForgetTenants(Act, tag="forget-tenants"):
    """Tenants leave memory whose rows hold nothing. If such a tenant submits again, it has a row again."""

    names: list[str]

    def fold(self, folding: Folding) -> None:
        state = folding.state
        for name in self.names:
            tenant = state.tenants[name]
            if not is_blank(state, tenant):
                raise FoldError(f"act {self.tag} of tenant {name}, of which something is known")
            del state.tenants[name]
            folding.rows.pop(tenant, None)
            state.digest = (state.digest - tenant.row) & 0xFFFFFFFFFFFFFFFF


def is_blank(state: State, tenant: Tenant) -> bool:
    """Return whether a tenant's row holds nothing.

    A cursor of the durable queue is kept for good, so that no queued request is read twice.
    """
    holds = tenant.jobs or tenant.tombstones or tenant.ordered or tenant.submit_cursor or tenant.cancel_cursor
    return not holds and fairshare.usage_milli(state, tenant) == 0


TenantAct = ForgetTenants | Hold | Unhold | Limit | Limits | Counter | Share | HalfLife | Cursor | Tombstone | Untomb
