"""A job that kills the supervisor of its host: it ends, and what runs beside it pays with time alone."""

from __future__ import annotations

import pytest

from tests.servers import Server
from tests.system.live.stack import caller, stack


@pytest.mark.slow
async def test_a_job_that_kills_its_supervisor_ends_and_its_neighbour_succeeds(
    nats_server: Server, unique: str
) -> None:
    async with stack(nats_server, unique) as made, caller(made) as acme:
        await made.scheduler()
        await acme.leader()
        await made.agent("worker", "2xH100", worker="w0")
        await acme.workers_up("w0")
        await acme.submit("neighbour", "/bin/sh", "-c", "[ $MOORAGE_ATTEMPT -gt 1 ] || sleep 600", retries_on_lost=0)
        await acme.submit("guilty", "/bin/sh", "-c", "sleep 0.5; kill -9 $PPID; sleep 600", retries_on_lost=1)
        await acme.reaches("guilty", "FAILED", deadline_s=150)
        shown = await acme.reaches("neighbour", "SUCCEEDED", deadline_s=150)
        assert shown["attempt"] > 1, "it was lost with the supervisor, and ran again"
        await acme.all_free()
