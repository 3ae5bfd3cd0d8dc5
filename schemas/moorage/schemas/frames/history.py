"""Frames of the history, with the packed transitions of jobs."""

from __future__ import annotations

from typing import Any

import msgspec

from moorage.schemas.frames.version import VERSION


class Moved(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A transition as the history packs it. Most rows end before their last fields.

    - `state` is a position in the frame's `states`. Below 0 it counts from the end: -1 is the last one (an operator's
      act on the job).
    - `worker` is a key of the frame's `workers`, or -1. `slots` is a bit mask of that worker's GPUs. With -2 the
      transition is of all replicas from `replica` to `slots`, of which none was ever placed.
    - `by` is as in `Change`, followed by a blank and what was said. `result` is as in `Change`.
    """

    rev: int
    time_ms: int
    replica: int
    attempt: int
    state: int
    worker: int
    slots: int
    code: int
    why: str
    fence: int
    by: str = ""
    result: int | None = None


class JobHistory(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A job's transitions in a frame of the history. The first one, ACCEPTED, is revision 1 at `accepted_ms`.

    - `over`: the job is over and nothing will follow. Otherwise this is a part of a long history.
    - `parts` are the earlier parts: stream sequence, first and last revision, and of which replicas they tell, as
      blocks: block 3 is the replicas from 3072 to 4095.
    - `request` is omitted in partial histories, when it is large, and under high load.
    - `revs` are the first and last revision of which `moves` tells, where that has not all of them: of a job with more
      than 1,024 replicas it has the ends of attempts and the acts on the job.
    - `ended`: of the last part of a job with several replicas, which of them ended without success: by state, as a
      position in the frame's `states`, a bit for each number from 0 on, the lowest of each byte first, packed by zlib.
    - `used`: milliseconds of a GPU at work and MiB seconds of memory, of the attempts whose workers have reported it.
    - `peaks`: what they had at most, as `peaks` of a report.
    - `waited`: where its waits went, a part for each cause.
    - `reported`: the replica and the newest values that it reported of itself, as JSON.
    """

    job: str
    rev: int
    state: str
    over: bool
    accepted_ms: int
    ledger: int
    parts: list[tuple[int, int, int, list[int]]]
    moves: list[Moved]
    request: Any = None
    used: tuple[int, int] | None = None
    revs: tuple[int, int] | None = None
    ended: dict[int, bytes] | None = None
    peaks: tuple[int, int, int, int] | None = None
    waited: list[Any] = []
    reported: tuple[int, str] | None = None


class HistoryWorker(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A worker in a history frame. `gpus` are the uuids of the slots that were used, by position.

    `former` is what the last two were before the worker's devices changed, oldest first: each row is for the attempts
    whose fence is below its first number, and not below that of the row before.
    """

    worker: str
    gpus: dict[int, str] = {}
    simulated: bool = False
    former: list[tuple[int, dict[int, str], bool]] = []


class HistoryFrame(msgspec.Struct, frozen=True, gc=False, tag_field="kind", tag="history"):
    """Histories of jobs of one tenant that are over, and parts of long ones.

    A job is in several frames only if its history is long. Each revision is in one frame.

    - `ledger` is the record up to which the writer had read the ledger. All that the tenant's histories had up to
      there is in this frame, in those before it, or in the next one with the same number.
    - `gap`: transitions are missing, because records of the ledger were deleted before they were read: after and
      through which sequence, from and until when in ledger ms.
    """

    tenant: str
    states: list[str]
    workers: dict[int, HistoryWorker]
    jobs: list[JobHistory]
    ledger: int = 0
    gap: tuple[int, int, int, int] | None = None
    v: int = VERSION
