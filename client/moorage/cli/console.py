"""Where the command writes: data to stdout, talk to stderr, colour only where somebody looks."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from typing import Final, Literal, TextIO

from moorage.schemas.codec import encode
from moorage.schemas.errors import MoorageError, Problem
from moorage.schemas.printable import in_one_line, shown

Colour = Literal["auto", "always", "never"]

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_NOT_FOUND: Final = 3
EXIT_DENIED: Final = 4
EXIT_UNREACHABLE: Final = 5
EXIT_TIMED_OUT: Final = 6
EXIT_NOT_NOW: Final = 7
EXIT_NEVER: Final = 8
EXIT_DRIFT: Final = 10
EXIT_INTERRUPTED: Final = 130
EXIT_PIPE_CLOSED: Final = 141

#: every way in which a verb ends; `moorage help exit-codes` prints it
EXIT_CODES: Final[Mapping[int, str]] = {
    0: "done; of run, logs and wait: the job SUCCEEDED",
    EXIT_FAILED: "failed or refused; of run, logs and wait: the job ended without a code of its own",
    EXIT_USAGE: "the line or the request is malformed",
    EXIT_NOT_FOUND: "no such job, worker, code or page",
    EXIT_DENIED: "NATS refused the credentials, or this user may not do that",
    EXIT_UNREACHABLE: "no NATS server, or no scheduler that answers",
    EXIT_TIMED_OUT: "what was waited for did not happen in time; the job goes on",
    EXIT_NOT_NOW: "plan says: not now",
    EXIT_NEVER: "plan says: never on this fleet",
    EXIT_DRIFT: "audit found a difference between the ledger and the workers",
    EXIT_INTERRUPTED: "Ctrl-C; of run, logs and wait: the job goes on",
    EXIT_PIPE_CLOSED: "whoever read the output has gone",
}
#: error code -> exit code; every other code is EXIT_FAILED
EXIT_OF_CODE: Final[Mapping[str, int]] = {
    "invalid-argument": EXIT_USAGE,
    "too-large": EXIT_USAGE,
    "unknown-verb": EXIT_USAGE,
    "bad-context": EXIT_USAGE,
    "bad-settings": EXIT_USAGE,
    "not-found": EXIT_NOT_FOUND,
    "permission-refused": EXIT_DENIED,
    "not-authorized": EXIT_DENIED,
    "cannot-connect": EXIT_UNREACHABLE,
    "disconnected": EXIT_UNREACHABLE,
    "no-scheduler": EXIT_UNREACHABLE,
    "not-leading": EXIT_UNREACHABLE,
    "timed-out": EXIT_TIMED_OUT,
}
FIXES_MAX: Final = 3
_STYLES: Final = {"dim": "2", "bold": "1", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}

_choice: Colour = "auto"


def choose_colour(colour: Colour) -> None:
    """What `--color` says, for the rest of this process."""
    global _choice
    _choice = colour


def has_colour(stream: TextIO) -> bool:
    """`--color`, else NO_COLOR, else CLICOLOR_FORCE, else whether a terminal that can is there (clig.dev)."""
    if _choice != "auto":
        return _choice == "always"
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("CLICOLOR_FORCE", "0") not in ("", "0"):
        return True
    return is_live(stream) and os.environ.get("CLICOLOR", "1") != "0"


def is_live(stream: TextIO) -> bool:
    """Whether a terminal is there on which lines can be written again."""
    return stream.isatty() and os.environ.get("TERM", "") != "dumb"


def paint(text: str, style: str, stream: TextIO) -> str:
    """The text in a style of `_STYLES`, or as it is where there is no colour."""
    if not style or not has_colour(stream):
        return text
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m"


def plain(text: str, stream: TextIO | None = None) -> str:
    """What stands in it is shown and not obeyed: names and reasons come from workers and tenants, and a terminal does
    what control characters say. Our own colours stay, where the stream has any."""
    safe = shown(text)
    if "\x1b" in text and (stream is None or has_colour(stream)):
        for style in ("0", *_STYLES.values()):
            safe = safe.replace(f"\\x1b[{style}m", f"\x1b[{style}m")
    return safe


def say(text: str) -> None:
    """A line of talk."""
    print(plain(text, sys.stderr), file=sys.stderr, flush=True)


def say_if_heard(text: str) -> None:
    """As `say`, of one who must go on where nobody reads any more: the terminal is closed, the pipe has no reader."""
    with contextlib.suppress(OSError):
        say(text)


def tell(text: str) -> None:
    """A line of data."""
    print(plain(text, sys.stdout), flush=True)


def emit(frame: object) -> None:
    """A frame as one line of JSON, as it is on the wire."""
    sys.stdout.write(encode(frame).decode() + "\n")
    sys.stdout.flush()


def exit_code_of(error: MoorageError) -> int:
    return EXIT_OF_CODE.get(error.code, EXIT_FAILED)


def fail(error: MoorageError, *, json: bool = False) -> int:
    """Tell an error: what, the evidence, how to go on; with `json` its frame, too. Returns the exit code."""
    told, fixes = error.problem, getattr(error, "fixes", ())
    if told.code in ("no-scheduler", "not-leading"):
        import msgspec

        from moorage.cli.disk import ROOM, full_disk_of

        if (full := full_disk_of(told.message)) is not None:
            told, fixes = msgspec.structs.replace(told, message=f"{told.message}: {full}"), (ROOM,)
    if json:
        emit(told)
    tell_error(told, fixes)
    return exit_code_of(error)


def tell_error(problem: Problem, fixes: tuple[str, ...] = ()) -> None:
    first, *rest = problem.message.splitlines() or [""]
    say(f"{paint(f'error[{problem.code}]:', 'red', sys.stderr)} {first}")
    for line in rest:
        say(f"  {line}")
    evidence = [
        f"{name} {value}"
        for name, value in (("at", problem.field), ("found", problem.found), ("allowed", problem.allowed))
        if value and value not in problem.message
    ]
    if evidence:
        say("  " + ", ".join(evidence))
    if problem.retry_after_s is not None:
        say(f"  again in {problem.retry_after_s:g} s")
    if not fixes and not problem.next:
        from moorage.cli.lookup import FIXES

        fixes = (FIXES[problem.code],) if problem.code in FIXES else ()
    for fix in [*filter(None, dict.fromkeys(fixes or (problem.next,)))][:FIXES_MAX]:
        say(f"{paint('fix:', 'cyan', sys.stderr)} {in_one_line(fix)}")
    say(paint(f"more: moorage errors {problem.code}", "dim", sys.stderr))
