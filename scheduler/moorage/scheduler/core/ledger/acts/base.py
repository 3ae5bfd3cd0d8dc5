"""The common base of all acts, and the act that this release cannot read."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from moorage.scheduler.core.ledger.folding import FoldError, Folding


class Act(msgspec.Struct, array_like=True, gc=False):
    """An act of a record."""

    #: the feature level that the ledger must have before a record may contain it, as schedulers of lower levels could
    #: not fold it
    LEVEL: ClassVar[int] = 1
    #: whether it is a decision, which the reader of decisions shows with its fields
    IS_DECISION: ClassVar[bool] = False

    @property
    def tag(self) -> str:
        """The word with which the act begins in a record."""
        return str(self.__struct_config__.tag)

    def fold(self, folding: Folding) -> None:
        """Apply the act to the state. Raises `FoldError` if it does not fit: `undo.Undo` has all that it changes."""
        raise NotImplementedError


class Unknown(Act):
    """An act that this release cannot read; no release writes it."""

    name: str
    why: str

    def fold(self, folding: Folding) -> None:
        raise FoldError(
            f"record {folding.seq} holds act {self.name!r}, in a form which this release does not know: {self.why}"
        )
