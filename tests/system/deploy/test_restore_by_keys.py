"""A backup of each layout of a site, restored with the keys that `moorage admin nats-config` writes, and no others."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from moorage.bus.connection import Connection
from moorage.bus.jetstream import JetStream
from moorage.client import AsyncClient
from moorage.scheduler.core.config import Config
from moorage.scheduler.leader.service import Scheduler
from moorage.schemas.subjects import Subjects
from moorage.worker.supervisor.client import Supervised, SupervisorError
from tests.sites import RunningSite, running
from tests.system.cli import forks
from tests.system.cli.node import Ran, moorage
from tests.system.live.stack import ANSWER_S, BRIEF, RealProcess
from tests.waiting import until

pytestmark = pytest.mark.slow

SUBJECTS: Final = Subjects()
USERS: Final = "MOORAGE"
LEDGER: Final = "MOORAGE_LEDGER"
LAYOUTS: Final[dict[str, dict[str, Any]]] = {"one": {}, "shared": {"shared": True}, "three": {"servers": 3}}


@contextlib.asynccontextmanager
async def leads(site: RunningSite, replicas: int = 1) -> AsyncIterator[Scheduler]:
    """A scheduler in this process, with the site's keys; it resigns at the end."""
    config = msgspec.convert(BRIEF, Config)
    async with await site.connect("scheduler.main") as world, await site.connect("ledger.main") as ledger:
        made = Scheduler(world, ledger, subjects=SUBJECTS, replicas=replicas, config=config)
        running_one = asyncio.create_task(made.run())
        leading = asyncio.create_task(made.leading.wait())
        try:
            await asyncio.wait([running_one, leading], timeout=ANSWER_S, return_when=asyncio.FIRST_COMPLETED)
            assert made.leading.is_set(), running_one
            yield made
            await made.resign()
        finally:
            leading.cancel()
            running_one.cancel()
            await asyncio.gather(running_one, leading, return_exceptions=True)


@contextlib.asynccontextmanager
async def works(site: RunningSite, folder: Path) -> AsyncIterator[None]:
    """A worker of two simulated GPUs, with its key; nothing is left of it."""
    log = folder / "worker.log"
    words = ("worker", "--nats", "worker.w1", "--id", "w1", "--simulate", "1x2xT4", "--state", str(folder / "w1"))
    with log.open("wb") as out:
        process = await forks.python("-m", "moorage.cli", *words, env={**os.environ, **site.environment}, out=out)
    made = RealProcess(process, log)
    try:
        yield
    except BaseException:
        print(made.words())
        raise
    finally:
        await made.kill()
        with contextlib.suppress(SupervisorError, OSError):
            await (await Supervised.connect(folder / "w1/supervisor", spawn_if_absent=False)).shutdown(0.0)


async def admin(site: RunningSite, *words: str) -> Ran:
    return await moorage("admin", *words, env={**site.environment, "MOORAGE_LEDGER_URL": "ledger.main"})


async def backed_up(site: RunningSite, to: Path) -> str:
    """The file of a backup, taken with the ledger's key."""
    ran = await admin(site, "backup", str(to))
    assert ran.code == 0, ran.err
    return str(to)


async def copies(site: RunningSite, account: str) -> dict[str, int]:
    """The streams of an account, with how many copies each has. A leader's probes, which it deletes again, are none."""
    async with await site.witness(account) as connection:
        names = [name for name in await _names(connection) if "_PROBE_" not in name]
        return {name: (await JetStream(connection).stream_info(name)).replicas for name in names}


