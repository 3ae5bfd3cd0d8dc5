"""Calls of methods that a member's program lacks: whether a member of another version of the service has one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Final

from moorage.bus.transport import STATUS_HEADER, Delivery
from moorage.calls.member import Call

#: how long a member waits to hear whether another one has the method of a call
FOUND_S: Final = 1.0


class MethodSearch:
    """`ask` is called with a call and the reply subject for who has its method, `over` with the call and whether one
    does; None if nobody has said."""

    def __init__(self, inbox: str, ask: Callable[[Call, str], None], over: Callable[[Call, bool | None], None]) -> None:
        self._inbox = inbox
        self._ask = ask
        self._over = over
        self._asked = 0
        self._calls: dict[str, tuple[Call, asyncio.TimerHandle]] = {}  # by the reply subject

    def __bool__(self) -> bool:
        return bool(self._calls)

    @property
    def replies(self) -> Iterator[str]:
        """The reply subjects of the calls whose methods are sought."""
        return (call.reply for call, _ in self._calls.values())

    @property
    def subject(self) -> str:
        """Where the answers come."""
        return f"{self._inbox}.*"

    def begin(self, call: Call) -> None:
        self._asked += 1
        reply = f"{self._inbox}.{self._asked}"
        self._calls[reply] = call, asyncio.get_running_loop().call_later(FOUND_S, self._end, reply, None)
        self._ask(call, reply)

    def on_answer(self, delivery: Delivery) -> None:
        """A member says that it has the method of a call, or the server that none has."""
        if delivery.subject in self._calls:
            self._end(delivery.subject, (delivery.headers or {}).get(STATUS_HEADER) != "503")

    def give_up(self) -> None:
        for reply in list(self._calls):
            self._end(reply, None)

    def _end(self, reply: str, is_there: bool | None) -> None:
        call, timer = self._calls.pop(reply)
        timer.cancel()
        self._over(call, is_there)
