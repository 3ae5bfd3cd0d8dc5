"""`--format '{job} {state}'`: fills the fields of a row into a template, with the syntax of `str.format`."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from moorage.cli.framework.exit_codes import shell_code
from moorage.client.errors import Rejected, rejected
from moorage.schemas.nearest import nearest

NAMES_SHOWN_MAX: Final = 12
#: fields of answers that are left out where they say nothing
LEFT_OUT: Final = frozenset(
    {
        "because", "counts_as", "drain", "ends_in_ms", "hold", "labels", "needs", "next", "ran_ms",
        "reason", "resized", "said", "starts_unknown", "usage", "waited_ms", "waiting", "workers",
    }
)  # fmt: skip


class _Fields(string.Formatter):
    """Reads the fields of a template. `{request.run.argv}` and `{changes.0.state}` look into JSON objects and lists,
    and never at attributes of Python objects. An exit code is as a shell gives it, as in the tables."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        value: Any = kwargs
        for part in field_name.split("."):
            if value is None:
                break  # a field of something that there is not, such as a limit
            if isinstance(value, Mapping) and part in value:
                value = value[part]
            elif isinstance(value, Mapping) and part in LEFT_OUT:
                value = None
            elif isinstance(value, list) and part.isascii() and part.isdigit() and int(part) < len(value):
                value = value[int(part)]
            else:
                raise _no_field(field_name, part, value)
        if part == "code" and isinstance(value, int):
            value = shell_code(value)
        return value, field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        if isinstance(value, bool | list | dict):
            value = msgspec.json.encode(value).decode()
        return str(format("-" if value is None else value, format_spec))


def filled(template: str, row: object) -> str:
    """Return the template with the row's fields filled in. Raises `Rejected`, which names the fields that exist."""
    fields = _whole(row)
    try:
        return _Fields().vformat(template.replace("\\t", "\t").replace("\\n", "\n"), (), fields)
    except (ValueError, KeyError, IndexError) as error:
        raise rejected(
            "invalid-argument", f"--format cannot be read: {error}", found=template, next="--format '{job} {state}'"
        ) from None


def _whole(row: object) -> Any:
    """Return a frame or a part of one as JSON has it, with the fields that have their defaults."""
    if isinstance(row, msgspec.Struct):
        kind = row.__struct_config__
        tag = {kind.tag_field: kind.tag} if kind.tag_field else {}
        return tag | {name: _whole(getattr(row, name)) for name in row.__struct_fields__}
    if isinstance(row, list | tuple):
        return [_whole(item) for item in row]
    if isinstance(row, dict):
        return {name: _whole(value) for name, value in row.items()}
    return msgspec.to_builtins(row)


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
