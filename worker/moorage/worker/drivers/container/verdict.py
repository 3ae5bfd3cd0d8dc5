"""How a container ended: the code and the reason to report, from the supervisor's proof and the engine's last state."""

from __future__ import annotations

from moorage.worker.attempt.attempt_folders import DISK
from moorage.worker.driver import CODE_LOST
from moorage.worker.drivers.container.engine import State
from moorage.worker.drivers.supervisor_link import UNASKED
from moorage.worker.supervisor.protocol import Ended as ChildEnded


def verdict(ended: ChildEnded, state: State | None) -> tuple[int, str]:
    """Return the code and the reason to report for a container with this proof and this last state."""
    reason = ended.reason
    if reason == "end" and ended.why in UNASKED:
        why = UNASKED[ended.why]
    elif reason == "end" and ended.why.startswith(DISK):
        why = ended.why
    else:
        why = "lost" if reason == "supervisor-died" else reason
    if state is None or not state.is_over:
        return CODE_LOST, "lost" if why == "exit" else why
    code = state.code
    if state.is_out_of_memory and reason == "exit" and code != 0:
        return out_of_memory(code)
    if reason != "exit" and code in (137, 143):
        code = 128 - code  # ended by the supervisor's signal, which an engine reports as a shell does
    return code, why


def out_of_memory(code: int) -> tuple[int, str]:
    """Return the code and the reason to report for a container that failed, of which a process was killed for memory.

    Engines say so whichever process it was. The first one may have gone on, and ended with a code of its own.
    """
    if code == 137:
        return CODE_LOST, "out of memory: it was killed at its limit"
    return code, "out of memory: a process of it was killed at its limit"
