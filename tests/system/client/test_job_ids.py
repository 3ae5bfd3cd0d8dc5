"""Job ids of several processes: how they are made is in `tests/unit/client/test_request_builder.py`."""

from __future__ import annotations

import os

from moorage.client import job_ids
from moorage.client.job_ids import fresh_job_id


def test_ids_of_a_forked_child_are_its_own() -> None:
    """Also those of the millisecond in which it began: it does not count on where its parent does."""
    reader, writer = os.pipe()
    job_ids._last = 2**69  # as if it were made in a time to come, so that this process counts up
    try:
        if not (child := os.fork()):
            os.write(writer, fresh_job_id().encode() + job_ids._chance.randbytes(16))
            os._exit(0)
        os.waitpid(child, 0)
        with os.fdopen(reader, "rb") as drawn:
            os.close(writer)
            told = drawn.read()
        assert fresh_job_id() > told[:15].decode()
        assert told[15:] != job_ids._chance.randbytes(16)
    finally:
        job_ids._last = 0
