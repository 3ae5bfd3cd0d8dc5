"""`moorage usage --waits`: where waits went, by cause, tenant, model, week and holder."""

from __future__ import annotations

import csv as csv_files
import sys
from typing import TYPE_CHECKING, Final

import msgspec

from moorage.cli.fleet.usage_pages import all_pages
from moorage.cli.framework.console import print_err, print_out
from moorage.cli.framework.fleets import Table, are_several, show_each
from moorage.cli.framework.options import RowOptions, with_client
from moorage.cli.framework.render import hours, utc
from moorage.client.durations import seconds
from moorage.schemas.answers.operators import PromiseRow, PromisesAnswer
from moorage.schemas.units import many
from moorage.schemas.waited import MEANS, WaitedAnswer, WaitedRow

if TYPE_CHECKING:
    from pathlib import Path

    from moorage.client.client import AsyncClient
    from moorage.schemas.frames import Answer

WAITS_BY_DEFAULT: Final = "cause"
SUMS: Final = ("wait_s", "gpu_s", "jobs")
_HOUR_S: Final = 3600


def waited_usage(
    since: str, by: str, options: RowOptions, *, of_all: bool, csv: bool, trace: Path | None = None
) -> int:
    words = [word.strip() for word in by.split(",")]
    if trace is not None:
        from moorage.cli.fleet.tried_cures import try_cures

        return try_cures(trace, since, options, of_all=of_all)

    async def ask(client: AsyncClient) -> Answer:
        return await all_pages(client, {"since_s": seconds(since), "by": words, "waits": True}, of_all=of_all)

    async def work(client: AsyncClient) -> None:
        answer = await ask(client)
        told = msgspec.convert(answer.data, WaitedAnswer)
        rows = in_order(words, told.rows)
        if csv:
            writer = csv_files.writer(sys.stdout, lineterminator="\n")
            writer.writerow([*words, *SUMS])
            writer.writerows([*_names(words, row), *(getattr(row, name) for name in SUMS)] for row in rows)
        elif not options.shown(answer, rows):
            if rows:
                print_out(str(_table(words, rows)))
            else:
                print_err(f"nothing has waited since {utc(told.from_ms)}")
            print_err(f"since {utc(told.from_ms)}; a wait with several causes counts for the first that would do")
            for from_ms, until_ms in told.gaps:
                print_err(f"not counted: from {utc(from_ms)} to {utc(until_ms)}; moorage doctor says why")
            wire = client._wire
            kept = await (wire.operate if of_all else wire.answer)("usage", {"promises": True})
            if said := promised_words(msgspec.convert(kept.data, PromisesAnswer).rows):
                print_err(said)

    if are_several(options) and not csv:
        return show_each(
            options,
            ask,
            lambda answer: answer.data["rows"],
            lambda answer: _table(words, in_order(words, msgspec.convert(answer.data, WaitedAnswer).rows)),
        )
    return with_client(options, work)


def promised_words(rows: list[PromiseRow]) -> str:
    """Return how many promised starts were kept, and of how many long waits there was a promise; "" for none."""
    kept, missed = sum(row.kept for row in rows), sum(row.missed for row in rows)
    told = kept + missed + sum(row.void for row in rows)
    if not (waits := told + sum(row.not_told for row in rows)):
        return ""
    return (
        f"starts promised in this leader's term: {kept} of {kept + missed} kept (9 of 10 asked);"
        f" {told} of {many(waits, 'long wait')} had a promise"
    )


def in_order(words: list[str], rows: list[WaitedRow]) -> list[WaitedRow]:
    """Return rows by week, and in a week the longest waits first."""
    return sorted(rows, key=lambda row: (row.week_ms or 0, -row.wait_s))


def _names(words: list[str], row: WaitedRow) -> list[str]:
    parts = {
        "tenant": row.tenant,
        "model": row.model,
        "week": None if row.week_ms is None else utc(row.week_ms).split("T")[0],
        "cause": row.cause,
        "holder": row.holder,
    }
    return [parts[word] or "" for word in words]


def _table(words: list[str], rows: list[WaitedRow]) -> Table:
    header = [*map(str.upper, words), "WAIT-H", "GPU-H", "JOBS", *(["MEANS"] if "cause" in words else [])]
    cells = [
        [
            *_names(words, row),
            hours(row.wait_s / _HOUR_S),
            hours(row.gpu_s / _HOUR_S),
            str(row.jobs),
            *([MEANS.get(row.cause or "", "")] if "cause" in words else []),
        ]
        for row in rows
    ]
    shortened = [name for name in ("MEANS", "MODEL", "TENANT", "HOLDER") if name in header]
    return Table(header, cells, ["WAIT-H", "GPU-H", "JOBS"], ("MEANS", "JOBS"), shortened)
