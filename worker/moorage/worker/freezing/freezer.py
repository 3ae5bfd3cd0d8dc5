"""Freeze the processes of attempts, and remember across restarts of the agent which ones are frozen.

Before the first call a file says which processes are about to be frozen. An agent that finds them there after a crash
resumes them, and the leader asks again. What is frozen stays so, if the driver says that it is: the file may list what
was resumed since. Only the driver knows where its memory is, and NVML does not list such a process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Final, cast

import msgspec

from moorage.schemas.attempt import AttemptName
from moorage.schemas.frames import NO_RAM
from moorage.schemas.unreadable import UNREADABLE
from moorage.system.private_files import replace_private
from moorage.system.proctree import MARK_NAMES, all_processes, marks_of, read_environ, read_process
from moorage.worker.devices.readers.base import HeldUnknown, Inventory
from moorage.worker.freezing import cuda
from moorage.worker.freezing.cuda import Outcome
from moorage.worker.freezing.room import room_fault

#: how long work on the GPU may go on until a lock fails; then all processes run on
LOCK_S: Final = 30.0
#: a helper that takes longer is killed: large memories take minutes on a slow host
HELPER_S: Final = 600.0
#: how long to wait for one that was killed; a call that hangs in the kernel may take for ever
KILLED_S: Final = 10.0

log = logging.getLogger("moorage.worker")

AttemptsOf = Callable[[Collection[int]], Mapping[int, AttemptName | None]]


class _Entry(msgspec.Struct, array_like=True):
    """An attempt's processes, by pid and start time; `done` once all of them are frozen.

    `guessed`: the record was lost, and these are all of its processes, whether they use CUDA or not.
    """

    name: AttemptName
    processes: list[tuple[int, int]]
    done: bool = False
    guessed: bool = False


_decode: Final = msgspec.json.Decoder(list[_Entry]).decode


class Freezer:
    """Freezes and resumes the attempts of one worker; `file` is its record of them.

    `held` returns the MiB that each process holds of the device in a slot, as `Inventory.held` does. The memory that is
    left is read below `root`.
    """

    def __init__(self, file: Path, held: Callable[[int], Awaitable[Mapping[int, int]]], root: Path = Path("/")) -> None:
        self._file = file
        self._held = held
        self._root = root
        self._entries: dict[AttemptName, _Entry] = {}
        self._library = cuda.LIBRARY
        self._damaged = file.with_name(f"{file.name}.damaged")

    def begin(self, living: Collection[AttemptName]) -> set[AttemptName]:
        """Take over the record of an earlier agent; return the attempts that it says are frozen, of those `living`.

        Then each of the `unsettled` is to be settled. If the record cannot be read, it is kept under another name, and
        all of the `living` are unsettled.
        """
        try:
            self._entries = {entry.name: entry for entry in self._read() if entry.name in living}
        except (OSError, *UNREADABLE) as error:
            log.error(
                "the record of frozen jobs, %s, cannot be read: %s: all jobs here are resumed, and it is kept as %s",
                self._file, error, self._damaged,
            )  # fmt: skip
            try:
                os.replace(self._file, self._damaged)
            except OSError as failed:
                log.error("%s cannot be kept as %s: %s", self._file, self._damaged, failed)
            found = _processes_of(living)
            self._entries = {name: _Entry(name, processes, guessed=True) for name, processes in found.items()}
        self._note()
        return {entry.name for entry in self._entries.values() if entry.done}

    @property
    def unsettled(self) -> list[AttemptName]:
        """After `begin`: the attempts of which only the driver knows whether they are frozen."""
        return list(self._entries)

    async def settle(self, name: AttemptName) -> tuple[Outcome, str]:
        """Ask the driver whether an attempt is frozen, and resume one that an earlier agent only began to freeze.

        Return what it is now, and why if it is broken. It takes as long as the driver does.
        """
        entry = self._entries.get(name)
        if entry is None:  # it has ended meanwhile
            return "running", ""
        if entry.done:  # it may have been resumed since
            outcome, why = await self._run("look", entry.processes, HELPER_S) or ("frozen", "")
        elif entry.guessed:
            outcome, why = await self._run("resume-known", entry.processes, HELPER_S) or ("running", "")
        else:
            outcome, why = await self._help("resume", entry.processes, HELPER_S)
        if outcome != "frozen":
            self.over(name)
        return outcome, why

    async def freeze(self, name: AttemptName, slots: Sequence[int], attempts_of: AttemptsOf) -> tuple[Outcome, str]:
        """Freeze the process of an attempt that uses these devices. Return the result, and why it is not "frozen".

        "running" is also the result if none or several processes use them, and if there is no room for their memory.
        """
        try:
            held = [pair for slot in slots for pair in (await self._held(slot)).items()]
        except HeldUnknown as unknown:
            return "running", f"which processes hold its GPUs is not known: {unknown.reason}"
        try:
            attempts = attempts_of({pid for pid, _ in held})
            found = [read_process(pid) for pid in sorted(attempts) if attempts[pid] == name]
        except OSError as error:  # no descriptor is left
            return "running", f"its processes cannot be read: {error.strerror or error}"
        processes = [(process.pid, process.start_ticks) for process in found if process is not None]
        if not processes:
            return "running", "none of its processes holds a GPU"
        if len(processes) > 1:
            return "running", (
                f"{len(processes)} of its processes hold GPUs: while one of them is frozen, calls of the others wait"
                " for it (as with NCCL), so that none of them can be frozen"
            )
        wanted_mib = sum(mib for pid, mib in held if attempts.get(pid) == name)
        if fault := room_fault(processes[0][0], wanted_mib, self._root):
            return "running", f"{NO_RAM}{fault}"
        return await self._freeze(name, processes)

    async def _freeze(self, name: AttemptName, processes: list[tuple[int, int]]) -> tuple[Outcome, str]:
        """Freeze these processes of an attempt, and note before and after that they are."""
        entry = self._entries[name] = _Entry(name, processes)
        try:
            self._write()
        except OSError as error:
            del self._entries[name]
            return "running", f"{self._file} cannot be written: {error.strerror or error}"
        outcome, why = await self._help("freeze", processes, HELPER_S)
        if outcome != "frozen":
            self.over(name)
            return outcome, why
        entry.done = True
        try:
            self._write()
        except OSError as error:  # the next agent would resume it while another job has its devices
            outcome, why = await self.resume(name)
            return outcome, why or f"{self._file} cannot be written: {error.strerror or error}"
        return outcome, why

    async def resume(self, name: AttemptName) -> tuple[Outcome, str]:
        """Let the processes of an attempt run on, and forget it. Return the result, and why not all run.

        The reason is "" if they run. An attempt that is not frozen here stays as it is, and the result is "running".
        """
        entry = self._entries.get(name)
        if entry is None:
            return "running", ""
        outcome, why = await self._help("resume", entry.processes, HELPER_S)
        self.over(name)
        return outcome, why

    def over(self, name: AttemptName) -> None:
        """Forget an attempt: it runs, or it has ended."""
        if self._entries.pop(name, None) is not None:
            self._note()

    async def _help(self, act: str, processes: Sequence[tuple[int, int]], seconds: float) -> tuple[Outcome, str]:
        """Have a helper process freeze or resume the processes; return its answer. One without an answer is ended.

        Then another helper resumes the processes that it was to freeze; for those that it was to resume the result is
        "broken".
        """
        answer = await self._run(act, processes, seconds)
        if answer is None and act == "freeze":
            outcome, why = await self._run("resume", processes, seconds) or ("broken", "nor can it be resumed")
            return outcome, f"the driver did not freeze it; {why}" if why else "the driver did not freeze it"
        return answer or ("broken", "the driver did not resume it")

    async def _run(self, act: str, processes: Sequence[tuple[int, int]], seconds: float) -> tuple[Outcome, str] | None:
        """Run one helper and return its answer; None if it gives none in time.

        If it cannot start, the processes stay as they are, and the answer is that of `cuda.UNDONE`.
        """
        asked = {
            "do": act,
            "processes": processes,
            "lock_ms": int(LOCK_S * 1000),
            "library": self._library,
            "lock_file": f"{self._file}.lock",
        }
        try:
            helper = await asyncio.create_subprocess_exec(
                sys.executable, "-m", cuda.__name__, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
        except OSError as error:
            return cuda.UNDONE[act], f"no helper can start: {error.strerror or error}"
        try:
            said, _ = await asyncio.wait_for(helper.communicate(json.dumps(asked).encode()), seconds)
            found = json.loads(said)
            return cast(Outcome, found["state"]), str(found["why"])
        except (TimeoutError, ValueError, KeyError, TypeError) as error:
            log.error("the helper program to %s the processes %s did not answer: %r", act, processes, error)
            return None
        finally:
            if helper.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    helper.kill()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(KILLED_S):
                        await helper.wait()

    def _read(self) -> list[_Entry]:
        """Return what the record lists. Raises OSError and the errors of `UNREADABLE`."""
        try:
            return _decode(self._file.read_bytes())
        except FileNotFoundError:
            return []

    def _note(self) -> None:
        """Write the record after attempts were forgotten. If that fails, log it: the next agent asks the driver."""
        try:
            self._write()
        except OSError as error:
            log.error("the record of frozen jobs, %s, cannot be written: %s", self._file, error)

    def _write(self) -> None:
        """Write the record atomically; without entries, remove its file. Raises OSError."""
        if not self._entries:
            self._file.unlink(missing_ok=True)
            return
        replace_private(self._file, msgspec.json.encode(list(self._entries.values())), is_synced=False)


def freezer_for(worker: str, inventory: Inventory, file: Path) -> Freezer | None:
    """Return the freezer of a worker with these devices; None if none is NVIDIA's, or its driver freezes nothing."""
    if inventory.simulated or not any(device.vendor == "nvidia" for device in inventory.devices()):
        return None
    if trouble := cuda.library_fault(cuda.LIBRARY):
        log.info("%s cannot freeze jobs: %s", worker, trouble)
        return None
    return Freezer(file, inventory.held)


def _processes_of(names: Collection[AttemptName]) -> dict[AttemptName, list[tuple[int, int]]]:
    """Return the processes of these attempts, by the marks in their environment."""
    marks = {name: marks_of(dict(zip(MARK_NAMES, map(str, name), strict=True))) for name in names}
    found: dict[AttemptName, list[tuple[int, int]]] = {name: [] for name in names}
    for process in all_processes():
        try:
            entries = read_environ(process.pid) or frozenset()
        except PermissionError:
            continue
        for name in names:
            if entries.issuperset(marks[name]):
                found[name].append((process.pid, process.start_ticks))
    return found
