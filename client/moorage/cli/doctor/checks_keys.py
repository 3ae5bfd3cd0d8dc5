"""The check of `moorage doctor` that concerns a site's keys: where the folder of all keys is, none that is gone is in
use."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

from moorage.client.view.checks import Check
from moorage.schemas.errors import MoorageError
from moorage.schemas.units import many


async def of_keys(env: Mapping[str, str] | None = None) -> AsyncIterator[Check]:
    """Yield whether a connection goes on by a key that is gone. Yield nothing elsewhere than in the folder that
    `nats-config` wrote."""
    from moorage.bus import issued_keys
    from moorage.bus.contexts import config_dir
    from moorage.bus.server_users import SYSTEM
    from moorage.cli.fleet.keys import named, revoked, seen_by

    site = config_dir(env).parent
    if not (config_dir(env) / "context" / f"{SYSTEM}.json").exists():
        return
    try:
        issued = issued_keys.read(site)
        seen, missing = await seen_by(site, issued)
    except (OSError, MoorageError) as error:
        yield Check("keys", "warn", f"who is connected by which key is not known: {error}", "moorage admin keys --help")
        return
    if gone := revoked(issued, seen):
        names = ", ".join(sorted({named(issued, each) for each in gone}))
        yield Check(
            "keys", "warn", f"{many(len(gone), 'connection')} by keys that are gone: {names}",
            f"moorage admin keys {site} --cut",
        )  # fmt: skip
        return
    valid = sum(each.is_valid for each in issued.values())
    away = f"; {many(missing, 'server')} did not answer" if missing else ""
    yield Check("keys", "ok", f"{many(valid, 'key')}, and no connection by one that is gone{away}")
