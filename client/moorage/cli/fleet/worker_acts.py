"""What an operator does to workers: `moorage drain`, `cordon`, `uncordon`, `admin forget`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, TypeAlias

from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.console import emit, fail, here, print_err, print_out
from moorage.cli.framework.options import DEFAULTS, Options, guarded, with_client
from moorage.cli.framework.render import age, day_and_time
from moorage.client.durations import seconds
from moorage.client.errors import NotFound, Rejected, rejected
from moorage.schemas.units import many

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient
    from moorage.schemas.operate import Done

_Worker: TypeAlias = Annotated[
    str,
    Parameter(
        help="Ids of workers, as moorage fleet shows them; several with blanks or commas.",
        value="WORKER",
        lists="fleet --format {worker}",
        one_at_least=True,
    ),
]
_Why: TypeAlias = Annotated[str, Parameter(help="The reason; fleet, top, the page, explain and the ledger have it.")]


def drain(
    *workers: Annotated[
        str,
        Parameter(
            help="Ids of workers, as moorage fleet shows them; several with blanks or commas.",
            value="WORKER",
            lists="fleet --format {worker}",
        ),
    ],
    within: Annotated[
        str | None,
        Parameter(
            help="Jobs that still run there this long after the drain began are ended, and start again elsewhere.",
            value="30m",
            timed=True,
        ),
    ] = None,
    begin: Annotated[
        str | None,
        Parameter(
            names=("--from",),
            help="Begin the drain later: at 22:00, or in 2h. Jobs there must have ended by then, or, with --within, "
            "that much later.",
            value="WHEN",
            timed=True,
        ),
    ] = None,
    last: Annotated[
        str | None,
        Parameter(
            names=("--for",),
            help="Open the worker again this long after the drain began. Jobs there must have ended when it begins, "
            "or, with --within, that much later.",
            value="2h",
            timed=True,
        ),
    ] = None,
    idle: Annotated[
        str | None,
        Parameter(
            help="Instead of named workers: those that have had nothing to do for this long. Prints the ids of those "
            "that may be ended, as nothing begins there.",
            value="10m",
            timed=True,
        ),
    ] = None,
    pool: Annotated[
        str | None, Parameter(help="With --idle: only workers with the label pool=NAME.", value="NAME")
    ] = None,
    keep: Annotated[int, Parameter(help="With --idle: workers of the pool that stay open.", value="NUMBER")] = 0,
    why: _Why = "",
    options: Options = DEFAULTS,
) -> int:
    """Place nothing new on these workers; jobs that run there go on to their end, or leave by a deadline.

    A job that leaves gets its checkpoint signal before the deadline, then SIGTERM and its grace; it waits for a new
    attempt elsewhere and loses no retry. Before a drain in the future, a job is placed there only if its time limit is
    over by then, and a job without a limit until ten minutes before. The drain is in the ledger, so reboots and
    takeovers do not end it; uncordon does. A worker that --idle has drained is printed each time, while it is there.
    """
    if idle is not None or not workers or pool is not None or keep:
        times = within, begin, last
        return guarded(options, lambda: _drain_idle(workers, idle, pool, keep, times, why, options))

    async def one(client: AsyncClient, worker: str) -> None:
        asked = datetime.now()  # without an offset, which summer time changes
        done = await client.fleet.drain(worker, within=within, begin=begin, last=last, why=why)
        if done.drain is not None:
            told = ", ".join(_asked_for(within, begin, last, asked)) + (f": {why}" if why else "") + _on_it(done)
        else:
            told = f"draining{f': {why}' if why else ''}{_goes_on(done)}"
        _print_done(options, worker, done, told)

    def act() -> int:
        _check_order(within, last)
        return _each(workers, options, one, undo="")

    return guarded(options, act)


def _drain_idle(
    workers: Sequence[str],
    idle: str | None,
    pool: str | None,
    keep: int,
    times: Sequence[str | None],
    why: str,
    options: Options,
) -> int:
    """Drain the hosts that are idle for so long, and print those that may be ended. Raises `Rejected`."""
    if idle is None or workers or any(times) or keep < 0:
        raise rejected(
            "invalid-argument",
            "drain takes workers, or --idle with --pool and --keep",
            found=f"--keep {keep}" if keep < 0 else " ".join(workers) or "no worker",
            allowed="WORKER, several with blanks, with or without times; or --idle 10m",
            next="moorage drain --help",
        )

    async def work(client: AsyncClient) -> int | None:
        ended = await client.fleet.drain_idle(idle, pool=pool, keep=keep, why=why or "idle")
        if options.json:
            emit({"kind": "drained", "workers": ended})
            return None
        for name in ended:
            print_out(name)
        if ended:
            print_err(f"undo: moorage uncordon {' '.join(ended)}{here()}")
        return None

    return with_client(options, work)


def _check_order(within: str | None, last: str | None) -> None:
    """Raise `Rejected` for a drain that would end before its jobs have to be gone."""
    if last is None or seconds(last) > seconds(within or 0):
        return
    message = (
        f"--for {last} is not a length of time"
        if within is None
        else f"--for {last} ends the drain before the time --within {within} has passed"
    )
    raise rejected(
        "invalid-argument",
        message,
        found=last,
        allowed=f"more than {within or '0s'}",
        next="both times begin when the drain begins: now, or at the time of --from",
    )


def _asked_for(within: str | None, begin: str | None, last: str | None, asked: datetime) -> list[str]:
    """Return the times of a drain in words: `draining begins tomorrow 22:00, in 23h`, `open again 2h after the drain
    begins`."""
    from moorage.client.moments import seconds_until

    parts = ["draining"]
    if begin:
        in_s = seconds_until(begin, asked)
        begins = datetime.fromtimestamp(asked.timestamp() + in_s, asked.tzinfo)
        parts = [f"draining begins {day_and_time(begins, asked)}, in {age(in_s * 1000)}"]
    if begin and not within:
        parts.append("empty by then")
    elif last and not within:
        parts.append("the jobs on this worker are ended now")
    if within:
        parts.append(f"empty {within} after that at the latest" if begin else f"empty within {within} at the latest")
    if last:
        parts.append(f"open again {last} after the drain begins")
    return parts


_Gpu = Annotated[
    list[int] | None,
    Parameter(help="Only this GPU of each worker, by its place in CELLS, from 0. Repeatable.", value="NUMBER"),
]


def _gpus(numbers: list[int]) -> str:
    return f"GPU{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def cordon(*workers: _Worker, gpu: _Gpu = None, why: _Why = "", options: Options = DEFAULTS) -> int:
    """Place nothing new on these workers, or with --gpu on some of their GPUs.

    Jobs that run there go on, and processes on their hosts can still borrow their GPUs. A drain asks for these GPUs
    back and lends no more.
    """

    async def one(client: AsyncClient, worker: str) -> None:
        done = await client.fleet.cordon(worker, gpus=gpu, why=why)
        what = "cordoned" if gpu is None else f"{_gpus(gpu)} cordoned"
        told = f"{what}{f': {why}' if why else ''}{_goes_on(done)}"
        _print_done(options, worker, done, told)

    return _each(workers, options, one, undo="".join(f" --gpu {number}" for number in gpu or ()))


def uncordon(
    *workers: _Worker,
    gpu: _Gpu = None,
    why: Annotated[str, Parameter(help="The reason; the ledger has it.")] = "",
    options: Options = DEFAULTS,
) -> int:
    """Undo drain or cordon; with --gpu, the cordon of these GPUs."""

    async def one(client: AsyncClient, worker: str) -> None:
        done = await client.fleet.uncordon(worker, gpus=gpu, why=why)
        _print_done(options, worker, done, f"{'' if gpu is None else f'{_gpus(gpu)} '}open{_goes_on(done)}")

    return _each(workers, options, one)


def forget(
    *workers: _Worker,
    why: Annotated[str, Parameter(help="The reason; the ledger has it.")] = "",
    options: Options = DEFAULTS,
) -> int:
    """List workers no more that have left or were lost.

    An order on such a worker, as a drain, ends with it. Its jobs keep its name. A worker is refused that is there, or
    for which jobs with --on-partition keep wait. One that joins again is known again, and open.
    """

    async def one(client: AsyncClient, worker: str) -> None:
        done = await client.fleet.forget(worker, why=why)
        _print_done(options, worker, done, "forgotten")

    return _each(workers, options, one)


def _each(
    words: Sequence[str],
    options: Options,
    one: Callable[[AsyncClient, str], Awaitable[None]],
    *,
    undo: str | None = None,
) -> int:
    """Ask for one worker after the other. One that is refused keeps none of the others; its exit code is returned.

    `undo` are the options with which `uncordon` undoes it; None for what has no such command.
    """

    async def work(client: AsyncClient) -> int | None:
        code, done = None, []
        names = [name for word in words for name in word.split(",") if name]
        for worker in dict.fromkeys(names or words):
            try:
                await one(client, worker)
            except (NotFound, Rejected) as error:
                code = fail(error, json=options.json)
            else:
                done.append(worker)
        if undo is not None and done and not options.json:
            print_err(f"undo: moorage uncordon {' '.join(done)}{undo}{here()}")
        return code

    return with_client(options, work)


def _print_done(options: Options, worker: str, done: Done, words: str) -> None:
    if options.json:
        emit(done)
    else:
        print_out(f"{worker}\t{words}")
        if parts := _replaced(done):
            print_err(f"{worker}: {'; '.join(parts)}")


def _on_it(done: Done) -> str:
    return f", {many(done.members, 'attempt')} on this worker" if done.members else ""


def _replaced(done: Done) -> list[str]:
    """Return what an order has ended or replaced of earlier ones, and which GPUs stay cordoned."""
    stood, parts = done.replaced, list[str]()
    if stood is None:
        return parts
    if stood.flag:
        parts.append(f"it was {stood.flag}" + (f": {stood.why}" if stood.why else ""))
    if stood.drain is not None and stood.flag != "draining":
        begins = day_and_time(datetime.fromtimestamp(stood.drain.from_ms / 1000), datetime.now())
        parts.append(f"its drain of {begins} is off" + (f": {stood.drain.why}" if stood.drain.why else ""))
    if stood.gpus:
        undo = "".join(f" --gpu {number}" for number in stood.gpus)
        parts.append(f"{_gpus(stood.gpus)} still cordoned: moorage uncordon {done.worker}{undo}{here()}")
    return parts


def _goes_on(done: Done) -> str:
    """Return how many attempts there go on, and how many have been asked to end: an order does not stop their end."""
    goes, ends = (done.members or 0) - done.ending, done.ending
    words = [(goes, "goes on" if goes == 1 else "go on"), (ends, "is ending" if ends == 1 else "are ending")]
    first, *rest = [(number, verb) for number, verb in words if number] or [(0, "")]
    told = f", {many(first[0], 'attempt')} on this worker {first[1]}" if first[0] else ""
    return told + "".join(f", {number} {verb}" for number, verb in rest)
