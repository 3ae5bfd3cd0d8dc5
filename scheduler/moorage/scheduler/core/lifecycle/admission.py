"""Admission of requests and cancels: idempotence, tombstones, limits, and requests that no worker could ever run.

Requests that cannot be decoded are refused before they come here; further malformed requests, and those over a limit,
are refused here. A request that no known worker could ever run waits with a warning; with `on_no_match: reject` it is
refused, once all workers were heard from. An empty fleet refuses none: its first worker may be the one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from typing import Final

import msgspec
from msgspec.structs import replace

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.events import Cancel, Submit
from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.growing import Growing
from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.ledger.acts import Limit, Limits, Replicas, Tombstone, Untomb
from moorage.scheduler.core.ledger.finished import job_key, request_digest
from moorage.scheduler.core.ledger.records import by_tenant
from moorage.scheduler.core.ledger.state import CANCELLED, LAST_PART, REJECTED, TIME, Awaits, Job, State, Tenant
from moorage.scheduler.core.lifecycle.away import Away
from moorage.scheduler.core.lifecycle.beyond import beyond, beyond_model, budget_warning, without_counter
from moorage.scheduler.core.lifecycle.services import Services
from moorage.scheduler.core.lifecycle.transitions import Lifecycle
from moorage.scheduler.core.lifecycle.unmatched import Unmatched
from moorage.scheduler.core.queue.waiting_room import counts
from moorage.schemas import reasons, reserved_variables
from moorage.schemas.answers.jobs import Cancelled, Uncancelled
from moorage.schemas.capabilities import Capabilities
from moorage.schemas.codec import NESTING_MAX, decode_request, identity, same_request
from moorage.schemas.errors import Problem, problem
from moorage.schemas.frames import Accepted, Answer
from moorage.schemas.items import PLACEHOLDER, unfilled
from moorage.schemas.job import STATE_NUMBER, STATES, WHENS, Request, Run
from moorage.schemas.memo import Memo
from moorage.schemas.names import word_of
from moorage.schemas.ranges import Ranges, format_ranges, without
from moorage.schemas.units import many

RETRY_AFTER_S: Final = 1.0
#: starts so close to each other are one time of the clock, told at two moments
SAME_START_MS: Final = 60_000
#: cached shapes that the fleet could run
MATCHED_MAX: Final = 50_000
#: tombstones of one tenant checked in a second
FORGET_MAX: Final = 256


NO_MATCH: Final = "no-match"
AWAY: Final = "a worker that is away could run it"
NO_GPUS: Final = Capabilities(gpu_enabled=False)
NOT_HEARD: Final = "fleet-not-yet-heard"
HELD: Final = "tenant-held"


def is_plain(value: object, levels: int = NESTING_MAX) -> bool:
    """Return whether a decoded JSON or msgpack value has a canonical form, and can be written as JSON.

    `levels` is how deep its objects and lists may be nested at most.
    """
    if isinstance(value, dict):
        return levels > 0 and all(type(key) is str and is_plain(item, levels - 1) for key, item in value.items())
    if isinstance(value, list):
        return levels > 0 and all(is_plain(item, levels - 1) for item in value)
    if isinstance(value, int):
        return -(2**63) <= value < 2**64
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, str)


def _has_no_gpus(fleet: Fleet, driver: str) -> bool:
    """Return whether workers offer this driver, and none of them gives its jobs GPUs."""
    offers = [cls for cls in fleet.classes.values() if driver in cls.drivers]
    return bool(offers) and not any(driver in cls.kit.gpu_drivers for cls in offers)


#: the tenant whose limits every new tenant begins with
NEW_TENANTS: Final = "new-tenants"


class NewJob(msgspec.Struct, eq=False):
    """A job that this draft accepts, with what is needed once the record is folded.

    `stillborn` is the terminal state that the accepting record gives it at once, None for a job that is queued; `why`
    and `by` are the reason and the actor. `awaits` is what it waits for before it is queued.
    """

    submit: Submit
    warnings: list[str]
    stillborn: int | None = None
    why: str = ""
    by: str = ""
    awaits: Awaits = ()


def _refused(event: Submit, refusal: Problem, warning: str) -> NewJob | Problem:
    """Return the refusal, or for a request from the durable queue a job that is rejected at once."""
    return refusal if event.sequence == 0 else NewJob(event, [warning], REJECTED, refusal.message)


def _starts_then(job: Job, event: Submit, now_ms: int) -> bool:
    """Return whether a request asks for what a job does, and for a start at the same time, as both were told it.

    A time of the clock is more seconds away for each who tells it earlier: the same command gives another number.
    """
    if not event.request.start_after_s:
        return False
    before, after = decode_request(job.body), event.request
    if not before.start_after_s:
        return False
    early_ms = job.accepted_ms + before.start_after_s * 1000 - now_ms - event.request.start_after_s * 1000
    plain = [identity(replace(each, start_after_s=None)) for each in (before, after)]
    return abs(early_ms) <= SAME_START_MS and plain[0] == plain[1]


class Admission:
    """Decides about submits and cancels, by the state and this record's draft."""

    def __init__(
        self,
        state: State,
        fleet: Fleet,
        lifecycle: Lifecycle,
        config: Config,
        services: Services,
    ) -> None:
        self.state = state
        self.fleet = fleet
        self.lifecycle = lifecycle
        self.config = config
        self._growing = Growing(config.growing)
        self.services = services
        self._close = config.jobs_max - config.jobs_max // LAST_PART
        self._capable: Memo[int, tuple[int, int]] = Memo(MATCHED_MAX)
        self._unmatched = Unmatched(fleet)
        self._away = Away(state, fleet)
        self.moved_seq = state.seq  # sequence of the last record that was not a bare heartbeat
        self._heard_at = -1  # the number of the fleet's inventory when all workers had been heard from
        #: for `_of_draft`: whether all workers were heard from; None until a submit asks, as it reads every worker
        self._heard: bool | None = None
        #: the last well-formed request; equal requests share one object (`RequestCache`)
        self._well_formed: Request | None = None
        #: the last request with variables or a deadline, and the warnings about these
        self._warned_of: Request | None = None
        self._warned: list[str] = []
        #: tenants without limit, hold and tombstones, for `_of_draft`
        self._plain: set[str] = set()
        #: by tenant, how many jobs are over with `_of_draft`; None until one at its limit asks, as it reads all changes
        self._over: Counter[str] | None = None
        self._of_draft: Draft | None = None

    def submit(self, draft: Draft, event: Submit, fresh: Iterable[NewJob]) -> NewJob | Accepted | Problem:
        """Return the job to accept, or the answer in its stead: a repeat's `Accepted`, or the problem that refuses it.

        `fresh` are jobs that this record accepts already. No client waits for the answer to a request from the durable
        queue (one with a `sequence`). If a limit or condition refuses it, it becomes a job that is rejected at once,
        and its tenant gets an event. If the request is malformed, or another one has its id, a problem is returned for
        it, too.
        """
        request, shape = event.request, event.shape
        if request is not self._well_formed:
            malformed = self.malformed(event)
            if malformed is not None:
                return malformed
            self._well_formed = request
        answer = self.known(event, draft.seq, draft.time_ms)
        if answer is not None:
            return answer
        if self._of_draft is not draft:
            self._begin(draft)
        answered = event.sequence == 0
        # the durable queue's reader stops at this bound by itself, so what it has read is not refused
        # ended jobs count too: exact counting is worth it only close to the memory bound
        state = self.state
        if answered and len(state.jobs) + state.extra >= self._close and not self._has_room(event.tenant):
            return self._queue_full(event)
        taken = None
        if request.service is not None:
            taken = self.services.taken(event, [new.submit for new in fresh if new.stillborn is None])
        if taken is not None:
            return _refused(event, taken, taken.message)
        moved = self._moved_on(draft, event) if request.if_seq is not None else None
        if moved is not None:
            return _refused(event, moved, moved.message)
        warnings: list[str] = []
        if event.tenant not in self._plain and not self._is_plain(event.tenant):
            limit = self._over_limit(draft, event)
            if limit is not None and answered:
                return limit
            if self._is_cancelled(event.tenant, event.name):
                if event.sequence == 0:
                    return _cancelled_before(event)
                draft.add(Untomb(event.tenant, event.name))
                return NewJob(
                    event, ["cancelled-before"], CANCELLED, "cancelled before it came", by_tenant(event.tenant)
                )
            if limit is not None:
                return _refused(event, limit, limit.message)
            if event.tenant not in state.tenants:
                self._limit_as_new(draft, event.tenant)
            if self.state.read_tenant(event.tenant).hold is not None:
                warnings.append(HELD)
            if event.shape.gpus and (near := budget_warning(self.state, self.state.read_tenant(event.tenant))):
                warnings.append(near)
        if shape.uses and request.on_no_match == "reject" and (none := without_counter(self.state, shape, event.name)):
            return none if answered else _refused(event, none, none.message)
        awaits: Awaits = ()
        if request.after:
            found = self._after(event)
            if isinstance(found, Problem):
                return _refused(event, found, found.message)
            awaits, why = found
            if why:
                return NewJob(event, [*warnings, why], CANCELLED, why)
        if request.start_after_s:
            awaits = (*awaits, (TIME, draft.time_ms + int(request.start_after_s * 1000)))
        made = NewJob(event, warnings, awaits=awaits)
        if (shape.most or shape.parts) and not draft.may(Replicas):
            early = self._below_level(event)
            return early if answered else _refused(event, early, early.message)
        if not self.could_ever(shape):
            return self._without_match(made)
        run = request.workload
        if run.env or request.deadline_s is not None or (run.items is None and any("{" in word for word in run.argv)):
            if request is not self._warned_of:
                self._warned_of, self._warned = request, _warned(request)
            warnings += self._warned
        if (shape.prefers or shape.spread_over) and self.all_reported():
            warnings += self._wished_for_nothing(shape)
        return made

    def _wished_for_nothing(self, shape: Shape) -> list[str]:
        """Return the warnings about wishes for labels that no worker has."""
        wished = [(each.label, "--prefers") for each in shape.prefers]
        wished += [] if shape.spread_over is None else [(shape.spread_over, "--spread-over")]
        return [
            f"label: no worker has the label {label}{', only GPUs' * bool(self.fleet.gpus_labelled(label))}, so"
            f" {option} changes nothing"
            for label, option in dict.fromkeys(wished)
            if label not in self.fleet.labelled
        ]

    def _below_level(self, event: Submit) -> Problem:
        """Return why a gang of no fixed size, or of groups, is refused: an earlier release knows neither."""
        groups = event.request.groups
        what = "has groups" if groups else "starts with as many ranks as have room"
        return problem(
            "failed-precondition",
            f"the ledger is at feature level {self.state.level}, and a gang {what} from level {Replicas.LEVEL} on",
            field="$.groups" if groups else "$.replicas",
            found=many(len(groups), "group") if groups else str(event.request.ranks),
            allowed="none" if groups else "one number",
            job=event.name,
            next="ask for a gang of one kind and size; or an operator raises it once all schedulers can:"
            " moorage admin feature-level",
        )

    def _after(self, event: Submit) -> tuple[Awaits, str] | Problem:
        """Return what a job that names others in `after` waits for, and why that can never come true ("" if it can).

        Those are the ones that have not ended. A job of this record is known like any other, so that no job can wait
        for itself, through whatever others.
        """
        awaits: list[tuple[int, int]] = []
        for each in event.request.awaited:
            num, state = self._which(event.tenant, each.job)
            which = WHENS.index(each.when)
            if num:
                awaits.append((num, which))
            elif state is None:
                return problem(
                    "unknown-job",
                    f"it is to start after job {each.job}, which tenant {event.tenant} has never had, or which is"
                    " forgotten",
                    field="$.after",
                    found=each.job,
                    allowed="ids of jobs that were accepted before it",
                    job=event.name,
                    next="name it by its id in full (moorage ls); submit the job that goes first before this one",
                )
            elif not counts(which, state):
                return (), f"after {each.job}: {STATES[state]}"
        return tuple(awaits), ""

    def _which(self, tenant: str, name: str) -> tuple[int, int | None]:
        """Return the number of a live job, else 0 and the final state of one that has ended; None if it is unknown."""
        job = self.state.job(tenant, name)
        if job is not None:
            return (job.num, None) if job.live else (0, STATE_NUMBER[job.state])
        row = self.state.finished.find(job_key(tenant, name))
        return 0, None if row is None else row[2]

    def malformed(self, event: Submit) -> Problem | None:
        """Return why a request can never be accepted, whatever the fleet has, by rules that the decoder cannot check.

        Of a driver that has no GPUs on any worker, that is told before the shape of the devices asked for: with them
        mended the request would still not run.
        """
        request = event.request
        if request.blocks and not is_plain(request.blocks):
            return problem(
                "invalid-argument",
                "driver_config must be plain: objects with text keys, lists, text, numbers of 64 bits, booleans, null",
                field="$.driver_config",
                allowed=f"{NESTING_MAX} levels",
                job=event.name,
            )
        trouble = request.trouble
        if trouble is None:
            return None
        code, shape = "invalid-argument", request.driver_fault(None)
        if shape is not None and shape.trouble == trouble and _has_no_gpus(self.fleet, request.workload.driver):
            code, trouble = request.driver_fault(NO_GPUS) or shape
        field, message, found, allowed = trouble
        return problem(code, message, field=f"$.{field}", found=found, allowed=allowed, job=event.name)

    def _begin(self, draft: Draft) -> None:
        """Prepare for the submits of a record."""
        self._of_draft = draft
        self._heard = None
        self._over = None
        self._plain.clear()

    def _row(self, tenant: str) -> Tenant:
        """Return a tenant, to be read only; of a new one the row with the limits that it begins with."""
        return self.state.tenants.get(tenant) or self.state.read_tenant(NEW_TENANTS)

    def _limit_as_new(self, draft: Draft, tenant: str) -> None:
        """Give a tenant that submits its first job the limits that an operator has set for new ones."""
        row = self.state.read_tenant(NEW_TENANTS)
        if row.limit is None:
            return
        why = f"as {NEW_TENANTS}"
        draft.add(Limit(tenant, row.gpus_max, row.jobs_max, row.limit.actor, why))
        if row.limits is not None and draft.may(Limits):
            draft.add(Limits(tenant, row.limits.numbers, row.limit.actor, why, *row.limits[-2:]))

    def _is_plain(self, tenant: str) -> bool:
        """Return whether a tenant has no limit, hold or tombstone; True is remembered for the rest of the record.

        Cancels and orders come before the submits of a record, and submits create none of the three.
        """
        row = self._row(tenant)
        if row.gpus_max or row.jobs_max or row.limits is not None or row.hold is not None or row.tombstones:
            return False
        self._plain.add(tenant)
        return True

    def known(self, event: Submit, of_record: int = 0, now_ms: int = 0) -> Accepted | Problem | None:
        """Return the answer if the id is taken by a job in memory or one that ended recently; None if it is free.

        `of_record` is the record that is being built, whose number no answer has yet, and `now_ms` its ledger time.
        """
        tenant = self.state.tenants.get(event.tenant)
        if tenant is not None:
            job = tenant.jobs.get(event.name)
            if job is not None:
                ledger = job.ledger if job.ledger != of_record else 0
                return self._again(event, job, ledger, now_ms or self.state.time_ms)
        row = self._finished_lately(event.key)
        return None if row is None else self._finished(event, row[0], row[2])

    def _finished_lately(self, key: bytes) -> tuple[bytes, int, int, int] | None:
        """Return the row of a job that left memory; None if its id is free: older rows are only for the history."""
        row = self.state.finished.find(key)
        is_free = row is None or self.state.time_ms - row[1] * 1000 >= self.config.finished_keep_ms
        return None if is_free else row

    def _has_room(self, tenant: str) -> bool:
        return self.state.room(self.config.jobs_max, tenant) > 0

    def _queue_full(self, event: Submit) -> Problem:
        return problem(
            "queue-full",
            f"the scheduler's memory for jobs is used up: it counts {self.state.load} of at most"
            f" {self.config.jobs_max}, and the last tenth is only for tenants that use less than a tenth",
            job=event.name,
            next="send again later, or publish to the durable queue, which waits",
            retry_after_s=RETRY_AFTER_S,
        )

    def _is_cancelled(self, tenant: str, name: str) -> bool:
        """Return whether an unknown job was cancelled before its submit came."""
        row = self.state.tenants.get(tenant)
        return row is not None and name in row.tombstones

    def _without_match(self, made: NewJob) -> NewJob | Problem:
        """Return the outcome for a job that no known worker could ever run: the job with a warning, or the refusal.

        It is refused only if it `ends_unmatched` and all workers were heard from. If it came from the durable
        queue, the refusal is a job that is rejected at once.
        """
        event = made.submit
        why = f"{NO_MATCH}: {self._unmatched.why(event.shape)}"
        if self._heard is None:
            self._heard = self.all_reported()
        if not self._heard:
            made.warnings += (NOT_HEARD, why)  # may be rejected later, once all workers were heard from
            return made
        if not self.ends_unmatched(event.request, event.shape):
            made.warnings.append(f"{why}; {AWAY}" if self._may_be_back(event.shape) else why)
            return made
        return self._no_match(event) if event.sequence == 0 else NewJob(event, [*made.warnings, why], REJECTED, why)

    def _moved_on(self, draft: Draft, event: Submit) -> Problem | None:
        """Return a problem if a later record than the request's `if_seq` decided something, or there is no such record.

        Every record but a bare heartbeat decides something; the record that is being built does if it is not empty.
        """
        seen = event.request.if_seq
        moved = self.state.seq + 1 if not draft.empty else self.moved_seq
        if seen is not None and seen > self.state.seq:
            return problem(
                "failed-precondition",
                f"this ledger has no record {seen} yet, so no plan can be based on it",
                field="$.if_seq",
                found=seen,
                allowed=f"at most {self.state.seq}",
                job=event.name,
                next="plan again, at the server that you submit to",
            )
        if seen is None or moved <= seen:
            return None
        return problem(
            "moved-on",
            f"the scheduler decided something in ledger record {moved}, after the plan's record {seen}",
            field="$.if_seq",
            found=seen,
            allowed=f"at least {moved}",
            job=event.name,
            next="plan again",
        )

    def _over_limit(self, draft: Draft, event: Submit) -> Problem | None:
        """Return a problem if the tenant's limit allows no more jobs, or could never let this one start.

        The number of jobs is not checked for a request from the durable queue.
        """
        tenant = self._row(event.tenant)
        gpus_max, jobs_max, live = tenant.gpus_max, tenant.jobs_max, tenant.live
        need = event.shape.gpus
        if gpus_max and need > gpus_max:
            return problem(
                "failed-precondition",
                f"the job needs {need} GPUs at once, but the limit of tenant {event.tenant} is {gpus_max}",
                field="$.gpu.count",
                found=need,
                allowed=f"at most {gpus_max} GPUs leased to tenant {event.tenant} at once",
                job=event.name,
                next="ask for fewer GPUs, or ask an operator to raise the limit",
            )
        over = None
        if tenant.limits is not None:
            over = beyond(self.state, tenant, event.request, event.shape, event.name)
            over = over or beyond_model(self.fleet, tenant, event.shape, event.name)
        if over is not None:
            return over
        # the durable queue's reader stops at this bound by itself
        if jobs_max and event.sequence == 0 and live >= jobs_max:
            self._over = draft.jobs_over() if self._over is None else self._over
            live -= self._over[event.tenant]
            if live < jobs_max:
                return None
            return problem(
                "failed-precondition",
                f"tenant {event.tenant} has {live} jobs that are not over, and may have {jobs_max}",
                found=live,
                allowed=f"at most {jobs_max} jobs of tenant {event.tenant} that are not over",
                job=event.name,
                next="send again once some are over, or publish to the durable queue, which waits",
            )
        return None

    def _again(self, event: Submit, job: Job, ledger: int, now_ms: int) -> Accepted | Problem:
        if same_request(job.body, event.body) or _starts_then(job, event, now_ms):
            return Accepted(event.name, ledger, job.state, duplicate=True)
        return self._conflict(event)

    def _finished(self, event: Submit, digest: bytes, state: int) -> Accepted | Problem:
        request = decode_request(event.body)
        if digest == request_digest(identity(request)):
            return Accepted(event.name, 0, STATES[state], duplicate=True)
        return self._conflict(event)

    @staticmethod
    def _conflict(event: Submit) -> Problem:
        return problem(
            "conflict",
            f"job {event.name} was submitted before with other content",
            job=event.name,
            next="choose another job id, or send the same content",
        )

    # ---------------------------------------------------------------------------------------- no match

    def could_ever(self, shape: Shape) -> bool:
        """Return whether the known fleet, if empty and healthy, could hold the shape (all replicas of a gang at once).

        Not on workers that refused it, and devices that failed under it. The answer is cached until the fleet changes.
        """
        return self._lack(shape) <= 0

    def _lack(self, shape: Shape) -> int:
        """Return how many replicas of a shape, of those that run together, the known fleet could not hold; or 0, or
        less."""
        known = self._capable.get(shape.index)
        if known is not None and known[0] == self.fleet.inventory:
            return known[1]
        return self._capable.put(shape.index, (self.fleet.inventory, self._counted_lack(shape)))[1]

    def _counted_lack(self, shape: Shape) -> int:
        if shape.same:
            return min(map(self._lack_at, self.fleet.places(shape)), default=shape.together)
        return self._lack_at(shape)

    def _lack_at(self, shape: Shape) -> int:
        if shape.parts:
            return max(self._lack_at(part.shape) for part in shape.parts)
        missing, hosts = shape.together, self.fleet.hosts
        for num, mask in shape.avoid:
            if (host := hosts.get(num)) is not None:
                missing += host.replicas_of(shape, "ever") - host.replicas_of(shape, "ever", mask)
        missing += sum(hosts[num].replicas_of(shape, "ever") for num in shape.refusing & hosts.keys())
        return self.fleet.lack(shape, missing)

    def all_reported(self) -> bool:
        """Return whether every worker with a session has renewed in this term.

        Before that, no request is refused because no worker could run it. Once true, it stays so until the fleet
        changes.
        """
        if self._heard_at != self.fleet.inventory and all(
            self.fleet.hosts[worker.num].heard
            for worker in self.state.workers.values()
            if worker.session and worker.num in self.fleet.hosts
        ):
            self._heard_at = self.fleet.inventory
        return self._heard_at == self.fleet.inventory

    def _no_match(self, event: Submit) -> Problem:
        reason = self._unmatched.reason(event.shape)
        fix = "moorage plan says what would fit; --on-no-match wait (on_no_match: wait) waits for a worker"
        return problem(
            "failed-precondition",  # a fault of the fleet, as against one of the request: the sources have these two
            f"no known worker could ever run this ({self._unmatched.why(event.shape)})",
            job=event.name,
            next=reasons.NO_USERS.fix if reason == reasons.NO_USERS.name else fix,
        )

    def ends_unmatched(self, request: Request, shape: Shape) -> bool:
        """Return whether a job is not to wait for a worker that could run it, since no known worker ever could.

        Because its request says so, or because every worker that would do has told that it may not change user: that is
        as if each of them had refused it. No job of an empty fleet ends so, and none that a worker could run which is
        away, as a host that restarts.
        """
        if not self.fleet.hosts or self.could_ever(shape) or self._growing.fits(shape):
            return False
        if request.on_no_match != "reject" and self._unmatched.reason(shape) != reasons.NO_USERS.name:
            return False
        return not self._may_be_back(shape)

    def _may_be_back(self, shape: Shape) -> bool:
        """Return whether a shape that the known fleet could not hold could be held once workers that are away are
        back."""
        places = self._away.places(shape)
        if shape.same and (places != (shape,) or self.fleet.places(shape) != (shape,)):
            places = (*self.fleet.each_place(shape), *self._away.each_place(shape))
            return any(self._away.lack(each, self._lack_at(each)) <= 0 for each in places)
        return self._away.lack(shape, self._lack(shape)) <= 0

    def reject_unmatched(self, draft: Draft, job: Job, shape: Shape) -> None:
        """Reject a job's queued replicas if `ends_unmatched`; else do nothing.

        To be called for a job accepted before all workers were heard from, once they all were. A job that some worker
        refused has matched one since.
        """
        if not job.avoid and self.ends_unmatched(self.lifecycle.request_of(job), shape):
            self.lifecycle.reject(draft, job, f"{NO_MATCH}: {self._unmatched.why(shape)}")

    # ----------------------------------------------------------------------------------------- cancels

    def forget_cancels(self, draft: Draft) -> None:
        """Drop tombstones (cancels of jobs that never came) that are older than `finished_keep`.

        Each second at most `FORGET_MAX` of each tenant, the oldest first. Those of cancels from the durable queue are
        dropped by `Cursor` instead, once the queue of submits was read beyond them.
        """
        before = draft.time_ms - self.config.finished_keep_ms
        for tenant in self.state.tenants.values():
            if not tenant.tombstones:
                continue
            of_endpoint = ((job, -at) for job, at in tenant.tombstones.items() if at <= 0)
            for job, at_ms in list(islice(of_endpoint, FORGET_MAX)):
                if at_ms >= before:
                    break
                draft.add(Untomb(tenant.name, job))
            if draft.full:
                return

    def cancel(self, draft: Draft, event: Cancel) -> Answer | Problem | None:
        """Cancel a job at any stage, or forget the cancel of an unknown one.

        An unknown id is remembered if its submit may be on its way, so that this is refused (H43): of a cancel with
        `before`, and of one from the durable queue. Any other changes nothing, and is a problem; so is one too many,
        when the tenant has `tombstones_max` of them. The answer's `cancelled` is False for a job that has ended or is
        being cancelled. The answer gets the number of its record once that is stored. None: of a job with many replicas
        on workers some are left for the next record, in which the cancel goes on.
        """
        if event.lifts:
            return self._uncancel(draft, event)
        job, only = self.state.job(event.tenant, event.job), event.replicas
        if only is not None:
            gang = job is not None and self.lifecycle.request_of(job).is_gang
            if (trouble := _no_such(job, event, only, gang=gang)) is not None:
                return trouble
        if job is not None:
            was = job.state
            with draft.by(event.by):
                did = self.lifecycle.cancel(draft, job, event.why, only)
            if self.lifecycle.is_left(draft, job, only):
                return None
            return Answer("cancel", 0, Cancelled(job=event.job, cancelled=did, was=was))
        row = self._finished_lately(job_key(event.tenant, event.job))
        if row is not None:
            return Answer("cancel", 0, Cancelled(job=event.job, cancelled=False, was=STATES[row[2]]))
        if not (event.before or event.sequence):
            return _nothing_to_cancel(event)
        tenant = self.state.tenants.get(event.tenant)
        count = len(tenant.tombstones) if tenant is not None else 0
        if count >= self.config.tombstones_max and not self._is_cancelled(event.tenant, event.job):
            return problem(
                "tombstones-full",
                f"the scheduler remembers {count} cancels of unknown jobs of tenant {event.tenant}, which is its limit",
                job=event.job,
                next="cancel only jobs that exist, or send again later: remembered cancels are dropped with time",
                retry_after_s=RETRY_AFTER_S,
            )
        draft.add(Tombstone(event.tenant, event.job, event.sequence))
        kept_s = self.config.finished_keep_ms / 1000
        told = Cancelled(job=event.job, cancelled=True, was="UNKNOWN", remembered_s=kept_s)
        return Answer("cancel", 0, told)

    def _uncancel(self, draft: Draft, event: Cancel) -> Answer:
        """Forget the cancel of an unknown job, so that a submit with its id is accepted again.

        The answer's `lifted` is False if none is remembered, as it is for whoever asks a second time.
        """
        lifted = self._is_cancelled(event.tenant, event.job)
        if lifted:
            draft.add(Untomb(event.tenant, event.job))
        return Answer("uncancel", 0, Uncancelled(job=event.job, lifted=lifted))


