"""`moorage services` and `moorage rollback`: live services, how their calls do, and the version before."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

from msgspec import convert, json, to_builtins

from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.console import print_err, print_out
from moorage.cli.framework.options import DEFAULTS, ROWS, Options, RowOptions, guarded, with_client
from moorage.cli.framework.render import age, table, utc
from moorage.cli.framework.wrapping import folded
from moorage.client.errors import ClientError, not_found, read_answer, rejected
from moorage.schemas.answers.jobs import ServiceRow, ServicesAnswer, ServiceUse
from moorage.schemas.codec import encode
from moorage.schemas.service import CALL_MS, Found, Sought
from moorage.schemas.subjects import asked_of

if TYPE_CHECKING:
    from moorage.bus.transport import Delivery
    from moorage.client.client import AsyncClient

#: services that an error names
NAMED_MAX: Final = 20
#: longest silence before the answer of a member, in seconds, and the calls that are shown
MEMBERS_S: Final = 1.0
SLOWEST_SHOWN: Final = 100

_decode_found: Final = json.Decoder(Found).decode


def services(
    name: Annotated[str | None, Parameter(help="Only this service, with its versions and what lacks.")] = None,
    /,
    *,
    slow: Annotated[
        bool, Parameter(help="The slowest calls of the last hour of this service, as its members know them.")
    ] = False,
    options: RowOptions = ROWS,
) -> int:
    """Show the live services: who answers, and the calls of about the last minute.

    WAITED and RAN are what half of the calls and 19 of 20 needed at most, in classes of time. A service has two
    versions while one job replaces another. What is told of calls is what the leader has heard of members since it
    leads. With --slow the members are asked, each of which keeps its hundred slowest calls in memory.
    """

    async def work(client: AsyncClient) -> int | None:
        if slow:
            await _slowest(client, name or "", options)
            return None
        answer = await client._wire.answer("services", {})
        rows = convert(answer.data, ServicesAnswer).services
        if name is not None:
            row = _named(rows, name, client.tenant)
            answer.data["services"] = [each for each in answer.data["services"] if each["service"] == name]
            if not options.shown(answer, answer.data["services"]):
                await _one(client, row)
        elif not options.shown(answer, answer.data["services"]):
            print_out(_table(rows) if rows else "no service of this tenant is live")
        return None

    def act() -> int:
        if slow and name is None:
            why = "--slow is about one service"
            raise rejected("invalid-argument", why, field="--slow", next="moorage services NAME --slow")
        return with_client(options, work)

    return guarded(options, act)


def rollback(
    service: Annotated[str, Parameter(help="The service whose version before takes its place again.")],
    /,
    *,
    job: Annotated[str | None, Parameter(help="The new job's id; JOB-again-1, -2, … by default.", value="ID")] = None,
    options: Options = DEFAULTS,
) -> int:
    """Submit the request of a service's version before, in place of the one that serves.

    It is a rollout as any other: members of the next version take over one by one, and no call is lost. The version
    before is the job that the live one has replaced; its request is kept as long as that job is. A second rollback
    leads back again. While one version still replaces another, cancel the newer one instead.
    """

    async def work(client: AsyncClient) -> int | None:
        row = _named((await _answer(client)).services, service, client.tenant)
        if len(row.versions) > 1:
            raise rejected(
                "failed-precondition",
                f"the service {service} has two versions: job {row.versions[-1].job} still replaces "
                f"{row.versions[0].job}",
                found=row.versions[-1].job,
                next=f"moorage cancel {row.versions[-1].job}: then {row.versions[0].job} serves alone again",
            )
        shown = await client.job(row.job).show()
        before = shown.request.instead_of if shown.request is not None else None
        if not before:
            raise rejected(
                "failed-precondition",
                f"job {row.job} of the service {service} has replaced no other job",
                found=row.job,
                next=f"submit another version with --instead-of {row.job}",
            )
        made = await client.job(before).again(job=job, instead_of=row.job)
        print_out(made.job)
        print_err(f"the version of job {before} takes the place of {row.job}: moorage services {service}")
        return None

    return with_client(options, work, sends=True)


async def _slowest(client: AsyncClient, name: str, options: RowOptions) -> None:
    """Ask the members of a service for their slowest calls, and print those of all."""
    from moorage.bus.errors import NoResponders, RequestTimeout

    row = _named((await _answer(client)).services, name, client.tenant)
    expected = row.use.members if row.use is not None else 0
    found: list[Found] = []

    def is_last(delivery: Delivery) -> bool:
        found.append(_decode_found(delivery.data))
        return len(found) == expected

    link, subject = client._wire.link, client._wire.subjects.call(client.tenant, row.service)
    with contextlib.suppress(NoResponders, RequestTimeout):  # some may have ended meanwhile
        await link.request_many(asked_of(subject), encode(Sought([], all=True, slow=True)), MEMBERS_S, is_last)
    calls = [(each.member, call) for each in found for call in each.slow]
    calls.sort(key=lambda call: -(call[1].waited_ms + call[1].ran_ms))
    rows = [{"member": member, **to_builtins(call)} for member, call in calls[:SLOWEST_SHOWN]]
    if options.shown({"kind": "answer", "verb": "services", "data": {"slow": rows}}, rows):
        return
    cells = [
        [
            utc(call.at_ms), call.waited_ms, call.ran_ms, call.data_bytes, call.answer_bytes,
            call.code or "", call.endpoint, member, call.trace,
        ]
        for member, call in calls[:SLOWEST_SHOWN]
    ]  # fmt: skip
    columns = ["ENDED", "WAITED MS", "RAN MS", "DATA", "ANSWER", "CODE", "METHOD", "MEMBER", "TRACE"]
    if cells:
        print_out(
            table(
                columns, cells, numbers=("WAITED MS", "RAN MS", "DATA", "ANSWER"), optional=("CODE", "METHOD", "TRACE")
            )
        )
    else:
        print_out(f"no call of {row.service} has ended in the last hour at the members that are here")


async def versions_of(client: AsyncClient, service: str) -> list[str]:
    """Return the live jobs of a service, the oldest first. Raises `NotFound`."""
    return [each.job for each in _named((await _answer(client)).services, service, client.tenant).versions]


async def newest_of(client: AsyncClient, service: str) -> str:
    """Return the newest live job of a service; "" if no job has it, or nobody says."""
    try:
        rows = (await _answer(client)).services
    except ClientError:
        return ""
    return next((row.job for row in rows if row.service == service), "")


async def _answer(client: AsyncClient) -> ServicesAnswer:
    return read_answer(await client._wire.read("services", {}), ServicesAnswer)


def _named(rows: Sequence[ServiceRow], name: str, tenant: str) -> ServiceRow:
    """Return the row of a service; also by the id of a job of it. Raises `NotFound`."""
    for row in rows:
        if row.service == name:
            return row
    meant = next((row.service for row in rows if any(each.job == name for each in row.versions)), None)
    there = ", ".join(row.service for row in rows[:NAMED_MAX])
    raise not_found(
        f"{name} is a job; its service is {meant}"
        if meant
        else f"no live service {name or repr(name)} of tenant {tenant}",
        found=name,
        next=f"moorage services {meant}" if meant else (f"name one of {there}" if there else "moorage services"),
    )


def _table(rows: Sequence[ServiceRow]) -> str:
    cells = []
    for row in rows:
        use = row.use or ServiceUse()
        ready, members = sum(each.ready for each in row.versions), row.versions[-1].members if row.versions else 0
        versions = " → ".join(each.job for each in row.versions) or row.job
        cells.append([
            row.service, versions, f"{ready} of {members}", f"{use.running} of {use.places}", use.waiting, use.calls,
            sum(use.errors.values()), _both(use.waited_ms), _both(use.ran_ms),
        ])  # fmt: skip
    columns = ["SERVICE", "JOB", "READY", "BUSY", "WAITING", "CALLS/MIN", "ERRORS", "WAITED", "RAN"]
    return table(columns, cells, numbers=("WAITING", "CALLS/MIN", "ERRORS"))


def _both(bounds: Sequence[int | None]) -> str:
    """Return the times of half of the calls and of nearly all: `≤5ms ≤50ms`; "" without calls."""
    if not any(bound != 0 for bound in bounds):
        return ""
    return " ".join(f">{age(CALL_MS[-1])}" if bound is None else f"≤{age(bound)}" for bound in bounds)


async def _one(client: AsyncClient, row: ServiceRow) -> None:
    print_out(_table([row]))
    cells: list[list[Any]] = [
        [each.job, each.label, f"{each.ready} of {each.members}", each.running, utc(each.accepted_ms)]
        for each in row.versions
    ]
    print_out(table(["VERSION", "LABEL", "READY", "RUNNING", "ACCEPTED"], cells, numbers=("RUNNING",)))
    use = row.use or ServiceUse()
    if use.errors:
        print_out("errors: " + ", ".join(f"{number} with {code}" for code, number in sorted(use.errors.items())))
    if use.last_error:
        print_out(f"last error: {use.last_error}")
    newest = row.versions[-1] if row.versions else None
    if newest is not None and newest.ready < newest.members:
        try:
            told = await client._wire.explain(newest.job)
        except ClientError:  # it has ended meanwhile
            return
        if told.why or told.means:
            lacks = f"{newest.job} lacks {newest.members - newest.ready}: "
            print_err(folded(lacks + ": ".join(filter(None, (told.why or told.means, told.because))), sys.stderr))
