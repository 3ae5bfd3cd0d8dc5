"""What callers of the door are told when there is no answer: a status, and an error in the form of OpenAI's API.

`x-should-retry` says whether the call surely did not run. OpenAI's SDKs try some statuses again by themselves, and a
prompt may run at most once.
"""

from __future__ import annotations

import json
import math
from typing import Final, NamedTuple

from moorage.client.errors import CallFailed, CallRefused, ClientError, NotPermitted, Rejected, TimedOut, Unreachable

#: when a call may come again that found no member
NOT_READY_S: Final = 2.0
#: the same where all members are full and name no time
BUSY_S: Final = 1.0
#: statuses that come with the time to wait
_LATER: Final = (429, 503)
_BROKE_OFF: Final = 502


class DoorProblem(Exception):
    """Why there is no answer. `again`: the call did not run, and may be sent again `after_s` from now."""

    def __init__(self, status: int, code: str, message: str, *, again: bool = False, after_s: float = 0.0) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.again = again
        self.after_s = after_s

    @property
    def body(self) -> bytes:
        kind = "invalid_request_error" if self.status < 500 and self.status != 429 else "moorage_error"
        return json.dumps({"error": {"message": self.message, "type": kind, "param": None, "code": self.code}}).encode()

    @property
    def headers(self) -> dict[str, str]:
        headers = {"content-type": "application/json", "x-should-retry": "true" if self.again else "false"}
        if self.status in _LATER:
            after_s = self.after_s or BUSY_S
            headers |= {"retry-after": str(math.ceil(after_s)), "retry-after-ms": str(round(after_s * 1000))}
        return headers


class _Row(NamedTuple):
    status: int
    code: str
    again: bool
    after_s: float = 0.0


_BY_CODE: Final = {
    "no-service": _Row(404, "model_not_found", False),
    "no-member": _Row(503, "model_not_ready", True, NOT_READY_S),
    "service-busy": _Row(429, "rate_limit_exceeded", True, BUSY_S),
    "call-expired": _Row(429, "rate_limit_exceeded", True, BUSY_S),
    "member-died": _Row(502, "engine_died", False),
}


def problem_of(error: ClientError, *, is_connected: bool) -> DoorProblem:
    """Return what the caller of a call that failed so is told."""
    if isinstance(error, CallRefused) and not is_connected:
        return DoorProblem(503, "unreachable", error.why, again=True, after_s=NOT_READY_S)
    if (row := _BY_CODE.get(error.code)) is not None:
        after_s = error.problem.retry_after_s or row.after_s
        return DoorProblem(row.status, row.code, error.why, again=row.again, after_s=after_s)
    if isinstance(error, CallFailed):
        why = error.why.removeprefix(f"{error.status}: ")
        broke = error.status in (500, _BROKE_OFF)
        return DoorProblem(_BROKE_OFF if broke else error.status, "engine_died" if broke else "refused", why)
    if isinstance(error, TimedOut):
        return DoorProblem(504, "timeout", error.why)
    if isinstance(error, Unreachable):
        return DoorProblem(502, "unreachable", error.why)
    if isinstance(error, NotPermitted):
        return DoorProblem(403, "forbidden", error.why)
    if isinstance(error, Rejected):
        return DoorProblem(413 if error.code == "too-large" else 400, error.code.replace("-", "_"), error.why)
    return DoorProblem(500, error.code.replace("-", "_"), error.why)
