"""The live jobs behind each service: a name is one job's, or two jobs' while one replaces the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Final

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.events import Submit, Wake
from moorage.scheduler.core.ledger.records import NOT_BY_ITSELF
from moorage.scheduler.core.ledger.state import (
    CANCELLING,
    ENDING,
    HAS_DEVICES,
    LEAVING,
    MAY_END,
    QUEUED,
    RUNNING,
    Attempt,
    Ended,
    Job,
    Replica,
    State,
    exit_code_of,
)
from moorage.scheduler.core.lifecycle.max_running import most_of, wanted_of
from moorage.scheduler.core.lifecycle.members import Decision, Next, Old, has_settled, reconcile
from moorage.scheduler.core.lifecycle.scaling import Scaling
from moorage.scheduler.core.lifecycle.transitions import Lifecycle
from moorage.schemas.answers.jobs import ServiceRow, ServicesAnswer, ServiceVersion, Woken
from moorage.schemas.errors import Problem, problem, reason_of
from moorage.schemas.frames import START_FAILED, Answer
from moorage.schemas.job import Request
from moorage.schemas.names import REPLACED_BY, word_of
from moorage.schemas.service import VERSION_LABEL

#: a job that found no place for so long, while nothing of it starts, gets the place of a replica that it replaces
ROOM_MS: Final = 5_000
#: so many of a tenant's newest jobs are looked at for the last one of a service, and so many services are named
LOOKED_MAX: Final = 1_000
NAMED_MAX: Final = 20


class Services:
    """Which live jobs have which service; none of it is in the ledger, as the requests say it.

    `replacing(draft, new, old)` returns the members of an old version whose end makes room for the new one.
    """

    def __init__(
        self, state: State, lifecycle: Lifecycle, replacing: Callable[[Draft, Job, Job], list[Attempt] | None]
    ) -> None:
        self._state = state
        self._lifecycle = lifecycle
        self._replacing = replacing
        self._jobs: dict[tuple[str, str], list[Job]] = {}
        self._by_model: dict[tuple[str, str], list[tuple[Job, str]]] = {}  # with the service of each
        self._full_ms: dict[int, int] = {}  # by next version: when as many of it were on workers as may be, last

    def add(self, job: Job, request: Request) -> None:
        """Take note of a live job."""
        if request.service is not None:
            jobs = self._jobs.setdefault((job.tenant, request.service.name), [])
            if all(each is not job for each in jobs):
                jobs.append(job)
                for model in request.service.models:
                    self._by_model.setdefault((job.tenant, model), []).append((job, request.service.name))

    def live(self, tenant: str, service: str) -> list[Job]:
        """Return the jobs with this service that have not ended after this record, the oldest first."""
        found = [job for job in self._jobs.get((tenant, service), ()) if job.live]
        if found:
            self._jobs[tenant, service] = found
        else:
            self._jobs.pop((tenant, service), None)
        return found

    def newest(self, tenant: str, service: str) -> str:
        """Return the newest live job with this service; empty if there is none."""
        return next((job.name for job in reversed(self._jobs.get((tenant, service), ())) if job.live), "")

    def taken(self, event: Submit, fresh: Iterable[Submit]) -> Problem | None:
        """Return why a new job may not have its service; None if it may, or has none.

        `fresh` are the other submits of this record whose jobs live.
        """
        request, tenant = event.request, event.tenant
        if request.service is None:
            return None
        service, instead_of = request.service.name, request.instead_of
        if (elsewhere := self._served_elsewhere(event, fresh)) is not None:
            return elsewhere
        holders = [job.name for job in self.live(tenant, service)]
        holders += [other.name for other in fresh if other.tenant == tenant and _serves(other.request, service)]
        if not holders or holders == [instead_of]:
            return None
        held = ", ".join(holders)
        if len(holders) == 1:
            step = f"replace it by instead_of {held} (--instead-of); or cancel it, and submit again once it is over"
        else:
            step = f"wait until one of {held} has replaced the other"
        message = f"the service {service} of tenant {tenant} is that of job {held}, which lives"
        return problem("service-taken", message, field="$.service.name", found=held, job=event.name, next=step)

    def _served_elsewhere(self, event: Submit, fresh: Iterable[Submit]) -> Problem | None:
        """Return why a new job may not serve its models: callers name a model alone, so one service has it."""
        assert event.request.service is not None
        own, others = event.request.service, [each.request.service for each in fresh if each.tenant == event.tenant]
        for model in own.models:
            rows = self._by_model.get((event.tenant, model), [])
            if rows := [row for row in rows if row[0].live]:
                self._by_model[event.tenant, model] = rows
            else:
                self._by_model.pop((event.tenant, model), None)
            holders = [service for _, service in rows]
            holders += [each.name for each in others if each is not None and model in each.models]
            if holder := next((each for each in holders if each != own.name), None):
                message = f"the model {model} of tenant {event.tenant} is served by the service {holder}"
                step = f"give it another name here, or replace the job of {holder} first"
                return problem(
                    "served-elsewhere", message, field="$.service.models", found=model, job=event.name, next=step
                )
        return None

    def listed(self, tenant: str) -> ServicesAnswer:
        """Return the live services of a tenant: what becomes of their calls is the members' to say."""
        rows = []
        for name in sorted(service for of, service in self._jobs if of == tenant):
            job = next((each for each in reversed(self._jobs[tenant, name]) if each.live), None)
            service = None if job is None else self._lifecycle.request_of(job).service
            if job is not None and service is not None:
                members = sum(row.state == RUNNING for row in job.rows.values())
                rows.append(
                    ServiceRow(
                        service=name, job=job.name, http=service.http is not None, models=service.models,
                        members=members, accepted_ms=job.accepted_ms,
                        versions=[self._version(each) for each in self._jobs[tenant, name] if each.live],
                    )
                )  # fmt: skip
        return ServicesAnswer(services=rows)

    def _version(self, job: Job) -> ServiceVersion:
        request = self._lifecycle.request_of(job)
        running = [row.attempt for row in job.rows.values() if row.state == RUNNING and row.attempt is not None]
        ready = len(running) if request.workload.ready is None else sum(each.ready for each in running)
        return ServiceVersion(
            job=job.name, label=request.labels.get(VERSION_LABEL, ""), accepted_ms=job.accepted_ms,
            members=wanted_of(job, request), running=len(running), ready=ready,
        )  # fmt: skip

    def answer(self, asked: Wake) -> Answer | Problem:
        """Answer a caller that found no member: the job that will serve it, with as many replicas as it has; or what
        became of the last one, as far as it is among the `LOOKED_MAX` newest jobs of the tenant."""
        service = asked.service[:80]
        for job in self.live(asked.tenant, asked.service):
            return Answer("wake", 0, Woken(service=service, job=job.name, wanted=job.size))
        last = self._newest_of(asked.tenant, asked.service)
        if last is not None:
            code = exit_code_of(last)
            ended = f"job {last.name} {last.state}" + (f" with code {code if code > 0 else 128 - code}" if code else "")
            step = f"moorage logs {word_of(last.name)}"
            return problem("not-found", f"nobody serves {service}: {ended}", found=service, job=last.name, next=step)
        mine = [name for tenant, name in self._jobs if tenant == asked.tenant]
        served = {name: jobs for name in mine if (jobs := self.live(asked.tenant, name))}
        names = sorted(served)
        meant = next((name for name in names if any(job.name == service for job in served[name])), None)
        if meant is not None:
            message = f"{service} is a job; its service is {meant}"
            return problem("not-found", message, found=service, job=service, next=f"call {meant}")
        return problem(
            "not-found",
            f"no job of tenant {asked.tenant} has the service {service}",
            found=service,
            allowed=", ".join(names[:NAMED_MAX]) + (", …" if len(names) > NAMED_MAX else ""),
            next="call one of those, or submit a job with --service" if names else "submit a job with --service",
        )

    def _newest_of(self, tenant: str, service: str) -> Job | None:
        """Return the newest job with this service, of those that are in memory."""
        row, name = self._state.tenants.get(tenant), service.encode()
        for job in islice(reversed(row.jobs.values()), LOOKED_MAX) if row is not None else ():
            if b"service" in job.body and name in job.body and _serves(self._lifecycle.request_of(job), service):
                return job
        return None

    def pass_time(self, draft: Draft, scaling: Scaling) -> None:
        """End what has been replaced; to be called once a second."""
        replaced: set[int] = set()
        for (tenant, service), jobs in list(self._jobs.items()):
            pair = self.live(tenant, service)  # which forgets those that have ended
            if len(pair) == 1:
                why = "no next version takes its place" if len(jobs) < 2 else "its next version has ended"
                scaling.come_back(draft, pair[0], why)
            if len(pair) != 2 or self._lifecycle.request_of(pair[1]).instead_of != pair[0].name:
                continue
            if any(job.relocating is not None for job in pair):
                continue  # each has as many numbers as its request once that is over
            if not draft.bulk_full and self._replace(draft, scaling, *pair) in ("goes on", "whole"):
                replaced.add(pair[0].num)
        scaling.replaced = replaced
        self._full_ms = {num: at_ms for num, at_ms in self._full_ms.items() if num in self._state.jobs}

    def _replace(self, draft: Draft, scaling: Scaling, old: Job, new: Job) -> str:
        """Let the old version lend as many places as `members.reconcile` says; return the phase.

        A new job that follows its calls begins with as many members as the old one has. Where the new one finds no
        place, one member of the old one gives up its own, if that makes room for the new one; the next one only once
        the new job has made up for it.
        """
        request, next_request = self._lifecycle.request_of(old), self._lifecycle.request_of(new)
        lender = scaling.lender(old)
        may_begin = not _is_put_off(new)
        why = f"as many as of job {old.name}, which it replaces"
        if may_begin and scaling.begin_with(draft, new, lender.full, why):
            return "goes on"
        now = self._next(new, next_request, lender, draft.time_ms)
        finds_no_place = self._finds_no_place(draft, new, next_request, now.settled)
        if finds_no_place:  # nor do those of the old one that wait: who has no place lends none
            lender = lender._replace(full=min(lender.full, lender.lent + scaling.count(old)))
        if lender.lent and not any(old.lent):  # a snapshot of level 1 does not say for which of them none serves
            lender = lender._replace(ahead=max(0, lender.lent - now.settled))
        decided = reconcile(lender, now._replace(may_begin=may_begin))
        if decided.ends:
            self._lifecycle.cancel(draft, old, REPLACED_BY.format(new.name))
        elif (decided.lent, decided.ahead) != (lender.lent, lender.ahead):
            scaling.lend(draft, old, lender.full, (decided.lent, decided.ahead), _why(decided, lender, new))
        elif decided.more and finds_no_place and not any(self._is_leaving(row) for row in old.rows.values()):
            self._give_way(draft, scaling, old, new, request, decided, lender.full)
        return decided.phase

    def _next(self, new: Job, request: Request, old: Old, now_ms: int) -> Next:
        """Return what counts of the next version of a service."""
        may = wanted_of(new, request)
        if request.scale is None:  # `max_running` bounds it, too: as a canary it does not replace what serves more
            most = min(may, request.max_running or may)
            may = min(may, max(most, old.full))
        for_ms = _for_ms(request)
        settled = sum(has_settled(row, for_ms, now_ms) for row in new.rows.values())
        live = new.live - sum(row.state == CANCELLING for row in new.rows.values())
        return Next(may, settled, live, self._fails(new, request))

    def _give_way(
        self, draft: Draft, scaling: Scaling, old: Job, new: Job, request: Request, decided: Decision, full: int
    ) -> None:
        """End a member of the old job, of `full` ones, for the new one; `decided.more` may end one after the other.

        None ends if the new one could not start then either: for want of room, or as its tenant is held or at its
        limit. None ends while one of the old job is about to serve, as it may do after the new one has failed.
        """
        tenant = self._state.read_tenant(new.tenant)
        most_new = most_of(new, self._lifecycle.request_of(new))
        if most_new is not None and new.on_workers >= most_new:
            return  # it may have no more, as a canary
        if tenant.hold is not None:
            return
        if old.ever_ready and any(_begins(row) for row in old.rows.values()) and request.workload.ready is not None:
            return
        most = decided.more
        members = self._replacing(draft, new, old)
        over = tenant.gpus + self._lifecycle.shape_of(new).gpus - tenant.gpus_max if tenant.gpus_max else 0
        if members == [] and over > 0:  # there is room for it, beyond the limit
            current = (row.attempt for row in reversed(old.rows.values()))
            members = [each for each in current if each is not None and self._lifecycle.is_on_worker(each)][:1]
        if members and len(members) <= most and members[0].mask.bit_count() * most >= over:
            why = f"gives its place to job {new.name}, which replaces it"
            scaling.lend(draft, old, full, (decided.lent + 1, decided.ahead + 1), why, members[0])

    def replaces(self, new: Job) -> bool:
        """Return whether the next version of a service takes the place of the old one now: it may begin, and has not
        failed."""
        return not _is_put_off(new) and not self._fails(new, self._lifecycle.request_of(new))

    @staticmethod
    def _fails(job: Job, request: Request) -> bool:
        """Return whether the last attempt of one of a job's replicas ended by itself before it had settled."""
        for_ms = _for_ms(request)
        ended = [row.ended for row in job.rows.values() if row.ended is not None and row.state == QUEUED]
        return any(_ended_by_itself(each, for_ms) for each in ended) or (bool(job.bad) and not job.ever_ready)

    def _is_leaving(self, replica: Replica) -> bool:
        """Return whether a replica was asked to end, and its place comes free by itself."""
        return replica.attempt is not None and replica.state in LEAVING and not self._lifecycle.lingers(replica.attempt)

    def _finds_no_place(self, draft: Draft, job: Job, request: Request, ready: int) -> bool:
        """Return whether a job has waited for a place for `ROOM_MS`, and nothing of it is about to be ready.

        One of which as many run as may at once waits for none.
        """
        most = most_of(job, request)
        if job.num not in self._full_ms or (most is not None and job.on_workers >= most):
            self._full_ms[job.num] = draft.time_ms if most is not None else 0
        now = [each.state for each in job.rows.values()]
        if ENDING in now or sum(each in HAS_DEVICES for each in now) > ready:
            return False
        since_ms = [each.not_before for each in job.rows.values() if each.state == QUEUED]
        if job.fresh:
            since_ms.append(max(job.ready_ms, job.accepted_ms, job.placed_ms))
        wanted_ms = max(job.scaled.since_ms if job.scaled is not None else 0, self._full_ms[job.num])
        return any(draft.time_ms - max(each, wanted_ms) >= ROOM_MS for each in since_ms)


