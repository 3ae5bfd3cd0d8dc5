"""How a job ended, from its transitions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from moorage.schemas.errors import ENDED_AS_ASKED
from moorage.schemas.frames import Change
from moorage.schemas.job import CANCELLED, CANCELLING, ENDING, EXITED, FAILED, SUCCEEDED, TERMINAL


class Result(msgspec.Struct, frozen=True):
    """How a job ended. `code` is the exit status of the member that decided it: negative is minus the signal, 0 where
    all succeeded, None where nothing ran. `changes` are the transitions that were seen, in order.

    `value` is what a handler returned, of several replicas a list; None for other jobs, and where nothing was kept.
    `stdout`, `stderr` and `lost_bytes` (how much of them is known to be missing) are filled by `run` alone.
    """

    job: str
    state: str
    code: int | None = None
    why: str = ""
    changes: list[Change] = []
    stdout: str = ""
    stderr: str = ""
    lost_bytes: int = 0
    value: Any = None


def decided(changes: Sequence[Change], state: str) -> Change | None:
    """Return the transition that made the job's `state` what it is; None where it was not seen.

    Of a gang that failed it is that of the rank that failed first: its last rows have the code of each rank.
    """
    ended = [change for change in changes if change.state == state] if state in TERMINAL else []
    if not ended:
        return None
    exits = (each for each in changes if each.state == EXITED and each.attempt == ended[-1].attempt)
    first = next((change for change in exits if change.code), None) if state == FAILED else None
    return first or next((change for change in ended if change.code), ended[-1])


def result_of(job: str, state: str, changes: list[Change], why: str, shown: Mapping[str, Any]) -> Result:
    """Return the result of a job that is over; `shown` is the answer of `show` or `ls`, for what was not seen."""
    last = decided(changes, state)
    well = 0 if state == SUCCEEDED else None  # each of a gang's ranks ended so, and the gang itself on no worker
    if last is None:
        code = shown.get("code")
        return Result(job, state, well if code is None else code, shown.get("why", why), changes)
    code = well if last.code is None else last.code
    ended = last.why
    if state == CANCELLED or ended == ENDED_AS_ASKED:  # the reason of the request says more than that of the worker
        asked = (CANCELLING,) if state == CANCELLED else (CANCELLING, ENDING)
        ended = next((each.why for each in reversed(changes) if each.state in asked and each.why), ended)
    return Result(job, state, code, ended, changes)
