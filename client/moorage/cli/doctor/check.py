"""A check of `moorage doctor`: what it is about, ok or warn or fail, what was found, and a fix.

`fail` is what stops moorage here, `warn` what a worker or an operator on this machine would miss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import msgspec

from moorage.schemas.errors import MoorageError

if TYPE_CHECKING:
    from moorage.bus.contexts import Context

#: for each answer that is asked for here
ANSWER_S_MAX: Final = 3.0
SERVERS_NEEDED: Final = "the ledger accepts records only while more than half of the servers run"

Verdict = Literal["ok", "warn", "fail"]


class Check(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="check"):
    """A line of the doctor. `fix` says what to do where it is not ok."""

    name: str
    verdict: Verdict
    found: str
    fix: str = ""


def failed(name: str, error: MoorageError, verdict: Verdict = "fail", fix: str = "") -> Check:
    """Return the line of what raised; `fix` goes before what the error says itself."""
    fixes = (*getattr(error, "fixes", ()), error.problem.next)
    return Check(name, verdict, error.problem.message, fix or next(filter(None, fixes), ""))


def role_of(context: Context | None) -> str:
    """Return the role that a key was made for, as the inbox of its context says; empty where nothing says so."""
    from moorage.schemas.roles import INBOX, ROLES

    prefix = context.inbox_prefix if context is not None else ""
    first, _, rest = prefix.partition(".")
    role = rest.partition(".")[0]
    return role if first == INBOX and role in ROLES else ""
