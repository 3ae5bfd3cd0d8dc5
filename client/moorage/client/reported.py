"""The rows that jobs report of themselves while they run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from moorage.client.errors import NotFound, Rejected
from moorage.client.sending import bucket_of
from moorage.schemas.frames.reported import TAIL_BYTES, ReportsPage, Values
from moorage.schemas.handler import reported_object
from moorage.schemas.job import RUNNING
from moorage.schemas.unreadable import UNREADABLE

if TYPE_CHECKING:
    from moorage.client.connected import Connected
    from moorage.schemas.answers.jobs import ReplicaInfo

#: stored rows take no more, as JSON of what was written
_STORED_MAX: Final = 2 * TAIL_BYTES
#: questions for rows at once
_AT_ONCE: Final = 8
_decode = msgspec.json.Decoder(list[Values]).decode


async def rows_of(client: Connected, job: str, row: ReplicaInfo) -> list[Values]:
    """Return the last rows that a replica has reported, the oldest first: of its newest attempt, running or ended.

    Raises what `Connected.again` raises.
    """
    if row.state == RUNNING:
        try:
            page = await client.read("reports", {"job": job, "replica": row.replica})
            return msgspec.convert(page, ReportsPage).rows
        except (Rejected, NotFound):  # it has ended meanwhile
            pass
    if not row.fence:
        return []
    store = bucket_of(client)

    async def read() -> bytes:
        info = await store.find(reported_object(job, row.replica, row.fence))
        if info is None or info.size > _STORED_MAX:
            return b"[]"
        return b"".join([piece async for piece in store.get(info)])

    try:
        return _decode(await client.again(read))
    except UNREADABLE:  # each client of the tenant can write an object
        return []


async def all_rows(client: Connected, job: str, rows: Sequence[ReplicaInfo]) -> list[dict[str, Any]]:
    """Return the rows of several replicas, each with the number of its replica as its first column."""
    at_once = asyncio.Semaphore(_AT_ONCE)

    async def one(row: ReplicaInfo) -> list[Values]:
        async with at_once:
            return await rows_of(client, job, row)

    found = await asyncio.gather(*map(one, rows))
    return [{"replica": row.replica, **values} for row, some in zip(rows, found, strict=True) for values in some]


def newest(rows: Sequence[Values]) -> Values:
    """Return the newest value of each name."""
    return {name: value for row in rows for name, value in row.items()}
