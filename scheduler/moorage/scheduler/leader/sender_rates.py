"""What each tenant, or each worker, sends: a bucket of messages and one of bytes, and which senders flood.

A message beyond its sender's bucket is refused or dropped before it is decoded. A sender floods if so much of it is
refused for a second that programs cannot be waiting as they were told. A tenant also does if the leader falls behind,
and most of what it reads is of that tenant. Workers report what happens, and a busy fleet has a lot of that.
"""

from __future__ import annotations

import asyncio
from typing import Final

from moorage.schemas.answers.fleet import TenantRate
from moorage.schemas.errors import Problem, problem
from moorage.schemas.memo import Memo

#: bytes that go with each request of `requests_per_s`: a request has some 300, and at most 64 KiB
REQUEST_BYTES: Final = 1024
#: a sender may send so many seconds' worth at once
BURST_S: Final = 2.0
#: the longest time for which one is told to wait
WAIT_S_MAX: Final = 5.0
#: a flood has no less than so many requests or KiB in a second; those that are refused, for so long
FLOOD_MIN: Final = 1000
FLOOD_S: Final = 1.0
#: of a leader that is behind: a tenant floods with this part of what was read of all tenants; unless no other tenant
#: was heard for a while
FLOOD_PART: Final = 1 / 3
ALONE_S: Final = 60.0
#: messages in a second, or KiB, that the server delivers of a flooding sender
RATION: Final = 500
#: senders whose buckets are remembered: one that is forgotten begins with a full one
SENDERS_MAX: Final = 10_000
#: tenants in the figures for operators
FIGURES_MAX: Final = 20


class _Bucket:
    """What one sender may still send, and what it has sent."""

    __slots__ = ("at_s", "floods_s", "largest", "refused", "room", "room_bytes", "spent", "spent_refused", "told_s")

    def __init__(self, room: float, room_bytes: float, at_s: float) -> None:
        self.room = room
        self.room_bytes = room_bytes
        self.at_s = at_s  # when the last message came
        self.largest = 1  # bytes of its largest message
        self.refused = 0  # messages
        self.spent = 0.0  # requests or KiB since the last look
        self.spent_refused = 0.0  # of those that were refused
        self.floods_s: float | None = None  # since when each look found a flood of these
        self.told_s = 0.0  # until when others of its messages are told to wait


class SenderRates:
    """The buckets of one term; `per_s` is the rate of each sender, with so many bytes for each message.

    With `by_part`, a sender also floods by its part of what a leader reads that is behind.
    """

    def __init__(self, per_s: int, each_bytes: int = REQUEST_BYTES, *, by_part: bool = True) -> None:
        self.rate = per_s
        self.rate_bytes = per_s * each_bytes
        self._by_part = by_part
        self.rationed = frozenset[str]()
        self.some = asyncio.Event()  # set by a message after a look that may be of a flood
        self._by_sender: Memo[str, _Bucket] = Memo(SENDERS_MAX)
        self._looked_s = 0.0

    def take(self, sender: str, size: int, now_s: float) -> float:
        """Count a message of `size` bytes. Return 0 if it is within its sender's rate, else after how many seconds a
        message will be."""
        bucket = self._by_sender.get(sender)
        if bucket is None:
            bucket = _Bucket(self.rate * BURST_S, self.rate_bytes * BURST_S, now_s)
            self._by_sender.put(sender, bucket)
        gone_s = max(0.0, now_s - bucket.at_s)
        bucket.at_s += gone_s
        bucket.room = min(self.rate * BURST_S, bucket.room + gone_s * self.rate)
        bucket.room_bytes = min(self.rate_bytes * BURST_S, bucket.room_bytes + gone_s * self.rate_bytes)
        cost = 1 + size / REQUEST_BYTES
        bucket.spent += cost
        if self._by_part:
            self.some.set()
        if size > bucket.largest:
            bucket.largest = size
        if bucket.room >= 1 and bucket.room_bytes > 0:
            bucket.room -= 1
            bucket.room_bytes -= size  # below 0 by one large message at most
            return 0.0
        self.some.set()
        bucket.refused += 1
        bucket.spent_refused += cost
        # each of those that are refused is told another time
        bucket.told_s = max(bucket.told_s, now_s - min(0.0, bucket.room_bytes) / self.rate_bytes) + 1 / self.rate
        return min(WAIT_S_MAX, bucket.told_s - now_s)

    def look(self, now_s: float, *, is_behind: bool) -> list[str]:
        """Return the senders that flood and are not rationed, and begin to count anew. `is_behind` says whether more is
        sent than the leader can read."""
        others = [(name, bucket) for name, bucket in self._by_sender.items() if name not in self.rationed]
        least, found = FLOOD_MIN * (now_s - self._looked_s), list[str]()
        for name, bucket in others:
            if bucket.spent_refused <= least:
                bucket.floods_s = None
            elif bucket.floods_s is None:
                bucket.floods_s = now_s
            elif now_s - bucket.floods_s >= FLOOD_S:
                bucket.floods_s = None
                found.append(name)
        lately = sum(now_s - bucket.at_s < ALONE_S for bucket in self._by_sender.values())
        if self._by_part and is_behind and lately > 1:
            enough = max(least, FLOOD_PART * sum(bucket.spent for _, bucket in others))
            found += [name for name, bucket in others if bucket.spent >= enough and name not in found]
        for bucket in self._by_sender.values():
            bucket.spent = bucket.spent_refused = 0.0
        self._looked_s = now_s
        self.some.clear()
        return found

    def ration_of(self, sender: str) -> int:
        """Return how many messages of a flooding sender the server delivers in a second."""
        bucket = self._by_sender.get(sender)
        largest = bucket.largest if bucket is not None else 1
        return max(1, int(RATION / (1 + largest / REQUEST_BYTES)))

    def heard(self) -> list[str]:
        """Return the senders that have a bucket."""
        return list(self._by_sender)

    def refusal(self, tenant: str, wait_s: float) -> Problem:
        return problem(
            "overloaded",
            f"tenant {tenant} sends more than its rate, requests_per_s of the scheduler",
            allowed=f"{self.rate} requests/s and {self.rate_bytes >> 10} KiB/s, {BURST_S:g} s of that at once",
            next="send again after retry_after_s; several requests may come in one array",
            retry_after_s=round(wait_s + 0.05, 2),
        )

    def figures(self) -> list[TenantRate]:
        """Return the tenants that were refused messages in this term, or are rationed: first those with most."""
        rows = [
            TenantRate(tenant=tenant, refused=bucket.refused, rationed=tenant in self.rationed)
            for tenant, bucket in self._by_sender.items()
            if bucket.refused or tenant in self.rationed
        ]
        return sorted(rows, key=lambda row: (-row.refused, row.tenant))[:FIGURES_MAX]
