"""Finds out what the fields of a frame are for: the JSON Schemas and the reference pages quote the comments in the
code.

The comment is `#:` above the field, or `#` after it on its line. Reading it needs the source; without that,
descriptions are empty.
"""

from __future__ import annotations

import inspect
import re
from typing import Any, Final, get_args

import msgspec

_FIELD: Final = re.compile(r"(?P<name>\w+): [^#]*(?:# (?P<note>.*))?")


def notes(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Return the comment on each field, also of bases, "" for a field without one; {} if the source is not there."""
    found: dict[str, str] = {}
    for base in reversed(struct.__mro__):
        if issubclass(base, msgspec.Struct) and base is not msgspec.Struct:
            found |= _own_notes(base)
    return found


def _own_notes(struct: type[msgspec.Struct]) -> dict[str, str]:
    try:
        source = inspect.getsource(struct)
    except OSError:
        return {}
    found: dict[str, str] = {}
    above: list[str] = []
    for line in source.splitlines():
        text = line.strip()
        if text.startswith(("#: ", "# ")):
            above.append(text.lstrip("#: "))
            continue
        if (field := _FIELD.fullmatch(text)) is not None:
            found[field["name"]] = " ".join(above) or field["note"] or ""
        above = []
    return found


def json_schema(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """Return msgspec's JSON Schema, with the comment of each field as its description."""
    made = msgspec.json.schema(struct)
    parts: dict[str, type[msgspec.Struct]] = {}
    _gather(struct, parts)
    for name, part in made.get("$defs", {}).items():
        if "description" in part:  # before Python 3.13 a docstring has the indentation that it has in the source
            part["description"] = inspect.cleandoc(part["description"])
        said = notes(parts[name])
        for field in msgspec.structs.fields(parts[name]):
            shown = part.get("properties", {}).get(field.encode_name)
            if shown is not None and said.get(field.name):
                shown["description"] = said[field.name]
    return made


def _gather(kind: Any, found: dict[str, type[msgspec.Struct]]) -> None:
    """Add every struct within a type to `found`, by its name."""
    for each in get_args(kind):
        _gather(each, found)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__name__ not in found:
        found[kind.__name__] = kind
        for field in msgspec.structs.fields(kind):
            _gather(field.type, found)
