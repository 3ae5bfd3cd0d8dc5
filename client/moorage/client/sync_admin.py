"""The twin of `Admin` without await: `Client.admin`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from moorage.schemas.operate import Done, TenantRow

if TYPE_CHECKING:
    from moorage.client.admin import Admin
    from moorage.client.loop_thread import LoopThread


class SyncAdmin:
    """The acts on jobs and tenants, as `Admin` has them."""

    def __init__(self, thread: LoopThread, twin: Admin) -> None:
        self._thread = thread
        self._twin = twin

    def hold(self, job: str | None = None, *, why: str = "", tenant: str | None = None) -> Done:
        """As `Admin.hold`."""
        return self._thread.call(self._twin.hold(job, why=why, tenant=tenant))

    def release(self, job: str | None = None, *, why: str = "", tenant: str | None = None) -> Done:
        """As `Admin.release`."""
        return self._thread.call(self._twin.release(job, why=why, tenant=tenant))

    def release_worker(self, worker: str, *, slots: Sequence[int] | None = None, why: str = "") -> Done:
        """As `Admin.release_worker`."""
        return self._thread.call(self._twin.release_worker(worker, slots=slots, why=why))

    def requeue(self, job: str, *, why: str = "", tenant: str | None = None) -> Done:
        """As `Admin.requeue`."""
        return self._thread.call(self._twin.requeue(job, why=why, tenant=tenant))

    def priority(self, job: str, priority: int, *, why: str = "", tenant: str | None = None) -> Done:
        """As `Admin.priority`."""
        return self._thread.call(self._twin.priority(job, priority, why=why, tenant=tenant))

    def limit(
        self, *, gpus: int | None = None, jobs: int | None = None, why: str = "", tenant: str | None = None
    ) -> Done:
        """As `Admin.limit`."""
        return self._thread.call(self._twin.limit(gpus=gpus, jobs=jobs, why=why, tenant=tenant))

    def feature_level(self, level: int, *, schedulers: int = 1, why: str = "") -> Done:
        """As `Admin.feature_level`."""
        return self._thread.call(self._twin.feature_level(level, schedulers=schedulers, why=why))

    def share(
        self, *, weight: int | None = None, gpus: int | None = None, why: str = "", tenant: str | None = None
    ) -> Done:
        """As `Admin.share`."""
        return self._thread.call(self._twin.share(weight=weight, gpus=gpus, why=why, tenant=tenant))

    def dead_letters(self, *, tenant: str | None = None) -> Iterator[dict[str, Any]]:
        """As `Admin.dead_letters`."""
        return self._thread.iterate(self._twin.dead_letters(tenant=tenant))

    def dead_letter(self, sequence: int) -> dict[str, Any]:
        """As `Admin.dead_letter`."""
        return self._thread.call(self._twin.dead_letter(sequence))

    def resend(self, sequence: int, *, body: dict[str, Any] | None = None, why: str = "") -> dict[str, Any]:
        """As `Admin.resend`."""
        return self._thread.call(self._twin.resend(sequence, body=body, why=why))

    def drop(self, sequence: int, *, why: str = "") -> dict[str, Any]:
        """As `Admin.drop`."""
        return self._thread.call(self._twin.drop(sequence, why=why))

    def tenants(self) -> list[TenantRow]:
        """As `Admin.tenants`."""
        return self._thread.call(self._twin.tenants())
