"""The slowest calls of a member: a hundred of the last hour, whatever came before or since."""

from __future__ import annotations

import random

from moorage.calls.slowest import KEPT_MS, SLOWEST_MAX, Slowest
from moorage.schemas.service import SlowCall


def note(slowest: Slowest, ran_ms: int, now_ms: int) -> None:
    if slowest.is_one(ran_ms, now_ms):
        slowest.add(SlowCall(now_ms, 0, ran_ms))


def test_of_many_calls_the_slowest_are_kept() -> None:
    slowest, times = Slowest(), list(range(1000))
    random.Random(7).shuffle(times)
    for ran_ms in times:
        note(slowest, ran_ms, 10)
    assert [call.ran_ms for call in slowest.told(10)] == list(range(999, 999 - SLOWEST_MAX, -1))


def test_what_ended_more_than_an_hour_ago_is_forgotten_and_keeps_out_no_later_call() -> None:
    slowest = Slowest()
    for _ in range(SLOWEST_MAX):
        note(slowest, 5000, 0)
    note(slowest, 10, KEPT_MS // 2)
    assert {call.ran_ms for call in slowest.told(KEPT_MS // 2)} == {5000}
    assert slowest.told(KEPT_MS) == []
    note(slowest, 10, KEPT_MS)
    assert [call.ran_ms for call in slowest.told(KEPT_MS)] == [10]


def test_the_wait_for_a_place_counts_as_well() -> None:
    slowest = Slowest()
    for waited_ms, ran_ms in ((5, 5), (90, 1), (0, 20)):
        assert slowest.is_one(waited_ms + ran_ms, 0)
        slowest.add(SlowCall(0, waited_ms, ran_ms))
    assert [call.waited_ms for call in slowest.told(0)] == [90, 0, 5]
