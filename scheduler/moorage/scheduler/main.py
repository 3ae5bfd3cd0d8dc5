"""A scheduler as a process: settings from flags, environment and file; clean end on a signal.

The ledger's URL holds a password, so it comes by environment or file, never in argv.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final

from moorage.bus.connect_logged import connect_logged
from moorage.bus.connection import Connection
from moorage.bus.errors import BusError, JetStreamRefused
from moorage.bus.jetstream import ERR_STREAM_NOT_FOUND, JetStream
from moorage.bus.server_version import check_oldest
from moorage.scheduler.core.config import RANKER_DEFAULT
from moorage.scheduler.core.rank.rankers import why_missing
from moorage.scheduler.durable.queue_streams import info_of
from moorage.scheduler.leader.service import Scheduler
from moorage.scheduler.ledger.accounts import check_users_account
from moorage.scheduler.ledger.ledger import LedgerBroken
from moorage.scheduler.ledger.one_copy import check_one_copy
from moorage.scheduler.ledger.recording import Recorder
from moorage.scheduler.ledger.snapshot_follower import Command
from moorage.scheduler.pacing.retrying import retry_unanswered
from moorage.scheduler.settings import (
    LEDGER_URL_FILE_VARIABLE,
    LEDGER_URL_VARIABLE,
    NATS_VARIABLE,
    SECTION,
    SchedulerSettings,
    ledger_url,
    scheduler_settings,
)
from moorage.scheduler.tflops import read_capacities
from moorage.schemas.errors import Problem, Refused, problem, refuse
from moorage.schemas.settings import DEFAULT, Found, as_words, declared, read_file, unknown_variables
from moorage.schemas.settings_file import find_file
from moorage.schemas.subjects import Subjects
from moorage.system.build import build
from moorage.system.logged import begin_log, log_problem
from moorage.system.loops import loop_factory
from moorage.system.notify import managed

EXIT_UNREACHABLE: Final = 5
EXIT_BROKEN: Final = 1
EXIT_USAGE: Final = 2

#: the tenant whose jobs are asked for, to find out whether a leader answers
TENANT_ASKED: Final = "default"
ASKED_S: Final = 2.0

log = logging.getLogger("moorage.scheduler")


async def serve(settings: SchedulerSettings, target: str | None, *, says_replicas: bool = True) -> None:
    """Run a scheduler until SIGTERM or SIGINT.

    `target` names the users' account. The ledger is in it, unless the settings or the environment have a ledger URL.
    Unless `says_replicas`, the number of copies is the default, and no ledger of one copy is made on a cluster.
    Raises `LedgerBroken`, `BusError`, `Refused`, OSError.
    """
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    read_capacities(settings.tflops_file)  # an unreadable file is reported now, not to the first job
    ledger_target, prefix, replicas = ledger_url(settings.ledger_url_file), settings.prefix, settings.replicas
    world = await connect_logged(target, "moorage-scheduler", log)
    check_oldest(world)
    await retry_unanswered(partial(check_users_account, world, Subjects(prefix)))
    ledger_world = world
    if ledger_target:
        ledger_world = await connect_logged(ledger_target, "moorage-ledger", log, role=" (the ledger)")
        check_oldest(ledger_world)
    elif await is_led_elsewhere(world, Subjects(prefix)):
        await world.close()
        raise LedgerBroken(
            "a scheduler already leads here, and its ledger is not in this account: name that account with"
            f" {LEDGER_URL_VARIABLE} or {LEDGER_URL_FILE_VARIABLE}. A second ledger would end running jobs"
        )
    if replicas == 1 and not says_replicas:
        await retry_unanswered(partial(_check_copies, JetStream(ledger_world), Subjects(prefix)))
    recorder = None if settings.record is None else _recorder(settings.record)
    numbers = {
        "--save-records": settings.snapshot_records,
        "--history-keep": settings.history_keep,
        "--history-bytes": settings.history_bytes,
        "--log-level": settings.log_level,
        "--log-format": settings.log_format,
    }
    follows = command_of("follower.process", settings, target, *map(str, chain.from_iterable(numbers.items())))
    if target:
        follows.env[NATS_VARIABLE] = target  # the history is in the users' account
    operators = await connect_logged(target, "moorage-scheduler-operators", log, role=" (for operators)")
    tenants = await connect_logged(target, "moorage-scheduler-tenants", log, role=" (for tenants)")
    out = await connect_logged(target, "moorage-scheduler-answers", log, role=" (for answers)")
    logs = "--log-level", settings.log_level, "--log-format", settings.log_format
    passes = Command(
        [sys.executable, "-m", "moorage.scheduler.buckets.process", "--prefix", prefix, *logs],
        {NATS_VARIABLE: target} if target else {},
    )
    scheduler = Scheduler(
        world,
        ledger_world,
        operators=operators,
        tenants=tenants,
        out=out,
        config=settings,
        subjects=Subjects(prefix),
        replicas=replicas,
        name=settings.name,
        snapshot_command=command_of("ledger.snapshots", settings, target, "--log-format", settings.log_format),
        follower_command=follows,
        buckets_command=passes,
        snapshot_records=settings.snapshot_records,
        own_process=True,
        recorder=recorder,
    )
    running = asyncio.create_task(scheduler.run())
    stopping = asyncio.create_task(stop.wait())
    try:
        async with managed(scheduler.caught_up):
            await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        else:
            await scheduler.resign()
    finally:
        for task in (running, stopping):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if recorder is not None:
            recorder.close()
        for connection in {out, tenants, operators, world, ledger_world}:
            await connection.close()


async def _check_copies(jetstream: JetStream, subjects: Subjects) -> None:
    """Raise `Refused` if there is no ledger yet, and one made now would have a single copy on a cluster."""
    if await info_of(jetstream, subjects.ledger_stream) is None:
        await check_one_copy(jetstream, subjects)


def _recorder(path: Path) -> Recorder:
    """Return the recorder that writes to this file. Raises Refused if the file cannot be written."""
    try:
        return Recorder(path)
    except OSError as error:
        raise refuse(
            "failed-precondition",
            f"the recording {path} cannot be written: {error.strerror or error}",
            field="$.record",
            found=str(path),
            next="name a file in an existing folder that this user may write to: --record",
        ) from None


async def is_led_elsewhere(world: Connection, subjects: Subjects) -> bool:
    """Return whether a leader answers on these subjects although this account contains no ledger."""
    try:
        await world.request(subjects.api(TENANT_ASKED, "ls"), b"{}", ASKED_S)
    except BusError:  # no answer, or this user may not ask
        return False
    try:  # a leader writes its ledger's first record before it answers
        await JetStream(world).stream_info(subjects.ledger_stream)
    except JetStreamRefused as refused:
        return refused.err_code == ERR_STREAM_NOT_FOUND
    return False


def command_of(module: str, settings: SchedulerSettings, target: str | None, *more: str) -> Command:
    """Return the command of a process that reads the ledger. Its URL is in the environment, as `ps` shows arguments."""
    env = {}
    if settings.ledger_url_file is not None:
        env[LEDGER_URL_FILE_VARIABLE] = str(settings.ledger_url_file)
    if target and not ledger_url(settings.ledger_url_file):
        env[NATS_VARIABLE] = target
    at = ["--prefix", settings.prefix, "--replicas", str(settings.replicas)]
    return Command([sys.executable, "-m", f"moorage.scheduler.{module}", *at, *more], env)


def print_problem(told: Problem) -> None:
    """Print to stderr why the scheduler ended."""
    if log_problem(told):
        return
    print(f"error[{told.code}]: {told.message}", file=sys.stderr)
    if told.next:
        print(f"fix: {told.next}", file=sys.stderr)


def run(
    settings: SchedulerSettings,
    target: str | None = None,
    tell: Callable[[Problem], None] = print_problem,
    *,
    says_replicas: bool = True,
) -> int:
    """Run `serve`, on uvloop if installed, and return an exit code: 0 after a signal.

    `tell` is called with a problem that an operator can fix. Without `target`, the users' account is as in `settings`.
    """
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(serve(settings, target or settings.nats, says_replicas=says_replicas))
    except BusError as error:
        tell(error.problem)
        return EXIT_UNREACHABLE
    except Refused as refused:
        tell(refused.problem)
        return EXIT_BROKEN
    except LedgerBroken as error:
        tell(problem("failed-precondition", str(error)))
        return EXIT_BROKEN
    except OSError as error:
        tell(problem("failed-precondition", str(error)))
        return EXIT_BROKEN
    return 0


def log_settings(found: Mapping[str, Found]) -> None:
    """Log the settings that differ from the defaults with their source, and unknown variables."""
    log.info("moorage %s; settings: %s", build(), as_words(found) or "defaults")
    for name in unknown_variables(SECTION, found):
        log.warning("%s is not a setting and has no effect", name)
    if found["ranker"].source == DEFAULT and found["ranker"].value != RANKER_DEFAULT:
        log.warning(
            "hosts are ranked by %s, as the ranker %s cannot be used here: %s",
            found["ranker"].value,
            RANKER_DEFAULT,
            why_missing(RANKER_DEFAULT),
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="moorage scheduler", description=__doc__)
    parser.add_argument("--settings", metavar="FILE", help="the settings file; else $MOORAGE_SETTINGS and so on")
    for key, one in declared(SECTION, SchedulerSettings).items():
        parser.add_argument(one.flag, dest=key, default=None, help=f"{one.help} {one.allowed}.".replace("%", "%%"))
    given = vars(parser.parse_args())
    try:
        settings, found = scheduler_settings(given, file=read_file(find_file(given.pop("settings"))))
    except Refused as refused:
        print(f"error[{refused.code}]: {refused} {refused.problem.next}", file=sys.stderr)
        sys.exit(EXIT_USAGE)
    begin_log(settings.log_level, settings.log_format)
    log_settings(found)
    sys.exit(run(settings, says_replicas=found["replicas"].source != DEFAULT))
