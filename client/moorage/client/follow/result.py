"""Make the result of a job from its transitions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from moorage.schemas.errors import ENDED_AS_ASKED
from moorage.schemas.frames import Change
from moorage.schemas.job import CANCELLED, CANCELLING, ENDING, EXITED, FAILED, SUCCEEDED, TERMINAL


class Result(msgspec.Struct, frozen=True):
    """How a job ended. `changes` are the transitions that were seen, in order.

    `code` is the exit status of the attempt that decided the job's end: minus the signal if negative, 0 if all replicas
    succeeded, None if none is known, as when no attempt ran or its worker was lost. `value` is the return value of a
    handler, or a list of them if the job has several replicas; None for other jobs, and if the handler returned none.
    Only `run` sets `stdout`, `stderr` and `lost_bytes`, the number of bytes known to be missing in them.
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
    """Return the transition that decided the job's final `state`; None if it was not seen.

    For a gang that failed, it is the transition of the rank that failed first: the last transitions have the code of
    every rank.
    """
    ended = [change for change in changes if change.state == state] if state in TERMINAL else []
    if not ended:
        return None
    exits = (each for each in changes if each.state == EXITED and each.attempt == ended[-1].attempt)
    first = next((change for change in exits if change.code), None) if state == FAILED else None
    return first or next((change for change in ended if change.code), ended[-1])


def result_of(job: str, state: str, changes: list[Change], why: str, shown: Mapping[str, Any]) -> Result:
    """Return the result of a job that has ended. `shown` is an answer of `show` or `ls`, for transitions not seen."""
    last = decided(changes, state)
    well = 0 if state == SUCCEEDED else None  # the end of a succeeded gang has no code: every rank exited with 0
    if last is None:
        code = shown.get("code")
        return Result(job, state, well if code is None else code, shown.get("why", why), changes)
    code = well if last.code is None else last.code
    ended = last.why
    if state == CANCELLED or ended == ENDED_AS_ASKED:  # the reason in the order says more than the worker's
        asked = (CANCELLING,) if state == CANCELLED else (CANCELLING, ENDING)
        ended = next((each.why for each in reversed(changes) if each.state in asked and each.why), ended)
    return Result(job, state, code, ended, changes)
