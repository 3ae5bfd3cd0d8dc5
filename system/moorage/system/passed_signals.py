"""Which signals a command passes on to a program that it runs in its place."""

from __future__ import annotations

import signal
from typing import Final

#: they stay with the process that gets them; a terminal stops all of its foreground by itself
_UNCATCHABLE: Final = (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGPIPE)
_FAULTS: Final = (
    signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS,
)  # fmt: skip
_STOPPING: Final = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
PASSED_ON: Final = tuple(sorted(signal.valid_signals() - {*_UNCATCHABLE, *_FAULTS, *_STOPPING}))
