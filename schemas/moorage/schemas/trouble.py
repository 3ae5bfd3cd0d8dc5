"""A fault in one field of a request that decodes."""

from __future__ import annotations

from typing import Final, NamedTuple

#: how `allowed` begins where a field is refused for want of another one
NONE: Final = "no"


class Trouble(NamedTuple):
    """A fault in a request. `field` is a path without its `$.`, as `run.cwd`; `allowed` says in short what is allowed
    there."""

    field: str
    message: str
    found: object
    allowed: str


def quoted(text: str) -> str:
    """Return a text in the form of `found`, in which an empty text must not look as if nothing was found."""
    return text or '""'
