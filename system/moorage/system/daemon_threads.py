"""Ask a driver that may hang: each question runs in a daemon thread of its own, and waiting for it has a time limit.

A pool of threads would not do: the process waits for its threads at its end, and one that is stuck in the kernel never
returns.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Final, Generic, TypeVar

T = TypeVar("T")


class Question(Generic[T]):
    """One question that is asked again and again, at most once at a time, so that at most one thread can be stuck in
    it.

    Callers that ask while an answer is pending share that answer, and its time limit of `timeout_s` seconds.
    """

    def __init__(self, name: str, ask: Callable[[], T], timeout_s: float) -> None:
        self._name = name
        self._ask = ask
        self._timeout_s: Final = timeout_s
        self._flying: asyncio.Future[T] | None = None
        self._until_s = 0.0  # the loop's time at which the waits for the pending answer end

    async def answer(self) -> T:
        """Return the answer to a new question, or to the pending one. Raises what `ask` raised.

        Raises TimeoutError if the answer does not come in time. That question stays pending: until its thread returns,
        every later call raises TimeoutError at once.
        """
        loop = asyncio.get_running_loop()
        if self._flying is None or self._flying.done():
            self._flying = in_thread(self._name, self._ask)
            self._until_s = loop.time() + self._timeout_s
        async with asyncio.timeout_at(self._until_s):
            return await asyncio.shield(self._flying)

    @property
    def pending(self) -> asyncio.Future[T] | None:
        """The future of the answer that is pending now; None if none is."""
        return None if self._flying is None or self._flying.done() else self._flying

    async def fresh_answer(self) -> T:
        """Return the answer to a question asked from now on; a pending one may be older. Raises as `answer` does."""
        if self.pending is not None:
            try:
                await self.answer()
            except Exception:  # from the older question; if its thread is stuck, the next line times out at once
                pass
        return await self.answer()


def start_thread(name: str, run: Callable[[], object]) -> None:
    """Call `run` in a daemon thread: a thread that is stuck in the kernel must not keep the process from ending."""
    threading.Thread(target=run, name=name, daemon=True).start()


def in_thread(name: str, work: Callable[[], T]) -> asyncio.Future[T]:
    """Start `work` in a daemon thread; return a future that is settled when `work` returns or raises: perhaps never."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()
    # the caller may have given up; then the exception is retrieved here, so that the loop does not warn
    done.add_done_callback(lambda future: future.cancelled() or future.exception())

    def settle(outcome: Callable[[], None]) -> None:
        if not done.done():
            outcome()

    def run() -> None:
        try:
            outcome = partial(done.set_result, work())
        except BaseException as failure:  # any exception belongs to the caller that waits
            outcome = partial(done.set_exception, failure)
        try:
            loop.call_soon_threadsafe(settle, outcome)
        except RuntimeError:
            pass  # the loop is closed, so no caller waits

    start_thread(name, run)
    return done
