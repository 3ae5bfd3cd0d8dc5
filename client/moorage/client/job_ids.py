"""Job ids that are made up: in the order of time, and nobody else's."""

from __future__ import annotations

import os
import random
import time
from typing import Final

from moorage.schemas.names import JOB_ID_DIGITS

_DIGITS: Final = 14
_CHANCE_BITS: Final = 25


def fresh_job_id() -> str:
    """A job id that sorts by time: `j`, 9 digits of milliseconds in base 32, 5 of chance.

    Those of one process sort in the order in which they were made: within a millisecond the chance counts up.
    """
    global _last
    drawn = int(time.time() * 1000) << _CHANCE_BITS | _chance.getrandbits(_CHANCE_BITS)
    _last = number = drawn if drawn >> _CHANCE_BITS > _last >> _CHANCE_BITS else _last + 1
    pairs = [_PAIRS[number >> shift & 1023] for shift in _SHIFTS]
    return "j" + "".join(pairs)


_last = 0
_PAIRS: Final = [one + two for one in JOB_ID_DIGITS for two in JOB_ID_DIGITS]
_SHIFTS: Final = range(5 * (_DIGITS - 2), -1, -10)
#: of our own, so that nobody's seed makes two processes draw the same; a fork's child draws anew
_chance: Final = random.Random()
os.register_at_fork(after_in_child=_chance.seed)
