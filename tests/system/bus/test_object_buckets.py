"""Buckets of a real server that exist already."""

from __future__ import annotations

import pytest

from moorage.bus.connection import connect
from moorage.bus.jetstream import JetStream
from moorage.bus.object_store import BUCKET_BYTES_MIN, FILES_BUCKET_BYTES, files_store
from moorage.schemas.subjects import Subjects


@pytest.mark.parametrize("size", [BUCKET_BYTES_MIN, FILES_BUCKET_BYTES + BUCKET_BYTES_MIN, -1])
async def test_an_existing_bucket_keeps_the_size_that_an_operator_gave_it(
    nats_url: str, unique: str, size: int
) -> None:
    async with await connect(nats_url, "test") as connection:
        js, subjects = JetStream(connection), Subjects(unique)
        store = files_store(js, subjects, "acme")
        await store.make()
        name = f"OBJ_{subjects.files_bucket('acme')}"
        await js.ensure_stream({"name": name, "max_bytes": size}, frozenset({"max_bytes"}))
        await store.make()
        assert (await js.stream_info(name)).config["max_bytes"] == size
