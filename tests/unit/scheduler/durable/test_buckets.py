"""The buckets of tenants: when they are made, and of which sizes."""

from __future__ import annotations

from typing import Final

import pytest

from moorage.bus.errors import JetStreamRefused
from moorage.bus.jetstream import JetStream
from moorage.scheduler.core.config import Config
from moorage.scheduler.durable.tenant_buckets import WANTED, TenantBuckets, smaller
from moorage.scheduler.follower.history import ensure_history
from moorage.testing.bus.bus import SimulatedBus
from tests.unit.scheduler.driving import SUBJECTS

GIB: Final = 1024**3
TENANTS: Final = frozenset({"vision", "speech"})
NO_ROOM: Final = JetStreamRefused("create stream", 500, 10047, "insufficient storage resources available")


class Site:
    """A server with room for so many bytes, and the buckets that are made on it."""

    def __init__(self, room: int) -> None:
        self.bus = SimulatedBus()
        self.room = room
        self.js = JetStream(self.bus.connect("scheduler"))
        self.buckets = TenantBuckets(self.js, SUBJECTS, 1, self.try_room)

    async def try_room(self, size: int) -> None:
        if size > self.room:
            raise NO_ROOM

    def sizes(self) -> list[int]:
        """The sizes of the buckets for files, results, schedules and checkpoints, each the same for both tenants."""
        kinds = SUBJECTS.files_bucket, SUBJECTS.result_bucket, SUBJECTS.schedules_bucket, SUBJECTS.checkpoints_bucket
        streams = self.bus.streams()
        found = [{streams[f"OBJ_{of(each)}"].config["max_bytes"] for each in TENANTS} for of in kinds]
        return [size for (size,) in found]


async def test_no_bucket_is_made_before_the_history() -> None:
    site = Site(100 * GIB)
    await site.buckets.ensure(TENANTS)
    assert not site.bus.streams()
    await ensure_history(site.js, SUBJECTS, Config(), 1)
    await site.buckets.ensure(TENANTS)
    assert site.sizes() == list(WANTED.values())


@pytest.mark.parametrize(
    ("room", "sizes"),
    [
        (100, [4, 0.25, 1, 32]),
        (99, [4, 0.25, 1, 8]),
        (40, [4, 0.25, 1, 8]),
        (20, [4, 0.25, 1, 2]),
        (12, [1, 0.25, 1, 2]),
        (1, [0.0625, 0.0625, 0.0625, 0.125]),
    ],
)
async def test_the_largest_kind_is_made_smaller_until_a_quarter_of_the_room_stays_free(
    room: float, sizes: list[float]
) -> None:
    site = Site(int(room * GIB))
    await ensure_history(site.js, SUBJECTS, Config(), 1)
    await site.buckets.ensure(TENANTS)
    assert site.sizes() == [int(size * GIB) for size in sizes]
    assert 2 * sum(site.sizes()) <= site.room * 3 / 4


async def test_without_room_none_is_made_until_there_is_some_and_the_log_says_what_to_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    site = Site(GIB // 2)
    await ensure_history(site.js, SUBJECTS, Config(), 1)
    await site.buckets.ensure(TENANTS)
    assert len(site.bus.streams()) == 1
    assert "the buckets of tenants speech, vision cannot be created now" in caplog.text
    assert "make room on the nats-server's disk" in caplog.text
    row = site.buckets.figures()
    assert row is not None
    assert row.tenants == sorted(TENANTS)
    assert "make room on the nats-server's disk" in (row.next or "")
    site.room = 20 * GIB
    await site.buckets.ensure(TENANTS)
    assert site.sizes()[0] == 4 * GIB
    assert site.buckets.figures() is None


def test_the_smallest_sizes_have_none_below() -> None:
    sizes, steps = smaller(WANTED), 1
    while sizes is not None:
        least, sizes, steps = sizes, smaller(sizes), steps + 1
    assert steps < 20
    assert all(64 << 20 <= size < 256 << 20 for size in least.values())
