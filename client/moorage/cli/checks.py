"""What `moorage doctor` looks at. Each check gives lines: what, ok or warn or fail, what was found, and a fix.

`fail` is what stops moorage here, `warn` what a worker or an operator on this machine would miss.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from moorage.cli.options import TIMEOUT_DEFAULT, Options
from moorage.schemas.errors import MoorageError

if TYPE_CHECKING:
    from moorage.bus.contexts import Context

#: for each answer that is asked for here
ANSWER_S_MAX: Final = 3.0
SERVERS_NEEDED: Final = "without more than half of the servers nothing is recorded"

Verdict = Literal["ok", "warn", "fail"]


class Check(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="check"):
    """A line of the doctor. `fix` says what to do where it is not ok."""

    name: str
    verdict: Verdict
    found: str
    fix: str = ""


async def all_checks(options: Options) -> AsyncIterator[Check]:
    """Every check in the order in which one would ask; those that need what is missing are left out.

    Raises `Rejected` where a flag itself is wrong.
    """
    from moorage.bus.target import find_context
    from moorage.cli import checks_host as host
    from moorage.cli.checks_nats import of_nats
    from moorage.client.durations import seconds

    options = options.settled()
    seconds(options.timeout or TIMEOUT_DEFAULT)
    of_host = (host.python(), host.uvloop(), host.launcher(), host.cgroup(), await host.nvml(), host.settings())
    for check in (*of_host, host.secrets()):
        if check is not None:
            yield check
    try:
        context = find_context(options.nats)
    except MoorageError as error:
        yield failed("context", error)
        return
    yield Check("context", "ok", f"{context.safe_url}, from {context.source or f'context {context.name}'}")
    async for check in of_nats(context, options):
        yield check


def failed(name: str, error: MoorageError, verdict: Verdict = "fail", fix: str = "") -> Check:
    """The line of what raised; `fix` goes before what the error says itself."""
    fixes = (*getattr(error, "fixes", ()), error.problem.next)
    return Check(name, verdict, error.problem.message, fix or next(filter(None, fixes), ""))


def role_of(context: Context | None) -> str:
    """The role that a key was made for, as the inbox of its context says; empty where nothing says so."""
    from moorage.schemas.roles import INBOX, ROLES

    prefix = context.inbox_prefix if context is not None else ""
    first, _, rest = prefix.partition(".")
    role = rest.partition(".")[0]
    return role if first == INBOX and role in ROLES else ""
