"""`moorage fleet`: workers, what is free, what fits now."""

from __future__ import annotations

import asyncio
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Final

from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.console import error_line, paint, print_err, print_out
from moorage.cli.framework.fleets import Table, are_several, show_each
from moorage.cli.framework.options import ROWS, RowOptions, guarded, with_client
from moorage.cli.framework.render import GAP, age, table
from moorage.cli.framework.screen import Screen
from moorage.cli.framework.wrapping import folded
from moorage.cli.jobs.show import enforced_words
from moorage.client.answers import FleetInfo
from moorage.client.errors import not_found, rejected
from moorage.client.reading import as_struct
from moorage.client.view.checks import places_away, warnings
from moorage.client.view.closed import closed_words, device_words, down_words, planned_words
from moorage.schemas.answers.fleet import WorkerInfo
from moorage.schemas.capabilities import KERNEL, VARIABLE, Capabilities
from moorage.schemas.cells import FOREIGN, FREE, FROZEN, LEASED, LOST, NOT_LENT, SHARERS_MAX, SICK
from moorage.schemas.errors import MoorageError
from moorage.schemas.gpu import model_matches
from moorage.schemas.units import many

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient
    from moorage.schemas.answers.fleet import DeviceRow
    from moorage.schemas.frames import Answer, FleetFrame, FleetRow

#: lines about single devices under the table; --json has all
TROUBLES_MAX: Final = 20
#: how often it is looked whether the connection of --watch is there
LOOK_S: Final = 1.0
#: cells of devices that somebody should look at
_ODD: Final = frozenset((SICK, FOREIGN, LOST))
LEGEND: Final = (
    f"{FREE} free  {LEASED} leased  {FROZEN} kept for a frozen job  1-{SHARERS_MAX} sharers  {SICK} sick"
    f"  {FOREIGN} used by others  {NOT_LENT} not lent  {LOST} lost"
)


def fleet(
    worker: Annotated[str | None, Parameter(help="Only this worker, with the ids of each of its devices.")] = None,
    /,
    *,
    watch: Annotated[bool, Parameter(help="Redraw twice a second; in a pipe, a line at each change.")] = False,
    options: RowOptions = ROWS,
) -> int:
    """Show the workers, what is free, and (on a terminal, without --watch) the largest request per model that fits
    now."""

    async def work(client: AsyncClient) -> int | None:
        if worker is not None:
            await _one(client, worker, options)
            return None
        if watch:
            await _watch(client, options)
            return None
        answer = await client._wire.operate("fleet")
        if not options.shown(answer, answer.data["workers"]):
            _fleet(as_struct(FleetInfo, answer.data))
        return None

    if are_several(options) and worker is None and not watch:
        return show_each(
            options,
            lambda client: client._wire.operate("fleet"),
            lambda answer: answer.data["workers"],
            lambda answer: _workers_table(as_struct(FleetInfo, answer.data).workers),
        )

    def act() -> int:
        if watch and worker is not None:
            raise rejected(
                "invalid-argument", "--watch shows the whole fleet", found=worker, next="leave one of the two out"
            )
        return with_client(options, work)

    return guarded(options, act)


async def _one(client: AsyncClient, worker: str, options: RowOptions) -> None:
    """Show a worker's devices. Raises `NotFound`."""
    answer, row = await worker_of(client, worker)
    devices = row.devices or []
    if not options.shown(answer, devices):
        rows = [
            [
                device.slot,
                row.cells[device.slot],
                device.index,
                device.uuid,
                device.pci,
                device.name,
                " ".join(device.cdi),
            ]
            for device in devices
        ]
        columns = ["SLOT", "CELL", "INDEX", "UUID", "PCI", "MODEL", "CDI"]
        print_out(table(columns, rows, numbers=("SLOT", "INDEX"), optional=("PCI", "CDI")))
        for line in [*trouble_lines([row])[:TROUBLES_MAX], *kept(devices), *driver_words(row), *lease(row)]:
            print_err(folded(line, sys.stderr))


