"""Publish what no client of NATS would: any bytes in a line, in headers, in a name."""

from __future__ import annotations

import asyncio
import json
from urllib.parse import urlsplit


async def publish_raw(url: str, lines: bytes) -> None:
    """Publish as no client of NATS does, and wait until the server has it."""
    there = urlsplit(url)
    of_server, to_server = await asyncio.open_connection(there.hostname, there.port)
    await of_server.readline()
    options = {"verbose": False, "headers": True, "user": there.username, "pass": there.password}
    to_server.write(b"CONNECT %b\r\n%bPING\r\n" % (json.dumps(options).encode(), lines))
    assert await of_server.readline() == b"PONG\r\n"
    to_server.close()
