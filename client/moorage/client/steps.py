"""One class for each kind of transition of a job, for `match` statements. `Job.steps` yields them.

    async for step in job.steps():
        match step:
            case Submitted() | Queued(): ...
            case Placed(worker=worker, gpus=gpus): ...
            case Ended(state="SUCCEEDED"): ...
            case Ended(code=code, why=why): ...

Each step is a `Change` as on the wire, with all of its fields. Its class depends on its `state` only.
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
    NOT_READY,
    PLACED,
    QUEUED,
    READY,
    RUNNING,
    TERMINAL,
)


class Step(Change, frozen=True):
    """One transition of one replica. This class itself is for transitions to states that this release does not know."""


class Submitted(Step, frozen=True):
    """The job is in the ledger (ACCEPTED). All of its replicas wait for GPUs: `replica` is -1."""


class Queued(Step, frozen=True):
    """The replica waits for GPUs again, after an attempt that ended with `code` and `why`."""


class Placed(Step, frozen=True):
    """The scheduler chose `gpus` of `worker` for the replica; the worker has not confirmed it yet."""


class Claimed(Step, frozen=True):
    """The worker has leased the GPUs to the replica."""


class Running(Step, frozen=True):
    """The replica runs: it has started, or was resumed after a freeze."""


class IsReady(Step, frozen=True):
    """The replica, which runs, is ready for work (READY), as the `ready` of its request says."""


class NotReady(Step, frozen=True):
    """The replica was ready and is not any more (NOT_READY), for the reason in `why`; it runs on."""


class Frozen(Step, frozen=True):
    """The replica is frozen: its processes are suspended, and it holds no GPU."""


class Ending(Step, frozen=True):
    """The replica is being ended (ENDING, CANCELLING), is a rank that waits for the end of the others (EXITED), or is
    on a lost worker (LOST_KEPT)."""


class Ended(Step, frozen=True):
    """The replica has ended: SUCCEEDED, FAILED, TIMED_OUT, CANCELLED, EXPIRED or REJECTED, with its `code`."""


_KINDS: Final[dict[str, type[Step]]] = {
    ACCEPTED: Submitted,
    QUEUED: Queued,
    PLACED: Placed,
    CLAIMED: Claimed,
    RUNNING: Running,
    FROZEN: Frozen,
    READY: IsReady,
    NOT_READY: NotReady,
    **dict.fromkeys((ENDING, CANCELLING, EXITED, LOST_KEPT), Ending),
    **dict.fromkeys(TERMINAL, Ended),
}


def step_of(change: Change) -> Step:
    """Return a transition as the class of its state."""
    return _KINDS.get(change.state, Step)(*msgspec.structs.astuple(change))
