"""`moorage schedule`: requests that are submitted again and again, by the clock of nats-server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

import msgspec

from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.console import here, print_err, print_out
from moorage.cli.framework.options import ROWS, RowOptions, guarded, with_client
from moorage.cli.framework.render import facts, table, utc
from moorage.cli.jobs.asked_rows import asked_rows
from moorage.cli.jobs.asked_rows import words as command_words
from moorage.cli.jobs.bringing import with_files
from moorage.cli.jobs.from_shell import own_program
from moorage.cli.jobs.job_flags import NO_FLAGS, JobFlags, offered, request_of
from moorage.cli.jobs.sweep_flags import sweep_of
from moorage.client.errors import rejected
from moorage.client.schedules import lacks_files
from moorage.schemas.units import many

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient
    from moorage.schemas.schedules import ScheduleRow

#: a run that came so much later than it was due was made up after an outage
LATE_MS: Final = 10_000
_OVERLAPS: Final = {
    "skip": "a run is left out while the last one goes on",
    "queue": "a run starts behind all before it",
}

_Name: TypeAlias = Annotated[
    str, Parameter(help="The schedule, as moorage schedule ls shows it.", lists="schedule ls --format {name}")
]


def add(
    name: Annotated[
        str,
        Parameter(
            help="Its name; each run is a job NAME-NUMBER with the label schedule=NAME. The numbers grow with gaps, as "
            "all schedules share one count."
        ),
    ],
    /,
    *command: Annotated[str, Parameter(help="What to run, after --.", command=True)],
    cron: Annotated[
        str,
        Parameter(
            help="When: '0 3 * * *' is each day at three, '30 9 * * MON-FRI' each working day; or @hourly, @daily, "
            "@every 90s. With six fields, the first has the seconds.",
            value="WHEN",
        ),
    ],
    tz: Annotated[str, Parameter(help="The time zone of --cron, as Europe/Berlin. Default: UTC.", value="ZONE")] = "",
    overlap: Annotated[
        Literal["skip", "queue"],
        Parameter(help="What to do with a run while the last one goes on: leave it out, or start it behind that."),
    ] = "skip",
    flags: JobFlags = NO_FLAGS,
    options: RowOptions = ROWS,
) -> int:
    """Submit a job again and again, at the times of --cron; returns once the schedule is in the ledger.

    nats-server (2.14 or newer) counts the time, so no client has to run. If servers or schedulers were down, one run is
    made up afterwards, whatever the number of those that were missed.
    """

    def act() -> int:
        for given, option, fix in (
            (flags.job, "--job", "leave it out: each run has an id of its own"),
            (flags.if_seq, "--if-seq", "leave it out: it is about one moment of the ledger"),
            (flags.at, "--at", "leave it out: --cron says when a run is made"),
            (flags.after, "--after", "leave it out: a job that it names is forgotten some day, and no run would start"),
        ):
            if given is not None:
                raise rejected("invalid-argument", f"a schedule takes no {option}", field=option, next=fix)
        sweep = sweep_of(flags, command)
        words = own_program(command, flags.driver, flags.setup)
        request = request_of(flags, words, sweep)

        async def work(client: AsyncClient) -> int | None:
            plain = await offered(client.plan, flags, words, request, sweep)
            chosen = await with_files(client, flags.with_, plain, sweep, data=flags.data, of_schedule=True)
            row = await client.schedules.add_request(name, cron, chosen, tz=tz, overlap=overlap)
            if await lacks_files(client._wire, chosen):
                await with_files(client, flags.with_, plain, sweep, data=flags.data, of_schedule=True)
            if not options.shown(_frame(row), [row]):
                print_out(name)
                word = f"{name}{here()}"
                print_err(f"its runs: moorage schedule show {word}; one at once: moorage schedule run-now {word}")
            return None

        return with_client(options, work, sends=True)

    return guarded(options, act)


def ls(*, options: RowOptions = ROWS) -> int:
    """List the tenant's schedules: when they run, and what became of the newest run."""

    async def work(client: AsyncClient) -> int | None:
        rows = await client.schedules.ls()
        if options.shown({"kind": "answer", "verb": "schedule", "data": {"schedules": rows}}, rows):
            return None
        if not rows:
            print_err("no schedules; moorage schedule add NAME --cron '0 3 * * *' -- COMMAND adds one")
            return None
        cells = [
            [row.name, row.cron, row.tz or "UTC", _next(row), row.job or "-", row.state or "-", row.runs, row.skipped]
            for row in rows
        ]
        header = ["NAME", "CRON", "ZONE", "NEXT", "LAST JOB", "STATE", "RUNS", "LEFT OUT"]
        print_out(table(header, cells, numbers=("RUNS", "LEFT OUT")))
        return None

    return with_client(options, work)


