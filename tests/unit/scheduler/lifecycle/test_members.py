"""What becomes of the places of a service that its next version replaces: the table of phases."""

from __future__ import annotations

import math
import random
from typing import Final

import pytest

from moorage.scheduler.core.ledger.state import CANCELLED, ENDING, LOST_KEPT, QUEUED, RUNNING
from moorage.scheduler.core.lifecycle.members import (
    MOVES,
    PHASES,
    Decision,
    Move,
    Next,
    Old,
    Step,
    move_on,
    notice_to_leave,
    reconcile,
)

CASES: Final = {
    "it waits for other jobs": (Old(3), Next(3, 0, 3, may_begin=False), Decision("put off", 0)),
    "it is held with one that serves": (Old(3, 1), Next(3, 1, 3, may_begin=False), Decision("put off", 1)),
    "it is cancelled": (Old(3, 2, 1), Next(3, 1, 0), Decision("lost", 0)),
    "one of it has ended for good": (Old(3, 1), Next(3, 1, 2), Decision("lost", 0)),
    "all serve": (Old(3, 2), Next(3, 3, 3), Decision("whole", 2, ends=True)),
    "nobody serves, and nobody has to": (Old(0), Next(0, 0, 4), Decision("whole", 0, ends=True)),
    "one fails in a place that was lent ahead": (Old(3, 2, 1), Next(3, 1, 3, fails=True), Decision("fails", 1)),
    "one serves": (Old(3), Next(3, 1, 3), Decision("goes on", 1, 0, 1)),
    "one serves in the place that was lent ahead": (Old(3, 1, 1), Next(3, 1, 3), Decision("goes on", 1, 0, 1)),
    "one loads in the place that was lent ahead": (Old(3, 2, 1), Next(3, 1, 3), Decision("goes on", 2, 1, 0)),
    "one serves no more": (Old(3, 2), Next(3, 1, 3), Decision("goes on", 1, 0, 1)),
    "more are asked for": (Old(2, 1), Next(4, 2, 4), Decision("goes on", 2, 0, 0)),
    "fewer are asked for": (Old(4), Next(2, 1, 2), Decision("goes on", 1, 0, 1)),
    "larger ones follow calls": (Old(4, 1, 1, follows=True), Next(1, 0, 1), Decision("goes on", 1, 1, 3)),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_decided(case: str) -> None:
    old, new, decided = CASES[case]
    assert reconcile(old, new) == decided


def test_every_phase_is_named_once_and_the_last_one_always_holds() -> None:
    names = [phase.name for phase in PHASES]
    assert len(set(names)) == len(names)
    assert {decided.phase for _, _, decided in CASES.values()} == set(names)
    assert PHASES[-1].holds(Old(1), Next(1, 0, 1))


@pytest.mark.parametrize("seed", range(20))
def test_never_fewer_than_before_but_for_one_ahead(seed: int) -> None:
    """Members settle, end and fail in any order; what is lent beyond those that serve is at most one place."""
    dice = random.Random(seed)
    for _ in range(300):
        full = dice.randint(0, 6)
        old = Old(full)
        target = dice.randint(1, 6)
        settled = 0
        for _ in range(20):
            settled = min(target, max(0, settled + dice.choice([-1, 0, 1, 1])))
            live = target - (dice.random() < 0.1)
            now = Next(target, settled, live, fails=dice.random() < 0.2, may_begin=dice.random() < 0.9)
            decided = reconcile(old, now)
            if decided.ends:
                assert settled >= target
                break
            assert 0 <= decided.ahead <= decided.lent <= full
            assert decided.lent - min(settled, full) <= decided.ahead <= 1
            assert decided.ahead + decided.more <= 1
            assert reconcile(old._replace(lent=decided.lent, ahead=decided.ahead), now)[:3] == decided[:3], "it rests"
            more = 1 if decided.more and dice.random() < 0.5 else 0
            old = old._replace(lent=decided.lent + more, ahead=decided.ahead + more)


LEAVES: Final = Move(RUNNING, RUNNING, own=True, moved=False, must_leave=True)
MOVE_CASES: Final = {
    "it loads": (LEAVES, Step("goes on")),
    "it serves": (LEAVES._replace(serves=True), Step("replaced", "gone")),
    "it serves, and is one of those that waited": (
        LEAVES._replace(serves=True, own=False),
        Step("replaced", "waits", over="none"),
    ),
    "the old one was taken away": (LEAVES._replace(was=CANCELLED, moved=True), Step("moved", over="old")),
    "it has ended": (
        LEAVES._replace(now=CANCELLED),
        Step("its replacement has ended", over="new", rests=True),
    ),
    "it has ended after the move": (
        LEAVES._replace(was=CANCELLED, now=CANCELLED, moved=True),
        Step("its replacement has ended", over="old"),
    ),
    "the drain is over": (LEAVES._replace(must_leave=False), Step("it stays", gives_up=True)),
    "the old one waits for its worker": (LEAVES._replace(was=LOST_KEPT), Step("it is gone", gives_up=True)),
    "the old one was asked to end while it waits": (
        LEAVES._replace(was=ENDING, now=QUEUED),
        Step("it ended before", gives_up=True),
    ),
    "the old one was asked to end while it loads": (LEAVES._replace(was=ENDING), Step("it ended before", "gone")),
    "as many serve without it as may": (
        LEAVES._replace(now=QUEUED, spare=True, own=False),
        Step("spare", "waits", gives_up=True),
    ),
    "it finds no place for one that is awaited": (
        LEAVES._replace(now=QUEUED, vain=True),
        Step("in vain", "waits", gives_up=True),
    ),
}


@pytest.mark.parametrize("case", MOVE_CASES)
def test_what_follows_for_one_that_moves(case: str) -> None:
    move, step = MOVE_CASES[case]
    assert move_on(move) == step


def test_every_phase_of_a_move_is_named_once_and_the_last_one_always_holds() -> None:
    names = [phase.name for phase in MOVES]
    assert len(set(names)) == len(names)
    assert {step.phase for _, step in MOVE_CASES.values()} == set(names)
    assert MOVES[-1].holds(LEAVES)


@pytest.mark.parametrize(
    ("left_s", "grace_s", "notice_s", "goes_on", "notice"),
    [
        (math.inf, 30.0, 10, True, None),
        (41.0, 30.0, 10, True, None),
        (40.0, 30.0, 10, True, 10),
        (31.5, 30.0, 10, True, 10),
        (31.5, 30.0, 3, True, 3),
        (12.0, 30.0, 10, True, 6),
        (30.0, 30.0, 0, True, 0),
        (0.0, 0.0, 10, True, 0),
        (60.0, 0.0, 10, False, 10),
        (4.0, 0.0, 10, False, 4),
    ],
)
def test_what_has_to_leave_has_its_grace_before_the_end_and_its_notice_before_that(
    left_s: float, grace_s: float, notice_s: int, goes_on: bool, notice: int | None
) -> None:
    assert notice_to_leave(left_s, grace_s, notice_s, goes_on=goes_on) == notice


@pytest.mark.parametrize("serves", [False, True])
def test_one_that_serves_is_taken_away_only_once_its_replacement_serves(serves: bool) -> None:
    for own in (False, True):
        for now in (QUEUED, RUNNING, CANCELLED):
            step = move_on(LEAVES._replace(now=now, own=own, serves=serves))
            assert bool(step.old) is (serves and now != CANCELLED)
