"""A tenant's schedules: requests that are submitted again and again. `AsyncClient.schedules`."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Unpack

import msgspec

from moorage.client.errors import NotFound, Rejected, rejected
from moorage.client.fields import Fields, Paths
from moorage.client.job_ids import fresh_job_id
from moorage.client.login import who
from moorage.client.request_builder import COMMAND, What, build_request
from moorage.schemas.errors import Refused
from moorage.schemas.gpu import GpuSpec
from moorage.schemas.job import Request
from moorage.schemas.names import is_files
from moorage.schemas.schedules import Overlap, ScheduleAsked, ScheduleRow

if TYPE_CHECKING:
    from moorage.client.connected import Connected
    from moorage.client.job import Job


class Schedules:
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
        if isinstance(what, COMMAND) or (isinstance(what, Mapping) and "events" not in what):
            fields.setdefault("events", "tenant")
        request = build_request(what, gpu, None, fields)
        return await self.add_request(name, cron, request, tz=tz, overlap=overlap)

    async def add_request(
        self, name: str, cron: str, request: Request, *, tz: str = "", overlap: Overlap = "skip"
    ) -> ScheduleRow:
        """Do the same as `add` with a whole request; its `job` is left out, as each run has an id of its own."""
        body = msgspec.to_builtins(request)
        body.pop("job", None)
        given = {"tz": tz, "overlap": overlap, "request": body}
        try:
            return _row((await self._ask("add", name, cron=cron, **given))["schedule"])
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
        return msgspec.convert((await self._ask("ls"))["schedules"], list[ScheduleRow])

    async def show(self, name: str) -> ScheduleRow:
        """Return a schedule with its request, and what became of its newest run."""
        return _row(await self._ask("show", name))

    async def pause(self, name: str) -> ScheduleRow:
        """Make no more runs until `resume`; jobs go on. Nothing happens to a schedule that is paused already."""
        return _row((await self._ask("pause", name))["schedule"])

    async def resume(self, name: str) -> ScheduleRow:
        """Undo `pause`. Runs that were left out are not made up."""
        return _row((await self._ask("resume", name))["schedule"])

    async def run_now(self, name: str) -> Job:
        """Make a run at once, also of a paused schedule, and return its job.

        Raises `Rejected` while the last run goes on, if the schedule's `overlap` is `skip`.
        """
        from moorage.client.job import Job

        answer = await self._ask("run-now", name, key=fresh_job_id())
        return Job(self._client, answer["job"])

    async def remove(self, name: str) -> ScheduleRow:
        """Forget a schedule with its files, and return it as it was; the jobs that it made are not touched."""
        files = _files_of(await self.show(name))
        removed = _row((await self._ask("remove", name))["schedule"])
        await self._drop(files)
        return removed

    async def _drop(self, files: str | None) -> None:
        """Remove files that no schedule has any more."""
        if files is None:
            return
        from moorage.client.sending import bucket_of_schedules

        for each in await self.ls():
            with contextlib.suppress(NotFound):  # removed meanwhile
                if _files_of(await self.show(each.name)) == files:
                    return
        bucket = bucket_of_schedules(self._client)
        if (found := await self._client.again(lambda: bucket.find(files))) is not None:
            await bucket.forget(bucket.subject(found.nuid))

    async def _ask(self, act: str, name: str = "", **arguments: Any) -> dict[str, Any]:
        given = {"act": act, **({"name": name} if name else {}), **arguments, "by": who()}
        try:
            asked = ScheduleAsked.of(given)
        except Refused as refused:
            raise Rejected(refused.problem) from None
        return await self._client.read("schedule", msgspec.to_builtins(asked))


def _files_of(row: ScheduleRow) -> str | None:
    return ((row.request or {}).get("run") or {}).get("files")


def _row(data: dict[str, Any]) -> ScheduleRow:
    return msgspec.convert(data, ScheduleRow)
