"""What becomes of members of a service that make room for others, or that others replace: tables of phases, pure.

A member that *moves* to another worker goes on until its replacement serves: `move_on` says what follows for the two.

While its next version takes its place, the old one *lends* places: it wants that many members fewer, and what it wants
no more waits. The k-th place is lent once k members of the next version have settled, that is, were ready for as long
as its request says. Where there is no room for both, one place is lent *ahead*, for a member that has not settled yet.
So no place is lost: once the next version fails, is cancelled or cannot be whole any more, the old one wants them all
again.

`reconcile` decides that. Nothing here reads a clock or writes: `Services` and `Relocating` count, and apply what is
decided.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple

from moorage.scheduler.core.ledger.state import (
    CANCELLING,
    ENDING,
    FROZEN,
    IS_TERMINAL,
    LOST_KEPT,
    MAY_END,
    QUEUED,
    RUNNING,
    Replica,
)


class Old(NamedTuple):
    """The version that serves: how many members it has while nothing replaces it, how many of these places it has lent,
    how many of those ahead, and whether its number follows its calls."""

    full: int
    lent: int = 0
    ahead: int = 0
    follows: bool = False


class Next(NamedTuple):
    """Its next version: `target` members have to settle, `settled` have, and `live` may still do so.

    `fails`: an attempt ended by itself before it had settled, and the next one has no place yet. `may_begin` is false
    while it waits for other jobs, a time or an operator.
    """

    target: int
    settled: int
    live: int
    fails: bool = False
    may_begin: bool = True


class Decision(NamedTuple):
    """What follows: the places that are lent from now on, how many of them ahead, and how many more may be lent ahead
    if the next version finds no room. With `ends` the old job ends, as nothing of it is needed any more."""

    phase: str
    lent: int
    ahead: int = 0
    more: int = 0
    ends: bool = False


class Phase(NamedTuple):
    """A row of the table: its name, when it holds, and what follows then."""

    name: str
    holds: Callable[[Old, Next], bool]
    then: Callable[[Old, Next], Decision]


def _settles(old: Old, new: Next) -> int:
    """Return how many places members make up for that have settled."""
    return min(new.settled, old.full)


def _goes_on(old: Old, new: Next) -> Decision:
    lent = _settles(old, new)
    made_up_for = max(0, lent - (old.lent - old.ahead))  # places lent ahead, for which a member serves by now
    ahead = min(max(0, old.ahead - made_up_for), old.full - lent)
    # where their numbers follow calls, a larger member may need the places of several that answered as many
    spare = max(0, old.full - new.target) if old.follows else 0
    most = min(old.full, lent + spare + 1)
    return Decision("goes on", lent + ahead, ahead, max(0, most - lent - ahead))


#: the first phase that holds decides
PHASES: Final = (
    Phase("put off", lambda _, new: not new.may_begin, lambda old, new: Decision("put off", _settles(old, new))),
    Phase("lost", lambda _, new: new.live < new.target, lambda _, __: Decision("lost", 0)),
    Phase("whole", lambda _, new: new.settled >= new.target, lambda old, _: Decision("whole", old.lent, ends=True)),
    Phase("fails", lambda _, new: new.fails, lambda old, new: Decision("fails", _settles(old, new))),
    Phase("goes on", lambda _, __: True, _goes_on),
)


def reconcile(old: Old, new: Next) -> Decision:
    """Return what becomes of the places of a service that its next version replaces."""
    return next(phase for phase in PHASES if phase.holds(old, new)).then(old, new)


class Move(NamedTuple):
    """A member that leaves its worker, and its replacement: their states, and what is known of both.

    `own`: the replacement has a number of its own, which is taken away in the end; else it is one of those that
    waited. `moved`: the old one was taken away for it before. `must_leave`: the old one still has to, and may move.
    `serves`: the replacement does, for long enough. `spare`: as many serve without the old one as may run. `vain`: the
    old one is awaited, and its replacement has found no place for long enough.
    """

    was: int
    now: int
    own: bool
    moved: bool
    must_leave: bool = False
    serves: bool = False
    spare: bool = False
    vain: bool = False


class Step(NamedTuple):
    """What follows for a move. `old`: whether the old one is taken away ("gone"), ends to wait again ("waits"), or
    neither; `gives_up`: the replacement is not needed; `over`: whose number leaves with the move's end, "none" for no
    number, "" while it goes on; `rests`: the next replacement is begun later."""

    phase: str
    old: str = ""
    gives_up: bool = False
    over: str = ""
    rests: bool = False


class MovePhase(NamedTuple):
    """A row of the table of moves."""

    name: str
    holds: Callable[[Move], bool]
    then: Callable[[Move], Step]


def _new_ended(move: Move) -> Step:
    over = ("old" if move.moved else "new") if move.own else "none"
    return Step("its replacement has ended", over=over, rests=move.was in MAY_END)


def _has_replaced(move: Move) -> Step:
    # without a number of its own the replacement stays one of them, and the old one waits as they do
    return Step("replaced", "gone") if move.own else Step("replaced", "waits", over="none")


def _too_early(move: Move) -> Step:
    gives_up = move.now == QUEUED or not move.own
    return Step("it ended before", gives_up=True) if gives_up else Step("it ended before", "gone")


#: the first phase that holds decides
MOVES: Final = (
    MovePhase("its replacement has ended", lambda move: IS_TERMINAL[move.now], _new_ended),
    MovePhase("moved", lambda move: move.moved, lambda _: Step("moved", over="old")),
    MovePhase(  # the last waits for its worker, or an operator
        "it is gone",
        lambda move: IS_TERMINAL[move.was] or move.was in (CANCELLING, LOST_KEPT),
        lambda _: Step("it is gone", gives_up=True),
    ),
    MovePhase("it ended before", lambda move: move.was in (QUEUED, ENDING), _too_early),
    MovePhase("it stays", lambda move: not move.must_leave, lambda _: Step("it stays", gives_up=True)),
    MovePhase("replaced", lambda move: move.serves, _has_replaced),
    MovePhase(
        "spare",
        lambda move: move.now == QUEUED and move.spare,
        lambda _: Step("spare", "waits", gives_up=True),
    ),
    MovePhase(
        "in vain",
        lambda move: move.now == QUEUED and move.vain,
        lambda _: Step("in vain", "waits", gives_up=True),
    ),
    MovePhase("goes on", lambda _: True, lambda _: Step("goes on")),
)


def move_on(move: Move) -> Step:
    """Return what follows for a member that moves."""
    return next(phase for phase in MOVES if phase.holds(move)).then(move)


def notice_to_leave(left_s: float, grace_s: float, notice_s: int, *, goes_on: bool = True) -> int | None:
    """Return how long before its end an attempt gets its signal that has to leave its worker, in s; None: it goes on.

    It has `left_s`, of which its grace takes `grace_s`, and wants its signal `notice_s` before. Where the time is too
    short for both, at most half of it is for the signal. One that does not go on until then is asked to end at once.
    """
    asked_s = max(left_s - grace_s, min(notice_s, left_s / 2))  # until it is asked to end
    return None if goes_on and asked_s > notice_s else min(notice_s, math.ceil(asked_s))


def has_settled(replica: Replica, for_ms: int, now_ms: int) -> bool:
    """Return whether a replica serves, as its worker has told for so many ms; or sleeps, and had done so."""
    attempt = replica.attempt
    if attempt is None or replica.state not in (RUNNING, FROZEN) or not attempt.ready:
        return False
    return now_ms - attempt.ready_ms >= for_ms
