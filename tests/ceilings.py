"""Worlds whose bounds are small, so that each is met within seconds; see `core.ledger.ceilings`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from moorage.scheduler.core.ledger.ceilings import Ceilings
from tests.unit.scheduler.driving import Driving

#: of a history there is only what the last record has added
NO_HISTORY: Final = Ceilings(history=0, history_each=0, part=0, part_each=0)
#: all of them small: records of 4 KiB, lists of 8 replicas
SMALL: Final = Ceilings(
    history=8, history_each=0, part=4, part_each=0, full_bytes=4_096, steps=96, accepts=8, bulk_bytes=2_048,
    bulk_steps=48, events=24, choices=8, standing=2, listed=8,
)  # fmt: skip


@contextmanager
def worlds_with(ceilings: Ceilings) -> Iterator[None]:
    """Each world that is made meanwhile has these bounds, in all that folds its ledger."""
    before, Driving.ceilings = Driving.ceilings, ceilings
    try:
        yield
    finally:
        Driving.ceilings = before
