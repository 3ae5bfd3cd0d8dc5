"""While appends to the ledger stall, callers are told so, instead of waiting for an answer that does not come.

Requests that arrive during a stall are held here, before the engine has seen them. If the ledger takes records again
soon, they are read as usual. If not, they are refused, but only after `TOLD_AFTER_S`: perhaps this leader is cut off
from the ledger and another one has taken over. That one answers within milliseconds, and a request must have one answer
only, the one of whoever really leads.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from moorage.bus.transport import Delivery
from moorage.schemas.codec import encode, is_json
from moorage.schemas.errors import Problem, problem
from moorage.schemas.roles import may_answer
from moorage.schemas.subjects import Subjects

#: how long a request is held before it is refused: a leader answers within milliseconds, and the SDK waits 3 s for each
#: try
TOLD_AFTER_S: Final = 1.0
KEPT_MAX: Final = 100_000
#: events that the engine may hold while nothing is written, some KiB each: what a fleet renews in minutes
READ_MAX: Final = 100_000
#: what an operator can do when the records were deleted while a leader was running
GONE_NEXT: Final = (
    "the ledger was deleted or purged: stop every scheduler, and bring the nats-server's folder back, or say"
    " `moorage admin restore FILE --replace` with the last backup"
)
#: the same where nobody leads a stream of several copies: it is the servers that are missing, and not their room
HEADLESS_NEXT: Final = (
    "see which of the nats-servers that hold the ledger's copies do not run, or do not reach the others: more than half"
    " of the copies are needed; then look at the disks and logs of those that run, and start one again whose disk"
    " or max_file_store was full"
)
ROOM_NEXT: Final = (
    "look at the disk (and max_file_store) and the log of the nats-server that holds the ledger, and start it again"
    " once there is room"
)
#: why an append failed that had no server to go to
NOT_CONNECTED: Final = "it is not connected to the nats-server"


class AppendProgress:
    """How long the append in flight has been under way, and why its last try failed."""

    def __init__(self) -> None:
        self.since_s: float | None = None  # monotonic; None while none is in flight
        self.trouble = ""
        self.gone = False  # the stream or its records were deleted: neither waiting nor room on the disk will help
        self.headless = False  # of a ledger with several copies: no server leads its stream
        self.told = False  # in the log

    def begin(self) -> None:
        self.since_s, self.trouble = time.monotonic(), ""
        self.gone = self.headless = self.told = False

    def end(self) -> None:
        self.since_s, self.trouble = None, ""

    def for_s(self, now_s: float) -> float:
        """Seconds since the append in flight began; 0 while there is none."""
        return 0.0 if self.since_s is None else now_s - self.since_s


class StalledRequests:
    """Holds requests back once an append has taken `after_s`.

    `resume` handles a request that was held; `waiting` counts the events that the engine has and no record holds yet.
    """

    def __init__(
        self,
        appending: AppendProgress,
        subjects: Subjects,
        after_s: float,
        answer: Callable[[str, bytes], None],
        resume: Callable[[Delivery], None],
        waiting: Callable[[], int] = lambda: 0,
    ) -> None:
        self._appending = appending
        self._prefix = subjects.prefix
        self._rooms = (f"{subjects.prefix}.api.", f"{subjects.prefix}.admin.")
        self._after_s = after_s
        self._answer = answer
        self._resume = resume
        self._waiting = waiting
        self._kept: deque[Delivery] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self.told = 0
        self.dropped = 0

    def keeps(self, delivery: Delivery) -> bool:
        """Return whether this message is kept from the engine: held, or dropped.

        Only requests that wait for an answer are held. Other messages pass until the engine holds `READ_MAX` events;
        from then on they are dropped and counted, which does no harm as workers send everything again.
        """
        since_s, came_s = self._appending.since_s, delivery.received_monotonic_s
        if since_s is None or came_s - since_s < self._after_s:
            return False
        if self._held(delivery):
            return True
        if self._waiting() < READ_MAX:
            return False
        self.dropped += 1
        return True

    def _held(self, delivery: Delivery) -> bool:
        if not delivery.reply:
            return False
        if not delivery.subject.startswith(self._rooms) or len(self._kept) >= KEPT_MAX:
            return False
        if not may_answer(self._prefix, delivery.subject, delivery.reply):
            return False
        self._kept.append(delivery)
        if self._timer is None:
            self._arm(TOLD_AFTER_S)
        return True

    def release(self) -> None:
        """The ledger has taken a record: handle what was held, in order."""
        if not self._kept:
            return
        self.close()
        kept, self._kept = self._kept, deque()
        for delivery in kept:
            self._resume(delivery)

    def close(self) -> None:
        """Answer nobody any more, as somebody else leads."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, delay_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._tell)

    def _tell(self) -> None:
        """Refuse what was held long enough."""
        self._timer, now_s, kept = None, time.monotonic(), self._kept
        refusal = stall_problem(self._appending, now_s)
        while kept and now_s >= _due_s(kept[0]):
            delivery = kept.popleft()
            self.told += 1
            self._answer(delivery.reply, encode(refusal, json=is_json(delivery.data)))
        if kept:
            self._arm(_due_s(kept[0]) - now_s)


def _due_s(delivery: Delivery) -> float:
    """When it is refused. Compared as a sum: the difference (how long it was held) could round to less for ever."""
    return delivery.received_monotonic_s + TOLD_AFTER_S


def stall_problem(appending: AppendProgress, now_s: float) -> Problem:
    """Return the answer to a request that comes during a stall."""
    trouble = f" ({appending.trouble})" if appending.trouble else ""
    return problem(
        "not-leading",
        f"the leader could not write its ledger for {appending.for_s(now_s):.0f} s{trouble}:"
        f" nothing new is accepted meanwhile{'' if appending.gone else ', and nothing that was accepted is lost'}",
        next=f"send again, with the same id; for an operator: {_to_do(appending)}",
        retry_after_s=1.0,
    )


def _to_do(appending: AppendProgress) -> str:
    if appending.trouble == NOT_CONNECTED:
        return "see that the nats-server that holds the ledger runs, and that the scheduler reaches it"
    return what_next(appending)


def what_next(appending: AppendProgress) -> str:
    """Return what an operator does about a ledger that takes no record though its server is there."""
    if appending.gone:
        return GONE_NEXT
    return HEADLESS_NEXT if appending.headless else ROOM_NEXT