#: ranges of replicas that an answer names
UNKNOWN_MAX: Final = 16


def _no_such(job: Job | None, event: Cancel, only: Ranges, *, gang: bool) -> Problem | None:
    """Return why some replicas of a job cannot be cancelled by themselves; None if they can."""
    if job is None:
        return problem(
            "not-found",
            f"no job {event.job} of tenant {event.tenant} is in memory, so none of its replicas can be cancelled",
            job=event.job,
            next="moorage ls shows the jobs there are; cancel with before takes a whole job whose submit is on its way",
        )
    if (lacking := lacks(job, only)) is not None:
        return lacking
    if gang:
        return problem(
            "invalid-argument",
            f"job {event.job} is a gang, whose ranks end together: none is cancelled by itself",
            field="$.replicas",
            found=format_ranges(only, UNKNOWN_MAX),
            allowed="the whole job",
            job=event.job,
            next=f"moorage cancel {word_of(event.job)}",
        )
    return None


def _nothing_to_cancel(event: Cancel) -> Problem:
    """Return the problem that no job has this id, and how its submit is stopped if it is on its way."""
    return problem(
        "not-found",
        f"no job {event.job} of tenant {event.tenant}, so nothing is cancelled",
        job=event.job,
        next=f"moorage ls shows the jobs there are; if its submit is on its way: moorage cancel --before"
        f" {word_of(event.job)}",
    )


