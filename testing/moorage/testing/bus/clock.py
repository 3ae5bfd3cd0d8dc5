"""Virtual time: an asyncio loop that never waits but jumps to the next timer, and a clock that the whole process reads.

What runs on it is ordered by its timers and messages alone: there is no socket, no thread and no real second. One thing
is left to chance by asyncio itself: `asyncio.wait` and TaskGroup walk sets of tasks.

A `Sleeper` is a simulated process that sets timers all the time only to stay alive, as by heartbeats. While every
sleeper is idle, the loop skips these timers: it goes on to the next timer of any other code, and the timers of the
sleepers go off as much later.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor
from typing import Any, Final, Protocol, TypeVar, TypeVarTuple

from moorage.testing.bus.processes import Process, Step, process_of

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

#: 2025-01-01T00:00:00Z, where every simulation begins unless told otherwise
WALL_START_S: Final = 1_735_689_600
#: virtual seconds after which `run` gives up: two days are more than any lease, retry or silence of moorage
LIMIT_S: Final = 172_800.0
#: turns of the loop without any time in between, after which it gives up: a busy instant takes thousands
TURNS_MAX: Final = 1_000_000


#: shorter waits are not skipped: to ask the sleepers takes as long as a few timers
SKIPPED_S_MIN: Final = 1.0
#: so long before the timer to which time is skipped the sleepers go on: what they write then is no older than the timer
SETTLE_S: Final = 0.001


class Sleeper(Protocol):
    """A simulated process that may be skipped while nothing but its own upkeep is due."""

    process: Process

    def idle_until_s(self) -> float:
        """Return until what time of the loop only upkeep is due here if nothing comes from outside; 0 if something else
        is due."""

    def slept(self, seconds: float) -> None:
        """Learn that this much time was skipped. The timers of `process` have already been set later by it."""


class Stalled(Exception):
    """Nothing can happen any more, something happens again and again at one instant, or the limit of time has
    passed."""


class SimulatedClock:
    """A clock that moves on only when no task of the simulation can run. `now_s` counts from 0, `wall_s` from 1970.

    Heartbeats, renewals and the like of an idle `SimFleet` are skipped; with `skips=False` each is simulated.
    """

    def __init__(self, wall_start_s: int = WALL_START_S, *, skips: bool = True) -> None:
        self._wall_start_s = wall_start_s
        self.now_s = 0.0  # only read it: `advance` lets time pass
        self.skips = skips

    def __repr__(self) -> str:
        return f"<SimulatedClock simulated, {self.now_s:.6f} s>"

    @property
    def wall_s(self) -> float:
        return self._wall_start_s + self.now_s

    def advance(self, seconds: float) -> None:
        """Let time pass at once, as if the process had been stopped: what was due meanwhile runs next, late.

        To wait normally, use `await asyncio.sleep(seconds)`. Raises ValueError for a step backwards.
        """
        if not seconds >= 0:
            raise ValueError(f"time does not go back: {seconds} s")
        self.now_s += seconds

    def jump_wall(self, seconds: int) -> None:
        """Set the wall clock forward or back; monotonic time does not change."""
        self._wall_start_s += seconds

    def run(self, main: Coroutine[Any, Any, T], limit_s: float = LIMIT_S) -> T:
        """Run a coroutine to its end in virtual time; what it leaves running is cancelled, as `asyncio.run` does.

        Meanwhile the functions of `time` return this clock's time. Raises what `main` raises, and `Stalled` when
        nothing can happen any more or `limit_s` virtual seconds have passed.
        """
        with (
            self.installed(),
            asyncio.Runner(loop_factory=lambda: _SimulatedLoop(self, self.now_s + limit_s)) as runner,
        ):
            return runner.run(main)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Make `time.time`, `time.monotonic`, their `_ns` twins and `time.clock_gettime` return this clock's time.

        `time.perf_counter` stays real: test runners measure with it.
        """

        def wall_ns() -> int:
            return self._wall_start_s * 1_000_000_000 + monotonic_ns()

        def monotonic_ns() -> int:
            return round(self.now_s * 1e9)

        def clock_gettime(clock: int) -> float:
            return self.wall_s if clock == time.CLOCK_REALTIME else self.now_s

        told: dict[str, Callable[..., Any]] = {
            "time": lambda: self.wall_s,
            "time_ns": wall_ns,
            "monotonic": lambda: self.now_s,
            "monotonic_ns": monotonic_ns,
            "clock_gettime": clock_gettime,
        }
        real = {name: getattr(time, name) for name in told}
        for name, function in told.items():
            setattr(time, name, function)
        try:
            yield
        finally:
            for name, function in real.items():
                setattr(time, name, function)


