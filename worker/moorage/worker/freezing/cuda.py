"""Freeze or resume processes by the CUDA driver, as a helper process: `python -m moorage.worker.freezing.cuda`.

It is a process of its own since each call waits for a GPU, and may wait for ever. It reads one JSON object: `do`
(a key of `_ACTS`), `processes` as pairs of pid and start, `lock_ms`, the `library`, and a `lock_file`: the helper of an
agent that was killed goes on, so a helper waits for others that have its processes. It writes one back: `state`, an
`Outcome`, and `why`. What it does depends on the state in which it finds each process, so it can be run again after it
was killed.

All processes are locked, then all are checkpointed: from the lock on none starts work on the GPU. What fails is undone.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

from moorage.system.proctree import read_process

LIBRARY: Final = "libcuda.so.1"
#: functions of the driver's API, since driver 570; each takes a pid and its arguments
CALLS: Final = tuple(f"cuCheckpointProcess{word}" for word in ("Lock", "Checkpoint", "Restore", "Unlock", "GetState"))
#: states of a process as the driver numbers them
RUNNING: Final = 0
LOCKED: Final = 1
CHECKPOINTED: Final = 2
BROKEN: Final = 3
#: states of newer drivers: on the way to CHECKPOINTED, and on the way back to LOCKED
CHECKPOINTING: Final = 4
RESTORING: Final = 5
#: how long processes may be on the way, from a helper's start: a call goes on in the driver even if its helper was
#: killed. It is shorter than the shortest time limit of a helper
PASSING_S: Final = 45.0
_PASSING_STEP_S: Final = 0.05
#: size of every call's arguments: all bytes are 0, except Lock's first word, its time limit in milliseconds
ARGUMENT_BYTES: Final = 64

#: the result for the processes: all are frozen, all run, or at least one can neither run on nor be frozen
Outcome = Literal["frozen", "running", "broken"]
#: by what a helper is to do: the result for processes that stay as they are, because it cannot begin
UNDONE: Final[dict[str, Outcome]] = {
    "freeze": "running",
    "resume": "broken",
    "resume-known": "running",
    "look": "frozen",
}


class CallFailed(Exception):
    """A call to the driver failed, the driver cannot freeze processes, or a process is in a wrong state."""


def library_fault(name: str) -> str:
    """Return why this host's driver cannot freeze a process; "" if it can."""
    try:
        library = ctypes.CDLL(name)
    except OSError:
        return f"there is no {name} here"
    if not all(hasattr(library, call) for call in CALLS):
        return f"the driver's {name} cannot freeze a process: that needs driver 570 or newer"
    return ""


