"""Feature level 2 in tests: their ledgers begin at level 1, and this raises them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from moorage.scheduler.core.events import Order
from moorage.scheduler.core.ledger import records
from moorage.schemas.operate import act_of

if TYPE_CHECKING:
    from tests.unit.scheduler.driving import Driving

NEXT = 2


def know_next(patch: pytest.MonkeyPatch) -> None:
    """Let all code of this process read and write records and snapshots of that level, and no later one."""
    patch.setattr(records, "FORMAT", NEXT)


def raise_level(drive: Driving) -> None:
    """An operator raises the level, and the next record has it."""
    act = act_of("feature-level", {"level": NEXT, "by": "ana"})
    drive.engine.offer(Order("feature-level", act, "raise", True, {"me": NEXT}))
    drive.tick()
    assert drive.answers["raise"].get("changed"), drive.answers["raise"]
