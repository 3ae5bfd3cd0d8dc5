"""The constants that bound what a scheduler keeps and does at a time, as one value that all who fold a ledger have.

Each is of one of three classes, which says what a smaller number may change:

- *memory*: what is kept for answers and estimates. Decisions are the same;
- *rate*: how much one record does. All ends the same, later, and deadlines are kept;
- *form*: what clients and the ledger's readers see. The promises hold, and no more.

They are no settings: `CEILINGS` are those of the product. The worlds of the tests run with small ones, too, where each
bound is met within seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from moorage.scheduler.core.ledger.records import RECORD_BYTES_MAX


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The bounds of one ledger's state, and of who folds and leads it."""

    #: memory. Of a longer history (plus the second number for each replica) the oldest transitions leave memory
    history: int = 128
    history_each: int = 8
    #: memory. So many transitions that are not written yet (plus the second number for each replica) make a part of the
    #: history in its stream
    part: int = 64
    part_each: int = 4
    #: rate. A record with more bytes takes no more steps: up to `RECORD_BYTES_MAX` is room for acts, evidence and its
    #: own fields
    full_bytes: int = RECORD_BYTES_MAX - 96 * 1024
    #: rate. A record with more steps or new jobs is full too: building and folding it blocks the event loop
    steps: int = 2_048
    accepts: int = 1_024
    #: rate. How much of a record cancels, deadlines and rejections may fill together: a job may have thousands of rows,
    #: and renewals, requests and placements need room in the same record
    bulk_bytes: int = (RECORD_BYTES_MAX - 96 * 1024) // 2
    bulk_steps: int = 1_024
    #: rate. The most events (apart from submits and cancels) in one record, including those that write nothing, such as
    #: renewals
    events: int = 2_048
    #: rate. Choices that one pass makes; they hold up the leader, so the rest goes into the next record
    choices: int = 192
    #: rate. The most jobs for which others are being ended at one time
    standing: int = 16
    #: rate. The most ended jobs that one record compacts (big ones count more)
    compacts: int = 512
    #: form. Of jobs with more replicas, transitions of many replicas at once are one row, and answers have counts
    listed: int = 1_024


CEILINGS: Final = Ceilings()
