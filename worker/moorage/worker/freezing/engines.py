"""Put members of services to sleep by a request to their own program, and wake them: where no driver freezes, too.

`moorage serve` listens for it on a socket in its attempt's folder, which a container has as well. It lets no call
begin, has those that run end, and asks its program. The memory that a program keeps then on its GPUs, as its context,
is counted as free: the next one has as much less.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
from collections.abc import Collection, Iterator, Mapping
from typing import Final, cast

from moorage.schemas.attempt import AttemptName
from moorage.schemas.http_service import ASLEEP_FILE, SLEEP_SOCKET
from moorage.worker.devices.readers.base import FREE_TOLERANCE_MIB, HeldUnknown, Inventory
from moorage.worker.driver import Driver
from moorage.worker.freezing.cuda import Outcome
from moorage.worker.session.attempt_messages import Attempt, FreezeAnswered
from moorage.worker.session.shell import Shell

#: a program that takes longer is not waited for: large memories take minutes on a slow host
ANSWER_S: Final = 600.0
#: of a GPU's memory, what a program keeps at most while it sleeps
KEPT_PART: Final = 0.1


class Engines:
    """The members on one worker that sleep by a request. `held` are all of its attempts."""

    def __init__(
        self, shell: Shell, held: Mapping[AttemptName, Attempt], drivers: Mapping[str, Driver], inventory: Inventory
    ) -> None:
        self._shell = shell
        self._held = held
        self._drivers = drivers
        self._inventory = inventory

    def ask(self, attempt: Attempt, *, on: bool) -> None:
        """Begin to put a member to sleep, or to wake it; `FreezeAnswered` follows."""
        self._shell.spawn(self._ask(attempt.name, self._folder_of(attempt), on=on))

    def is_asleep(self, attempt: Attempt) -> bool:
        """Return whether a member of an earlier agent sleeps, as it has noted in its folder."""
        folder = self._folder_of(attempt)
        return bool(folder) and os.path.lexists(f"{folder}/{ASLEEP_FILE}")

    def sleepers(self, slot: int) -> list[Attempt]:
        """Return the members that sleep with this slot."""
        return [each for each in self._held.values() if each.sleeps_itself and each.frozen and slot in each.slots]

    async def memory_is_free(self, slot: int) -> bool:
        """Return whether only members that sleep hold memory of a device, and each no more than they may."""
        if await self._inventory.memory_is_free(slot):
            return True
        names = {each.name for each in self.sleepers(slot)}
        if not names:
            return False
        sums = await self._held_by(names, slot)
        if sums is None:
            return False
        reading = (await self._inventory.sample())[slot]
        left_mib = reading.memory_used_mib - sum(sums.values()) - self._inventory.memory_baseline_mib(slot)
        return max(sums.values()) <= self._kept_mib(slot) and left_mib <= FREE_TOLERANCE_MIB

    async def has_left(self, attempt: Attempt, slot: int) -> bool:
        """Return whether a member that sleeps holds no more memory of a shared device than it may."""
        if self._inventory.simulated:
            return True
        sums = await self._held_by({attempt.name}, slot)
        return sums is not None and sums[attempt.name] <= (self._kept_mib(slot) if attempt.sleeps_itself else 0)

    def _kept_mib(self, slot: int) -> float:
        return KEPT_PART * self._inventory.devices()[slot].memory_mib

    async def _held_by(self, names: Collection[AttemptName], slot: int) -> dict[AttemptName, int] | None:
        """Return the MiB that each of these attempts holds of a device; None if that is not known."""
        try:
            held = await self._inventory.held(slot)
        except HeldUnknown:
            return None
        sums = dict.fromkeys(names, 0)
        for driver in self._drivers.values():
            for pid, name in driver.attempts_of(held).items():
                if name in sums:
                    sums[name] += held[pid]
        return sums

    def _folder_of(self, attempt: Attempt) -> str:
        return self._drivers[attempt.driver].folder_of(attempt.name)

    async def _ask(self, name: AttemptName, folder: str, *, on: bool) -> None:
        state, _, why = (await _answer(folder, b"sleep\n" if on else b"wake\n")).partition(" ")
        if state not in ("frozen", "running", "broken"):
            state, why = "broken", f"its member answers {state[:40]!r}"
        self._shell.enqueue(FreezeAnswered([(name, cast(Outcome, state), why)]))


async def _answer(folder: str, asked: bytes) -> str:
    """Return what a member answers. One that does not is as it was, if it was to sleep; else it is lost."""
    otherwise = "running" if asked == b"sleep\n" else "broken"
    if not folder:
        return f"{otherwise} its driver gives it no folder"
    try:
        with _connected(f"{folder}/{SLEEP_SOCKET}") as link:
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(ANSWER_S):
                await loop.sock_sendall(link, asked)
                said = b""
                while not said.endswith(b"\n") and len(said) < 4096 and (more := await loop.sock_recv(link, 4096)):
                    said += more
    except TimeoutError:
        return f"broken its program has not answered for {ANSWER_S:g} s"
    except OSError as error:
        return f"{otherwise} its member cannot be asked: {error.strerror or error}"
    return said.decode(errors="replace").strip() or f"{otherwise} its member broke off"


@contextlib.contextmanager
def _connected(path: str) -> Iterator[socket.socket]:
    """Connect to a socket of a job's. No link of the job leads elsewhere, and its path may be of any length."""
    fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            raise OSError("it is no socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.setblocking(False)
            link.connect(f"/proc/self/fd/{fd}")
            yield link
    finally:
        os.close(fd)
