"""How a class of the ledger's state lists its lasting fields: its rows in a snapshot follow from the list.

All of its other fields are soft, or follow from the lasting ones. A field may last only from a feature level on: below
it is soft, that is, folded all the same, but neither in snapshots nor in the digest, so that schedulers of the level
before follow the ledger. Each class then counts it in `digest_row(level)` only from that level on, and `facts` finds it
in what lasts: once after a snapshot of a lower level, and for all schedulers alike in the record that raises the level.

The digest stays written out in each class: read by a list, it would take half as long again, and it is computed for
each row that a record changes. A test compares both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import msgspec


class Lasting:
    """The lasting fields of a class, by name with their types as msgspec knows them.

    `made` are the arguments with which a row is made, in order; a dot leads to an attribute of another row. A snapshot
    has the values of `made` and `always` for each row, and those of `seldom` (type, default) that are not the default.
    `later` are such fields by the feature level from which they last: below it they are soft (see above).
    """

    def __init__(
        self,
        made: dict[str, Any],
        always: dict[str, Any],
        seldom: dict[str, tuple[Any, Any]] | None = None,
        later: dict[int, dict[str, tuple[Any, Any]]] | None = None,
    ) -> None:
        self.made = made
        self.always = always
        self.seldom = seldom or {}
        self.later = later or {}
        #: the type of a row in a snapshot
        self.row: Any = tuple.__class_getitem__((*made.values(), *always.values(), dict[str, msgspec.Raw]))
        #: reads a row's values, without those of `seldom`
        self.values: Callable[[Any], tuple[Any, ...]] = attrgetter(*made, *always)
        every = [*self.seldom.items(), *(field for fields in self.later.values() for field in fields.items())]
        self._decoders = {name: msgspec.msgpack.Decoder(kind).decode for name, (kind, _) in every}

    def dump(self, row: object, level: int) -> list[Any]:
        """Return a row's values for a snapshot of a ledger at this feature level."""
        rare = {name: each for name, (_, usual) in self.seldom.items() if (each := getattr(row, name)) != usual}
        for from_level, fields in self.later.items():
            if level >= from_level:
                rare |= {name: each for name, (_, usual) in fields.items() if (each := getattr(row, name)) != usual}
        return [*self.values(row), rare]

    def arguments(self, values: Sequence[Any]) -> Sequence[Any]:
        """Return the arguments with which the row is made that has these values in a snapshot."""
        return values[: len(self.made)]

    def fill(self, row: object, values: Sequence[Any]) -> None:
        """Set the fields of a new row but those with which it was made. Raises KeyError for an unknown one."""
        for name, value in zip(self.always, values[len(self.made) : -1], strict=True):
            setattr(row, name, value)
        for name, raw in values[-1].items():
            setattr(row, name, self._decoders[name](raw))
