"""The exit codes of the verbs. It imports next to nothing, because the first lines of the command need it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from moorage.client.follow.job_history import Result
    from moorage.schemas.errors import MoorageError

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_NOT_FOUND: Final = 3
EXIT_DENIED: Final = 4
EXIT_UNREACHABLE: Final = 5
EXIT_TIMED_OUT: Final = 6
EXIT_NOT_NOW: Final = 7
EXIT_NEVER: Final = 8
EXIT_DRIFT: Final = 10
#: of a program that a verb runs in its place: as a shell ends where it cannot execute a command, or finds none
_CANNOT_EXECUTE: Final = 126
_NO_PROGRAM: Final = 127
EXIT_INTERRUPTED: Final = 130
EXIT_PIPE_CLOSED: Final = 141

#: every way in which a verb ends; `moorage help exit-codes` prints it
EXIT_CODES: Final[Mapping[int, str]] = {
    0: "done; of run, logs and wait: the job SUCCEEDED",
    EXIT_FAILED: "failed or refused; of run, logs and wait: the job ended without a code of its own",
    EXIT_USAGE: "the command line or the request is malformed",
    EXIT_NOT_FOUND: "no such job, worker, code or page",
    EXIT_DENIED: "NATS refused the credentials, or this user may not do that",
    EXIT_UNREACHABLE: "no NATS server, or no scheduler that answers",
    EXIT_TIMED_OUT: "what was waited for did not happen in time; the job goes on",
    EXIT_NOT_NOW: "plan says: not now",
    EXIT_NEVER: "plan says: never on this fleet",
    EXIT_DRIFT: "audit found drift between the ledger, workers or devices; replay, simulate --prove: otherwise",
    EXIT_INTERRUPTED: "Ctrl-C; of run, logs and wait: the job goes on; of run after a second Ctrl-C: it is cancelled",
    EXIT_PIPE_CLOSED: "the reader of the output is gone",
}
#: error code -> exit code; every other code is EXIT_FAILED
EXIT_OF_CODE: Final[Mapping[str, int]] = {
    "invalid-argument": EXIT_USAGE,
    "too-large": EXIT_USAGE,
    "unknown-verb": EXIT_USAGE,
    "no-endpoint": EXIT_USAGE,
    "bad-context": EXIT_USAGE,
    "bad-settings": EXIT_USAGE,
    "not-found": EXIT_NOT_FOUND,
    "permission-refused": EXIT_DENIED,
    "not-authorized": EXIT_DENIED,
    "cannot-connect": EXIT_UNREACHABLE,
    "disconnected": EXIT_UNREACHABLE,
    "unreachable": EXIT_UNREACHABLE,
    "no-scheduler": EXIT_UNREACHABLE,
    "not-leading": EXIT_UNREACHABLE,
    "timed-out": EXIT_TIMED_OUT,
}


def exit_code_of_start(error: OSError) -> int:
    """Return the exit code of a program that could not be started, as a shell has it."""
    return _NO_PROGRAM if isinstance(error, FileNotFoundError) else _CANNOT_EXECUTE


def exit_code_of(error: MoorageError) -> int:
    """Return the exit code of a verb that ends with this error."""
    return EXIT_OF_CODE.get(error.code, EXIT_FAILED)


def exit_code_of_result(result: Result) -> int:
    """Return the exit code for a job that is over: 0 if it SUCCEEDED, its own code, 128 + the signal that ended it, or
    1 if it has no code or the code 0."""
    if result.state == "SUCCEEDED":
        return 0
    return shell_code(result.code) or EXIT_FAILED


def shell_code(code: int | None) -> int:
    """Return a job's code as a shell gives it. On the wire, a process that a signal ended has the negative signal as
    its code; here it is 128 + the signal. 0 for None."""
    return 0 if code is None else code if code >= 0 else 128 - code
