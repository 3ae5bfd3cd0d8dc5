"""The file in which a member keeps the reply subjects of the calls in its hands, for who answers them once it is dead.

It has `MAGIC`, and then a slot of `SLOT_BYTES` for each call: its state, the length of the subject, the subject. A
member writes the state last, and frees a slot by the state alone: what it has written when it is killed is whole, and
what a freed slot had is still there. Behind them is a slot of the same form with the service and the member's id.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from moorage.schemas.names import is_service
from moorage.schemas.roles import INBOX, may_answer
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
#: the state of the slot behind those of calls, and the digits of a member's id in it
IS_MEMBER: Final = 3
MEMBER_DIGITS: Final = 16


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
    return len(MAGIC) + (most + 1) * SLOT_BYTES


class Holder(NamedTuple):
    """The member that kept a file."""

    service: str
    member: str


def held_in(data: bytes, most: int, prefix: str, tenant: str) -> Iterator[HeldCall]:
    """Yield the calls in a file, each reply subject once, at most so many.

    The job could write anything there: a subject counts only if callers of that tenant's services may have named it.
    """
    seen = set[str]()
    for state, reply in _slots(data, most, prefix, tenant):
        if state in (WAITS, RUNS) and reply not in seen:
            seen.add(reply)
            yield HeldCall(reply, state == RUNS)


def holder_in(data: bytes, most: int) -> Holder | None:
    """Return the member that kept a file; None where it does not say so."""
    state, text = _slot(data, file_bytes(most) - SLOT_BYTES)
    service, _, member = text.partition(" ")
    is_one = state == IS_MEMBER and is_service(service) and len(member) == MEMBER_DIGITS and member.isalnum()
    return Holder(service, member) if is_one and data.startswith(MAGIC) else None


def inboxes_in(data: bytes, most: int, prefix: str, tenant: str) -> set[str]:
    """Return the inboxes of SDKs whose calls a member had of late, by their reply subjects: these end in numbers."""
    replies = [reply.rpartition(".") for _, reply in _slots(data, most, prefix, tenant)]
    return {inbox for inbox, _, token in replies if token.isdecimal() and inbox.startswith(f"{INBOX}.")}


def _slots(data: bytes, most: int, prefix: str, tenant: str) -> Iterator[tuple[int, str]]:
    """Yield the state and the reply subject of each slot for a call, free ones too, that has one."""
    if not data.startswith(MAGIC):
        return
    asked = Subjects(prefix).call(tenant, "any")
    for at in range(len(MAGIC), min(len(data), file_bytes(most) - SLOT_BYTES) - SLOT_BYTES + 1, SLOT_BYTES):
        state, reply = _slot(data, at)
        if reply and _is_subject(reply) and may_answer(prefix, asked, reply):
            yield state, reply


def _slot(data: bytes, at: int) -> tuple[int, str]:
    """Return the state and the text of a slot; of one that is none, no text."""
    if len(data) < at + SLOT_BYTES or not 0 < data[at + 1] <= REPLY_BYTES_MAX:
        return FREE, ""
    try:
        return data[at], data[at + 2 : at + 2 + data[at + 1]].decode("ascii")
    except UnicodeDecodeError:
        return FREE, ""


def last_words(ran: bool) -> tuple[str, str]:
    """Return what the caller of a held call is told, as an error of `CALL_ERRORS` and its message."""
    if ran:
        return MEMBER_DIED, CALL_ERRORS[MEMBER_DIED][2]
    return BUSY, "the member where the call waited has ended"


def _is_subject(text: str) -> bool:
    """Return whether one may publish to it: words between dots, none of which is a wildcard."""
    return text.isprintable() and " " not in text and all(word not in ("", "*", ">") for word in text.split("."))
