"""`moorage scheduler` and `moorage worker`: run the services in the foreground."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import msgspec

from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.console import emit
from moorage.cli.framework.interrupts import ENDING
from moorage.cli.framework.options import OF_LEDGER, LedgerOptions, guarded
from moorage.cli.framework.settings import FILE_HELP, flags_of, the_file, unread_here
from moorage.scheduler.settings import LEDGER_URL_FILE_VARIABLE, LEDGER_URL_VARIABLE, SchedulerSettings
from moorage.schemas.errors import Problem
from moorage.schemas.settings import DEFAULT, SettingsFile, unknown_variables
from moorage.system.logged import begin_log
from moorage.worker.settings import WorkerSettings

LEDGER_URL_FILE: Final = "ledger-url"

if TYPE_CHECKING:
    SchedulerFlags: TypeAlias = Any
    WorkerFlags: TypeAlias = Any
    _NO_SCHEDULER_FLAGS: Any = None
    _NO_WORKER_FLAGS: Any = None
else:
    SchedulerFlags = flags_of("scheduler", SchedulerSettings)
    WorkerFlags = flags_of("worker", WorkerSettings)
    _NO_SCHEDULER_FLAGS, _NO_WORKER_FLAGS = SchedulerFlags(), WorkerFlags()


def scheduler(
    *,
    settings: Annotated[Path | None, Parameter(help=FILE_HELP)] = None,
    flags: SchedulerFlags = _NO_SCHEDULER_FLAGS,
    options: LedgerOptions = OF_LEDGER,
) -> int:
    """Run a scheduler in the foreground. Run several: one leads, the others stand by.

    The ledger's URL holds a password, so it is read from MOORAGE_LEDGER_URL or from a file, and is never an argument.
    In the folder where `moorage up` runs, the command finds that file by itself.
    """

    def act() -> int:
        from moorage.scheduler.main import log_settings, print_problem, run
        from moorage.scheduler.settings import scheduler_settings

        file = the_file(settings)
        held, found = scheduler_settings({**dataclasses.asdict(flags), "nats": options.nats}, file=file)
        held, target = find_ledger(held)
        begin_log(held.log_level, held.log_format)
        log_settings(found)
        _warn_of_file_here(file)

        def print_trouble(trouble: Problem) -> None:
            if options.json:
                emit(trouble)
            print_problem(trouble)

        return run(held, target, print_trouble, says_replicas=found["replicas"].source != DEFAULT)

    gc.enable()
    return guarded(options, act)


def _warn_of_file_here(read: SettingsFile) -> None:
    if unread := unread_here(read):
        logging.getLogger("moorage.settings").warning("%s", unread)


def find_ledger(held: SchedulerSettings) -> tuple[SchedulerSettings, str | None]:
    """Return the settings, and the URL of the server of this folder's `moorage up`.

    The URL is None if none runs here, or if the settings have `nats`. If one runs here, the settings name its file of
    the ledger's URL, unless another one is set.
    """
    from moorage.bus.target import find_context, find_home

    context = find_context(held.nats)
    ledger = find_home() / LEDGER_URL_FILE
    is_beside_up = context.source.startswith(str(find_home()))
    said = held.ledger_url_file or {LEDGER_URL_VARIABLE, LEDGER_URL_FILE_VARIABLE} & os.environ.keys()
    if not said and is_beside_up and ledger.exists():
        held = msgspec.structs.replace(held, ledger_url_file=ledger)
    return held, None if held.nats or not is_beside_up else context.url


def worker(
    *,
    settings: Annotated[Path | None, Parameter(help=FILE_HELP)] = None,
    flags: WorkerFlags = _NO_WORKER_FLAGS,
    options: LedgerOptions = OF_LEDGER,
) -> int:
    """Run a worker in the foreground: this machine's GPUs, or simulated ones.

    SIGTERM (or the end of its terminal) ends the agent; jobs run on under its supervisor, and the next agent with the
    same state folder takes them over. A supervisor without a job ends with its agent.

    With --leave 60s, SIGTERM ends the worker for good: the members of services end once others serve in their place, in
    60 s at the latest, and all other jobs are asked to end at once and begin again elsewhere. The worker waits for the
    grace of each, a minute at most. A second signal leaves all of it 2 s.
    """

    def act() -> int:
        from moorage.bus.target import WORKERS_FOLDER, find_context, find_home
        from moorage.schemas.settings import as_words
        from moorage.system.loops import loop_factory
        from moorage.worker.agent.run import run
        from moorage.worker.settings import SECTION, worker_settings

        given = {**dataclasses.asdict(flags), "nats": options.nats}
        file = the_file(settings)
        held, found = worker_settings(given, find_home() / WORKERS_FOLDER, file=file)
        context = find_context(held.nats) if held.join is None else None

        async def serve() -> None:
            nonlocal held, context
            if held.join is not None:
                from moorage.worker.agent.joining import joined

                held, context = await joined(held)
            stop, at_once, loop = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop()
            for number in ENDING:
                loop.add_signal_handler(number, lambda: (at_once if stop.is_set() else stop).set())
            await run(held, context, stop, file, at_once)

        begin_log(held.log_level, held.log_format)
        log = logging.getLogger("moorage.worker")
        log.info("settings: %s", as_words(found) or "defaults")
        for name in unknown_variables(SECTION, found):
            log.warning("%s is not a setting and has no effect", name)
        _warn_of_file_here(file)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(serve())
        return 0

    gc.enable()
    return guarded(options, act)
