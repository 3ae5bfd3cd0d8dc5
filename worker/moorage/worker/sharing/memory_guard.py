"""Guard the memory of shared GPUs: end an attempt that uses more than its part, and no other one.

Each second the guard reads what processes use of each shared device, adds it up by attempt, and asks for the end of a
attempt that has exceeded its part for `guard_grace_s`. The part holds for each device of the attempt, and all memory of
its processes is added, the CUDA context included. An attempt whose processes all obey the limiter is not ended for what
its driver takes by itself (`Limits.spare_mib`): the limiter is told the same numbers, and gives it no more. If the use
cannot be read several times in a row (`FAILED_MAX`), the guard's level falls, and with it what the worker promises (see
`levels`).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Final

from moorage.schemas.attempt import AttemptName
from moorage.schemas.capabilities import ADVISORY, WHOLE, Enforced
from moorage.schemas.frames import Device
from moorage.system.proctree import kill_process, read_process, sees_all_pids
from moorage.worker.devices.readers.base import HeldUnknown, Inventory
from moorage.worker.driver import Driver
from moorage.worker.session.attempt_messages import Attempt, HelloChanged, Log, OverGrant, OverSeen
from moorage.worker.session.attempt_table import OVER_GRANT
from moorage.worker.session.shell import Shell

#: seconds between two checks while attempts share a device with limits
LOOK_S: Final = 1.0
#: seconds between two checks otherwise: the guard must know whether it could work
IDLE_LOOK_S: Final = 10.0
#: consecutive failed checks before the level falls, and successful ones before it rises again
FAILED_MAX: Final = 3
WELL_MIN: Final = 10
#: the compute capability from which MPS clients own their memory; below it one server owns the memory of all clients
MPS_OWNS_BELOW: Final = (7, 0)
SHARED: Final = ("time-slice", "mps")
GUARDED: Final = Enforced("guarded", "advisory")

#: a process on a shared device of an unknown attempt, by pid and start time
_Hidden = tuple[int, int]


class MemoryGuard:
    """One worker's guard. `held` are its attempts; `grace_s` None turns it off. `levels` returns what it can do now."""

    def __init__(
        self,
        shell: Shell,
        held: Mapping[AttemptName, Attempt],
        inventory: Inventory,
        drivers: Mapping[str, Driver],
        modes: tuple[str, ...],
        grace_s: float | None,
    ) -> None:
        self._shell = shell
        self._held = held
        self._inventory = inventory
        self._drivers = drivers
        self._modes = modes
        self._grace_s = grace_s or 0.0
        #: by mode: why it cannot guard now; empty if it can
        self.why_not: dict[str, str] = {}
        #: by mode: why it can never guard here
        self._never = self._never_guarded(inventory.devices(), grace_s)
        self._failed: dict[str, int] = dict.fromkeys(SHARED, 0)
        self._well: dict[str, int] = dict.fromkeys(SHARED, 0)
        self._sees_all_pids = sees_all_pids()
        self._over: dict[AttemptName, float] = {}
        self._hidden: dict[_Hidden, float] = {}
        self._asked: set[AttemptName] = set()
        #: tells an MPS daemon of a process that is to be killed; None without daemons
        self.announce: Callable[[int], Awaitable[None]] | None = None

    @staticmethod
    def _never_guarded(devices: list[Device], grace_s: float | None) -> dict[str, str]:
        if grace_s is None:
            return dict.fromkeys(SHARED, "the guard is turned off")
        if any(_capability(device) < MPS_OWNS_BELOW for device in devices):
            return {"mps": "on these GPUs one MPS server owns the memory of all its clients"}
        return {}

    def levels(self, driver: Driver) -> dict[str, Enforced]:
        """Return how the driver's attempts are kept to their parts now, for each mode that the worker offers."""
        levels = {}
        for mode in self._modes:
            can = driver.tells_processes and mode not in self._never and mode not in self.why_not
            levels[mode] = WHOLE if mode == "exclusive" else GUARDED if can else ADVISORY
        return levels

    async def open(self) -> None:
        """Check the devices once, so that the first hello is correct."""
        if self._runs:
            for mode, why in (await self._looked()).items():
                self.why_not[mode] = why

    @property
    def _runs(self) -> bool:
        guardable = [mode for mode in self._modes if mode in SHARED and mode not in self._never]
        return bool(guardable and self._inventory.devices()) and any(d.tells_processes for d in self._drivers.values())

    async def run(self) -> None:
        """Check the devices until cancelled; return at once if there is nothing to guard. A fault is not raised."""
        looked_s = self._shell.now()
        while self._runs:
            await asyncio.sleep(self._pause_s())
            now = self._shell.now()
            if not self._must_look() and now < looked_s + IDLE_LOOK_S:
                continue
            looked_s = now
            try:
                failed = await self._looked()
            except Exception as error:  # after any failure the level must fall
                failed = dict.fromkeys(SHARED, f"the guard failed: {error!r}"[:200])
            self._judge(failed)

    def _pause_s(self) -> float:
        first = min([*self._over.values(), *self._hidden.values()], default=None)
        if first is None:
            return LOOK_S
        return min(LOOK_S, max(0.0, first + self._grace_s - self._shell.now()) or LOOK_S)

    def _must_look(self) -> bool:
        return bool(self.why_not or any(self._failed.values()) or self._granted())

    def _granted(self) -> dict[int, list[Attempt]]:
        """Return the attempts with a limited part of shared devices, by slot, without claimed and exited attempts."""
        found: dict[int, list[Attempt]] = {}
        for attempt in self._held.values():
            if _grant_mib(attempt) and attempt.phase not in ("claimed", "exited"):
                for slot in attempt.slots:
                    found.setdefault(slot, []).append(attempt)
        return found

    def explained(self, slot: int, pids: Collection[int], is_leased: bool) -> set[int]:
        """Return which processes on a device belong to its leases, or to members that sleep there, or cannot be told
        from those."""
        attempts = [each for each in self._held.values() if slot in each.slots and (is_leased or each.sleeps_itself)]
        if not attempts and not is_leased:
            return {os.getpid()}
        drivers = {attempt.driver: self._drivers[attempt.driver] for attempt in attempts}
        if not attempts or not all(driver.can_measure() for driver in drivers.values()):
            return set(pids)
        here = {attempt.name for attempt in attempts}
        ours = {os.getpid()} | {pid for pid in pids if not os.path.exists(f"/proc/{pid}")}
        for driver in drivers.values():
            ours |= {pid for pid, name in driver.attempts_of(pids).items() if name is None or name in here}
        return ours

    # ------------------------------------------------------------------------------------------------------- a look

    async def _looked(self) -> dict[str, str]:
        """Check every device with limited sharers, or all devices if there is none. Return by mode why that failed.

        Attempts that exceed their part for too long are reported, and processes that hide their attempt are killed.
        """
        granted = self._granted()
        failed: dict[str, str] = {}
        over: dict[AttemptName, tuple[int, str]] = {}
        hidden: set[_Hidden] = set()
        slots = list(granted or range(len(self._inventory.devices())))
        for slot, held in zip(slots, await asyncio.gather(*map(self._held_of, slots)), strict=True):
            modes = {attempt.place.mode for attempt in granted.get(slot, ())} or set(SHARED)
            why = held if isinstance(held, str) else self._look_at(slot, held, granted.get(slot, []), over, hidden)
            if why:
                failed |= dict.fromkeys(modes, why)
        self._end(over, hidden)
        return failed

    async def _held_of(self, slot: int) -> dict[int, int] | str:
        try:
            return await self._inventory.held(slot)
        except HeldUnknown as unknown:
            return unknown.reason

    def _look_at(
        self,
        slot: int,
        held: Mapping[int, int],
        attempts: list[Attempt],
        over: dict[AttemptName, tuple[int, str]],
        hidden: set[_Hidden],
    ) -> str:
        """Add one device's findings to `over` and `hidden`. Return why its processes cannot be attributed, else ""."""
        sums: dict[AttemptName, dict[int, int]] = {}
        left = set(held)
        absent = {pid for pid in held if attempts and not os.path.exists(f"/proc/{pid}")}
        if absent and not self._sees_all_pids:  # in another PID namespace the same pid may be another process
            return _absent(absent)
        for driver in {attempt.driver: self._drivers[attempt.driver] for attempt in attempts}.values():
            for pid, name in driver.attempts_of(left).items():
                left.discard(pid)
                process = read_process(pid)
                if name is not None:
                    sums.setdefault(name, {})[pid] = held[pid]
                elif process is not None:
                    hidden.add((pid, process.start_ticks))
        for attempt in attempts:
            own = sums.get(attempt.name, {})
            holds_mib = sum(own.values())
            limits = self._drivers[attempt.driver].limits
            spare_mib = limits.spare_mib(attempt.name, own) if limits is not None else 0
            if holds_mib > _grant_mib(attempt) + spare_mib:
                why = f"{OVER_GRANT}it holds {holds_mib} MiB of GPU {slot}, {_grant_mib(attempt)} are granted"
                over[attempt.name] = slot, why
        return _absent(absent & left)

    def _end(self, over: dict[AttemptName, tuple[int, str]], hidden: set[_Hidden]) -> None:
        now = self._shell.now()
        self._over = {name: self._over.get(name, now) for name in over}
        self._hidden = {each: self._hidden.get(each, now) for each in hidden}
        self._asked &= over.keys()
        ended = []
        for name, since_s in self._over.items():
            if since_s == now:
                self._shell.say(Log("warning", "over-grant", f"{name}: {over[name][1]}"))
            if now >= since_s + self._grace_s and name not in self._asked:
                ended.append((name, over[name][1]))
        if over:
            self._shell.enqueue(OverSeen([(name, slot) for name, (slot, _) in over.items()]))
        if ended:
            self._asked.update(name for name, _ in ended)
            self._shell.enqueue(OverGrant(ended))
        for (pid, ticks), since_s in self._hidden.items():
            if now >= since_s + self._grace_s:
                self._kill(pid, ticks)

    def _kill(self, pid: int, ticks: int) -> None:
        """Kill a job's process that hides its attempt and uses memory of a shared device: it alone ends."""
        self._shell.say(Log("warning", "hidden-process", f"pid {pid} hides its attempt, on a shared GPU: killed"))
        if self.announce is None:
            _kill(pid, ticks)
        else:
            self._shell.spawn(self._kill_announced(self.announce, pid, ticks))

    async def _kill_announced(self, announce: Callable[[int], Awaitable[None]], pid: int, ticks: int) -> None:
        await announce(pid)
        _kill(pid, ticks)

    # ------------------------------------------------------------------------------------------------- its own health

    def _judge(self, failed: dict[str, str]) -> None:
        """Change the levels after enough failed or successful checks in a row, and report a change."""
        before = dict(self.why_not)
        for mode in SHARED:
            why = failed.get(mode, "")
            self._failed[mode] = self._failed[mode] + 1 if why else 0
            self._well[mode] = 0 if why else self._well[mode] + 1
            if self._failed[mode] >= FAILED_MAX:
                self.why_not.setdefault(mode, why)
            elif self._well[mode] >= WELL_MIN:
                self.why_not.pop(mode, None)
        fallen = [f"{mode}: {why}" for mode, why in self.why_not.items() if mode not in before]
        risen = [mode for mode in before if mode not in self.why_not]
        if fallen:
            self._shell.say(Log("error", "guard", f"memory is no longer guarded ({'; '.join(fallen)})"))
        if risen:
            self._shell.say(Log("warning", "guard", f"memory is guarded again ({', '.join(risen)})"))
        if fallen or risen:
            self._shell.enqueue(HelloChanged())


def _kill(pid: int, ticks: int) -> None:
    process = read_process(pid)
    if process is not None and process.start_ticks == ticks:
        kill_process(process)


def _absent(pids: Collection[int]) -> str:
    """Return what is wrong if NVML names processes that do not exist here; "" if it names none."""
    return f"NVML names pid {min(pids)}, which is not in the worker's PID namespace" if pids else ""


def _grant_mib(attempt: Attempt) -> int:
    """Return the MiB that an attempt may use of each of its devices; 0 without a limited part of a shared one."""
    gpu = attempt.request.effective_gpu
    if gpu is None or gpu.share is None or attempt.place.mode not in SHARED:
        return 0
    return gpu.share.memory_mib


def _capability(device: Device) -> tuple[int, int]:
    major, _, minor = device.compute.partition(".")
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else (0, 0)
