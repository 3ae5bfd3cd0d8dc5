"""Removes from the buckets of checkpoints what no object names: a worker that died has left it, or a full bucket.

Whatever is stored is named within an hour, see `SET_S_MAX` and `STORE_S_MAX` of the worker. What is read first are the
contents, and then the names, so that no content is missed that got its name meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Final

from moorage.bus.checkpoint_manifest import read_manifest
from moorage.bus.connection import Connection
from moorage.bus.errors import BusError
from moorage.bus.jetstream import JetStream, wall_seconds
from moorage.bus.object_store import ObjectInfo, checkpoints_store
from moorage.scheduler.durable.queue_streams import user_info
from moorage.schemas.handler import RANKS_HEADER
from moorage.schemas.passed_on import CHECKPOINT
from moorage.schemas.subjects import Subjects

#: between two sweeps of all buckets, on average
SWEEP_S: Final = 900.0
#: what has no name stays for so long, by the server's clock
UNNAMED_S: Final = 3_600.0
#: contents that one sweep of a bucket removes
REMOVED_MAX: Final = 10_000

log = logging.getLogger("moorage.scheduler")


async def keep_sweeping(world: Connection, subjects: Subjects) -> None:
    """Sweep the buckets of all tenants from time to time, until this is cancelled."""
    while True:
        await asyncio.sleep(SWEEP_S * random.uniform(0.5, 1.5))  # every scheduler does
        try:
            for tenant in sorted((await user_info(world)).own_buckets(subjects)):
                await drop_of_gangs(JetStream(world), subjects, tenant)
                if count := await sweep(JetStream(world), subjects, tenant):
                    log.info("removed %d parts of checkpoints of tenant %s that no checkpoint has", count, tenant)
        except BusError as error:  # the bucket is not there yet, or its server is away
            log.debug("checkpoints are not swept now: %s", error)


async def drop_of_gangs(jetstream: JetStream, subjects: Subjects, tenant: str) -> int:
    """Remove the names of all checkpoints of gangs whose ranks have all ended well in one attempt; `sweep` removes
    their contents. Return how many. Raises BusError."""
    store = checkpoints_store(jetstream, subjects, tenant)
    of_job: dict[str, list[ObjectInfo]] = {}
    over: dict[tuple[str, str], int] = {}
    for name, info in await store.stored():
        words = name.removeprefix(CHECKPOINT).split(".")
        if len(words) < 4 or not name.startswith(CHECKPOINT):
            continue
        job, attempt = ".".join(words[:2]), words[3]
        of_job.setdefault(job, []).append(info)
        ranks = info.headers.get(RANKS_HEADER, [""])[0]
        if words[4:] == ["over"] and ranks.isascii() and ranks.isdigit():
            over[job, attempt] = over.get((job, attempt), int(ranks)) - 1
    done = {job for (job, _), left in over.items() if not left}
    doomed = [info for job in done for info in of_job[job]]
    for info in doomed:
        await store.forget(store.subject(info.nuid))
    return len(doomed)


async def sweep(jetstream: JetStream, subjects: Subjects, tenant: str, unnamed_s: float = UNNAMED_S) -> int:
    """Remove the contents of a tenant's checkpoints that nothing has named for so long; return how many.

    Raises BusError.
    """
    bucket = subjects.checkpoints_bucket(tenant)
    stream, store, head = f"OBJ_{bucket}", checkpoints_store(jetstream, subjects, tenant), f"$O.{bucket}.C."
    info = await jetstream.stream_info(stream, f"{head}*")
    named = set[str]()
    for name, described in await store.stored():
        named.add(described.nuid)
        manifest = await read_manifest(store, name, described) if await store.find(name) is not None else None
        named |= set() if manifest is None else manifest.contents.keys()
    removed = 0
    for subject in info.subjects:
        if subject.removeprefix(head) in named or removed >= REMOVED_MAX:
            continue
        last = await jetstream.get_last(stream, subject)
        if last is not None and wall_seconds(info.now) - wall_seconds(last.stored_at) > unnamed_s:
            await jetstream.purge(stream, subject=subject)
            removed += 1
    return removed
