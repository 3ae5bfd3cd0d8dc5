"""The file in which a member keeps the reply subjects of the calls in its hands, for who answers them once it is dead.

It has `MAGIC`, and then a slot of `SLOT_BYTES` for each call: its state, the length of the subject, the subject. A
member writes the state last, and frees a slot by the state alone: what it has written when it is killed is whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from moorage.schemas.roles import may_answer
from moorage.schemas.service import BUSY, CALL_ERRORS, MEMBER_DIED, ROOM_MAX, BatchSpec, QueueSpec, ServiceSpec
from moorage.schemas.subjects import Subjects

#: the variable that names the file, and the file in the attempt's own folder
HELD_VARIABLE: Final = "MOORAGE_CALLS_HELD"
HELD_FILE: Final = ".moorage-calls"
MAGIC: Final = b"moorage-calls 1\n"
SLOT_BYTES: Final = 256
#: a longer subject is not kept: the call's own time ends its caller's wait
REPLY_BYTES_MAX: Final = SLOT_BYTES - 2
FREE: Final = 0
WAITS: Final = 1
RUNS: Final = 2


class HeldCall(NamedTuple):
    """A call that a member held when it ended: where its caller hears of it, and whether it may have run."""

    reply: str
    ran: bool


def most_held(places: int, batch: BatchSpec | None = None, queue: QueueSpec | None = None) -> int:
    """Return how many calls a member holds at most: those that run, and those that wait, also for its GPUs."""
    places *= 1 if batch is None else batch.most
    room = None if queue is None else queue.most
    return 2 * places + (max(ROOM_MAX, 2 * places) if room is None else room)


def most_held_of(service: ServiceSpec) -> int:
    """Return how many calls a member of this service holds at most."""
    return most_held(service.concurrency, service.batch, service.queue)


def file_bytes(most: int) -> int:
    """Return the size of the file for so many calls."""
    return len(MAGIC) + most * SLOT_BYTES


def held_in(data: bytes, most: int, prefix: str, tenant: str) -> Iterator[HeldCall]:
    """Yield the calls in a file, each reply subject once, at most so many.

    The job could write anything there: a subject counts only if callers of that tenant's services may have named it.
    """
    if not data.startswith(MAGIC):
        return
    asked, seen = Subjects(prefix).call(tenant, "any"), set[str]()
    for at in range(len(MAGIC), min(len(data), file_bytes(most)) - SLOT_BYTES + 1, SLOT_BYTES):
        state, size = data[at], data[at + 1]
        if state not in (WAITS, RUNS) or not 0 < size <= REPLY_BYTES_MAX:
            continue
        try:
            reply = data[at + 2 : at + 2 + size].decode("ascii")
        except UnicodeDecodeError:
            continue
        if reply not in seen and _is_subject(reply) and may_answer(prefix, asked, reply):
            seen.add(reply)
            yield HeldCall(reply, state == RUNS)


def last_words(ran: bool) -> tuple[str, str]:
    """Return what the caller of a held call is told, as an error of `CALL_ERRORS` and its message."""
    if ran:
        return MEMBER_DIED, CALL_ERRORS[MEMBER_DIED][2]
    return BUSY, "the member where the call waited has ended"


def _is_subject(text: str) -> bool:
    """Return whether one may publish to it: words between dots, none of which is a wildcard."""
    return text.isprintable() and " " not in text and all(word not in ("", "*", ">") for word in text.split("."))
