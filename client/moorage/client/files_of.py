"""Bring the files that another job kept: which of a caller's files are such jobs, checked before the submit."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final

from moorage.client.errors import rejected
from moorage.client.fields import Paths
from moorage.client.sending import bucket_of
from moorage.schemas.handler import is_earlier, kept_object
from moorage.schemas.job import TERMINAL, FilesOf
from moorage.schemas.kept_source import kept_source
from moorage.schemas.names import is_job
from moorage.schemas.ranges import count_of, format_ranges, numbers_in

if TYPE_CHECKING:
    from moorage.client.connected import Connected

#: what a job stands behind among the files of another one
MARK: Final = "job:"
#: replicas of a job that has ended which are asked for kept files before the submit
LOOKED_AT_MAX: Final = 64


def divided(paths: Paths) -> tuple[list[str | os.PathLike[str]], list[str]]:
    """Return the paths among a caller's files, and the ids of jobs. Raises `Rejected` for an invalid id and an
    empty path."""
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if "" in given:  # it would be this whole folder
        raise rejected(
            "invalid-argument", "an empty path is no file or folder", field="$.run.files", found="",
            next="name one; this folder is .",
        )  # fmt: skip
    jobs = [path.removeprefix(MARK) for path in given if isinstance(path, str) and path.startswith(MARK)]
    for job in jobs:
        if not is_job(job):
            raise rejected(
                "invalid-argument", f"{MARK} stands before the id of a job, found {job[:80]!r}", field="$.run.files_of",
                found=job, next="for example job:sweep; a file of that name is ./job:sweep",
            )  # fmt: skip
    return [path for path in given if not (isinstance(path, str) and path.startswith(MARK))], jobs


async def files_of(client: Connected, jobs: Iterable[str]) -> list[FilesOf]:
    """Return the field of a request that brings the kept files of these jobs, which need not have ended.

    Raises `NotFound`, and `Rejected` for a job that keeps none, or that has ended and whose files are kept no longer.
    """
    return [await _of_one(client, job) for job in jobs]


async def source_of(client: Connected, source: str, after: Iterable[str]) -> str:
    """Return a source of data that is what a job has kept, as `job:ID/path`, as a request has it.

    The job must have ended, unless this one starts after it: the files are fetched once. Raises as `files_of`.
    """
    job, slash, path = source.removeprefix(MARK).partition("/")
    divided([f"{MARK}{job}"])
    if job not in after and (state := (await client.show(job)).state) not in TERMINAL:
        raise rejected(
            "failed-precondition", f"job {job} has not ended, and its files are fetched once", field="$.run.data",
            found=state, next=f"--after {job}",
        )  # fmt: skip
    return kept_source(await _of_one(client, job), slash + path)


async def _of_one(client: Connected, job: str) -> FilesOf:
    shown = await client.show(job)
    if shown.asked and not shown.run.get("keep"):
        raise rejected(
            "failed-precondition", f"job {job} keeps no files", field="$.run.files_of", found=job,
            next="submit it with --keep 'out/**'",
        )  # fmt: skip
    numbers, accepted_ms = shown.numbers, shown.accepted_ms
    if shown.state in TERMINAL:
        store = bucket_of(client)
        names = [kept_object(job, number) for number in islice(numbers_in(numbers), LOOKED_AT_MAX)]
        found = await asyncio.gather(*(client.again(partial(store.find, name)) for name in names))
        are_there = any(info is not None and not is_earlier(info.headers, accepted_ms) for info in found)
        if count_of(numbers) <= LOOKED_AT_MAX and not are_there:
            raise rejected(
                "failed-precondition", f"no files of job {job} are kept: none of it has succeeded, or it was long ago",
                field="$.run.files_of", found=job, next=f"moorage again {job}",
            )  # fmt: skip
    one = count_of(numbers) == 1 and shown.asked.get("indices") is None
    return FilesOf(job, None if one else format_ranges(numbers), accepted_ms)
