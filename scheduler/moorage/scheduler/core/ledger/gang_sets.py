"""Which checkpoints of a gang count: those of one step that all of its ranks have stored in one attempt.

Each rank stores sets of its own, at steps of its own. What is remembered of them are the newest step that all have,
and the steps of a rank that all may still come to have. The others never count again, and their workers may write over
them: so a worker never loses what this remembers, and a gang never begins with ranks of different steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from moorage.scheduler.core.ledger.state import Job, Replica

#: an attempt of the gang, and a step that it stored
Key = tuple[int, int]
#: of a gang that begins with no set
NO_SET: Final[Key] = 0, 0


def note_set(job: Job, replica: Replica, attempt: int, step: int, digest: str) -> list[Replica]:
    """Note that a rank has stored a set of a step, or with an empty digest that it can be read no more; return the
    ranks of which less or more is remembered now."""
    key, before = (attempt, step), {each: each.sets for each in job.rows.values()}
    if not digest:
        for each in before:
            each.sets = tuple(kept for kept in each.sets if kept[:2] != key)
    else:
        replica.sets = (*(kept for kept in replica.sets if kept[:2] != key), (attempt, step, digest))
        common, own = common_of(job), {kept[:2] for kept in replica.sets}
        for each in before:  # what this rank has passed without storing it, none will come to have with it
            each.sets = tuple(kept for kept in each.sets if kept[:2] > key or kept[:2] in own)
            if common is not None:
                each.sets = tuple(kept for kept in each.sets if kept[:2] >= common)
    return [each for each, sets in before.items() if each.sets != sets]


def common_of(job: Job) -> Key | None:
    """Return the newest attempt and step of which every rank has a set; None for none."""
    shared: set[Key] | None = None
    for each in job.rows.values():
        own = {kept[:2] for kept in each.sets}
        shared = own if shared is None else shared & own
        if not shared:
            return None
    return max(shared, default=None) if shared else None


def set_of(replica: Replica, key: Key | None) -> list[tuple[int, str]]:
    """Return the attempt and digest of a rank's set of this step, [] for none."""
    return [(attempt, digest) for attempt, step, digest in replica.sets if (attempt, step) == key]
