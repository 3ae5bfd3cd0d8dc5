"""The `moorage` command: finds the verb of a command line, calls its function, and exits with its code."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import sys
from collections.abc import Sequence
from typing import Final

from moorage.cli.framework.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_PIPE_CLOSED, EXIT_USAGE
from moorage.cli.verbs import OF_SERVER, all_verbs, below, find

#: what a write to stdout ends with where its disk is full or its quota used up (write(2))
_CANNOT_WRITE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

#: how much of an unknown verb has to be that of a known one (difflib's ratio) to be told as meant
NEAR_VERB: Final = 0.7


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code. Without `argv`, the line is that of the process."""
    gc.disable()  # a one-shot command ends before garbage matters; services turn it on again
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        from moorage.cli.framework.streams import stand_on_any_streams

        stand_on_any_streams()
    try:
        code = run(words)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = EXIT_PIPE_CLOSED
    except OSError as error:
        if error.errno not in _CANNOT_WRITE or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still to be flushed would fail again
        print(f"error: the output cannot be written: {error.strerror}", file=sys.stderr)
        code = EXIT_FAILED
    except KeyboardInterrupt:
        if sys.stderr.isatty():
            print(file=sys.stderr)  # the terminal has written ^C: the prompt begins a line of its own
        code = EXIT_INTERRUPTED
    if argv is not None:
        sys.exit(code)
    # everything is closed and flushed: what the interpreter does at its end costs a tenth of a one-shot command
    with contextlib.suppress(BrokenPipeError):
        sys.stderr.flush()
    os._exit(code)


def run(words: Sequence[str]) -> int:
    """Read the command line and do what it says. Returns the exit code."""
    if words and words[0] in ("--version", "-V"):
        print(version())
        return 0
    if not all(map(_is_text, words)):
        return _refuse(
            "invalid-argument",
            "an argument is not valid UTF-8; requests are JSON and can carry text only",
            words,
            ("put it into a script on the worker's host, and submit the script",),
        )
    verb, rest = find(words)
    if verb is None:
        from moorage.cli.help import first_help, help_below

        if not words or words[0] in ("--help", "-h"):
            print(first_help())
            return 0
        if below(words[0]) and rest[1:2] in ([], ["--help"], ["-h"]):
            print(help_below(words[0]))
            return 0
        return _unknown(words)
    options = _before_command(rest)
    if "--help" in options or "-h" in options:
        from moorage.cli.help import verb_help

        print(verb_help(verb))
        return 0
    from moorage.cli.framework.arguments import CannotRead, read

    try:
        act = read(verb.name, verb.load(), rest)
    except CannotRead as error:
        return _refuse("invalid-argument", str(error), words, error.fixes or (f"moorage {verb.name} --help",))
    try:
        if verb.name in OF_SERVER:
            from moorage.schemas.optional import need_server

            need_server(f"moorage {verb.name}")
        return act() or 0
    except Exception as error:
        from moorage.schemas.errors import MoorageError

        if not isinstance(error, MoorageError):
            import msgspec

            if not isinstance(error, msgspec.ValidationError):
                raise
            from moorage.client.errors import unread_answer

            error = unread_answer(error)  # what is read otherwise, such as files, says itself what is wrong
        from moorage.cli.framework.console import fail

        return fail(error, json="--json" in _before_command(words))


def version() -> str:
    from moorage.system.build import build

    return build()


def _before_command(words: Sequence[str]) -> Sequence[str]:
    """Return the words before `--`; those after it are the job's command."""
    return words[: words.index("--")] if "--" in words else words


def _is_text(word: str) -> bool:
    """Return whether a word of the command line is valid text. Python keeps bytes that it cannot decode as
    surrogates."""
    return word.isascii() or not any("\ud800" <= char <= "\udfff" for char in word)


def _unknown(words: Sequence[str]) -> int:
    import shlex

    from moorage.cli.habits import LINES, OURS

    if words[0] in ("-v", "version"):
        return _refuse("unknown-verb", f"no verb {words[0]!r}", words, ("moorage --version",))
    if words[0].startswith("-"):
        return _refuse_options_first(words)
    count = 2 if below(words[0]) else 1
    word = " ".join(words[:count])
    near = OURS.get(word) or _nearest(word)
    line = [*near.split(), *words[count:]]
    fixes = [" ".join(["moorage", *(near or " ".join(words[: count - 1])).split(), "--help"])]
    if word in LINES:
        fixes.insert(0, LINES[word])
    elif (words[count:] or near in ("ls", "fleet")) and _can_be_read(line):
        fixes.insert(0, shlex.join(["moorage", *line]))
    return _refuse("unknown-verb", f"no verb {word!r}", words, tuple(fixes))


def _nearest(word: str) -> str:
    """Return the verb, or the group of verbs, that an unknown word means or resembles; "" if there is none."""
    from moorage.schemas.nearest import nearest

    known = all_verbs()
    group, _, of = word.rpartition(" ")
    if of in known:  # as in `admin drain`
        return of
    if group:
        near = nearest(of, [verb.name.removeprefix(f"{group} ") for verb in below(group)], NEAR_VERB)
        return f"{group} {near}" if near else ""
    if len(whole := [name for name in known if name.endswith(f" {word}")]) == 1:  # as in `hold`
        return whole[0]
    return nearest(word, dict.fromkeys(name for verb in known for name in (verb, verb.partition(" ")[0])), NEAR_VERB)


def _can_be_read(words: Sequence[str]) -> bool:
    from moorage.cli.framework.arguments import CannotRead, read

    verb, rest = find(words)
    try:
        return verb is not None and read(verb.name, verb.load(), rest) is not None
    except CannotRead:
        return False


def _refuse_options_first(words: Sequence[str]) -> int:
    """Refuse an option before the verb, as in `moorage --tenant acme ls`, and say how the line should be."""
    import shlex

    from moorage.cli.framework.arguments import NATS_OPTIONS

    before = _before_command(words)
    at = next((at for at in range(len(before)) if find(before[at:])[0] is not None), 0)
    options = (NATS_OPTIONS.get(word, word) for word in words[:at])
    fix = shlex.join(["moorage", *before[at:], *options, *words[len(before) :]]) if at else "moorage --help"
    return _refuse(
        "unknown-verb", f"{words[0]} stands where a verb is expected; options come after the verb", words, (fix,)
    )


def _refuse(code: str, why: str, words: Sequence[str], fixes: tuple[str, ...]) -> int:
    from moorage.cli.framework.console import emit, print_error
    from moorage.schemas.errors import problem

    told = problem(code, why, next=fixes[0])
    if "--json" in _before_command(words):
        emit(told)
    print_error(told, fixes)
    return EXIT_USAGE
