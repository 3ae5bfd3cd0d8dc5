"""Follow a started container: store its output while it runs, and find out how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any, Final

from moorage.worker.drivers.base import CODE_LOST
from moorage.worker.drivers.container.engine import EngineDown, EngineError
from moorage.worker.drivers.container.host import ENGINE_S, RETRY_S, ContainerHost, Member
from moorage.worker.drivers.container.output import ContainerOutput, LiveOutput, read_out
from moorage.worker.drivers.container.removal import Removal
from moorage.worker.drivers.engine_watch import EngineWatch
from moorage.worker.drivers.supervisor_link import WORKER_STOPPED
from moorage.worker.job.attempt_folders import DISK
from moorage.worker.supervisor.protocol import SHUTS_DOWN
from moorage.worker.supervisor.protocol import Ended as ChildEnded

#: how long a container that is over waits for an engine that is down: it knows the exit code, and the devices wait, too
CODE_S_MAX: Final = 600.0

log = logging.getLogger("moorage.worker")


class Follower:
    """Follows the containers of one driver."""

    def __init__(
        self, host: ContainerHost, removal: Removal, watch: EngineWatch, cap_bytes: int, publishes: bool
    ) -> None:
        self._host = host
        self._removal = removal
        self._watch = watch
        self._cap_bytes = cap_bytes
        self.live = LiveOutput(publishes)

    async def follow(self, member: Member) -> tuple[ChildEnded, int, str]:
        """Store and publish a container's output until it is over, then remove the container.

        Return the supervisor's proof of the end, and the code and the reason to report.
        """
        name, key = member.name, self._host.key(member.name)
        output = ContainerOutput(self._host.link.state, key, self._cap_bytes)
        loop = asyncio.get_running_loop()
        reading = loop.create_task(self._read(member, output))
        outcome = loop.create_task(self._outcome(member))
        state: dict[str, Any] | None = None
        try:
            await asyncio.wait((outcome, member.over), return_when=asyncio.FIRST_COMPLETED)
            done, _ = await asyncio.wait((outcome,), timeout=ENGINE_S)
            if not done and self._watch.why and (await member.over).reason == "exit":
                log.info("%s: waiting for the container engine, which knows its exit code", name[1])
                await self._watch.back(CODE_S_MAX)
                done, _ = await asyncio.wait((outcome,), timeout=ENGINE_S)
            if done:
                state = outcome.result()
                await read_out(reading, output, ENGINE_S)
            is_whole = reading.done() and reading.exception() is None
        except asyncio.CancelledError:
            self.live.tell()
            output.close(is_over=False)
            raise
        finally:
            for task in (reading, outcome):
                task.cancel()
            await asyncio.wait((reading, outcome))
        await self._removal.remove(member)
        ended = await member.over
        self.live.end(name, output, ended, is_whole=is_whole)
        return ended, *_verdict(ended, state)

    async def _outcome(self, member: Member) -> dict[str, Any] | None:
        """Return the container's last state once it is over; None if the engine does not have it."""
        while member.container:
            with contextlib.suppress(EngineDown, EngineError):
                await self._host.engine.wait(member.container)
                state = await self._host.engine.state(member.container)
                if state is None or state["Status"] in ("exited", "dead"):
                    return state
            await asyncio.sleep(RETRY_S)
        return None

    async def _read(self, member: Member, output: ContainerOutput) -> None:
        """Store the container's output to the end; when the engine comes back, go on from the last position."""
        while member.container:
            try:
                await self._read_on(member, output, follow=True)
                state = await self._host.engine.state(member.container)
                if state is None or state["Status"] in ("exited", "dead"):
                    await self._read_on(member, output, follow=False)  # a following stream may end a little too early
                    return
            except (EngineDown, EngineError) as error:
                log.debug("%s: its output: %s", member.name[1], error)
            await asyncio.sleep(RETRY_S)

    async def _read_on(self, member: Member, output: ContainerOutput, follow: bool) -> None:
        pieces = self._host.engine.output(member.container, output.since, follow)
        await self.live.keep(member.name, output, pieces)


def _verdict(ended: ChildEnded, state: dict[str, Any] | None) -> tuple[int, str]:
    """Return the code and the reason to report for a container with this proof and this last state."""
    reason = ended.reason
    if reason == "end" and ended.why == SHUTS_DOWN:
        why = WORKER_STOPPED
    elif reason == "end" and ended.why.startswith(DISK):
        why = ended.why
    else:
        why = "lost" if reason == "supervisor-died" else reason
    if state is None or state.get("Status") not in ("exited", "dead"):
        return CODE_LOST, "lost" if why == "exit" else why
    code = int(state.get("ExitCode", CODE_LOST))
    if state.get("OOMKilled"):
        return CODE_LOST, "out of memory: it was killed at its limit"
    if reason != "exit" and code in (137, 143):
        code = 128 - code  # ended by the supervisor's signal, which an engine reports as a shell does
    return code, why
