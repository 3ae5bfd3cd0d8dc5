"""The buckets of tenants: which are made when."""

from __future__ import annotations

import pytest

from moorage.bus.jetstream import JetStream
from moorage.scheduler.durable.queue_streams import QueueStreams
from moorage.testing.bus.bus import SimulatedBus
from tests.unit.scheduler.driving import SUBJECTS


@pytest.mark.parametrize(("replicas", "calls"), [(1, 1), (3, 2)])
async def test_in_a_cluster_the_largest_buckets_are_made_once_its_servers_know_what_is_reserved(
    replicas: int, calls: int
) -> None:
    """They were made at once, took the room of the history, and no history was written from then on."""
    bus = SimulatedBus()
    streams = QueueStreams(JetStream(bus.connect("scheduler")), SUBJECTS, replicas)
    streams._buckets_of = frozenset({"vision", "speech"})
    largest = {f"OBJ_{SUBJECTS.checkpoints_bucket(each)}" for each in streams._buckets_of}
    for call in range(1, calls + 1):
        await streams.ensure_buckets()
        assert f"OBJ_{SUBJECTS.files_bucket('vision')}" in bus.streams()
        assert (largest <= bus.streams().keys()) is (call == calls)
