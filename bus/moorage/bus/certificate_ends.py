"""Find out when the certificates end by which a context's connections are encrypted."""

from __future__ import annotations

import _ssl
import asyncio
import contextlib
import ssl
from typing import Final
from urllib.parse import urlsplit

from moorage.bus.contexts import Context

#: these days ahead, `doctor` and the alert warn of a certificate that ends
WARN_DAYS: Final = 30
DAY_S: Final = 86_400
#: names beside those of the servers, as h1:4222
AUTHORITY: Final = "authority"
OWN: Final = "own"
#: of one socket and handshake
_ANSWER_S: Final = 2.0
#: a server speaks in the open to a client whose first bytes come late, as on a busy machine
_TRIES: Final = 3
_PORT: Final = 4222


async def certificate_ends(context: Context) -> dict[str, float]:
    """Return when the certificates of each server, of the context's authority and of its user end, in seconds since the
    epoch; nothing for what cannot be read now. Raises BadContext for files that do not load."""
    tls = context.tls()
    if tls is None:
        return {}
    found: dict[str, float] = {}
    if context.ca and (authorities := tls.get_ca_certs()):
        found[AUTHORITY] = min(map(_end_s, authorities))
    if context.cert:
        # without a package there is no other way to read a certificate that no peer has sent
        found[OWN] = _end_s(_ssl._test_decode_cert(context.cert))  # type: ignore[attr-defined]
    places = [(parts.hostname or "", parts.port or _PORT) for parts in map(urlsplit, context.servers)]
    answers = await asyncio.gather(*(_of_server(host, port, tls) for host, port in places))
    for (host, port), end_s in zip(places, answers, strict=True):
        if end_s is not None:
            found[f"[{host}]:{port}" if ":" in host else f"{host}:{port}"] = end_s
    return found


async def _of_server(host: str, port: int, tls: ssl.SSLContext) -> float | None:
    for _ in range(_TRIES):
        with contextlib.suppress(OSError, TimeoutError, ssl.SSLError):
            async with asyncio.timeout(_ANSWER_S):
                _, writer = await asyncio.open_connection(host, port, ssl=tls)
            try:
                return _end_s(writer.get_extra_info("peercert"))
            finally:
                writer.transport.abort()
    return None


def _end_s(certificate: ssl._PeerCertRetDictType) -> float:
    return float(ssl.cert_time_to_seconds(str(certificate["notAfter"])))
