"""The transitions of a job as types of their own, for `match`: what `Job.steps` yields.

    async for step in job.steps():
        match step:
            case Queued(why=why): ...
            case Placed(worker=worker, gpus=gpus): ...
            case Ended(state="SUCCEEDED"): ...
            case Ended(code=code, why=why): ...

Each is a `Change` as on the wire, with all of its fields; which type it is follows from its `state` alone.
"""

from __future__ import annotations

from typing import Final

import msgspec

from moorage.schemas.frames import Change
from moorage.schemas.job import (
    ACCEPTED,
    CANCELLING,
    CLAIMED,
    ENDING,
    EXITED,
    FROZEN,
    LOST_KEPT,
    PLACED,
    QUEUED,
    RUNNING,
    TERMINAL,
)


class Step(Change, frozen=True):
    """One transition of one replica. Of this type itself is only what a later release may say."""


class Queued(Step, frozen=True):
    """ACCEPTED, or QUEUED again after an attempt that ended with `code` and `why`."""


class Placed(Step, frozen=True):
    """`gpus` of `worker` were proposed to it."""


class Claimed(Step, frozen=True):
    """The worker holds them."""


class Running(Step, frozen=True):
    """It runs, for the first time or after it was frozen."""


class Frozen(Step, frozen=True):
    """It stands still, and keeps its GPUs."""


class Ending(Step, frozen=True):
    """On its way out, or out of reach: ENDING, CANCELLING, EXITED (a rank that waits for the others), LOST_KEPT."""


class Ended(Step, frozen=True):
    """The replica is over: SUCCEEDED, FAILED, TIMED_OUT, CANCELLED, EXPIRED or REJECTED, with its `code`."""


_KINDS: Final[dict[str, type[Step]]] = {
    ACCEPTED: Queued,
    QUEUED: Queued,
    PLACED: Placed,
    CLAIMED: Claimed,
    RUNNING: Running,
    FROZEN: Frozen,
    **dict.fromkeys((ENDING, CANCELLING, EXITED, LOST_KEPT), Ending),
    **dict.fromkeys(TERMINAL, Ended),
}


def step_of(change: Change) -> Step:
    """Return the same transition as its own type."""
    return _KINDS.get(change.state, Step)(*msgspec.structs.astuple(change))
