"""Send the files of a job into the tenant's bucket, unless the bucket has them already."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from moorage.bus.errors import PermissionRefused
from moorage.bus.jetstream import JetStream
from moorage.bus.object_store import FILES_KEEP_S, ObjectStore, files_store, schedules_store
from moorage.client.asking import NotNow
from moorage.client.fields import Paths
from moorage.client.packing import Packed, pack
from moorage.schemas.errors import Problem
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
    """Pack and send files and folders. `on_sent` gets the archive and the number of compressed bytes stored so far.

    Those `of_schedule` stay until they are removed, the others for some days.

    Raises `Rejected` for files that cannot be packed, and what `Connected.again` raises.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    packed = await asyncio.to_thread(pack, given)
    with packed.file:
        bucket = bucket_of_schedules(client) if of_schedule else bucket_of(client)
        found = await client.again(lambda: bucket.find(packed.address))
        if found is not None and (of_schedule or time.time() - found.stored_s < AGAIN_AFTER_S):
            return Sent(packed.address, False, packed.warnings)

        def told(size: int) -> None:
            if on_sent is not None:
                on_sent(packed, size)

        headers = {"Content-Type": "application/gzip", BROUGHT: _brought(packed)}

        async def put() -> str:
            try:
                return await bucket.put(packed.address, compressed(packed.file), headers, told)
            except PermissionRefused as error:
                if error.operation != "publish" or not _MAKES.search(error.subject):
                    raise
                raise NotNow(_not_there(error.problem, client, of_schedule=of_schedule)) from None

        await client.again(put)
        return Sent(packed.address, True, packed.warnings)


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
