"""The engine of a case, and what stands in the record that it has just folded."""

from __future__ import annotations

from typing import Final

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.ledger.acts import AnyAct
from moorage.scheduler.core.ledger.record import decode_record
from moorage.scheduler.core.ledger.records import Op
from moorage.scheduler.ledger.invariants import validate
from tests.unit.scheduler.driving import Driving

#: records between two looks at the state of a standby, which folds the same
SHADOW_EVERY: Final = 8


class Record(Driving):
    """As `Driving`, which keeps what stands in the last record; the standby's state is compared now and then."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.acts: list[AnyAct] = []
        self.steps = 0
        self.held_before: set[int] = set()  # workers that were held for preemptors as the record was built
        self.shut_before: dict[int, int] = {}  # by worker number the slots that were in quarantine as it was built
        #: by job number, replica and fence: ledger ms of the placement, then of the first start, as the records say
        self.placed: dict[tuple[int, int, int], int] = {}
        self.started: dict[tuple[int, int, int], int] = {}

    def store(self, payload: bytes) -> int:
        record = decode_record(payload)
        self.acts, self.steps = record.acts, len(record.steps)
        self.held_before = {num for job in self.state.preempting.values() for num in (job.preempts or ((),))[0]}
        self.shut_before = {worker.num: worker.quarantined for worker in self.state.workers.values()}
        seq = super().store(payload)
        flat = iter(record.steps)
        for op, num, index, a, _, _ in zip(flat, flat, flat, flat, flat, flat, strict=True):
            if op == Op.PLACE:
                self.placed[num, index, seq] = record.time
            elif op == Op.START:
                replica = self.shadow.jobs[num].rows.get(index)
                if replica is not None:
                    self.started.setdefault((num, index, replica.fence), record.time - a)
        return seq

    def check(self) -> None:
        if self.state.seq % SHADOW_EVERY == 0:
            super().check()
            return
        validate(self.state)
        self.engine.fleet.validate()
        self.check_counters()
        self.check_queue()
