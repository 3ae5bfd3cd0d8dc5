"""How a request or an order reached the scheduler, as records have it, and whether that proves who sent it.

- `import ACCOUNT KEY`: from the account of that name, and of the user with that public key or name. nats-server stamps
  this on what an account imports, in place of what the sender may have written there, and gives it a reply of its own.
  Behind the key is the person whose key that is, as `vision/lena`, where the site's configuration names one.
- `subject`: on the subject of that tenant or operator, with an answer to its own inbox or to one of nobody's. On a
  server with keys, only that user may publish there.
- `subject, no reply`: the same, and nobody waits for an answer. Programs of moorage always do.
- `queue`: in the durable queue, whose messages nats-server keeps without its stamp.
- `open`: on a server that gives everybody every right.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import msgspec

from moorage.schemas.memo import Memo
from moorage.schemas.roles import IMPORTED_REPLY
from moorage.schemas.unreadable import UNREADABLE

IMPORT: Final = "import"
SUBJECT: Final = "subject"
NO_REPLY: Final = "subject, no reply"
QUEUE: Final = "queue"
OPEN: Final = "open"
#: what nats-server says of the user whose request an account imports
STAMP: Final = "Nats-Request-Info"
_WORD: Final = re.compile(r"[!-~]{1,128}").fullmatch
#: a connection has one stamp for all its requests
_STAMPS_MAX: Final = 1_000


class _Stamp(msgspec.Struct):
    acc: str = ""
    user: str = ""


_decode: Final = msgspec.json.Decoder(_Stamp).decode
_known: Final[Memo[str, str]] = Memo(_STAMPS_MAX)


def way(
    headers: Mapping[str, str] | None, reply: str, *, has_keys: bool, persons: Mapping[str, str] | None = None
) -> str:
    """Return how a message came. `has_keys` says whether the server has rights for each user, `persons` whose keys are
    persons': `vision/lena` by the user as nats-server names it.

    A stamp counts only beside the reply subject of an import, which no user may name: anybody may write a header.
    """
    is_imported = has_keys and reply.startswith(f"{IMPORTED_REPLY}.")
    stamp = headers.get(STAMP, "") if headers and is_imported else ""
    if stamp and (found := _known.get(stamp) or _known.put(stamp, _imported(stamp))):
        person = persons.get(found.rpartition(" ")[2]) if persons else None
        return f"{found} {person}" if person else found
    if not has_keys:
        return OPEN
    return SUBJECT if reply else NO_REPLY


def _imported(stamp: str) -> str:
    """Return what a stamp says; "" if it is none."""
    try:
        said = _decode(stamp.encode())
    except UNREADABLE:
        return ""
    if not _WORD(said.acc):
        return ""
    return f"{IMPORT} {said.acc} {said.user}" if _WORD(said.user) else f"{IMPORT} {said.acc}"


def person_of(came: str, tenant: str) -> str:
    """Return the name of the person of this tenant who sent what came so; "" where nats-server proves none."""
    if not came.startswith(f"{IMPORT} "):
        return ""
    sent = came.split(" ")
    whose, _, name = sent[-1].partition("/") if len(sent) == len((IMPORT, "account", "key", "person")) else ("", "", "")
    return name if whose == tenant else ""


def proves(came: str) -> bool:
    """Return whether a way proves who sent what came so, as far as the server's rights hold."""
    return came == SUBJECT or came.startswith(f"{IMPORT} ")


def words(came: str) -> str:
    """Return a way for a screen; one that proves nothing is marked."""
    return came if proves(came) else f"{came or 'not recorded'}: unproven"
