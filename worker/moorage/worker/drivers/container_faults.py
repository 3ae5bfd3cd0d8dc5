"""Decide from the engine's message whether the job or this host is at fault for a failed start."""

from __future__ import annotations

import re
from typing import Final

from moorage.worker.drivers.base import CODE_CANNOT_START, CODE_NOT_FOUND
from moorage.worker.drivers.container_engine import EngineError

#: messages of an engine if the job itself names something that does not exist
_NO_PROGRAM: Final = re.compile(r"exec: .*(executable file not found|no such file or directory)", re.IGNORECASE)
_BAD_PROGRAM: Final = re.compile(r"exec: .*(permission denied|is a directory)|exec format error", re.IGNORECASE)
#: messages of a registry if the image does not exist or is not public: every other host would get the same answer
#: what an engine says that lacks NVIDIA's hook
_NO_GPUS: Final = re.compile(r"could not select device driver")
NO_IMAGE: Final = re.compile(
    r"manifest unknown|manifest for .* not found|repository does not exist|pull access denied|invalid reference format"
    r"|failed to resolve reference .*: not found",
    re.IGNORECASE,
)


class CannotStart(Exception):
    """A failed start. `code` is set if the job is at fault; None if this host is."""

    def __init__(self, code: int | None, message: str) -> None:
        super().__init__(message)
        self.code = code


def start_fault(error: EngineError, is_created: bool) -> CannotStart:
    """Return the fault for a container that the engine could not start, or if not `is_created`, could not create."""
    message = error.message.strip()
    if is_created and error.status in (400, 404, 500):
        if _NO_PROGRAM.search(message):
            return CannotStart(CODE_NOT_FOUND, message)
        if _BAD_PROGRAM.search(message):
            return CannotStart(CODE_CANNOT_START, message)
    if _NO_GPUS.search(message):
        message += (
            ": the engine has no CDI spec with these GPUs, and no hook of NVIDIA's. Run nvidia-ctk cdi generate on "
            "that host, or install nvidia-container-toolkit"
        )
    return CannotStart(None, message)


def pull_fault(image: str, error: EngineError) -> CannotStart:
    """Return the fault for an image that could not be pulled."""
    is_the_jobs = error.status == 404 or NO_IMAGE.search(error.message)
    return CannotStart(CODE_CANNOT_START if is_the_jobs else None, f"image {image} cannot be pulled: {error.message}")
