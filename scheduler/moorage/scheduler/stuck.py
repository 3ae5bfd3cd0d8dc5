"""While the ledger takes no record, whoever sends a request is told so, instead of hearing nothing.

A request that comes meanwhile is kept back, in no record and in no queue of the engine's. If the ledger takes records
again in time, it is read as usual. Otherwise it is refused, but only after a while in which another leader, if there is
one, would have answered: a request has one answer, and a leader that is cut off from the ledger must not give it in
place of the one that leads.
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

#: what a request is kept back before it is refused: a leader answers in milliseconds, and a try of the SDK's takes 3 s
TOLD_AFTER_S: Final = 1.0
KEPT_MAX: Final = 100_000
#: what is read beside those while no record is taken, some KiB each: a fleet's renewals of minutes
READ_MAX: Final = 100_000
#: what an operator does about a ledger whose records were deleted under its leader
GONE_NEXT: Final = (
    "the ledger was deleted or purged: stop every scheduler, and bring the nats-server's folder back, or say"
    " `moorage admin restore FILE --replace` with the last backup"
)
#: what came of an append that had no server to go to
NOT_CONNECTED: Final = "it is not connected to the nats-server"


#: the same where nobody leads a stream of several copies: it is the servers that are missing, and not their room
HEADLESS_NEXT: Final = (
    "see which of the nats-servers that hold the ledger's copies do not run, or do not reach the others: more than half"
    " of the copies are needed; then look at the disks and logs of those that run"
)
ROOM_NEXT: Final = (
    "look at the disk and the log of the nats-server that holds the ledger, and start it again once there is room"
)


class Appending:
    """How long the append in flight has been under way, and what came of its last try."""

    def __init__(self) -> None:
        self.since_s: float | None = None  # monotonic; None while none is in flight
        self.trouble = ""
        self.gone = False  # the ledger's records or its stream were deleted: no room and no wait brings them back
        self.headless = False  # of a ledger with several copies: no server leads its stream
        self.told = False  # in the log

    def begin(self) -> None:
        self.since_s, self.trouble = time.monotonic(), ""
        self.gone = self.headless = self.told = False

    def end(self) -> None:
        self.since_s, self.trouble = None, ""

    def for_s(self, now_s: float) -> float:
        """How long nothing has been written, in seconds; 0 while nothing is to be."""
        return 0.0 if self.since_s is None else now_s - self.since_s


class Stuck:
    """`after_s`: how long an append takes before requests are kept back. `resume` reads one that was; `waiting` is how
    much was read and is in no record yet."""

    def __init__(
        self,
        appending: Appending,
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
        """Whether this request is kept back. What waits for no answer, and what workers say, never is: beyond a bound
        it is dropped and counted, for workers say all of it again."""
        since_s, came_s = self._appending.since_s, delivery.received_monotonic_s
        if since_s is None or came_s - since_s < self._after_s:
            return False
        if self._keeps(delivery):
            return True
        if self._waiting() < READ_MAX:
            return False
        self.dropped += 1
        return True

    def _keeps(self, delivery: Delivery) -> bool:
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
        """The ledger has taken a record: what was kept back is read, in its order."""
        if not self._kept:
            return
        self.close()
        kept, self._kept = self._kept, deque()
        for delivery in kept:
            self._resume(delivery)

    def close(self) -> None:
        """Answer nobody any more: somebody else leads."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, delay_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._tell)

    def _tell(self) -> None:
        """Refuse those that were kept back long enough."""
        self._timer, now_s, kept = None, time.monotonic(), self._kept
        refusal = told(self._appending, now_s)
        while kept and now_s >= _due_s(kept[0]):
            delivery = kept.popleft()
            self.told += 1
            self._answer(delivery.reply, encode(refusal, json=is_json(delivery.data)))
        if kept:
            self._arm(_due_s(kept[0]) - now_s)


def _due_s(delivery: Delivery) -> float:
    """When it is refused. How long it was kept, a difference, can round to less for ever."""
    return delivery.received_monotonic_s + TOLD_AFTER_S


def told(appending: Appending, now_s: float) -> Problem:
    """What whoever asks meanwhile is told."""
    trouble = f" ({appending.trouble})" if appending.trouble else ""
    return problem(
        "not-leading",
        f"the leader could not write its ledger for {appending.for_s(now_s):.0f} s{trouble}:"
        f" nothing new is accepted meanwhile{'' if appending.gone else ', and nothing that was accepted is lost'}",
        next=f"send again, with the same id; for an operator: {_to_do(appending)}",
        retry_after_s=1.0,
    )


def _to_do(appending: Appending) -> str:
    if appending.trouble == NOT_CONNECTED:
        return "see that the nats-server that holds the ledger runs, and that the scheduler reaches it"
    return what_next(appending)


def what_next(appending: Appending) -> str:
    """What an operator does about a ledger that takes no record though its server is there."""
    if appending.gone:
        return GONE_NEXT
    return HEADLESS_NEXT if appending.headless else ROOM_NEXT
