"""A full disk: nothing accepted is lost, what is not recorded is not answered, and room brings everything back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from moorage.bus.embedded import EmbeddedServer
from tests.disk import TINY_MIB, fill, mount_small, unmount
from tests.ports import free_ports
from tests.system.live.stack import ANSWER_S, caller, request, stack
from tests.waiting import until


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, small enough to fill."""
    folder = tmp_path / "disk"
    if not mount_small(folder, TINY_MIB):
        pytest.skip("no right to mount a file system of our own")
    yield folder
    unmount(folder)


@pytest.mark.slow
async def test_a_full_disk_loses_nothing_that_was_accepted(small_disk: Path, unique: str) -> None:
    server = await EmbeddedServer.start(small_disk / "nats", port=free_ports(1)[0])
    try:
        async with stack(server, unique) as made, caller(made) as acme:
            scheduler = await made.scheduler()
            await made.agent("w", "4xH100", worker="w1")
            await acme.leader()
            await acme.workers_up("w1")
            before = await acme.submit("before")
            assert before["kind"] == "accepted"
            await acme.reaches("before", "SUCCEEDED")

            filler = fill(small_disk)
            # the last block has room for a few records more; then the leader says that it cannot append
            await until(lambda: "unclear" in scheduler.words(), 90, "an append is unclear")
            body = msgspec.json.encode(request("meanwhile"))
            answer = await acme.nc.request(acme.subjects.api("acme", "submit"), body, timeout=ANSWER_S)
            told = msgspec.json.decode(answer.data)
            assert told["code"] == "not-leading", "whoever asks hears that nothing can be recorded"
            assert "could not write its ledger for" in told["message"]
            assert "look at the disk (and max_file_store) and the log of the nats-server" in scheduler.words()
            filler.unlink()
            # a server that gave up on its store while the disk was full is started again, as `moorage up` does
            await server.kill()
            server = await EmbeddedServer.start(small_disk / "nats", port=server.port)
            assert (await acme.submit("meanwhile"))["kind"] == "accepted"
            await acme.reaches("meanwhile", "SUCCEEDED")
            assert (await acme.show("before"))["state"] == "SUCCEEDED"
            assert (await acme.show("meanwhile"))["attempt"] == 1
    finally:
        await server.stop()
        os.sync()