def _serves(request: Request, service: str) -> bool:
    return request.service is not None and request.service.name == service


def _ended_by_itself(ended: Ended, for_ms: int) -> bool:
    """Return whether an attempt could not be started, or ended before it had settled: not as asked, nor by its host."""
    if (ended.ever_ready and ended.ready_ms >= for_ms) or ended.was_asked:
        return False
    why = reason_of(ended.why)
    return why.startswith(START_FAILED) or (ended.ran_ms >= 0 and ended.by_worker and why not in NOT_BY_ITSELF)


def _is_put_off(job: Job) -> bool:
    """Return whether a job waits for other jobs, a time or an operator, so that it may begin hours from now."""
    return bool(job.awaits) or job.hold is not None


def _for_ms(request: Request) -> int:
    """Return for how many ms a member of a next version has to be ready before it counts."""
    ready = request.workload.ready
    return 0 if ready is None else ready.for_ms(replaces=True)


def _begins(replica: Replica) -> bool:
    """Return whether a member has a place, and was not ready there yet."""
    return replica.state in MAY_END and replica.attempt is not None and not replica.attempt.ever_ready


def _why(decided: Decision, old: Old, new: Job) -> str:
    """Return why the old version of a service lends more or fewer places from now on."""
    if decided.lent >= old.lent:
        return f"job {new.name}, which replaces it, serves in its place"
    if decided.phase == "lost":
        return f"not all members of job {new.name}, which was to replace it, can serve any more"
    if decided.phase == "fails":
        return f"an attempt of job {new.name} ended before it served for long enough"
    return f"fewer members of job {new.name} serve in its place"
