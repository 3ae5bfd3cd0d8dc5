"""Send a job the signal to save its work before its time is over, and only to processes that it does not kill.

Practice differs: Slurm's `--signal=USR1@60` goes to every process of the steps and kills those without a handler (its
`B:` form goes to the batch shell only), and a container orchestrator signals the main process only. Here the signal
goes to the topmost processes of the job's tree that handle it. That is the main process, or, if the main process is a
shell or launcher without a handler, the processes that it started (a script's `python`, all ranks of `torchrun`). Their
own helper processes, which inherit the handler, do not get it. The signal never goes to a process that it would kill:
it waits until a process handles it.
"""

import contextlib
import signal
from typing import Final

from moorage.system.proctree import Process, children, kill_process, read_process

#: seconds until the next search for processes that handle the signal; a search reads some files of /proc per process
AGAIN_S: Final = 0.25
#: most processes in one search
PROCESSES_MAX: Final = 1024
#: signals whose default action is to do nothing (signal(7)), so any process may get them
_HARMLESS: Final = frozenset({signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH})
_MASKS: Final = (b"SigBlk:", b"SigCgt:", b"SigIgn:")
_SEGV: Final = 1 << (signal.SIGSEGV - 1)


def takes(pid: int, number: signal.Signals) -> bool | None:
    """Return whether a process handles a signal: catches it, or blocks it to wait for it (proc_pid_status(5)).

    Return True for every process if the signal does nothing by default, and False for a process that is gone. Return
    None for a process that blocks SIGSEGV too: it is just starting a program. Shells and libc block every signal around
    a fork. A signal sent at that time may end the process a moment later, and its child has its handlers until exec.
    """
    if number in _HARMLESS:
        return True
    bit = 1 << (number - 1)
    if (masks := _masks_of(pid)) is None:
        return False
    blocked = masks.get(b"SigBlk:", 0)
    if blocked & _SEGV:
        return None
    return bool((masks.get(b"SigCgt:", 0) | blocked) & bit)


def ignores(pid: int, number: signal.Signals) -> bool:
    """Return whether a process ignores a signal; False for one that is gone."""
    masks = _masks_of(pid)
    return masks is not None and bool(masks.get(b"SigIgn:", 0) & 1 << (number - 1))


def _masks_of(pid: int) -> dict[bytes, int] | None:
    """Return which signals a process blocks, ignores and catches; None for one that is gone."""
    try:
        with open(f"/proc/{pid}/status", "rb", buffering=0) as file:
            return {line[:7]: int(line[8:], 16) for line in file.read().splitlines() if line[:7] in _MASKS}
    except (FileNotFoundError, ProcessLookupError):
        return None


def send_to_takers(main_pid: int, number: signal.Signals) -> int:
    """Signal the topmost processes at or below `main_pid` that handle the signal; return how many were signaled.

    Return 0 if no process handles it yet, or if that is undecided now because a process is just starting a program.

    `main_pid` is an unreaped child of the caller, so its pid cannot belong to another process.
    """
    level, above = [main_pid], list[int]()
    while level and len(above) < PROCESSES_MAX:
        living = [one for one in map(read_process, level) if one is not None and not one.dead]
        known = [takes(one.pid, number) for one in living]
        if None in known:
            return 0  # a process is just starting a program: search again later
        takers = [one for one, taken in zip(living, known, strict=True) if taken]
        if takers:
            # if a process above installed its handler meanwhile, the processes seen below may be forks of it
            if any(takes(pid, number) is not False for pid in above):
                return 0
            return sum(_signal(one, number) for one in takers)
        above += [one.pid for one in living]
        level = [child for pid in level for child in children(pid)]
    return 0


def _signal(process: Process, number: signal.Signals) -> bool:
    with contextlib.suppress(PermissionError):
        return kill_process(process, number)
    return False
