"""`moorage usage`: GPU time and memory by tenant, person, model, hour and day; and where waits went, by cause."""

from __future__ import annotations

import csv as csv_files
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec

from moorage.cli.fleet.usage_pages import all_pages
from moorage.cli.fleet.waited_usage import WAITS_BY_DEFAULT, waited_usage
from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.console import print_err, print_out
from moorage.cli.framework.fleets import Table, are_several, show_each
from moorage.cli.framework.options import ROWS, RowOptions, with_client
from moorage.cli.framework.render import utc
from moorage.client.durations import seconds
from moorage.client.errors import rejected
from moorage.schemas.answers.operators import UsageAnswer, UsageRow
from moorage.schemas.units import many

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient
    from moorage.schemas.frames import Answer
    from moorage.schemas.operate import Limit

SINCE_DEFAULT: Final = "7d"
BY_DEFAULT: Final = "tenant,model"
SECONDS: Final = ("gpu_s", "memory_mib_s", "used_gpu_s", "used_memory_mib_s")
HOUR: Final = "hour"
DAY: Final = "day"
_HOUR_S: Final = 3600
_DAY_MS: Final = 24 * _HOUR_S * 1000
_MIB: Final = 1024


def usage(
    *,
    since: Annotated[str, Parameter(help="How far back to begin, in whole hours.", value="DURATION")] = SINCE_DEFAULT,
    by: Annotated[
        str | None,
        Parameter(
            help="Some of tenant, person, model, hour or day, to sum by; by default tenant,model, of waits cause.",
            value="WORDS",
        ),
    ] = None,
    waits: Annotated[
        bool, Parameter(help="Where waits went instead: --by takes some of tenant, model, week, cause, holder.")
    ] = False,
    try_: Annotated[
        Path | None,
        Parameter(
            help="With --waits: what one change against each cause would have done, on copies of this trace from the "
            "ledger.",
            names=("--try",),
            value="TRACE",
        ),
    ] = None,
    all: Annotated[bool, Parameter(help="All tenants; it needs an operator's key.")] = False,
    csv: Annotated[bool, Parameter(help="Rows with a header, in seconds and MiB, for a spreadsheet.")] = False,
    options: RowOptions = ROWS,
) -> int:
    """Show the GPU time and memory that jobs were granted, and what they used of it, in whole hours of UTC.

    Granted is from a placement to the end of the attempt, for each GPU; a sharer counts by its share. Used is what
    the worker measured, once an attempt is over. Kept are 80,000 sums, each of one hour, tenant, person and model; the
    oldest go first. A person is who submitted the job, where tenants have a key for each person. With --all it also
    says what the fleet, with the GPUs that it has now, could have granted; of each hour or day, if it sums by these.

    With --waits it is where waits went, in whole weeks of UTC: hours that replicas waited, a gang as one, and the same
    for each GPU that they asked for. Of causes that hold at once, the first alone counts. --try plays five copies of a
    trace, in which each job comes up to a minute sooner or later, with and without a change: a longer limit, more
    hosts, another setting.
    """
    if waits:
        return waited_usage(since, WAITS_BY_DEFAULT if by is None else by, options, of_all=all, csv=csv, trace=try_)
    if try_ is not None:
        raise rejected(
            "invalid-argument", "--try changes what jobs waited for", next="moorage usage --waits --try TRACE"
        )

    async def ask(client: AsyncClient) -> Answer:
        asked = {"since_s": seconds(since), "by": [HOUR if word == DAY else word for word in words]}
        answer = await all_pages(client, asked, of_all=all)
        if DAY in words:
            answer.data["rows"] = by_days(answer.data["rows"])
        return answer

    async def work(client: AsyncClient) -> None:
        answer = await ask(client)
        told = msgspec.convert(answer.data, UsageAnswer)
        rows = told.rows
        if csv:
            _write_csv(words, rows)
        elif not options.shown(answer, rows):
            gpus = sum(each.gpus for each in (await client.fleet.show()).fits_now) if all and rows else 0
            _show(words, rows, told.from_ms, gpus)
            if gpus:
                print_err(_capacity(told, gpus))
            if told.limit is not None and told.limit.gpu_hours:
                print_err(_budget(told.limit))
            for from_ms, until_ms in told.gaps:
                if [from_ms, until_ms] in told.restores:
                    before = f"up to {utc(from_ms)} before it, and " if from_ms else ""  # 0: nothing is known of before
                    print_err(f"a restore: counted {before}from {utc(until_ms)} on behind it")
                else:
                    print_err(f"not counted: from {utc(from_ms)} to {utc(until_ms)}; moorage doctor says why")

    words = [word.strip() for word in (BY_DEFAULT if by is None else by).split(",")]
    if {DAY, HOUR} <= set(words):
        why = "--by takes hour or day, not both: each hour is of one day"
        raise rejected("invalid-argument", why, found=by or "", next="leave one of them out")
    if are_several(options) and not csv:
        return show_each(
            options,
            ask,
            lambda answer: answer.data["rows"],
            lambda answer: _table(words, msgspec.convert(answer.data, UsageAnswer).rows),
        )
    return with_client(options, work)


