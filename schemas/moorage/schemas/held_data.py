"""What a worker tells of the data that it has for jobs: digests, which name no tenant, no source and no path."""

from __future__ import annotations

import hashlib
import posixpath
from pathlib import PurePosixPath
from typing import Final

#: how many a load frame tells of: some of what lies below `data_dirs`, then what was fetched, the last used first
HELD_MAX: Final = 64
#: characters of each
DIGITS: Final = 16
#: behind a folder of `data_dirs` itself, which has all that is told of below it
_ITSELF: Final = "/."


def held_key(tenant: str, driver: str, source: str) -> str:
    """Return what a load frame says of a source that was fetched for a tenant's jobs of a driver."""
    words = "\0".join((tenant, driver, source))
    return hashlib.sha256(words.encode(errors="surrogatepass")).hexdigest()[:DIGITS]


def keys_below(driver: str, folder: str, names: list[str]) -> list[str]:
    """Return what a load frame says of a folder of `data_dirs` that has these names."""
    folder = posixpath.normpath(folder)
    return [held_key("", driver, each) for each in (folder + _ITSELF, *(posixpath.join(folder, n) for n in names))]


def keys_of(tenant: str, driver: str, source: str) -> frozenset[str]:
    """Return what a load frame may say of a source: any of these. Of a path, it is the path or what it lies in."""
    if not source.startswith("/"):
        return frozenset((held_key(tenant, driver, source),))
    path = PurePosixPath(posixpath.normpath(source))
    return frozenset(held_key("", driver, each) for each in (f"{path}{_ITSELF}", str(path), *map(str, path.parents)))
