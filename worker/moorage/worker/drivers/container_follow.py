"""Following a container that has started: its output as it comes, and how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any, Final

import msgspec

from moorage.worker.attempt_folders import DISK
from moorage.worker.drivers.base import CODE_LOST, Publish
from moorage.worker.drivers.container_engine import EngineDown, EngineError
from moorage.worker.drivers.container_host import ENGINE_S, RETRY_S, ContainerHost, Member
from moorage.worker.drivers.container_output import ContainerOutput
from moorage.worker.drivers.container_removal import Removal
from moorage.worker.drivers.output_frames import OutputFrames
from moorage.worker.drivers.supervisor_link import WORKER_STOPPED
from moorage.worker.supervisor.protocol import SHUTS_DOWN
from moorage.worker.supervisor.protocol import Ended as ChildEnded

#: how long its output is read after its end, as long as some comes within `ENGINE_S`
OUTPUT_S_MAX: Final = 600.0
#: pieces of output that are kept before other work has its turn
TURN_PIECES_MAX: Final = 64
#: how long pieces wait for others, to be told in one frame
FLUSH_S: Final = 0.02

log = logging.getLogger("moorage.worker")


class Follower:
    """Follows the containers of one driver. `publish` is set once the driver is attached."""

    def __init__(self, host: ContainerHost, removal: Removal, cap_bytes: int, publishes: bool) -> None:
        self._host = host
        self._removal = removal
        self._cap_bytes = cap_bytes
        self._publishes = publishes
        self._output = OutputFrames()
        self._fresh: set[ContainerOutput] = set()
        self._flush: asyncio.TimerHandle | None = None
        self.publish: Publish | None = None

    async def follow(self, member: Member) -> tuple[ChildEnded, int, str]:
        """Keep its output until it is over and removed; returns the supervisor's proof, the code and the reason."""
        name, key = member.name, self._host.key(member.name)
        output = ContainerOutput(self._host.link.state, key, self._cap_bytes)
        loop = asyncio.get_running_loop()
        reading = loop.create_task(self._read(member, output))
        outcome = loop.create_task(self._outcome(member))
        state: dict[str, Any] | None = None
        try:
            await asyncio.wait((outcome, member.over), return_when=asyncio.FIRST_COMPLETED)
            done, _ = await asyncio.wait((outcome,), timeout=ENGINE_S)
            if done:
                state = outcome.result()
                await _read_out(reading, output)
            is_whole = reading.done() and reading.exception() is None
        except asyncio.CancelledError:
            self._publish_output()
            output.close(is_over=False)
            raise
        finally:
            for task in (reading, outcome):
                task.cancel()
            await asyncio.wait((reading, outcome))
        await self._removal.remove(member)
        ended = await member.over
        self._publish_output()  # the rest first: both ends come last
        out, err = output.sizes
        self._output.end(name, msgspec.structs.replace(ended, stdout_bytes=out, stderr_bytes=err))
        self._publish_output()
        if not is_whole:
            log.warning("%s: its output is cut: the engine did not bring the rest", name[1])
            output.cut()
        output.close(is_over=True)
        return ended, *_verdict(ended, state)

    async def _outcome(self, member: Member) -> dict[str, Any] | None:
        """Its last state, once it is over; None where the engine has it no more."""
        while member.container:
            with contextlib.suppress(EngineDown, EngineError):
                await self._host.engine.wait(member.container)
                state = await self._host.engine.state(member.container)
                if state is None or state["Status"] in ("exited", "dead"):
                    return state
            await asyncio.sleep(RETRY_S)
        return None

    async def _read(self, member: Member, output: ContainerOutput) -> None:
        """Keep its output as it comes, to the end; from where it was before whenever the engine comes back."""
        while member.container:
            try:
                await self._read_on(member, output, follow=True)
                state = await self._host.engine.state(member.container)
                if state is None or state["Status"] in ("exited", "dead"):
                    await self._read_on(member, output, follow=False)  # a stream that follows may end a moment early
                    return
            except (EngineDown, EngineError) as error:
                log.debug("%s: its output: %s", member.name[1], error)
            await asyncio.sleep(RETRY_S)

    async def _read_on(self, member: Member, output: ContainerOutput, follow: bool) -> None:
        pieces = 0
        async for piece in self._host.engine.output(member.container, output.since, follow):
            event = output.add(piece)
            if event is not None and self._publishes:
                self._output.add(member.name, event)
            pieces += 1
            if pieces % TURN_PIECES_MAX == 0:
                await asyncio.sleep(0)
            self._fresh.add(output)
            if self._flush is None:
                self._flush = asyncio.get_running_loop().call_later(FLUSH_S, self._publish_output)

    def _publish_output(self) -> None:
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        fresh, self._fresh = self._fresh, set()
        for output in fresh:
            output.mark()
        assert self.publish is not None
        for name, payload in self._output.take():
            self.publish(name, payload)


async def _read_out(reading: asyncio.Task[None], output: ContainerOutput) -> None:
    """Wait for the rest of an output as long as the engine brings some, whatever that is: pieces come again, too."""
    seen = -1
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(OUTPUT_S_MAX):
            while not reading.done() and output.pieces != seen:
                seen = output.pieces
                await asyncio.wait((reading,), timeout=ENGINE_S)


def _verdict(ended: ChildEnded, state: dict[str, Any] | None) -> tuple[int, str]:
    """(code, reason) for the fact `exited`."""
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
        code = 128 - code  # by the supervisor's signal, which an engine tells as a shell does
    return code, why
