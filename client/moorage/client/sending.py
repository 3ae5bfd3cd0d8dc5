"""Send the files of a job into the tenant's bucket, unless the bucket has them already."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from moorage.bus.errors import PermissionRefused
from moorage.bus.jetstream import JetStream
from moorage.bus.object_store import FILES_KEEP_S, ObjectInfo, ObjectStore, files_store, schedules_store
from moorage.client.asking import NotNow
from moorage.client.fields import Paths
from moorage.client.packing import Packed, pack
from moorage.schemas.errors import Problem
from moorage.system.archive_parts import PARTS_HEADER, Part, Slice, encode_parts, part_object
from moorage.system.archives import compressed

if TYPE_CHECKING:
    from moorage.client.connected import Connected

#: files older than this are sent again, so that they do not expire while their job waits
AGAIN_AFTER_S: Final = FILES_KEEP_S / 2
#: header of an archive: the names at its top, as JSON in ASCII, since a name may have any bytes
BROUGHT: Final = "Moorage-Files"
#: how many names it has, and of how many characters each
TOPS_MAX: Final = 8
TOP_CHARS_MAX: Final = 64
#: what a user is refused where its bucket is not there, in lower case as the server says it
_MAKES: Final = re.compile(r"\.stream\.(info|create)\.obj_")
#: parts of an archive that are looked for at once
_FINDS_AT_ONCE: Final = 32
OnSent = Callable[[Packed, int], None]


class Sent(NamedTuple):
    """The `address` of files, for a request's `files`. `is_new` says whether anything was sent. `warnings` are about
    files that were sent but surely do not work."""

    address: str
    is_new: bool
    warnings: tuple[str, ...] = ()


def bucket_of(client: Connected) -> ObjectStore:
    """Return the bucket for the files of jobs of the client's tenant."""
    context = client.context
    jetstream = JetStream(client.link, "$JS.API" if context is None else context.api_prefix)
    return files_store(jetstream, client.subjects, client.tenant)


def bucket_of_schedules(client: Connected) -> ObjectStore:
    """Return the bucket for the files of schedules of the client's tenant."""
    context = client.context
    jetstream = JetStream(client.link, "$JS.API" if context is None else context.api_prefix)
    return schedules_store(jetstream, client.subjects, client.tenant)


async def send(client: Connected, paths: Paths, on_sent: OnSent | None = None, *, of_schedule: bool = False) -> Sent:
    """Pack and send files and folders. `on_sent` gets the archive and the number of bytes stored so far.

    A large archive is sent in parts, and of these what the bucket lacks.

    Those `of_schedule` stay until they are removed, the others for some days.

    Raises `Rejected` for files that cannot be packed, and what `Connected.again` raises.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    packed = await asyncio.to_thread(pack, given)
    with packed.file:
        bucket = bucket_of_schedules(client) if of_schedule else bucket_of(client)
        found = await client.again(lambda: bucket.find(packed.address))
        has_parts = len(packed.parts) > 1 and not of_schedule
        is_there = found is not None and (of_schedule or is_fresh(found, has_parts=has_parts))
        if is_there and not has_parts:
            return Sent(packed.address, False, packed.warnings)
        sent = 0

        def told(size: int) -> None:
            if on_sent is not None:
                on_sent(packed, sent + size)

        async def put(name: str, pieces: Callable[[], Iterable[bytes]], headers: Mapping[str, str]) -> str:
            try:
                return await bucket.put(name, pieces(), headers, told)
            except PermissionRefused as error:
                if error.operation != "publish" or not _MAKES.search(error.subject):
                    raise
                raise NotNow(_not_there(error.problem, client, of_schedule=of_schedule)) from None

        headers, content = {"Content-Type": "application/gzip", BROUGHT: _brought(packed)}, packed.file
        if has_parts:
            for at, part in (lacking := await _lacking(client, bucket, packed)):
                slice_ = Slice(content, at, part.size)
                of_part = partial(put, part_object(part.digest), partial(compressed, slice_), {})
                await client.again(of_part)
                sent += part.size
            if is_there and not lacking:
                return Sent(packed.address, False, packed.warnings)
            listed = {
                "Content-Type": "application/json",
                BROUGHT: _brought(packed),
                PARTS_HEADER: str(len(packed.parts)),
            }
            await client.again(partial(put, packed.address, lambda: [encode_parts(packed.parts)], listed))
        else:
            await client.again(partial(put, packed.address, partial(compressed, content), headers))
        return Sent(packed.address, True, packed.warnings)


def is_fresh(found: ObjectInfo, *, has_parts: bool) -> bool:
    """Return whether files need not be sent again: they stay long enough for a job that waits. What has parts is sent
    again after half the time, as are the parts, which are older than it."""
    return time.time() - found.stored_s < AGAIN_AFTER_S / (2 if has_parts else 1)


async def _lacking(client: Connected, bucket: ObjectStore, packed: Packed) -> list[tuple[int, Part]]:
    """Return the parts of an archive that the bucket lacks or will not have for long, each with its place."""
    places: dict[Part, int] = {}
    at = 0
    for part in packed.parts:
        places.setdefault(part, at)
        at += part.size
    few = asyncio.Semaphore(_FINDS_AT_ONCE)

    async def lacks(part: Part) -> bool:
        async with few:
            info = await client.again(partial(bucket.find, part_object(part.digest)))
        return info is None or not is_fresh(info, has_parts=True)

    are_lacking = await asyncio.gather(*map(lacks, places))
    return [(at, part) for (part, at), is_lacking in zip(places.items(), are_lacking, strict=True) if is_lacking]


def _not_there(refused: Problem, client: Connected, *, of_schedule: bool) -> Problem:
    """Return what a tenant hears that may write to its bucket, but not create it."""
    subjects, tenant = client.subjects, client.tenant
    name = subjects.schedules_bucket(tenant) if of_schedule else subjects.files_bucket(tenant)
    return msgspec.structs.replace(
        refused,
        message=f"the bucket {name} is not there yet, and this user may not make it",
        next="a new tenant has it ten seconds after the reload, on a cluster after half a minute; if this lasts, ask an"
        " operator: the scheduler's log says why it is not made, most often for want of room on the nats-server's disk",
    )


def _brought(packed: Packed) -> str:
    names = [os.fsencode(name).decode(errors="replace")[-TOP_CHARS_MAX:] for name in packed.tops[:TOPS_MAX]]
    return json.dumps({"files": packed.files, "tops": len(packed.tops), "names": names})
