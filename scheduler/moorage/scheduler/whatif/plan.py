"""The verb `plan`: what would happen to a request, or to the queue, with the present fleet or with edits of it.

The production core decides in a copy of the leader (see `child`): it builds the same record that a submit would cause.
A tenant sees where its own jobs would go, and how many jobs of other tenants are affected, but not whose they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final

import msgspec
from msgspec.structs import replace

from moorage.scheduler.answers.waiting import explain_job
from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.events import Cancel, FromWorker, Order
from moorage.scheduler.core.fleet.slots import slots_of
from moorage.scheduler.core.ledger.records import MODE_NAMES
from moorage.scheduler.core.ledger.state import Attempt, Job
from moorage.scheduler.core.outputs.outputs import Outputs, enforced_on, gpu_names
from moorage.scheduler.whatif.child import ask, ask_all
from moorage.scheduler.whatif.fixes import fixes
from moorage.scheduler.whatif.forecast import Start, later_of, start_of
from moorage.scheduler.whatif.foreseen import FIXES_S
from moorage.scheduler.whatif.future import Future, last_of, waits, why_unknown
from moorage.scheduler.whatif.looks import LOOKS, Outcome, band
from moorage.scheduler.whatif.play import Held
from moorage.schemas.errors import Problem, Refused, refuse
from moorage.schemas.frames import Accepted, Device, Hello, Join
from moorage.schemas.gpu import SHARERS_MAX
from moorage.schemas.job import Request
from moorage.schemas.operate import DrainAct, act_of
from moorage.schemas.plan import Plan, PlannedJobs, PlannedPlace
from moorage.schemas.reasons import REASONS

#: the most workers that one plan may drain, and hosts that it may add
DRAINED_MAX: Final = 256
ADDED_MAX: Final = 1_024
#: the most tenants whose quota or share one plan may change
TENANTS_MAX: Final = 256
#: the most own jobs that a plan names
NAMED_MAX: Final = 20
#: of the first look, and of all others together; a client waits for 10 s
LIMIT_S: Final = 4.0
#: the answer where the first look takes longer
TOO_LATE: Final = b"too late"
_REPLY: Final = "plan"
#: the warning of a request that is a job already
DUPLICATE: Final = "duplicate"


class AddedHost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hypothetical hosts, `count` equal ones; `devices` as in a worker's hello."""

    count: int = 1
    devices: list[Device] = []
    cpu_milli: int = 0
    memory_mib: int = 0
    labels: dict[str, str] = {}


