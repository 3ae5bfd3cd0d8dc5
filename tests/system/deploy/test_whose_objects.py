"""A worker stores what its own attempts keep, and nothing of an attempt that another worker has or that has ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from moorage.bus.connection import Connection
from moorage.bus.errors import JetStreamRefused
from moorage.bus.jetstream import JetStream
from moorage.bus.object_store import ObjectStore, checkpoints_store, files_store
from moorage.bus.passed_on import through_schedulers
from moorage.bus.results import results_bucket
from moorage.cli.fleet.nats_config import ACCOUNTS
from moorage.client import AsyncClient, AsyncJob
from moorage.schemas.handler import checkpoint_object, kept_object, rescued_object, result_object
from moorage.schemas.subjects import Subjects
from tests.system.deploy.test_files_by_keys import brings_and_keeps, has_buckets, until_running
from tests.system.deploy.test_roles_live import everybody

SUBJECTS = Subjects()


def buckets(worker: Connection) -> tuple[ObjectStore, ObjectStore, ObjectStore]:
    jetstream = JetStream(through_schedulers(worker, "moorage"))
    return (
        files_store(jetstream, SUBJECTS, "acme"),
        checkpoints_store(jetstream, SUBJECTS, "acme"),
        results_bucket(jetstream, "moorage", "acme"),
    )


async def names_of(job: AsyncJob) -> dict[str, list[str]]:
    """The names below which anything of the job's only replica is found, by the number of the bucket."""
    shown = await job.show()
    [row] = shown.replica_states
    checkpoint = checkpoint_object(job.job, shown.accepted_ms, 0, row.attempt)
    named = [result_object(job.job, 0, row.fence), kept_object(job.job, 0), rescued_object(job.job, 0, row.fence, "")]
    return {"files": named, "checkpoints": [checkpoint], "results": [named[0]]}


async def may_not_plant(worker: Connection, names: dict[str, list[str]]) -> None:
    for bucket, of_bucket in zip(buckets(worker), names.values(), strict=True):
        for name in of_bucket:
            with pytest.raises(JetStreamRefused, match="no such attempt on this worker"):
                await bucket.put(name, [b"planted"], {}, lambda _: None)


async def printed(acme: AsyncClient, job: str, *, files: list[str]) -> str:
    done = await acme.submit(["sh", "-c", "cat */out.txt"], job=job, gpu="1xT4", files=files)
    text = "".join([chunk.text async for chunk in done.logs()])
    assert (await done.result()).state == "SUCCEEDED"
    return text


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("servers", [1, 3])
async def test_no_worker_stores_for_an_attempt_that_it_does_not_have(servers: int, tmp_path: Path) -> None:
    async with everybody(servers=servers) as made, made.client("submitter.acme") as acme:
        await has_buckets(made)
        async with await made.site.connect("worker.w2") as other, await made.site.connect("worker.w1") as own:
            script = "echo mine > out.txt; until [ -e go ]; do sleep 0.05; done"
            runs = await acme.submit(["sh", "-c", script], job="keeps", gpu="1xT4", keep=["out.txt"])
            await until_running(acme, runs.job)
            await may_not_plant(other, await names_of(runs))
            [folder] = [each for each in (made.folder / "w1").rglob("acme.keeps.*") if each.is_dir()]
            (folder / "go").touch()
            assert (await runs.result()).state == "SUCCEEDED"
            for worker in (other, own):  # also of the worker that had it, now that it has ended
                await may_not_plant(worker, await names_of(runs))
            assert await printed(acme, "reads", files=["job:keeps"]) == "mine\n"
            await runs.files(tmp_path / "kept")
            assert (tmp_path / "kept" / "out.txt").read_text() == "mine\n"
            # what it was asked to rescue, the worker stores, and no other does
            left = await acme.submit(["sh", "-c", "echo left > out.txt; exit 3"], job="left", gpu="1xT4")
            assert (await acme.wait([left]))[0].state == "FAILED"
            await may_not_plant(own, await names_of(left))
            await left.files(tmp_path / "left", rescue=True)
            assert (tmp_path / "left" / "out.txt").read_text() == "left\n"
            await may_not_plant(other, await names_of(left))
        assert "worker w2 may not store in a bucket of tenant acme: keeps.0." in made.words()


@pytest.mark.slow
async def test_where_schedulers_have_rights_of_before_all_is_stored_and_the_log_says_so(tmp_path: Path) -> None:
    async with everybody() as made:
        accounts = made.site.folder / ACCOUNTS
        accounts.write_text(accounts.read_text().replace(SUBJECTS.may_store, "moorage.of-before"))
        await made.site.reload()
        await made.restart("scheduler")
        async with made.client("submitter.acme") as acme:
            await has_buckets(made)
            await brings_and_keeps(acme, tmp_path, "before")
            assert "whose a stored object is was not looked at: these rights are of an earlier release" in made.words()
