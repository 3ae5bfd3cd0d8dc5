"""What the checks of `moorage doctor` share: a check that failed with an error, and whose key is in use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from moorage.client.durations import age
from moorage.client.tenant import whose
from moorage.client.view.checks import Check, Verdict
from moorage.schemas.errors import MoorageError
from moorage.schemas.roles import RIGHTS_ANEW

if TYPE_CHECKING:
    from moorage.bus.contexts import Context

#: this machine's wall clock against another one
CLOCK_OFF_S_MAX: Final = 1.0
#: for each answer that is asked for here
ANSWER_S_MAX: Final = 3.0


def failed(name: str, error: MoorageError, verdict: Verdict = "fail", fix: str = "") -> Check:
    """Return the check that failed with this error. Without `fix`, the error's own advice is the fix."""
    fixes = (*getattr(error, "fixes", ()), error.problem.next)
    if error.problem.next == RIGHTS_ANEW:
        fix = RIGHTS_ANEW
    return Check(name, verdict, error.problem.message, fix or next(filter(None, fixes), ""))


def clock(off_s: float, whose: str) -> Check:
    """Return the check of this host's clock, which is `off_s` seconds ahead of that of `whose`."""
    found = f"this host's clock is {age(abs(off_s) * 1000)} {'ahead of' if off_s > 0 else 'behind'} {whose}"
    if abs(off_s) > CLOCK_OFF_S_MAX:
        fix = "run chrony or ntpd on both hosts: at a takeover the next leader computes deadlines from its host's clock"
        return Check("clock", "warn", f"{found}; they may differ by at most {CLOCK_OFF_S_MAX:g} s", fix)
    return Check("clock", "ok", found)


def role_of(context: Context | None) -> str:
    """Return the role for which a key was made, read from the inbox of its context; "" if the inbox does not tell."""
    return whose(context.inbox_prefix)[0] if context is not None else ""
