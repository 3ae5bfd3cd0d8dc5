"""On what evidence a record places replicas, and what of it is remembered of the newest placements."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, NamedTuple

import msgspec

from moorage.scheduler.core.ledger.record import Record
from moorage.scheduler.core.ledger.records import DECIDED_MASK, GUARANTEED, STEP_WIDTH, Op
from moorage.scheduler.core.ledger.state import Job
from moorage.schemas.waited import PlacedWhy

#: jobs whose newest placement is remembered
JOBS_MAX: Final = 10_000
_PLACE: Final = int(Op.PLACE)

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(list[tuple[int, int, int, int]]).decode


class Evidence(NamedTuple):
    """Of a placement: how many replicas it placed and by what right, how many workers were known, how many GPUs stayed
    free there."""

    decided: int
    known: int
    left: int

    @property
    def together(self) -> int:
        return self.decided & DECIDED_MASK

    @property
    def guaranteed(self) -> bool | None:
        """Whether it stayed within its tenant's guarantee; None below the feature level that tells it."""
        return bool(self.decided & GUARANTEED) if self.decided > DECIDED_MASK else None


def evidence_of(record: Record) -> dict[tuple[int, int], Evidence]:
    """Return the evidence in a record by job number and replica; one decision may place several replicas."""
    by_job = {
        record.evidence[at]: Evidence(*record.evidence[at + 1 : at + 4]) for at in range(0, len(record.evidence) - 3, 4)
    }
    found, current = dict[tuple[int, int], Evidence](), None
    steps = record.steps
    for at in range(0, len(steps), STEP_WIDTH):
        if steps[at] == _PLACE:
            current = by_job.get(steps[at + 1], current)
            if current is not None:
                found[(steps[at + 1], steps[at + 2])] = current
    return found


class Placements:
    """The evidence of the newest placement of each job, of the jobs that were placed last."""

    def __init__(self) -> None:
        self._newest: OrderedDict[int, Evidence] = OrderedDict()

    def fold(self, record: Record) -> None:
        """Take what a record placed."""
        for (num, _), evidence in evidence_of(record).items() if record.evidence else ():
            self._newest[num] = evidence
            self._newest.move_to_end(num)
        while len(self._newest) > JOBS_MAX:
            self._newest.popitem(last=False)

    def of(self, job: Job | None) -> PlacedWhy | None:
        """Return the evidence of a job's newest placement; None if it is not remembered."""
        found = None if job is None else self._newest.get(job.num)
        return None if found is None else PlacedWhy(together=found.together, workers=found.known, free_left=found.left)

    def guaranteed(self, num: int) -> bool | None:
        """Return whether a job was placed within its tenant's guarantee; None if that is not known."""
        found = self._newest.get(num)
        return None if found is None else found.guaranteed

    def dump(self) -> bytes:
        return _encode([(num, *evidence) for num, evidence in self._newest.items()])

    @classmethod
    def load(cls, saved: bytes) -> Placements:
        """Return what `dump` has written; b"" is nothing. Raises msgspec's errors for other bytes."""
        found = cls()
        found._newest.update((num, Evidence(*rest)) for num, *rest in (_decode(saved) if saved else ()))
        return found
