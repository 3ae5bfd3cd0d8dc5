"""A tenant's program that publishes as fast as it can: `python -m tests.release.floods.flooder CONTEXT TENANT KIND`.

It writes to the socket of its connection without reading an answer, until it is ended.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Final

from moorage.bus.connection import connect
from moorage.schemas.subjects import Subjects

#: by kind: the verb, and the bytes of each message
KINDS: Final = {"small": ("explain", b'{"job":"none"}'), "large": ("submit", b"x" * 900_000)}
CHUNK_BYTES: Final = 1 << 20


async def flood(key: str, tenant: str, kind: str) -> None:
    verb, body = KINDS[kind]
    subject = Subjects().api(tenant, verb).encode()
    while True:  # the server may cut it, too
        connection = await connect(key, "flood", give_up_after_s=None)
        reply = f"{connection.inbox_prefix}.flood.1".encode()
        message = b"PUB %b %b %d\r\n%b\r\n" % (subject, reply, len(body), body)
        chunk = message * max(1, CHUNK_BYTES // len(message))
        transport: Any = connection._client._transport
        writer: asyncio.StreamWriter = transport._bare_io_writer
        try:
            while connection.is_connected:
                writer.write(chunk)
                await writer.drain()
        except OSError:
            pass
        await connection.close()


if __name__ == "__main__":
    asyncio.run(flood(*sys.argv[1:]))
