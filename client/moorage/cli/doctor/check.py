"""A check of `moorage doctor`: its name, its verdict (ok, warn or fail), what was found, and a fix.

`fail` means that moorage cannot work here; `warn`, that a worker or an operator on this machine would miss something.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import msgspec

from moorage.cli.framework.options import whose
from moorage.schemas.errors import MoorageError

if TYPE_CHECKING:
    from moorage.bus.contexts import Context

#: for each answer that is asked for here
ANSWER_S_MAX: Final = 3.0
SERVERS_NEEDED: Final = "the ledger accepts records only while more than half of the servers run"

Verdict = Literal["ok", "warn", "fail"]


class Check(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="check"):
    """One line of the doctor's answer. `fix` says what to do if the verdict is not ok."""

    name: str
    verdict: Verdict
    found: str
    fix: str = ""


def failed(name: str, error: MoorageError, verdict: Verdict = "fail", fix: str = "") -> Check:
    """Return the check that failed with this error. Without `fix`, the error's own advice is the fix."""
    fixes = (*getattr(error, "fixes", ()), error.problem.next)
    return Check(name, verdict, error.problem.message, fix or next(filter(None, fixes), ""))


def role_of(context: Context | None) -> str:
    """Return the role for which a key was made, read from the inbox of its context; "" if the inbox does not tell."""
    return whose(context.inbox_prefix)[0] if context is not None else ""
