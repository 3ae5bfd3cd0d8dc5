"""`moorage schedule`, and the SDK below it, against a real node."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from moorage.cli.framework.render import utc
from moorage.cli.framework.screen import Screen
from moorage.cli.jobs.schedule import _next
from moorage.cli.jobs.show import _draw
from moorage.client import AsyncClient, Conflict, JobFailed, NotFound, Rejected
from moorage.client.schedules import AsyncSchedules
from moorage.client.sending import bucket_of_schedules
from moorage.schemas.job import Request
from moorage.schemas.schedules import ScheduleRow
from tests.system.cli.node import Node
from tests.unit.cli.test_render import Terminal

NIGHTLY = ("schedule", "add", "nightly", "--cron", "0 3 * * *", "--tz", "Europe/Berlin", "--driver", "noop")


def test_the_next_run_is_told_with_its_zone() -> None:
    row = ScheduleRow(name="nightly", cron="0 3 * * *", next_ms=1_795_000_000_000)
    assert _next(row) == "2026-11-18T11:06:40Z"


async def test_a_schedule_is_added_shown_run_paused_and_removed(node: Node, unique: str) -> None:
    assert (await node.run("schedule", "ls", tenant=unique)).err.startswith("no schedules; ")
    added = await node.run(*NIGHTLY, "--label", "team=vision", "--", "hang", tenant=unique)
    assert (added.code, added.out) == (0, "nightly\n")
    assert "run-now nightly" in added.err
    shown = await node.run("schedule", "show", "nightly", tenant=unique)
    assert ":00:00Z\n" in next(line for line in shown.out.splitlines(keepends=True) if line.startswith("next\t20"))
    listed = await node.run("schedule", "ls", tenant=unique)
    cells = listed.out.splitlines()[1].split("\t")
    assert cells[3].endswith(":00:00Z"), "its next run is known from the first moment on"
    assert cells[:3] + cells[4:] == ["nightly", "0 3 * * *", "Europe/Berlin", "-", "-", "0", "0"]
    ran = await node.run("schedule", "run-now", "nightly", tenant=unique)
    job = ran.out.strip()
    assert (ran.code, job.rpartition("-")[0]) == (0, "nightly")
    again = await node.run("schedule", "run-now", "nightly", "--json", tenant=unique)
    assert (again.code, again.frame["code"], again.frame["job"]) == (1, "failed-precondition", job)
    shown = await node.run("schedule", "show", "nightly", tenant=unique)
    assert [line.split("\t") for line in shown.out.splitlines()][:4] == [
        ["schedule", "nightly"],
        ["cron", "0 3 * * * Europe/Berlin"],
        ["runs", "hang"],
        ["overlap", "skip: a run is left out while the last one goes on"],
    ]
    assert f"why no job\tjob {job}, the last run, was " in shown.out
    assert "so far\t1 job, 1 left out" in shown.out
    assert "numbers have gaps" in shown.err
    frame = (await node.run("schedule", "show", "nightly", "--json", tenant=unique)).frame
    assert frame["request"]["labels"] == {"team": "vision", "schedule": "nightly"}
    assert (frame["kind"], frame["name"]) == ("schedule", "nightly")
    assert (await node.run("schedule", "ls", "--format", "{name} {runs}", tenant=unique)).out == "nightly 1\n"
    assert (await node.run("schedule", "pause", "nightly", tenant=unique)).out == "nightly\tpaused\n"
    assert "\tpaused\t" in (await node.run("schedule", "ls", tenant=unique)).out
    assert (await node.run("schedule", "resume", "nightly", tenant=unique)).out == "nightly\truns again\n"
    assert (await node.run("schedule", "remove", "nightly", tenant=unique)).out == "nightly\tremoved\n"
    gone = await node.run("schedule", "show", "nightly", tenant=unique)
    assert (gone.code, gone.err.splitlines()[0]) == (
        3, f"error[not-found]: tenant {unique} has no schedule nightly",
    )  # fmt: skip
    await node.run("cancel", job, tenant=unique)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--job", "j"), "a schedule takes no --job"),
        (("--if-seq", "3"), "a schedule takes no --if-seq"),
        (("--at", "22:00"), "a schedule takes no --at"),
        (("--after", "prep"), "a schedule takes no --after"),
    ],
)
async def test_what_belongs_to_one_submit_is_refused(node: Node, unique: str, more: tuple[str, ...], says: str) -> None:
    refused = await node.run(*NIGHTLY, *more, "--", "hang", tenant=unique)
    assert (refused.code, refused.err.splitlines()[0]) == (2, f"error[invalid-argument]: {says}")


async def test_a_schedule_of_a_sweep_has_its_items(node: Node, unique: str, tmp_path: Path) -> None:
    items = tmp_path / "items.txt"
    items.write_text("a\nb\n")
    sweep = ("--each-line", str(items), "--", "exit", "{item}")
    assert (await node.run(*NIGHTLY, *sweep, tenant=unique)).code == 0
    request = (await node.run("schedule", "show", "nightly", "--json", tenant=unique)).frame["request"]
    assert (request["run"]["items"], request["replicas"]) == (["a", "b"], 2)


async def test_a_schedule_keeps_its_files_until_the_last_one_with_them_is_removed(
    node: Node, unique: str, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("of the schedule\n")
    (items := tmp_path / "items.txt").write_text("".join(f"{number:01000d}\n" for number in range(100)))
    async with AsyncClient(node.url, tenant=unique) as client:
        schedules, bucket = client.schedules, bucket_of_schedules(client._wire)
        with_it = ("--with", str(tmp_path / "a.txt"), "--", "grep", "-q", "schedule", "a.txt")
        for name in ("one", "two"):
            assert (await node.run("schedule", "add", name, "--cron", "@yearly", *with_it, tenant=unique)).code == 0
        await schedules.add("sdk", "@yearly", ["cat", "a.txt"], files=tmp_path / "a.txt")
        address = (await schedules.show("one")).request["run"]["files"]  # type: ignore[index]
        assert (await (await schedules.run_now("one")).result()).state == "SUCCEEDED"
        with pytest.raises(Conflict):
            await schedules.add("one", "@daily", ["cat", "a.txt"], files=tmp_path / "a.txt")
        for name in ("one", "two", "sdk"):
            assert await bucket.find(address) is not None
            await schedules.remove(name)
        assert await bucket.find(address) is None
        refused = await node.run(*NIGHTLY, "--with", "job:x", "--", "true", tenant=unique)
        assert (refused.code, "job:x" in refused.err) == (2, True)
        sweep = ("--driver", "process", "--each-line", str(items), "--", "true", "{item}")
        added = await node.run(*NIGHTLY, *sweep, tenant=unique)
        assert added.code == 0, added.err
        assert (await schedules.show("nightly")).request["run"]["items"]["file"]  # type: ignore[index]


async def test_the_files_of_a_schedules_job_are_shown_by_name(
    node: Node, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    (tmp_path / "a.txt").write_text(f"{unique}\n")
    async with AsyncClient(node.url, tenant=unique) as client:
        await client.schedules.add("one", "@yearly", ["true"], files=tmp_path / "a.txt")
        ran = await client.schedules.run_now("one")
        await ran.result()
        shown = await node.run("show", ran.job, tenant=unique)
        assert "files\ta.txt\n" in shown.out
        await _draw(client, ran.job, Screen(drawn := Terminal()))
        assert re.search(r"^files\s+a\.txt$", drawn.getvalue(), re.MULTILINE), drawn.getvalue()
        shown = await node.run("schedule", "show", "one", tenant=unique)
        assert "files\ta.txt\n" in shown.out


async def test_files_of_a_removed_schedule_stay_for_its_jobs_and_then_go(
    node: Node, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text(f"{unique}\n")
    (tmp_path / "b.txt").write_text(f"other {unique}\n")
    async with AsyncClient(node.url, tenant=unique) as client:
        schedules, bucket = client.schedules, bucket_of_schedules(client._wire)
        await schedules.add("one", "@yearly", ["sleep", "600"], files=tmp_path / "a.txt")
        address = (await schedules.show("one")).request["run"]["files"]  # type: ignore[index]
        job = await schedules.run_now("one")
        await schedules.remove("one")
        assert await bucket.find(address) is not None, "the job may not have started"
        await job.cancel()
        with pytest.raises(JobFailed):
            await job.result()
        await schedules.add("two", "@yearly", ["true"], files=tmp_path / "b.txt")
        monkeypatch.setattr("moorage.client.schedules.LEFT_S", 0.0)
        await schedules.remove("two")
        assert await bucket.find(address) is None


async def test_files_that_another_removes_before_the_schedule_is_added_are_sent_again(
    node: Node, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text(f"{unique}\n")
    async with AsyncClient(node.url, tenant=unique) as client:
        schedules, bucket = client.schedules, bucket_of_schedules(client._wire)
        add = AsyncSchedules.add_request

        async def late(self: AsyncSchedules, name: str, cron: str, request: Request, **more: Any) -> ScheduleRow:
            info = await bucket.find(request.workload.files or "")
            assert info is not None
            await bucket.forget(bucket.subject(info.nuid))
            return await add(self, name, cron, request, **more)

        monkeypatch.setattr(AsyncSchedules, "add_request", late)
        row = await schedules.add("one", "@yearly", ["true"], files=tmp_path / "a.txt")
        assert await bucket.find((await schedules.show(row.name)).request["run"]["files"]) is not None  # type: ignore[index]


async def test_a_job_at_a_time_waits_for_it_and_says_so(node: Node, unique: str) -> None:
    night = ("submit", "--job", "night", "--at", "tomorrow 03:00", "--driver", "noop", "--", "exit", "0")
    assert (await node.run(*night, tenant=unique)).code == 0
    told = (await node.run("explain", "night", tenant=unique)).out
    assert "reason\tnot-before: " in told
    frame = (await node.run("explain", "night", "--json", tenant=unique)).frame["data"]
    assert f"not before\t{utc(frame['not_before_ms'])}" in told
    assert f"not before {utc(frame['not_before_ms'])}" in (await node.run("ls", tenant=unique)).out
    assert (await node.run("cancel", "night", tenant=unique)).code == 0
    soon = await node.run("run", "--at", "1s", "--driver", "noop", "--", "exit", "0", tenant=unique)
    assert soon.code == 0, soon.err
    past = await node.run("submit", "--at", "2020-01-01T00:00", "--", "true", tenant=unique)
    assert (past.code, past.err.splitlines()[0].startswith("error[invalid-argument]: --at: not a time")) == (2, True)


async def test_schedules_from_python(node: Node, unique: str) -> None:
    async with AsyncClient(node.url, tenant=unique) as client:
        schedules = client.schedules
        row = await schedules.add("often", "@hourly", ["exit", "0"], driver="noop", overlap="queue")
        assert (row.name, row.cron, row.overlap) == ("often", "@hourly", "queue")
        assert await schedules.add("often", "@hourly", ["exit", "0"], driver="noop", overlap="queue") == row
        with pytest.raises(Conflict):
            await schedules.add("often", "@daily", ["exit", "0"], driver="noop", overlap="queue")
        with pytest.raises(Rejected, match=r"does not know the time .*, hour 25, not in 0 to 23") as wrong:
            await schedules.add("wrong", "0 25 * * *", ["true"])
        assert wrong.value.problem.field == "$.cron"
        with pytest.raises(Rejected, match="must match"):
            await schedules.add("a.b", "@daily", ["true"])
        jobs = [await schedules.run_now("often") for _ in range(2)]
        assert [(await job.result()).state for job in jobs] == ["SUCCEEDED"] * 2
        assert (await schedules.pause("often")).paused
        shown = await schedules.show("often")
        assert (shown.runs, shown.job, (shown.request or {})["events"]) == (2, jobs[1].job, "tenant")
        assert [each.name for each in await schedules.ls()] == ["often"]
        assert not (await schedules.resume("often")).paused
        await schedules.remove("often")
        with pytest.raises(NotFound):
            await schedules.run_now("often")
