"""What verbs that play a trace have in common: its events, the settings of each run, copies, the progress."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import msgspec

from moorage.cli.framework.console import is_live
from moorage.cli.framework.files import cannot_read
from moorage.cli.framework.interrupts import raise_once
from moorage.client.errors import rejected

if TYPE_CHECKING:
    from moorage.scheduler.settings import SchedulerSettings
    from moorage.testing.simulate.shaken import Effect
    from moorage.testing.simulate.trace import SimHost, Trace, TraceEvent, TraceJob

PROGRESS_S: Final = 0.5
ERASED: Final = "\r\x1b[K"
#: stands for all tenants in a table
ALL: Final = "(all)"

Format = Literal["own", "csv", "philly", "openb"]


class Played(NamedTuple):
    """What is simulated: hosts from the beginning, jobs, and what happens beside; whether that is to be proven."""

    hosts: list[SimHost]
    jobs: list[TraceJob]
    events: list[TraceEvent]
    prove: bool


def events_of(path: Path, format: Format | None) -> Trace | None:
    """Return a trace in JSON lines with what it says beside its jobs; None for one in another format."""
    from moorage.testing.simulate.trace import read_whole

    try:
        with path.open("rb") as file:
            head = file.readline(256).decode("utf-8-sig", errors="replace").lstrip()
        return read_whole(path) if format in (None, "own") and head.startswith("{") else None
    except OSError as error:
        raise cannot_read(path, error.strerror, "name a trace") from None


def trace_of_ledger(path: Path) -> Trace:
    """Return a trace that `moorage admin trace` wrote, with what happened beside its jobs. Raises `Rejected`."""
    whole = events_of(path, None)
    if whole is None or not whole.events:
        raise rejected(
            "invalid-argument", f"{path} is no trace from a ledger", found=str(path),
            next="moorage admin trace FILE --since 7d writes one",
        )  # fmt: skip
    return whole


def configs_of(runs: list[dict[str, str]]) -> list[SchedulerSettings]:
    """Return the settings of each run. Raises `Rejected`."""
    from moorage.scheduler.core.config import Config
    from moorage.scheduler.settings import scheduler_settings
    from moorage.schemas.settings import declared

    flags = {key: f"--set {key}" for key in declared("scheduler", Config) if key != "ranker"}  # --ranker is one here
    return [scheduler_settings(run, env={}, flags_named=flags)[0] for run in runs]


def compared(
    count: int, before: Any, sides: dict[str, Any], until_ms: int | None, among: dict[str, Any] | None = None
) -> dict[str, list[Effect]]:
    """Play the copies; say on a terminal how far it is. Raises `Rejected` for a number of copies out of bounds."""
    from moorage.testing.simulate.shaken import COPIES_MAX, compare

    if not 1 <= count <= COPIES_MAX:
        raise rejected("invalid-argument", "--shake is a number of copies", found=count, allowed=f"1..{COPIES_MAX}",
                       next="--shake 5")  # fmt: skip
    raise_once()
    progress = progress_of("copies", "are played")
    found = compare(before, sides, count, until_ms=until_ms, among=among, progress=progress)
    if progress is not None:
        sys.stderr.write(ERASED)
    return found


def as_row(change: str, effect: Effect) -> dict[str, Any]:
    """Return an effect as a line of JSON."""
    return {"kind": "effect", "change": change, **msgspec.to_builtins(effect), "told": effect.told}


def progress_of(label: str, of: str = "of the jobs have ended") -> Any:
    """Return a function that shows the progress on a terminal, on one line and at most twice a second; None
    elsewhere."""
    if not is_live(sys.stderr):
        return None
    said = 0.0

    def progress(part: float) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said >= PROGRESS_S:
            said = now
            sys.stderr.write(f"{ERASED}{label}: {100 * part:.0f} % {of}")
            sys.stderr.flush()

    return progress
