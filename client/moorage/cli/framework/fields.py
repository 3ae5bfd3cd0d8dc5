"""`--format '{job} {state}'`: fills the fields of a row into a template, with the syntax of `str.format`."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from moorage.client.errors import Rejected, rejected
from moorage.schemas.nearest import nearest

NAMES_SHOWN_MAX: Final = 12


class _Fields(string.Formatter):
    """Reads the fields of a template. `{request.run.argv}` and `{changes.0.state}` look into JSON objects and lists,
    and never at attributes of Python objects."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        value: Any = kwargs
        for part in field_name.split("."):
            if isinstance(value, Mapping) and part in value:
                value = value[part]
            elif isinstance(value, list) and part.isascii() and part.isdigit() and int(part) < len(value):
                value = value[int(part)]
            else:
                raise _no_field(field_name, part, value)
        return value, field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        if isinstance(value, bool | list | dict):
            value = msgspec.json.encode(value).decode()
        return str(format("-" if value is None else value, format_spec))


def filled(template: str, row: object) -> str:
    """Return the template with the row's fields filled in. Raises `Rejected`, which names the fields that exist."""
    fields = msgspec.to_builtins(row)
    try:
        return _Fields().vformat(template.replace("\\t", "\t").replace("\\n", "\n"), (), fields)
    except (ValueError, KeyError, IndexError) as error:
        raise rejected(
            "invalid-argument", f"--format cannot be read: {error}", found=template, next="--format '{job} {state}'"
        ) from None


def _no_field(name: str, part: str, value: Any) -> Rejected:
    names = [str(key) for key in value] if isinstance(value, Mapping) else []
    near = nearest(part, names)
    shown = ", ".join(names[:NAMES_SHOWN_MAX]) + (", …" if len(names) > NAMES_SHOWN_MAX else "")
    return rejected(
        "invalid-argument",
        f"--format: no field {name!r}",
        found=name,
        allowed=shown,
        next=f"--format '{{{name.removesuffix(part) + near}}}'" if near else "--json shows every field",
    )
