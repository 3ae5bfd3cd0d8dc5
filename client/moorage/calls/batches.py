"""Which calls of a member run together: the batches of a service with `service.batch`.

Pure: no socket, no clock. Times are arguments, in seconds of any steady clock.

A call that has a place waits for others here, at most until its own wait is over. That counts from when it came to any
member: what has waited for its place for longer begins as soon as there is one, with all that came meanwhile. While as
many batches run as may, no call gets a place, so that they wait in the member's room, from which idle members fetch.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from moorage.schemas.service import BatchSpec

#: a loop's timers count whole milliseconds, and its process has to get a processor: a batch is due so much sooner
EARLY_S: Final = 0.0005


class Batches:
    """The batches of one member, of which `places` run at the same time."""

    def __init__(self, spec: BatchSpec, places: int) -> None:
        self.most = spec.most
        self.places = places
        #: no call is to come: those that wait for others begin at once
        self.gets_no_more = False
        self._wait_ms = spec.wait_ms
        self._waiting: dict[int, float] = {}  # number of a call -> when its wait for others is over
        self._due_s = 0.0  # the earliest of these
        self._running: dict[int, set[int]] = {}  # number of a call -> its batch: those that are not answered
        self._run = 0

    @property
    def is_full(self) -> bool:
        """Whether as many batches run as may: no call finds a place."""
        return self._run >= self.places

    @property
    def is_whole(self) -> bool:
        """Whether a batch of `most` calls may begin."""
        return len(self._waiting) >= self.most and not self.is_full

    @property
    def waiting(self) -> Collection[int]:
        """The numbers of the calls that wait for others."""
        return self._waiting.keys()

    @property
    def due_s(self) -> float | None:
        """When the next batch begins at the latest; None if none may begin, or nothing waits for one."""
        if self.is_full or not self._waiting:
            return None
        return 0.0 if self.gets_no_more else self._due_s

    def add(self, number: int, waited_ms: int, left_ms: int, now_s: float) -> None:
        """Let a call wait for others that has waited for so long, and whose caller waits for so long from now on."""
        wait_s = min(self._wait_ms - waited_ms, left_ms) / 1000 - EARLY_S
        self._waiting[number] = due_s = now_s + max(0.0, wait_s)
        self._due_s = due_s if len(self._waiting) == 1 else min(self._due_s, due_s)

    def next(self, now_s: float) -> list[int]:
        """Return the calls of a batch that begins now, in the order in which they came; none if it waits for others."""
        due_s = self.due_s
        if not self.is_whole and (due_s is None or due_s > now_s):
            return []
        numbers = list(self._waiting)[: self.most]
        batch = set(numbers)
        for number in numbers:
            del self._waiting[number]
            self._running[number] = batch
        self._run += 1
        self._due_s = min(self._waiting.values(), default=0.0)
        return numbers

    def leave(self, number: int) -> bool:
        """Take a call out that waits for others; return whether it did."""
        waited = self._waiting.pop(number, None) is not None
        self._due_s = min(self._waiting.values(), default=0.0)
        return waited

    def end(self, number: int) -> None:
        """A call was answered. Its batch is over with the last one."""
        batch = self._running.pop(number, None)
        if batch is not None:
            batch.discard(number)
            self._run -= not batch

    def forget_waiting(self) -> list[int]:
        """Take out all calls that wait for others, and return their numbers: no program has heard of them."""
        numbers = list(self._waiting)
        self._waiting.clear()
        return numbers
