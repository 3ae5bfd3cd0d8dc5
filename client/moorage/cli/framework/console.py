"""Where the command writes: data to stdout, messages to stderr, color by default only on a terminal."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from typing import Final, Literal, TextIO

from moorage.cli.framework.exit_codes import exit_code_of
from moorage.schemas.codec import encode
from moorage.schemas.errors import MoorageError, Problem
from moorage.schemas.names import ALL, word_of
from moorage.schemas.printable import in_one_line, shown

Colour = Literal["auto", "always", "never"]

FIXES_MAX: Final = 3
_STYLES: Final = {"dim": "2", "bold": "1", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}

_choice: Colour = "auto"
_quiet = False
_server = ""
_tenant = ""


def choose_colour(colour: Colour) -> None:
    """Set what `--color` says, for the rest of this process."""
    global _choice
    _choice = colour


def choose_quiet(quiet: bool) -> None:
    """Set what `--quiet` says, for the rest of this process."""
    global _quiet
    _quiet = quiet


def choose_here(nats: str | None, tenant: str | None) -> None:
    """Set what this command line says of server and tenant, for the rest of this process. A URL with a password is left
    out of what is printed."""
    global _server, _tenant
    _server = f" --nats {_quoted(nats)}" if nats and "@" not in nats else ""
    _tenant = f" --tenant {_quoted(tenant)}" if tenant and tenant != ALL else ""


def _quoted(word: str) -> str:
    from shlex import quote

    return quote(word)


def here(*, tenant: bool = True) -> str:
    """Return the options with which a printed command asks the same scheduler, as the same tenant if it names none:
    ` --tenant vision`; "" without them."""
    return f"{_server}{_tenant}" if tenant else _server


def word_here(job: str) -> str:
    """Return the words that name a job in a printed command."""
    return f"{word_of(job)}{here()}"


def is_quiet() -> bool:
    """Return whether stderr has errors alone, and what a job wrote there."""
    return _quiet


def has_colour(stream: TextIO) -> bool:
    """Return whether output to this stream is colored. `--color` decides; else NO_COLOR, else CLICOLOR_FORCE, else
    whether the stream is a terminal that has colors (see clig.dev)."""
    if _choice != "auto":
        return _choice == "always"
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("CLICOLOR_FORCE", "0") not in ("", "0"):
        return True
    return is_live(stream) and os.environ.get("CLICOLOR", "1") != "0"


def is_live(stream: TextIO) -> bool:
    """Return whether the stream is a terminal on which a line can be drawn again."""
    return stream.isatty() and os.environ.get("TERM", "") != "dumb"


def is_piped(stream: TextIO) -> bool:
    """Return whether another command reads the stream."""
    try:
        return stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError):  # it has no file, or is closed
        return False


def paint(text: str, style: str, stream: TextIO) -> str:
    """Return the text in one of the styles of `_STYLES`, or unchanged if the stream is not colored."""
    if not style or not has_colour(stream):
        return text
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m"


def plain(text: str, stream: TextIO | None = None) -> str:
    """Return the text with its control characters made visible, since a terminal would obey them, and names and reasons
    come from workers and tenants.

    Our own color codes stay if the stream is colored, or if no stream is given.
    """
    safe = shown(text)
    if "\x1b" in text and (stream is None or has_colour(stream)):
        for style in ("0", *_STYLES.values()):
            safe = safe.replace(f"\\x1b[{style}m", f"\x1b[{style}m")
    return safe


def print_err(text: str) -> None:
    """Print a line for the user to stderr; nothing with --quiet."""
    if not _quiet:
        report(text)


def report(text: str) -> None:
    """Print to stderr with --quiet too: an error, or what else the user must know, as that a job may have been
    accepted."""
    print(plain(text, sys.stderr), file=sys.stderr, flush=True)


def try_print_err(text: str) -> None:
    """Do the same as `print_err`, but raise nothing if the terminal was closed or the pipe has no reader."""
    with contextlib.suppress(OSError):
        print_err(text)


def print_out(text: str) -> None:
    """Print a line of the verb's answer to stdout."""
    print(plain(text, sys.stdout), flush=True)


def emit(frame: object) -> None:
    """Print a frame to stdout as a line of JSON, as it is on the wire.

    A name of a file that is not UTF-8 has each of its other bytes as an escape, `\\udce9` for E9: Python's
    `os.fsencode` of the decoded name gives the bytes back.
    """
    try:
        line = encode(frame).decode()
    except UnicodeEncodeError:
        import json

        import msgspec

        line = json.dumps(msgspec.to_builtins(frame), separators=(",", ":"))
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def fail(error: MoorageError, *, json: bool = False) -> int:
    """Print an error: what happened, the evidence, what to do. With `json`, print its frame to stdout, too. Returns the
    exit code."""
    told, fixes = error.problem, getattr(error, "fixes", ())
    if told.code in ("no-scheduler", "not-leading"):
        import msgspec

        from moorage.cli.framework.disk import ROOM, full_disk_of

        if (full := full_disk_of(told.message)) is not None:
            told, fixes = msgspec.structs.replace(told, message=f"{told.message}: {full}"), (ROOM,)
    if json:
        emit(told)
    print_error(told, fixes)
    return exit_code_of(error)


def error_line(error: MoorageError) -> str:
    """Return an error in one line, for a screen of its own: `error[not-found]: no job x`."""
    return f"error[{error.code}]: {error.problem.message}"


def print_error(problem: Problem, fixes: tuple[str, ...] = ()) -> None:
    import msgspec

    from moorage.cli.framework.wrapping import folded
    from moorage.system.logged import log_problem

    if not fixes and not problem.next:
        from moorage.cli.framework.codes import FIXES

        fixes = (FIXES[problem.code],) if problem.code in FIXES else ()
    fixes = tuple(filter(None, dict.fromkeys(fixes or (problem.next,))))[:FIXES_MAX]
    if log_problem(msgspec.structs.replace(problem, next="; ".join(fixes))):
        return

    def write(text: str) -> None:
        report(folded(text, sys.stderr))

    first, *rest = problem.message.splitlines() or [""]
    write(f"{paint(f'error[{problem.code}]:', 'red', sys.stderr)} {first}")
    for line in rest:
        write(f"  {line}")
    field = "" if problem.message.startswith("--") else problem.field  # an option says where
    evidence = [
        f"{name} {value}"
        for name, value in (("at", field), ("found", problem.found), ("allowed", problem.allowed))
        if value and value not in problem.message
    ]
    if evidence:
        write("  " + ", ".join(evidence))
    if problem.retry_after_s is not None:
        report(f"  again in {problem.retry_after_s:g} s")
    for fix in fixes:
        line = f"{paint('fix:', 'cyan', sys.stderr)} {in_one_line(fix)}"
        report(line) if fix.startswith("moorage ") else write(line)  # a command is pasted as one line
    report(paint(f"more: moorage errors {problem.code}", "dim", sys.stderr))
