"""The refusal of things that need a higher feature level of the ledger."""

from __future__ import annotations

from moorage.schemas.errors import Problem, problem


def level_problem(what: str, needed: int, level: int) -> Problem:
    """Return the refusal of something that needs a feature level above the ledger's."""
    return problem(
        "failed-precondition",
        f"{what} need feature level {needed}: schedulers of the release before cannot follow a ledger with them",
        found=f"feature level {level}",
        allowed=f"{needed} or above",
        next=f"once every scheduler is upgraded: moorage admin feature-level --to {needed}",
    )
