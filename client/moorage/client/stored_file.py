"""Read one file of an archive in the tenant's bucket: of those that a job brought or kept."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

from moorage.client.kept_files import KEPT_BYTES_MAX
from moorage.client.sending import bucket_of
from moorage.system.archives import BadArchive, FoundFile, Inflating

if TYPE_CHECKING:
    from moorage.client.connected import Connected

#: bytes that are asked for at once: most files are small, and what was asked for comes
_BATCH_BYTES: Final = 512 * 1024


async def stored_file(
    client: Connected, name: str, path: str, bytes_max: int, stored_max: int | None = None
) -> bytes | None:
    """Return a file at this `path` in the archive of this `name`, cut at `bytes_max`; None if either is not there.

    An archive that takes more than `stored_max` bytes in the bucket counts as not there. What is behind the file
    in the archive is not read. Raises what `Connected.again` raises.
    """
    store = bucket_of(client)

    async def read() -> bytes | None:
        info = await store.find(name)
        if info is None or (stored_max is not None and info.size > stored_max):
            return None
        file = FoundFile(path, bytes_max)
        inflating = Inflating(file, KEPT_BYTES_MAX)
        async with contextlib.aclosing(store.get(info, _BATCH_BYTES)) as pieces:
            async for piece in pieces:
                await asyncio.to_thread(inflating.feed, piece)
                if (content := file.content()) is not None:
                    return content
        return file.content(at_end=True)

    with contextlib.suppress(BadArchive):
        return await client.again(read)
    return None
