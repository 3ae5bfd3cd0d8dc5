"""Leaves a job's id out of its record where the body already begins with it, as nearly all bodies do."""

from __future__ import annotations

from typing import Final

#: how a body begins that names its job first: without a blank, as most clients write it, and with one, as Python does
_BEGINS: Final = b'{"job":"'
_BEGINS_WIDE: Final = b'{"job": "'


def written_id(name: str, body: bytes) -> str:
    """Return the id as a record contains it: empty if `id_of` finds it in the body."""
    id = name.encode()
    return "" if body.startswith((b'%b%b"' % (_BEGINS, id), b'%b%b"' % (_BEGINS_WIDE, id))) else name


def id_of(written: str, body: bytes) -> str:
    """Return the id of an accepted job. Raises ValueError if neither the record nor the start of the body has one."""
    if written:
        return written
    begins = _BEGINS if body.startswith(_BEGINS) else _BEGINS_WIDE
    at = len(begins)
    end = body.find(b'"', at)
    if end <= at or not body.startswith(begins):
        raise ValueError(f"a job is accepted without an id: {body[:80]!r}")
    return body[at:end].decode()
