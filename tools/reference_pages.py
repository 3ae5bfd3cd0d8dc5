"""The reference pages that are lists of what the code has: verbs, codes, states, settings and permissions."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Final

from moorage.cli.framework.codes import ends, error_codes, fix_of, of_calls, reasons
from moorage.cli.framework.exit_codes import EXIT_CODES
from moorage.cli.framework.settings import sections
from moorage.cli.main import main
from moorage.cli.verbs import VERBS
from moorage.scheduler.core.config import CLUSTER_DEFAULTS
from moorage.schemas.job import STATE_TABLE
from moorage.schemas.own_class import own_class
from moorage.schemas.roles import CALLER_ASKS, OPERATOR_READS, ROLES, names
from moorage.schemas.settings import OF_DRIVERS, Setting, declared, shown
from moorage.schemas.subjects import MAY_EXEC, Subjects
from moorage.worker.driver import Driver
from moorage.worker.drivers import BUILT_IN

PAGES: Final = Path(__file__).resolve().parents[1] / "docs"
_WIDTH: Final = "110"
_SETTINGS_HEAD: Final = "| key | what it is | default | allowed |\n| --- | --- | --- | --- |\n"


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
            parts.append(f"\n### moorage {verb.name}\n\n```help\n{help_of(*verb.name.split())}\n```\n")
    parts.append("\n## Exit codes\n\n| code | what it says |\n| --- | --- |\n")
    parts += [f"| {code} | {text} |\n" for code, text in EXIT_CODES.items()]
    parts.append("\n`run`, `wait` and `logs` exit with the code of the job, if it has one.\n")
    return "".join(parts)


def errors() -> str:
    """Every code with whose fault it is and its exit code, every reason for waiting or ending with its fix."""
    parts = [
        "# Errors\n\nEach code means one fault, and is the same in answers, log lines and the command's output.\n\n",
        "| code | whose fault | exit code | what it means |\n| --- | --- | ---: | --- |\n",
    ]
    for name, code in sorted(error_codes().items()):
        parts.append(f"| `{name}` | {code.fault} | {code.exit_code} | {code.means} |\n")
    parts.append("\n# Reasons for waiting\n\n")
    parts.append("What `explain` names: the first filter after which no worker was left.\n\n")
    parts.append("| reason | what it means | what helps |\n| --- | --- | --- |\n")
    for name, code in reasons().items():
        fix = fix_of(name).format(job="JOB", asks="the request")
        parts.append(f"| `{name}` | {code.means} | {fix} |\n")
    parts.append("\n# Reasons for ending\n\n")
    parts.append("The first word of `why` where an attempt did not end by itself: in `show`, `explain` and events.\n\n")
    parts.append("| reason | what it means | what helps |\n| --- | --- | --- |\n")
    for name, code in ends().items():
        parts.append(f"| `{name}` | {code.means} | {fix_of(name).format(job='JOB')} |\n")
    parts.append("\n# Errors of calls\n\n")
    parts.append("What only a caller of a service without the SDK hears, in `Nats-Service-Error`.\n\n")
    parts.append("| code | what it means | what helps |\n| --- | --- | --- |\n")
    for name, code in of_calls().items():
        parts.append(f"| `{name}` | {code.means} | {fix_of(name)} |\n")
    return "".join(parts)


def states() -> str:
    """What each state means and which may follow, as a table and as a diagram."""
    parts = ["# States of a replica\n\nThese are all legal steps; the ledger itself refuses any other.\n\n"]
    parts.append("| state | what it means | may become |\n| --- | --- | --- |\n")
    for row in STATE_TABLE:
        following = ", ".join(f"`{target}`" for target in sorted(row.follows)) or "nothing: it is final"
        parts.append(f"| `{row.name}` | {row.means} | {following} |\n")
    parts.append(
        "\nA job's state is derived from its replicas': live while any is live, `ENDING` or `CANCELLING` once\n"
        "nothing else of it goes on, `SUCCEEDED` only when all are.\n"
    )
    return "".join(parts)


def permissions() -> str:
    """What each role publishes and hears, out of the table of subjects."""
    rows = Subjects().table()
    parts = [
        "# Permissions by role\n\n",
        "A role is a NATS user that may publish to and subscribe to these subjects, with its tenant, its worker id or "
        "its own name in place of the words in angle brackets. `moorage admin nats-config` writes them as the "
        "configuration of nats-server "
        "([how](../how-to/give-everybody-a-key.md)). Besides:\n\n"
        "- Every user but a service subscribes to an inbox of its own, `_INBOX.<role>.<name>.>`, and to no other.\n"
        "- The inbox of a caller is `_INBOX.submitter.<tenant>.caller-<name>.>`, which its tenant's submitter does not"
        f" hear. It may also ask {' and '.join(f'`{verb}`' for verb in CALLER_ASKS)} of its tenant.\n"
        "- A scheduler may answer in every inbox (`_INBOX.>`, and `_R_.>` for accounts that import it), may use "
        "JetStream's API on its own streams only, and can be found by `$SRV`.\n"
        "- A worker may answer each question that it hears once (`allow_responses`).\n"
        "- A service's inboxes are `moorage.calls.<tenant>.~.>`. It publishes to `_INBOX.submitter.<tenant>.>` and"
        " `_INBOX.operator.*.>`, where its callers are, and answers nowhere else (no `allow_responses`).\n"
        f"- An operator may also ask {', '.join(f'`{verb}`' for verb in OPERATOR_READS)} of any tenant.\n"
        "- A submitter may use `moorage.api.<tenant>.exec` and `moorage.tty`, which run commands in its running jobs,"
        " only with a right of its own: `moorage admin nats-config --exec TENANT`.\n"
        "- A submitter may use `moorage.request` only on a single server, and only in an account of its own.\n\n"
        "[The security model](../explanation/security.md) says why, and why the ledger has an account of its own.\n",
    ]
    for role, (who, words) in ROLES.items():
        meant = {*words, *([MAY_EXEC] if role == "submitter" else [])}
        writes = [row for row in rows if names(row.writes) & meant]
        reads = [row for row in rows if names(row.reads) & meant]
        parts.append(
            f"\n## {role}\n\n{who[0].upper()}{who[1:]}.\n\n| | subject | kind | what |\n| --- | --- | --- | --- |\n"
        )
        for verb, which in (("publishes", writes), ("subscribes", reads)):
            parts += [f"| {verb} | `{row.subject}` | {row.kind} | {row.what} |\n" for row in which]
    return "".join(parts)


def settings() -> str:
    """Every setting with its default and what is allowed, by section."""
    lines = [(PAGES / "settings.head.md").read_text()]
    for name, struct in sections().items():
        lines.append(f"\n## `[{name}]`\n\n{_SETTINGS_HEAD}")
        for one in declared(name, struct).values():
            default = shown(one, one.default)
            if name == "scheduler" and one.key in CLUSTER_DEFAULTS:
                default += f" ({shown(one, CLUSTER_DEFAULTS[one.key])} with replicas)"
            lines.append(_row(one, " ".join([one.help, *_named_otherwise(name, one)]), default))
    return "".join([*lines, *_settings_of_drivers()])


def _settings_of_drivers() -> list[str]:
    """The sections of the drivers; what docker has in the same words is named alone in those of the others."""
    lines: list[str] = []
    of_docker: set[tuple[str, str, str]] = set()
    kinds = {name: own_class(place, Driver) for name, place in BUILT_IN.items()}
    for name in ("docker", *sorted({*kinds} - {"docker"})):
        struct = kinds[name].settings
        if struct is None:
            continue
        found = list(declared(f"{OF_DRIVERS}.{name}", struct).values())
        same = [one.key for one in found if (one.key, one.help, shown(one, one.default)) in of_docker]
        lines.append(f"\n## `[{OF_DRIVERS}.{name}]`\n\nVariables: `MOORAGE_DRIVER_{name.upper()}_<KEY>`. No flags.")
        if same:
            lines.append(f" As in `[{OF_DRIVERS}.docker]`: {', '.join(f'`{key}`' for key in same)}.")
        lines.append("\n")
        if len(same) < len(found):
            lines.append(f"\n{_SETTINGS_HEAD}")
        lines += [_row(one, one.help, shown(one, one.default)) for one in found if one.key not in same]
        if name == "docker":
            of_docker = {(one.key, one.help, shown(one, one.default)) for one in found}
    return lines


def _row(one: Setting, what: str, default: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in (f"`{one.key}`", what, default, one.allowed)) + " |\n"


def _named_otherwise(section: str, one: Setting) -> list[str]:
    """The variable and the flag where they are not as the head of the page says."""
    variable, flag = f"MOORAGE_{section}_{one.key}".upper(), f"--{one.key.replace('_', '-')}"
    return [
        *([f"Variable `{one.env}`."] if one.env and one.env != variable else []),
        *(["No variable."] if not one.env else []),
        *([f"Flag `{one.flag}`."] if one.flag and one.flag != flag else []),
        *(["No flag."] if not one.flag else []),
    ]
