"""Answers callers while appends to the ledger stall, so that they do not wait for a record that does not come.

Requests that arrive during a stall are held here, before the engine sees them. If the ledger soon takes records again,
they are handled then. If not, they are refused, but only after `TOLD_AFTER_S`: perhaps only this leader is cut off,
and another scheduler leads by then and answers.
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
#: the most events that the engine may hold while nothing is written, some KiB each: what a fleet sends in minutes
READ_MAX: Final = 100_000
#: what an operator can do if the records were deleted while a leader was running
GONE_NEXT: Final = (
    "the ledger was deleted or purged: stop every scheduler, and bring the nats-server's folder back, or say"
    " `moorage admin restore FILE --replace` with the last backup"
)
#: the same for a stream of several copies without a leader: servers are missing, not disk space
HEADLESS_NEXT: Final = (
    "see which of the nats-servers that hold the ledger's copies do not run, or do not reach the others: more than half"
    " of the copies are needed; then look at the disks and logs of those that run, and start one again whose disk"
    " or max_file_store was full"
)
ROOM_NEXT: Final = (
    "look at the disk (and max_file_store) and the log of the nats-server that holds the ledger, and start it again"
    " once there is room"
)
#: why an append failed without a connection
NOT_CONNECTED: Final = "it is not connected to the nats-server"


class AppendProgress:
    """How long the current append has taken, and why its last try failed."""

    def __init__(self) -> None:
        self.since_s: float | None = None  # monotonic; None if no append is in flight
        self.trouble = ""
        self.gone = False  # the stream or its records were deleted: neither waiting nor disk space will help
        self.headless = False  # a ledger with several copies whose stream has no leader
        self.told = False  # whether the stall was logged
        self.holder = ""  # the server that holds the ledger's only copy, if there is one copy and this is known

    def begin(self) -> None:
        self.since_s, self.trouble = time.monotonic(), ""
        self.gone = self.headless = self.told = False

    def end(self) -> None:
        self.since_s, self.trouble = None, ""

    def for_s(self, now_s: float) -> float:
        """Return the seconds since the current append began; 0 if there is none."""
        return 0.0 if self.since_s is None else now_s - self.since_s


class StalledRequests:
    """Holds requests back once an append has taken `after_s`.

    `resume` handles a request that was held; `waiting` returns the number of events in the engine that no record has
    yet.
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

        Only requests that want an answer are held. Other messages pass until the engine has `READ_MAX` events; from
        then on they are dropped and counted, which does no harm since workers send everything again.
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
        """Handle the held requests in order, after the ledger has taken a record."""
        if not self._kept:
            return
        self.close()
        kept, self._kept = self._kept, deque()
        for delivery in kept:
            self._resume(delivery)

    def close(self) -> None:
        """Refuse no more held requests: another scheduler answers them, or `release` handles them."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, delay_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._refuse_held)

    def _refuse_held(self) -> None:
        """Refuse the requests that were held long enough."""
        self._timer, now_s, kept = None, time.monotonic(), self._kept
        refusal = stall_problem(self._appending, now_s)
        while kept and now_s >= _due_s(kept[0]):
            delivery = kept.popleft()
            self.told += 1
            self._answer(delivery.reply, encode(refusal, json=is_json(delivery.data)))
        if kept:
            self._arm(_due_s(kept[0]) - now_s)


def _due_s(delivery: Delivery) -> float:
    """Return when a request is refused.

    Compared as a sum: the time for which it was held, as a difference, could round to less for ever.
    """
    return delivery.received_monotonic_s + TOLD_AFTER_S


def stall_problem(appending: AppendProgress, now_s: float) -> Problem:
    """Return the answer to a request that arrives during a stall."""
    trouble = f" ({appending.trouble})" if appending.trouble else ""
    alone = f" its ledger has one copy, on {appending.holder};" if appending.holder else ""
    lost = "" if appending.gone else ", and nothing that was accepted is lost"
    return problem(
        "not-leading",
        f"the leader could not write its ledger for {appending.for_s(now_s):.0f} s{trouble}:"
        f"{alone} nothing new is accepted meanwhile{lost}",
        next=f"send again, with the same id; for an operator: {_to_do(appending)}",
        retry_after_s=1.0,
    )


def _to_do(appending: AppendProgress) -> str:
    if appending.trouble == NOT_CONNECTED:
        return "see that the nats-server that holds the ledger runs, and that the scheduler reaches it"
    return what_next(appending)


def what_next(appending: AppendProgress) -> str:
    """Return what an operator can do about a ledger that takes no record although its server is reachable."""
    if appending.gone:
        return GONE_NEXT
    return HEADLESS_NEXT if appending.headless else ROOM_NEXT