async def _names(connection: Connection) -> list[str]:
    answer = await connection.request("$JS.API.STREAM.NAMES", b"", ANSWER_S)
    return sorted(msgspec.json.decode(answer.data).get("streams") or [])


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_backup_goes_on_elsewhere_with_the_keys_of_the_site(
    layout: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On several servers and with --shared the scheduler's key may not ask for tenants' own queues: it was refused."""
    settings, replicas = LAYOUTS[layout], LAYOUTS[layout].get("servers", 1)
    async with running(**settings) as first, leads(first, replicas):
        async with AsyncClient(first.context("submitter.acme"), tenant="acme", timeout=ANSWER_S) as acme:
            await acme.submit(["true"], job="waits", gpu="1xT4")
        if first.site.queue:
            await queue_one(first)
        file = await backed_up(first, tmp_path / "one.backup")
    async with running(**settings) as second:
        ran = await admin(second, "restore", file, "--nats", "ledger.main")
        assert (ran.code, "this key is of the ledger's account, MOORAGE_LEDGER" in ran.err) == (1, True), ran.err
        assert "--nats scheduler.NAME" in ran.err
        assert await copies(second, USERS) == await copies(second, LEDGER) == {}, "refused before anything is written"
        ran = await admin(second, "restore", file, "--nats", "scheduler.main")
        assert ran.code == 0, ran.err
        async with (
            leads(second, replicas),
            works(second, tmp_path),
            AsyncClient(second.context("submitter.acme"), tenant="acme", timeout=ANSWER_S) as acme,
        ):
            assert (await acme.job("waits").result()).state == "SUCCEEDED"
            assert (await (await acme.submit(["true"], job="later", gpu="1xT4")).result()).state == "SUCCEEDED"
        both = {**await copies(second, USERS), **await copies(second, LEDGER)}
        assert set(both.values()) == {replicas}, both
        if replicas > 1:
            await wedged_by_hand(second, replicas)
    told = [each for each in caplog.records if each.levelno >= logging.ERROR or each.name == "moorage.follower"]
    assert not [each for each in told if each.levelno > logging.INFO], "the jump of a restore is no gap"


async def queue_one(site: RunningSite) -> None:
    """A request by the durable queue: from then on the backup knows how far the queue was read."""
    async with (
        await site.connect("submitter.acme") as connection,
        AsyncClient(site.context("submitter.acme"), tenant="acme", timeout=ANSWER_S) as acme,
    ):
        body = {"job": "queued", "gpu": {"model": "none"}, "run": {"argv": ["true"]}}
        await connection.request(SUBJECTS.request("acme", "submit"), msgspec.json.encode(body), ANSWER_S)

        async def is_read() -> bool:
            return "queued" in [row.job for row in (await acme.ls()).jobs]

        await until(is_read, ANSWER_S, "the queued request")


async def wedged_by_hand(site: RunningSite, replicas: int) -> None:
    """A stream of another number of copies than the ledger follows it: two refusals advised each other's settings."""
    async with await site.witness(USERS) as users:
        one = {"name": SUBJECTS.request_stream, "num_replicas": 1}
        await JetStream(users).ensure_stream(one, frozenset(one))
    async with leads(site, replicas):
        assert (await copies(site, USERS))[SUBJECTS.request_stream] == replicas


async def test_a_restore_is_told_once_as_a_restore_and_as_no_gap(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its jump of four thousand million records was an error in the log, and doctor warned of it from then on."""
    caplog.set_level(logging.INFO, "moorage.follower")

    def told(level: int) -> list[str]:
        return [
            each.getMessage() for each in caplog.records if each.name == "moorage.follower" and each.levelno == level
        ]

    async with running() as site, AsyncClient(site.context("operator.ana"), timeout=ANSWER_S) as ana:

        async def follower(*, restores: int) -> dict[str, Any] | None:
            usage = (await ana._wire.operate("usage", {})).data
            shown: dict[str, Any] = (await ana.fleet.show()).data["follower"]
            return shown if len(usage.get("restores", [])) == len(usage.get("gaps", [])) == restores else None

        async with leads(site):
            await until(lambda: follower(restores=0), ANSWER_S, "the follower's first save")
            file = await backed_up(site, tmp_path / "one.backup")
        ran = await admin(site, "restore", file, "--replace", "--nats", "scheduler.main")
        assert ran.code == 0, ran.err
        for _ in range(2):
            async with leads(site):
                shown = await until(lambda: follower(restores=1), ANSWER_S, "the restore in the list of gaps")
                assert shown["gaps"] == [], "doctor warns of these"
                usage = await moorage("usage", "--all", "--nats", "operator.ana", env=site.environment)
                assert "a restore: counted up to" in usage.err + usage.out
                assert "not counted" not in usage.err + usage.out
        said = [text for text in told(logging.INFO) if "a restore: history and GPU time go on" in text]
        assert len(said) == 1
        assert not told(logging.ERROR) + told(logging.WARNING)


async def test_a_server_without_room_is_told_before_anything_changes(tmp_path: Path) -> None:
    """It stopped half way, and no scheduler led what was left."""
    async with running(servers=3, small=2) as site:
        async with leads(site):
            file = await backed_up(site, tmp_path / "one.backup")

        async def all_copies() -> dict[str, int]:
            return {**await copies(site, USERS), **await copies(site, LEDGER)}

        before = await all_copies()
        assert set(before.values()) == {1}
        assert SUBJECTS.snapshot_stream in before
        ran = await admin(site, "restore", file, "--replace", "--replicas", "3", "--nats", "scheduler.main")
        assert ran.code == 1, ran.out
        assert "refuse 3 copies of" in ran.err  # the ledger, or a stream, by where the buckets of the tenants are
        assert "nothing is changed" in ran.err
        assert "make room on the nats-server's disk, or raise its limits" in ran.err
        assert await all_copies() == before
        ran = await admin(site, "restore", file, "--replace", "--nats", "scheduler.main")
        assert (ran.code, "--replicas 3" in ran.err) == (1, True), "one copy on a cluster has to be said here, too"
        async with leads(site):  # the same ledger goes on
            assert await all_copies() == before
