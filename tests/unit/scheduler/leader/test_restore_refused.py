"""A restore over a ledger that was just written to: refused, whatever was written, and without a false word."""

from __future__ import annotations

import pytest

from moorage.bus.jetstream import Ack, JetStream
from moorage.scheduler.ledger.backup import BackupRefused, _check_ledger
from moorage.scheduler.ledger.ledger import Ledger
from moorage.testing.bus.bus import SimulatedBus
from tests.scenes import in_virtual_time
from tests.unit.scheduler.driving import SUBJECTS


@in_virtual_time
async def test_a_foreign_message_in_the_ledger_is_not_told_as_a_leader() -> None:
    jetstream = JetStream(SimulatedBus().connect("restore"))
    await Ledger(jetstream, SUBJECTS, 1).ensure()
    assert isinstance(await jetstream.append(SUBJECTS.ledger_record, b"no record"), Ack)
    with pytest.raises(BackupRefused, match=r"a scheduler may lead the ledger .* it was written to 0 s ago"):
        await _check_ledger(jetstream, SUBJECTS, replace=True)
