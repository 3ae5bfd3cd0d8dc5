"""The refusal of things that need a higher feature level of the ledger."""

from __future__ import annotations

from moorage.schemas.errors import Problem, problem


def level_problem(what: str, needed: int, level: int) -> Problem:
    """Return the refusal of something that needs a feature level above the ledger's.

    `what` is the subject of its sentence, in the singular.
    """
    return problem(
        "failed-precondition",
        f"{what} needs feature level {needed}, because schedulers of an earlier release cannot read it in the ledger",
        found=f"feature level {level}",
        allowed=f"{needed} or above",
        next=f"for an operator, once every scheduler is upgraded: moorage admin feature-level --to {needed}",
    )
