"""Define the interface of an agent that its parts use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from moorage.worker.driver import Driver
from moorage.worker.session.attempt_messages import Event, Log


class Shell(Protocol):
    """An agent, as its parts use it; `dropped` has the number of dropped messages by reason."""

    dropped: Counter[str]

    def now(self) -> float:
        """Return the time in seconds of CLOCK_BOOTTIME."""

    def post(self, subject: str, payload: bytes, reply: str = "") -> None:
        """Queue a message for the write at the end of this turn of the loop."""

    def enqueue(self, event: Event) -> None:
        """Put an event into the queue and ask for a turn."""

    def wake(self) -> None:
        """Ask for a turn."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run this as a task outside the turns; it is cancelled when the agent closes."""

    def say(self, line: Log) -> None:
        """Log a line for the operator; a line that is repeated soon is left out."""

    def call_driver(self, driver: Driver, step: Callable[[], object]) -> str:
        """Call a driver. If a foreign driver raises, return the error in one line; else ""."""
