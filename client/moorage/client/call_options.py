"""How long a call of a service may take, and whether it is tried again."""

from __future__ import annotations

from typing import NamedTuple, TypedDict

from moorage.client.durations import Duration, seconds
from moorage.client.keywords import check_keywords


class CallOptions(TypedDict, total=False):
    """How a call is tried. `timeout` bounds it with all its tries: the wait for a place, and the run; it defaults to
    the client's. `start_within` bounds the wait for a place alone, and `try_timeout` each try. An `idempotent` call is
    tried again also where it may have run."""

    timeout: Duration | None
    start_within: Duration | None
    try_timeout: Duration | None
    idempotent: bool


class Options(NamedTuple):
    """`CallOptions` in seconds: of the whole call, of its wait for a place, and of each try."""

    timeout_s: float
    start_s: float
    try_s: float
    idempotent: bool = False

    @classmethod
    def of(cls, given: CallOptions, default_s: float) -> Options:
        """Read them. Raises TypeError for an unknown one, and `Rejected` for one that is no duration."""
        check_keywords(given, CallOptions.__annotations__, "of a call")
        timeout, start, each = given.get("timeout"), given.get("start_within"), given.get("try_timeout")
        timeout_s = default_s if timeout is None else seconds(timeout)
        start_s = timeout_s if start is None else min(seconds(start), timeout_s)
        return cls(timeout_s, start_s, timeout_s if each is None else seconds(each), given.get("idempotent", False))
