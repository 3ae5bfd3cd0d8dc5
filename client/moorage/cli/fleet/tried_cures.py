"""`moorage usage --waits --try`: what one change against each cause would have done, on shaken copies of a trace."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import msgspec

from moorage.cli.fleet.playing import ALL, as_row, compared, configs_of, trace_of_ledger
from moorage.cli.fleet.usage_pages import all_pages
from moorage.cli.framework.console import emit, print_err, print_out
from moorage.cli.framework.options import guarded, with_client
from moorage.cli.framework.render import hours, table
from moorage.client.durations import seconds
from moorage.client.errors import rejected
from moorage.schemas.waited import WaitedAnswer, WaitedRow

if TYPE_CHECKING:
    from pathlib import Path

    from moorage.cli.framework.options import RowOptions
    from moorage.client.client import AsyncClient
    from moorage.testing.simulate.trace import Trace

COPIES: Final = 5
_HOUR_S: Final = 3600


def try_cures(trace: Path, since: str, options: RowOptions, *, of_all: bool) -> int:
    """Print what one change against each cause of waits would have done to the jobs of a trace from the ledger."""
    asked = {"since_s": seconds(since), "by": ["cause", "tenant", "model"], "waits": True}
    told: list[WaitedRow] = []

    async def ask(client: AsyncClient) -> None:
        told.extend(msgspec.convert((await all_pages(client, asked, of_all=of_all)).data, WaitedAnswer).rows)

    def play() -> int | None:
        whole = trace_of_ledger(trace)
        if told and not {row.tenant for row in told} & {job.tenant for job in whole.jobs}:
            raise rejected(
                "invalid-argument", f"{trace} has no job of a tenant whose jobs waited", found=whole.jobs[0].tenant,
                next="write the trace without --anonymous, of the same fleet",
            )  # fmt: skip
        _print(trace.name, told, _tried(told, whole), options)
        return None

    return with_client(options, ask) or guarded(options, play)


def _tried(told: list[WaitedRow], whole: Trace) -> list[dict[str, Any]]:
    """Return a row for each change against a cause: of the tenant that it is about, else of all jobs."""
    from moorage.testing.simulate.shaken import Side
    from moorage.testing.simulate.tried import changes_for

    held = {str(key): str(value) for key, value in whole.head.get("settings", {}).items()}
    tried = changes_for(told, whole.jobs, whole.events, held)
    if not tried:
        return []
    base, *changed = configs_of([held, *(dict(each.settings or held) for each in tried)])
    before = Side([], whole.jobs, whole.events, base)
    sides = {each.change: Side([], each.jobs, each.events, config) for each, config in zip(tried, changed, strict=True)}
    until = whole.head.get("until_s")
    found = compared(COPIES, before, sides, None if until is None else int(until * 1000))
    rows: list[dict[str, Any]] = []
    for each in tried:
        effects = found[each.change]
        chosen = next((one for one in effects if one.tenant == each.tenant), effects[0] if effects else None)
        if chosen is not None:
            rows.append({"cause": each.cause, **as_row(each.change, chosen)})
    return rows


def _print(name: str, told: list[WaitedRow], rows: list[dict[str, Any]], options: RowOptions) -> None:
    sums = Counter[str]()
    for waited in told:
        sums[waited.cause or ""] += int(waited.wait_s)
    if options.json:
        for row in rows:
            emit({**row, "cause_wait_s": sums[row["cause"]]})
        return
    if not rows:
        print_err("nothing to try: no cause of these waits has a change that a trace can play")
        return
    cells = [
        [row["cause"], hours(sums[row["cause"]] / _HOUR_S), row["change"], row["tenant"] or ALL, row["told"]]
        for row in rows
    ]
    print_out(table(["CAUSE", "WAIT-H", "TRIED", "JOBS OF", "WAIT MEAN"], cells, numbers=("WAIT-H",)))
    print_err(f"mean waits of {COPIES} copies of {name}: median (range); a change for each cause, none of them done")
