"""Worlds whose bounds are small, so that each is met within seconds; see `core.ledger.ceilings`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final, Protocol

from moorage.scheduler.core.ledger.ceilings import CEILINGS, Ceilings
from tests.unit.scheduler.driving import Driving


def without_history(ceilings: Ceilings) -> Ceilings:
    """Return these bounds, but that of a history there is only what the last record has added."""
    return replace(ceilings, history=0, history_each=0, part=0, part_each=0)


NO_HISTORY: Final = without_history(CEILINGS)
#: all of them small: records of 4 KiB, lists of 8 replicas
SMALL: Final = Ceilings(
    history=8, history_each=0, part=4, part_each=0, full_bytes=4_096, steps=96, accepts=8, bulk_bytes=2_048,
    bulk_steps=48, events=24, choices=8, standing=2, compacts=2, listed=8,
)  # fmt: skip


#: each world is run with both
BOUNDS: Final = {"usual": CEILINGS, "small": SMALL}


class Made(Protocol):
    """A class of worlds, or of what they stand on."""

    ceilings: Ceilings


@contextmanager
def worlds_with(ceilings: Ceilings, kind: type[Made] = Driving) -> Iterator[None]:
    """Each world that is made meanwhile has these bounds, in all that folds its ledger."""
    before, kind.ceilings = kind.ceilings, ceilings
    try:
        yield
    finally:
        kind.ceilings = before
