"""How an exit code is named: a code of the program's own, or the signal that ended it."""

from __future__ import annotations

import signal


def exit_words(code: int) -> str:
    """Return `with code 17`, or for a negative code the signal: `by signal 11 (SIGSEGV)`."""
    if code >= 0:
        return f"with code {code}"
    try:
        return f"by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:  # one that this machine has no name for
        return f"by signal {-code}"


def was_killed(code: int | None) -> bool:
    """Return whether SIGKILL ended a program or the last one of a shell, as the kernel does where memory is short."""
    return code in (-signal.SIGKILL, 128 + signal.SIGKILL)
