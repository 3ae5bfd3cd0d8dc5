"""The runs of schedules as the ledger has them, read beside a leader."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from moorage.bus.connection import connect
from moorage.bus.jetstream import JetStream
from moorage.scheduler.core.ledger import acts
from moorage.scheduler.ledger.ledger_reader import LedgerReader
from tests.system.live.stack import Stack


class Recorded(NamedTuple):
    """A run in a record: when it was recorded, and when the next one is due, in milliseconds since 1970."""

    at_ms: int
    next_ms: int


async def recorded_runs(made: Stack) -> dict[str, list[Recorded]]:
    """Return the runs of each schedule that nobody asked for, whether they made a job or not."""
    found: dict[str, list[Recorded]] = defaultdict(list)
    async with await connect(made.ledger_url, "test") as connection:
        async for read in LedgerReader(JetStream(connection), made.subjects).records():
            for act in read.record.acts:
                if isinstance(act, acts.Ran) and act.next_ms:
                    found[act.name].append(Recorded(read.record.time, act.next_ms))
    return found
