"""A supervisor on a clock that a test pushes: "and then nothing happened" is seen at once, and for certain.

Its event loop is its clock. This one's time goes on as it does everywhere, and by each push at once. Run as a program,
it is a supervisor whose loop is such a one; `started` runs it so and returns the clock to push.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from moorage.worker.supervisor.client import python_variables
from moorage.worker.supervisor.main import main
from tests.system.worker.supervisor_rig import Rig, rig_at

ROOT: Final = Path(__file__).parents[3]
ANSWER_S: Final = 60.0
_NUMBER_BYTES_MAX: Final = 64


class PushedLoop(asyncio.SelectorEventLoop):
    """asyncio's own loop, whose time a datagram to `path` pushes. The answer comes behind all that was due by then."""

    def __init__(self, path: Path) -> None:
        self._pushed_s = 0.0
        super().__init__()
        self._asked = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._asked.bind(os.fspath(path))
        self.add_reader(self._asked, self._push)

    def time(self) -> float:
        return super().time() + self._pushed_s

    def _push(self) -> None:
        seconds, sender = self._asked.recvfrom(_NUMBER_BYTES_MAX)
        self._pushed_s += float(seconds)
        self.call_later(0, self._asked.sendto, b"", sender)  # the last of the timers that are due now

    def close(self) -> None:
        if not self.is_closed():
            self.remove_reader(self._asked)
            self._asked.close()
        super().close()


class PushedClock:
    """The clock of the supervisor of a state folder."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._numbers = itertools.count()

    async def push(self, seconds: float, times: int = 1) -> None:
        """Let this much time pass, `times` times, each behind all that was due by then.

        All that this process did before is seen there first: what it closed is closed in the next turn of its loop, and
        a question that pushes nothing is answered behind that.
        """
        await asyncio.sleep(0)
        for each in (0.0, *itertools.repeat(seconds, times)):
            await self._ask(each)

    async def _ask(self, seconds: float) -> None:
        own = self._state / f"pusher-{next(self._numbers)}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as asking:
            asking.bind(os.fspath(own))
            asking.sendto(repr(seconds).encode(), os.fspath(self._state / "clock"))
            async with asyncio.timeout(ANSWER_S):
                await asyncio.get_running_loop().sock_recv(asking, 1)
        own.unlink()


async def started(state: Path, *arguments: str) -> PushedClock:
    """Start a supervisor on this folder, and return its clock."""
    state.mkdir(exist_ok=True)
    variables = python_variables()
    variables["PYTHONPATH"] += f"{os.pathsep}{ROOT}"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "tests.system.worker.pushed_supervisor"),
        *("--state", str(state), "--detach", *arguments),
        env=variables,
        start_new_session=True,
    )
    assert await process.wait() == 0
    return PushedClock(state)


@contextlib.asynccontextmanager
async def pushed_rig(state: Path, *arguments: str) -> AsyncIterator[tuple[Rig, PushedClock]]:
    clock = await started(state, *arguments)
    async with rig_at(state, *arguments) as rig:
        yield rig, clock


if __name__ == "__main__":
    folder = Path(sys.argv[sys.argv.index("--state") + 1])
    sys.exit(main(loops=lambda: PushedLoop(folder / "clock")))
