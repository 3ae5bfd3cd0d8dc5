"""A tenant's schedules: requests that are submitted again and again. `AsyncClient.schedules`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, Unpack

import msgspec

from moorage.client.errors import NotFound, Rejected, rejected
from moorage.client.fields import Fields, Paths
from moorage.client.job_ids import fresh_job_id
from moorage.client.login import who
from moorage.client.request_builder import COMMAND, What, build_request
from moorage.schemas.answers.jobs import JobsAnswer
from moorage.schemas.errors import Refused
from moorage.schemas.gpu import GpuSpec
from moorage.schemas.job import STATE_TABLE, Request
from moorage.schemas.names import is_files
from moorage.schemas.schedules import Overlap, ScheduleAsked, ScheduleDone, ScheduleList, ScheduleRan, ScheduleRow

if TYPE_CHECKING:
    from moorage.client.connected import Connected
    from moorage.client.job import AsyncJob

#: how long files stay that no schedule has (yet), in seconds
LEFT_S: Final = 3600.0
_JOBS_MAX: Final = 1000

T = TypeVar("T", ScheduleDone, ScheduleList, ScheduleRan, ScheduleRow)


class AsyncSchedules:
    """The schedules of the client's tenant. nats-server counts their time, 2.14 or newer.

    All raise `NotFound`, `Rejected`, `NotPermitted`, `NoScheduler`, `Unreachable`.
    """

    def __init__(self, client: Connected) -> None:
        self._client = client

    async def add(
        self,
        name: str,
        cron: str,
        what: What,
        gpu: GpuSpec | str | int | None = None,
        *,
        tz: str = "",
        overlap: Overlap = "skip",
        **fields: Unpack[Fields],
    ) -> ScheduleRow:
        """Submit a request again and again: `0 3 * * *` is each day at three, `@every 90s` each ninety seconds.

        `cron` has five fields, or six with seconds first, in the time zone `tz` (UTC by default), or is a word such as
        `@hourly`. Each run is a job `<name>-<number>` with the label `schedule`; the numbers grow, with gaps, as all
        schedules share one count. While the last one goes on, a run is left out (`overlap` is `skip`), or starts behind
        it (`queue`). `what`, `gpu` and `fields` are those of `AsyncClient.submit`, without `if_seq`; its
        files stay until the schedule is removed. The same again changes nothing; other content under this name raises
        `Conflict`.
        """
        if (files := fields.pop("files", None)) is not None:
            is_sent = isinstance(files, str) and is_files(files)
            fields["files"] = files if is_sent else await self.send_files(files)
            files = None if is_sent else files
        if isinstance(what, COMMAND) or (isinstance(what, Mapping) and "events" not in what):
            fields.setdefault("events", "tenant")
        request = build_request(what, gpu, None, fields)
        row = await self.add_request(name, cron, request, tz=tz, overlap=overlap)
        if files is not None and await lacks_files(self._client, request):
            await self.send_files(files)
        return row

    async def add_request(
        self, name: str, cron: str, request: Request, *, tz: str = "", overlap: Overlap = "skip"
    ) -> ScheduleRow:
        """Do the same as `add` with a whole request; its `job` is left out, as each run has an id of its own."""
        body = msgspec.to_builtins(request)
        body.pop("job", None)
        given = {"tz": tz, "overlap": overlap, "request": body}
        try:
            return (await self._ask(ScheduleDone, "add", name, cron=cron, **given)).schedule
        except Rejected:
            await self._drop(request.workload.files)
            raise

    async def send_files(self, files: Paths) -> str:
        """Send files and folders of a schedule that is to be added, and return their address.

        They stay until the last schedule that has them is removed; all those of a tenant may take 1 GiB.
        """
        from moorage.client.files_of import divided
        from moorage.client.sending import send

        plain, jobs = divided(files)
        if jobs:
            raise rejected(
                "invalid-argument", f"what job {jobs[0]} has kept is there for some days only", field="$.run.files_of",
                found=f"job:{jobs[0]}", next=f"moorage get {jobs[0]} here, and bring the folder with --with",
            )  # fmt: skip
        return (await send(self._client, plain, of_schedule=True)).address

    async def ls(self) -> list[ScheduleRow]:
        """Return the tenant's schedules in the order of their names, without their requests."""
        return (await self._ask(ScheduleList, "ls")).schedules

    async def show(self, name: str) -> ScheduleRow:
        """Return a schedule with its request, and what became of its newest run."""
        return await self._ask(ScheduleRow, "show", name)

    async def pause(self, name: str) -> ScheduleRow:
        """Make no more runs until `resume`; jobs go on. Nothing happens to a schedule that is paused already."""
        return (await self._ask(ScheduleDone, "pause", name)).schedule

    async def resume(self, name: str) -> ScheduleRow:
        """Undo `pause`. Runs that were left out are not made up."""
        return (await self._ask(ScheduleDone, "resume", name)).schedule

    async def run_now(self, name: str) -> AsyncJob:
        """Make a run at once, also of a paused schedule, and return its job.

        Raises `Rejected` while the last run goes on, if the schedule's `overlap` is `skip`.
        """
        from moorage.client.job import AsyncJob

        ran = await self._ask(ScheduleRan, "run-now", name, key=fresh_job_id())
        return AsyncJob(self._client, ran.job)

    async def remove(self, name: str) -> ScheduleRow:
        """Forget a schedule, and return it as it was; the jobs that it made are not touched.

        Its files go now, or with a later removal if such a job may need them."""
        files = _files_of(await self.show(name))
        removed = (await self._ask(ScheduleDone, "remove", name)).schedule
        await self._drop(files)
        return removed

    async def _drop(self, files: str | None) -> None:
        """Remove files that no schedule has any more, and no job that one has made and that is not over.

        Besides these `files`, those go that have been there for an hour: what a removal left for its jobs, or what a
        client sent that did not get to add its schedule.
        """
        if files is None:
            return
        from moorage.client.sending import bucket_of_schedules

        rows = await self.ls()
        asked = {
            "states": [row.name for row in STATE_TABLE if not row.terminal],
            "limit": _JOBS_MAX,
            "history": False,
            "labels": {"schedule": "*"},
        }
        jobs = msgspec.convert(await self._client.read("ls", asked), JobsAnswer).jobs
        if len(jobs) >= _JOBS_MAX or {each.labels["schedule"] for each in jobs} - {row.name for row in rows}:
            return  # a job of a schedule that was removed may start yet
        used = set[str | None]()
        for each in rows:
            with contextlib.suppress(NotFound):  # removed meanwhile
                used.add(_files_of(await self.show(each.name)))
        bucket = bucket_of_schedules(self._client)
        for name, info in await self._client.again(bucket.stored):
            is_due = name == files or time.time() - info.stored_s > LEFT_S
            if is_due and name not in used and (await self._client.again(partial(bucket.find, name))) is not None:
                await bucket.forget(bucket.subject(info.nuid))

    async def _ask(self, kind: type[T], act: str, name: str = "", **arguments: Any) -> T:
        given = {"act": act, **({"name": name} if name else {}), **arguments, "by": who()}
        try:
            asked = ScheduleAsked.of(given)
        except Refused as refused:
            raise Rejected(refused.problem) from None
        return msgspec.convert(await self._client.read("schedule", msgspec.to_builtins(asked)), kind)


async def lacks_files(client: Connected, request: Request) -> bool:
    """Return whether the files of a request are gone: their last schedule may be removed as another is added."""
    from moorage.client.sending import bucket_of_schedules

    files, bucket = request.workload.files, bucket_of_schedules(client)
    return files is not None and await client.again(lambda: bucket.find(files)) is None


def _files_of(row: ScheduleRow) -> str | None:
    return ((row.request or {}).get("run") or {}).get("files")
