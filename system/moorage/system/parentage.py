"""Children that must not outlive whoever started them."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def die_with_parent() -> Callable[[], None]:
    """A `preexec_fn`: SIGTERM when the *thread* that calls this ends, however it does (prctl(2), PR_SET_PDEATHSIG).

    The library is loaded before the fork, as loading is not safe between fork and exec.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return ask
