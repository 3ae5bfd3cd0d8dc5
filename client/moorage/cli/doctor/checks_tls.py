"""The checks of `moorage doctor` that concern TLS: whether the way to the servers is encrypted, and until when."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING

from moorage.client.view.checks import Check
from moorage.schemas.errors import MoorageError
from moorage.schemas.units import many

if TYPE_CHECKING:
    from moorage.bus.contexts import Context


async def of_tls(context: Context) -> AsyncIterator[Check]:
    """Yield whether connections of this context are encrypted, and by a certificate that lasts."""
    from moorage.bus.certificate_ends import certificate_ends

    if not context.encrypts:
        yield Check("tls", "ok", f"connections to {context.safe_url} are not encrypted")
        return
    ends = await certificate_ends(context)
    servers = len(ends.keys() & {_place(each) for each in context.servers})
    yield _lasts(ends, f"encrypted; certificates of {many(servers, 'server')} read")


async def of_site_certificates(env: Mapping[str, str] | None = None) -> AsyncIterator[Check]:
    """Yield whether a certificate of the site's folder ends soon. Yield nothing elsewhere than in the folder that
    `nats-config` wrote."""
    from moorage.bus import certificates
    from moorage.bus.contexts import config_dir

    site = config_dir(env).parent
    if not (site / "accounts.conf").exists() or not (site / "tls").is_dir():
        return
    try:
        ends = {each.name: each.at_s for each in certificates.ends(site / "tls")}
    except (OSError, MoorageError) as error:
        yield Check("site tls", "warn", f"when the site's certificates end is not known: {error}")
        return
    if ends:
        yield _lasts(
            ends, f"{many(len(ends), 'certificate')} in {site / 'tls'}", "site tls", f"moorage admin renew {site}"
        )


def _lasts(ends: Mapping[str, float], found: str, name: str = "tls", fix: str = "") -> Check:
    from moorage.bus.certificate_ends import DAY_S, WARN_DAYS
    from moorage.cli.fleet.site_tls import day

    if not ends:
        return Check(name, "ok", found)
    first = min(ends, key=lambda each: ends[each])
    left_s = ends[first] - time.time()
    until = f"{found}; the first to end, {first}, ends on {day(ends[first])}"
    if left_s < WARN_DAYS * DAY_S:
        fix = fix or "moorage admin renew, where the site's folder with every key is"
        return Check(name, "warn", f"{until}: in {many(max(0, int(left_s // DAY_S)), 'day')}", fix)
    return Check(name, "ok", until)


def _place(server: str) -> str:
    return server.partition("://")[2].rpartition("@")[2]
