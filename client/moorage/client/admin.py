"""Orders of an operator for jobs, tenants and workers: `AsyncClient.admin`. The ledger has the user and the reason."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from moorage.client.durations import Duration, seconds
from moorage.client.errors import Rejected
from moorage.client.login import who
from moorage.client.pages import pages
from moorage.client.replicas import Which, field_of
from moorage.schemas.answers.letters import Letter, LetterDone, LetterRow, LettersAnswer
from moorage.schemas.answers.operators import ActsAnswer, Demand, TenantsAnswer
from moorage.schemas.errors import Refused
from moorage.schemas.frames import LISTED_MAX
from moorage.schemas.operate import Counter, DlqAct, Done, TenantRow, act_of

if TYPE_CHECKING:
    from moorage.client.answers import JobRow
    from moorage.client.connected import Connected

T = TypeVar("T", Letter, LetterDone, LettersAnswer)


class AsyncAdmin:
    """The orders of an operator, sent through an open client. `tenant` defaults to the client's own.

    An order returns a `Done` once it is in the ledger. Repeating it changes nothing: `Done.changed` is then false.
    There are two exceptions: a second `requeue` ends the new attempt, and acts on dead letters are not in the ledger.
    All raise `NotFound`, `Rejected` (the job has ended, or a text is too long), `NotPermitted`, `NoScheduler`,
    `Unreachable`.
    """

    def __init__(self, client: Connected) -> None:
        self._client = client

    async def hold(self, job: str | None = None, *, why: str = "", tenant: str | None = None) -> Done:
        """Keep a job's waiting replicas from being placed; without `job`, the tenant's queue. Running ones go on."""
        return await self._act("hold", tenant=self._tenant(tenant), job=job, why=why)

    async def release(self, job: str | None = None, *, why: str = "", tenant: str | None = None) -> Done:
        """Undo `hold` of a job; without `job`, of the tenant's queue. Jobs that were held one by one stay on hold."""
        return await self._act("release", tenant=self._tenant(tenant), job=job, why=why)

    async def release_worker(self, worker: str, *, slots: Sequence[int] | None = None, why: str = "") -> Done:
        """Return a worker's quarantined or unhealthy devices to use. The operator vouches that they are free and well.

        Jobs that avoid a device after it failed may use it again, too. `slots` are positions in the worker's pool; None
        means all of them. `Done.slots` are the slots that changed. Raises `Rejected` for an empty list of slots.
        """
        return await self._act("release", worker=worker, slots=None if slots is None else list(slots), why=why)

    async def requeue(self, job: str, *, why: str = "", tenant: str | None = None, replica: Which = None) -> Done:
        """End the job's running and placed replicas, and queue them for a new attempt. This costs no retry.

        `replica` selects one replica, or several as in `0-9,205`.
        """
        return await self._act("requeue", tenant=self._tenant(tenant), job=job, why=why, **field_of(replica))

    async def place(self, job: str, on: str, *, tenant: str | None = None) -> Done:
        """Start what waits of a job on this worker now, also on a cordoned one, before jobs that come earlier.

        `Done.members` is how many replicas had room there; the others wait as before. Raises `Rejected` for none.
        """
        return await self._act("place", tenant=self._tenant(tenant), job=job, on=on)

    async def freeze(self, job: str, *, why: str = "", tenant: str | None = None) -> Done:
        """Ask the workers to freeze a job's running replicas.

        Frozen replicas hold no GPUs: the memory of these is moved to the host's RAM. This returns once the order is in
        the ledger. The job is FROZEN once its workers have reported it.
        """
        return await self._act("freeze", tenant=self._tenant(tenant), job=job, why=why)

    async def resume(self, job: str, *, why: str = "", tenant: str | None = None) -> Done:
        """Undo `freeze`. The job is RUNNING again once its workers have reported it."""
        return await self._act("resume", tenant=self._tenant(tenant), job=job, why=why)

    async def priority(self, job: str, priority: int, *, why: str = "", tenant: str | None = None) -> Done:
        """Set a job's priority, 0..100. It replaces the priority of the request."""
        return await self._act("priority", tenant=self._tenant(tenant), job=job, priority=priority, why=why)

    async def time_limit(self, job: str, limit: Duration, *, why: str = "", tenant: str | None = None) -> Done:
        """Give a job's running attempts, and later ones, another time limit, from their starts on: `"3h"`, or `"+2h"`
        and `"-30m"` for so much more or less than they have.

        It may go beyond its tenant's limit, and past a reservation. Raises `Rejected` where a worker cannot change it.
        """
        from moorage.client.new_limit import new_limit_s

        whose = self._tenant(tenant)
        limit_s = await new_limit_s(limit, lambda: self._client.show(job, tenant=whose))
        return await self._act("time-limit", tenant=whose, job=job, timeout_s=limit_s, why=why)

    async def resize(
        self,
        job: str,
        *,
        memory_mib: int | None = None,
        compute_percent: int | None = None,
        why: str = "",
        tenant: str | None = None,
    ) -> Done:
        """Change a job's part of each shared GPU, for the GPUs that it has and for those that it gets later.

        None leaves a value unchanged. `Done.resized` says when the running attempts take the new part. Raises
        `Rejected` if the other sharers leave no room, or if a worker cannot change the part of a running attempt.
        """
        part = {"memory_mib": memory_mib, "compute_percent": compute_percent}
        return await self._act("resize", tenant=self._tenant(tenant), job=job, why=why, **part)

    async def limit(
        self,
        *,
        gpus: int | None = None,
        jobs: int | None = None,
        cores: float | None = None,
        memory_mib: int | None = None,
        running: int | None = None,
        running_per_key: int | None = None,
        job_gpus: int | None = None,
        gpus_of: dict[str, int] | None = None,
        time_limit: Duration | None = None,
        gpu_hours: float | None = None,
        period: str = "month",
        on_spent: str = "wait",
        gpu_weights: dict[str, float] | None = None,
        why: str = "",
        tenant: str | None = None,
    ) -> Done:
        """Limit what a tenant may have at once (GPUs, jobs that have not ended, cores, memory in MiB, replicas on
        workers, those of each fair key, GPUs of models by the pattern of each), how large and long its jobs may be,
        and its budget of GPU-hours in a day, week or month, in which GPUs of models count by their `gpu_weights`.

        0 means no limit; None leaves a limit unchanged. Jobs that already exceed a new limit go on.
        """
        given: dict[str, Any] = {
            "gpus": gpus,
            "jobs": jobs,
            "cores": cores,
            "memory_mib": memory_mib,
            "running": running,
            "running_per_key": running_per_key,
            "job_gpus": job_gpus,
            "gpus_of": gpus_of,
            "time_limit_s": None if time_limit is None else seconds(time_limit),
            "gpu_hours": gpu_hours,
            "gpu_weights": gpu_weights,
        }
        if gpu_hours is not None:
            given |= {"period": period, "on_spent": on_spent}
        return await self._act("limit", tenant=self._tenant(tenant), why=why, **given)

    async def counter(self, name: str, most: int | None, *, per: str = "fleet", why: str = "") -> Done:
        """Set how many there are of a counter that jobs name in `uses`, in all or, with `per` tenant, for each tenant.

        0 or None removes it.
        """
        return await self._act("counter", name=name, most=most or 0, per=per, why=why)

    async def counters(self) -> list[Counter]:
        """Return the counters, with how many of each are in use."""
        answer = await self._client.operate("tenants")
        return msgspec.convert(answer.data, TenantsAnswer).counters

    async def feature_level(self, level: int, *, schedulers: int = 1, why: str = "") -> Done:
        """Raise the ledger's feature level. Raises `Rejected` unless at least `schedulers` answer and all know it."""
        return await self._act("feature-level", level=level, schedulers=schedulers, why=why)

    async def share(
        self, *, weight: int | None = None, gpus: int | None = None, why: str = "", tenant: str | None = None
    ) -> Done:
        """Set a tenant's weight in the fair share, and how many GPUs it is guaranteed.

        0 means none; None leaves a value unchanged. Other tenants may borrow guaranteed GPUs while they are idle.
        """
        return await self._act("share", tenant=self._tenant(tenant), weight=weight, gpus=gpus, why=why)

    async def tenants(self) -> list[TenantRow]:
        """Return the tenants with jobs that have not ended, leases, holds, limits or shares.

        At most 1,000, those with most GPUs first.
        """
        answer = await self._client.operate("tenants")
        return msgspec.convert(answer.data, TenantsAnswer).tenants

    async def demand(self) -> Demand:
        """Return what waits, by tenant, shape and reason, whether more hosts would help, and the hosts that are idle.

        A leader of an earlier release tells nothing of it.
        """
        answer = await self._client.operate("tenants")
        return msgspec.convert(answer.data, TenantsAnswer).demand

    async def acts(self, *, since: Duration | None = None, by: str = "", verb: str = "") -> ActsAnswer:
        """Return the newest orders of operators that changed something, at most 500, the oldest of them first.

        `since` is how far back to begin, `by` an operator's name, `verb` that of an order, as `drain`. Acts on dead
        letters are in the scheduler's log, and not among these.
        """
        asked = {"since_s": None if since is None else seconds(since), "by": by or None, "verb": verb or None}
        answer = await self._client.operate("acts", asked)
        return msgspec.convert(answer.data, ActsAnswer)

    async def jobs(
        self,
        states: Sequence[str] = (),
        *,
        tenant: str = "",
        labels: Mapping[str, str] | None = None,
        ids: str = "",
        reason: str = "",
        worker: str = "",
        past: bool = False,
    ) -> AsyncIterator[JobRow]:
        """Yield the jobs of all tenants, or of one, newest first; the rest as in `AsyncClient.ls`.

        With `past`, those that have left the scheduler's memory follow.
        """
        given = {"states": list(states), "tenant": tenant, "labels": dict(labels or {}), "ids": ids, "reason": reason}
        asked = {name: each for name, each in (given | {"worker": worker}).items() if each}
        seen = set[tuple[str, str]]()
        async for page in pages(partial(self._client.operate, "ls"), {**asked, "limit": LISTED_MAX, "history": past}):
            for row in page.jobs:
                if (row.tenant, row.job) not in seen:
                    yield row
                seen.add((row.tenant, row.job))

    async def dead_letters(self, *, tenant: str | None = None) -> AsyncIterator[LetterRow]:
        """Yield the refused requests of the durable queue (dead letters), oldest first, of one tenant or of all.

        `tenant` None means all tenants. `sequence` is the number of a letter.
        """
        after = 0
        while True:
            page = await self._letters(LettersAnswer, "list", tenant=tenant, after=after)
            for row in page.letters:
                yield row
            after = page.next
            if not after:
                return

    async def dead_letter(self, sequence: int) -> Letter:
        """Return a dead letter: its `problem`, and its `body` or, if that is not text, its bytes as `data`.

        Raises `NotFound`.
        """
        return await self._letters(Letter, "show", sequence=sequence)

    async def resend(self, sequence: int, *, body: Mapping[str, Any] | None = None, why: str = "") -> LetterDone:
        """Submit a dead letter again for its tenant, under its job id. `body` replaces the request.

        The letter is deleted once the request is accepted. Raises `Rejected` if it is refused again; the letter stays.
        """
        new = None if body is None else dict(body)
        return await self._letters(LetterDone, "resend", sequence=sequence, body=new, by=who(), why=why)

    async def drop(self, sequence: int, *, why: str = "") -> LetterDone:
        """Delete a dead letter for good. Raises `NotFound`."""
        return await self._letters(LetterDone, "drop", sequence=sequence, by=who(), why=why)

    async def _letters(self, kind: type[T], act: str, **arguments: Any) -> T:
        try:
            asked = DlqAct.of({"act": act, **arguments})
        except Refused as refused:
            raise Rejected(refused.problem) from None
        return msgspec.convert((await self._client.operate("dlq", asked)).data, kind)

    def _tenant(self, tenant: str | None) -> str:
        return self._client.tenant if tenant is None else tenant

    async def _act(self, verb: str, **arguments: str | float | list[int] | None) -> Done:
        given = {name: value for name, value in arguments.items() if value is not None}
        try:
            act = act_of(verb, {**given, "by": who()})
        except Refused as refused:
            raise Rejected(refused.problem) from None
        return await self._client.act(verb, act)
