"""Orders of an operator for jobs, tenants and workers: `AsyncClient.admin`. The ledger has the user and the reason."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from moorage.client.errors import Rejected
from moorage.client.login import who
from moorage.schemas.errors import Refused
from moorage.schemas.operate import DlqAct, Done, TenantRow, act_of

if TYPE_CHECKING:
    from moorage.client.connected import Connected


class Admin:
    """The orders of an operator, sent through an open client. `tenant` defaults to the client's own.

    A call returns once the order is in the ledger. Repeating an order changes nothing: `Done.changed` is then false.
    All raise `NotFound`, `Rejected` (the job has ended, or a text is too long), `NotPermitted`, `NoScheduler`,
    `Unreachable`.
    """

    def __init__(self, client: Connected) -> None:
        self._client = client

    async def hold(self, job: str | None = None, *, why: str = "", tenant: str | None = None) -> Done:
        """Place nothing that waits of a job, or without a job of the tenant's whole queue; what runs goes on."""
        return await self._act("hold", tenant=self._tenant(tenant), job=job, why=why)

    async def release(self, job: str | None = None, *, why: str = "", tenant: str | None = None) -> Done:
        """Undo `hold` of a job, or without a job of the tenant's queue; jobs that are held one by one stay so."""
        return await self._act("release", tenant=self._tenant(tenant), job=job, why=why)

    async def release_worker(self, worker: str, *, slots: Sequence[int] | None = None, why: str = "") -> Done:
        """Put a worker's devices back to use that are in quarantine or unwell, on an operator's word.

        `slots` are positions in the worker's pool; None means all of them. `Done.slots` are those that were changed.
        """
        return await self._act("release", worker=worker, slots=None if slots is None else list(slots), why=why)

    async def requeue(self, job: str, *, why: str = "", tenant: str | None = None) -> Done:
        """End a job's replicas that run or are placed; they wait for a new attempt, which costs no retry."""
        return await self._act("requeue", tenant=self._tenant(tenant), job=job, why=why)

    async def freeze(self, job: str, *, why: str = "", tenant: str | None = None) -> Done:
        """Have the workers freeze what runs of a job: it keeps its GPUs, and their memory is in its hosts' RAM.

        This returns once they are asked; the job is FROZEN once they have reported.
        """
        return await self._act("freeze", tenant=self._tenant(tenant), job=job, why=why)

    async def resume(self, job: str, *, why: str = "", tenant: str | None = None) -> Done:
        """Undo `freeze`: the job is RUNNING again once its workers have reported."""
        return await self._act("resume", tenant=self._tenant(tenant), job=job, why=why)

    async def priority(self, job: str, priority: int, *, why: str = "", tenant: str | None = None) -> Done:
        """Give a job a priority 0..100 in place of its request's."""
        return await self._act("priority", tenant=self._tenant(tenant), job=job, priority=priority, why=why)

    async def resize(
        self,
        job: str,
        *,
        memory_mib: int | None = None,
        compute_percent: int | None = None,
        why: str = "",
        tenant: str | None = None,
    ) -> Done:
        """Give a job another part of each shared GPU that it has, and of those that it gets later.

        None leaves it as it is. `Done.resized` says how its running attempts take it. Raises `Rejected` where the other
        sharers leave no room, and where a worker cannot change what an attempt has.
        """
        part = {"memory_mib": memory_mib, "compute_percent": compute_percent}
        return await self._act("resize", tenant=self._tenant(tenant), job=job, why=why, **part)

    async def limit(
        self, *, gpus: int | None = None, jobs: int | None = None, why: str = "", tenant: str | None = None
    ) -> Done:
        """Limit how many GPUs a tenant may lease at once, and how many jobs it may have that are not over.

        0 means no limit, None leaves it as it is. What already exceeds a new limit goes on.
        """
        return await self._act("limit", tenant=self._tenant(tenant), gpus=gpus, jobs=jobs, why=why)

    async def feature_level(self, level: int, *, schedulers: int = 1, why: str = "") -> Done:
        """The ledger's feature level, once every scheduler that is heard knows it, and at least so many are heard."""
        return await self._act("feature-level", level=level, schedulers=schedulers, why=why)

    async def share(
        self, *, weight: int | None = None, gpus: int | None = None, why: str = "", tenant: str | None = None
    ) -> Done:
        """Set a tenant's weight in the fair share, and how many GPUs it is guaranteed.

        0 means none, None leaves it as it is. Others may borrow guaranteed GPUs while they are idle.
        """
        return await self._act("share", tenant=self._tenant(tenant), weight=weight, gpus=gpus, why=why)

    async def tenants(self) -> list[TenantRow]:
        """Tenants with jobs, leases, holds, limits or shares; at most 1,000, those with most GPUs first."""
        answer = await self._client.operate("tenants")
        return msgspec.convert(answer.data["tenants"], list[TenantRow])

    async def dead_letters(self, *, tenant: str | None = None) -> AsyncIterator[dict[str, Any]]:
        """Queued requests that were refused, oldest first, of one tenant or of all; `sequence` is a letter's number."""
        after = 0
        while True:
            data = await self._letters(DlqAct(act="list", tenant=tenant, after=after))
            for row in data["letters"]:
                yield row
            after = data["next"]
            if not after:
                return

    async def dead_letter(self, sequence: int) -> dict[str, Any]:
        """One dead letter, with `problem` and `body` (and `data`, base64, if it is not text). Raises `NotFound`."""
        return await self._letters(DlqAct(act="show", sequence=sequence))

    async def resend(self, sequence: int, *, body: dict[str, Any] | None = None, why: str = "") -> dict[str, Any]:
        """Submit it again, or `body` in its place, for its tenant and under its job id; the letter is then gone.

        Raises `Rejected` if it is refused again; the letter then stays.
        """
        return await self._letters(DlqAct(act="resend", sequence=sequence, body=body, by=who(), why=why))

    async def drop(self, sequence: int, *, why: str = "") -> dict[str, Any]:
        """Delete it for good. Raises `NotFound`."""
        return await self._letters(DlqAct(act="drop", sequence=sequence, by=who(), why=why))

    async def _letters(self, act: DlqAct) -> dict[str, Any]:
        data: dict[str, Any] = (await self._client.operate("dlq", act)).data
        return data

    def _tenant(self, tenant: str | None) -> str:
        return self._client.tenant if tenant is None else tenant

    async def _act(self, verb: str, **arguments: str | int | list[int] | None) -> Done:
        given = {name: value for name, value in arguments.items() if value is not None}
        try:
            act = act_of(verb, {**given, "by": who()})
        except Refused as refused:
            raise Rejected(refused.problem) from None
        return await self._client.act(verb, act)
