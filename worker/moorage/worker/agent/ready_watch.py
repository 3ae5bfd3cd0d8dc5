"""Look whether running attempts are ready for work, as `run.ready` of their requests says: by a port, a file or a
word of `moorage serve`."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping
from typing import Final

from moorage.schemas.attempt import AttemptName
from moorage.schemas.service import READY_FILE
from moorage.schemas.staying import Ready, own_port
from moorage.worker.driver import Driver
from moorage.worker.session.attempt_messages import Attempt, SeenReady
from moorage.worker.session.shell import Shell

#: seconds before the second look; then twice as long each time until it is ready or `every_s` is reached. A service
#: that starts in 0.3 s is to be found soon after
FIRST_S: Final = 0.05
#: longest wait for one answer
ANSWER_S_MAX: Final = 10.0
LOOPBACK: Final = "127.0.0.1"
#: asked last: a program may listen there alone, and a host may have no such address
LOOPBACK_6: Final = "::1"
_LINE_BYTES_MAX: Final = 4096


class ReadyWatch:
    """Looks at one worker's attempts; `held` are all of them, `address` is this host's for others."""

    def __init__(
        self, shell: Shell, drivers: Mapping[str, Driver], held: Mapping[AttemptName, Attempt], address: str | None
    ) -> None:
        self._shell = shell
        self._drivers = drivers
        self._held = held
        self._hosts = (LOOPBACK, *([] if address is None else [address]), LOOPBACK_6)

    def watch(self, attempt: Attempt) -> None:
        """Look at a running attempt until it does not run any more; `SeenReady` follows whenever the answer changes."""
        ready = attempt.request.workload.ready
        if ready is not None:
            self._shell.spawn(self._watch(attempt, ready))

    async def _watch(self, attempt: Attempt, ready: Ready) -> None:
        ends_s, pause_s = self._shell.now() + ready.within_s, FIRST_S
        told: bool | None = None
        while self._runs(attempt):
            if attempt.frozen or attempt.freezing:  # it cannot answer, and is not to be blamed for that
                await asyncio.sleep(ready.every_s)
                continue
            why = await self._look(attempt, ready)
            if not self._runs(attempt) or attempt.frozen or attempt.freezing:
                continue
            if told is not (not why):
                told = not why
                self._shell.enqueue(SeenReady([(attempt.name, why, False)]))
            if told or attempt.was_ready:
                await asyncio.sleep(ready.every_s)
                continue
            left_s = ends_s - self._shell.now()
            if left_s <= 0:
                self._shell.enqueue(SeenReady([(attempt.name, f"{why}, {ready.within_s:g} s after its start", True)]))
                return
            await asyncio.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, ready.every_s)

    def _runs(self, attempt: Attempt) -> bool:
        return self._held.get(attempt.name) is attempt and attempt.phase == "running"

    async def _look(self, attempt: Attempt, ready: Ready) -> str:
        """Return why an attempt is not ready, in a few words; "" if it is."""
        driver = self._drivers[attempt.driver]
        if driver.capabilities.simulated_only:
            return ""  # nothing runs that could answer
        if ready.port:
            own = own_port(ready.port)
            port = int(ready.port) if own is None else attempt.ports[own]
            return await self._ask(port, ready)
        folder = driver.folder_of(attempt.name)
        if not folder:
            return "it has no folder of its own"
        name = READY_FILE if ready.call else ready.file or ""
        if _is_below(folder, name):
            return ""
        return "its service does not take calls yet" if ready.call else f"there is no file {name}"

    async def _ask(self, port: int, ready: Ready) -> str:
        nobody = why = ""
        for host in self._hosts:
            try:
                async with asyncio.timeout(min(ready.every_s, ANSWER_S_MAX)):
                    why = await _asked(host, port, None if ready.http is None else ready.path)
                if not why:
                    return ""
            except TimeoutError:
                why = f"port {port} does not answer in {min(ready.every_s, ANSWER_S_MAX):g} s"
            except OSError as error:
                said = os.strerror(error.errno) if error.errno else str(error)
                nobody = nobody or f"nothing listens on port {port}: {said}"
        return why or nobody


async def _asked(host: str, port: int, path: str | None) -> str:
    """Return what is wrong with the answer of a port to a connection, or to GET of a path; "" if nothing is."""
    reader, writer = await asyncio.open_connection(host, port, limit=_LINE_BYTES_MAX)
    try:
        if path is None:
            return ""
        named = f"[{host}]" if ":" in host else host
        head = f"GET {path} HTTP/1.1\r\nHost: {named}:{port}\r\nUser-Agent: moorage\r\nConnection: close\r\n\r\n"
        writer.write(head.encode())
        await writer.drain()
        try:
            line = await reader.readline()
        except ValueError:  # a line without an end
            line = b""
        words = line.split()
        if len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1].isdigit():
            return f"port {port} does not answer in HTTP"
        status = int(words[1][:3])
        return "" if 200 <= status < 400 else f"GET {path} on port {port} is answered with {status}"
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def _is_below(folder: str, name: str) -> bool:
    """Return whether a file exists below an attempt's folder: no link of the job leads the worker elsewhere."""
    root = os.path.realpath(folder)
    path = os.path.realpath(os.path.join(root, name))
    return path.startswith(f"{root}/") and os.path.lexists(path)
