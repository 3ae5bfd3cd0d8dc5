"""What an operator does to jobs and tenants: `AsyncClient.admin`. Every act is recorded with who did it and why."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from moorage.client.errors import Rejected
from moorage.client.values import who
from moorage.schemas.errors import Refused
from moorage.schemas.operate import DlqAct, Done, TenantRow, act_of

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient


class Admin:
    """The acts on jobs and tenants, over an open client; `tenant` is the client's own unless named.

    Each is answered once it is in the ledger. Sent again it changes nothing: `Done.changed` is then false. All raise
    `NotFound`, `Rejected` (a job that is over, text over its bound), `NotPermitted`, `NoScheduler`, `Unreachable`.
    """

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def hold(self, job: str | None = None, *, why: str = "", tenant: str | None = None) -> Done:
        """Nothing that waits of a job, or without one of the tenant's whole queue, is placed; what runs goes on."""
        return await self._act("hold", tenant=self._tenant(tenant), job=job, why=why)

    async def release(self, job: str | None = None, *, why: str = "", tenant: str | None = None) -> Done:
        """Undo `hold`: of a job, or without one of the tenant's queue. A job that is held by itself stays held."""
        return await self._act("release", tenant=self._tenant(tenant), job=job, why=why)

    async def release_worker(self, worker: str, *, slots: Sequence[int] | None = None, why: str = "") -> Done:
        """An operator's word that a worker's devices are well: those in quarantine, or unwell, are open again.

        `slots` are positions in the worker's pool; None is every one. `Done.slots` are those that it was news for.
        """
        return await self._act("release", worker=worker, slots=None if slots is None else list(slots), why=why)

    async def requeue(self, job: str, *, why: str = "", tenant: str | None = None) -> Done:
        """What runs or is placed of a job ends and waits for a new attempt, which counts as no retry."""
        return await self._act("requeue", tenant=self._tenant(tenant), job=job, why=why)

    async def priority(self, job: str, priority: int, *, why: str = "", tenant: str | None = None) -> Done:
        """Give a job a priority 0..100 in place of its request's."""
        return await self._act("priority", tenant=self._tenant(tenant), job=job, priority=priority, why=why)

    async def limit(
        self, *, gpus: int | None = None, jobs: int | None = None, why: str = "", tenant: str | None = None
    ) -> Done:
        """At most so many GPUs leased to a tenant at once, and so many jobs of it that are not over.

        0 is no limit, None leaves it as it is. What is over a new limit already goes on.
        """
        return await self._act("limit", tenant=self._tenant(tenant), gpus=gpus, jobs=jobs, why=why)

    async def feature_level(self, level: int, *, schedulers: int = 1, why: str = "") -> Done:
        """The ledger's feature level, once every scheduler that is heard knows it, and at least so many are heard."""
        return await self._act("feature-level", level=level, schedulers=schedulers, why=why)

    async def share(
        self, *, weight: int | None = None, gpus: int | None = None, why: str = "", tenant: str | None = None
    ) -> Done:
        """A tenant's weight in the fair share, and so many GPUs that are its own whenever it wants them.

        0 is none, None leaves it as it is. Others borrow what is idle of the guaranteed ones.
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
        """One of them, with `problem` and `body` (and `data`, base64, where that is no text). Raises `NotFound`."""
        return await self._letters(DlqAct(act="show", sequence=sequence))

    async def resend(self, sequence: int, *, body: dict[str, Any] | None = None, why: str = "") -> dict[str, Any]:
        """Hand it in again, or `body` in its place, for its tenant under its job id; the letter is then gone.

        Raises `Rejected` where it is refused again: it stays.
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
