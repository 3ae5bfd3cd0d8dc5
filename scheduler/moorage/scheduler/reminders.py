"""What a trouble that lasts is called in the log: told when it begins and then rarely, not at every try."""

from __future__ import annotations

import time
from typing import Final

#: the same words again after this, so that whoever looks at the end of a log sees what is wrong now
AGAIN_S: Final = 60.0
#: different words of one trouble that are remembered; with more of them the log repeats some
WORDS_MAX: Final = 64


class Reminders:
    """Of one trouble: `due` says whether words are to be logged now, `clear` that the trouble is over."""

    def __init__(self) -> None:
        self._said_s: dict[str, float] = {}  # monotonic, by words

    def due(self, words: str) -> bool:
        """Whether these words are new, or were said so long ago that they are to be said again. Counts as said."""
        now_s, said_s = time.monotonic(), self._said_s.get(words)
        if said_s is not None and now_s - said_s < AGAIN_S:
            return False
        if len(self._said_s) >= WORDS_MAX:
            self._said_s.clear()
        self._said_s[words] = now_s
        return True

    def clear(self) -> None:
        self._said_s.clear()