def by_days(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of hours summed by days of UTC: `hour_ms` is then that of the day's first hour."""
    sums: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        day = {**row, "hour_ms": row["hour_ms"] // _DAY_MS * _DAY_MS}
        held = sums.setdefault(tuple(value for name, value in day.items() if name not in SECONDS), day)
        if held is not day:
            held.update({name: held[name] + day[name] for name in SECONDS})
    return list(sums.values())


def _capacity(told: UsageAnswer, gpus: int) -> str:
    """Return what the fleet could have granted since, with the GPUs that it has now, and how much it has."""
    hours = gpus * max(told.until_ms - told.from_ms, 1) / 1000 / _HOUR_S
    granted = sum(row.gpu_s for row in told.rows) / _HOUR_S
    percent = 100 * granted / hours
    return f"the fleet has {many(gpus, 'GPU')} now: {hours:,.1f} GPU-hours since then, {percent:.1f} % granted"


def weights_of(limit: Limit) -> list[str]:
    """Return what GPUs of models count in a budget, as `L4 counts 0.2`."""
    return [f"{model} counts {weight:g}" for model, weight in sorted(limit.gpu_weights.items())]


def _budget(limit: Limit) -> str:
    """Return what is spent of a budget; a warning from four fifths on."""
    percent = 100 * limit.spent_hours / limit.gpu_hours
    said = (
        f"{limit.spent_hours:,.1f} of {limit.gpu_hours:,.6g} GPU-hours of this {limit.period} ({percent:.0f} %) spent"
    )
    said += "".join(f"; {words}" for words in weights_of(limit))
    return f"warning[budget]: {said}" if percent >= 80 else said


def _write_csv(by: list[str], rows: list[UsageRow]) -> None:
    writer = csv_files.writer(sys.stdout, lineterminator="\n")
    writer.writerow([*by, *SECONDS])
    writer.writerows([*_names(by, row), *(getattr(row, name) for name in SECONDS)] for row in rows)


def _names(by: list[str], row: UsageRow) -> list[str]:
    hour = None if row.hour_ms is None else utc(row.hour_ms)
    parts = {
        "tenant": row.tenant,
        "person": row.person,
        "model": row.model,
        HOUR: hour,
        DAY: (hour or "").split("T")[0],
    }
    return [parts[word] or "" for word in by]


def _show(by: list[str], rows: list[UsageRow], from_ms: int, gpus: int = 0) -> None:
    if not rows:
        print_err(f"no GPU time has been counted since {utc(from_ms)}")
        return
    print_out(str(_table(by, rows, gpus)))
    print_err(f"since {utc(from_ms)}")


def _table(by: list[str], rows: list[UsageRow], gpus: int = 0) -> Table:
    """Return the rows as a table; with a fleet's `gpus`, also what it could grant in the hour or day of a row."""
    row_hours = gpus * (24 if DAY in by else 1 if HOUR in by else 0)
    capacity = [f"{row_hours:.1f}"] if row_hours else []
    header = [*map(str.upper, by), "GPU-H", *(["FLEET-GPU-H"] if capacity else []), "GIB-H", "USED-GPU-H", "USED-GIB-H"]
    cells = [
        [
            *_names(by, row),
            f"{row.gpu_s / _HOUR_S:.2f}",
            *capacity,
            f"{row.memory_mib_s / _MIB / _HOUR_S:.1f}",
            f"{row.used_gpu_s / _HOUR_S:.2f}",
            f"{row.used_memory_mib_s / _MIB / _HOUR_S:.1f}",
        ]
        for row in rows
    ]
    shortened = [name for name in ("MODEL", "PERSON", "TENANT") if name in header]
    return Table(header, cells, header[len(by) :], ("GIB-H", "USED-GPU-H"), shortened)
