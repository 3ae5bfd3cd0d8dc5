"""Watch whether the engine of a driver answers (docker's, a cluster's): while it does not, renewals say so."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from moorage.system.proctree import boottime_s

#: seconds between two questions
ASK_EVERY_S: Final = 2.0
#: seconds that an engine has for an answer: one that hangs is down
ANSWER_S: Final = 10.0
#: good answers in a row after which an engine that was down counts as back
GOOD_ANSWERS: Final = 2

log = logging.getLogger("moorage.worker")


class EngineWatch:
    """Asks an engine again and again. `why` is "" while it answers, else its error, and `since_s` when that began.

    `since_s` is in seconds of CLOCK_BOOTTIME. `ask` raises one of `faults` if the engine does not answer.
    """

    def __init__(
        self,
        ask: Callable[[], Awaitable[object]],
        faults: tuple[type[Exception], ...],
        name: str,
        every_s: float = ASK_EVERY_S,
    ) -> None:
        self._ask = ask
        self._faults: tuple[type[Exception], ...] = (*faults, TimeoutError)
        self._name = name
        self._every_s = every_s
        self.why = ""
        self.since_s = 0.0

    async def run(self) -> None:
        good = 0
        while True:
            try:
                async with asyncio.timeout(ANSWER_S):
                    await self._ask()
            except self._faults as error:
                good = 0
                self._down(str(error))
            else:
                good += 1
                if self.why and good >= GOOD_ANSWERS:
                    log.info("%s: its engine answers again", self._name)
                    self.why = ""
            await asyncio.sleep(self._every_s)

    def _down(self, why: str) -> None:
        if not self.why:
            log.warning("%s: its engine does not answer, so jobs of this driver go elsewhere: %s", self._name, why)
            self.since_s = boottime_s()
        self.why = why or "it does not answer"