class SharedOut(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an operator's `share` would set for a tenant; omitted fields stay as they are."""

    weight: int | msgspec.UnsetType = msgspec.UNSET
    gpus: int | msgspec.UnsetType = msgspec.UNSET


class PlanAsk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to plan: a request, edits of the fleet and of tenants' limits, or both.

    `quota` has GPU limits by tenant; a plain number is the asking tenant's. `share` has weights and guaranteed GPUs.
    `cancel` is a job of the asking tenant that is cancelled first, as for a request that replaces it.
    """

    request: Request | None = None
    drain: list[str] = []
    add: list[AddedHost] = []
    quota: int | dict[str, int] | None = None
    share: dict[str, SharedOut] = {}
    cancel: str = ""

    def __post_init__(self) -> None:
        if len(self.drain) > DRAINED_MAX:
            raise ValueError(f"drain must name at most {DRAINED_MAX} workers, found {len(self.drain)}")
        least, hosts = min([host.count for host in self.add], default=1), sum(host.count for host in self.add)
        if least < 1:
            raise ValueError(f"add must have hosts with a count of at least 1, found {least}")
        if hosts > ADDED_MAX:
            raise ValueError(f"add must have at most {ADDED_MAX} hosts, found {hosts}")
        if len(self.share) + (len(self.quota) if isinstance(self.quota, dict) else 0) > TENANTS_MAX:
            raise ValueError(f"quota and share must name at most {TENANTS_MAX} tenants together")
        try:
            self.orders("default")
        except Refused as refused:
            raise ValueError(f"quota or share: {refused.problem.message}") from None
        if self.request is None and not self.edits:
            raise ValueError("plan needs a request, or an edit: drain, add, quota or share")

    @property
    def edits(self) -> bool:
        return bool(self.drain or self.add or self.quota not in (None, {}) or self.share)

    def orders(self, tenant: str) -> list[Order]:
        """Return the operator's acts for the edits of tenants; `tenant` is the asking one. Raises Refused."""
        quota = {tenant: self.quota} if isinstance(self.quota, int) else self.quota or {}
        return orders_of(quota, {name: msgspec.to_builtins(row) for name, row in self.share.items()}, "plan")


def orders_of(quota: Mapping[str, int], share: Mapping[str, Mapping[str, int]], by: str) -> list[Order]:
    """Return an operator's `limit` and `share` for each of these tenants. Raises Refused for invalid values."""
    asked = [("limit", {"tenant": name, "gpus": gpus}) for name, gpus in sorted(quota.items())]
    asked += [("share", {"tenant": name, **row}) for name, row in sorted(share.items())]
    return [Order(verb, act_of(verb, {**arguments, "by": by}), "", True) for verb, arguments in asked]


_encode: Final = msgspec.msgpack.Encoder().encode
decode_planned: Final = msgspec.msgpack.Decoder(Plan).decode


def check_known(engine: Engine, asked: PlanAsk) -> None:
    """Raise Refused if a worker to drain is unknown."""
    for worker in asked.drain:
        if worker not in engine.state.workers:
            raise refuse(
                "not-found", f"no worker {worker} has joined", field="$.drain", found=worker, next="moorage fleet"
            )


def plan(engine: Engine, time_ms: int, tenant: str, asked: PlanAsk) -> bytes:
    """Return an encoded `Plan`: of one look, or of `LOOKS` looks if it has times in the future. For a child.

    Looks that take too long are left out; without the first it is `TOO_LATE`.
    """

    def look(number: int) -> bytes:
        return _encode(_Plan(engine, time_ms, tenant, asked, number).planned())

    answer = ask(lambda: look(0), LIMIT_S)
    if answer is None:
        return TOO_LATE
    planned = decode_planned(answer)
    if planned.starts not in ("later", "unknown") and not planned.empty:
        return answer
    more = ask_all([partial(look, number) for number in range(1, LOOKS)], LIMIT_S)
    looks = [planned, *(decode_planned(answer) for answer in more if answer is not None)]
    return _encode(_together(looks, later_of(engine)))


def _together(looks: list[Plan], later: float) -> Plan:
    """Return the first look's plan, with the band of all looks in place of its own times."""
    planned = looks[0]
    if planned.starts in ("later", "unknown"):
        found = [
            Outcome(look.in_ms.p50_ms, (look.on, at), look.in_ms.p10_ms is None)
            for at, look in enumerate(looks)
            if look.in_ms
        ]
        start = band(found)
        if start is None:
            planned.starts, planned.in_ms, planned.on = "unknown", None, ""
            if planned.waiting is not None:
                whys = [look.waiting.starts_unknown for look in looks if look.waiting and look.waiting.starts_unknown]
                why = whys[0] if whys else why_unknown(0, 0, cut=True)
                planned.waiting = replace(planned.waiting, starts_unknown=why)
        else:
            median = looks[start.detail[1]]
            planned.starts, planned.on, planned.preempts = "later", median.on, median.preempts
            runs = median.in_ms.runs if median.in_ms is not None else 0
            planned.in_ms = start_of(start, "", runs, later).as_answer()
    for worker in planned.empty or ():
        ends = [Outcome(ms) for look in looks if (ms := (look.empty or {}).get(worker)) is not None]
        end = band(ends)
        assert planned.empty is not None
        planned.empty[worker] = None if end is None else end.p50_ms
    return planned


class _Plan(Future):
    """One look: apply the edits, then submit the request, then let time pass."""

    def __init__(self, engine: Engine, time_ms: int, tenant: str, asked: PlanAsk, look: int) -> None:
        self._answer: bytes | None = None
        self._job: Job | None = None  # the planned job, once accepted
        self._preempts: PlannedJobs | None = None
        super().__init__(engine, time_ms, look)
        self._tenant = tenant
        self._asked = asked

    def on_outputs(self, out: Outputs) -> None:
        super().on_outputs(out)
        job = self._job
        if job is not None and self._preempts is None and job.preempts is not None:
            ended = [self.engine.state.jobs[num] for num in job.preempts[1] if num in self.engine.state.jobs]
            self._preempts = _concerned(ended, self._tenant)
        self._answer = next((payload for reply, payload in out.answers if reply == _REPLY), self._answer)

    def planned(self) -> Plan:
        planned = Plan("none", self.engine.state.seq)
        if self._asked.edits:
            self._edit(planned)
        if self._asked.request is not None:
            self._submit(planned, self._asked.request)
        elif self._asked.drain:
            self._empty(planned)
        return planned

    def _edit(self, planned: Plan) -> None:
        engine, asked = self.engine, self._asked
        waiting = {job.num for job in engine.state.jobs.values() if waits(job)}
        for worker in asked.drain:
            engine.offer(Order("drain", DrainAct(worker=worker, by="plan"), "", True))
        for number, host in enumerate(one for group in asked.add for one in [group] * group.count):
            name = f"plan-{number}"
            pool = [msgspec.structs.replace(one, uuid=f"{name}-{at}") for at, one in enumerate(host.devices)]
            hello = Hello(
                name,
                "plan",
                drivers=sorted({driver for cls in engine.fleet.classes.values() for driver in cls.drivers}),
                modes=["exclusive", "mps", "time-slice"],
                sharers_max=dict(SHARERS_MAX),
                labels=host.labels,
                cpu_milli=host.cpu_milli,
                memory_mib=host.memory_mib,
                gpu_pool=pool,
                simulated=True,
            )
            engine.offer(FromWorker(name, Join("plan", "plan", 1, hello), "", False, f"{number + 1:032x}"))
        for order in asked.orders(self._tenant):
            engine.offer(order)
        self.record()
        self.record()  # places jobs on the new hosts that joined with the record before
        started = [engine.state.jobs[num] for num in sorted(waiting) if not waits(engine.state.jobs[num])]
        planned.starting = _concerned(started, self._tenant)

    def _submit(self, planned: Plan, request: Request) -> None:
        engine, tenant = self.engine, self._tenant
        if self._asked.cancel:
            engine.offer(Cancel(tenant, self._asked.cancel, "plan"))
            self.record()
        name = self.submit(tenant, "plan", request, _REPLY, job=request.job)
        while self._answer is None:  # also while a job that ended long ago leaves its id
            self.record()
        answer: Accepted | Problem = msgspec.msgpack.decode(self._answer, type=Accepted | Problem)
        if isinstance(answer, Problem):
            planned.starts, planned.problem = "refused", answer
            return
        planned.warnings = answer.warnings
        if answer.duplicate:
            planned.warnings = [f"{DUPLICATE}: a job with this id and content exists already, {answer.state}"]
            return
        job = self._job = engine.state.job(tenant, name)
        assert job is not None
        if job.over:  # a cancel of its id came before it
            planned.starts = "never"
            return
        if engine.planner.preempting.allowed() and not any(replica.attempt for replica in job.rows.values()):
            # else victims are searched once a second only, and not for a new job
            engine.seek_at_once()
            self.record()
        planned.preempts = self._preempts
        planned.places = _places(job, request)
        waiting = engine.queue.waiting.get(job.num)
        planned.replicas_now, planned.replicas = len(planned.places), job.size
        if job.stands:
            planned.replicas = len(planned.places) + (0 if waiting is None else waiting.count)
        if not planned.places:
            self._later(planned, job)
            return
        planned.starts = "now"
        if planned.replicas_now < planned.replicas:
            self._explain(planned, job)  # without fixes: letting the rest start would need another request

    def _explain(self, planned: Plan, job: Job) -> None:
        waiting = explain_job(self.engine, job.tenant, job.name)
        assert not isinstance(waiting, Problem)
        planned.waiting = replace(waiting, job="", tenant="", state="")

    def _later(self, planned: Plan, job: Job) -> None:
        key = (job.tenant, job.name)
        self._explain(planned, job)
        assert planned.waiting is not None
        reason = REASONS.get(planned.waiting.reason)
        if self.look == 0:
            why, found_fixes = fixes(self.engine, self.time_ms, *key, within_s=FIXES_S)
            if why:
                planned.waiting = replace(planned.waiting, fixes=found_fixes)
        if reason is not None and reason.is_never:
            planned.starts = "never"
            return
        last = last_of(self.engine, job)
        self.pass_time(lambda: key in self.started or last.at_ms <= self.time_ms)
        found = self.started.get(key)
        planned.starts = "unknown" if found is None else "later"
        planned.preempts = self._preempts
        why = why_unknown(len(self.unknown_runs), len(self.unknown_starts), cut=self.cut)
        if last.at_ms <= self.time_ms:
            why = last.why
        if found is None and why:
            planned.waiting = replace(planned.waiting, starts_unknown=why)
        if found is not None:
            p10_ms = -1 if found.limited else found.in_ms
            planned.in_ms = Start(p10_ms, found.in_ms, found.in_ms, runs=found.runs).as_answer()
            planned.on = found.worker

    def _empty(self, planned: Plan) -> None:
        """Set `planned.empty`: after how many ms each drained worker holds nothing; None if unknown.

        No new job is placed there, so the last end of its attempts decides, and the queue need not be simulated: on a
        large fleet no look would get that far.
        """
        self.settle()
        workers = [self.engine.state.workers[name] for name in self._asked.drain]
        ends_ms = self.ends_ms()
        held: dict[str, list[Held]] = {}
        for each in self.held.values():
            held.setdefault(each.worker, []).append(each)
        planned.empty = {}
        for worker in workers:
            ends = [ends_ms.get(each.name, -1) for each in held.get(worker.id, ())]
            is_known = len(ends) == len(worker.attempts) and min(ends, default=0) >= 0
            planned.empty[worker.id] = max(ends, default=self.began_ms) - self.began_ms if is_known else None


def _concerned(jobs: list[Job], tenant: str) -> PlannedJobs:
    own = [job.name for job in jobs if job.tenant == tenant]
    return PlannedJobs(own=own[:NAMED_MAX], own_jobs=len(own), other_jobs=len(jobs) - len(own))


def _places(job: Job, request: Request) -> list[PlannedPlace]:
    return [
        PlannedPlace(
            replica=replica.index,
            worker=attempt.worker.id,
            gpus=gpu_names(attempt.worker, attempt.mask, attempt.fence),
            mode=MODE_NAMES[attempt.mode],
            models=_unlike(attempt),
            enforced=enforced_on(attempt.worker.inventory.capabilities, request),
        )
        for replica in job.rows.values()
        if (attempt := replica.attempt) is not None
    ]


def _unlike(attempt: Attempt) -> list[str]:
    """Return the models of an attempt's GPUs if they are of more than one: a model for each GPU, in order."""
    pool = attempt.worker.pool_at(attempt.fence).devices
    models = [pool[slot].name for slot in slots_of(attempt.mask) if slot < len(pool)]
    return models if len(set(models)) > 1 else []
