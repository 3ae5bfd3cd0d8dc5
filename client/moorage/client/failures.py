"""Which replicas of a job failed: the item of each, its exit code, and the last line that it wrote to stderr."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Mapping
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import msgspec

from moorage.client.errors import ClientError, FailedReplica
from moorage.client.output import read_page
from moorage.client.replicas import ASKED_MAX
from moorage.client.stored_file import stored_file
from moorage.schemas.errors import is_as_asked, rank_that_ended
from moorage.schemas.items import ItemsFile
from moorage.schemas.job import EXPIRED, FAILED, REJECTED, TIMED_OUT
from moorage.schemas.ranges import numbers_in, parse_told, ranges_of
from moorage.schemas.unreadable import UNREADABLE
from moorage.system.archives import FILES_BYTES_MAX
from moorage.system.item_files import items_in

if TYPE_CHECKING:
    from moorage.client.answers import JobInfo, ReplicaInfo
    from moorage.client.connected import Connected

#: most failed replicas of one answer
NAMED_MAX: Final = 100
#: a replica that was cancelled did not fail itself
FAILURES: Final = (FAILED, TIMED_OUT, EXPIRED, REJECTED)
#: workers that are asked for a last line at once, and the bytes of stderr in which it is looked for
ASKED_AT_ONCE: Final = 16
TAIL_BYTES: Final = 4096


async def failed_numbers(client: Connected, shown: JobInfo, most: int = ASKED_MAX) -> list[int]:
    """Return the numbers of a job's failed replicas, the first `most`."""
    return [row.replica for row in await _failed_rows(client, shown, most)]


async def failed_replicas(
    client: Connected,
    shown: JobInfo,
    most: int = NAMED_MAX,
    stored_max: int | None = None,
    *,
    may_read: bool = False,
) -> list[FailedReplica]:
    """Return a job's failed replicas, the first `most`, with their items and last lines, as far as these are kept.

    What another tenant's job wrote or brought is that tenant's: only items in the request are told of it, and last
    lines if this key `may_read` its output. Items are not looked for among files of the job that take more than
    `stored_max` bytes in the bucket.
    """
    rows = await _failed_rows(client, shown, most)
    numbers = [row.replica for row in rows]
    is_own = shown.tenant == client.tenant
    of_request = isinstance(shown.run.get("items"), list)
    items = await items_of(client, shown.run, numbers, stored_max) if rows and (is_own or of_request) else {}
    at_once = asyncio.Semaphore(ASKED_AT_ONCE)

    async def one(row: ReplicaInfo) -> FailedReplica:
        worker = row.ran_on or row.worker
        if is_as_asked(row.why) and (rank := rank_that_ended(shown.why)) is not None:
            said = f"ended with replica {rank}"
            return FailedReplica(row.replica, row.state, row.code, said, items.get(row.replica), worker=worker)
        async with at_once:
            tried = row.attempt and (is_own or may_read)
            last = await _last_line(client, shown, row.replica, row.attempt) if tried else ""
        return FailedReplica(row.replica, row.state, row.code, row.why, items.get(row.replica), last, worker)

    return list(await asyncio.gather(*map(one, rows)))


async def _failed_rows(client: Connected, shown: JobInfo, most: int) -> list[ReplicaInfo]:
    if shown.replicas is None or not shown.replicas.ended:  # of one replica, or no longer in the scheduler's memory
        numbers = list(islice(numbers_in(shown.numbers), ASKED_MAX))
    else:
        told = shown.replicas.ended
        ended = [parse_told(told[state])[0] for state in FAILURES if state in told]
        numbers = sorted(number for ranges in ended for number in islice(numbers_in(ranges), most))[:most]
    if not numbers:
        return []
    rows = (await client.show(shown.job, ranges_of(numbers), shown.tenant)).replica_states
    return [row for row in rows if row.state in FAILURES][:most]


async def items_of(
    client: Connected, run: Mapping[str, Any], numbers: list[int], stored_max: int | None
) -> dict[int, Any]:
    """Return the items with these numbers; {} if the job has none, or if their file cannot be had."""
    items = run.get("items")
    if isinstance(items, Mapping):
        file, address = msgspec.convert(items, ItemsFile), run.get("files")
        content = await stored_file(client, address, file.file, FILES_BYTES_MAX, stored_max) if address else None
        try:
            found = items_in(io.BytesIO(content or b""), file.format)
            every = [item.value for _, item in islice(found, max(numbers) + 1)]
        except UNREADABLE:
            return {}
    else:
        every = list(items or ())
    return {number: every[number] for number in numbers if number < len(every)}


async def _last_line(client: Connected, shown: JobInfo, replica: int, attempt: int) -> str:
    """Return the last line of an attempt's stderr that has a letter or digit, and is no rule of `=` and `-` alone.

    It is "" if there is none, or its worker is away.
    """
    try:
        read = partial(client.read, tenant=shown.tenant or None)
        page = await read_page(read, shown.job, replica, attempt, "err", -TAIL_BYTES, TAIL_BYTES)
    except ClientError:
        return ""
    text = page.text if page.data is None else page.data.decode(errors="replace")
    return next((line.strip() for line in reversed(text.splitlines()) if any(map(str.isalnum, line))), "")
