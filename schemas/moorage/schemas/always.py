"""Fields that are in every answer, whatever their value."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)


def always(make: Callable[[], T]) -> T:
    """Return a field that is sent also if it has its default, `make()`; a client reads the default where it is absent.

    With `omit_defaults`, msgspec leaves out a default, but never the result of a function that it does not know.
    """
    field: Any = msgspec.field(default_factory=lambda: make())
    made: T = field
    return made


def nothing() -> None:
    """Return the default of a field that is sent as null."""


def sending(kind: type[S], *fields: str) -> type[S]:
    """Return a kind of an answer that sends these fields also if they have their defaults, where `kind` may not."""
    made: type[S] = _sending(kind, fields)
    return made


@lru_cache
def _sending(kind: type[msgspec.Struct], names: tuple[str, ...]) -> Any:
    by_name = {field.name: field for field in msgspec.structs.fields(kind)}
    return msgspec.defstruct(
        kind.__name__,
        [(name, by_name[name].type, _always(by_name[name])) for name in names],
        bases=(kind,),
        frozen=kind.__struct_config__.frozen,
        omit_defaults=True,
        kw_only=True,
    )


def _always(field: msgspec.structs.FieldInfo) -> Any:
    make, default = field.default_factory, field.default
    return always((lambda: default) if make is msgspec.NODEFAULT else make)


def sent(answer: S, **fields: Any) -> S:
    """Return an answer with these fields, which are sent whatever they are."""
    kept = {name: getattr(answer, name) for name in answer.__struct_fields__ if name not in fields}
    return sending(type(answer), *fields)(**kept, **fields)
