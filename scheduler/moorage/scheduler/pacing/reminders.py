"""Limits what the log says about a lasting problem: when it begins and then rarely, not at every try."""

from __future__ import annotations

import time
from typing import Final

#: the same words are logged again after this time, so that the end of a log shows what is wrong now
AGAIN_S: Final = 60.0
#: different texts remembered for one problem; beyond it the log repeats some
WORDS_MAX: Final = 64


class Reminders:
    """The texts logged about one problem: `due` says whether to log a text now, `clear` that the problem is over."""

    def __init__(self) -> None:
        self._said_s: dict[str, float] = {}  # by text, the monotonic time at which it was logged

    def due(self, words: str) -> bool:
        """Return whether to log this text now, and count it as logged then: it is new, or `AGAIN_S` have passed."""
        now_s, said_s = time.monotonic(), self._said_s.get(words)
        if said_s is not None and now_s - said_s < AGAIN_S:
            return False
        if len(self._said_s) >= WORDS_MAX:
            self._said_s.clear()
        self._said_s[words] = now_s
        return True

    def clear(self) -> None:
        self._said_s.clear()
