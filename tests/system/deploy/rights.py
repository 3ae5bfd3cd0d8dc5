"""Whether the identities of a site publish and hear what a table says of them, and nothing else."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Mapping, Sequence

from moorage.bus.connection import Connection
from moorage.bus.errors import BusError, PermissionRefused
from tests.sites import RunningSite, settled

#: by subject: who publishes to it, who subscribes to it; short names, with blanks between them
Table = Mapping[str, tuple[str, str]]


async def wrong_rights(
    site: RunningSite, who: Mapping[str, str], tables: Mapping[str, Table], wide: Sequence[str]
) -> list[str]:
    """Return where the server lets somebody do more or less than the table says.

    `who` has the key of each short name, `tables` what is tried with it; nobody may subscribe to the subjects `wide`.
    """
    refused: dict[str, set[str]] = defaultdict(set)
    wrong: list[str] = []
    async with contextlib.AsyncExitStack() as opened:
        for name, key in who.items():

            def on_error(error: BusError, name: str = name) -> None:
                if isinstance(error, PermissionRefused) and error.operation == "publish":
                    refused[name].add(error.subject)

            connection = await opened.enter_async_context(await site.connect(key, on_error=on_error))
            table = tables[name]
            for subject in table:
                await connection.send([(subject, b"?", "")])
            await settled(connection)
            for subject, (writes, reads) in table.items():
                if (subject.lower() in refused[name]) == (name in writes.split()):
                    wrong.append(f"{name} publishes {subject}: refused {subject.lower() in refused[name]}")
                hears = await _hears(connection, subject)
                if hears != (name in reads.split()):
                    wrong.append(f"{name} subscribes to {subject}: {hears}")
            wrong += [f"{name} subscribes to {subject}" for subject in wide if await _hears(connection, subject)]
    return wrong


async def _hears(connection: Connection, subject: str) -> bool:
    try:
        await (await connection.subscribe(subject, lambda _: None)).unsubscribe()
    except PermissionRefused:
        return False
    return True
