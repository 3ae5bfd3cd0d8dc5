"""Connect a service to NATS and log the state of its connection: no server, refused, lost, back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from moorage.bus.connection import GIVE_UP_AFTER_S, Connection, State, connect
from moorage.bus.contexts import Context, resolve
from moorage.bus.errors import BusError, PermissionRefused
from moorage.bus.link import OnRegained

#: a server that has not answered by then is reported as missing
SLOW_AFTER_S: Final = 1.0
#: the same refusal is logged once in this time, and at most so many different ones: their texts hold words that
#: others choose, such as a reply subject. All subscriptions of one process fit, some 20 of a scheduler
REFUSED_AGAIN_S: Final = 600.0
REFUSED_MAX: Final = 100


class Refusals:
    """Logs the errors of a connection that no caller waits for, and the end of each refusal that it logged.

    The same text is logged once in `REFUSED_AGAIN_S`, unless the subscription held meanwhile, and at most `REFUSED_MAX`
    different texts in that time.
    """

    def __init__(self, log: logging.Logger, now: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._now = now
        self._told: dict[str, float] = {}  # when each was logged, the oldest first

    def on_error(self, error: BusError) -> None:
        text, moment, told = str(error), self._now(), self._told
        if moment - told.get(text, -REFUSED_AGAIN_S) < REFUSED_AGAIN_S:
            return
        told.pop(text, None)
        if len(told) == REFUSED_MAX:
            oldest = next(iter(told))
            if moment - told[oldest] < REFUSED_AGAIN_S:
                return
            del told[oldest]
        told[text] = moment
        fix = error.problem.next
        self._log.warning("%s%s", error, f": {fix}" if fix else "")

    def on_regained(self, subjects: list[str]) -> None:
        """Log which refused subscriptions hold again. The next refusal of one is news."""
        for subject in subjects:
            if self._told.pop(str(PermissionRefused("subscription", subject.lower())), None) is not None:
                self._log.warning("the NATS server takes the subscription to %s again", subject)


def log_states(log: logging.Logger, where: str, server_at: Callable[[], str] = lambda: "") -> Callable[[State], None]:
    """Return a function for `on_state` of a connection, which logs when the connection is lost and when it is back.

    If `where` names several servers, `server_at` is asked to which of them it came back.
    """
    lost_s: float | None = None

    def on_state(state: State) -> None:
        nonlocal lost_s
        if state is State.RECONNECTING and lost_s is None:
            lost_s = time.monotonic()
            log.warning("disconnected from the NATS server %s: trying again until it answers", where)
        elif state is State.CONNECTED and lost_s is not None:
            at = f", now at {server_at()}" if "," in where and server_at() else ""
            log.warning("connected to the NATS server %s again after %.1f s%s", where, time.monotonic() - lost_s, at)
            lost_s = None

    return on_state


async def connect_logged(
    target: Context | str | None,
    name: str,
    log: logging.Logger,
    *,
    role: str = "",
    on_state: Callable[[State], None] | None = None,
    on_regained: OnRegained | None = None,
) -> Connection:
    """Connect as `connect` does, and log the connection's state and what the server refuses. The log shows the server's
    address without secrets, then `role`."""
    context = resolve(target)
    where = context.safe_url + role
    connection: Connection | None = None
    log_state = log_states(log, where, lambda: connection.server_at if connection is not None else "")

    def on_state_logged(state: State) -> None:
        log_state(state)
        if on_state is not None:
            on_state(state)

    refusals = Refusals(log)

    def on_regained_logged(subjects: list[str]) -> None:
        refusals.on_regained(subjects)
        if on_regained is not None:
            on_regained(subjects)

    waiting = asyncio.get_running_loop().call_later(
        SLOW_AFTER_S, log.info, "no server answers at %s yet: trying for %g s", where, GIVE_UP_AFTER_S
    )
    try:
        connection = await connect(
            context,
            name,
            on_state=on_state_logged,
            on_error=refusals.on_error,
            on_regained=on_regained_logged,
        )
        return connection
    finally:
        waiting.cancel()
