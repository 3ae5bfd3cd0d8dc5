"""The buckets of tenants that may not create them: for files, results, files of schedules, and checkpoints.

A worker or a submitter with that right could choose which subjects a bucket captures. So the leader makes them, with
sizes for which there is room with a quarter to spare, which is for later tenants, their queues and the ledger.

The servers of a cluster tell each other only from time to time what their streams reserve. Streams that are asked for
soon after one another all seem to have room, and a server that has promised too much makes none smaller, and none anew.
So there, each step waits for the next call: what else was made, the question about the room, and the buckets.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from moorage.bus.errors import ERR_NO_ROOM, BusError, JetStreamRefused, PermissionRefused
from moorage.bus.jetstream import JetStream
from moorage.bus.object_store import (
    BUCKET_BYTES_MIN,
    CHECKPOINTS_BUCKET_BYTES,
    FILES_BUCKET_BYTES,
    SCHEDULES_BUCKET_BYTES,
    ObjectStore,
    checkpoints_store,
    files_store,
    schedules_store,
)
from moorage.bus.results import RESULT_BYTES_DEFAULT, results_bucket
from moorage.scheduler.durable.queue_streams import info_of
from moorage.scheduler.pacing.reminders import Reminders
from moorage.schemas.answers.fleet import TenantBucketsRow
from moorage.schemas.roles import RIGHTS_ANEW
from moorage.schemas.subjects import Subjects

#: tenants that one line of the log names
NAMED_MAX: Final = 8
#: the size of each kind of bucket, where there is room
WANTED: Final[Mapping[str, int]] = {
    "files": FILES_BUCKET_BYTES,
    "results": RESULT_BYTES_DEFAULT,
    "schedules": SCHEDULES_BUCKET_BYTES,
    "checkpoints": CHECKPOINTS_BUCKET_BYTES,
}

log = logging.getLogger(__name__)

#: by kind, the size of a bucket in bytes
Sizes = Mapping[str, int]


def smaller(sizes: Sizes) -> Sizes | None:
    """Return the sizes with a quarter of the largest one; None if that were of no use."""
    largest = max(sizes, key=sizes.__getitem__)
    size = sizes[largest] // 4
    return {**sizes, largest: size} if size >= BUCKET_BYTES_MIN else None


def lacks_room(error: BusError) -> bool:
    """Return whether a stream was refused for its size, not because servers of a cluster are away."""
    return isinstance(error, JetStreamRefused) and error.err_code in ERR_NO_ROOM and not error.servers_missing


class TenantBuckets:
    """Makes the buckets. `try_room` has the servers make a stream of so many bytes and delete it, or raises."""

    def __init__(
        self, jetstream: JetStream, subjects: Subjects, replicas: int, try_room: Callable[[int], Awaitable[object]]
    ) -> None:
        self._js = jetstream
        self._subjects = subjects
        self._replicas = replicas
        self._try_room = try_room
        self._made = set[str]()  # tenants with all their buckets
        self._awaiting = frozenset[str]()  # those that the last call found without
        self._sizes: Sizes | None = None  # of the buckets of those, once the servers have said that there is room
        self._failing = dict[str, BusError]()  # by tenant: why a bucket could not be made, in the call that goes on
        self._failed = dict[str, BusError]()  # and in the last one
        self._told = Reminders()

    async def ensure(self, tenants: frozenset[str]) -> None:
        """Go on making the buckets of these tenants that do not exist; to be called every few seconds.

        An existing bucket is left as it is: an operator may have made it. What cannot be made now is logged, and tried
        again with the next call.
        """
        self._failing = {}
        if lacking := tenants - self._made:
            try:
                await self._go_on(lacking)
            except BusError as error:
                self._log_failing(lacking, error)
        self._failed = self._failing

    def figures(self) -> TenantBucketsRow | None:
        """Return for which tenants buckets could not be made, and why; None if there is none."""
        if not self._failed:
            return None
        error = next(iter(self._failed.values()))
        return TenantBucketsRow(tenants=sorted(self._failed), trouble=str(error), next=_remedy(error) or None)

    async def _go_on(self, tenants: frozenset[str]) -> None:
        missing = await self._missing(tenants)
        awaiting = frozenset(tenant for tenant, _, _ in missing)
        self._made |= tenants - awaiting - self._failing.keys()
        history = await info_of(self._js, self._subjects.history_stream)
        if not awaiting or history is None:  # the history has its room first
            return
        is_new, self._awaiting = not awaiting <= self._awaiting, awaiting
        if is_new:
            self._sizes = None
            if history.cluster:  # queues were made for them just now
                return
        if self._sizes is None:
            self._sizes = await self._find_sizes([kind for _, kind, _ in missing])
            if history.cluster:
                return
        await self._make(missing, self._sizes)

    async def _missing(self, tenants: frozenset[str]) -> list[tuple[str, str, ObjectStore]]:
        """Return the buckets that do not exist, with their tenant and kind."""
        js, subjects, replicas = self._js, self._subjects, self._replicas
        found = list[tuple[str, str, ObjectStore]]()
        for tenant in sorted(tenants):
            stores = {
                "files": files_store(js, subjects, tenant, replicas),
                "results": results_bucket(js, subjects.prefix, tenant, replicas=replicas),
                "schedules": schedules_store(js, subjects, tenant, replicas),
                "checkpoints": checkpoints_store(js, subjects, tenant, replicas),
            }
            for kind, store in stores.items():
                try:
                    if not await store.is_there():
                        found.append((tenant, kind, store))
                except BusError as error:  # others have theirs all the same
                    self._log_failing({tenant}, error)
        return found

    async def _find_sizes(self, kinds: list[str]) -> Sizes:
        """Return the sizes with which there is room for a bucket of each of these kinds, and a third more.

        The largest size is made smaller first. Raises `BusError`, for want of room if there is none for the smallest.
        """
        sizes: Sizes = WANTED
        while True:
            total = sum(sizes[kind] for kind in kinds)
            try:
                await self._try_room(total + total // 3)
            except JetStreamRefused as refused:
                less = smaller(sizes)
                if less is None or not lacks_room(refused):
                    raise
                sizes = less
            else:
                return sizes

    async def _make(self, missing: list[tuple[str, str, ObjectStore]], sizes: Sizes) -> None:
        made = dict[str, set[str]]()
        for tenant, kind, store in missing:
            try:
                await store.make_of(sizes[kind])
                made.setdefault(kind, set()).add(tenant)
            except BusError as error:
                self._log_failing({tenant}, error)
                if lacks_room(error):  # other streams have taken it since, or the account's own limit is lower
                    self._sizes = smaller(sizes)
                    break
        for kind, of in made.items():
            if sizes[kind] < WANTED[kind]:
                log.info(
                    "the bucket for %s of tenants %s has %d MiB, not %d: the servers have no room for more",
                    kind,
                    _names(of),
                    sizes[kind] >> 20,
                    WANTED[kind] >> 20,
                )

    def _log_failing(self, tenants: frozenset[str] | set[str], error: BusError) -> None:
        self._failing.update(dict.fromkeys(tenants, error))
        words = f"the buckets of tenants {_names(tenants)} cannot be created now: {error}"
        if self._told.due(words):
            log.warning("%s", "; ".join(filter(None, (words, _remedy(error)))))


def _remedy(error: BusError) -> str:
    return error.problem.next or (RIGHTS_ANEW if isinstance(error, PermissionRefused) else "")


def _names(tenants: frozenset[str] | set[str]) -> str:
    shown = ", ".join(sorted(tenants)[:NAMED_MAX])
    return f"{shown} and {len(tenants) - NAMED_MAX} more" if len(tenants) > NAMED_MAX else shown
