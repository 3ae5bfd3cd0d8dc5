"""What becomes of the places of a service that its next version replaces: the table of phases."""

from __future__ import annotations

import random
from typing import Final

import pytest

from moorage.scheduler.core.lifecycle.members import PHASES, Decision, Next, Old, reconcile

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
