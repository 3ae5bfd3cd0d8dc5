"""Say which patterns of `--keep` matched nothing: what a job wrote elsewhere is lost with its folder."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

from moorage.cli.framework.console import print_err
from moorage.client.errors import ClientError

if TYPE_CHECKING:
    from moorage.client.answers import JobInfo
    from moorage.client.client import AsyncClient

#: how long a command waits for it
UNMATCHED_S_MAX: Final = 3.0


async def unkept(client: AsyncClient, shown: JobInfo) -> list[str]:
    """Return a line for each pattern that matched nothing, of a job as `show` has it; none for a user that may not read
    the tenant's files, and where that takes too long."""
    from moorage.client.kept_files import unmatched
    from moorage.client.tenant import is_operators

    if is_operators(client._wire.context):
        return []
    with contextlib.suppress(ClientError, TimeoutError):
        async with asyncio.timeout(UNMATCHED_S_MAX):
            return await unmatched(client._wire, shown)
    return []


async def print_unkept(client: AsyncClient, job: str) -> None:
    """Print these lines of a job that has ended."""
    with contextlib.suppress(ClientError):  # the end itself is known
        for line in await unkept(client, await client._wire.show(job)):
            print_err(f"warning[keep]: {job}: {line}")
