"""A full disk: nothing accepted is lost, what is not recorded is not answered, and room brings everything back."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from moorage.bus.embedded import EmbeddedServer
from tests.live.stack import caller, stack
from tests.waiting import until

SIZE_MIB = 1400  # the request queue reserves 1 GiB of it


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, small enough to fill."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SIZE_MIB}m", "tmpfs", str(folder)], capture_output=True
    )
    if made.returncode != 0:
        pytest.skip("no right to mount a file system of our own")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Take all the room that is left, to the last byte."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        chunk = b"\0" * (1 << 20)
        while chunk:
            try:
                written = file.write(chunk)
            except OSError:
                written = 0
            if written < len(chunk):
                chunk = chunk[: len(chunk) // 2]
    return filler


async def test_a_full_disk_loses_nothing_that_was_accepted(small_disk: Path, unique: str) -> None:
    server = await EmbeddedServer.start(small_disk / "nats")
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
            await until(lambda: "unclear" in scheduler.words(), 30, "an append is unclear")
            asking = asyncio.create_task(acme.submit("meanwhile"))
            said = scheduler.words().count("unclear")
            await until(lambda: scheduler.words().count("unclear") > said, 30, "it is tried again")
            assert not asking.done(), "answered although nothing can be recorded"
            assert "look at the nats-server's disk" in scheduler.words()
            filler.unlink()
            # a server that gave up on its store while the disk was full is started again, as `moorage up` does
            await server.kill()
            server = await EmbeddedServer.start(small_disk / "nats", port=server.port)
            assert (await asking)["kind"] == "accepted"
            await acme.reaches("meanwhile", "SUCCEEDED")
            assert (await acme.show("before"))["state"] == "SUCCEEDED"
            assert (await acme.show("meanwhile"))["attempt"] == 1
    finally:
        await server.stop()
        os.sync()
