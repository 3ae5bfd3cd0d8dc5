"""The signal that tells a job to save itself before its time is over: who gets it, and that it does no harm.

Practice differs: Slurm's `--signal=USR1@60` goes to every process of the steps and kills those that have no handler
(its `B:` to the batch shell alone), an orchestrator of containers signals the main process alone. Here it goes to the
topmost processes of the job's tree that take it: the main process, or where that is a shell or a launcher that does
not, the processes that it started (a script's `python`, all ranks of `torchrun`), but not their own helpers, which
inherit a handler. Never to a process that it would kill: until somebody takes it, it waits.
"""

import contextlib
import signal
from typing import Final

from moorage.system.proctree import Process, children, kill_process, read_process

#: how long until the next look for somebody who takes the signal; a look reads some files of /proc a process
AGAIN_S: Final = 0.25
#: processes looked at in one look
PROCESSES_MAX: Final = 1024
#: whose default action is to do nothing (signal(7)): they harm nobody
_HARMLESS: Final = frozenset({signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH})
_MASKS: Final = (b"SigBlk:", b"SigCgt:")
_SEGV: Final = 1 << (signal.SIGSEGV - 1)


def takes(pid: int, number: signal.Signals) -> bool | None:
    """Whether a process handles a signal: catches it, or blocks it to wait for it (proc_pid_status(5)).

    None for one that blocks SIGSEGV too: it is just starting a program. Shells and libc block everything around a fork;
    what is sent then may end the process a moment later, and its child has its handlers until exec.
    """
    if number in _HARMLESS:
        return True
    bit = 1 << (number - 1)
    try:
        with open(f"/proc/{pid}/status", "rb", buffering=0) as file:
            masks = {line[:7]: int(line[8:], 16) for line in file.read().splitlines() if line[:7] in _MASKS}
    except (FileNotFoundError, ProcessLookupError):
        return False
    blocked = masks.get(b"SigBlk:", 0)
    if blocked & _SEGV:
        return None
    return bool((masks.get(b"SigCgt:", 0) | blocked) & bit)


def send_to_takers(main_pid: int, number: signal.Signals) -> int:
    """Signal the topmost processes below (and with) `main_pid` that take it; how many that were, 0 for none yet.

    `main_pid` is a child of the caller that is not reaped, so that its number is surely its own.
    """
    level, above = [main_pid], list[int]()
    while level and len(above) < PROCESSES_MAX:
        living = [one for one in map(read_process, level) if one is not None and not one.dead]
        known = [takes(one.pid, number) for one in living]
        if None in known:
            return 0  # who is just starting a program is looked at again
        takers = [one for one, taken in zip(living, known, strict=True) if taken]
        if takers:
            # one above may have got its handler meanwhile, and then what we see below is its copy of itself
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
