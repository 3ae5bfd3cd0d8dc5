"""`--after last`: the newest job in place of the word, in each verb that makes a job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from moorage.cli.framework.console import print_err
from moorage.cli.jobs.job_flags import JobFlags, request_of
from moorage.cli.jobs.selectors import one_id
from moorage.schemas.names import LAST

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient
    from moorage.client.sweeps import Sweep
    from moorage.schemas.job import Request


def with_any(flags: JobFlags) -> JobFlags:
    """Return the flags with a job that is called last, so that they can be checked before a connection is made."""
    return _after(flags, LAST) if _names_newest(flags) else flags


async def with_newest(
    client: AsyncClient, flags: JobFlags, command: Sequence[str], request: Request, sweep: Sweep | None
) -> tuple[JobFlags, Request]:
    """Return flags and request with the id of the newest job, which is said. `request` is of `with_any(flags)`."""
    if not _names_newest(flags):
        return flags, request
    newest = await one_id(client, LAST, "--after")
    print_err(f"--after last is job {newest}")
    found = _after(replace(flags, job=request.job), newest)
    return found, request_of(found, command, sweep)


def _names_newest(flags: JobFlags) -> bool:
    return any(word.partition(":")[0] == LAST for word in _words(flags))


def _after(flags: JobFlags, job: str) -> JobFlags:
    after = [f"={job}{word[len(LAST) :]}" if word.partition(":")[0] == LAST else word for word in _words(flags)]
    return replace(flags, after=after)


def _words(flags: JobFlags) -> list[str]:
    return [word for text in flags.after or () for word in text.split(",")]
