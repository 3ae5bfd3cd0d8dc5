"""Who acted: what NATS proves, and the name that the caller gave for itself.

An operator publishes on a subject with its own name in it, which its key allows it alone: that name is proven. On a
server without keys for each user the name is `_`, and nothing is proven.
"""

from __future__ import annotations

from typing import Final

#: in the subject of an operator's order: the operator has no key of its own
NO_OPERATOR: Final = "_"
OPERATOR: Final = "operator"
WORKER: Final = "worker"
SCHEDULER: Final = "scheduler"
#: shown behind an operator whose name nothing proves
UNVERIFIED: Final = "unverified"


def by_operator(name: str) -> str:
    """Return the actor for the name in the subject of an order: `operator:ana`, or `operator` where there is none."""
    return OPERATOR if name == NO_OPERATOR else f"{OPERATOR}:{name}"


def split(actor: str) -> tuple[str, str]:
    """Return what is proven of an actor as records have it, and the name that the caller gave ("" for none)."""
    by, _, said = actor.partition(" ")
    return by, said


def words(by: str, said: str = "") -> str:
    """Return an actor for a screen: `operator:ana (says root)`, or `operator, unverified (says root)`.

    A given name that only repeats the proven one is left out.
    """
    who = f"{by}, {UNVERIFIED}" if by == OPERATOR else by
    return f"{who} (says {said})" if said and said != by.partition(":")[2] else who
