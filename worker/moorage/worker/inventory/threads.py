"""Ask a driver that may hang: a question runs in a daemon thread of its own, with a time limit for who waits for it.

A pool of threads would not do: its workers are joined when the process ends, and one that is stuck in the kernel never
comes back.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Final, Generic, TypeVar

T = TypeVar("T")


class Question(Generic[T]):
    """One thing that is asked again and again, at most once at a time, so that at most one thread can be stuck in it.

    Whoever asks while an answer is awaited shares it, and its time limit of `timeout_s` seconds.
    """

    def __init__(self, name: str, ask: Callable[[], T], timeout_s: float) -> None:
        self._name = name
        self._ask = ask
        self._timeout_s: Final = timeout_s
        self._flying: asyncio.Future[T] | None = None
        self._until_s = 0.0  # the loop's time after which nobody waits for the one in flight

    async def answer(self) -> T:
        """The answer, or of one asked already. Raises TimeoutError, and whatever `ask` raised."""
        loop = asyncio.get_running_loop()
        if self._flying is None or self._flying.done():
            self._flying = in_thread(self._name, self._ask)
            self._until_s = loop.time() + self._timeout_s
        async with asyncio.timeout_at(self._until_s):
            return await asyncio.shield(self._flying)

    @property
    def is_asked(self) -> bool:
        """Whether an answer is awaited now."""
        return self._flying is not None and not self._flying.done()

    async def fresh_answer(self) -> T:
        """An answer to a question asked from now on: one in flight may be of before. Raises as `answer` does."""
        if self.is_asked:
            try:
                await self.answer()
            except Exception:  # of before; a thread that is stuck makes the next line time out at once
                pass
        return await self.answer()


def start_thread(name: str, run: Callable[[], object]) -> None:
    """Run something in a daemon thread: one that is stuck in the kernel must not keep the process from ending."""
    threading.Thread(target=run, name=name, daemon=True).start()


def in_thread(name: str, work: Callable[[], T]) -> asyncio.Future[T]:
    """Start `work` in a daemon thread; the future is settled when it comes back, which may be never."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()
    # Whoever waited may have given up: then nobody is left to be told of an error.
    done.add_done_callback(lambda future: future.cancelled() or future.exception())

    def settle(outcome: Callable[[], None]) -> None:
        if not done.done():
            outcome()

    def run() -> None:
        try:
            outcome = partial(done.set_result, work())
        except BaseException as failure:  # whatever it is belongs to the one who waits
            outcome = partial(done.set_exception, failure)
        try:
            loop.call_soon_threadsafe(settle, outcome)
        except RuntimeError:
            pass  # the loop is closed: nobody waits any more

    start_thread(name, run)
    return done
