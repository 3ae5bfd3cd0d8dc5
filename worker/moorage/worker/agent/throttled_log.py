"""Write a worker's log for the operator, with each line at most twice a minute."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from moorage.worker.session.attempt_messages import Log

LOG_AGAIN_S: Final = 30.0
#: remembered lines; beyond that all are forgotten, and may be repeated sooner
LINES_MAX: Final = 1024
_LEVELS: Final = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

log = logging.getLogger("moorage.worker")


class ThrottledLog:
    """The log of one worker; `now` returns seconds of any clock that only goes forward."""

    def __init__(self, worker: str, now: Callable[[], float]) -> None:
        self._worker = worker
        self._now = now
        self._said: dict[str, float] = {}

    def __call__(self, line: Log) -> None:
        now = self._now()
        key = f"{line.code} {line.text}"
        if now < self._said.get(key, -LOG_AGAIN_S) + LOG_AGAIN_S:
            return
        if len(self._said) > LINES_MAX:
            self._said.clear()
        self._said[key] = now
        log.log(_LEVELS[line.level], "%s: %s: %s", self._worker, line.code, line.text)
