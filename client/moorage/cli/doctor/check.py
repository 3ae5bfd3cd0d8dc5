"""What the checks of `moorage doctor` share: a check that failed with an error, and whose key is in use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from moorage.client.tenant import whose
from moorage.client.view.checks import Check, Verdict
from moorage.schemas.errors import MoorageError

if TYPE_CHECKING:
    from moorage.bus.contexts import Context

#: for each answer that is asked for here
ANSWER_S_MAX: Final = 3.0


def failed(name: str, error: MoorageError, verdict: Verdict = "fail", fix: str = "") -> Check:
    """Return the check that failed with this error. Without `fix`, the error's own advice is the fix."""
    fixes = (*getattr(error, "fixes", ()), error.problem.next)
    return Check(name, verdict, error.problem.message, fix or next(filter(None, fixes), ""))


def role_of(context: Context | None) -> str:
    """Return the role for which a key was made, read from the inbox of its context; "" if the inbox does not tell."""
    return whose(context.inbox_prefix)[0] if context is not None else ""
