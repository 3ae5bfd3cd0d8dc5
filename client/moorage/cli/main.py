"""The `moorage` command: which verbs there are, and what becomes of their errors.

Verbs are imported when they are run: `moorage --version` and a one-shot command must be quick.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from cyclopts import App

EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130
EXIT_PIPE_CLOSED: Final = 141


class Verb(NamedTuple):
    """A verb, where it is, and the line of the first help."""

    name: str
    where: str
    help: str


JOBS: Final = "Your jobs"
FLEET: Final = "The fleet"
RUNNING: Final = "Running moorage"
LOOKUP: Final = "Looking things up"

VERBS: Final[dict[str, tuple[Verb, ...]]] = {
    JOBS: (
        Verb("run", "moorage.cli.run:run", "Run a command on GPUs, follow it, return its exit code."),
        Verb("submit", "moorage.cli.submit:submit", "Hand in a job and go on; answered once it is in the ledger."),
        Verb("wait", "moorage.cli.wait:wait", "Wait until jobs are over; ends with their code."),
        Verb("show", "moorage.cli.jobs:show", "Jobs, whole: request, state, transitions."),
        Verb("ls", "moorage.cli.jobs:ls", "Your jobs, newest first."),
        Verb("logs", "moorage.cli.run:logs", "Follow a job's output until it is over."),
        Verb("events", "moorage.cli.wait:events", "Transitions as they happen, of a job or of the tenant."),
        Verb("explain", "moorage.cli.explain:explain", "Why a job waits, or what a code means."),
        Verb("cancel", "moorage.cli.jobs:cancel", "Cancel jobs, at any stage."),
    ),
    FLEET: (
        Verb("fleet", "moorage.cli.fleet:fleet", "Workers, what is free, what fits now."),
        Verb("drain", "moorage.cli.fleet:drain", "Place nothing new on a worker; what runs there goes on."),
        Verb("cordon", "moorage.cli.fleet:cordon", "Place nothing new on a worker."),
        Verb("uncordon", "moorage.cli.fleet:uncordon", "Undo drain or cordon."),
        Verb("audit", "moorage.cli.audit:audit", "The ledger against the workers; exit code 10 on drift."),
    ),
    RUNNING: (
        Verb("up", "moorage.cli.up:up", "Server, scheduler and worker on this machine, in one command."),
        Verb("scheduler", "moorage.cli.processes:scheduler", "Run a scheduler in the foreground."),
        Verb("worker", "moorage.cli.processes:worker", "Run a worker in the foreground."),
        Verb("demo", "moorage.cli.demo:main", "A guided tour on a simulated fleet."),
        Verb("doctor", "moorage.cli.doctor:doctor", "Is everything there: server, permissions, leader, this host."),
    ),
    LOOKUP: (
        Verb("errors", "moorage.cli.lookup:errors", "What each code means, and the exit codes."),
        Verb("schema", "moorage.cli.lookup:schema", "The JSON Schema of the request, or of a frame."),
        Verb("completion", "moorage.cli.lookup:completion", "A script that completes verbs and options in your shell."),
    ),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code; without `argv`, as the process's own, at once."""
    gc.disable()  # a one-shot command ends before garbage matters; services turn it on again
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(words)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = EXIT_PIPE_CLOSED
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    if argv is not None:
        sys.exit(code)
    # everything is closed and flushed: what the interpreter does at its end costs a tenth of a one-shot command
    with contextlib.suppress(BrokenPipeError):
        sys.stderr.flush()
    os._exit(code)


def _run(words: list[str]) -> int:
    if words in (["--version"], ["-V"]):
        print(version())
        return 0
    if words and not words[0].startswith("-") and words[0] not in _names():
        return _unknown(words[0])
    from moorage.cli import quick

    if (plain := quick.command(bare_gpu(words))) is not None:
        return plain()
    from cyclopts import CycloptsError

    try:
        verb = words[0] if words and words[0] in _names() else ""
        result = application(verb)(
            bare_gpu(words or ["--help"]), exit_on_error=False, print_error=False, result_action="return_value"
        )
    except CycloptsError as error:
        return _usage(error, words)
    return result if isinstance(result, int) else 0


def application(only: str = "") -> App:
    """The tree of commands, or with `only` that one, which is quicker; nothing of them is imported yet."""
    from cyclopts import App, Group

    app = App(
        name="moorage",
        help="GPUs for services that talk NATS.",
        help_epilogue="A verb's own help has examples: `moorage run --help`.",
        help_format="plaintext",
        help_formatter="plain",
        version=version,
    )
    for position, (title, verbs) in enumerate(VERBS.items()):
        group = Group(title, sort_key=position)
        for order, verb in enumerate(verbs):
            if only not in ("", verb.name):
                continue
            app.command(
                f"moorage.cli.verbs:{verb.name}",
                name=verb.name,
                **({} if only else {"help": verb.help}),
                group=group,
                sort_key=order,
                help_format="plaintext",
                help_formatter="plain",
                help_epilogue=_examples(verb.name),
            )
    return app


def _examples(verb: str) -> str:
    from moorage.cli.examples import EXAMPLES

    lines = EXAMPLES.get(verb, ())
    return "Examples:\n" + "\n".join(f"  {line}" for line in lines) if lines else ""


def bare_gpu(words: list[str]) -> list[str]:
    """`--gpu` without a value is one GPU: written out, since an option either has a value or has none."""
    out: list[str] = []
    for at, word in enumerate(words):
        out.append(word)
        if word == "--":
            return out + words[at + 1 :]
        if word == "--gpu" and (at + 1 == len(words) or words[at + 1].startswith("-")):
            out.append("1")
    return out


def version() -> str:
    from moorage.schemas.release import RELEASE

    return RELEASE


def _names() -> list[str]:
    return [verb.name for verbs in VERBS.values() for verb in verbs]


def _unknown(word: str) -> int:
    """Told here: cyclopts would import every verb to find the nearest."""
    import difflib

    from moorage.cli.console import paint

    near = difflib.get_close_matches(word, _names(), n=1)
    print(f"{paint('error[usage]:', 'red', sys.stderr)} no command {word!r}", file=sys.stderr)
    fix = f"moorage {near[0]} --help" if near else "moorage --help lists them"
    print(f"{paint('fix:', 'cyan', sys.stderr)} {fix}", file=sys.stderr)
    return EXIT_USAGE


def _usage(error: Exception, words: Sequence[str]) -> int:
    from moorage.cli.console import paint

    verb = words[0] if words and words[0] in _names() else ""
    first, *rest = str(error).strip().splitlines() or ["the command line cannot be read"]
    print(f"{paint('error[usage]:', 'red', sys.stderr)} {first}", file=sys.stderr)
    for line in rest:
        if line.strip():
            print(f"  {line}", file=sys.stderr)
    print(f"{paint('fix:', 'cyan', sys.stderr)} moorage {verb + ' ' if verb else ''}--help", file=sys.stderr)
    return EXIT_USAGE
