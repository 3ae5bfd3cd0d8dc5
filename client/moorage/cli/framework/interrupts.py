"""What Ctrl-C and other signals do while a verb works: the first Ctrl-C ends it in order, the next one at once; neither
prints a stack trace."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import warnings
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

from moorage.cli.framework.console import report
from moorage.cli.framework.exit_codes import EXIT_INTERRUPTED

Result = TypeVar("Result")

#: what ends a service, or a command that has processes of its own, in order: Ctrl-C, `kill`, a terminal that is closed
ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: what a user sends a program that understands it
_OF_USERS: Final = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGURG)
#: those that a terminal sends to the program by itself
_OF_TERMINALS: Final = frozenset((signal.SIGINT, signal.SIGQUIT))


def comes_by_itself(number: int) -> bool:
    """Return whether a program that this command runs gets a signal without being passed it: Ctrl-C, Ctrl-\\."""
    return number in _OF_TERMINALS and sys.stdin.isatty()


#: how long a second Ctrl-C is waited for at a terminal
AGAIN_S: Final = 2.0

_happened = False
#: set by the second Ctrl-C, where it has a meaning of its own
_again: asyncio.Event | None = None


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """Run like `asyncio.run`, with Ctrl-C handled.

    The first Ctrl-C cancels the work; KeyboardInterrupt is raised once the work is over. The next one ends the process
    at once, unless `detachable` gives the second one a meaning; then the third one does.
    """

    async def watched() -> Result:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def on_interrupt() -> None:
            global _happened
            _happened = True
            if _again is None:
                _end_at_the_next(loop)
            else:
                loop.add_signal_handler(signal.SIGINT, on_second, _again)
            hush()
            task.cancel()

        def on_second(again: asyncio.Event) -> None:
            _end_at_the_next(loop)
            again.set()

        if before is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGINT, on_interrupt)
        return await work

    before = signal.getsignal(signal.SIGINT)
    try:
        return asyncio.run(watched())
    except asyncio.CancelledError:
        if not _happened:
            raise
        raise KeyboardInterrupt from None
    finally:
        if not _happened:
            signal.signal(signal.SIGINT, before)  # the loop leaves Python's own behind


def _end_at_the_next(loop: asyncio.AbstractEventLoop) -> None:
    loop.remove_signal_handler(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


async def detachable(
    following: Coroutine[Any, Any, int | None],
    detach: Callable[[], bool | None],
    cancel: Callable[[], Awaitable[None]] | None = None,
    pass_on: Callable[[str], Coroutine[Any, Any, None]] | None = None,
) -> int | None:
    """Follow until the end, or until Ctrl-C, SIGTERM or SIGHUP, then call `detach`, which tells the user how to go on.
    Only for use inside `run`.

    Return what `following` returns, EXIT_INTERRUPTED after a Ctrl-C, or 128 and the number of the other signal. With
    `cancel`, a second Ctrl-C calls it. If `detach` returns true, a user at a terminal was told about the second Ctrl-C,
    which is awaited for `AGAIN_S`; otherwise the second one only has an effect if it came before. A signal that users
    send, such as SIGUSR1, goes to `pass_on` by its name.
    """
    global _again
    _again = again = asyncio.Event() if cancel is not None else None
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    ended_by: list[int] = []
    passing: set[asyncio.Task[None]] = set()

    def on_users(number: int) -> None:
        if pass_on is None:
            _stays_here(number)
        else:
            passed = loop.create_task(pass_on(_name(number)))
            passing.add(passed)
            passed.add_done_callback(passing.discard)

    def on_signal(number: int) -> None:
        ended_by.append(number)
        loop.remove_signal_handler(number)  # the next one ends the process at once
        hush()
        task.cancel()

    for number in ENDING[1:]:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as `nohup` has it
            loop.add_signal_handler(number, on_signal, number)
    for number in _OF_USERS:  # else it would end this command, and not the job
        loop.add_signal_handler(number, on_users, number)
    try:
        return await following
    except asyncio.CancelledError:
        if ended_by:
            task.uncancel()
            with contextlib.suppress(OSError):  # the terminal was closed
                detach()
            return 128 + ended_by[0]
        if not _happened:
            raise
        task.uncancel()
        is_told = detach()
        if cancel is not None and again is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(AGAIN_S if is_told else 0):
                    await again.wait()
            if again.is_set():
                await cancel()
        return EXIT_INTERRUPTED


def _stays_here(number: int) -> None:
    """Say of a signal that no job gets what has become of it."""
    report(f"{_name(number)} stays here: no job gets it; moorage signal JOB {_name(number)} sends one there")


def _name(number: int) -> str:
    return signal.Signals(number).name


def was_ctrl_c() -> bool:
    """Return whether Ctrl-C, and no other signal, has ended the work."""
    return _happened


def end_in_order(told: Callable[[int], None]) -> None:
    """Let the first signal of `ENDING` cancel this task. `told` is called for every signal; later ones have no other
    effect."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    ending = False

    def on_signal(number: int) -> None:
        nonlocal ending
        told(number)
        if not ending:
            ending = True
            hush()
            task.cancel()

    for number in ENDING:
        loop.add_signal_handler(number, on_signal, number)


def hush() -> None:
    """Silence logs, warnings and unhandled errors: after an interrupt, they only report about work that was cut off."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    sys.unraisablehook = lambda _: None
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)


def raise_once() -> None:
    """Let the first Ctrl-C raise KeyboardInterrupt and the next one end the process. For use outside an event loop.

    Does nothing if this process ignores Ctrl-C.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        return

    def on_interrupt(_number: int, _frame: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, on_interrupt)