async def worker_of(client: AsyncClient, worker: str) -> tuple[Answer, WorkerInfo]:
    """Return the leader's answer about one worker, and its row, with all details of its devices. Raises `NotFound`."""
    answer = await client._wire.operate("fleet", {"worker": worker})
    for row in as_struct(FleetInfo, answer.data).workers:
        if row.worker == worker:
            return answer, row
    raise not_found("no worker of this fleet has that id", found=worker, next="moorage fleet lists them")


def lease(worker: WorkerInfo) -> list[str]:
    """Return a line with how long a worker's jobs go on by themselves; none where its scheduler does not tell."""
    if worker.lease_s is None:
        return []
    return [f"lease: its jobs go on for {age(round(worker.lease_s * 1000))} without an answer of a scheduler"]


def kept(devices: Sequence[DeviceRow]) -> list[str]:
    """Return a line for each device that its worker lends only in certain sharing modes, or that has labels."""
    lines = [f"GPU {device.slot}: only for jobs with {' or '.join(device.modes)}" for device in devices if device.modes]
    labelled = ((device.slot, sorted(device.labels.items())) for device in devices if device.labels)
    words = ((slot, " ".join(f"{label}={value}" for label, value in rows)) for slot, rows in labelled)
    return lines + [f"GPU {slot}: the labels {text}" for slot, text in words]


def driver_words(worker: WorkerInfo) -> list[str]:
    """Return what a worker reports of its drivers: how sharers are kept to their parts of a GPU, and what lacks."""
    capabilities = worker.capabilities
    fences = device_fences(capabilities) if worker.devices else []
    return [*levels(capabilities), *limits(capabilities), *fences]


def device_fences(capabilities: dict[str, Capabilities]) -> list[str]:
    """Return what keeps jobs to the GPUs of their leases: a line for each driver that reports it."""
    means = {
        KERNEL: "the kernel refuses GPUs that they do not lease (devices: kernel)",
        VARIABLE: "a variable names their GPUs, and a program may ignore it (devices: variable)",
    }
    found = ((driver, means.get(each.devices)) for driver, each in sorted(capabilities.items()))
    return [f"{driver} jobs: {line}" for driver, line in found if line]


def limits(capabilities: dict[str, Capabilities]) -> list[str]:
    """Return a line for each driver whose jobs may not run as any user, or are not held to their memory."""
    lines = []
    for driver, each in sorted(capabilities.items()):
        if not each.users:
            lines.append(f"{driver} jobs run as the agent's own user alone (no-users)")
        if not each.memory_limit:
            lines.append(f"{driver} jobs are not held to the memory that they ask for (no-memory-limit)")
    return lines


def levels(capabilities: dict[str, Capabilities]) -> list[str]:
    """Return how a worker keeps sharers to their parts of a GPU: a line for each driver and mode for which it
    reports a level."""
    return [
        f"{driver} jobs with {mode}: {enforced_words(level)}"
        for driver, each in sorted(capabilities.items())
        for mode, level in sorted(each.enforced.items())
        if mode != "exclusive"
    ]


def _workers_table(workers: Sequence[WorkerInfo]) -> Table:
    return Table(
        ["WORKER", "KIND", "STATE", "CELLS", "FREE", "GPUS", "JOBS", "HEARD", "MODELS"],
        [
            [
                worker.worker,
                "sim" if worker.simulated else "real",
                worker.state,
                worker.cells,
                worker.free,
                worker.gpus,
                worker.members,
                age(worker.heard_ms_ago),
                worker.models,
            ]
            for worker in workers
        ],
        numbers=("FREE", "GPUS", "JOBS", "HEARD"),
        optional=("HEARD", "JOBS"),
    )


