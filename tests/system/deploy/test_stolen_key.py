"""A key in the wrong hands, and one that is somebody else's: who is cut off, who goes on, and what their logs say."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import msgspec
import pytest

from moorage.bus.connection import connect
from moorage.bus.errors import NotAuthorized
from moorage.cli.fleet.nats_config import write
from moorage.client import AsyncClient, NotFound
from tests.system.cli.node import moorage
from tests.system.deploy.test_roles_live import everybody
from tests.system.live.stack import ANSWER_S
from tests.waiting import until


@pytest.mark.slow
async def test_a_key_is_changed_by_deleting_its_file_and_its_thief_is_cut_off(tmp_path: Path) -> None:
    async with everybody() as made, made.client("submitter.acme") as acme:
        site = made.site
        job = await acme.submit(["sleep", "600"], gpu="1xT4", job="kept")

        async def runs() -> bool:
            return bool((await job.show()).state == "RUNNING")

        await until(runs, ANSWER_S, "it runs")
        before = (await job.show()).rev
        stolen = tmp_path / "stolen.nk"
        shutil.copy(site.folder / "keys" / "worker.w1.nk", stolen)
        theirs = msgspec.structs.replace(site.context("worker.w1"), nkey=str(stolen))
        async with await connect(theirs, "the thief") as thief:
            assert thief.is_connected
            (site.folder / "keys" / "worker.w1.nk").unlink()
            assert write(site.site, site.folder).keys == ["worker.w1.nk"]
            await site.reload()
            await until(lambda: thief.reconnects or not thief.is_connected, ANSWER_S, "the thief is cut off")
        with pytest.raises(NotAuthorized):
            await connect(theirs, "the thief again")
        # the worker finds its new key where the old one was; what it runs goes on
        await until(lambda: "again after" in made.words(), ANSWER_S, "the worker is back")
        assert (await job.show()).rev == before
        await job.cancel("over")
        assert (await acme.wait([job]))[0].state == "CANCELLED"


@pytest.mark.slow
async def test_a_worker_whose_key_is_taken_away_says_so(tmp_path: Path) -> None:
    async with everybody() as made:
        site = made.site
        await until(lambda: "joined as w1" in made.words(), ANSWER_S, "the worker has joined")
        key = site.folder / "keys" / "worker.w1.nk"
        here = key.rename(tmp_path / "away.nk")
        write(site.site, site.folder)
        new = key.rename(tmp_path / "new.nk")
        shutil.copy(here, key)  # on the worker's machine the old one is still there
        await site.reload()
        await until(lambda: "refused these credentials" in made.words(), ANSWER_S, "the worker says so")
        shutil.copy(new, key)
        await until(lambda: "again after" in made.words(), ANSWER_S, "the worker is back")
        assert made.words().count("refused these credentials") == 1


@pytest.mark.slow
async def test_a_worker_with_another_ones_key_is_told_whose_it_is(tmp_path: Path) -> None:
    async with everybody() as made:
        words = ("worker", "--nats", "worker.w1", "--id", "w7", "--simulate", "1x1xT4", "--state", str(tmp_path / "w7"))
        ended = await moorage(*words, env=made.site.environment)
        assert "error[permission-refused]: this NATS user may not subscribe to moorage.worker.w7.wanted" in ended.err
        fix = "this key is for another worker id: give worker w7 its own key, or name the key's id with --id"
        assert f"fix: {fix}" in ended.err
        assert (ended.code, "Traceback" in ended.err) == (4, False)


@pytest.mark.slow
async def test_who_follows_a_job_with_a_key_that_is_taken_away_is_told_and_ends() -> None:
    """It asked on for ever, and said that no scheduler answers."""
    async with everybody() as made:
        async with made.client("submitter.acme") as acme:
            await acme.ls()  # answered: a scheduler leads
        words = ["run", "--nats", "submitter.acme", "--tenant", "acme", "--gpu", "1xT4", "--timeout", "60s"]
        words += ["--job", "j", "--", "sleep", "600"]
        running = asyncio.create_task(moorage(*words, env=made.site.environment))
        async with made.client("operator.ana", "acme") as ana:
            await until(lambda: _runs(ana, "j"), ANSWER_S, "it runs")
            left = msgspec.structs.replace(made.site.site, tenants=("beta",))
            write(left, made.site.folder)
            await made.site.reload()
            ended = await asyncio.wait_for(running, ANSWER_S)
            assert (ended.code, "refused these credentials" in ended.err) == (4, True), ended.err
            assert await _runs(ana, "j"), "its job goes on"


async def _runs(client: AsyncClient, job: str) -> bool:
    try:
        return bool((await client.job(job).show()).state == "RUNNING")
    except NotFound:
        return False
