"""Keeps the leader's tasks beside the record loop running: a defect in one of them does not end the term."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from moorage.scheduler.ledger.ledger import Deposed, LedgerBroken
from moorage.scheduler.pacing.reminders import Reminders
from moorage.system.backoff import Backoff

log = logging.getLogger("moorage.scheduler")

#: a failed task is started again after this pause, which doubles each time that it fails again
AGAIN_S: Final = 1.0
AGAIN_S_MAX: Final = 60.0
#: a task that has run this long begins with the short pause again
FORGIVEN_S: Final = 60.0


async def keep_running(
    name: str, work: Callable[[], Awaitable[None]], failed: Callable[[str, Exception], None]
) -> None:
    """Run `work` until it returns. If it raises, call `failed` with the name and the exception, and run it again.

    There is a pause before each restart. `Deposed` and `LedgerBroken`, also in a group, are raised instead and end the
    term. The same failure is logged at most once a minute.
    """
    loop, reminders, backoff = asyncio.get_running_loop(), Reminders(), Backoff(AGAIN_S, AGAIN_S_MAX)
    while True:
        began_s = loop.time()
        try:
            await work()
        except (Deposed, LedgerBroken):
            raise
        except Exception as raised:
            if _is_of_the_ledger(raised):
                raise
            failed(name, raised)
            if loop.time() - began_s > FORGIVEN_S:
                backoff.reset()
            if reminders.due(f"{type(raised).__name__}: {raised}"):
                log.exception(
                    "a task of the scheduler failed, and the scheduler goes on: the task %s is started again in %.0f s",
                    name,
                    backoff.coming_s,
                )
        else:
            return
        await asyncio.sleep(backoff.next_s())


def _is_of_the_ledger(raised: Exception) -> bool:
    return isinstance(raised, ExceptionGroup) and raised.subgroup((Deposed, LedgerBroken)) is not None
