"""Follow a started container: store its output while it runs, and find out how it ended."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from moorage.system.backoff import Backoff
from moorage.worker.drivers.container.engine import EngineDown, EngineError, State
from moorage.worker.drivers.container.host import ENGINE_S, RETRY_S, Attempt, ContainerHost
from moorage.worker.drivers.container.output import ContainerOutput, LiveOutput, opened, read_out
from moorage.worker.drivers.container.removal import Removal
from moorage.worker.drivers.container.verdict import verdict
from moorage.worker.supervisor.protocol import Ended as ChildEnded

#: how long a container that is over waits for its engine, which is down or slow: it alone knows the exit code. The
#: devices wait, too
CODE_S_MAX: Final = 600.0
#: how long an engine may say that a container runs which is over: it lost the container, and will not know its code
WRONG_S_MAX: Final = 30.0
#: an engine knows of an end a moment after the kernel
LOOK_S_MIN: Final = 0.01

log = logging.getLogger("moorage.worker")


class Follower:
    """Follows the containers of one driver."""

    def __init__(self, host: ContainerHost, removal: Removal, cap_bytes: int, live: LiveOutput) -> None:
        self._host = host
        self._removal = removal
        self._cap_bytes = cap_bytes
        self.live = live

    async def follow(self, attempt: Attempt) -> tuple[ChildEnded, int, str]:
        """Store and publish a container's output until it is over, then remove the container.

        Return the supervisor's proof of the end, and the code and the reason to report.
        """
        name, key = attempt.name, self._host.key(attempt.name)
        output = await opened(self._host.link.state, key, self._cap_bytes)
        loop = asyncio.get_running_loop()
        reading = loop.create_task(self._read(attempt, output))
        outcome = loop.create_task(self._outcome(attempt))
        state: State | None = None
        try:
            ended = await attempt.over
            done, _ = await asyncio.wait((outcome,), timeout=ENGINE_S)
            if not done and ended.reason == "exit":
                log.info("%s: waiting for the container engine, which knows its exit code", name[1])
                done, _ = await asyncio.wait((outcome,), timeout=CODE_S_MAX)
            if done:
                state = outcome.result()
                await read_out(reading, output, ENGINE_S)
            is_whole = reading.done() and reading.exception() is None
        except asyncio.CancelledError:
            self.live.publish_pieces()
            output.close(is_over=False)
            raise
        finally:
            for task in (reading, outcome):
                task.cancel()
            await asyncio.wait((reading, outcome))
        await self._removal.remove(attempt)
        self.live.end(name, output, ended, is_whole=is_whole)
        return ended, *verdict(ended, state)

    async def _outcome(self, attempt: Attempt) -> State | None:
        """Return the container's last state once the supervisor and the engine have seen its end.

        Return None if the engine does not have it, and a state that is wrong if the engine does not see the end.
        """
        await asyncio.wait((attempt.over,))
        loop, backoff = asyncio.get_running_loop(), Backoff(LOOK_S_MIN, RETRY_S)
        wrong_since_s: float | None = None
        while attempt.container:
            try:
                state = await self._host.engine.state(attempt.container)
                if state is None or state.is_over:
                    return state
                wrong_since_s = loop.time() if wrong_since_s is None else wrong_since_s
                if loop.time() >= wrong_since_s + WRONG_S_MAX:
                    log.warning("%s: its container is over, but its engine says that it runs", attempt.name[1])
                    return state
            except (EngineDown, EngineError):
                wrong_since_s = None
            await asyncio.sleep(backoff.next_s())
        return None

    async def _read(self, attempt: Attempt, output: ContainerOutput) -> None:
        """Store the container's output to the end; when the engine comes back, go on from the last position."""
        while attempt.container:
            try:
                await self._read_on(attempt, output, follow=True)
                state = await self._host.engine.state(attempt.container)
                if state is None or state.is_over:
                    await self._read_on(attempt, output, follow=False)  # a following stream may end a little too early
                    return
            except (EngineDown, EngineError) as error:
                log.debug("%s: its output: %s", attempt.name[1], error)
            await asyncio.sleep(RETRY_S)

    async def _read_on(self, attempt: Attempt, output: ContainerOutput, follow: bool) -> None:
        engine = self._host.engine
        if attempt.has_terminal is None:
            state = await engine.state(attempt.container)
            attempt.has_terminal = state is not None and state.has_terminal
        is_terminal = attempt.has_terminal
        pieces = engine.output(attempt.container, output.since, follow, is_terminal=is_terminal)
        await self.live.keep(attempt.name, output, pieces)