def _fleet(data: FleetInfo) -> None:
    workers, warned = data.workers, [f"{check.name}: {check.found}" for check in warnings(data)]
    if not workers:
        for line in warned:
            print_err(folded(line, sys.stderr))
        print_err("no worker has joined")
        print_err("fix: start a worker with moorage worker, or simulated workers with moorage up --simulate 4x8xH100")
        return
    print_out(str(_workers_table(workers)))
    for line in [*warned, *places_away(workers), *trouble_lines(workers)][:TROUBLES_MAX]:
        print_err(folded(line, sys.stderr))
    if not sys.stdout.isatty():
        return  # one table a pipe: the rest is talk
    if data.fits_now:
        words = model_words([row.model for row in data.fits_now])
        rows = []
        for row in data.fits_now:
            token = f"{row.largest}x{words[row.model]}" if row.largest else "-"
            rows.append([token, row.free, row.gpus, row.model])
        print_out("")
        print_out(table(["FITS NOW", "FREE", "GPUS", "MODEL"], rows, numbers=("FREE", "GPUS")))
    line = (
        f"epoch {data.epoch}  ledger {data.ledger}  {many(data.queued, 'replica')} queued  "
        f"{many(data.live_jobs, 'job')} not ended"
    )
    if any(worker.simulated for worker in workers):
        line = "sim  " + line
    print_err(paint(folded(f"{line}\n{_kept(data)}\n{LEGEND}", sys.stderr), "dim", sys.stderr))


def trouble_lines(workers: Sequence[WorkerInfo]) -> list[str]:
    """Return a line for each worker on which starts fail, driver or device that cannot be used, and then for each
    worker that is draining or cordoned, or will be drained."""
    lines, orders = [], []
    for worker in workers:
        name = worker.worker
        if (fails := worker.starts_fail) is not None:
            until = f"no jobs for {age(fails.opens_in_ms)}, or until moorage uncordon {name}"
            lines.append(f"{name}: jobs fail to start: {fails.why}; {until}")
        lines += [f"{name}: {words}" for words in down_words(worker)]
        if worker.warning:
            lines.append(f"{name}: {worker.warning}")
        lines += [f"{name} GPU {trouble.slot}: {device_words(trouble)}" for trouble in worker.troubles]
        orders += [f"{name}: {said}" for said in (closed_words(worker), planned_words(worker)) if said]
    return lines + orders


def _kept(data: FleetInfo) -> str:
    """Return how long ended jobs are kept, and how far back they reach now."""
    keeps, window_ms = data.keeps, data.finished_window_ms
    reaches = f" (now {age(window_ms)})" if window_ms >= 60_000 else ""
    finished = f"{many(data.finished_kept, 'ended job')} in memory, each for {age(keeps.finished_keep * 1000)}{reaches}"
    history = f"history of ended jobs for {age(keeps.history_keep * 1000)} or {keeps.history_bytes / (1 << 30):g} GiB"
    return f"{finished}  {history}"


def model_words(names: Sequence[str]) -> dict[str, str]:
    """Return for each model a short word that `--gpu` accepts for it and for none of the others, as H100; its whole
    name if there is none."""
    return {name: _model_word(name, [other for other in names if other != name]) for name in names}


def _model_word(name: str, others: Sequence[str]) -> str:
    words = [word for word in re.split(r"[^A-Za-z0-9]+", name) if word]
    numbered = [word for word in words if any(char.isdigit() for char in word) and not word.upper().endswith("GB")]
    for word in numbered:
        pattern = word if word[0].isalpha() else f"={word}"
        if not any(model_matches(pattern, other) for other in others):
            return pattern
    return name


