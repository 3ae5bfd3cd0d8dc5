"""Who submitted a request, in its body: the scheduler writes it as the last field, and workers get the body without it.

Workers need not know it, and those of an earlier release would refuse a field that they do not know.
"""

from __future__ import annotations

import re
from typing import Final

from moorage.schemas.codec import decode_request, encode, is_json
from moorage.schemas.errors import Refused, refuse
from moorage.schemas.names import PERSON

FIELD: Final = "person"
#: how a body in JSON ends in which `signed` wrote a person; no value within a field can end so
_END: Final = re.compile(rb',"%s":"(%s)"\}\Z' % (FIELD.encode(), PERSON.pattern.encode()))
#: most bodies do not end so, and need no search
_LAST: Final = b'"}'
_CHARS_MAX: Final = len(f',"{FIELD}":""}}') + 64


def _found(body: bytes) -> re.Match[bytes] | None:
    return _END.search(body, max(0, len(body) - _CHARS_MAX)) if is_json(body) else None


def signed(body: bytes, person: str) -> bytes:
    """Return a request's body, in JSON, with the person who submitted it; the same bytes for "" or where it has it.

    Raises `Refused` for msgpack that is no request.
    """
    if not person:
        return body
    if not is_json(body):
        body = encode(decode_request(body))
    text = body.rstrip()
    if not text.endswith(b"}") or person_in(text) == person:
        return text
    return b'%s,"%s":"%s"}' % (text[:-1], FIELD.encode(), person.encode())


def unsigned(body: bytes) -> bytes:
    """Return a request's body without the person that `signed` wrote."""
    found = _found(body) if body[-2:] == _LAST else None
    return body if found is None else body[: found.start()] + b"}"


def person_in(body: bytes) -> str:
    """Return the person who submitted a request, as `signed` wrote it; "" if it is not known."""
    found = _found(body) if body[-2:] == _LAST else None
    return "" if found is None else found[1].decode()


def named_itself(found: str | None) -> Refused:
    """Return the refusal of a request that names a person, which nothing proves."""
    return refuse(
        "invalid-argument",
        "no request names who submits it: the scheduler writes that, by the key that nats-server stamped",
        field=f"$.{FIELD}",
        found=found,
        next=f"leave {FIELD} out; an operator makes a key for each person with moorage admin nats-config --person",
    )
