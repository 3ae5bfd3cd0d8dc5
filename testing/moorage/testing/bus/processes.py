"""Simulated processes: what runs in one can be stopped, goes on late, or ends between any two steps.

A process is a name that its tasks, timers and handlers carry in their context. Everything of it goes through the loop's
`call_soon` and `call_at`, so that a stopped one is a loop that keeps its callbacks: what came meanwhile waits, as in a
socket's buffer, and what was due runs late, as after SIGCONT.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

T = TypeVar("T")

#: tasks that a process begins until those that are over are forgotten
TASKS_LOOKED_AT: Final = 64

_current: contextvars.ContextVar[Process | None] = contextvars.ContextVar("simulated process", default=None)


class Process:
    """One simulated process. `on_kill` is called before its tasks are cancelled, to cut what it could still reach."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_stopped = False
        self.is_dead = False
        self.on_kill: list[Callable[[], None]] = []
        self._doomed_in = 0  # acts that it still does; 0: it is not doomed
        self._on_doom: Callable[[], object] = self.kill
        self._tasks: list[asyncio.Task[Any]] = []
        self._tasks_looked_at = TASKS_LOOKED_AT
        self._kept: deque[Step] = deque()
        self._context = contextvars.copy_context()
        self._context.run(_current.set, self)

    def __repr__(self) -> str:
        return f"<Process simulated {self.name!r}{' dead' if self.is_dead else ' stopped' if self.is_stopped else ''}>"

    def run(self, main: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine in this process; whatever it begins belongs to the process too."""
        return asyncio.get_running_loop().create_task(main, context=self.context())

    def context(self) -> contextvars.Context:
        """Return a context of this process, for timers that are set from outside of it."""
        return self._context.copy()

    def adopt(self, task: asyncio.Task[Any]) -> None:
        """Note a task that was begun in this process. Called by the loop."""
        self._tasks.append(task)
        if len(self._tasks) >= self._tasks_looked_at:  # a callback for each task would be a step of the loop more
            self._tasks = [task for task in self._tasks if not task.done()]
            self._tasks_looked_at = 2 * len(self._tasks) + TASKS_LOOKED_AT

    def call(self, callback: Callable[..., object], *args: Any) -> None:
        """Call a function for something that arrives from outside, such as a message: at once, or later if the process
        is stopped, and never if it is dead."""
        if self.is_stopped:
            self._kept.append(Step(self, callback, args, asyncio.get_running_loop(), self._context, from_outside=True))
        elif not self.is_dead:
            self._context.copy().run(callback, *args)

    def stop(self) -> None:
        """Stop the process as SIGSTOP does: nothing of it runs until `go_on`."""
        self.is_stopped = True

    def go_on(self) -> None:
        """Let the process go on as SIGCONT does: everything that was due runs now, in its order."""
        self.is_stopped = False
        kept, self._kept = self._kept, deque()
        for step in kept:
            step.go_on()

    def doom(self, acts: int, on_doom: Callable[[], object]) -> None:
        """Call `on_doom`, which must kill the process, in place of the `acts`-th act of the process from now on.

        An act is what another process can see: a message sent, a write, a word to another process. What the code still
        does within the same step reaches no other process, so this is a crash between any two acts.
        """
        self._doomed_in, self._on_doom = acts, on_doom

    def acts(self) -> None:
        """Tell that the process is about to do something that others can see."""
        if self._doomed_in and not self.is_dead:
            self._doomed_in -= 1
            if not self._doomed_in:
                self._on_doom()

    def kill(self) -> list[asyncio.Task[Any]]:
        """End the process as SIGKILL does: it sends nothing more, and its tasks are cancelled. Returns these tasks.

        Their `finally` blocks run, but change nothing outside of this process: `on_kill` has cut off everything that
        they could reach.
        """
        if self.is_dead:
            return []
        self.is_dead = True
        for cut in self.on_kill:
            cut()
        self.go_on()
        mine = [task for task in self._tasks if not task.done()]
        for task in mine:
            task.cancel()
        return mine

    def keep(self, step: Step) -> None:
        self._kept.append(step)


class Step(asyncio.TimerHandle):
    """A callback in the simulated loop, of a process or of none. A dead process gets no callback with `from_outside`,
    such as a timer or a message."""

    __slots__ = ("from_outside", "process")

    def __init__(
        self,
        process: Process | None,
        callback: Callable[..., object],
        args: Sequence[Any],
        loop: asyncio.AbstractEventLoop,
        context: contextvars.Context | None,
        when_s: float = 0.0,
        from_outside: bool = False,
    ) -> None:
        # what asyncio's own two constructors do, but for asking each time whether to remember the caller's stack
        self._context = contextvars.copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = None
        self._source_traceback = None
        self._when = when_s
        self._scheduled = False
        self.process = process
        self.from_outside = from_outside

    def cancel(self) -> None:
        if not self._cancelled:
            self._cancelled = True
            self._callback = self._args = None  # type: ignore[assignment]  # as asyncio's: what they hold may go

    def _run(self) -> None:
        process = self.process
        if process is None:
            asyncio.Handle._run(self)
        elif process.is_stopped:
            process.keep(self)
        elif not (process.is_dead and self.from_outside):
            asyncio.Handle._run(self)

    def put_off(self, seconds: float) -> Step:
        """Let this timer fire that much later."""
        self._when += seconds
        return self

    def go_on(self) -> None:
        """Make it due now, after what is due already: its process goes on."""
        if not self.cancelled():
            self._loop._ready.append(self)  # type: ignore[attr-defined]  # where `call_soon` puts handles


def process_of(context: contextvars.Context | None) -> Process | None:
    """Return the process of a context, or for None that of the code that runs now; None if it is of no process."""
    return _current.get() if context is None else context.get(_current)
