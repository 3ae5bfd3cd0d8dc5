"""How a class of the ledger's state lists its lasting fields: its rows in a snapshot follow from the list.

All of its other fields are soft, or follow from the lasting ones. The digest stays written out in each class: read by
a list, it would take half as long again, and it is computed for each row that a record changes. A test compares both.
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
    """

    def __init__(
        self, made: dict[str, Any], always: dict[str, Any], seldom: dict[str, tuple[Any, Any]] | None = None
    ) -> None:
        self.made = made
        self.always = always
        self.seldom = seldom or {}
        #: the type of a row in a snapshot
        self.row: Any = tuple.__class_getitem__((*made.values(), *always.values(), dict[str, msgspec.Raw]))
        #: reads a row's values, without those of `seldom`
        self.values: Callable[[Any], tuple[Any, ...]] = attrgetter(*made, *always)
        self._decoders = {name: msgspec.msgpack.Decoder(kind).decode for name, (kind, _) in self.seldom.items()}

    def dump(self, row: object) -> list[Any]:
        """Return a row's values for a snapshot."""
        rare = {name: each for name, (_, usual) in self.seldom.items() if (each := getattr(row, name)) != usual}
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
