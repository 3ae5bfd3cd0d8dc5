"""A scheduler as a process: settings from arguments and environment, clean end on a signal.

The ledger's URL holds a password, so it comes by environment or file, never in argv.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from moorage.bus.connection import connect
from moorage.bus.errors import BusError
from moorage.scheduler.core.config import CLUSTER, Config
from moorage.scheduler.ledger import LedgerBroken
from moorage.scheduler.service import Scheduler
from moorage.schemas.subjects import PREFIX_DEFAULT, Subjects

LEDGER_URL_VARIABLE: Final = "MOORAGE_LEDGER_URL"
LEDGER_URL_FILE_VARIABLE: Final = "MOORAGE_LEDGER_URL_FILE"
EXIT_UNREACHABLE: Final = 5
EXIT_BROKEN: Final = 1

log = logging.getLogger("moorage.scheduler")


def ledger_url() -> str | None:
    """The ledger account's URL, from MOORAGE_LEDGER_URL or the file that MOORAGE_LEDGER_URL_FILE names."""
    file = os.environ.get(LEDGER_URL_FILE_VARIABLE)
    return Path(file).read_text().strip() if file else os.environ.get(LEDGER_URL_VARIABLE)


async def serve(
    target: str | None,
    *,
    ledger_target: str | None = None,
    replicas: int = 1,
    prefix: str = PREFIX_DEFAULT,
    name: str = "",
) -> None:
    """Run a scheduler until SIGTERM or SIGINT. Without a ledger target the ledger lives where the users are."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    world = await connect(target, "moorage-scheduler")
    ledger_world = await connect(ledger_target, "moorage-ledger") if ledger_target else world
    config = CLUSTER if replicas > 1 else Config()
    follower = [sys.executable, "-m", "moorage.scheduler.snapshots", "--prefix", prefix, "--replicas", str(replicas)]
    if target and not ledger_target:
        follower += ["--nats", target]
    scheduler = Scheduler(
        world,
        ledger_world,
        config=config,
        subjects=Subjects(prefix),
        replicas=replicas,
        name=name,
        snapshot_command=follower,
    )
    running = asyncio.create_task(scheduler.run())
    stopping = asyncio.create_task(stop.wait())
    try:
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
        for connection in {world, ledger_world}:
            await connection.close()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's where it is there: half the processor time at low rates, nothing at saturation."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def run(target: str | None, **settings: object) -> int:
    """`serve` on uvloop where it is there; one clear line and an exit code for what an operator can mend."""
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(serve(target, ledger_target=ledger_url(), **settings))  # type: ignore[arg-type]
    except BusError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_UNREACHABLE
    except LedgerBroken as error:
        print(f"error[ledger]: {error}", file=sys.stderr)
        return EXIT_BROKEN
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(prog="moorage scheduler", description=__doc__)
    parser.add_argument("--nats", default=None, help="URL or nats context of the users' account")
    parser.add_argument("--replicas", type=int, default=1, help="copies of the ledger: 1, 3 or 5 servers")
    parser.add_argument("--prefix", default=PREFIX_DEFAULT)
    parser.add_argument("--name", default="")
    parser.add_argument("--log-level", default="INFO")
    arguments = parser.parse_args()
    logging.basicConfig(level=arguments.log_level, format="%(asctime)s %(levelname)-7s %(name)s %(message)s")
    sys.exit(run(arguments.nats, replicas=arguments.replicas, prefix=arguments.prefix, name=arguments.name))
