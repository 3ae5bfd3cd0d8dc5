"""Calls with one affinity key go to one member of a service while it has a free place: it may have in its caches what
they begin with.

Each member is asked on a subject of its own whether it is there, from the first call with a key on. Of those that were
heard of late, a key has the one with the largest hash of both: so all callers come to the same one, nothing is kept
for a key, and a member that comes or goes takes along its own keys alone. One without a free place gives the call to
the service's queue group, and so do calls of which no member is known.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final

from moorage.bus.errors import BusError
from moorage.client.errors import rejected

if TYPE_CHECKING:
    from moorage.client.whereabouts import Whereabouts

#: how often members are asked, while calls with a key are made, and for how long one counts that was heard
ASK_S: Final = 5.0
HEARD_S: Final = 12.0
#: most characters of a key
KEY_CHARS_MAX: Final = 512


class Affinity:
    """Which members each service has, for the calls of one client. `begin` runs a coroutine beside its caller."""

    def __init__(self, begin: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        self._begin = begin
        self._asked_s: dict[str, float] = {}  # by service, when its members were asked last

    def member(self, there: Whereabouts, subject: str, key: str) -> str:
        """Return the member of the service with this subject that has a key; "" where none is known."""
        now_s = time.monotonic()
        if now_s - self._asked_s.get(subject, float("-inf")) >= ASK_S:
            self._asked_s[subject] = now_s
            self._begin(_ask(there, subject))
        return max(there.heard(subject, now_s - HEARD_S), key=lambda member: _weight(member, key), default="")


async def _ask(there: Whereabouts, subject: str) -> None:
    try:
        await there.seek(subject)
    except (BusError, RuntimeError):  # there is no right to ask, or the client is closed: the queue group has its calls
        return


def _weight(member: str, key: str) -> bytes:
    return hashlib.blake2b(f"{member} {key}".encode(errors="replace"), digest_size=8).digest()


def checked(key: str | None) -> str:
    """Return a key; "" for none. Raises `Rejected`."""
    if key is not None and not (isinstance(key, str) and 1 <= len(key) <= KEY_CHARS_MAX):
        raise rejected(
            "invalid-argument",
            "the affinity of a call is no text, or none of a usual length",
            found=str(key)[:80],
            allowed=f"1 to {KEY_CHARS_MAX} characters",
            next="name a user, a session or a document: calls with one name go to one member",
        )
    return key or ""
