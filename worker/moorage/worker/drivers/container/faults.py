"""Decide from the engine's message whether the job or this host is at fault for a failed start."""

from __future__ import annotations

import re
from typing import Final

from moorage.schemas.errors import MoorageError
from moorage.schemas.frames import NOT_HERE, SETUP_FAILED, START_FAILED
from moorage.system.device_environment import HostAtFault
from moorage.worker.attempt.environment import SetupFailed, not_here, without_prefix
from moorage.worker.drivers.container.engine import EngineError
from moorage.worker.start_codes import CODE_CANNOT_START, CODE_NOT_FOUND

#: where an engine's message begins to speak of the job's program: as runc, then as crun says it
_PROGRAM: Final = re.compile(
    r"\bexec: \\?\"|exec (user|container) process|executable file `|the path `|cannot find `", re.IGNORECASE
)
#: steps of a start that use only files of the host. The reason behind them may have any words, also a program's
_HOST_STEP: Final = re.compile(
    r"\bmounting |running (\S+ )?hook|executing hook|retrieve OCI runtime error|failed to start shim", re.IGNORECASE
)
_NOT_FOUND: Final = re.compile(r"executable file .*not found|no such file or directory|cannot find `", re.IGNORECASE)
_UNUSABLE: Final = re.compile(
    r"permission denied|not permitted|(is a|not a) directory|name too long|exec format error|levels of symbolic links",
    re.IGNORECASE,
)
#: messages of an engine itself if the job names a folder or a user that its image lacks
_NOT_IN_IMAGE: Final = re.compile(
    r"^workdir .* (does not exist|is not a directory)|^detecting workdir .*: not a directory$"
    r"|^unable to find (user|group) ",
    re.IGNORECASE,
)
#: what an engine says that lacks NVIDIA's hook
_NO_GPUS: Final = re.compile(r"could not select device driver")
#: what an engine says that does not know a device which moorage has found in its folders
_NOT_RESOLVED: Final = re.compile(r"unresolvable CDI devices")
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
    if isinstance(error, SetupFailed):
        return CannotStart(error.exit_code, error.problem.message.removeprefix(SETUP_FAILED), SETUP_FAILED)
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
    if is_created and error.status in (400, 404, 500) and (code := code_of(message)) is not None:
        return CannotStart(code, message)
    if _NO_GPUS.search(message):
        message += (
            ": the engine has no CDI spec with these GPUs, and no hook of NVIDIA's. Run nvidia-ctk cdi generate on "
            "that host, or install nvidia-container-toolkit"
        )
    if _NOT_RESOLVED.search(message):
        message += (
            ": a spec on that host has them, and the engine has not read it, or does not know its cdiVersion. Write the"
            " spec in place, without a move or a link, or restart the engine"
        )
    return CannotStart(None, message)


def code_of(message: str) -> int | None:
    """Return the exit code of a job whose program, folder or user does not fit its image; None for any other fault.

    The first step that the message names decides. Podman ends every message about a missing file with "OCI runtime
    attempted to invoke a command that was not found", whichever file it is, and a hook's own words may follow its step.
    """
    if _NOT_IN_IMAGE.search(message):
        return CODE_CANNOT_START
    program = _PROGRAM.search(message)
    if program is None or _HOST_STEP.search(message, 0, program.start()):
        return None
    reason = message[program.start() :]
    if _NOT_FOUND.search(reason):
        return CODE_NOT_FOUND
    return CODE_CANNOT_START if _UNUSABLE.search(reason) else None


def pull_fault(image: str, error: EngineError) -> CannotStart:
    """Return the fault for an image that could not be pulled: it is not to be had here, unless the fault may pass."""
    message = f"image {image} cannot be pulled: {error.message}"
    passes = _MAY_PASS.search(error.message) and not NO_IMAGE.search(error.message)
    return CannotStart(None, message) if passes else lacks(message)