def _cancelled_before(event: Submit) -> Problem:
    """Return the refusal of a submit whose id was cancelled before it came."""
    return problem(
        "cancelled-before",
        f"job {event.name} of tenant {event.tenant} was cancelled before it came, so it is not accepted",
        job=event.name,
        next=f"submit it under another id, or lift that cancel: moorage uncancel {word_of(event.name)}",
    )


def no_job(tenant: str, name: str, serving: str = "") -> Problem:
    """Return the problem that a tenant has no job of this id, as far as anything is known.

    `serving` is the job that has a service of this name, if there is one.
    """
    if serving:
        message = f"no job {name} of tenant {tenant}; it is a service, whose job is {serving}"
        return problem("not-found", message, found=name, job=name, next=f"name its job: {word_of(serving)}")
    next_step = "moorage ls shows the jobs there are"
    return problem("not-found", f"no job {name} of tenant {tenant}", job=name, next=next_step)


def lacks(job: Job, only: Ranges) -> Problem | None:
    """Return which of these replicas a job has not; None if it has all of them."""
    unknown = without(only, job.numbers)
    if not unknown:
        return None
    return problem(
        "invalid-argument",
        f"job {job.name} has no replica {format_ranges(unknown, UNKNOWN_MAX)}",
        field="$.replicas",
        found=format_ranges(only, UNKNOWN_MAX),
        allowed=format_ranges(job.numbers, UNKNOWN_MAX),
        job=job.name,
        next=f"moorage show {word_of(job.name)}",
    )


def _warned(request: Request) -> list[str]:
    """Return the warnings about variables of a request that moorage sets itself or that show a secret, about times that
    its deadline cuts short, and about placeholders that nothing fills."""
    gang = request.gpu is not None and request.gpu.effective_scheduling == "gang"
    mps = request.gpu is not None and request.gpu.effective_sharing == "mps"
    env = request.workload.env
    return [
        *reserved_variables.warnings_of(env, gang=gang, mps=mps),
        *reserved_variables.shown_secrets(name for name, value in env.items() if isinstance(value, str)),
        *request.cut_short,
        *(_unfilled(request.workload) if request.service is None else ()),  # `moorage serve` fills in {port}
    ]


def _unfilled(run: Run) -> list[str]:
    """Return the warning about a placeholder in the command of a job without items."""
    if run.items is not None or not (name := unfilled(run.argv)):
        return []
    return [
        f"{PLACEHOLDER} {{{name}}} in the command stays as it is, as the job has no items: --each-line FILE or"
        " --each FILE gives it some, in a request run.items"
    ]
