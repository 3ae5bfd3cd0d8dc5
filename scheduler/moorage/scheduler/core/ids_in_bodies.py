"""A job's id stands in the body of its request already, nearly always at its beginning: a record need not repeat it."""

from __future__ import annotations

from typing import Final

#: how a body begins that names its job first, without a blank as most write it and with one as Python's json does
_BEGINS: Final = b'{"job":"'
_BEGINS_WIDE: Final = b'{"job": "'


def written_id(name: str, body: bytes) -> str:
    """Return the id as a record of feature level 2 has it: empty where `id_of` finds it in the body."""
    id = name.encode()
    return "" if body.startswith((b'%b%b"' % (_BEGINS, id), b'%b%b"' % (_BEGINS_WIDE, id))) else name


def id_of(written: str, body: bytes) -> str:
    """The id of an accepted job. Raises ValueError for a body that does not begin with one, where none is written."""
    if written:
        return written
    begins = _BEGINS if body.startswith(_BEGINS) else _BEGINS_WIDE
    at = len(begins)
    end = body.find(b'"', at)
    if end <= at or not body.startswith(begins):
        raise ValueError(f"a job is accepted without an id: {body[:80]!r}")
    return body[at:end].decode()
