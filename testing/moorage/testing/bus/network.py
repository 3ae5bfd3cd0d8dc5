"""The network of the simulated bus: partitions, delays, duplicates and lost answers.

All chance comes from one seed, drawn in the order in which messages are sent: the same seed, the same run.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

#: the name of the simulated server, for faults and partitions between it and a connection
SERVER: Final = "server"
#: messages under way at once; beyond it a simulation is a runaway
UNDER_WAY_MAX: Final = 1_000_000
#: ways whose last arrival is kept; beyond it, those over which nothing is under way are forgotten
WAYS_MAX: Final = 10_000


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """What may happen to a message, each with a probability of 0..1. `delay_ms` is (least, most), drawn evenly.

    Messages from one sender to one subscription keep their order, as over nats-py; between two subscriptions there is
    none. With the probability `reorder` a message is held back for up to `reorder_ms` more, and those after it pass.
    `lose_ack`: an append is stored and its answer lost, so the caller cannot know. `deny_ack`: the part of these in
    which a refusal (10071) comes in place of the answer, as servers send it when a stream changes its leader.
    """

    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    delay_ms: tuple[float, float] = (0.0, 0.0)
    reorder_ms: float = 50.0
    lose_ack: float = 0.0
    deny_ack: float = 0.0

    def __post_init__(self) -> None:
        for name in ("drop", "duplicate", "reorder", "lose_ack", "deny_ack"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be 0..1, found {getattr(self, name)}")
        if not 0 <= self.delay_ms[0] <= self.delay_ms[1] or self.reorder_ms < 0:
            raise ValueError(f"delay_ms must be (least, most) and not negative, found {self.delay_ms}")


class FaultyNetwork:
    """Carries messages between parties, which have names: connections their own, the server `SERVER`.

    `counters`: carried, dropped, cut (by a partition), duplicated, reordered, lost_acks, denied_acks.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        drop: float = 0.0,
        duplicate: float = 0.0,
        reorder: float = 0.0,
        delay_ms: tuple[float, float] = (0.0, 0.0),
        lose_ack: float = 0.0,
    ) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.counters: Counter[str] = Counter()
        self.faults = Faults(drop=drop, duplicate=duplicate, reorder=reorder, delay_ms=delay_ms, lose_ack=lose_ack)
        self._by_pair: dict[frozenset[str], Faults] = {}
        self._groups: list[frozenset[str]] = []
        self._isolated: set[str] = set()
        self._acks_to_lose: Counter[str] = Counter()
        self._under_way: list[tuple[float, float, int, str, str, Callable[[], None]]] = []
        self._sent = 0
        self._last_due_s: dict[tuple[str, str, float], float] = {}  # by sender, receiver and lane
        self._timer: asyncio.TimerHandle | asyncio.Handle | None = None
        self._timer_due_s = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._context = contextvars.Context()  # the network is in nobody's process

    def __repr__(self) -> str:
        return f"<FaultyNetwork simulated, seed {self.seed}, {self.faults}>"

    # -- what a test sets ---------------------------------------------------------------------------------------

    def between(self, one: str, other: str, faults: Faults) -> None:
        """Set the faults between these two parties, in both directions, in place of the general ones."""
        self._by_pair[frozenset((one, other))] = faults

    def partition(self, *groups: Iterable[str]) -> None:
        """Cut these groups off from each other; messages on their way are lost, too. Connections in no group reach
        all."""
        self._groups = [frozenset(group) for group in groups]

    def isolate(self, *names: str) -> None:
        """Cut these connections, besides those isolated before, off from all others, later ones included."""
        self._isolated |= {*names}

    def heal(self) -> None:
        """End the partition, all isolation and all faults. Messages that were lost stay lost."""
        self._groups = []
        self._isolated.clear()
        self.faults = Faults()
        self._by_pair.clear()
        self._acks_to_lose.clear()

    def lose_next_ack(self, name: str, count: int = 1) -> None:
        """Store the next appends of this connection and lose their answers."""
        self._acks_to_lose[name] += count

    @property
    def is_reliable(self) -> bool:
        """Whether from now on each message arrives exactly once and in order, though perhaps late."""
        faults = self.faults
        chances = faults.drop or faults.duplicate or faults.reorder or faults.lose_ack
        return not (chances or self._groups or self._isolated or self._by_pair or +self._acks_to_lose)

    # -- what the bus asks --------------------------------------------------------------------------------------

    def of(self, one: str, other: str) -> Faults:
        return self._by_pair.get(frozenset((one, other)), self.faults) if self._by_pair else self.faults

    def reaches(self, one: str, other: str) -> bool:
        if (one in self._isolated) != (other in self._isolated):
            return False
        if not self._groups:
            return True
        sides = [next((n for n, group in enumerate(self._groups) if name in group), None) for name in (one, other)]
        return None in sides or sides[0] == sides[1]

    def loses_ack(self, name: str) -> bool:
        """Return whether the answer to an append that was just stored is lost; each call counts as one such append."""
        lost = self._acks_to_lose[name] > 0
        if lost:
            self._acks_to_lose[name] -= 1
        elif (chance := self.of(name, SERVER).lose_ack) > 0:
            lost = self.random.random() < chance
        self.counters["lost_acks"] += lost
        return lost

    def denies_ack(self, name: str) -> bool:
        """Return whether a refusal takes the place of an answer that is lost."""
        chance = self.of(name, SERVER).deny_ack
        denied = chance > 0 and self.random.random() < chance
        self.counters["denied_acks"] += denied
        return denied

    def carry(self, sender: str, receiver: str, arrive: Callable[[], None], lane: float = 0.0) -> None:
        """Call `arrive` when the message arrives: once, twice or never. The order of a sender's messages holds within a
        `lane`: what arrives at the same time arrives in the order of the lanes."""
        if (self._groups or self._isolated) and not self.reaches(sender, receiver):
            self.counters["cut"] += 1
            return
        faults = self.of(sender, receiver) if self._by_pair else self.faults
        chance = self.random.random
        if faults.drop and chance() < faults.drop:
            self.counters["dropped"] += 1
            return
        self._send(sender, receiver, arrive, faults, lane)
        if faults.duplicate and chance() < faults.duplicate:
            self.counters["duplicated"] += 1
            self._send(sender, receiver, arrive, faults, lane)

    def carry_last(self, receiver: str, arrive: Callable[[], None], lane: float) -> None:
        """Call `arrive` behind all that is on its way to the receiver in this lane, whoever sent it."""
        due = (due_s for due_s, its_lane, _, _, to, _ in self._under_way if (to, its_lane) == (receiver, lane))
        way = (SERVER, receiver, lane)
        self._last_due_s[way] = max(due, default=self._last_due_s.get(way, 0.0))
        self.carry(SERVER, receiver, arrive, lane)

    def _send(self, sender: str, receiver: str, arrive: Callable[[], None], faults: Faults, lane: float) -> None:
        if len(self._under_way) >= UNDER_WAY_MAX:
            raise RuntimeError(f"{UNDER_WAY_MAX} simulated messages are under way at once")
        loop, way = asyncio.get_running_loop(), (sender, receiver, lane)
        due_s = loop.time()
        if faults.delay_ms[1]:
            least_ms, most_ms = faults.delay_ms
            due_s += (least_ms + (most_ms - least_ms) * self.random.random()) / 1000
        if faults.reorder and self.random.random() < faults.reorder:
            self.counters["reordered"] += 1
            due_s += self.random.uniform(0, faults.reorder_ms) / 1000
        else:
            due_s = self._last_due_s[way] = max(due_s, self._last_due_s.get(way, 0.0))
            if len(self._last_due_s) > WAYS_MAX:
                now_s = loop.time()
                self._last_due_s = {way: at_s for way, at_s in self._last_due_s.items() if at_s >= now_s}
        self._sent += 1
        heapq.heappush(self._under_way, (due_s, lane, self._sent, sender, receiver, arrive))
        self._set_timer(loop)

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        """Set the one timer, for the earliest arrival. A timer for each would lose the order of messages that arrive at
        the same time."""
        due_s = self._under_way[0][0]
        if self._timer is not None and self._loop is loop:
            if self._timer_due_s <= due_s:
                return
            self._timer.cancel()
        self._loop = loop
        self._timer_due_s = due_s
        now_s = loop.time()
        self._timer = (
            loop.call_soon(self._arrive, context=self._context)
            if due_s <= now_s
            else loop.call_at(due_s, self._arrive, context=self._context)
        )

    def _arrive(self) -> None:
        """Deliver in order what is due now. What the receivers send in return goes in the loop's next turn."""
        self._timer = None
        loop, last = asyncio.get_running_loop(), self._sent
        now_s, carried = loop.time(), 0
        try:
            while self._under_way and self._under_way[0][0] <= now_s and self._under_way[0][2] <= last:
                _, _, _, sender, receiver, arrive = heapq.heappop(self._under_way)
                if (self._groups or self._isolated) and not self.reaches(sender, receiver):
                    self.counters["cut"] += 1
                    continue
                carried += 1
                arrive()
        finally:
            self.counters["carried"] += carried
            if self._under_way:
                self._set_timer(loop)
