"""The state of one member, and of several that hand calls to each other over a bus that loses and delays."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from moorage.calls.batches import Batches
from moorage.calls.member import CANCELLED_MAX, FETCHED_S, GIVEN_S_MAX, QUIET_S, REST_HOLDS_S, Call, Member
from moorage.calls.room import Room
from moorage.schemas.service import (
    BUSY,
    EXPIRED,
    HOPS_MAX,
    INPUT,
    MEMBER_DIED,
    PRIORITY_MAX,
    BatchSpec,
    Turn,
)


class Recorded:
    """What a member wants done, in order."""

    def __init__(self) -> None:
        self.done: list[tuple[Any, ...]] = []
        self.ahead: list[int] = []  # sent ahead, and not begun
        self.whys: list[str] = []  # of what is refused

    def run(self, number: int, call: Call, left_ms: int) -> None:
        self.done.append(("run", number, call.reply, left_ms))

    def run_next(self, number: int, call: Call, left_ms: int) -> None:
        self.done.append(("run_next", number, call.reply, left_ms))
        self.ahead.append(number)

    def take_back(self) -> list[int]:
        numbers, self.ahead = self.ahead, []
        return numbers

    def stop(self, number: int) -> None:
        self.done.append(("stop", number))

    def hand(self, to: str, call: Call | None, waited_ms: int) -> None:
        self.done.append(("hand", to, call and call.reply, waited_ms))

    def have(self) -> None:
        self.done.append(("have",))

    def want(self) -> None:
        self.done.append(("want",))

    def send_on(self, call: Call, waited_ms: int) -> None:
        self.done.append(("send_on", call.reply, call.hops, waited_ms))

    def refuse(self, call: Call, error: str, retry_after_ms: int, why: str = "") -> None:
        self.done.append(("refuse", call.reply, error, retry_after_ms))
        self.whys.append(why)

    def want_later(self) -> None:
        self.done.append(("want_later",))

    def gathered(self) -> None:
        self.done.append(("gathered",))

    def open_room(self, is_open: bool) -> None:
        self.done.append(("open_room", is_open))

    def take(self) -> list[tuple[Any, ...]]:
        done, self.done = self.done, []
        return done


def call(reply: str, now_s: float = 0.0, wait_ms: int = 1000, **more: Any) -> Call:
    return Call(reply, b"", {}, now_s, wait_ms, **more)


def ran(outside: Recorded) -> list[str]:
    """The calls that began meanwhile, in order."""
    return [done[2] for done in outside.take() if done[0] == "run"]


def member(places: int = 1, room: int | None = None) -> tuple[Member, Recorded]:
    outside = Recorded()
    return Member("m", outside, places, room), outside


def test_a_call_runs_where_there_is_a_place_and_waits_where_there_is_none() -> None:
    m, outside = member()
    for reply in "abc":
        m.on_call(call(reply), 0.0)
    assert outside.take() == [("run", 1, "a", 1000), ("open_room", True), ("have",), ("have",)]
    assert m.on_end(1, 0.1) is not None
    assert outside.take() == [("run", 2, "b", 900)], "what waits here goes before what waits elsewhere"
    m.on_end(2, 0.2)
    m.on_end(3, 0.3)
    assert outside.take() == [("run", 3, "c", 800), ("open_room", False)]
    assert m.is_empty


def test_a_full_room_sends_on_and_then_says_busy_with_when_to_come_again() -> None:
    m, outside = member(places=1, room=1)
    m.on_call(call("a"), 0.0)
    m.on_end(1, 0.2)  # a run takes 200 ms
    m.on_call(call("b", 1.0), 1.0)
    m.on_call(call("c", 1.0), 1.0)
    outside.take()
    for hops in range(HOPS_MAX):
        m.on_call(call(f"d{hops}", 1.0, hops=hops), 1.0)
    m.on_call(call("e", 1.0, hops=HOPS_MAX), 1.0)
    assert outside.take() == [("send_on", "d0", 1, 0), ("send_on", "d1", 2, 0), ("refuse", "e", BUSY, 400)]
    assert m.load(1.0).refused == 1


def test_the_highest_priority_has_the_first_free_place_and_each_second_of_waiting_counts_as_ten_points() -> None:
    m, outside = member(room=6)
    calls = {
        "runs": (50, 0.0),
        "low": (0, 0.0),
        "b": (50, 1.0),
        "c": (50, 1.0),
        "high": (100, 2.0),
        "later": (100, 10.1),
    }
    for reply, (priority, came_s) in calls.items():
        m.on_call(call(reply, came_s, wait_ms=60_000, priority=priority), came_s)
    m.on_given(call("given", 9.9, wait_ms=60_000, waited_ms=9_900, priority=1), 9.9)
    for number in range(1, len(calls) + 1):
        m.on_end(number, 10.2)
    assert ran(outside) == ["runs", "high", "b", "c", "given", "low", "later"]


def test_a_call_of_the_lowest_priority_is_served_in_a_stream_of_the_highest() -> None:
    """Two calls of the highest come for each one that ends: the room is never empty, and grows."""
    m, outside = member(room=1000)
    m.on_call(call("runs"), 0.0)
    m.on_call(call("low", wait_ms=60_000, priority=0), 0.0)
    for at in range(1, 300):
        now_s = at * 0.1
        for each in range(2):
            m.on_call(call(f"high {at} {each}", now_s, wait_ms=60_000, priority=100), now_s)
        m.on_end(at, now_s)
    assert 150 <= ran(outside).index("low") <= 250, "behind those who came in the first 10 s, and no others"


def test_a_full_room_sends_away_the_call_that_comes_last_and_not_the_one_that_came_last() -> None:
    m, outside = member(room=2)
    for reply, priority in (("runs", 50), ("low", 10), ("b", 50)):
        m.on_call(call(reply, priority=priority), 0.0)
    outside.take()
    m.on_call(call("high", priority=90), 0.0)
    m.on_call(call("low too", priority=10, hops=HOPS_MAX), 0.0)
    assert outside.take() == [("send_on", "low", 1, 0), ("have",), ("refuse", "low too", BUSY, 1)]
    for number in (1, 2, 3):
        m.on_end(number, 0.1)
    assert ran(outside) == ["high", "b"]


def test_a_room_is_full_of_bytes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moorage.calls.room.ROOM_BYTES_MAX", 10)
    m, outside = member(room=100)
    for reply, size in (("runs", 99), ("a", 6), ("b", 4), ("c", 1)):
        m.on_call(Call(reply, bytes(size), {}, 0.0, 1000), 0.0)
    assert ("send_on", "c", 1, 0) in outside.take()
    m.on_cancel("a", 0.0)
    m.on_call(Call("d", bytes(6), {}, 0.0, 1000), 0.0)
    assert outside.take() == [("have",)]


def test_a_call_that_does_not_wait_runs_where_a_place_is_free_and_expires_where_none_is() -> None:
    m, outside = member()
    m.on_call(call("a", wait_ms=0), 0.001)
    m.on_call(call("b", wait_ms=0), 0.001)
    assert outside.take() == [("run", 1, "a", 0), ("refuse", "b", EXPIRED, 0)]


def keyed(reply: str, key: str, came_s: float = 0.0) -> Call:
    return Call(reply, b"", {}, came_s, 100_000, fair_key=key)


def test_one_customers_hundred_calls_do_not_keep_anothers_one_waiting() -> None:
    m, outside = member(room=200)
    for number in range(100):
        m.on_call(keyed(f"ana{number}", "ana"), 0.0)
    for number in range(50):
        m.on_end(number + 1, 0.1)
    outside.take()
    m.on_call(keyed("bo", "bo", 5.0), 5.0)
    m.on_call(keyed("none", "", 5.0), 5.0)
    for number in (51, 52, 53, 54):
        m.on_end(number, 6.0)
    assert ran(outside) == ["bo", "none", "ana51", "ana52"]


@pytest.mark.parametrize("seed", range(5))
def test_keys_that_wait_have_turns_however_many_calls_each_has(seed: int) -> None:
    dice, room = random.Random(seed), Room[Call]()
    calls = [key for key in ("ana", "bo", "eve", "") for _ in range(dice.randint(30, 300))]
    dice.shuffle(calls)
    for at, key in enumerate(["ana", *calls]):  # those before the first key is named have no turn
        room.add(keyed(f"r{at}", key, at / 10), at / 10)
    had = Counter(room.take_next().fair_key for _ in range(4 * 20))
    assert set(had.values()) == {20}
    for at in range(20):
        room.add(keyed(f"late{at}", "late", 1e5 + at), 1e5 + at)
    had = Counter(room.take_next().fair_key for _ in range(5 * 10))
    assert max(had.values()) - min(had.values()) <= 1, "who comes later has turns from now on, and not those before"
    while room:
        room.take_next()
    room.add(keyed("a", "ana", 1.0), 1.0)
    room.add(keyed("b", "", 0.5), 1.0)
    assert room.take_next().reply == "b", "nothing of it is left behind an empty room"


@pytest.mark.parametrize("seed", range(10))
def test_a_room_is_a_list_that_is_sorted_by_rank(seed: int) -> None:
    dice, room, kept, now_s = random.Random(seed), Room[Call](), list[Call](), 0.0
    for at in range(600):
        now_s += dice.expovariate(10)
        match dice.choice(("add", "add", "add", "next", "last", "take", "expire")):
            case "add":
                priority, wait_ms = dice.choice((0, 50, 50, 100)), dice.choice((100, 5000))
                made = call(f"r{at}", now_s, wait_ms=wait_ms, priority=priority, waited_ms=at % 7)
                made.fair_key = dice.choice(("", "ana", "bo")) if seed % 2 else ""
                made.says_wait = at % 3 == 0
                room.add(made, now_s)
                kept.append(made)
                kept.sort(key=lambda each: each.rank_s)
            case "next" if kept:
                assert room.take_next() is kept.pop(0)
            case "last" if kept:
                assert room.take_last() is kept.pop()
            case "take" if kept:
                one = kept.pop(dice.randrange(len(kept)))
                assert room.take(one.reply) is one
            case "expire":
                over = [each for each in kept if each.left_ms(now_s) <= 0]
                assert room.take_expired(now_s) == over
                kept = [each for each in kept if each not in over]
        assert list(room) == kept
        assert room.saying_wait == sum(each.says_wait for each in kept)
        assert not room.has_more_than(len(kept))
    assert room.take("nobody") is None


def test_a_room_has_as_many_calls_as_begin_soon() -> None:
    m, outside = member(places=2)
    assert m.room_max == 4, "nothing is known of its calls yet"
    for ran_s, most in ((0.001, 100), (0.00001, 256), (1.0, 4)):
        m, outside = member(places=2)
        m.on_call(call("a"), 0.0)
        m.on_end(1, ran_s)
        assert m.room_max == most
    for number in range(8):
        m.on_call(call(str(number), 2.0), 2.0)
    assert [what for what, *_ in outside.take()].count("send_on") == 2


def test_who_says_how_long_it_waits_finds_room_for_what_begins_in_that_time() -> None:
    m, outside = member(places=2)
    for at in range(2):
        m.on_call(call(f"run{at}"), 0.0)
    m.on_end(1, 0.1)  # a run takes 100 ms: of two places 20 begin in a second
    m.on_call(call("runs"), 0.1)
    outside.take()
    for at in range(22):
        m.on_call(call(f"long{at}", 0.1, says_wait=True), 0.1)
    assert [done[1] for done in outside.take() if done[0] == "send_on"] == ["long20", "long21"]
    m.on_call(call("short", 0.1, 200, says_wait=True), 0.1)
    m.on_call(call("silent", 0.1), 0.1)
    assert [done[1] for done in outside.take() if done[0] == "send_on"] == ["short", "silent"]
    assert len(m.room) == 20, "nobody who found room is sent away for who comes later"


def test_before_a_run_has_ended_nobody_who_says_how_long_it_waits_is_refused_for_want_of_room() -> None:
    m, _ = member(places=1)
    for at in range(300):
        m.on_call(call(f"c{at}", wait_ms=60_000, says_wait=True), 0.0)
    assert len(m.room) == 256
    fixed, _ = member(places=1, room=3)
    for at in range(10):
        fixed.on_call(call(f"c{at}", wait_ms=60_000, says_wait=True), 0.0)
    assert len(fixed.room) == 3


def test_an_idle_member_fetches_what_waits_elsewhere_and_asks_for_nothing_while_none_waits() -> None:
    m, outside = member()
    m.on_call(call("a"), 0.0)
    m.on_have(0.0)
    assert outside.take() == [("run", 1, "a", 1000)], "it is full"
    m.on_end(1, 0.1)
    assert outside.take() == [("want",)]
    m.on_have(0.11)
    assert outside.take() == [], "it has asked"
    m.on_given(call("b", 0.12, waited_ms=100), 0.12)
    assert outside.take() == [("run", 2, "b", 900)]
    m.on_end(2, 0.2)
    assert outside.take() == [("want",)]
    m.on_given(None, 0.21, is_any_open=False)
    m.on_call(call("c", 0.3), 0.3)
    m.on_end(3, 0.35)
    assert outside.take() == [("run", 3, "c", 1000)], "nothing waits anywhere, by the last answer"
    m.on_have(0.4)
    assert outside.take() == [("want",)]
    m.on_given(None, 0.4, is_any_open=False)
    m.on_have(1.0)
    m.on_given(None, 1.0, is_any_open=False)
    outside.take()
    m.on_call(call("d", 5.0), 5.0)
    m.on_end(4, 5.1)
    assert ("want",) not in outside.take(), "long ago"


def test_a_member_that_an_empty_room_answers_asks_again_as_calls_may_wait_in_another() -> None:
    m, outside = member()
    m.on_have(0.0)
    m.on_given(None, 0.001)
    assert outside.take() == [("want",), ("want_later",)]
    m.on_call(call("a", 0.002), 0.002)
    m.on_end(1, 0.003)
    assert outside.take() == [("run", 1, "a", 1000)], "not for each call of its own"
    m.ask_again(0.011)
    m.on_given(call("b", 0.012), 0.012)
    m.on_end(2, 0.013)
    assert outside.take() == [("want",), ("run", 2, "b", 1000), ("want",)]
    m.on_given(None, 0.28)
    m.ask_again(0.31)
    assert outside.take() == [("want_later",)], "the `have` is too old"


def test_a_member_fetches_a_call_for_each_of_its_places() -> None:
    m, outside = member(places=3)
    m.on_have(0.0)
    for at in range(1, 4):
        m.on_given(call(f"c{at}", at / 1000), at / 1000)
    assert [done[0] for done in outside.take()] == ["want", "run", "want", "run", "want", "run"]


def test_a_have_that_is_heard_behind_a_want_is_not_forgotten_by_its_answer() -> None:
    m, outside = member()
    m.on_have(0.0)
    m.on_have(0.001)
    m.on_given(None, 0.002, is_any_open=False)
    assert outside.take() == [("want",), ("want",)]
    m.on_given(None, 0.003, is_any_open=False)
    m.on_call(call("a", 0.01), 0.01)
    m.on_end(1, 0.02)
    assert outside.take() == [("run", 1, "a", 1000)]


def test_a_want_that_is_lost_is_repeated_and_a_have_too() -> None:
    m, outside = member()
    m.on_have(0.0)
    m.tick(0.02)
    assert outside.take() == [("want",)]
    m.tick(0.06)
    assert outside.take() == [("want",)]
    m.on_call(call("a", 0.07), 0.07)
    m.on_call(call("b", 0.07), 0.07)
    outside.take()
    m.tick(0.1)
    assert outside.take() == []
    m.tick(0.2)
    assert outside.take() == [("have",)]
    assert m.needs_ticks


def test_a_batch_waits_for_calls_from_other_rooms_no_longer_than_one_answer_may_take() -> None:
    m, outside = member()
    m.run_in_batches(Batches(BatchSpec(256, 5), 1))
    m.on_have(0.0)
    for at in range(1, 5):  # each answer lets it ask for the next call
        m.on_given(call(f"c{at}", at / 100), at / 100)
        assert m.gathers
        assert ("gathered",) not in outside.take()
    m.on_given(call("c5", 0.05), 0.05)
    assert not m.gathers
    assert outside.take()[-2:] == [("want",), ("gathered",)], "what comes later is for the next batch"
    m.on_given(call("c6", 0.06), 0.06)
    assert m.gathers
    m.on_given(call("c7", 0.1), 0.1)
    outside.take()
    m.drain(0.1)
    m.tick(0.109)
    assert m.gathers
    m.tick(0.11)
    assert (m.gathers, outside.take()) == (False, [("gathered",)]), "the last `want` is not answered"


def test_the_answer_to_a_want_is_the_call_that_waits_longest() -> None:
    m, outside = member()
    for reply in "abc":
        m.on_call(call(reply), 0.0)
    outside.take()
    m.on_want("x", 0.25)
    m.on_want("y", 0.25)
    m.on_want("z", 0.25)
    assert outside.take() == [
        ("hand", "x", "b", 250), ("have",), ("hand", "y", "c", 250), ("open_room", False), ("hand", "z", None, 0),
    ]  # fmt: skip


def test_a_member_whose_calls_are_quick_says_have_once_in_a_while_and_anew_to_who_was_told_that_nothing_waits() -> None:
    m, outside = member(room=100)
    m.on_call(call("a"), 0.0)
    m.on_end(1, 0.001)
    for at in range(8):
        m.on_call(call(f"b{at}", 1.0), 1.0 + at / 500)
    assert outside.take().count(("have",)) == 2, "at 1.0 and 1.01"
    m.on_want("x", 1.014)
    assert outside.take() == [("hand", "x", "b1", 14)], "they know that more waits"
    for at in range(2, 9):
        m.on_end(at, 1.015)
    assert outside.take()[-1] == ("open_room", False)
    m.on_want("y", 1.015)
    m.on_call(call("c", 1.0155), 1.0155)
    m.on_call(call("d", 1.0155), 1.0155)
    assert outside.take() == [("hand", "y", None, 0), ("run", 9, "c", 1000), ("open_room", True), ("have",)]


def test_a_call_that_was_given_and_finds_no_place_any_more_waits_first_and_is_never_dropped() -> None:
    m, outside = member(places=1, room=0)
    m.on_have(0.0)
    m.on_call(call("a"), 0.0)
    m.on_given(call("b"), 0.01)
    assert outside.take() == [("want",), ("run", 1, "a", 1000), ("open_room", True), ("have",)]
    m.on_end(1, 0.02)
    assert outside.take() == [("run", 2, "b", 980), ("open_room", False)]


@pytest.mark.parametrize("wait_ms", [0, 100])
def test_a_call_whose_caller_waits_no_longer_never_starts(wait_ms: int) -> None:
    m, outside = member()
    m.on_call(call("a"), 0.0)
    m.on_call(call("b", wait_ms=wait_ms), 0.0)
    m.tick(0.15)
    assert ("refuse", "b", EXPIRED, 0) in outside.take()
    m.on_end(1, 0.2)
    m.on_given(call("c", 0.3, wait_ms=100, waited_ms=100), 0.3)
    assert outside.take() == [("refuse", "c", EXPIRED, 0)]
    assert m.load(0.3).expired == 2
    assert m.is_empty


def test_a_caller_that_gives_up_frees_the_room_or_is_told_to_the_service() -> None:
    m, outside = member()
    m.on_call(call("a"), 0.0)
    m.on_call(call("b"), 0.0)
    outside.take()
    m.on_cancel("b", 0.1)
    m.on_cancel("a", 0.1)
    m.on_cancel("elsewhere", 0.1)
    assert outside.take() == [("open_room", False), ("stop", 1)]
    assert m.on_end(1, 0.2) is None, "nobody waits for its answer"


def test_a_cancel_may_come_before_its_call() -> None:
    """They come by two subscriptions, which have no order between them."""
    m, outside = member()
    m.on_cancel("a", 0.0)
    m.on_call(call("a"), 0.0)
    m.on_call(call("b"), 0.0)
    m.on_cancel("c", 0.0)
    m.on_call(call("c"), 0.0)
    assert outside.take() == [("run", 1, "b", 1000)]
    for at in range(2 * CANCELLED_MAX):
        m.on_cancel(str(at), 0.0)
    m.on_cancel("late", 100.0)
    assert len(m._cancelled) == 1


def test_a_member_that_drains_asks_for_nothing_and_finishes_what_it_has() -> None:
    m, outside = member()
    for reply in "abc":
        m.on_call(call(reply), 0.0)
    outside.take()
    m.drain(0.0)
    m.on_have(0.0)
    m.on_want("x", 0.0)
    m.on_end(1, 0.1)
    m.on_end(2, 0.2)
    assert outside.take() == [("have",), ("hand", "x", "b", 0), ("have",), ("run", 2, "c", 900), ("open_room", False)]
    assert m.is_empty


def test_a_member_that_drains_waits_for_the_call_that_it_has_asked_for() -> None:
    """The answer to a `want` is the call itself: a member that had gone meanwhile took one with it."""
    m, outside = member()
    m.on_have(0.0)
    m.drain(0.0)
    assert not m.is_empty
    m.on_given(call("a"), 0.01)
    assert outside.take() == [("want",), ("run", 1, "a", 990)]
    m.on_end(1, 0.02)
    assert m.is_empty
    other, _ = member()
    other.on_have(0.0)
    other.drain(0.0)
    other.tick(0.5)
    assert not other.is_empty
    other.tick(GIVEN_S_MAX)
    assert other.is_empty, "the member that it asked is gone"


def test_a_service_that_died_answers_what_ran_and_lets_the_others_fetch_the_rest() -> None:
    m, outside = member(places=2, room=2)
    for reply in "abcd":
        m.on_call(call(reply), 0.0)
    outside.take()
    m.died(0.1)
    m.on_call(call("e"), 0.1)
    m.on_want("x", 0.1)
    m.give_up(0.2)
    assert outside.take() == [
        ("refuse", "a", MEMBER_DIED, 0), ("refuse", "b", MEMBER_DIED, 0), ("have",), ("send_on", "e", 1, 100),
        ("hand", "x", "c", 100), ("have",), ("refuse", "d", BUSY, 1), ("open_room", False),
    ]  # fmt: skip


RESTS = Turn("m", awake=False, in_ms=5000, why="the service sleeps, in about 5 s")
AWAKE = Turn("m", awake=True)


def test_a_member_whose_turn_is_over_begins_no_call_and_lets_others_fetch_them_until_it_is_awake() -> None:
    m, outside = member(places=2)
    m.on_call(call("a", wait_ms=60_000), 0.0)
    m.on_turn(RESTS, 1.0)
    outside.take()
    m.on_call(call("b", 1.0, wait_ms=60_000), 1.0)
    assert outside.take() == [("open_room", True), ("have",)]
    m.on_end(1, 2.0)
    assert outside.take() == []
    assert m.load(2.0).rests
    assert (m.load(2.0).running, m.load(2.0).waiting) == (0, 1)
    m.on_call(call("c", 2.0, wait_ms=60_000), 2.0)
    m.on_want("other", 3.0)
    assert ("hand", "other", "b", 2000) in outside.take(), "an awake member has it"
    m.on_turn(AWAKE, 4.0)
    assert ran(outside) == ["c"]
    assert not m.load(4.0).rests


def test_a_member_that_rests_keeps_as_many_calls_as_one_that_runs_some() -> None:
    m, outside = member(places=3, room=2)
    m.on_turn(RESTS, 0.0)
    for at in range(6):
        m.on_call(call(f"c{at}", wait_ms=60_000), 0.0)
    assert [done[1] for done in outside.take() if done[0] == "send_on"] == ["c5"]


def test_a_call_that_cannot_wait_for_a_sleeping_member_hears_so_unless_another_one_fetches_it() -> None:
    m, outside = member()
    m.on_turn(RESTS, 0.0)
    m.on_call(call("a", wait_ms=4000), 0.0)
    assert outside.take() == [("send_on", "a", 1, 0)], "another member may be awake"
    m.on_call(call("a", wait_ms=4000, hops=HOPS_MAX), 0.0)
    m.on_call(call("b", wait_ms=4000, hops=HOPS_MAX), 0.0)
    assert outside.take() == [("open_room", True), ("have",), ("have",)]
    m.on_want("other", 0.01)
    assert ("hand", "other", "a", 10) in outside.take(), "an awake one has a free place"
    m.tick(FETCHED_S - 0.03)
    assert outside.take() == [("have",)]
    m.tick(FETCHED_S)
    assert outside.take() == [("refuse", "b", BUSY, 4850), ("open_room", False)]
    assert outside.whys == [RESTS.why]
    m.on_call(call("c", 0.2, wait_ms=6000, hops=HOPS_MAX), 0.2)
    m.tick(0.5)
    outside.take()
    m.on_turn(Turn("m", awake=False, in_ms=20_000, why="no-ram", stuck=True), 1.0)
    assert ("refuse", "c", BUSY, 20_000) in outside.take(), "what waits hears it too"
    assert m.meter.refused == 2


def test_calls_that_cannot_wait_for_a_sleeping_member_leave_its_room_to_those_that_can() -> None:
    m, outside = member(room=1)
    m.on_turn(RESTS, 0.0)
    for reply, wait_ms in (("a", 4000), ("b", 60_000), ("c", 60_000), ("d", 4000)):
        m.on_call(call(reply, wait_ms=wait_ms, hops=HOPS_MAX), 0.0)
    assert [done[1] for done in outside.take() if done[0] == "refuse"] == ["a", "d"]
    assert [each.reply for each in m.room] == ["b", "c"]
    m, outside = member(room=0)
    m.on_turn(RESTS, 0.0)
    m.on_call(call("a", wait_ms=4000, hops=HOPS_MAX), 0.0)
    m.on_call(call("b", wait_ms=4000, hops=HOPS_MAX), 0.0)
    assert outside.take()[-1] == ("open_room", False)


def test_the_time_that_a_leader_tells_passes_from_the_first_call_that_waits_for_the_gpus() -> None:
    m, outside = member(room=9)
    m.on_turn(RESTS, 0.0)
    m.on_call(call("a", 2.0, wait_ms=5500), 2.0)
    m.on_call(call("b", 4.0, wait_ms=3500), 4.0)
    assert "send_on" not in [done[0] for done in outside.take()], "each has its GPUs in time, by 7.0"
    m.on_call(call("c", 4.0, wait_ms=2500, hops=HOPS_MAX), 4.0)
    m.tick(4.2)
    assert ("refuse", "c", BUSY, 2800) in outside.take()
    m.on_turn(RESTS, 4.5)
    assert [(done[1], done[0]) for done in outside.take()[:2]] == [("a", "send_on"), ("b", "send_on")], (
        "it takes longer"
    )
    m.on_call(call("d", 5.0, wait_ms=4700), 5.0)
    assert len(m.room) == 1, "one has called before: 4.5 s are left"


def test_a_member_that_is_to_end_begins_no_call_without_its_gpus() -> None:
    m, outside = member(room=9)
    m.on_turn(RESTS, 0.0)
    for reply in "abc":
        m.on_call(call(reply, wait_ms=60_000), 0.0)
    m.drain(1.0)
    m.on_turn(RESTS, 1.0)
    m.on_want("other", 1.01)
    outside.take()
    m.tick(1.05)
    assert outside.take() == []
    m.tick(1.2)
    assert outside.take() == [("send_on", "b", 1, 1200), ("send_on", "c", 1, 1200), ("open_room", False)]
    assert m.is_empty
    m, outside = member(room=9)
    m.on_turn(RESTS, 0.0)
    m.on_call(call("a", wait_ms=60_000), 0.0)
    m.drain(1.0)
    m.on_turn(AWAKE, 1.1)
    assert ran(outside) == ["a"], "it has them again"


def test_a_call_that_is_given_to_a_member_whose_program_is_over_goes_to_another_one() -> None:
    m, outside = member()
    m.on_have(0.0)
    m.give_up(0.1)
    m.on_given(call("a", 0.2), 0.2)
    m.on_have(0.3)
    m.on_given(call("b", 0.2, hops=HOPS_MAX), 0.3)
    assert outside.take() == [("want",), ("send_on", "a", 1, 0), ("refuse", "b", BUSY, 1)]


def test_a_member_rests_no_longer_than_leaders_say_so() -> None:
    m, outside = member()
    m.on_turn(RESTS, 0.0)
    m.on_call(call("a", wait_ms=60_000), 0.0)
    m.tick(REST_HOLDS_S - 1)
    assert ran(outside) == []
    m.on_turn(RESTS, REST_HOLDS_S - 1)
    m.tick(REST_HOLDS_S)
    assert ran(outside) == []
    m.tick(2 * REST_HOLDS_S)
    assert ran(outside) == ["a"]


def test_a_member_of_full_batches_says_once_in_10_ms_that_calls_wait() -> None:
    """32 calls end there each 20 ms: a message to all members for each would be as much again as the calls."""
    m, outside = member(1, 100)
    batches = Batches(BatchSpec(32, 5), 1)
    m.run_in_batches(batches)
    for number in range(1, 33):
        m.on_call(call(f"{number}"), 0.0)
        batches.add(number, 0, 1000, 0.0)
    m.on_batch(batches.next(0.0), 0.0)
    m.on_end(1, 0.02)
    for at in range(50):
        m.on_call(call(f"waits {at}", 0.02), 0.02 + at / 5000)
    assert [done[0] for done in outside.take()].count("have") == 1


def test_a_wait_that_a_caller_makes_up_counts_for_no_more_than_the_highest_priority() -> None:
    made_up = call("made-up", 10.0, 86_400_000, waited_ms=80_000_000, priority=0)
    calls = [made_up, call("high", 9.9, priority=100), call("low", 10.1, priority=0)]
    assert [each.reply for each in sorted(calls, key=lambda each: each.rank_s)] == ["high", "made-up", "low"]


def quick_member() -> tuple[Member, Recorded]:
    """A member whose calls take a millisecond: one runs, two are sent ahead, one waits."""
    m, outside = member()
    m.allow(1, ahead=2)
    m.on_call(call("first"), 0.0)
    m.on_end(1, 0.001)
    for at, reply in enumerate("abcd"):
        m.on_call(call(reply, 1.0 + at / 1e6), 1.0)
    begun = [done for done in outside.take() if done[0].startswith("run")]
    assert begun == [
        ("run", 1, "first", 1000),
        ("run", 2, "a", 1000),
        ("run_next", 3, "b", 1000),
        ("run_next", 4, "c", 1000),
    ]
    return m, outside


def test_quick_calls_are_sent_ahead_and_each_begins_as_the_one_before_it_ends() -> None:
    m, outside = quick_member()
    assert (m.load(1.0).running, m.load(1.0).waiting) == (1, 3)
    outside.ahead.remove(3)
    m.on_end(2, 1.001)
    assert [done for done in outside.take() if done[0].startswith("run")] == [("run_next", 5, "d", 999)]
    assert [each.started_s for each in m.running.values()] == [1.001, -1.0, -1.0]


def test_what_was_sent_ahead_is_taken_back_for_others_once_the_call_that_runs_is_slow() -> None:
    m, outside = quick_member()
    m.tick(1.0 + QUIET_S / 2)
    assert len(m.running) == 3
    m.tick(1.0 + 2 * QUIET_S)
    assert [each.reply for each in m.running.values()] == ["a"]
    outside.take()
    for _ in range(3):
        m.on_want("other", 1.1)
    assert [done[2] for done in outside.take() if done[0] == "hand"] == ["b", "c", "d"]
    m.on_call(call("e", 1.2), 1.2)
    assert ran(outside) == [], "nothing goes ahead of a slow call"


def test_of_a_program_that_dies_only_the_call_that_ran_is_lost() -> None:
    m, outside = quick_member()
    m.died(1.001)
    assert [done[:3] for done in outside.take() if done[0] == "refuse"] == [("refuse", "a", MEMBER_DIED)]
    assert [each.reply for each in m.room] == ["b", "c", "d"]


def test_a_member_without_its_gpus_begins_none_of_the_calls_that_it_has_ahead() -> None:
    m, _ = quick_member()
    m.on_turn(Turn("m", False, 100), 1.001)
    assert [each.reply for each in m.running.values()] == ["a"]
    assert [each.reply for each in m.room] == ["b", "c", "d"]


def test_calls_ahead_of_a_program_that_hangs_between_two_calls_begin_anew_or_go_to_others() -> None:
    """They were all in the room, and the member was idle: it began none of them until another call came."""
    m, outside = quick_member()
    m.on_end(2, 1.001)
    outside.take()
    m.tick(1.001 + 2 * QUIET_S)  # the program has answered the first one, and begins none of those behind it
    assert ran(outside) == ["b"]
    assert [each.reply for each in m.room] == ["c", "d"]


def test_nothing_is_sent_ahead_until_the_program_has_read_of_all_that_was_taken_back() -> None:
    """For a call that was taken back it would take the number of the next one: that would wait behind a slow call."""
    m, outside = quick_member()
    m.tick(1.0102)  # the first one takes more than 10 ms, and the program has not read of those behind it
    outside.take()
    m.on_end(2, 1.0104)
    sent = [done[0] for done in outside.take()]
    assert (sent.count("run"), sent.count("run_next")) == (1, 0)
    m.on_end(max(m.running), 1.011)
    sent = [done[0] for done in outside.take()]
    assert (sent.count("run"), sent.count("run_next")) == (1, 1), "it reads in order, and has read of them by now"


def test_a_call_that_cannot_go_ahead_has_the_next_place_all_the_same() -> None:
    """Its data come in parts: a later call went ahead of it, and then the next one, for as long as some came."""
    m, outside = quick_member()
    m.on_call(Call("large", b"", {INPUT: "5"}, 0.9, 60_000), 1.0)
    for at in range(3):
        number = next(iter(m.running))
        m.on_end(number, 1.001 + at / 1000)
        m.on_call(call(f"later-{at}", 1.001 + at / 1000), 1.001 + at / 1000)
        outside.ahead = [number for number in outside.ahead if number in m.running]
    assert [each.reply for each in m.running.values()] == ["large"]


def test_a_call_that_is_ahead_and_whose_caller_gives_up_is_dropped_unless_it_has_begun() -> None:
    m, outside = quick_member()
    outside.ahead.remove(3)  # it has begun, and the answer of the first one is on its way
    outside.take()
    m.on_cancel("c", 1.0005)
    m.on_cancel("b", 1.0005)
    assert [done for done in outside.take() if done[0] == "stop"] == [("stop", 3)]
    assert [each.reply for each in m.running.values()] == ["a", "b"]
    assert [each.reply for each in m.room] == ["d"]


def test_no_call_goes_ahead_whose_time_may_be_over_before_it_begins() -> None:
    m, outside = member()
    m.allow(1, ahead=2)
    m.on_call(call("first"), 0.0)
    m.on_end(1, 0.001)
    m.on_call(call("a", 1.0), 1.0)
    m.on_call(call("b", 1.0, 3), 1.0)
    outside.take()
    m.on_end(2, 1.008)
    assert [done[:3] for done in outside.take() if done[0] == "refuse"] == [("refuse", "b", EXPIRED)]


@pytest.mark.parametrize(("room", "ahead", "waiting"), [(0, 0, 0), (1, 0, 1), (4, 2, 2), (5, 2, 3), (20, 4, 16)])
def test_calls_that_are_ahead_are_among_those_that_may_wait(room: int, ahead: int, waiting: int) -> None:
    """Half of these stay in the room, where a more urgent call takes the place of the last one."""
    m, outside = member(1, room)
    m.allow(1, ahead=4)
    m.on_call(call("first"), 0.0)
    m.on_end(1, 0.0001)
    for at in range(30):
        m.on_call(call(f"{at}", 1.0), 1.0)
    assert [done[0] for done in outside.take()].count("run_next") == ahead
    assert (len(m.running), len(m.room)) == (1 + ahead, waiting)
    if room:
        m.on_call(call("urgent", 1.0, priority=PRIORITY_MAX), 1.0)
        assert "urgent" in [each.reply for each in m.room]


@pytest.mark.parametrize(("ran_s", "ahead"), [(0.0001, 12), (0.00024, 8), (0.0009, 2), (0.0019, 1), (0.0021, 0)])
def test_no_more_calls_are_ahead_than_take_two_milliseconds_together(ran_s: float, ahead: int) -> None:
    """A more urgent call that comes behind them waits for them."""
    m, outside = member()
    m.allow(1, ahead=12)
    m.on_call(call("first"), 0.0)
    m.on_end(1, ran_s)
    for at in range(30):
        m.on_call(call(f"{at}", 1.0), 1.0)
    assert [done[0] for done in outside.take()].count("run_next") == ahead


def test_a_number_that_a_program_has_left_in_the_pipe_is_passed_over() -> None:
    m, outside = quick_member()
    m.on_end(2, 1.001)
    m.on_end(3, 1.002)
    assert 3 in outside.ahead
    m.tick(1.002 + 2 * QUIET_S)
    assert len(m.running) == 1


def test_a_call_that_a_program_begins_while_those_before_it_are_taken_back_is_answered() -> None:
    """Its answer was dropped, as of a call that has not begun, and the member ran nothing more."""
    m, outside = quick_member()
    m.on_end(2, 1.001)
    outside.ahead = [3]  # the program, which hung, takes the next one out while the member takes this one
    m.tick(1.001 + 2 * QUIET_S)
    assert [(each.reply, each.started_s >= 0) for each in m.running.values()] == [("c", True), ("d", False)]
    assert [each.reply for each in m.room] == ["b"]


def test_a_call_that_waited_until_a_run_takes_longer_than_its_time_does_not_begin() -> None:
    m, outside = member(room=3)
    m.on_call(call("a"), 0.0)
    m.on_end(1, 0.5)  # a run takes 500 ms
    m.on_call(call("b", 1.0), 1.0)
    m.on_call(call("late", 1.0, time_ms=550), 1.0)
    m.on_call(call("in time", 1.0, time_ms=1000), 1.0)
    m.on_call(call("short", 1.0, time_ms=410), 1.0)
    outside.take()
    m.on_end(2, 1.1)  # now 460 ms, by the mean
    [refused, begun] = [done for done in outside.take() if done[0] in ("run", "refuse")]
    assert refused == ("refuse", "late", EXPIRED, 460)
    assert "450 ms of its caller's time are left" in outside.whys[-1]
    assert begun[2] == "in time"
    m.on_end(3, 1.11)
    assert ran(outside) == ["short"], "its caller knows better than the mean how long it takes"
    m.on_end(4, 1.12)
    outside.take()
    m.on_call(call("again", 2.0, time_ms=300, whole_ms=2000), 2.0)
    assert outside.take()[0][:3] == ("refuse", "again", EXPIRED), "sent again with what is left of its time"
    m.on_call(call("brief", 2.0, time_ms=300, whole_ms=310), 2.0)
    assert ran(outside) == ["brief"]


def test_calls_that_wait_in_an_engine_count_as_waiting_and_what_it_runs_as_its_places() -> None:
    m, _ = member(places=8)
    for number in range(6):
        m.on_call(call(f"{number}"), 0.0)
    assert _told(m, 1.0) == (8, 6, 0, 0)
    m.engine_has(2, 4, 1.0)
    assert _told(m, 3.0) == (2, 2, 4, 2000), "for as long as some wait, one may have waited"
    m.engine_has(2, 9, 4.0)
    assert _told(m, 4.0)[:3] == (2, 0, 6), "others ask it as well"
    m.engine_has(3, 0, 5.0)
    assert _told(m, 5.0) == (3, 6, 0, 0), "it runs three, and nothing waits"


def test_a_member_whose_program_sleeps_begins_no_call_until_it_is_awake() -> None:
    m, outside = member(places=2)
    m.set_shut(True, 0.0)
    m.on_call(call("a"), 0.0)
    m.on_turn(Turn("m", awake=True), 0.1)
    assert ran(outside) == [], "its GPUs are its own again, and its program sleeps still"
    m.set_shut(False, 0.2)
    assert ran(outside) == ["a"]


def _told(m: Member, now_s: float) -> tuple[int, int, int, int]:
    load = m.load(now_s)
    return load.places, load.running, load.waiting, load.oldest_ms
