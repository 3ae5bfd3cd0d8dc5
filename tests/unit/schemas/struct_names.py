"""Finds the keys of an answer that no field of its struct names: those that the protocol page would lack."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args, get_origin

import msgspec


def unnamed(data: Any, kind: Any, where: str = "$") -> Iterator[str]:
    """Yield the paths of keys in `data`, as JSON has it, that a struct of the type `kind` does not name."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        if isinstance(data, dict):
            fields = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
            for key, value in data.items():
                if key in fields:
                    yield from unnamed(value, fields[key], f"{where}.{key}")
                else:
                    yield f"{where}.{key}"
        return
    inner = get_args(kind)
    if get_origin(kind) is list and isinstance(data, list):
        for each in data:
            yield from unnamed(each, inner[0], f"{where}[]")
    elif get_origin(kind) is dict and isinstance(data, dict):
        for each in data.values():
            yield from unnamed(each, inner[1], f"{where}.*")
    elif get_origin(kind) is not tuple:
        for each in inner:
            yield from unnamed(data, each, where)
