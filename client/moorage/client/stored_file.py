"""Read one file of an archive in the tenant's bucket: of those that a job brought or kept."""

from __future__ import annotations

import asyncio
import tarfile
import tempfile
from typing import IO, TYPE_CHECKING

from moorage.client.kept_files import KEPT_BYTES_MAX
from moorage.client.sending import bucket_of
from moorage.system.archives import BadArchive, Inflating

if TYPE_CHECKING:
    from moorage.client.connected import Connected


async def stored_file(client: Connected, name: str, path: str, bytes_max: int) -> bytes | None:
    """Return a file at this `path` in the archive of this `name`, cut at `bytes_max`; None if either is not there.

    Raises what `Connected.again` raises.
    """
    store = bucket_of(client)
    info = await client.again(lambda: store.find(name))
    if info is None:
        return None
    with tempfile.TemporaryFile() as plain:
        inflating = Inflating(plain, KEPT_BYTES_MAX)
        try:
            async for piece in store.get(info):
                await asyncio.to_thread(inflating.feed, piece)
            inflating.address()
            return await asyncio.to_thread(_read, plain, path, bytes_max)
        except (BadArchive, KeyError, tarfile.TarError):
            return None


def _read(plain: IO[bytes], path: str, bytes_max: int) -> bytes | None:
    plain.seek(0)
    with tarfile.open(fileobj=plain) as archive:
        file = archive.extractfile(path)
        return None if file is None else file.read(bytes_max)
