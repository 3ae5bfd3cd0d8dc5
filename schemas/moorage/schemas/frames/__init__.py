"""Everything that is said or answered on a subject, apart from the request itself.

Frames are lenient (unknown fields of a newer minor version pass), requests are strict. `kind` tells frames of one
subject apart and `v` is the protocol's version; both are looked at before anything else. Structs marked as arrays
travel as JSON or msgpack arrays in the order of their fields, since a frame may hold hundreds of them.
Durations are seconds, times are ledger milliseconds unless the name ends in `_wall_s`.
"""

from __future__ import annotations

from moorage.schemas.frames.fleet import Device, FleetFrame, Hello, Load, RollCall, SlotLoad, Standing
from moorage.schemas.frames.history import HistoryFrame, HistoryWorker, Moved, Story
from moorage.schemas.frames.inspection import Finding, Look, Looked
from moorage.schemas.frames.lease_session import (
    ABOUT_THE_JOB,
    CANNOT_RUN,
    NOT_HERE,
    NOT_PERMITTED,
    OTHERS,
    RESULT,
    RESULT_LEVEL,
    SUSPECT_S,
    End,
    Fact,
    FactAck,
    FactFrame,
    FactKind,
    Goodbye,
    Held,
    Join,
    Joined,
    Place,
    Renew,
    Renewed,
    Start,
    Unwell,
    Wanted,
    result_of,
    used_detail,
    used_of,
)
from moorage.schemas.frames.output import (
    LOG_OFFSET_MAX,
    LOG_PAGE_BYTES_DEFAULT,
    LOG_PAGE_BYTES_MAX,
    LogPage,
    LogsAsked,
    Output,
    ReadLog,
    ResultLine,
    Results,
    StreamName,
)
from moorage.schemas.frames.told import Accepted, Answer, Change, Event, Events
from moorage.schemas.frames.version import VERSION

__all__ = [
    "ABOUT_THE_JOB",
    "CANNOT_RUN",
    "LOG_OFFSET_MAX",
    "LOG_PAGE_BYTES_DEFAULT",
    "LOG_PAGE_BYTES_MAX",
    "NOT_HERE",
    "NOT_PERMITTED",
    "OTHERS",
    "RESULT",
    "RESULT_LEVEL",
    "SUSPECT_S",
    "VERSION",
    "Accepted",
    "Answer",
    "Change",
    "Device",
    "End",
    "Event",
    "Events",
    "Fact",
    "FactAck",
    "FactFrame",
    "FactKind",
    "Finding",
    "FleetFrame",
    "Goodbye",
    "Held",
    "Hello",
    "HistoryFrame",
    "HistoryWorker",
    "Join",
    "Joined",
    "Load",
    "LogPage",
    "LogsAsked",
    "Look",
    "Looked",
    "Moved",
    "Output",
    "Place",
    "ReadLog",
    "Renew",
    "Renewed",
    "ResultLine",
    "Results",
    "RollCall",
    "SlotLoad",
    "Standing",
    "Start",
    "Story",
    "StreamName",
    "Unwell",
    "Wanted",
    "result_of",
    "used_detail",
    "used_of",
]
