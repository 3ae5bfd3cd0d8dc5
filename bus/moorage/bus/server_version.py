"""The version that a nats-server tells of itself, and the oldest one that moorage works with.

Older ones do not know the header that fences the ledger (`Nats-Expected-Last-Subject-Sequence-Subject`), and refuse
each record as if another leader had written: seen with 2.9.10 and 2.10.26; 2.11.0 stores them.
"""

from __future__ import annotations

from typing import Final, Protocol

from moorage.schemas.errors import refuse

#: major and minor number
SERVER_MIN: Final = (2, 11)


class Versioned(Protocol):
    """A connection that knows its server's version; "" before the first one."""

    server_version: str


def is_at_least(version: str, least: tuple[int, int]) -> bool:
    """Return whether a version as `2.11.4` or `2.12.0-preview.1` is this one or newer; False if it cannot be read."""
    numbers = version.split(".")[:2]
    return all(number.isdigit() for number in numbers) and tuple(map(int, numbers)) >= least


def check_server(connection: Versioned, least: tuple[int, int], needed: str, instead: str = "") -> None:
    """Raise `Refused` if this connection's server is older than `least`, major and minor number.

    `needed` says what it lacks, `instead` what may be done beside an upgrade. Of a cluster only the server of this
    connection is asked.
    """
    found = connection.server_version
    if is_at_least(found, least):
        return
    wanted = ".".join(map(str, least))
    raise refuse(
        "failed-precondition",
        f"nats-server {found or '(unknown)'} {needed}",
        field="nats",
        found=found,
        allowed=f"nats-server {wanted} or newer",
        next=f"upgrade nats-server to {wanted} or newer{'; ' if instead else ''}{instead}",
    )


def check_oldest(connection: Versioned) -> None:
    """Raise `Refused` if this connection's server is too old for a ledger."""
    check_server(connection, SERVER_MIN, "is too old: it stores no record of a ledger")
