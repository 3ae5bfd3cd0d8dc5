"""A fault in one field of a request that decodes."""

from __future__ import annotations

from typing import NamedTuple


class Trouble(NamedTuple):
    """`field` is a path without its `$.`, as `run.cwd`; `allowed` says in short what may stand there."""

    field: str
    message: str
    found: object
    allowed: str


def quoted(text: str) -> str:
    """Return a text as `found` shows it: an empty one would look as if nothing was found."""
    return text or '""'
