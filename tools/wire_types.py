"""The fields of a frame as the protocol page prints them: types in the words of JSON, and what each field is for."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

import msgspec

from moorage.schemas.described import notes

_PLAIN: Final[dict[Any, str]] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    bytes: "base64 string",
    NoneType: "null",
    Any: "anything",
}


def json_type(kind: Any, parts: dict[type, str] | None = None) -> str:
    """A type in words of JSON; `parts` are the headings on the page that describe a struct, which is linked then."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return json_type(inner[0], parts)
    if origin is Literal:
        return ", ".join(f"`{json.dumps(value)}`" for value in inner)
    if origin in (Union, UnionType):
        return " or ".join(json_type(each, parts) for each in inner if each is not msgspec.UnsetType)
    if origin is list or (origin is tuple and inner[1:] == (...,)):
        return f"array of {json_type(inner[0], parts)}"
    if origin is tuple:
        return f"array ({', '.join(json_type(each, parts) for each in inner)})"
    if origin is dict:
        return "object" if inner[1] is Any else f"object, each {json_type(inner[1], parts)}"
    heading = (parts or {}).get(kind)
    if heading is not None:
        return f"[{heading}](#{heading.lower().replace('.', '').replace(' ', '-')})"
    if issubclass(kind, msgspec.Struct):
        fields = (f'"{each.encode_name}": {json_type(each.type, parts)}' for each in msgspec.structs.fields(kind))
        return f"{{{', '.join(fields)}}}"
    raise TypeError(f"no word for {kind!r}")


def fields_table(struct: type[msgspec.Struct], parts: dict[type, str] | None = None) -> str:
    """Every field of a frame: name, type, default, and what it is where the code says so of some."""
    said = notes(struct)
    rows = []
    for field in msgspec.structs.fields(struct):
        default = default_of(field, lambda value: json.dumps(msgspec.to_builtins(value)))
        rows.append([f"`{field.encode_name}`", json_type(field.type, parts), default, said.get(field.name, "")])
    wide = 4 if any(row[3] for row in rows) else 3
    head = ["field", "type", "default", "what"][:wide]
    return table([head, *(row[:wide] for row in rows)])


def default_of(field: msgspec.structs.FieldInfo, written: Callable[[Any], str]) -> str:
    """What a field is where it is not given: a value as `written`, or in words."""
    if field.default is msgspec.UNSET:
        return "left out"
    if field.default is not msgspec.NODEFAULT:
        return written(field.default)
    if field.default_factory is not msgspec.NODEFAULT:
        return written(field.default_factory())
    return "required"


def table(rows: Sequence[Sequence[str]]) -> str:
    """A table; the first row is its head."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(
        "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in line) + " |" for line in lines
    )
