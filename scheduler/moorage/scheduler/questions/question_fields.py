"""The fields that questions and cancels may have: an unknown one is refused, as in requests and orders.

A misspelt field would otherwise be ignored, and the answer would be to another question.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from moorage.schemas.errors import refuse

#: those of `logs`, `use`, `plan`, `dlq` and of orders are known by their types
FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "cancel": ("job", "reason", "by"),
    "show": ("job", "events"),
    "explain": ("job",),
    "history": ("job", "after_rev", "limit"),
    "ls": ("states", "limit", "jobs"),
    "usage": ("since_s", "by", "after"),
    "fleet": ("after", "worker"),
    "audit": (),
    "tenants": (),
}


def check_fields(verb: str, arguments: Mapping[str, Any]) -> None:
    """Raise `Refused` if `arguments` has a field that this verb does not know. Verbs not in `FIELDS` pass."""
    fields = FIELDS.get(verb)
    unknown = next((name for name in arguments if fields is not None and name not in fields), None)
    if unknown is not None:
        unknown = str(unknown)[:80]
        raise refuse(
            "invalid-argument",
            f"{verb} has no field `{unknown}`",
            field=f"$.{unknown}",
            found=unknown,
            allowed=", ".join(fields or ()) or "no field",
        )
