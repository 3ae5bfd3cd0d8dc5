"""Name the files that a job brought: a header of their archive does, as the request has the archive's address alone."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from moorage.client.errors import ClientError
from moorage.client.sending import BROUGHT, bucket_of, bucket_of_schedules
from moorage.client.tenant import is_operators
from moorage.schemas.printable import in_one_line
from moorage.schemas.units import many
from moorage.schemas.unreadable import UNREADABLE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moorage.client.connected import Connected

#: how long the bucket is waited for: the request alone says enough
ASKED_S_MAX: Final = 3.0


class _Brought(msgspec.Struct, frozen=True):
    """The header `BROUGHT`: the number of files, and the first names at the top of the archive, a folder with /."""

    files: int
    tops: int
    names: list[str]


_decode: Final = msgspec.json.Decoder(_Brought).decode


async def brought(client: Connected, run: Mapping[str, Any]) -> str:
    """Return which files a request's `run` brings, in words: `train.py, config/ (12 files); of job sweep`.

    The address stands for an archive that cannot be read now, or has no such header. Returns "" if it brings none.
    """
    told = [f"of job {each['job']}" for each in run.get("files_of") or ()]
    if (address := run.get("files")) is not None:
        told.insert(0, await _named(client, address) or address)
    return "; ".join(told)


async def _named(client: Connected, address: str) -> str:
    if is_operators(client.context):  # who may not read what is the tenant's
        return ""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ASKED_S_MAX):
            for store in (bucket_of(client), bucket_of_schedules(client)):  # a job of a schedule has the schedule's
                with contextlib.suppress(ClientError, KeyError, IndexError, *UNREADABLE):
                    if (info := await client.again(partial(store.find, address))) is not None:
                        return _words(_decode(info.headers[BROUGHT][0]))
    return ""


def _words(found: _Brought) -> str:
    """Return the names, and how many files there are where the names do not say it. Any client of the tenant can write
    the header."""
    names, more = ", ".join(map(in_one_line, found.names)), found.tops - len(found.names)
    names += f" and {more} more" if more > 0 else ""
    is_whole = found.files == len(found.names) and not any(name.endswith("/") for name in found.names)
    return names if is_whole else f"{names} ({many(found.files, 'file')})"
