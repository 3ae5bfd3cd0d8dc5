"""The options that every verb has, and how a verb is run against a server."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, Self

from moorage.cli.framework import console
from moorage.cli.framework.arguments import Again, Parameter
from moorage.cli.framework.console import Colour, emit, fail, print_out
from moorage.schemas.errors import MoorageError
from moorage.schemas.settings_file import find_file

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient
    from moorage.schemas.frames import Answer

CLIENT_VARIABLES: Final = "MOORAGE_CLIENT_"
#: how long a verb waits for a server and for an answer, unless it is told
TIMEOUT_DEFAULT: Final = "10s"
CONNECT_TIMEOUT_S_MAX: Final = 3.0


Nats = Annotated[str | None, Parameter(help="URL of the server, or a nats context.", value="WHERE", again=True)]
Json = Annotated[bool, Parameter(help="Frames as JSON, one object per line.")]
Format = Annotated[
    str | None, Parameter(help="One line per row; fields of --json in braces: '{job} {state}'.", value="TEXT")
]
Quiet = Annotated[
    bool, Parameter(help="Only answers, output and errors: no progress, hints or warnings.", names=("-q", "--quiet"))
]
FormatOfLog = Annotated[
    Literal["text", "json"], Parameter(help="What is written to stderr: text, or a JSON object a line.")
]
Color = Annotated[Colour | None, Parameter(help="NO_COLOR and CLICOLOR_FORCE are honoured. By default auto.")]


@dataclass(frozen=True)
class _Settled:
    """Options whose values may also come from the environment and the settings file."""

    __group__: ClassVar[str] = "Common"

    def settled(self) -> Self:
        """Return the options with values of the environment and the settings file for those that no flag gave. Raises
        Refused with bad-settings."""
        if find_file() is None and not any(name.startswith(CLIENT_VARIABLES) for name in os.environ):
            return self
        from moorage.cli.framework.settings import client_settings

        said = client_settings()
        if "timeout" in said:
            said["timeout"] = f"{said['timeout']}s"
        return replace(self, **{name: value for name, value in said.items() if getattr(self, name, value) is None})


@dataclass(frozen=True)
class LocalOptions(_Settled):
    """Options of verbs that need no scheduler."""

    json: Json = False
    quiet: Quiet = False
    color: Color = None


@dataclass(frozen=True)
class LedgerOptions(_Settled):
    """Options of verbs that read or write the ledger itself, or run a service: they ask no scheduler."""

    nats: Nats = None
    json: Json = False
    quiet: Quiet = False
    color: Color = None


@dataclass(frozen=True)
class Options(_Settled):
    """Options of verbs that ask a scheduler."""

    nats: Nats = None
    tenant: Annotated[
        str | None,
        Parameter(
            help="The tenant. Default: $MOORAGE_TENANT, that of the context's key, or the tenant called default.",
            value="NAME",
        ),
    ] = None
    inbox_prefix: Annotated[
        str | None,
        Parameter(
            help="The inbox that the user's permissions have. Default: $MOORAGE_INBOX_PREFIX, or the context's.",
            value="SUBJECT",
        ),
    ] = None
    timeout: Annotated[
        str | None,
        Parameter(
            help="How long to wait for answers, not jobs: 500ms, 2m. Default: 10s; to submit or cancel 15s, and 45s "
            "where several nats-servers are.",
            value="DURATION",
        ),
    ] = None
    json: Json = False
    quiet: Quiet = False
    color: Color = None


class _Rows:
    """Prints answers that consist of rows, with --json or --format."""

    json: bool
    format: str | None

    def shown(self, frame: object, rows: Iterable[Any]) -> bool:
        """Print the frame with --json, else a line for each row with --format. Without both, print nothing and return
        False."""
        if self.json:
            emit(frame)
        elif self.format is not None:
            from moorage.cli.framework.fields import filled

            for row in rows:
                print_out(filled(self.format, row))
        return self.json or self.format is not None

    def show_each(self, answers: Iterable[Answer], show: Callable[[dict[str, Any]], None]) -> None:
        """Print each answer: with `shown`, or else with `show`, and a blank line between two answers."""
        for at, answer in enumerate(answers):
            if not self.shown(answer, [answer.data]):
                if at:
                    print_out("")
                show(answer.data)


@dataclass(frozen=True)
class RowOptions(Options, _Rows):
    """Options of verbs that ask a scheduler and answer in rows."""

    format: Format = None


@dataclass(frozen=True)
class LocalRowOptions(LocalOptions, _Rows):
    """Options of verbs that need no scheduler and answer in rows."""

    format: Format = None


LOCAL: Final = LocalOptions()
OF_LEDGER: Final = LedgerOptions()
DEFAULTS: Final = Options()
ROWS: Final = RowOptions()
LOCAL_ROWS: Final = LocalRowOptions()
Work = Callable[["AsyncClient"], Awaitable[int | None]]


def with_client(options: Options, work: Work, *, sends: bool = False) -> int:
    """Connect, do the work, close the connection; print a `MoorageError` if one is raised. Returns the exit code.

    `sends` says that the work submits or changes something: it then waits as long as a takeover takes, unless told
    otherwise. A fleet that is not named and not of this folder is read, and never changed.
    """

    def act() -> int | None:
        from moorage.cli.framework.interrupts import run

        return run(_connected(options, work, sends=sends))

    return guarded(options, act)


def guarded(options: LocalOptions | LedgerOptions | Options, act: Callable[[], int | None]) -> int:
    """Run the act, and print a `MoorageError` that it raises. Returns the exit code; other errors pass."""
    console.choose_colour(options.color or "auto")
    console.choose_quiet(options.quiet)
    if isinstance(options, Options):
        console.choose_here(options.nats, options.tenant)
    try:
        _refuse_empty(options)
        console.choose_colour(options.settled().color or "auto")
        return act() or 0
    except MoorageError as error:
        if error.code == "permission-refused" and isinstance(options, Options):
            error = _refused(options, error)
        if error.code == "no-scheduler" and isinstance(options, Options):
            error = _unanswered(error, *whose_key(options))
        return fail(error, json=options.json)


def _refuse_empty(options: LocalOptions | LedgerOptions | Options) -> None:
    """Raise `Rejected` for an option that names where a command goes and is empty, as with a variable that is not set.

    It would take the default, which is another fleet or tenant.
    """
    for name in ("nats", "tenant", "inbox_prefix", "timeout"):
        if getattr(options, name, None) == "":
            from moorage.client.errors import rejected

            option = f"--{name.replace('_', '-')}"
            raise rejected("invalid-argument", f"{option} is empty", next=f"name what it takes, or leave {option} out")


_OPERATORS: Final = "an operator's: --nats operator.NAME"
#: the roles of `nats-config` that are no tenant's, and whose key that is
_NO_TENANTS: Final = {
    "operator": "an operator's",
    "observer": "an observer's",
    "worker": "a worker's",
    "scheduler": "a scheduler's",
    "service": "a service's",
}
#: whose key a subject takes, by the first of its words that is here
_WHOSE: Final = {
    **dict.fromkeys(("api", "log", "event", "events", "call", "request", "tty"), "a tenant's: --nats submitter.TENANT"),
    **dict.fromkeys(("admin", "fleet", "hello", "load"), _OPERATORS),
}


def _refused(options: Options, error: MoorageError) -> MoorageError:
    """Return a refusal of NATS with advice for this command. NATS does not say to which user a key belongs."""
    import msgspec

    from moorage.client.errors import NotPermitted
    from moorage.client.tenant import TENANT_DEFAULT, TENANT_VARIABLE, named_tenant
    from moorage.schemas.roles import RIGHTS_ANEW
    from moorage.schemas.subjects import FLEET

    told = error.problem
    if told.next == RIGHTS_ANEW:  # the key's role may do this
        return error
    subject = told.message.rpartition(" ")[2]
    role, name = whose_key(options)
    parts = subject.split(".")
    takes = _OPERATORS if parts[-1] == FLEET else next((_WHOSE[word] for word in parts if word in _WHOSE), "")
    if role in _NO_TENANTS and takes and (role, takes) != ("operator", _OPERATORS):
        seen = ("moorage fleet --watch: what an observer may see of it",) if subject.endswith(".fleet") else ()
        said = f"this key is {_NO_TENANTS[role]}, and this takes {takes}"
        return NotPermitted(msgspec.structs.replace(told, next=said), seen if role == "observer" else ())
    if not named_tenant(options.settled().tenant) and TENANT_DEFAULT in parts:
        return NotPermitted(
            msgspec.structs.replace(told, next=f"name your tenant: --tenant NAME, or {TENANT_VARIABLE}")
        )
    if role == "submitter" and subject.lower().startswith("$js."):  # NATS tells subjects in lower case
        said = (
            "files and results want a right of their own: those who run this fleet give it with"
            " moorage admin nats-config, without --shared and --no-results"
        )
        return NotPermitted(msgspec.structs.replace(told, next=said))
    if role == "submitter" and ".api." in subject and name != parts[-2]:
        return NotPermitted(msgspec.structs.replace(told, next=f"this key is tenant {name}'s: --tenant {name}"))
    if role == "submitter" and subject.endswith(".exec"):
        said = (
            f"tenant {name} may run no commands in its jobs: those who run this fleet give that right with"
            f" moorage admin nats-config --exec {name}"
        )
        return NotPermitted(msgspec.structs.replace(told, next=said))
    if role == "submitter" and takes == _OPERATORS:
        said = f"this key is tenant {name}'s, and this takes an operator's: ask those who run this fleet"
        return NotPermitted(msgspec.structs.replace(told, next=said))
    if ".admin." in subject and subject.endswith(".fleet"):
        return NotPermitted(told, ("moorage fleet --watch: what an observer may see of it",))
    return error


def _unanswered(error: MoorageError, role: str, name: str) -> MoorageError:
    """Return the error with advice for a user who can start no scheduler: the key is a tenant's or an observer's."""
    from moorage.client.errors import NoScheduler

    if role not in ("submitter", "observer"):
        return error
    fixes = (
        "tell those who run this fleet that no scheduler answers, and send the same again then",
        "or see what this key can see: moorage doctor",
    )
    return NoScheduler(error.problem, fixes)


def whose_key(options: Options) -> tuple[str, str]:
    """Return the role and the name of the key in use, as `whose` does."""
    from moorage.bus.target import find_context
    from moorage.client.tenant import whose

    try:
        return whose(find_context(options.settled().nats).inbox_prefix)
    except MoorageError:
        return "", ""


async def _connected(options: Options, work: Work, *, sends: bool) -> int | None:
    client = client_of(options, sends=sends)
    client._wire.reads_found = True
    async with client:
        if sends:
            client._wire.refuse_found()  # before files are stored
        if (found := client._wire.found) is not None:
            console.print_err(f"using the moorage up of {found.folder}; to name it: --nats {found.up.url}")
        return await work(client)


def client_of(options: Options, *, sends: bool = False) -> AsyncClient:
    """Return the client that these options describe, not yet open; `sends` as in `with_client`. Raises `Rejected`."""
    from moorage.bus.call_key import prefix_of_job
    from moorage.client.client import AsyncClient
    from moorage.client.durations import seconds
    from moorage.client.patience import through_takeover
    from moorage.schemas.subjects import PREFIX_DEFAULT

    options = options.settled()
    if isinstance(options.nats, Again):
        from moorage.client.errors import rejected

        raise rejected(
            "invalid-argument", "this asks one fleet, and --nats names several", found=" ".join(options.nats.all),
            next="give --nats once; moorage fleet, ls, usage, submit and top take several fleets",
        )  # fmt: skip
    timeout = options.timeout or TIMEOUT_DEFAULT
    told = set[str]()

    def on_wait() -> None:
        put_off = client._wire.put_off
        code = "" if put_off is None else put_off.code
        if code not in told:
            told.add(code)
            why = f"not now, {code}: {put_off.message}" if put_off is not None else "no scheduler answers yet"
            if sends and put_off is None:
                why += f": `{client._wire.asked}` was sent at {client._wire.server_at}"
            if code != "not-authorized":  # that ends it
                why += f"; this command asks again for up to {client._wire.timeout_s:g}s"
            console.print_err(why)

    client = AsyncClient(
        options.nats,
        tenant=options.tenant,
        prefix=prefix_of_job(os.environ) or PREFIX_DEFAULT,
        timeout=timeout,
        connect_timeout=min(seconds(timeout), CONNECT_TIMEOUT_S_MAX),
        name="moorage command",
        on_wait=on_wait,
        inbox_prefix=options.inbox_prefix,
    )
    client._logs_warnings = False
    if sends and not options.timeout:
        client._wire.patience = through_takeover
    return client
