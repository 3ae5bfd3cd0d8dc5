"""Acts on the ledger itself: terms of leaders, the feature level, snapshots, restores."""

from __future__ import annotations

from typing import ClassVar

from moorage.scheduler.core.ledger import facts
from moorage.scheduler.core.ledger.acts.base import Act
from moorage.scheduler.core.ledger.folding import FoldError, Folding


class Epoch(Act, tag="epoch"):
    """A leader's term begins."""

    IS_DECISION: ClassVar[bool] = True
    ledger_id: str
    scheduler: str
    wall_s: float

    def fold(self, folding: Folding) -> None:
        state = folding.state
        if state.ledger_id and state.ledger_id != self.ledger_id:
            raise FoldError(f"record {folding.seq} belongs to ledger {self.ledger_id}, this state to {state.ledger_id}")
        if not state.ledger_id:
            state.level = folding.format  # a new ledger begins at the level that its first leader writes
        state.ledger_id, state.leader = self.ledger_id, self.scheduler
        state.epoch, state.epoch_seq = folding.epoch, folding.seq


class Resign(Act, tag="resign"):
    """The leader stops: standbys need not wait for its silence."""

    def fold(self, folding: Folding) -> None:
        folding.state.leader = ""


class Settings(Act, tag="settings"):
    """What the leader decides by from now on: its release, and its settings that are not the default, as text."""

    LEVEL: ClassVar[int] = 2
    release: str
    values: dict[str, str]

    def fold(self, folding: Folding) -> None:
        folding.state.settings = self.release, tuple(sorted(self.values.items()))


class Level(Act, tag="level"):
    """An operator raises the ledger's feature level, from this record on: it is written at the new level.

    What lasts from that level on is found in the histories, by each who folds it alike, and counts in the digest.
    """

    IS_DECISION: ClassVar[bool] = True
    level: int
    by: str
    why: str

    def fold(self, folding: Folding) -> None:
        state = folding.state
        if state.level < facts.LEVEL <= self.level:
            facts.find_all(state, alike=True)
        state.level, folding.raised = self.level, True


class Snapshot(Act, tag="snapshot"):
    """A snapshot is valid from now on: its name, its sequence, and the BLAKE2b digest of its bytes."""

    name: str
    seq: int
    digest: str

    def fold(self, folding: Folding) -> None:
        state = folding.state
        state.snapshot_before, state.snapshot = state.snapshot, (self.name, self.seq, self.digest)


class Behind(Act, tag="behind"):
    """A leader found this ledger to be an older backup: no scheduler may lead it, until a restore (`Restored`)."""

    IS_DECISION: ClassVar[bool] = True
    why: str

    def fold(self, folding: Folding) -> None:
        folding.state.behind = self.why


class Restored(Act, tag="restored"):
    """This ledger was restored from a backup; `formerly` has its former ids."""

    IS_DECISION: ClassVar[bool] = True
    formerly: str

    def fold(self, folding: Folding) -> None:
        state = folding.state
        state.behind = ""
        state.former_id, state.restored_ms, state.restored_epoch = self.formerly, folding.time, folding.epoch


LedgerAct = Epoch | Resign | Settings | Level | Snapshot | Behind | Restored
