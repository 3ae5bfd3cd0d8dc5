"""Files, kept files, checkpoints and results with everybody's own key, also while a site goes over to new rights."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from pathlib import Path
from typing import Any, Final

import pytest

from moorage.bus import passed_on
from moorage.bus.errors import NoResponders
from moorage.bus.jetstream import JetStream
from moorage.bus.object_store import files_store
from moorage.bus.passed_on import through_schedulers
from moorage.cli.fleet.nats_config import ACCOUNTS
from moorage.client import AsyncClient, NotPermitted
from moorage.schemas.subjects import Subjects
from tests.servers import stream_is_there
from tests.sites import running
from tests.system.deploy.test_roles_live import Everybody, everybody
from tests.waiting import until

SITES: Final[dict[str, dict[str, Any]]] = {"nkey": {}, "mtls-cluster": {"auth": "mtls", "servers": 3}}
#: rights as a87361689 wrote them: what a worker asks a scheduler now, it asked the server
OF_BEFORE: Final = (
    (r"moorage\.worker\.w[12]\.fetch\.", "$JS.API."),
    (r"moorage\.worker\.w[12]\.(store|result)\.", "$O."),
    (r"moorage\.worker\.\*\.(fetch|store|result)\.>", "moorage.of-before"),
    (r"moorage\.fleet\.maystore", "moorage.of-before"),
)


def rights_of_before(text: str) -> str:
    for new, old in OF_BEFORE:
        assert re.search(new, text)
        text = re.sub(new, old, text)
    return text


async def has_buckets(made: Everybody) -> None:
    """Until the schedulers have made what a tenant needs."""
    async with await made.site.connect("scheduler.main") as scheduler:
        for bucket_of in (Subjects().files_bucket, Subjects().checkpoints_bucket):
            await stream_is_there(scheduler, f"OBJ_{bucket_of('acme')}")


async def brings_and_keeps(acme: AsyncClient, folder: Path, job: str) -> None:
    """A job that reads a file which it brings, and leaves one, and whose next attempt has its checkpoint."""
    code = folder / job
    code.mkdir()
    (code / "said.txt").write_text(f"brought by {job}")
    script = (
        "if [ -e ck/step ]; then mkdir out; cat said.txt ck/step > out/kept.txt; exit 0; fi;"
        " mkdir -p ck; echo a > ck/step; touch $MOORAGE_CHECKPOINT_NOW;"
        " while [ -e $MOORAGE_CHECKPOINT_NOW ]; do sleep 0.1; done; echo a step > ck/step; exit 3"
    )
    done = await acme.submit(
        ["sh", "-c", script], job=job, gpu="1xT4", files=code, keep=["out/**"], checkpoint="ck", retries=1
    )
    result = await done.result()
    assert result.state == "SUCCEEDED", result
    into = folder / f"{job}.kept"
    await done.files(into)
    [kept] = list(into.rglob("kept.txt"))
    assert kept.read_text() == f"brought by {job}a step\n"


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("site", SITES)
async def test_files_checkpoints_and_kept_files_pass_through_a_scheduler(site: str, tmp_path: Path) -> None:
    async with everybody(**SITES[site]) as made, made.client("submitter.acme") as acme:
        await has_buckets(made)
        await brings_and_keeps(acme, tmp_path, "first")
        logged = made.words().lower()
        assert "may not" not in logged, made.words()
        assert "past the schedulers" not in logged, made.words()


def passing_process(scheduler: int) -> int | None:
    """The process beside a scheduler that passes on what workers ask of buckets."""
    for children in Path(f"/proc/{scheduler}/task").glob("*/children"):
        for pid in children.read_text().split():
            with contextlib.suppress(OSError):
                if b"moorage.scheduler.buckets.process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return int(pid)
    return None


@pytest.mark.slow
async def test_the_process_that_passes_on_is_started_again_and_ends_with_its_scheduler(tmp_path: Path) -> None:
    async with everybody() as made, made.client("submitter.acme") as acme:
        await has_buckets(made)
        [scheduler] = [each.pid for each in made.processes if each.log.name == "scheduler.log"]
        first = await until(lambda: passing_process(scheduler), what="it passes on")
        os.kill(first, signal.SIGKILL)
        await brings_and_keeps(acme, tmp_path, "meanwhile")
        second = passing_process(scheduler)
        assert second not in (None, first)
        await made.restart("scheduler")
        await until(lambda: not Path(f"/proc/{second}").exists(), what="it has ended with its scheduler")
        await brings_and_keeps(acme, tmp_path, "later")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("site", SITES)
async def test_a_site_goes_over_to_new_rights_while_its_jobs_run(site: str, tmp_path: Path) -> None:
    """Schedulers and workers first, then nats-config: before, between and after, files and checkpoints pass."""
    async with everybody(**SITES[site]) as made:
        accounts = made.site.folder / ACCOUNTS
        new = accounts.read_text()
        accounts.write_text(rights_of_before(new))
        await made.site.reload()
        async with made.client("submitter.acme") as acme:
            await has_buckets(made)
            await brings_and_keeps(acme, tmp_path, "before")
            assert "past the schedulers: these rights are of an earlier release" in made.words()
            store = "touch $MOORAGE_CHECKPOINT_NOW; while [ -e $MOORAGE_CHECKPOINT_NOW ]; do sleep 0.05; done"
            script = (
                "if [ -e ck/step ]; then cp ck/step out.txt; exit 0; fi;"
                f" mkdir ck; echo before > ck/step; {store}; touch stored; until [ -e go ]; do sleep 0.05; done;"
                f" echo behind > ck/step; {store}; exit 3"
            )
            runs = await acme.submit(
                ["sh", "-c", script], job="runs", gpu="1xT4", keep=["out.txt"], checkpoint="ck", retries=1
            )
            stored = await until(lambda: list((made.folder / "w1").rglob("acme.runs.*/stored")), what="a checkpoint")
            accounts.write_text(new)
            await made.site.reload()
            await made.site.reload()

            async def passes() -> bool:
                return "passing on files of workers" in made.words()

            await until(passes, 60, "the scheduler sees its new rights")
            await brings_and_keeps(acme, tmp_path, "after")
            stored[0].with_name("go").touch()
            assert (await runs.result()).state == "SUCCEEDED"
            await runs.files(tmp_path / "runs")
            assert [path.read_text() for path in (tmp_path / "runs").rglob("out.txt")] == ["behind\n"]


async def until_running(acme: AsyncClient, job: str) -> None:
    async def runs() -> bool:
        return (await acme.job(job).show()).state == "RUNNING"

    await until(runs, 60, "the job runs")


async def test_a_worker_without_a_scheduler_that_passes_on_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passed_on, "PATIENCE_S", 0.1)
    async with running() as site, await site.connect("worker.w1") as worker:
        store = files_store(JetStream(through_schedulers(worker, "moorage")), Subjects(), "acme")
        with pytest.raises(NoResponders) as told:
            await store.find("x")
        assert "is a scheduler running?" in told.value.problem.next
        assert "pass through a scheduler of this release" in told.value.problem.next


async def test_files_of_a_new_tenant_wait_for_its_bucket(tmp_path: Path) -> None:
    """It has one some seconds after the reload: until then its files were refused, and the reader told to ask for a
    right."""
    (tmp_path / "code.py").write_text("print(1)")
    async with running() as site, await site.connect("scheduler.main") as scheduler:
        waits = asyncio.Event()
        client = AsyncClient(site.context("submitter.acme"), tenant="acme", on_wait=waits.set)
        async with client as acme:
            sending = asyncio.create_task(acme.send_files(tmp_path / "code.py"))
            await until(waits.is_set, what="it waits")
            assert acme._wire.put_off is not None
            assert "the bucket MOORAGE_FILES_acme is not there yet" in acme._wire.put_off.message
            bucket = files_store(JetStream(scheduler), Subjects(), "acme")
            await bucket.make()
            assert await bucket.find(await sending) is not None
        async with AsyncClient(site.context("submitter.beta"), tenant="beta", timeout="0.2s") as beta:
            with pytest.raises(NotPermitted, match="MOORAGE_FILES_beta is not there yet") as refused:
                await beta.send_files(tmp_path / "code.py")
            assert "a new tenant has it ten seconds after the reload" in refused.value.problem.next