async def _watch(client: AsyncClient, options: RowOptions) -> None:
    """Show the fleet until Ctrl-C: on a terminal redrawn in place, in a pipe a line for each change."""
    before = ""
    screen = Screen(sys.stdout)
    lines: list[str] = []

    def print_loss(error: MoorageError) -> None:
        if screen.live:
            screen.draw([error_line(error), *lines])
        else:
            print_err(error_line(error))

    looking = asyncio.create_task(_watch_connection(client, print_loss))
    try:
        async for frame in client.fleet.frames():
            if options.shown(frame, frame.workers):
                continue
            text = _frame_line(frame)
            if screen.live:
                lines, unseen = _frame_lines(frame)
                legend = [paint(line, "dim", sys.stdout) for line in folded(LEGEND, sys.stdout).splitlines()]
                screen.draw(lines, tail=legend, unseen=unseen)
            elif text != before:
                if not before:
                    print_err("\t".join(_COLUMNS))
                print_out(text)
            before = text
    finally:
        looking.cancel()


async def _watch_connection(client: AsyncClient, print_loss: Callable[[MoorageError], None]) -> None:
    """Have it printed, each time once, that the connection is lost, or that the server refuses the key: no frame comes
    then, which looks like a fleet without changes."""
    is_lost = False
    while True:
        try:
            client._wire.check_connected()
        except MoorageError as error:
            if not is_lost:
                print_loss(error)
            is_lost = True
        else:
            is_lost = False
        await asyncio.sleep(LOOK_S)


def _frame_lines(frame: FleetFrame) -> tuple[list[str], int]:
    """Return the lines of the fleet on a terminal, and how many workers these leave out.

    It is a table, a worker a line. If that is higher than the terminal, several workers share a line.
    """
    tag = "sim  " if any(worker.simulated for worker in frame.workers) else ""
    cells = "".join(worker.cells for worker in frame.workers)
    counts = f"{many(len(frame.workers), 'worker')}  {cells.count(FREE)} of {many(len(cells), 'GPU')} free"
    head = f"{tag}epoch {frame.epoch}  {counts}  {frame.queued} queued  {frame.running} running"
    columns, lines = shutil.get_terminal_size()
    if len(frame.workers) > lines - 4:
        shown, unseen = packed(frame.workers, columns, lines - 3)
        return [head, *shown], unseen
    rows = [
        [
            worker.worker,
            "sim" if worker.simulated else "real",
            worker.state,
            worker.cells.count(FREE),
            len(worker.cells),
            worker.cells,
        ]
        for worker in frame.workers
    ]
    columns_of = ["WORKER", "KIND", "STATE", "FREE", "GPUS", "CELLS"]
    return [head, *table(columns_of, rows, numbers=("FREE", "GPUS"), optional=("KIND",)).splitlines()], 0


def packed(workers: Sequence[FleetRow], columns: int, lines: int) -> tuple[list[str], int]:
    """Return lines with the name and the cells of several workers each, in columns read downwards, and how many workers
    have no room.

    A worker's state is there if it is not `up`. If not all have room, those with a trouble come first, and one line is
    left free for the count.
    """
    entries = [
        f"{worker.worker} {worker.cells}" + ("" if worker.state == "up" else f" {worker.state}") for worker in workers
    ]
    width = max(map(len, entries)) + len(GAP)
    across = max((columns + len(GAP)) // width, 1)
    if len(entries) > across * lines:
        order = sorted(range(len(entries)), key=lambda at: _is_well(workers[at]))
        entries = [entries[at] for at in order[: across * max(lines - 1, 1)]]
    down = -(-len(entries) // across)
    shown = ["".join(entry.ljust(width) for entry in entries[at::down]).rstrip() for at in range(down)]
    return shown, len(workers) - len(entries)


def _is_well(worker: FleetRow) -> bool:
    return worker.state == "up" and not _ODD.intersection(worker.cells)


#: of what `_frame_line` returns
_COLUMNS: Final = ("KIND", "QUEUED", "RUNNING", "WORKERS", "FREE", "GPUS")


def _frame_line(frame: FleetFrame) -> str:
    cells = "".join(worker.cells for worker in frame.workers)
    tag = "sim" if any(worker.simulated for worker in frame.workers) else "real"
    return "\t".join(map(str, (tag, frame.queued, frame.running, len(frame.workers), cells.count(FREE), len(cells))))
