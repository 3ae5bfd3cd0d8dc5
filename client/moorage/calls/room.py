"""The waiting room of one member: calls by priority, which grows while they wait, and then by the order they came.

Where calls say for whom they are (their fair keys), keys come in turns: the first call of each, then the second of
each. A key of which none waits begins with the turn that is taken from now (Start-time Fair Queuing: Goyal, Vin and
Cheng, 1997). Calls without a key have a turn together.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Set
from typing import Final, Generic, Protocol, TypeVar

#: waiting this long, in seconds, counts as much as one point of priority: so nobody starves
AGE_S: Final = 0.1
#: most bytes of data that wait, whatever the number of their calls
ROOM_BYTES_MAX: Final = 256 << 20
#: a later turn comes behind all calls of an earlier one, in seconds of rank: more than any call waits
TURN_S: Final = 1e6
#: fair keys whose next turn is known, before those are dropped that a new one would equal
KEYS_MAX: Final = 1_000


class Waiting(Protocol):
    """A call as the room sees it. Calls with a smaller `rank_s` come first; it counts `turn_s`, which the room sets,
    and never changes while the call waits."""

    reply: str
    data: bytes
    endpoint: str
    fair_key: str
    turn_s: float
    says_wait: bool

    @property
    def rank_s(self) -> float: ...

    def left_ms(self, now_s: float) -> int:
        """Return how many milliseconds it may still wait; 0 or less once its time is over."""
        ...


C = TypeVar("C", bound=Waiting)


class Room(Generic[C]):
    """Calls that wait, the next one first. All methods but iteration take time that does not grow with their number,
    or only as a copy of pointers does."""

    def __init__(self) -> None:
        self._calls: list[C] = []  # the next one is the last
        self._ranks: list[float] = []  # of each the `rank_s` below 0, so that the smallest comes first
        self._by_reply: dict[str, C] = {}
        self._by_method = Counter[str]()
        self._bytes = 0
        #: how many of them say how long they may wait
        self.saying_wait = 0
        self._expires_s = float("inf")  # no call here expires before
        self._turn_s = 0.0  # the turn that is taken from
        self._next_s: dict[str, float] = {}  # by fair key, the turn of its next call; empty until one names a key

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[C]:
        return reversed(self._calls)

    @property
    def methods(self) -> Set[str]:
        """The methods for which calls wait; "" is the service itself."""
        return self._by_method.keys()

    def add(self, call: C, now_s: float) -> None:
        if call.fair_key or self._next_s:
            call.turn_s = self._next_turn(call.fair_key)
        rank = -call.rank_s
        at = bisect_left(self._ranks, rank)
        self._ranks.insert(at, rank)
        self._calls.insert(at, call)
        self._by_reply[call.reply] = call
        self._by_method[call.endpoint] += 1
        self._bytes += len(call.data)
        self.saying_wait += call.says_wait
        self._expires_s = min(self._expires_s, now_s + call.left_ms(now_s) / 1000)

    def _next_turn(self, key: str) -> float:
        found = max(self._turn_s, self._next_s.get(key, 0.0))
        if len(self._next_s) >= KEYS_MAX:
            self._next_s = {each: at for each, at in self._next_s.items() if at > self._turn_s}
        self._next_s[key] = found + TURN_S
        return found

    def has_reply(self, reply: str) -> bool:
        """Return whether a call with this reply subject waits here."""
        return reply in self._by_reply

    def has_more_than(self, most: int) -> bool:
        """Return whether more calls wait than may: so many, with `ROOM_BYTES_MAX` of data."""
        return len(self._calls) > most or self._bytes > ROOM_BYTES_MAX

    def take_next(self) -> C:
        return self._taken(self._take(-1))

    def take_first(self, is_one: Callable[[C], bool]) -> C | None:
        """Take the first call of which this is true; return None if there is none."""
        at = next((at for at, call in enumerate(self) if is_one(call)), None)
        return None if at is None else self._taken(self._take(len(self._calls) - 1 - at))

    def _taken(self, call: C) -> C:
        """Follow the turns of fair keys with a call that is taken to run."""
        if self._next_s:
            self._turn_s = max(self._turn_s, call.turn_s)
            if not self._calls:
                self._turn_s = 0.0
                self._next_s.clear()
        return call

    def take_last(self) -> C:
        """Take the call that comes behind all others."""
        return self._take(0)

    def take(self, reply: str) -> C | None:
        """Take the call with this reply subject, if it waits here."""
        call = self._by_reply.get(reply)
        if call is None:
            return None
        at = bisect_left(self._ranks, -call.rank_s)
        while self._calls[at] is not call:
            at += 1
        return self._take(at)

    def has(self, call: C) -> bool:
        """Return whether this call waits here."""
        return self._by_reply.get(call.reply) is call

    def take_expired(self, now_s: float) -> list[C]:
        """Take all calls whose time is over."""
        if now_s < self._expires_s:
            return []
        expired = self.take_those(lambda call: call.left_ms(now_s) <= 0)
        self._expires_s = min((now_s + call.left_ms(now_s) / 1000 for call in self._calls), default=float("inf"))
        return expired

    def take_those(self, is_one: Callable[[C], bool]) -> list[C]:
        """Take all calls of which this is true."""
        taken = [call for call in self if is_one(call)]
        if taken:
            gone = {id(call) for call in taken}
            self._calls = [call for call in self._calls if id(call) not in gone]
            self._ranks = [-call.rank_s for call in self._calls]
            for call in taken:
                self._forget(call)
        return taken

    def _take(self, at: int) -> C:
        del self._ranks[at]
        return self._forget(self._calls.pop(at))

    def _forget(self, call: C) -> C:
        self._by_method[call.endpoint] -= 1
        if not self._by_method[call.endpoint]:
            del self._by_method[call.endpoint]
        self._bytes -= len(call.data)
        self.saying_wait -= call.says_wait
        if self._by_reply.get(call.reply) is call:
            del self._by_reply[call.reply]
        return call
