"""A host of three with its server and its scheduler is cut off, and comes back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from pathlib import Path
from typing import Final

import pytest

from moorage.bus.contexts import load_context
from moorage.bus.embedded import find_binary
from moorage.bus.site import Server, Site, server_name
from moorage.cli.fleet.nats_config import write
from moorage.client import AsyncClient
from tests.leaf_links import may_make_namespaces
from tests.leftover import ends_with_the_test
from tests.partitions import Hosts
from tests.system.cli.node import COMMAND
from tests.waiting import until

pytestmark = [pytest.mark.long, pytest.mark.slow]

WITHIN_S: Final = 90.0
#: what a log says each time that the ledger can be read again after it could not
AGAIN: Final = "the ledger can be read again"
PAUSE_S: Final = 0.1


class Cluster:
    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts = hosts
        self.site = Site(
            tenants=("acme",), workers=(), operators=(), observers=(), tls="only",
            servers=tuple(Server(address) for address in hosts.addresses),
        )  # fmt: skip
        self.folder = folder / "site"
        write(self.site, self.folder)

    async def start(self) -> None:
        for at in range(len(self.site.servers)):
            file = self.folder / server_name(self.site, at)
            (store := self.folder / f"data-{at}").mkdir()
            file.write_text(re.sub(r'store_dir: "[^"]*"', f'store_dir: "{store}"', file.read_text()))
            await self._begin(at, "server", find_binary(), "-c", str(file))
        for at in range(len(self.site.servers)):
            words = ("scheduler", "--nats", "scheduler.main", "--replicas", "3", "--name", f"s{at}")
            await self._begin(at, "scheduler", *COMMAND, *words)

    async def _begin(self, at: int, log: str, *argv: str) -> None:
        environment = {**os.environ, "XDG_CONFIG_HOME": str(self.folder), "MOORAGE_LEDGER_URL": "ledger.main"}
        with (self.folder / f"{log}-{at}.log").open("ab") as out:
            ends_with_the_test(
                await asyncio.create_subprocess_exec(
                    *self.hosts.argv(at, *argv), env=environment, stdout=out, stderr=out
                )
            )

    def words(self, at: int) -> str:
        return (self.folder / f"scheduler-{at}.log").read_text()

    def leads(self) -> int | None:
        """The scheduler of the newest epoch."""
        epochs = {int(epoch): at for at in range(3) for epoch in re.findall(r"leading epoch (\d+) at", self.words(at))}
        return epochs[max(epochs)] if epochs else None


async def test_who_comes_back_costs_no_second_takeover_and_the_logs_tell_of_one_outage(tmp_path: Path) -> None:
    """While an old copy of the ledger answered now and then, standbys told of a new outage five times a second."""
    if not may_make_namespaces():
        pytest.skip("no network namespace may be made here")
    with Hosts() as hosts:
        cluster = Cluster(hosts, tmp_path)
        await cluster.start()
        await until(lambda: cluster.leads() is not None, WITHIN_S, "one leads")
        context = load_context("submitter.acme", {"XDG_CONFIG_HOME": str(cluster.folder)})
        async with AsyncClient(context, tenant="acme", timeout=WITHIN_S) as acme, asyncio.TaskGroup() as group:
            submitting = group.create_task(_submits(acme))
            first = cluster.leads()
            assert first is not None
            hosts.cut(first)
            await until(lambda: cluster.leads() != first, WITHIN_S, "another one leads")
            second, before = cluster.leads(), [cluster.words(at).count(AGAIN) for at in range(3)]
            hosts.heal(first)
            await until(lambda: "this scheduler no longer leads" in cluster.words(first), WITHIN_S, "the old one hears")
            submitting.cancel()
            job = await acme.submit(["true"], gpu="1xT4", on_no_match="wait")
            assert (await job.show()).state == "QUEUED"
        assert cluster.leads() == second
        for at in range(3):
            assert cluster.words(at).count(AGAIN) - before[at] <= 1, cluster.words(at)


async def _submits(acme: AsyncClient) -> None:
    """One after the other, so that there is always something to record."""
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            await acme.submit(["true"], gpu="1xT4", on_no_match="wait")
            await asyncio.sleep(PAUSE_S)
