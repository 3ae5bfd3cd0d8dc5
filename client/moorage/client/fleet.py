"""The workers of a fleet: what an operator sees of them, and drain and cordon. `AsyncClient.fleet`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from moorage.client.asking import decode_act
from moorage.client.durations import Duration, seconds
from moorage.client.errors import NotFound, Rejected
from moorage.client.login import who
from moorage.schemas.answers.operators import PastAnswer
from moorage.schemas.codec import Decoder, encode
from moorage.schemas.frames import FleetEvent, FleetFrame
from moorage.schemas.subjects import FLEET

if TYPE_CHECKING:
    from moorage.client.answers import Audit, FleetInfo
    from moorage.client.connected import Connected
    from moorage.schemas.operate import Done

#: the newest frames that wait for a slow reader of `Fleet.frames`
FLEET_FRAMES_MAX: Final = 16
#: states of a worker that is not there
AWAY: Final = ("left", "lost")

_decode_frame: Final[Decoder[FleetFrame]] = Decoder(FleetFrame)
_decode_event: Final[Decoder[FleetEvent]] = Decoder(FleetEvent)


class AsyncFleet:
    """The workers, asked through an open client.

    All raise `NotPermitted`, `NoScheduler`, `Unreachable`.
    """

    def __init__(self, client: Connected) -> None:
        self._client = client

    async def show(self) -> FleetInfo:
        """Return the fleet: `workers` in the order of their names, `fits_now`, and counts of jobs.

        `fits_now` has for each model its GPUs, how many are free, and the largest exclusive request that would start
        now on one host.
        """
        from moorage.client.answers import FleetInfo
        from moorage.client.reading import as_struct

        return as_struct(FleetInfo, (await self._client.operate("fleet")).data)

    async def audit(self) -> Audit:
        """Compare the ledger with each worker's last renewal, and each worker's devices with its leases, once.

        A difference counts as drift only if two audits, several renewals apart, both show it. Workers have 2.5 s to
        check their devices.
        """
        from moorage.client.answers import Audit

        return msgspec.convert((await self._client.operate("audit")).data, Audit)

    async def drain(
        self,
        worker: str,
        *,
        within: Duration | None = None,
        begin: Duration | None = None,
        last: Duration | None = None,
        why: str = "",
    ) -> Done:
        """Place no new jobs on a worker; the running ones go on. Raises `NotFound`, `Rejected`.

        With `within`, the running jobs get their checkpoint signal, are ended within that time, and start again
        elsewhere. `begin` is a time in the future, such as `22:00` or `2h`, by which the worker has to be empty. `last`
        is the duration after which the worker opens again on its own. The drain is in the ledger; `uncordon` undoes it.
        `changed` of the answer is false if the worker was draining already, neither drain has times, and no other
        reason is given.
        """
        from moorage.client.moments import drain_fields

        arguments = {"worker": worker, "by": who(), **drain_fields(within, begin, last, why)}
        return await self._client._request(self._client._admin_subject("drain"), encode(arguments), decode_act)

    async def drain_idle(
        self, idle: Duration, *, pool: str | None = None, keep: int = 0, why: str = "idle"
    ) -> list[str]:
        """Drain the hosts that have had nothing to do for so long, and return the ids of those that may be ended.

        On these nothing runs, and nothing begins. They are of this `pool`, their label `pool`; None is all hosts. At
        least `keep` hosts of it stay open. A host that an earlier call with the same `why` has drained is returned
        again while it is there and idle; one that was drained for another reason is not. At most 200 are looked at.
        """
        from moorage.schemas.answers.operators import TenantsAnswer

        found = msgspec.convert((await self._client.operate("tenants")).data, TenantsAnswer).demand.idle
        long_idle = [row.worker for row in found if row.idle_ms >= seconds(idle) * 1000]
        rows = {row.worker: row for row in (await self.show()).workers if pool in (None, row.labels.get("pool"))}
        ended = [name for name in long_idle if name in rows and (rows[name].flag, rows[name].why) == ("draining", why)]
        spare = sum(row.flag == "open" and row.state not in AWAY for row in rows.values()) - keep
        for name in long_idle:
            if spare <= 0 or name not in rows or rows[name].flag != "open":
                continue
            arguments = {"worker": name, "by": who(), "why": why, "if_idle": True}
            with contextlib.suppress(NotFound, Rejected):  # something has begun there meanwhile
                await self._client._request(self._client._admin_subject("drain"), encode(arguments), decode_act)
                ended.append(name)
                spare -= 1
        return ended

    async def cordon(self, worker: str, *, gpus: Sequence[int] | None = None, why: str = "") -> Done:
        """Place no new jobs on a worker; the running ones go on, and its host may still borrow. Raises `NotFound`.

        With `gpus`, by their places from 0, on these of its GPUs alone.

        `changed` of the answer is false if it was cordoned already and no other reason is given.
        """
        return await self._flag("cordon", worker, why, gpus)

    async def uncordon(self, worker: str, *, gpus: Sequence[int] | None = None, why: str = "") -> Done:
        """Undo cordon or drain; with `gpus`, the cordon of these GPUs. Raises `NotFound`.

        `changed` of the answer is false if the worker was open.
        """
        return await self._flag("uncordon", worker, why, gpus)

    async def forget(self, worker: str, *, why: str = "") -> Done:
        """List a worker that has left or was lost no more. Raises `NotFound`, and `Rejected` while it is there, or
        while jobs wait for it. It is known again once it joins."""
        return await self._flag("forget", worker, why)

    async def _flag(self, verb: str, worker: str, why: str, gpus: Sequence[int] | None = None) -> Done:
        arguments: dict[str, Any] = {"worker": worker, "by": who(), "why": why}
        if gpus is not None:
            arguments["slots"] = list(gpus)
        return await self._client._request(self._client._admin_subject(verb), encode(arguments), decode_act)

    async def events(self) -> AsyncIterator[FleetEvent]:
        """Yield what happens to the fleet from now on, without end: joins, losses, drains, GPUs out, takeovers.

        Raises `NotPermitted` unless this is an operator.
        """
        client = self._client
        subject = client.subjects.events(FLEET)
        async with contextlib.aclosing(client._histories.frames(subject, _decode_event, FLEET_FRAMES_MAX)) as events:
            async for event in events:
                yield event

    async def past(self, since: Duration) -> list[FleetEvent]:
        """Return what happened to the fleet since then, at most the newest 1,000 events of the newest 10,000.

        Raises `NotPermitted` unless this is an operator.
        """
        answer = await self._client.operate("acts", {"events": True, "since_s": seconds(since)})
        return msgspec.convert(answer.data, PastAnswer).events

    async def frames(self) -> AsyncIterator[FleetFrame]:
        """Yield the leader's frames of the fleet, two a second, without end. A slow reader gets only the newest 16."""
        client = self._client
        async with contextlib.aclosing(
            client._histories.frames(client.subjects.fleet_frame, _decode_frame, FLEET_FRAMES_MAX)
        ) as frames:
            async for frame in frames:
                yield frame