class Cuda:
    """The CUDA driver of this host: its calls that freeze processes. `lock_ms` is the time limit of `lock`."""

    def __init__(self, library: str, lock_ms: int) -> None:
        """Load the driver. Raises CallFailed if it cannot freeze processes or cannot be initialized."""
        if fault := library_fault(library):
            raise CallFailed(fault)
        self._library = ctypes.CDLL(library)
        self._lock_ms = lock_ms
        self._passing_until = time.monotonic() + PASSING_S
        if code := self._library.cuInit(0):
            raise CallFailed(f"cuInit failed with CUDA error {code}")

    def state(self, pid: int) -> int:
        found = ctypes.c_int(-1)
        self._call("GetState", pid, found)
        return found.value

    def settled(self, pid: int) -> int:
        """Return the state of a process once it is not on the way to another state.

        From `PASSING_S` after this object was made, return the present state at once. Raises CallFailed.
        """
        while (state := self.state(pid)) in (CHECKPOINTING, RESTORING) and time.monotonic() < self._passing_until:
            time.sleep(_PASSING_STEP_S)
        return state

    def lock(self, pid: int) -> None:
        arguments = (ctypes.c_uint * (ARGUMENT_BYTES // 4))(self._lock_ms)
        self._call("Lock", pid, arguments)

    def checkpoint(self, pid: int) -> None:
        self._call("Checkpoint", pid, (ctypes.c_ubyte * ARGUMENT_BYTES)())

    def restore(self, pid: int) -> None:
        self._call("Restore", pid, (ctypes.c_ubyte * ARGUMENT_BYTES)())

    def unlock(self, pid: int) -> None:
        self._call("Unlock", pid, (ctypes.c_ubyte * ARGUMENT_BYTES)())

    def _call(self, word: str, pid: int, argument: ctypes._CDataType) -> None:
        code = getattr(self._library, f"cuCheckpointProcess{word}")(ctypes.c_int(pid), ctypes.byref(argument))
        if code:
            raise CallFailed(f"{word.lower()} of pid {pid} failed with CUDA error {code}")


def freeze(cuda: Cuda, processes: Sequence[tuple[int, int]]) -> tuple[Outcome, str]:
    """Freeze all of these processes, without those that have ended; if one cannot be frozen, resume all.

    Return the result, and why they are not frozen ("" if they are).
    """
    try:
        for pid in _living(processes):
            if cuda.settled(pid) == RUNNING:
                cuda.lock(pid)
        for pid in _living(processes):
            if cuda.state(pid) == LOCKED:
                cuda.checkpoint(pid)
        states = [cuda.state(pid) for pid in _living(processes)]
    except CallFailed as failed:
        outcome, worse = resume(cuda, processes)
        return outcome, f"{failed}; {worse}" if worse else str(failed)
    if not states:
        return "running", "its processes have ended"
    if any(state != CHECKPOINTED for state in states):
        return resume(cuda, processes)[0], "the driver says that a process was not checkpointed"
    return "frozen", ""


def look(cuda: Cuda, processes: Sequence[tuple[int, int]]) -> tuple[Outcome, str]:
    """Return "frozen" if the driver says that all of these processes are, or cannot tell; else resume all of them."""
    try:
        states = [cuda.settled(pid) for pid in _living(processes)]
    except CallFailed as failed:
        return "frozen", str(failed)
    if states and all(state == CHECKPOINTED for state in states):
        return "frozen", ""
    return resume(cuda, processes)


def resume_known(cuda: Cuda, processes: Sequence[tuple[int, int]]) -> tuple[Outcome, str]:
    """Resume those of the processes that the driver knows. The others do not use CUDA."""
    known = []
    for pid, ticks in processes:
        with contextlib.suppress(CallFailed):
            cuda.state(pid)
            known.append((pid, ticks))
    return resume(cuda, known)


def resume(cuda: Cuda, processes: Sequence[tuple[int, int]]) -> tuple[Outcome, str]:
    """Let all of these processes run on, without those that have ended.

    Return "running" and ""; or "broken", and why some processes cannot run.
    """
    whys = []
    # what is locked goes first: calls of the others may wait for it, even those that ask for their state (NCCL). Then
    # all are restored before one is unlocked: a process must not meet another one that is still away
    for undo in (_unlock, _restore, _unlock, _check):
        for pid in _living(processes):
            try:
                undo(cuda, pid)
            except CallFailed as failed:
                if read_process(pid) is not None:  # else it has ended meanwhile
                    whys.append(str(failed))
    return ("broken", "; ".join(whys)) if whys else ("running", "")


def _restore(cuda: Cuda, pid: int) -> None:
    if cuda.settled(pid) == CHECKPOINTED:
        cuda.restore(pid)


def _unlock(cuda: Cuda, pid: int) -> None:
    if cuda.settled(pid) == LOCKED:
        cuda.unlock(pid)


def _check(cuda: Cuda, pid: int) -> None:
    state = cuda.state(pid)
    if state == BROKEN:
        raise CallFailed(f"the driver says that pid {pid} has failed")
    if state != RUNNING:
        raise CallFailed(f"the driver says that pid {pid} does not run, but is in its state {state}")


def _living(processes: Sequence[tuple[int, int]]) -> list[int]:
    """Return the pids of the processes that still live: a pid with another start time belongs to another process."""
    living = []
    for pid, ticks in processes:
        process = read_process(pid)
        if process is not None and process.start_ticks == ticks and not process.dead:
            living.append(pid)
    return living


def carry_out(asked: Mapping[str, Any]) -> tuple[Outcome, str]:
    """Do as asked with the processes, and return the result.

    Without a driver that can freeze, they stay as they are, and the result is that of `UNDONE`.
    """
    processes = [(int(pid), int(ticks)) for pid, ticks in asked["processes"]]
    try:
        cuda = Cuda(asked["library"], int(asked["lock_ms"]))
    except CallFailed as failed:
        return UNDONE[asked["do"]], str(failed)
    return _ACTS[asked["do"]](cuda, processes)


_ACTS: Final[dict[str, Callable[[Cuda, Sequence[tuple[int, int]]], tuple[Outcome, str]]]] = {
    "freeze": freeze,
    "resume": resume,
    "resume-known": resume_known,
    "look": look,
}


if __name__ == "__main__":
    wanted = json.loads(sys.stdin.read())
    with open(wanted["lock_file"], "w") as alone:
        for number in sorted(int(process) for process, _ in wanted["processes"]):
            fcntl.lockf(
                alone, fcntl.LOCK_EX, 1, number
            )  # a byte for each pid: others need not wait for a GPU that hangs
        outcome, reason = carry_out(wanted)
    print(json.dumps({"state": outcome, "why": reason}))
