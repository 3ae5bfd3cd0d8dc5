"""Tells what changes would have done to waits, from several shaken copies of a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moorage.cli.fleet.playing import ALL, Played, as_row, compared, configs_of
from moorage.cli.framework.console import emit, print_err, print_out
from moorage.cli.framework.render import table
from moorage.client.errors import rejected

if TYPE_CHECKING:
    from moorage.scheduler.core.events import Order
    from moorage.testing.simulate.shaken import Effect


def shaken(
    count: int,
    was: Played,
    now: Played,
    edits: str,
    runs: list[dict[str, str]],
    orders: list[Order],
    until_ms: int | None,
    *,
    as_json: bool,
) -> int:
    """Compare `was` under the first of the settings with `now`, which `edits` describes, and with each other one."""
    from moorage.testing.simulate.shaken import Side

    configs = configs_of(runs)
    sides: dict[str, Side] = {}
    before = Side(was.hosts, was.jobs, was.events, configs[0])
    for number, (run, config) in enumerate(zip(runs, configs, strict=True)):
        if number or edits:
            several = " ".join(f"{key}={value}" for key, value in run.items()) if len(runs) > 1 else ""
            name = " ".join(filter(None, (edits, several)))
            sides[name] = Side(now.hosts, now.jobs, now.events, config, orders)
    if not sides:
        raise rejected(
            "invalid-argument", "--shake has nothing to compare the trace with", allowed="one run with a change",
            next="change something: --add, --without, --quota, --share, or two values of --set or --ranker",
        )  # fmt: skip
    found = compared(count, before, sides, until_ms)
    whole = len(next(iter(found.values()))[0].then_h) if any(found.values()) else 0
    if as_json:
        for name, effects in found.items():
            for effect in effects:
                emit(as_row(name, effect))
        return 0
    print_effects([(name, effect) for name, effects in found.items() for effect in effects])
    print_err(
        f"mean waits of {whole} {'copy' if whole == 1 else 'copies'}: median (range); jobs that start in both, or"
    )
    print_err("that start in one, until the end of the other")
    return 0


def print_effects(rows: list[tuple[str, Effect]]) -> None:
    header = ["CHANGE", "JOBS OF", "JOBS", "WAIT MEAN"]
    cells = [[change, effect.tenant or ALL, effect.jobs, effect.told] for change, effect in rows]
    print_out(table(header, cells, numbers=("JOBS",)))
