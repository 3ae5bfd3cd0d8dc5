"""The state of one member of a service: which call runs, which waits in its room, which is handed on or refused.

Pure: no socket, no clock. What is to be done goes to `Outside`; times are arguments, in seconds of any steady clock.

All members of a service are in one queue group, so the server gives each call to one of them, full or not. A full
member lets idle ones fetch: a call without a free place waits in the member's room, and the member says `have` to all.
An idle one asks `want`, and the answer is the call itself. If the room is full, the call that comes last goes back to
the group, at most `HOPS_MAX` times, and then its caller hears `busy`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, Protocol

import msgspec

from moorage.calls.batches import Batches
from moorage.calls.meter import Meter
from moorage.calls.room import AGE_S, Room
from moorage.schemas.attempt import AttemptName
from moorage.schemas.service import (
    BUSY,
    EXPIRED,
    HOPS_MAX,
    INPUT,
    MEMBER_DIED,
    PRIORITY_DEFAULT,
    PRIORITY_MAX,
    ROOM_MAX,
    MemberLoad,
    Turn,
)

#: how often a member looks at its room while calls wait
TICK_S: Final = 0.05
#: an unanswered `want` is repeated: in a cluster one can be lost. A batch that is due waits no longer for all answers
WANT_AGAIN_S: Final = 0.05
#: a member that ends waits so long for the answer to its last `want`, which may be a call
GIVEN_S_MAX: Final = 1.0
#: while calls wait here, `have` is repeated
HAVE_AGAIN_S: Final = 0.1
#: where calls take less than this, a `have` holds so long, and the room stays open so long behind its last call: to say
#: and to open it anew for each call would cost more than the call. A member that such an empty room answers asks again
#: that much later, since calls may wait in other rooms
QUIET_S: Final = 0.01
#: after this long without a `have`, nothing waits anywhere, so nothing is asked for
HAVE_HOLDS_S: Final = 0.3
#: calls may wait in a room that begin to run within this time, at most `ROOM_MAX`
ROOM_MS: Final = 50.0
#: the program has the next calls ahead that take no longer than this together, by the mean: a round trip would take as
#: long. They begin that much later than more urgent ones that come behind them could
AHEAD_MS: Final = 2.0
#: a call whose caller waits less longer than this goes not ahead, where nothing looks at its time
AHEAD_LEFT_MS: Final = 50
#: of the mean time of a run, the part that the last one counts for
_MEAN_PART: Final = 0.1
_RETRY_MS_MAX: Final = 10_000
#: how many callers that gave up are remembered for calls that have not come yet, and how long
CANCELLED_MAX: Final = 1000
CANCELLED_KEPT_S: Final = 5.0
#: a call for which a member has no GPUs in time waits so long for another one to fetch it, before it is refused
FETCHED_S: Final = 0.15
#: of its last error, what its load says
ERROR_CHARS_MAX: Final = 200
#: a member rests no longer if no leader has repeated that for so long: its calls then wait in the driver at worst
REST_HOLDS_S: Final = 25.0


class Call(msgspec.Struct, eq=False, gc=False):
    """A call as a member holds it. `came_s` is when it came here; until then it had waited `waited_ms` in other rooms
    and was sent on `hops` times. Its caller lets it wait `wait_ms` in all; 0 lets it run only if a place is free. It
    wants the answer within `time_ms`; 0 where it does not say."""

    reply: str
    data: bytes
    headers: dict[str, str]
    came_s: float
    wait_ms: int
    waited_ms: int = 0
    hops: int = 0
    priority: int = PRIORITY_DEFAULT
    time_ms: int = 0
    whole_ms: int = 0  # with the tries before this one; 0 for the first
    output_max: int | None = None  # bytes of an answer in parts that its caller takes; None for any number
    endpoint: str = ""
    says_wait: bool = False  # `wait_ms` is its caller's own
    fair_key: str = ""  # for whom it is, as its caller says
    turn_s: float = 0.0  # see `Room`
    started_s: float = -1.0  # less than 0 until it begins, which is when its batch does
    is_ahead: bool = False  # it went to the program before it had a place: it may be taken back though it has begun
    cancelled: bool = False

    def waited(self, now_s: float) -> int:
        """Return how many milliseconds it has waited, here and elsewhere."""
        return self.waited_ms + max(0, round((now_s - self.came_s) * 1000))

    def left_ms(self, now_s: float) -> int:
        """Return how many milliseconds it may still wait; 0 or less once its caller waits no longer."""
        return self.wait_ms - self.waited(now_s)

    @property
    def rank_s(self) -> float:
        """Its place among calls that wait: when it came first of all, earlier by its priority.

        What it has waited elsewhere, which its caller could make up, counts for no more than the highest priority.
        """
        came_s = self.came_s - min(self.waited_ms / 1000, PRIORITY_MAX * AGE_S) - self.priority * AGE_S
        return came_s + self.turn_s


class Outside(Protocol):
    """What a member has done."""

    def run(self, number: int, call: Call, left_ms: int) -> None:
        """Give the call to the service. Its end comes back as `Member.on_end` with the same number."""

    def run_next(self, number: int, call: Call, left_ms: int) -> None:
        """Give the call to the service, which begins it once those before it have ended, unless it is taken back."""

    def take_back(self) -> list[int]:
        """Return the numbers of the calls of `run_next` that have not begun, and will not begin."""

    def stop(self, number: int) -> None:
        """Tell the service that the caller no longer waits for this call."""

    def hand(self, to: str, call: Call | None, waited_ms: int) -> None:
        """Send a call to the member that asked for one, or None: nothing waits here for it."""

    def have(self) -> None:
        """Say to all members that calls wait here."""

    def want(self) -> None:
        """Ask the members in whose rooms calls wait for one."""

    def want_later(self) -> None:
        """Call `Member.ask_again` in `QUIET_S`."""

    def gathered(self) -> None:
        """Begin batches that are due: no call that was asked for joins them any more."""

    def send_on(self, call: Call, waited_ms: int) -> None:
        """Give the call back to the queue group."""

    def refuse(self, call: Call, error: str, retry_after_ms: int, why: str = "") -> None:
        """Answer the call with an error, one of `CALL_ERRORS`; `why` is said instead of what that means."""

    def open_room(self, is_open: bool) -> None:
        """Listen to `want` from now on, or no longer; `Member.quiet_s` may pass until it listens no more."""


class Member:
    """One member. `places` calls run at the same time, `room` more may wait.

    By default as many wait as begin within `ROOM_MS`, by the mean time of a run, and at least twice as many as run: the
    caller of a slow service hears `busy` soon, and a fast one refuses no burst that it answers at once. A caller that
    says how long it waits finds room for as many as begin within that.
    """

    def __init__(
        self, name: str, outside: Outside, places: int, room: int | None = None, attempt: AttemptName | None = None
    ) -> None:
        self.name = name
        self._attempt = attempt or ("", "", 0, 0, 0)
        self.places = places
        self._ahead_max = 0
        self._taken_back = 0  # the last call that was taken back from a program that may still read of it
        self.batches: Batches | None = None
        self._room_fixed = room
        self.draining = False
        self.dead = False
        self.shut = False  # its program sleeps, or is about to: no call may reach it
        self.running: dict[int, Call] = {}
        self.room: Room[Call] = Room()
        self._outside = outside
        self._number = 0
        self._cancelled: dict[str, float] = {}  # callers that gave up a call that is not here, or not yet
        self._asked_s: float | None = None  # since when a `want` is unanswered
        self._asks_later = False  # the last one was in vain, and is repeated
        #: a call that it asked for may join the batch that begins next, which waits for that unless it is whole
        self.gathers = False
        self._gathers_s = 0.0  # since when
        self._have_heard_s = float("-inf")
        self._have_said_of: set[str] = set()  # for which methods
        self._have_said_s = float("-inf")
        self._room_is_open = False
        self._mean_ms = 0.0
        self._rest: Turn | None = None  # why it begins no call now
        self._rested_s = 0.0  # when a leader has said so last
        self._rests_s = 0.0  # since when it rests, or is to end meanwhile
        self._called_s: float | None = None  # since when, behind that, a caller has asked for its GPUs
        self.meter = Meter()
        self._engine_places: int | None = None  # how many requests its engine runs at once, once some have waited there
        self._engine_waiting = 0
        self._engine_full_s: float | None = None  # since when some wait there

    def run_in_batches(self, batches: Batches) -> None:
        """Run calls in these batches from now on; `places` counts calls all the same."""
        self.batches = batches
        self.allow(batches.places)

    def allow(self, places: int, ahead: int = 0) -> None:
        """Run so many calls at the same time, or batches of them; send so many more `ahead` of the one that runs."""
        self.places = places
        self._ahead_max = ahead if places == 1 and self.batches is None else 0
        if self.batches is not None:
            self.batches.places = places
            self.places = places * self.batches.most

    @property
    def is_empty(self) -> bool:
        """Whether no call runs or waits here, and none is on its way: one that it asked for."""
        return not self.running and not self.room and self._asked_s is None

    def replies(self, asked: Collection[str]) -> set[str]:
        """Return those of these reply subjects whose calls wait or run here."""
        running = {call.reply for call in self.running.values()} if asked else set()
        return {reply for reply in asked if reply in running or self.room.has_reply(reply)}

    @property
    def rests(self) -> bool:
        """Whether it begins no call, as it has no GPUs for it."""
        return self._rest is not None

    @property
    def room_max(self) -> int:
        """How many calls may wait here now: also those for which there are places, while it rests."""
        unused = max(0, self.places - len(self.running)) if self.rests else 0
        return max(0, self._room_max - self._ahead) + unused

    @property
    def _room_max(self) -> int:
        if self._room_fixed is not None:
            return self._room_fixed
        in_time = self.places * ROOM_MS / self._mean_ms if self._mean_ms > 0 else 0
        return max(2, 2 * self.places, min(round(in_time), ROOM_MAX))

    def _room_for(self, call: Call, now_s: float) -> int:
        """Return how many calls may wait here where this one has come: as many as begin in its caller's time, if it
        says one. Those that came before it in this way stay."""
        if self._room_fixed is not None:
            return self.room_max
        others = self.room.saying_wait - call.says_wait
        in_time = 0.0
        if call.says_wait:
            in_time = self.places * call.left_ms(now_s) / self._mean_ms if self._mean_ms > 0 else ROOM_MAX
        return max(self.room_max, min(others, ROOM_MAX), min(round(in_time), ROOM_MAX))

    @property
    def quiet_s(self) -> float:
        """How long a `have` holds, and an empty room stays open; 0 where calls take longer than that.

        Those of a full batch count as if they ran one after the other.
        """
        each_ms = self._mean_ms if self.batches is None else self._mean_ms / self.batches.most
        return QUIET_S if 0 < each_ms < QUIET_S * 1000 else 0.0

    @property
    def needs_ticks(self) -> bool:
        """Whether `tick` has something to look at."""
        waits = self._ahead > 0 or bool(self.batches and self.batches.waiting)
        return bool(self.room) or self._asked_s is not None or waits

    @property
    def tick_s(self) -> float:
        """How long after the last `tick` the next one is due, at least."""
        may_go_ahead = self._ahead_max > 0 and 0 < self._mean_ms < AHEAD_MS  # some may before the next one
        return QUIET_S if self._ahead or may_go_ahead else TICK_S

    @property
    def _ahead(self) -> int:
        """How many calls the program has ahead."""
        return max(0, len(self.running) - self.places) if self._ahead_max else 0

    def engine_has(self, running: int, waiting: int, now_s: float) -> None:
        """What runs here is work of an engine, in which so many requests run, and so many wait: it has fewer places."""
        if waiting:
            self._engine_places = max(1, running)
            self._engine_full_s = now_s if self._engine_full_s is None else self._engine_full_s
        else:
            self._engine_full_s = None
            if self._engine_places is not None:  # it has shown that it runs as many
                self._engine_places = max(self._engine_places, running)
        self._engine_waiting = waiting

    def load(self, now_s: float) -> MemberLoad:
        """Return what this member says of itself. Calls that wait in its engine wait."""
        oldest_ms = max((call.waited(now_s) for call in self.room), default=0)
        meter, ahead = self.meter, self._ahead
        waits = min(self._engine_waiting, len(self.running) - ahead)
        places = self.places if self._engine_places is None else min(self.places, self._engine_places)
        if self._engine_full_s is not None:
            oldest_ms = max(oldest_ms, round((now_s - self._engine_full_s) * 1000))
        ahead += waits
        _, job, replica, attempt, fence = self._attempt
        return MemberLoad(
            self.name, places, len(self.running) - ahead, len(self.room) + ahead, oldest_ms, self.draining,
            meter.refused, meter.expired, meter.handed, meter.ended, meter.waited_ms, meter.ran_ms,
            job=job, replica=replica, attempt=attempt, fence=fence, counts=meter.counts(), rests=self.rests,
            last_error=meter.last_error[:ERROR_CHARS_MAX],
        )  # fmt: skip

    # -- what comes

    def on_call(self, call: Call, now_s: float) -> None:
        """A call came from the queue group."""
        self._look_at_rest(now_s)
        if not self._begin(call, now_s):
            self._keep(call, now_s)

    def on_own(self, call: Call, now_s: float) -> None:
        """A call came that its caller has for this member: without a free place here, any other one may have it."""
        self._look_at_rest(now_s)
        if self.draining or not self._begin(call, now_s):
            self._outside.send_on(call, call.waited(now_s))

    def on_turn(self, turn: Turn, now_s: float) -> None:
        """A leader says whether this member has its GPUs for calls."""
        if turn.awake:
            self._wake(now_s)
            return
        if self._rest is None:
            self._rests_s = now_s
        self._rest, self._rested_s = turn, now_s
        self._called_s = now_s if self.room or self._called_s is not None else None
        self._take_back(now_s)
        self._send_away_late(now_s)
        if self.room:
            self._send_have(now_s)
        self._look_at_room()
        self._begin_last_batches()

    def set_shut(self, is_shut: bool, now_s: float) -> None:
        """Begin no call from now on, as the program is to sleep, or begin those that wait."""
        self.shut = is_shut
        if not is_shut:
            self._fill(now_s)

    def on_given(self, call: Call | None, now_s: float, *, is_any_open: bool = True) -> None:
        """A `want` is answered: by a call, or by None if nothing waits there, or no room is open that could have a call
        for this member."""
        asked_s, self._asked_s = self._asked_s, None
        if call is None:
            self._on_nothing(asked_s, now_s, is_any_open)
        elif self.dead:
            self._send_away(call, now_s)
        elif not self._begin(call, now_s):
            # a place was taken meanwhile. The call is not lost for want of room
            self._let_wait(call, now_s)
            self._send_have(now_s)
        else:  # more may wait there, and it may have another place
            self._fetch(now_s)
        self._look_whether_gathered(now_s)

    def on_have(self, now_s: float) -> None:
        """Calls wait at some member."""
        self._have_heard_s = now_s
        self.ask_again(now_s)

    def ask_again(self, now_s: float) -> None:
        """`QUIET_S` have passed since a `want` was in vain."""
        self._asks_later = False
        self._fetch(now_s)

    def on_want(self, to: str, now_s: float, methods: Collection[str] | None = None) -> None:
        """A member with a free place asks for a call; `to` is the subject for the answer.

        It has these methods only, None for all: members of another version of the service may lack some.
        """
        self._expire(now_s)
        call = self.room.take_first(lambda call: not call.endpoint or methods is None or call.endpoint in methods)
        if call is None:
            self._outside.hand(to, None, 0)
            self._have_said_s = float("-inf")  # who asked may believe now that nothing waits anywhere
            return
        self.meter.handed += 1
        self._outside.hand(to, call, call.waited(now_s))
        if self.room:
            self._send_have(now_s)
        self._look_at_room()

    def on_end(self, number: int, now_s: float) -> Call | None:
        """The service has answered a call. Return it, or None if its caller no longer waits."""
        call = self.running.pop(number, None)
        if self.batches is not None:
            self.batches.end(number)
        if call is not None and call.started_s >= 0:
            ran_ms = self._count(call, now_s)
            self._mean_ms = ran_ms if self._mean_ms == 0 else self._mean_ms + _MEAN_PART * (ran_ms - self._mean_ms)
            if number > self._taken_back and INPUT not in call.headers:
                self._taken_back = 0  # the program reads in order, and has read of this one
        if self._ahead_max:
            self._begin_next(now_s)
        self._fill(now_s)
        return None if call is None or call.cancelled else call

    def on_cancel(self, reply: str, now_s: float) -> None:
        """The caller with this reply subject no longer waits. The call may still come: from the group, or handed on."""
        if self.room.take(reply) is not None:
            self._look_at_room()
            return
        for number, call in self.running.items():
            if call.reply == reply:
                call.cancelled = True
                if call.started_s < 0:  # it is dropped, unless the program has begun it
                    self._take_back(now_s)
                if number in self.running:
                    self._outside.stop(number)
                return
        while self._cancelled and (len(self._cancelled) >= CANCELLED_MAX or self._is_old(now_s)):
            del self._cancelled[next(iter(self._cancelled))]
        self._cancelled[reply] = now_s

    def on_batch(self, numbers: Collection[int], now_s: float) -> None:
        """These calls, which have their places, begin together."""
        for number in numbers:
            call = self.running[number]
            call.started_s = now_s
            self.meter.began(call.waited(now_s))
        self.meter.batch(len(numbers))

    def tick(self, now_s: float) -> None:
        """Time has passed: calls expire, `have` and `want` are repeated."""
        self._look_at_rest(now_s)
        if self._ahead and not self._is_quick(now_s):
            self._take_back(now_s)
        self._expire(now_s)
        self._send_away_late(now_s)
        self._look_at_room()
        if self.room and now_s - self._have_said_s >= HAVE_AGAIN_S:
            self._send_have(now_s)
        if self._asked_s is not None:
            is_late = now_s - self._asked_s >= (GIVEN_S_MAX if self.draining else WANT_AGAIN_S)
            if is_late:
                self._asked_s = None
            self._look_whether_gathered(now_s)  # what is here begins without an answer that may be lost
            if is_late:
                self._fetch(now_s)

    def drain(self, now_s: float) -> None:
        """Take no more calls than those that are here: what waits is for other members to fetch, or runs here."""
        self.draining, self._rests_s = True, now_s
        if self.room:
            self._send_have(now_s)
        self._begin_last_batches()

    def died(self, now_s: float, unheard: Collection[int] = ()) -> None:
        """The service's process is over: what ran is answered so, and what waits is for other members to fetch.

        Those in a batch that did not begin go to other members, or wait as well. Calls with the numbers `unheard` have
        a place, and the process never heard of them, nor has all of their data come: they are refused.
        """
        self.dead = True
        self._take_back(now_s)
        unbegun = set() if self.batches is None else set(self.batches.forget_waiting())
        running, self.running = self.running, {}
        for number, call in running.items():
            if call.started_s >= 0:
                self._count(call, now_s)
            if call.cancelled:
                continue
            if number in unbegun and INPUT not in call.headers:  # data that came in parts are here alone
                if call.hops < HOPS_MAX:
                    self._send_away(call, now_s)
                else:
                    self._let_wait(call, now_s)
                continue
            if call.started_s < 0:
                self.meter.refused += 1
            self._outside.refuse(call, BUSY if number in unbegun or number in unheard else MEMBER_DIED, 0)
        self.drain(now_s)

    def give_up(self, now_s: float, unheard: Collection[int] = ()) -> None:
        """Refuse what still waits, and answer what still runs as `died` does: the member ends now."""
        self._refuse_room()
        self.died(now_s, unheard)
        self._refuse_room()  # calls of a batch that did not begin

    def _refuse_room(self) -> None:
        while self.room:
            self.refuse_busy(self.room.take_next())
        self._look_at_room()

    # -- within

    @property
    def _is_full(self) -> bool:
        batches_run = self.batches is not None and self.batches.is_full
        return self.dead or self.shut or self.rests or batches_run or len(self.running) >= self.places

    def _begin(self, call: Call, now_s: float, *, may_begin: bool = False) -> bool:
        """Run a call if there is a place, or say that its time is over; return False if it has to wait. `may_begin`: it
        has a place, or may go ahead of one."""
        waited_ms = call.waited(now_s)
        left_ms = call.wait_ms - waited_ms
        is_now_or_never = call.wait_ms == 0 and not self._is_full
        if left_ms <= 0 and not is_now_or_never:
            self.meter.expired += 1
            self._outside.refuse(call, EXPIRED, 0)
            return True
        if self._ends_too_late(call, waited_ms):
            self.meter.expired += 1
            left, run = max(0, call.time_ms - waited_ms), round(self._mean_ms)
            why = f"the call waited for {waited_ms} ms: {left} ms of its caller's time are left, a run takes {run} ms"
            self._outside.refuse(call, EXPIRED, run, why)
            return True
        is_full = self._is_full
        if is_full and not may_begin and not self._goes_ahead(call, now_s):
            return False
        if self._cancelled.pop(call.reply, None) is not None:
            return True
        self._number += 1
        self.running[self._number] = call
        call.is_ahead = is_full
        if is_full:
            self._outside.run_next(self._number, call, left_ms)
            return True
        if self.batches is None:
            call.started_s = now_s
            self.meter.began(waited_ms)
        self._outside.run(self._number, call, max(0, left_ms))
        return True

    def _ends_too_late(self, call: Call, waited_ms: int) -> bool:
        """Return whether a call has waited until its caller's time is shorter than a run takes, by the mean.

        A caller that gives less time from the first knows its call to be a short one.
        """
        whole_ms = max(call.time_ms, call.whole_ms)
        return call.time_ms > 0 and 0 < self._mean_ms <= whole_ms and call.time_ms - waited_ms < self._mean_ms

    def _goes_ahead(self, call: Call, now_s: float) -> bool:
        """Return whether the program may have a call before it has a place.

        Half of those that may wait stay in the room, where a more urgent one takes their place. None goes until the
        program has read of all that were taken back: it would take the number of a later one out of the pipe for them.
        """
        if not 0 < self._mean_ms < AHEAD_MS or self._taken_back or self.dead or self.rests:
            return False
        if self._ahead >= min(self._ahead_max, self._room_max // 2, int(AHEAD_MS / self._mean_ms)):
            return False
        if INPUT in call.headers or call.left_ms(now_s) < AHEAD_LEFT_MS or not self._is_quick(now_s):
            return False
        first = next(iter(self.room), call)
        return call.rank_s <= first.rank_s

    def _is_quick(self, now_s: float) -> bool:
        """Return whether the call that runs may end soon, so that those behind it do not wait for long."""
        first = next(iter(self.running.values()))
        return now_s - first.started_s < QUIET_S and INPUT not in first.headers

    def _begin_next(self, now_s: float) -> None:
        """The program has a call ahead, and none before it: it begins that."""
        first = next(iter(self.running.values()), None)
        if first is not None and first.started_s < 0:
            first.started_s = now_s

    def _count(self, call: Call, now_s: float) -> float:
        """Count a call that has begun and is over; return how long it ran, in milliseconds."""
        if call.is_ahead:  # not sooner, as it may have been taken back
            self.meter.began(call.waited(call.started_s))
        ran_ms = (now_s - call.started_s) * 1000
        self.meter.finished(ran_ms)
        return ran_ms

    def _take_back(self, now_s: float) -> None:
        """Let the calls that the program has ahead, and has not begun, wait for others to fetch them.

        If it has begun none, as it hangs between two calls, the first one begins anew.
        """
        if not self._ahead_max or not self.running:
            return
        for number in self._outside.take_back():
            self._taken_back = number
            call = self.running.pop(number, None)
            if call is None:  # the program has answered it, and left its number
                continue
            call.started_s = -1.0
            if not call.cancelled:
                self._let_wait(call, now_s)
        self._begin_next(now_s)  # it may go on meanwhile, and take a later one than those
        if self.room:
            self._send_have(now_s)
        self._fill(now_s)

    def _keep(self, call: Call, now_s: float) -> None:
        """Let a call wait here. If that is one too many, those that come too late or last wait elsewhere, or are
        refused."""
        if self._cancelled.pop(call.reply, None) is not None:
            return
        if (self.dead or self._comes_too_late(call, now_s)) and call.hops < HOPS_MAX:
            self._send_away(call, now_s)
            return
        self._let_wait(call, now_s)
        away = list[Call]()
        if self.room.has_more_than(self.room_max):
            away = self._take_late(now_s, 0.0)
            most = self._room_for(call, now_s)
            while self.room.has_more_than(most):
                away.append(self.room.take_last())
        for each in away:
            self._send_away(each, now_s)
        if call in away:
            self._look_at_room()
        else:
            self._send_have(now_s)

    def _let_wait(self, call: Call, now_s: float) -> None:
        self.room.add(call, now_s)
        if self._rest is not None and self._called_s is None:
            self._called_s = now_s

    def _send_away_late(self, now_s: float) -> None:
        for call in self._take_late(now_s, FETCHED_S):
            self._send_away(call, now_s)

    def _take_late(self, now_s: float, fetched_s: float) -> list[Call]:
        """Take the calls for which this member has no GPUs in time: those that another one may have at once, and those
        that none has fetched for so long."""
        if self._rest is None:
            return []

        def is_to_go(call: Call) -> bool:
            is_new = now_s - max(call.came_s, self._rests_s) < fetched_s
            waits = is_new and (self.draining or call.hops >= HOPS_MAX)
            return not waits and self._comes_too_late(call, now_s)

        return self.room.take_those(is_to_go)

    def _send_away(self, call: Call, now_s: float) -> None:
        """Send a call on, or refuse it."""
        if call.hops < HOPS_MAX:
            call.hops += 1
            self._outside.send_on(call, call.waited(now_s))
        elif self._rest is not None and not self.draining and self._comes_too_late(call, now_s):
            self.meter.refused += 1
            self._outside.refuse(call, BUSY, self._rests_ms(now_s), self._rest.why)
        else:
            self.refuse_busy(call)

    def _comes_too_late(self, call: Call, now_s: float) -> bool:
        """Return whether its caller waits no longer once this member, which rests, has its GPUs again."""
        rest = self._rest
        return rest is not None and (self.draining or rest.stuck or call.left_ms(now_s) < self._rests_ms(now_s))

    def _rests_ms(self, now_s: float) -> int:
        """Return about how many milliseconds it takes until this member has its GPUs for a call; 0 if nothing tells.

        That is as the leader has said, and less as time passes since the first call that has waited for them.
        """
        if self._rest is None or not self._rest.in_ms:
            return 0
        gone_s = 0.0 if self._called_s is None else now_s - self._called_s
        return max(1, self._rest.in_ms - round(gone_s * 1000))

    def _look_at_rest(self, now_s: float) -> None:
        """Rest no longer than leaders say so: calls may not wait for one that is away."""
        if self._rest is not None and now_s - self._rested_s >= REST_HOLDS_S:
            self._wake(now_s)

    def _begin_last_batches(self) -> None:
        """Let no batch wait for calls that do not come, as this member is to end or has no GPUs for more."""
        if self.batches is not None:
            self.batches.gets_no_more = True
            if not self.gathers:
                self._outside.gathered()

    def _wake(self, now_s: float) -> None:
        self._rest = self._called_s = None
        if self.batches is not None:
            self.batches.gets_no_more = self.draining
        self._fill(now_s)

    def _is_old(self, now_s: float) -> bool:
        return now_s - next(iter(self._cancelled.values())) > CANCELLED_KEPT_S

    def refuse_busy(self, call: Call) -> None:
        """Answer a call that there was no place for it, and when it may come again."""
        self.meter.refused += 1
        in_ms = (len(self.room) + 1) / self.places * self._mean_ms
        self._outside.refuse(call, BUSY, min(max(1, round(in_ms)), _RETRY_MS_MAX))

    def _fill(self, now_s: float) -> None:
        """Run what waits here while there is a place; then ask the other members."""
        while self.room and (not self._is_full or self._goes_ahead(next(iter(self.room)), now_s)):
            self._begin(self.room.take_next(), now_s, may_begin=True)
        self._look_at_room()
        self._fetch(now_s)

    def _on_nothing(self, asked_s: float | None, now_s: float, is_any_open: bool) -> None:
        """Ask again if calls may wait elsewhere; else forget that some did."""
        if asked_s is not None and self._have_heard_s > asked_s:  # said behind the question
            self._fetch(now_s)
        elif is_any_open:
            self._asks_later = True
            self._outside.want_later()
        else:
            self._have_heard_s = float("-inf")

    def _fetch(self, now_s: float) -> None:
        """Ask for a call that waits elsewhere, unless that is asked already, or none is known to wait."""
        if self.draining or self._is_full or self.room or self._asked_s is not None or self._asks_later:
            return
        if now_s - self._have_heard_s <= HAVE_HOLDS_S:
            self._asked_s = now_s
            if self.batches is not None and not self.gathers:
                self.gathers, self._gathers_s = True, now_s
            self._outside.want()

    def _look_whether_gathered(self, now_s: float) -> None:
        if self.gathers and (self._asked_s is None or now_s - self._gathers_s >= WANT_AGAIN_S):
            self.gathers = False
            self._outside.gathered()

    def _send_have(self, now_s: float) -> None:
        self._look_at_room()
        is_known = "" in self._have_said_of or self.room.methods <= self._have_said_of
        if now_s - self._have_said_s >= self.quiet_s or not is_known:
            self._have_said_s, self._have_said_of = now_s, set(self.room.methods)
            self._outside.have()

    def _look_at_room(self) -> None:
        """Listen to `want` while calls wait here, and only then: who asks elsewhere shall not be sent here in vain."""
        if bool(self.room) is not self._room_is_open:
            self._room_is_open = bool(self.room)
            if not self.room and not self.quiet_s:  # who asks from now on hears that nothing waits
                self._have_said_s = float("-inf")
            self._outside.open_room(self._room_is_open)

    def _expire(self, now_s: float) -> None:
        for call in self.room.take_expired(now_s):
            self.meter.expired += 1
            self._outside.refuse(call, EXPIRED, 0)
        if self.batches is None or not self.batches.is_full:
            return
        # their data came in parts, after the last place for a batch was taken
        for number in list(self.batches.waiting):
            call = self.running[number]
            if call.left_ms(now_s) <= 0 and not call.cancelled:
                self.meter.expired += 1
                self._outside.refuse(call, EXPIRED, 0)
                call.cancelled = True
                self._outside.stop(number)