def show(name: _Name, /, *, options: RowOptions = ROWS) -> int:
    """Show a schedule: when it runs, what it runs, and what became of the newest run."""

    async def work(client: AsyncClient) -> int | None:
        row = await client.schedules.show(name)
        if options.shown(_frame(row), [row]):
            return None
        from moorage.client.brought import brought
        from moorage.schemas.actors import words

        run, next_ = (row.request or {}).get("run", {}), _next(row)
        files = await brought(client._wire, run)
        late_ms = row.last_ms - row.due_ms if row.due_ms else 0
        made_up = f", made up: it was due {utc(row.due_ms)}" if late_ms >= LATE_MS else ""
        told = [
            ("schedule", row.name),
            ("cron", f"{row.cron} {row.tz or 'UTC'}{', paused' if row.paused else ''}"),
            ("runs", command_words(run.get("argv", ())) or run.get("driver", "")),
            ("overlap", f"{row.overlap}: {_OVERLAPS[row.overlap]}"),
            *asked_rows(row.request or {}, files),
            ("added", f"{utc(row.since_ms)} by {words(row.by, row.said)}"),
            (
                "next",
                f"not known: the scheduler's host lacks the time zone {row.tz}" if row.tz and next_ == "-" else next_,
            ),
            ("newest run", f"{utc(row.last_ms)}{made_up}" if row.last_ms else "none yet"),
            ("why no job", row.why),
            ("last job", f"{row.job} {row.state}".strip()),
            ("so far", f"{many(row.runs, 'job')}, {row.skipped} left out"),
        ]
        print_out(facts(told))
        if row.job:
            label = f"--label schedule={row.name}{here()}"
            print_err(f"its jobs: moorage ls {label}; all schedules share one count, so numbers have gaps")
        return None

    return with_client(options, work)


def pause(name: _Name, /, *, options: RowOptions = ROWS) -> int:
    """Make no more runs of a schedule until resume; jobs that run go on."""

    async def work(client: AsyncClient) -> int | None:
        row = await client.schedules.pause(name)
        if not options.shown(_frame(row), [row]):
            print_out(f"{name}\tpaused")
            print_err(f"undo: moorage schedule resume {name}{here()}")
        return None

    return with_client(options, work, sends=True)


def resume(name: _Name, /, *, options: RowOptions = ROWS) -> int:
    """Undo pause. Runs that were left out are not made up."""

    async def work(client: AsyncClient) -> int | None:
        row = await client.schedules.resume(name)
        if not options.shown(_frame(row), [row]):
            print_out(f"{name}\truns again")
        return None

    return with_client(options, work, sends=True)


def run_now(name: _Name, /, *, options: RowOptions = ROWS) -> int:
    """Make a run at once, also of a schedule that is paused. Prints the job's id.

    It is refused while the last run goes on, unless the schedule was added with --overlap queue.
    """

    async def work(client: AsyncClient) -> int | None:
        job = await client.schedules.run_now(name)
        row = {"name": name, "job": job.job}
        if not options.shown({"kind": "answer", "verb": "schedule", "data": row}, [row]):
            print_out(job.job)
        return None

    return with_client(options, work, sends=True)


def remove(name: _Name, /, *, options: RowOptions = ROWS) -> int:
    """Forget a schedule; the jobs that it made are not touched."""

    async def work(client: AsyncClient) -> int | None:
        row = await client.schedules.remove(name)
        if not options.shown(_frame(row), [row]):
            print_out(f"{name}\tremoved")
        return None

    return with_client(options, work, sends=True)


def _frame(row: ScheduleRow) -> dict[str, Any]:
    """Return one schedule as `--json` has it."""
    return {"kind": "schedule", **msgspec.to_builtins(row)}


def _next(row: ScheduleRow) -> str:
    """Return when the next run is due, in UTC, in the words of the list."""
    if row.paused:
        return "paused"
    if not row.next_ms:
        return "-"
    return utc(row.next_ms)
