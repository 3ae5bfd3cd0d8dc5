"""`moorage admin keys`: each key of a site, whose it is, since when, and who is connected by it; also by keys that are
gone."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.console import print_err, print_out
from moorage.cli.framework.exit_codes import EXIT_DRIFT
from moorage.cli.framework.options import LOCAL_ROWS, LocalRowOptions, guarded
from moorage.cli.framework.render import age, table
from moorage.client.errors import rejected
from moorage.schemas.units import many

if TYPE_CHECKING:
    from moorage.bus.connection import Connection
    from moorage.bus.issued_keys import Issued
    from moorage.bus.server_users import Seen

#: roles whose keys are a person's, by name
_OF_PERSONS: Final = ("operator",)
#: how long a server is tried, in seconds
CONNECT_S: Final = 6.0


class KeyRow(msgspec.Struct, frozen=True):
    """A key: its role, its name, its person ("" if it is no person's), and what the servers say of it.

    `since_ms` and `seen_ms` are epoch milliseconds, 0 if not known; `seen_ms` is now for a key that is connected.
    `revoked` are connections that go on by a key that is gone, `plain` is how many of the connections have no TLS.
    """

    key: str
    role: str
    name: str
    person: str
    since_ms: int
    seen_ms: int
    connected: int
    revoked: bool
    where: list[str]
    plain: int = 0


def keys(
    site: Annotated[Path, Parameter(help="The folder that nats-config wrote, with every key in it.")],
    /,
    *,
    cut: Annotated[bool, Parameter(help="End connections by keys that are gone, leaf nodes too.")] = False,
    options: LocalRowOptions = LOCAL_ROWS,
) -> int:
    """List each key of a site: its role, its person, since when it holds, and when it was seen last by the servers.

    nats-server cuts off clients whose key is gone when it reads its configuration again, and no leaf nodes. A key that
    is gone and still connected is listed as revoked, and the exit code is 10; --cut ends such connections, and the
    servers refuse them from then on. It takes the key system.main of the folder. The servers remember connections that
    have ended until they are started again, and the last 10,000 of them.
    """

    def act() -> int:
        from moorage.bus import issued_keys
        from moorage.cli.framework.interrupts import run

        try:
            issued = issued_keys.read(site)
        except OSError as error:
            raise rejected(
                "failed-precondition", f"{site} is no folder of nats-config: {error.strerror}", found=str(site),
                next="name the folder that `moorage admin nats-config --out` wrote",
            ) from None  # fmt: skip
        seen, missing = run(seen_by(site, issued, cut=cut))
        rows = rows_of(issued, seen, time.time() * 1000)
        if not options.shown({"kind": "keys", "servers_missing": missing, "keys": msgspec.to_builtins(rows)}, rows):
            _print(rows)
        if missing:
            print_err(f"warning: {many(missing, 'server')} did not answer: who is connected there is not known")
        if _is_offered(site) and (plain := [row for row in rows if row.plain]):
            names = ", ".join(f"{row.key} ({row.plain})" for row in plain)
            print_err(
                f"warning: connections without TLS: {names}; give them the new contexts, before nats-config --tls-only"
            )
        gone = [row for row in rows if row.revoked]
        if gone:
            names = ", ".join(row.key for row in gone)
            print_err(f"warning: connections go on by keys that are gone: {names}; to end them: --cut")
        return EXIT_DRIFT if gone else 0

    return guarded(options, act)


def _is_offered(site: Path) -> bool:
    """Return whether clients of this site may still come without TLS."""
    from moorage.bus.site import tls_of

    return any(tls_of(file.read_text(encoding="utf-8")) == "offered" for file in site.glob("server*.conf"))


async def seen_by(site: Path, issued: Mapping[str, Issued], *, cut: bool = False) -> tuple[list[Seen], int]:
    """Return the connections that the site's servers know, and how many servers did not answer. With `cut`, those by
    keys that are gone are ended first. Raises `MoorageError`."""
    from moorage.bus import server_users

    async with await _connect(site) as connection:
        expected = len(connection.context.servers)
        found, answered = await server_users.connections(connection, expected)
        if cut and (gone := revoked(issued, found)):
            await server_users.cut(connection, gone)
            for each in gone:
                print_err(f"ended: {named(issued, each)}, {_where(each)}")
            found, answered = await server_users.connections(connection, expected)
        return found, max(0, expected - answered)


async def _connect(site: Path) -> Connection:
    from moorage.bus.connection import connect
    from moorage.bus.contexts import load_context
    from moorage.bus.server_users import SYSTEM

    environment = {"XDG_CONFIG_HOME": str(site)}
    return await connect(load_context(SYSTEM, environment), "moorage admin keys", give_up_after_s=CONNECT_S)


def revoked(issued: Mapping[str, Issued], seen: Iterable[Seen]) -> list[Seen]:
    """Return the connections that go on by a key that is gone. A user that the folder never issued is not one: another
    file of the server may have it."""
    return [each for each in seen if not each.stop and each.who in issued and not issued[each.who].is_valid]


def named(issued: Mapping[str, Issued], seen: Seen) -> str:
    """Return the name of the key by which a connection came."""
    return issued[seen.who].key if seen.who in issued else seen.who


def rows_of(issued: Mapping[str, Issued], seen: Sequence[Seen], now_ms: float) -> list[KeyRow]:
    """Return a row for each key that holds, and for each that is gone and connected."""
    by_who: dict[str, list[Seen]] = {}
    for each in seen:
        by_who.setdefault(each.who, []).append(each)
    rows = []
    for who, key in issued.items():
        found = by_who.get(who, [])
        live = [each for each in found if not each.stop]
        if not key.is_valid and not live:
            continue
        role, _, name = key.key.partition(".")
        last_ms = now_ms if live else max((_ms(each.stop) for each in found), default=0)
        rows.append(
            KeyRow(
                key=key.key,
                role=role,
                name=name,
                person=name if role in _OF_PERSONS else name.partition(".")[2] if role == "submitter" else "",
                since_ms=int(key.since_s * 1000),
                seen_ms=int(last_ms),
                connected=len(live),
                revoked=not key.is_valid,
                where=[_where(each) for each in live],
                plain=sum(not each.tls_version for each in live),
            )
        )
    return sorted(rows, key=lambda row: (not row.revoked, row.role, row.name))


def _print(rows: Sequence[KeyRow]) -> None:
    now_ms = time.time() * 1000
    cells = [
        [
            row.key,
            row.role,
            row.person or "-",
            "REVOKED" if row.revoked else (age(now_ms - row.since_ms) if row.since_ms else "-"),
            "now" if row.connected else (age(now_ms - row.seen_ms) if row.seen_ms else "-"),
            row.connected,
            ", ".join(row.where) or "-",
        ]
        for row in rows
    ]
    print_out(table(["key", "role", "person", "since", "seen", "conns", "where"], cells, numbers=["conns"]))


def _where(seen: Seen) -> str:
    from moorage.bus.server_users import LEAF

    kind = "leaf node " if seen.kind == LEAF else ""
    return f"{kind}{seen.name or '(no name)'} from {seen.ip}"


def _ms(time_of: str) -> float:
    """Return epoch milliseconds of a server's time, RFC 3339 with up to nanoseconds; 0 for ""."""
    return datetime.fromisoformat(time_of).timestamp() * 1000 if time_of else 0.0
