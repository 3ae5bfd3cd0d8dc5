"""Child processes that must not outlive their parent."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def die_with_parent() -> Callable[[], None]:
    """Return a `preexec_fn` after which the child gets SIGTERM when the calling *thread* ends (PR_SET_PDEATHSIG).

    The library is loaded before the fork, because loading is not safe between fork and exec.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return ask
