"""Decide from the engine's message whether the job or this host is at fault for a failed start."""

from __future__ import annotations

import re
from typing import Final

from moorage.schemas.errors import MoorageError
from moorage.schemas.frames import NOT_HERE, START_FAILED
from moorage.system.device_environment import HostAtFault
from moorage.worker.drivers.base import CODE_CANNOT_START, CODE_NOT_FOUND
from moorage.worker.drivers.container.engine import EngineError
from moorage.worker.job.environment import not_here, without_prefix

#: messages of an engine if the job itself names something that does not exist
_NO_PROGRAM: Final = re.compile(
    r"exec: .*(executable file not found|no such file or directory)|attempted to invoke a command that was not found",
    re.IGNORECASE,
)
_BAD_PROGRAM: Final = re.compile(
    r"exec: .*(permission denied|is a directory)|exec format error"
    r"|^workdir .* does not exist|^unable to find (user|group) ",
    re.IGNORECASE,
)
#: what an engine says that lacks NVIDIA's hook
_NO_GPUS: Final = re.compile(r"could not select device driver")
#: messages of a pull for which the same one may succeed later: want of room, too many requests, a registry that is down
_MAY_PASS: Final = re.compile(
    r"no space left|quota exceeded|connection (refused|reset)|too ?many ?requests|time(d )?[- ]?out|deadline exceeded"
    r"|unexpected EOF|temporary failure|server misbehaving|service unavailable|bad gateway|internal server error",
    re.IGNORECASE,
)
#: messages of a registry if the image does not exist or is not public
NO_IMAGE: Final = re.compile(
    r"manifest unknown|manifest for .* not found|repository does not exist|pull access denied|invalid reference format"
    r"|failed to resolve reference .*: not found",
    re.IGNORECASE,
)


class CannotStart(Exception):
    """A failed start. `code` is set if the job is at fault; None if this host is.

    With `mark`, a word of `ABOUT_THE_JOB`, `code` is the exit code that the job gets if no host can start it.
    """

    def __init__(self, code: int | None, message: str, mark: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.mark = mark

    @property
    def why(self) -> str:
        """The reason to report, with the prefix that says whose fault it is."""
        return f"{self.mark or f'{START_FAILED}: '}{self}"


def lacks(message: str) -> CannotStart:
    """Return the fault for something that this host lacks, and another may have."""
    return CannotStart(CODE_CANNOT_START, message, NOT_HERE)


def fault_of(error: MoorageError) -> CannotStart:
    """Return the fault for an error of what prepares a start."""
    if isinstance(error, HostAtFault):
        return CannotStart(None, without_prefix(error))
    if not_here(error):
        return lacks(error.problem.message)
    return CannotStart(CODE_CANNOT_START, without_prefix(error))


def config_fault(error: MoorageError) -> CannotStart:
    """Return the same for an error of what makes a container's configuration: a failed precondition is this host's."""
    fault = fault_of(error)
    return CannotStart(None, str(fault)) if error.code == "failed-precondition" and not fault.mark else fault


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
    """Return the fault for an image that could not be pulled: it is not to be had here, unless the fault may pass."""
    message = f"image {image} cannot be pulled: {error.message}"
    passes = _MAY_PASS.search(error.message) and not NO_IMAGE.search(error.message)
    return CannotStart(None, message) if passes else lacks(message)
