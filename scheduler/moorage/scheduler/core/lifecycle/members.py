"""What becomes of the members of a service while its next version takes its place: a pure decision, a table of phases.

The old version *lends* places to the next one: it wants that many members fewer, and what it wants no more waits. The
k-th place is lent once k members of the next version have settled, that is, were ready for as long as its request says.
Where there is no room for both, one place is lent *ahead*, for a member that has not settled yet. So no place is lost:
once the next version fails, is cancelled or cannot be whole any more, the old one wants them all again.

`reconcile` decides, and nothing here reads a clock or writes: `Services` counts, and applies what is decided.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from moorage.scheduler.core.ledger.state import FROZEN, RUNNING, Replica


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


def has_settled(replica: Replica, for_ms: int, now_ms: int) -> bool:
    """Return whether a replica serves, as its worker has told for so many ms; or sleeps, and had done so."""
    attempt = replica.attempt
    if attempt is None or replica.state not in (RUNNING, FROZEN) or not attempt.ready:
        return False
    return now_ms - attempt.ready_ms >= for_ms
