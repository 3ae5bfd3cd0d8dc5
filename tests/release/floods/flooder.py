"""A program with somebody's key that publishes as fast as it can: `python -m tests.release.floods.flooder KEY KIND`.

It writes to the socket of its connection without reading an answer, until it is ended.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any, Final

from moorage.bus.connection import connect
from moorage.schemas.subjects import Subjects

SUBJECTS: Final = Subjects()
LARGE: Final = b"x" * 900_000
#: by kind: the subject of a key's name, and the bytes of each message
KINDS: Final[dict[str, tuple[Callable[[str], str], bytes]]] = {
    "explains": (lambda tenant: SUBJECTS.api(tenant, "explain"), b'{"job":"none"}'),
    "submits": (lambda tenant: SUBJECTS.api(tenant, "submit"), LARGE),
    "renewals": (lambda worker: SUBJECTS.worker(worker, "renew"), b"{}"),
    "facts": (lambda worker: SUBJECTS.worker(worker, "fact"), LARGE),
    "loads": (lambda worker: SUBJECTS.load(worker), b"{}"),
    "looks": (lambda worker: SUBJECTS.worker(worker, "looked"), b"{}"),
}
CHUNK_BYTES: Final = 1 << 20


async def flood(key: str, kind: str) -> None:
    subject_of, body = KINDS[kind]
    subject = subject_of(key.partition(".")[2]).encode()
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
