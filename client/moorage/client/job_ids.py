"""Make job ids that are unique and sort by time."""

from __future__ import annotations

import os
import random
import time
from typing import Final

from moorage.schemas.names import JOB_ID_DIGITS

_DIGITS: Final = 14
_CHANCE_BITS: Final = 25


def fresh_job_id() -> str:
    """Return a job id that sorts by time: `j`, 9 digits of milliseconds in base 32, and 5 random digits.

    The ids of one process sort in the order in which they were made: within a millisecond the random digits count up.
    """
    global _last, _head, _head_of
    time_ms = int(time.time() * 1000)
    _last = number = (
        time_ms << _CHANCE_BITS | _chance.getrandbits(_CHANCE_BITS) if time_ms > _last >> _CHANCE_BITS else _last + 1
    )
    above = number >> _PAIR_BITS
    if above != _head_of:
        _head, _head_of = "j" + "".join([_PAIRS[above >> shift & 1023] for shift in _SHIFTS]), above
    return _head + _PAIRS[number & 1023]


def _forget() -> None:
    """In the child of a fork, seed the generator again, so that parent and child make different ids."""
    global _last
    _last = 0
    _chance.seed()


_last = 0
_PAIR_BITS: Final = 10
_PAIRS: Final = [one + two for one in JOB_ID_DIGITS for two in JOB_ID_DIGITS]
#: shifts of all pairs of digits but the last; many ids of one millisecond share these pairs
_SHIFTS: Final = range(5 * _DIGITS - 2 * _PAIR_BITS, -1, -_PAIR_BITS)
_head, _head_of = "", -1
#: a generator of its own: if programs seed the global one alike, their ids still differ
_chance: Final = random.Random()
os.register_at_fork(after_in_child=_forget)
