"""The operator's view of the fleet, and the acts on one worker."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

from moorage.cli.console import emit, paint, say, tell
from moorage.cli.options import DEFAULTS, Options, with_client
from moorage.cli.render import age, many, table

if TYPE_CHECKING:
    from cyclopts import Parameter

    from moorage.client.client import AsyncClient
    from moorage.schemas.frames import FleetFrame

WORKER_HELP: Final = "The worker's id, as moorage fleet shows it."
LEGEND: Final = "· free  # leased  2-9 sharers  ! sick  x used by others  - not lent  ? lost"

_Worker: TypeAlias = "Annotated[str, Parameter(help=WORKER_HELP)]"


def fleet(
    *,
    watch: Annotated[bool, Parameter(negative="", help="Again with each frame of the leader, twice a second.")] = False,
    options: Options = DEFAULTS,
) -> int:
    """Workers, what is free, what fits now."""

    async def work(client: AsyncClient) -> int | None:
        if watch:
            await _watch(client, options)
            return None
        answer = await client.operate("fleet")
        if options.json:
            emit(answer)
        else:
            _fleet(answer.data)
        return None

    return with_client(options, work)


def _fleet(data: dict[str, Any]) -> None:
    workers = data["workers"]
    if not workers:
        say("no worker has joined")
        say("fix: start one with moorage worker, or try moorage up --simulate 4x8xH100")
        return
    tell(
        table(
            ["WORKER", "KIND", "STATE", "CELLS", "FREE", "GPUS", "JOBS", "HEARD", "MODELS"],
            [
                [
                    worker["worker"],
                    "sim" if worker["simulated"] else "real",
                    worker["state"],
                    worker["cells"],
                    worker["free"],
                    worker["gpus"],
                    worker["members"],
                    age(worker["heard_ms_ago"]),
                    worker["models"],
                ]
                for worker in workers
            ],
            numbers=("FREE", "GPUS", "JOBS", "HEARD"),
        )
    )
    if data["fits_now"]:
        tell("")
        tell(
            table(
                ["FITS NOW", "FREE", "GPUS", "MODEL"],
                [[f"1x{row['largest']}", row["free"], row["gpus"], row["model"]] for row in data["fits_now"]],
                numbers=("FREE", "GPUS"),
            )
        )
    if sys.stderr.isatty():
        line = f"epoch {data['epoch']}  ledger {data['ledger']}  {data['queued']} queued  {data['live_jobs']} live"
        if any(worker["simulated"] for worker in workers):
            line = "sim  " + line
        say(paint(f"{line}\n{_kept(data)}\n{LEGEND}", "dim", sys.stderr))


def _kept(data: dict[str, Any]) -> str:
    """How long what is over is kept, and how far back that reaches now."""
    keeps = data["keeps"]
    return (
        f"finished jobs {data['finished_kept']}, kept {age(keeps['finished_keep'] * 1000)}"
        f" (now {age(data['finished_window_ms'])})  history {age(keeps['history_keep'] * 1000)}"
        f" or {keeps['history_bytes'] / (1 << 30):g} GiB"
    )


async def _watch(client: AsyncClient, options: Options) -> None:
    """On a terminal redrawn in place, in a pipe a line for each change."""
    before = ""
    lines_before = 0
    tty = sys.stdout.isatty() and not options.json
    async for frame in client.fleet_frames():
        if options.json:
            emit(frame)
            continue
        text = _frame_table(frame) if tty else _frame_line(frame)
        if text == before:
            continue
        before = text
        if tty:
            sys.stdout.write(f"\x1b[{lines_before}F\x1b[J" if lines_before else "")
            lines_before = text.count("\n") + 1
        tell(text)


def _frame_table(frame: FleetFrame) -> str:
    tag = "sim  " if any(worker["simulated"] for worker in frame.workers) else ""
    counts = f"{many(len(frame.workers), 'worker')}  {frame.queued} queued  {frame.running} running"
    head = f"{tag}epoch {frame.epoch}  {counts}"
    rows = [
        [worker["worker"], "sim" if worker["simulated"] else "real", worker["state"], worker["cells"]]
        for worker in frame.workers
    ]
    return head + "\n" + table(["WORKER", "KIND", "STATE", "CELLS"], rows)


def _frame_line(frame: FleetFrame) -> str:
    cells = "".join(worker["cells"] for worker in frame.workers)
    tag = "sim" if any(worker["simulated"] for worker in frame.workers) else "real"
    return "\t".join(map(str, (tag, frame.queued, frame.running, len(frame.workers), cells.count("·"), len(cells))))


def drain(worker: _Worker, /, *, options: Options = DEFAULTS) -> int:
    """Place nothing new on a worker; what runs there goes on to its end."""
    return _flag("drain", worker, options)


def cordon(worker: _Worker, /, *, options: Options = DEFAULTS) -> int:
    """Place nothing new on a worker."""
    return _flag("cordon", worker, options)


def uncordon(worker: _Worker, /, *, options: Options = DEFAULTS) -> int:
    """Undo drain or cordon."""
    return _flag("uncordon", worker, options)


_DID: Final = {"drain": "draining", "cordon": "cordoned", "uncordon": "open"}


def _flag(verb: str, worker: str, options: Options) -> int:
    async def work(client: AsyncClient) -> int | None:
        act = {"drain": client.drain, "cordon": client.cordon, "uncordon": client.uncordon}[verb]
        done = await act(worker)
        if options.json:
            emit(done)
            return None
        members = done.get("members", 0)
        goes_on = f", {many(members, 'member')} on it {'goes' if members == 1 else 'go'} on" if members else ""
        tell(f"{worker}\t{_DID[verb]}{goes_on}")
        if verb != "uncordon":
            say(f"undo: moorage uncordon {worker}")
        return None

    return with_client(options, work)
