"""Freeze and resume the attempts of one driver, and report what became of it.

An attempt's calls wait at its gate before the driver's library locks its processes: a later one would wait in that
library, where the worker does not see it. They pass again once the attempt runs. What an earlier agent has left is
settled while the worker has joined: a driver that answers late ends no other job.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import Final

from moorage.schemas.attempt import AttemptName
from moorage.worker.freezing.cuda import Outcome
from moorage.worker.freezing.freezer import AttemptsOf, Freezer
from moorage.worker.freezing.gate import Gate
from moorage.worker.session.attempt_messages import FreezeAnswered, ResumeDue

#: how often the worker checks for calls of frozen attempts
LOOK_FOR_USE_S: Final = 0.2
Work = Callable[[], Awaitable[tuple[Outcome, str]]]


class FreezableAttempts:
    """The attempts of a driver that freezes. Without a `gate` no use of a frozen attempt is seen.

    `report` takes the answers; `attempts_of` says whose processes are these.
    """

    def __init__(
        self,
        freezer: Freezer,
        gate: Gate | None,
        report: Callable[[FreezeAnswered | ResumeDue], None],
        attempts_of: AttemptsOf,
    ) -> None:
        self._freezer = freezer
        self._gate = gate
        self._report = report
        self._attempts_of = attempts_of
        self._at_work: dict[asyncio.Task[None], AttemptName] = {}
        self._turns: dict[AttemptName, asyncio.Lock] = {}  # what is done with one attempt is done in turn
        self._used_again: set[AttemptName] = set()  # frozen ones that were reported as such
        self._looks: asyncio.Task[None] | None = None

    def begin(self, running: Collection[AttemptName]) -> set[AttemptName]:
        """Take over the running attempts of an earlier agent; return those that are frozen by its record.

        Where the driver says otherwise, that is reported later.
        """
        frozen = self._freezer.begin(running)
        for name in running:
            (self._close_gate if name in frozen else self._open_gate)(name)
        for name in self._freezer.unsettled:
            self._begin(name, partial(self._freezer.settle, name), believed="frozen" if name in frozen else "running")
        if self._gate is not None:
            self._looks = asyncio.get_running_loop().create_task(self._look_for_use(self._gate))
        return frozen

    async def close(self) -> None:
        """Stop. What is under way is finished, or undone, by the next agent."""
        tasks = [*([self._looks] if self._looks is not None else []), *self._at_work]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def freeze(self, name: AttemptName, slots: Sequence[int]) -> None:
        """Begin to freeze an attempt with these devices."""
        self._close_gate(name)
        self._begin(name, partial(self._freezer.freeze, name, slots, self._attempts_of))

    def resume(self, name: AttemptName) -> None:
        """Begin to resume an attempt."""
        self._begin(name, partial(self._freezer.resume, name))

    def wakes(self, name: AttemptName) -> bool:
        """Return whether the attempt's first use would be reported, once it is frozen."""
        return self._gate is not None and self._gate.wakes(name)

    def over(self, name: AttemptName) -> None:
        """Forget an attempt of which nothing runs any more."""
        self._freezer.over(name)
        self._turns.pop(name, None)
        self._used_again.discard(name)
        if self._gate is not None:
            self._gate.forget(name)

    def _begin(self, name: AttemptName, work: Work, believed: Outcome | None = None) -> None:
        task = asyncio.get_running_loop().create_task(self._do(name, work, believed))
        self._at_work[task] = name
        task.add_done_callback(self._at_work.pop)

    async def _do(self, name: AttemptName, work: Work, believed: Outcome | None) -> None:
        """Do the work once it is its turn, and report it. What was `believed` is not reported; it answers no order."""
        async with self._turns.setdefault(name, asyncio.Lock()):
            outcome, why = await work()  # where this is cancelled, the next agent settles what was only begun
        is_last = list(self._at_work.values()).count(name) == 1
        if outcome != "frozen" and is_last:
            self._open_gate(name)
        if believed is None or (outcome != believed and (is_last or outcome == "broken")):
            self._report(FreezeAnswered([(name, outcome, why)]))

    def _close_gate(self, name: AttemptName) -> None:
        self._used_again.discard(name)
        if self._gate is not None:
            self._gate.close(name)

    def _open_gate(self, name: AttemptName) -> None:
        self._used_again.discard(name)
        if self._gate is not None:
            self._gate.open(name)

    async def _look_for_use(self, gate: Gate) -> None:
        """Report frozen attempts with a call waiting, once for each time that they are frozen, until canceled."""
        while True:
            await asyncio.sleep(LOOK_FOR_USE_S)
            fresh = set(gate.wanted()) - set(self._at_work.values()) - self._used_again
            if fresh:
                self._used_again |= fresh
                self._report(ResumeDue(sorted(fresh)))
