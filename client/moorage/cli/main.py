"""The `moorage` command: which verbs there are, and from the words of a line to a verb's function.

A verb's module is imported when the verb is run: `moorage --version` and a one-shot command must be quick.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from moorage.cli.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_PIPE_CLOSED, EXIT_USAGE

#: what a write to stdout ends with where its disk is full or its quota used up (write(2))
_CANNOT_WRITE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class Verb(NamedTuple):
    """A verb, where it is, and its line of the first help. A name of two words is a verb of the first: `admin hold`."""

    name: str
    where: str
    help: str

    def load(self) -> Callable[..., int | None]:
        """Its function; its module is imported now."""
        module, _, function = self.where.partition(":")
        act: Callable[..., Any] = getattr(importlib.import_module(module), function)
        return act


JOBS: Final = "Your jobs"
FLEET: Final = "The fleet"
RUNNING: Final = "Running moorage"
#: not in the first help, which has at most FIRST_HELP_MAX lines of verbs; `moorage help` shows it
LOOKUP: Final = "Looking things up"
FIRST_HELP_MAX: Final = 20

VERBS: Final[dict[str, tuple[Verb, ...]]] = {
    JOBS: (
        Verb("run", "moorage.cli.run:run", "Run a command on GPUs, follow it, return its exit code."),
        Verb("submit", "moorage.cli.submit:submit", "Submit a job and go on; returns once it is in the ledger."),
        Verb("wait", "moorage.cli.wait:wait", "Wait until jobs are over; exits with their code."),
        Verb("show", "moorage.cli.jobs:show", "All about jobs: request, state, transitions."),
        Verb("ls", "moorage.cli.jobs:ls", "Your jobs, newest first."),
        Verb("logs", "moorage.cli.run:logs", "Follow a job's output until it is over."),
        Verb("events", "moorage.cli.wait:events", "Transitions as they happen, of a job or of the tenant."),
        Verb("explain", "moorage.cli.explain:explain", "Why a job waits, or what an error code means."),
        Verb("plan", "moorage.cli.plan:plan", "Whether, when and where a job would start; submits nothing."),
        Verb("cancel", "moorage.cli.jobs:cancel", "Cancel jobs, at any stage."),
    ),
    FLEET: (
        Verb("fleet", "moorage.cli.fleet:fleet", "Workers, what is free, what fits now."),
        Verb("drain", "moorage.cli.worker_acts:drain", "Place nothing new on a worker; running jobs go on."),
        Verb("cordon", "moorage.cli.worker_acts:cordon", "Place nothing new on a worker."),
        Verb("uncordon", "moorage.cli.worker_acts:uncordon", "Undo drain or cordon."),
        Verb("audit", "moorage.cli.audit:audit", "Compare ledger and workers; exit code 10 on drift."),
        Verb("admin hold", "moorage.cli.admin:hold", "Keep waiting jobs, or a tenant's whole queue, from starting."),
        Verb(
            "admin release", "moorage.cli.admin:release", "Undo hold; or put a worker's quarantined GPUs back to use."
        ),
        Verb("admin requeue", "moorage.cli.admin:requeue", "End running jobs, and have them wait again."),
        Verb("admin priority", "moorage.cli.admin:priority", "Give jobs another priority."),
        Verb("admin limit", "moorage.cli.admin:limit", "Bound a tenant's GPUs and jobs."),
        Verb(
            "admin feature-level",
            "moorage.cli.ledger:feature_level",
            "Show who leads and stands by; raise the level.",
        ),
        Verb("admin backup", "moorage.cli.ledger:backup", "Write the ledger as it is now to one file."),
        Verb("admin restore", "moorage.cli.ledger:restore", "Make a new ledger from a backup; no scheduler may run."),
        Verb("admin share", "moorage.cli.admin:share", "Set a tenant's weight and guaranteed GPUs."),
        Verb("admin tenants", "moorage.cli.admin:tenants", "Tenants, with what they use, their limits and holds."),
        Verb("admin nats-config", "moorage.cli.nats_config:nats_config", "Accounts, permissions, a key for each user."),
    ),
    RUNNING: (
        Verb("up", "moorage.cli.up:up", "Server, scheduler and worker on this machine, in one command."),
        Verb("scheduler", "moorage.cli.processes:scheduler", "Run a scheduler in the foreground."),
        Verb("worker", "moorage.cli.processes:worker", "Run a worker in the foreground."),
        Verb("demo", "moorage.cli.demo:main", "A real trace on simulated GPUs; the scheduler is killed midway."),
        Verb("doctor", "moorage.cli.doctor:doctor", "Check server, permissions, leader and this host."),
    ),
    LOOKUP: (
        Verb("metrics", "moorage.cli.metrics:metrics", "What a monitor watches, for Prometheus: once, or served."),
        Verb("usage", "moorage.cli.usage:usage", "What GPUs gave to a tenant, or to all, by model and hour."),
        Verb("dlq list", "moorage.cli.dlq:list_letters", "Queued requests that were refused, and why."),
        Verb("dlq show", "moorage.cli.dlq:show", "One of these requests, as it came."),
        Verb("dlq resend", "moorage.cli.dlq:resend", "Submit refused requests again, under their ids."),
        Verb("dlq drop", "moorage.cli.dlq:drop", "Delete refused requests for good."),
        Verb("get", "moorage.cli.get:get", "Fetch the files that a job kept."),
        Verb("help", "moorage.cli.help:help", "Every verb, or one verb, or a topic."),
        Verb("simulate", "moorage.cli.simulate:simulate", "Run the scheduler on a trace, under a virtual clock."),
        Verb("replay", "moorage.cli.replay:replay", "What was decided, from the ledger, a backup or a recording."),
        Verb("errors", "moorage.cli.lookup:errors", "What each code means, and the exit codes."),
        Verb("add-path", "moorage.cli.add_path:add_path", "Run a command with what TF_PATH and its kin add."),
        Verb("api", "moorage.cli.api:api", "Send one frame of the protocol, print its answer."),
        Verb("schema", "moorage.cli.lookup:schema", "The JSON Schema of the request, or of a frame."),
        Verb(
            "completion", "moorage.cli.completion:completion", "A script that completes verbs and options in a shell."
        ),
    ),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code; without `argv`, as the process's own, at once."""
    gc.disable()  # a one-shot command ends before garbage matters; services turn it on again
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        from moorage.cli.streams import stand_on_any_streams

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
    """Read the line and do what it says. Returns the exit code."""
    if words and words[0] in ("--version", "-V"):
        print(version())
        return 0
    if not all(map(_is_text, words)):
        return _refuse(
            "invalid-argument",
            "a word of the line is not UTF-8: what is sent is JSON, and holds text alone",
            words,
            ("put it into a script on the worker, and hand in the script",),
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
    from moorage.cli.arguments import CannotRead, read

    try:
        act = read(verb.name, verb.load(), rest)
    except CannotRead as error:
        return _refuse("invalid-argument", str(error), words, error.fixes or (f"moorage {verb.name} --help",))
    return act() or 0


def version() -> str:
    from moorage.schemas.release import RELEASE

    return RELEASE


def _before_command(words: Sequence[str]) -> Sequence[str]:
    """What is ours to read: what stands behind `--` is the command's."""
    return words[: words.index("--")] if "--" in words else words


def _is_text(word: str) -> bool:
    """Whether a word of the command line is text, and no bytes that Python could not read as such."""
    return word.isascii() or not any("\ud800" <= char <= "\udfff" for char in word)


def _unknown(words: Sequence[str]) -> int:
    from moorage.cli.habits import OURS
    from moorage.schemas.nearest import nearest

    if words[0] in ("-v", "version"):
        return _refuse("unknown-verb", f"no verb {words[0]!r}", words, ("moorage --version",))
    if words[0].startswith("-"):
        return _refuse_options_first(words)
    word = " ".join(words[:2]) if below(words[0]) else words[0]
    known = dict.fromkeys([*all_verbs(), *(name.partition(" ")[0] for name in all_verbs() if " " in name)])
    near = OURS.get(word) or nearest(word, known)
    return _refuse(
        "unknown-verb", f"no verb {word!r}", words, (f"moorage {near} --help" if near else "moorage --help",)
    )


def _refuse_options_first(words: Sequence[str]) -> int:
    """`moorage --tenant acme ls`: the same line as it should be."""
    import shlex

    at = next((at for at in range(len(words)) if find(words[at:])[0] is not None), 0)
    fix = shlex.join(["moorage", *words[at:], *words[:at]]) if at else "moorage --help"
    return _refuse("unknown-verb", f"{words[0]} stands where a verb does; options come behind it", words, (fix,))


def _refuse(code: str, why: str, words: Sequence[str], fixes: tuple[str, ...]) -> int:
    from moorage.cli.console import emit, tell_error
    from moorage.schemas.errors import problem

    told = problem(code, why, next=fixes[0])
    if "--json" in _before_command(words):
        emit(told)
    tell_error(told, fixes)
    return EXIT_USAGE


# ---------------------------------------------------------------------------------------------------- the table


def all_verbs() -> dict[str, Verb]:
    """Every verb by its name."""
    return {verb.name: verb for verbs in VERBS.values() for verb in verbs}


def find(words: Sequence[str]) -> tuple[Verb | None, list[str]]:
    """The verb that the line begins with, of one word or of two, and the rest of the line."""
    known = all_verbs()
    for count in (2, 1):
        verb = known.get(" ".join(words[:count])) if len(words) >= count else None
        if verb is not None:
            return verb, list(words[count:])
    return None, list(words)


def below(word: str) -> list[Verb]:
    """The verbs of two words that begin with this one."""
    return [verb for name, verb in all_verbs().items() if name.startswith(word + " ")]
