"""Say which patterns of `--keep` matched nothing: what a job wrote elsewhere is lost with its folder."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from moorage.cli.framework.console import say
from moorage.client.errors import ClientError

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient

#: how long a command waits for it
UNMATCHED_S_MAX: Final = 3.0


async def unkept(client: AsyncClient, shown: Mapping[str, Any]) -> list[str]:
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


async def say_unkept(client: AsyncClient, job: str, shown: Mapping[str, Any] | None = None) -> None:
    """Print these lines of a job that has ended."""
    with contextlib.suppress(ClientError):  # the end itself is known
        shown = shown or await client._wire.read("show", {"job": job})
        for line in await unkept(client, shown):
            say(f"warning[keep]: {job}: {line}")
