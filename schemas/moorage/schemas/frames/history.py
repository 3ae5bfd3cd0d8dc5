"""Frames of the history: the packed transitions of jobs."""

from __future__ import annotations

from typing import Any

import msgspec

from moorage.schemas.frames.version import VERSION


class Moved(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A transition as the history packs it: `state` is a position in the frame's `states`, `worker` a key of its
    `workers` or -1, `slots` a bit mask of that worker's GPUs, `by` as `Change` has it, then a blank and what was said,
    `result` as `Change` has it; most rows end before it.

    A `state` below 0 counts from the end of `states`: -1 is the last one (an operator's act on the job).
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


class Story(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A job's transitions in a frame of the history. Its first, ACCEPTED, is revision 1 at `accepted_ms`.

    `over`: the job is, and nothing will follow; else this is a part of a long story. `parts` are the earlier ones:
    stream sequence, first and last revision. The request is left out of parts, where it is long, and in a flood.
    `used`: milliseconds of a GPU at work and MiB seconds of memory, of the attempts whose workers have reported that.
    """

    job: str
    rev: int
    state: str
    over: bool
    accepted_ms: int
    ledger: int
    parts: list[tuple[int, int, int]]
    moves: list[Moved]
    request: Any = None
    used: tuple[int, int] | None = None


class HistoryWorker(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A worker that a history frame names; `gpus` are the uuids of the slots that were used, by position."""

    worker: str
    gpus: dict[int, str] = {}
    simulated: bool = False


class HistoryFrame(msgspec.Struct, frozen=True, gc=False, tag_field="kind", tag="history"):
    """Stories of a tenant's jobs that are over, and parts of long ones: at most four frames a second.

    A job may stand in several frames, since a new leader writes again what it cannot know to be written: (job, rev)
    tells doubles apart.
    """

    tenant: str
    states: list[str]
    workers: dict[int, HistoryWorker]
    jobs: list[Story]
    v: int = VERSION
