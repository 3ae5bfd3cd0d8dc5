"""The reference pages that are lists of what the code has: verbs, codes, permissions, the Python API."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import os
import sys
from collections.abc import Iterator
from typing import Final

import moorage.client
from moorage.cli import console
from moorage.cli.lookup import FIXES, error_codes, reasons
from moorage.cli.main import VERBS, main
from moorage.schemas.subjects import Subjects

#: what each exit code of the command says; `run` and `wait` end with the job's own
EXITS: Final[dict[str, str]] = {
    "EXIT_FAILED": "it failed or was refused; the code on stderr says why",
    "EXIT_USAGE": "the command line or the request cannot be",
    "EXIT_NOT_FOUND": "no such job, worker or code",
    "EXIT_DENIED": "NATS does not permit it to this user",
    "EXIT_UNREACHABLE": "no server or no scheduler was reached",
    "EXIT_TIMED_OUT": "what was waited for did not happen in time; the job goes on",
    "EXIT_DRIFT": "`audit` found a difference between ledger and workers",
    "EXIT_INTERRUPTED": "Ctrl-C: `run` and `logs` detach, and the job goes on",
}
#: names of the worker's side that a user of the library meets, by module
WORKER_API: Final[dict[str, tuple[str, ...]]] = {
    "moorage.worker.embed": ("EmbeddedWorker",),
    "moorage.worker.handler_context": ("HandlerContext", "HandlerCancelled"),
    "moorage.worker.leases.client": ("borrow", "BorrowedLease", "AskedBack", "LeaseRefused"),
    "moorage.worker.settings": ("WorkerSettings",),
    "moorage.worker.drivers.base": ("Driver", "Assignment"),
    "moorage.scheduler.core.rank": ("Ranker", "Choice"),
}
#: shown by name alone: the sync twins have the names of the async classes, without await
TWINS: Final = {"Client": "AsyncClient", "SyncJob": "Job"}
#: who a role is in the table of subjects; a role may do what the words beside it may
ROLES: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "submitter": ("a service or a person, of one tenant", ("submitter", "tenant")),
    "operator": ("who runs the fleet", ("operator", "operators")),
    "observer": ("dashboards: all that is public, no tenant's job", ("observers",)),
    "worker": ("one machine, by its id", ("worker", "workers", "that worker")),
    "scheduler": ("leaders and standbys", ("leader", "schedulers", "scheduler")),
}
_WIDTH: Final = "110"


def help_of(*words: str) -> str:
    """What the command prints for `--help`, at a fixed width and without colour."""
    before = {name: os.environ.get(name) for name in ("COLUMNS", "NO_COLOR")}
    os.environ.update(COLUMNS=_WIDTH, NO_COLOR="1")
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            main([*words, "--help"])
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    return "\n".join(line.rstrip() for line in out.getvalue().strip().splitlines())


def command() -> str:
    """Every verb with its whole help, examples included."""
    parts = ["# The command\n\n", f"```help\n{help_of()}\n```\n"]
    for title, verbs in VERBS.items():
        parts.append(f"\n## {title}\n")
        for verb in verbs:
            parts.append(f"\n### moorage {verb.name}\n\n```help\n{help_of(verb.name)}\n```\n")
    parts.append("\n## Exit codes\n\n| code | what it says |\n| --- | --- |\n| 0 | done |\n")
    parts += [f"| {getattr(console, name)} | {text} |\n" for name, text in EXITS.items()]
    parts.append("\n`run`, `wait` and `logs` end with the job's own exit code where it has one.\n")
    return "".join(parts)


def errors() -> str:
    """Every code with whose fault it is and the command's exit code, and every reason for waiting with its fix."""
    parts = [
        "# Errors\n\nOne code, one fault; the same in the answer, the log line and the command's output.\n\n",
        "| code | whose fault | exit code | what it means |\n| --- | --- | ---: | --- |\n",
    ]
    for name, code in sorted(error_codes().items()):
        parts.append(f"| `{name}` | {code.fault} | {code.exit_code} | {code.means} |\n")
    parts.append("\n# Reasons for waiting\n\n")
    parts.append("What `explain` names: the first filter after which no worker was left.\n\n")
    parts.append("| reason | what it means | what helps |\n| --- | --- | --- |\n")
    for name, code in reasons().items():
        fix = FIXES.get(name, "").format(job="JOB", asks="the request")
        parts.append(f"| `{name}` | {code.means} | {fix} |\n")
    return "".join(parts)


def permissions() -> str:
    """What each role publishes and hears, out of the table of subjects."""
    rows = Subjects().table()
    parts = [
        "# Permissions by role\n\n",
        "A role is a NATS user that may publish to and subscribe to these subjects, with its tenant or worker id in "
        "place of the words in angle brackets. Whoever asks something also subscribes to its own inbox, `_INBOX.>`; "
        "whoever answers publishes to the inbox of the one who asks (`allow_responses`). Why the ledger is in an "
        "account of its own: [the security model](../explanation/security.md).\n",
    ]
    for role, (who, words) in ROLES.items():
        writes = [row for row in rows if _names(row.writes) & set(words)]
        reads = [row for row in rows if _names(row.reads) & set(words)]
        parts.append(
            f"\n## {role}\n\n{who[0].upper()}{who[1:]}.\n\n| | subject | kind | what |\n| --- | --- | --- | --- |\n"
        )
        for verb, which in (("publishes", writes), ("hears", reads)):
            parts += [f"| {verb} | `{row.subject}` | {row.kind} | {row.what} |\n" for row in which]
    return "".join(parts)


def _names(cell: str) -> set[str]:
    return {name.strip() for name in cell.split(",")}


def python_api() -> str:
    """The public names, for mkdocstrings to fill in from their docstrings."""
    parts = [
        "# Python\n\n",
        "Made from the docstrings when the site is built. Names of the SDK are imported from `moorage.client`.\n",
    ]
    for module, names in client_modules():
        parts.append(f"\n## {_title(module)}\n")
        for name in names:
            if name in TWINS:
                parts.append(f"\n### `{name}`\n\nThe methods of [`{TWINS[name]}`][moorage.client.{TWINS[name]}], ")
                parts.append("without `await`.\n")
            else:
                parts.append(f"\n::: moorage.client.{name}\n")
    parts.append("\n## The worker's and the scheduler's side\n")
    parts += [f"\n::: {module}.{name}\n" for module, names in WORKER_API.items() for name in names]
    return "".join(parts)


def client_modules() -> Iterator[tuple[str, list[str]]]:
    """The SDK's public names by the module that defines them, those of a module in their own order."""
    homes: dict[str, list[str]] = {}
    for name in moorage.client.__all__:
        value = getattr(moorage.client, name)
        homes.setdefault(getattr(value, "__module__", "moorage.client"), []).append(name)
    yield from sorted(homes.items())


def _title(module: str) -> str:
    """The first sentence of a module's docstring, up to its first colon or full stop."""
    importlib.import_module(module)
    text = inspect.getdoc(sys.modules[module]) or module
    first = text.split("\n\n")[0].replace("\n", " ")
    return first.split(". ")[0].split(": ")[0].rstrip(".")
