"""The exit codes of a program that could not be started, as a shell has them."""

from __future__ import annotations

import errno
from typing import Final

CODE_CANNOT_START: Final = 126
CODE_NOT_FOUND: Final = 127


def code_of_start(number: int) -> int:
    """Return the code, as of a shell, of a program whose exec failed with this error number."""
    return CODE_NOT_FOUND if number == errno.ENOENT else CODE_CANNOT_START
