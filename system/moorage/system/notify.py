"""Tell whoever started this process how it is: systemd by its socket, a container's health check by a file.

systemd's protocol is a word in a datagram (sd_notify(3)), so no package is needed for it. The beats come from the event
loop: a process whose loop hangs stops beating, and its manager starts it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, MutableMapping
from pathlib import Path
from typing import Final

#: names the file that is touched at each beat; the image sets it, and its health check looks how old the file is
ALIVE_VARIABLE: Final = "MOORAGE_ALIVE_FILE"
#: time between two beats where no watchdog wants them more often
BEAT_S: Final = 5.0

log = logging.getLogger("moorage.notify")


class Manager:
    """Who is told. The variables by which systemd names its socket leave the environment, so no child tells it
    anything."""

    def __init__(self, env: MutableMapping[str, str] | None = None) -> None:
        env = os.environ if env is None else env
        self._socket = env.pop("NOTIFY_SOCKET", "")
        usec, pid = env.pop("WATCHDOG_USEC", ""), env.pop("WATCHDOG_PID", "")
        alive = env.get(ALIVE_VARIABLE)
        self._alive = Path(alive) if alive else None
        self.watched = usec.isdecimal() and int(usec) > 0 and pid in ("", str(os.getpid()))
        #: seconds from one beat to the next: at most half of the watchdog's time
        self.beat_s = min(BEAT_S, int(usec) / 2e6) if self.watched else BEAT_S

    async def notify_ready(self, ready: asyncio.Event) -> None:
        """Notify that the process is ready once `ready` is set, beat until cancelled, then notify that it stops.

        Returns at once if there is no receiver. A fault of the socket or the file is logged and not raised.
        """
        if not self._socket and self._alive is None:
            return
        try:
            await ready.wait()
            self._send("READY=1")
            while True:
                if self.watched:
                    self._send("WATCHDOG=1")
                self._touch()
                await asyncio.sleep(self.beat_s)
        finally:
            self._send("STOPPING=1")

    def stops_within(self, seconds: float) -> None:
        """Say that this process stops, and may take so long. systemd waits longer then, whatever its unit says."""
        self._send(f"STOPPING=1\nEXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    def _send(self, word: str) -> None:
        if not self._socket:
            return
        # a name that begins with @ is one without a file
        address = "\0" + self._socket[1:] if self._socket.startswith("@") else self._socket
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as to:
                to.setblocking(False)
                to.sendto(word.encode(), address)
        except OSError as error:
            log.warning("the service manager cannot be told %s: %s", word, error.strerror or error)

    def _touch(self) -> None:
        if self._alive is None:
            return
        try:
            self._alive.touch()
        except OSError as error:
            log.warning("%s cannot be touched, so this process seems dead: %s", self._alive, error.strerror or error)


@contextlib.asynccontextmanager
async def managed(ready: asyncio.Event) -> AsyncIterator[Manager]:
    """Tell the manager that this process is ready once `ready` is set, and that it lives as long as the block runs."""
    manager = Manager()
    telling = asyncio.create_task(manager.notify_ready(ready))
    try:
        yield manager
    finally:
        telling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await telling