class _SimulatedLoop(asyncio.BaseEventLoop):
    """asyncio's own loop with virtual time in place of its selector. Sockets and subprocesses raise.

    Timers of equal times run in the order in which they were set, which asyncio's own heap does not promise.
    """

    _ready: deque[Step]

    def __init__(self, clock: SimulatedClock, limit_s: float) -> None:
        super().__init__()
        self._simulated = clock
        self._limit_s = limit_s
        self._timers: list[tuple[float, int, Step]] = []
        self._timers_set = 0
        self._turns = 0  # at this instant
        self._sleepers: list[Sleeper] = []
        self.set_task_factory(_task_of_its_process)

    def time(self) -> float:
        return self._simulated.now_s

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        step = Step(process_of(context), callback, args, self, context)
        self._ready.append(step)
        return step

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._simulated.now_s + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        step = Step(process_of(context), callback, args, self, context, when, True)
        self._timers_set += 1
        heapq.heappush(self._timers, (when, self._timers_set, step))
        return step

    def _run_once(self) -> None:
        """Run one turn of the loop, as `BaseEventLoop` does: what is due becomes ready, and what was ready runs."""
        ready, timers = self._ready, self._timers
        self._turns += 1
        if self._turns > TURNS_MAX:  # no test's timeout ends it: asyncio logs what a callback raises
            self._turns = 0
            step = ready[0] if ready else timers[0][2]
            raise Stalled(f"at {self.time():.3f} s time stands still: {step!r} is due again and again")
        if not ready:
            self._pass_time()
        now_s = self._simulated.now_s
        while timers and timers[0][0] <= now_s:
            ready.append(heapq.heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def _pass_time(self) -> None:
        """Move the clock to the next timer, as no task can run. Raises `Stalled`."""
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not timers:
            raise Stalled(f"at {self.time():.3f} s every task waits, and no message or timer is under way")
        clock = self._simulated
        if self._sleepers and clock.skips:
            self._skip()
        if clock.now_s < timers[0][0]:
            clock.now_s, self._turns = timers[0][0], 0
        if clock.now_s > self._limit_s:
            limit_s, self._limit_s = self._limit_s, float("inf")  # the tasks must still be able to end
            raise Stalled(f"still running at the limit of {limit_s:g} virtual seconds")

    def _skip(self) -> None:
        """Skip the time until something other than upkeep is due, if every sleeper is idle."""
        clock, asleep = self._simulated, {sleeper.process for sleeper in self._sleepers}
        timers = [timer for timer in self._timers if not timer[2]._cancelled]
        until_s = min((when for when, _, step in timers if step.process not in asleep), default=self._limit_s)
        until_s -= SETTLE_S
        for sleeper in self._sleepers:
            if until_s < clock.now_s + SKIPPED_S_MIN:
                return
            until_s = min(until_s, sleeper.idle_until_s())
        skipped_s = until_s - clock.now_s
        if not SKIPPED_S_MIN <= skipped_s < float("inf"):
            return
        clock.now_s, self._turns = until_s, 0
        for at, (when, number, step) in enumerate(timers):
            if step.process in asleep:
                timers[at] = when + skipped_s, number, step.put_off(skipped_s)
        heapq.heapify(timers)
        self._timers[:] = timers
        for sleeper in self._sleepers:
            sleeper.process.call(sleeper.slept, skipped_s)

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Run the function now and in this thread: another thread would bring back chance."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def _write_to_self(self) -> None:
        """Do nothing: no other thread has to wake the loop."""


def let_sleep(sleeper: Sleeper) -> Callable[[], None]:
    """Let the loop, if its time is virtual, skip time while the sleeper is idle. Call the result to end that."""
    loop = asyncio.get_running_loop()
    if not isinstance(loop, _SimulatedLoop):
        return lambda: None
    sleepers = loop._sleepers
    sleepers.append(sleeper)
    return lambda: sleepers.remove(sleeper)


def _task_of_its_process(
    loop: asyncio.AbstractEventLoop, coro: Any, *, context: contextvars.Context | None = None, **_: Any
) -> asyncio.Task[Any]:
    task: asyncio.Task[Any] = asyncio.Task(coro, loop=loop, context=context)
    process = process_of(context)
    if process is not None:
        process.adopt(task)
    return task
