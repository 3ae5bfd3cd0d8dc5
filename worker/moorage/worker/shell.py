"""What the parts of an agent need of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from moorage.worker.drivers.base import Driver
from moorage.worker.member_messages import Event, Log


class Shell(Protocol):
    """An agent, as its parts see it; `dropped` counts by reason what was not answered."""

    dropped: Counter[str]

    def now(self) -> float:
        """Seconds of CLOCK_BOOTTIME."""

    def post(self, subject: str, payload: bytes, reply: str = "") -> None:
        """Queue a message for the write at the end of this turn of the loop."""

    def enqueue(self, event: Event) -> None:
        """Take an event in the next turn, soon."""

    def wake(self) -> None:
        """Have a turn soon."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run it beside the turns, until the agent closes."""

    def say(self, line: Log) -> None:
        """A line for the operator; repeated ones are thinned out."""

    def call_driver(self, driver: Driver, step: Callable[[], object]) -> str:
        """Call a driver. If a foreign driver raises, return what in one line; else ""."""
