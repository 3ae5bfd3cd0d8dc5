"""A job's replicas in counts and ranges: `running 12  done 840 (3 failed: 17, 40-41)  eta ~4m`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from moorage.cli.framework.render import age
from moorage.schemas.job import QUEUED, STARTING, SUCCEEDED, TERMINAL

if TYPE_CHECKING:
    from moorage.schemas.answers.jobs import ReplicaCounts

#: ranges that a line names of the replicas that ended in one state
RANGES_NAMED_MAX: Final = 8
#: a rate over less time says little
ETA_AFTER_S: Final = 5.0
#: states in which no attempt runs: it waits, it starts, it is over
_OFF: Final = TERMINAL | STARTING | {QUEUED}


def replica_words(states: Mapping[str, int], ended: Mapping[str, str] | None = None) -> str:
    """Return how many replicas run, wait and are done, and how many and which of those ended without success.

    `ended` has these by state, as ranges; without it only their number is told.
    """
    bad = []
    for name, count in states.items():
        if name in TERMINAL and name != SUCCEEDED and count:
            which = _cut((ended or {}).get(name, ""))
            bad.append(f"{count} {name.lower().replace('_', ' ')}{f': {which}' if which else ''}")
    done = sum(count for name, count in states.items() if name in TERMINAL)
    counts = [
        ("running", sum(count for name, count in states.items() if name not in _OFF)),
        ("starting", sum(count for name, count in states.items() if name in STARTING)),
        ("waiting", states.get(QUEUED, 0)),
    ]
    words = [f"{name} {count}" for name, count in counts if count]
    if done:
        words.append(f"done {done}" + (f" ({'; '.join(bad)})" if bad else ""))
    return "  ".join(words)


def _cut(ranges: str) -> str:
    parts = ranges.split(", ") if ranges else []
    return ", ".join(parts[:RANGES_NAMED_MAX]) + (", …" if len(parts) > RANGES_NAMED_MAX else "")


def shown_words(told: ReplicaCounts | None) -> str:
    """Return the same from an answer of `show`, or from a row of `ls`; "" for a job of one replica."""
    return "" if told is None else replica_words(told.states, told.ended)


class Eta:
    """Estimates when the last replica ends, from how many have ended since this began to watch."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._began: tuple[float, int] | None = None

    def words(self, states: Mapping[str, int]) -> str:
        """Return `eta ~4m`; "" until it can be told."""
        done = sum(count for name, count in states.items() if name in TERMINAL)
        left = sum(states.values()) - done
        now_s = self._clock_s()
        if self._began is None:
            self._began = now_s, done
        began_s, began_done = self._began
        if now_s - began_s < ETA_AFTER_S or done == began_done or not left:
            return ""
        return f"eta ~{age(1000 * left * (now_s - began_s) / (done - began_done))}"
