"""Whose fault it is that a container did not start, from what the engine says."""

from __future__ import annotations

import re
from typing import Final

from moorage.worker.drivers.base import CODE_CANNOT_START, CODE_NOT_FOUND
from moorage.worker.drivers.container_engine import EngineError

#: what an engine says where the job itself names what is not there
_NO_PROGRAM: Final = re.compile(r"exec: .*(executable file not found|no such file or directory)", re.IGNORECASE)
_BAD_PROGRAM: Final = re.compile(r"exec: .*(permission denied|is a directory)|exec format error", re.IGNORECASE)
#: what a registry says where the image is not there, or not for everybody: no other host would fare better
NO_IMAGE: Final = re.compile(
    r"manifest unknown|manifest for .* not found|repository does not exist|pull access denied|invalid reference format"
    r"|failed to resolve reference .*: not found",
    re.IGNORECASE,
)


class CannotStart(Exception):
    """A start that did not happen. `code`: the job's own fault; None: this host's."""

    def __init__(self, code: int | None, message: str) -> None:
        super().__init__(message)
        self.code = code


def start_fault(error: EngineError, is_created: bool) -> CannotStart:
    """Whose fault it is that the engine could not create or start a container."""
    message = error.message.strip()
    if error.status == 404 and not is_created:
        return CannotStart(CODE_CANNOT_START, f"{message} (and it is not pulled here)")
    if is_created and error.status in (400, 404, 500):
        if _NO_PROGRAM.search(message):
            return CannotStart(CODE_NOT_FOUND, message)
        if _BAD_PROGRAM.search(message):
            return CannotStart(CODE_CANNOT_START, message)
    return CannotStart(None, message)


def pull_fault(image: str, error: EngineError) -> CannotStart:
    """Return whose fault it is that an image could not be pulled."""
    is_the_jobs = error.status == 404 or NO_IMAGE.search(error.message)
    return CannotStart(CODE_CANNOT_START if is_the_jobs else None, f"image {image} cannot be pulled: {error.message}")
