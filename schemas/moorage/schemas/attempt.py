"""Names an attempt of a replica, as each table and frame does that is about one.

A fence alone is no name: it is the number of the record that placed the attempt, and one record places many.
"""

from __future__ import annotations

from typing import Protocol

#: the name of an attempt: (tenant, job, replica, attempt, fence)
AttemptName = tuple[str, str, int, int, int]


class OfAttempt(Protocol):
    """A frame, or a part of one, that is about one attempt."""

    @property
    def tenant(self) -> str: ...
    @property
    def job(self) -> str: ...
    @property
    def replica(self) -> int: ...
    @property
    def attempt(self) -> int: ...
    @property
    def fence(self) -> int: ...


def name_in(frame: OfAttempt) -> AttemptName:
    """Return the name of the attempt that a frame is about."""
    return (frame.tenant, frame.job, frame.replica, frame.attempt, frame.fence)
