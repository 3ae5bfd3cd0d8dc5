"""What a worker tells of the data that it has fetched for jobs: digests, which name no tenant and no source."""

from __future__ import annotations

import hashlib
from typing import Final

#: how many a load frame tells of, the last used first
HELD_MAX: Final = 64
#: characters of each
DIGITS: Final = 16


def held_key(tenant: str, driver: str, source: str) -> str:
    """Return what a load frame says of a source that was fetched for a tenant's jobs of a driver."""
    words = "\0".join((tenant, driver, source))
    return hashlib.sha256(words.encode(errors="surrogatepass")).hexdigest()[:DIGITS]
