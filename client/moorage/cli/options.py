"""The options that every command has, and what it takes to run one against a server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Final

from moorage.cli import console
from moorage.cli.console import Colour, fail
from moorage.schemas.errors import MoorageError
from moorage.schemas.settings_file import find_file

if TYPE_CHECKING:
    from cyclopts import Parameter

    from moorage.client.client import AsyncClient

CLIENT_VARIABLES: Final = "MOORAGE_CLIENT_"
#: a one-shot command waits so long for a server and for a scheduler that may be changing hands (4 s on one node)
TIMEOUT_DEFAULT: Final = "10s"
CONNECT_TIMEOUT_S_MAX: Final = 3.0


@dataclass(frozen=True)
class Options:
    """What every command understands. `verbs` makes it a group of options on the command line."""

    nats: Annotated[str | None, Parameter(help="URL or nats context of the server.")] = None
    tenant: Annotated[str | None, Parameter(help="Whose jobs; else $MOORAGE_TENANT, else `default`.")] = None
    timeout: Annotated[str | None, Parameter(help="How long to wait for an answer, as 500ms, 10s, 2m.")] = None
    json: Annotated[bool, Parameter(negative="", help="The frames of the wire, one JSON object a line.")] = False
    color: Annotated[Colour | None, Parameter(help="auto, always or never; NO_COLOR is honoured.")] = None

    def settled(self) -> Options:
        """With what the settings say where no flag does. Raises Refused with bad-settings."""
        if find_file() is None and not any(name.startswith(CLIENT_VARIABLES) for name in os.environ):
            return self
        from moorage.cli.settings import client_settings

        said = client_settings()
        if "timeout" in said:
            said["timeout"] = f"{said['timeout']}s"
        return replace(self, **{key: value for key, value in said.items() if getattr(self, key) is None})


DEFAULTS: Final = Options()
Work = Callable[["AsyncClient"], Awaitable[int | None]]


def with_client(options: Options, work: Work) -> int:
    """Connect, do the work, close; errors are told. Returns the exit code."""
    return guarded(options, lambda: asyncio.run(_connected(options, work)))


def guarded(options: Options, act: Callable[[], int | None]) -> int:
    """Run, and tell what went wrong. Returns the exit code."""
    console.choose_colour(options.color or "auto")
    try:
        console.choose_colour(options.settled().color or "auto")
        return act() or 0
    except MoorageError as error:
        return fail(error, json=options.json)


async def _connected(options: Options, work: Work) -> int | None:
    async with client_of(options) as client:
        return await work(client)


def client_of(options: Options) -> AsyncClient:
    """The client that these options describe, not yet open. Raises `Rejected`."""
    from moorage.client.client import AsyncClient
    from moorage.client.values import seconds

    options = options.settled()
    timeout = options.timeout or TIMEOUT_DEFAULT
    told = False

    def on_wait() -> None:
        nonlocal told
        if not told:
            told = True
            console.say(f"no scheduler answers yet, asking again (for up to {timeout})")

    return AsyncClient(
        options.nats,
        tenant=options.tenant,
        timeout=timeout,
        connect_timeout=min(seconds(timeout), CONNECT_TIMEOUT_S_MAX),
        name="moorage command",
        on_wait=on_wait,
    )
