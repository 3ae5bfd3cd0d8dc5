"""`moorage scheduler` and `moorage worker`: the services in the foreground."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Final, Literal

from moorage.cli.arguments import Parameter
from moorage.cli.options import DEFAULTS, Options, guarded

LEDGER_URL_FILE: Final = "ledger-url"
WORKERS_FOLDER: Final = "workers"
LOG_FORMAT: Final = "%(asctime)s %(levelname)-7s %(name)s %(message)s"

_LogLevel = Annotated[
    Literal["DEBUG", "INFO", "WARNING", "ERROR"], Parameter(help="Least severity that is logged, to stderr.")
]


def scheduler(
    *,
    replicas: Annotated[Literal[1, 3, 5], Parameter(help="Copies of the ledger: servers of the cluster.")] = 1,
    name: Annotated[str, Parameter(help="Shown as the leader's name; host and pid by default.", value="NAME")] = "",
    log_level: _LogLevel = "INFO",
    options: Options = DEFAULTS,
) -> int:
    """Run a scheduler in the foreground. Run several: one leads, the others stand by.

    The ledger's URL holds a password, so it comes by MOORAGE_LEDGER_URL or by the file that MOORAGE_LEDGER_URL_FILE
    names, never as an argument. Beside a `moorage up` of this folder its file is found.
    """

    def act() -> int:
        from moorage.client.target import find_context, home
        from moorage.scheduler.main import LEDGER_URL_FILE_VARIABLE, LEDGER_URL_VARIABLE, run

        context = find_context(options.nats)
        ledger = home() / LEDGER_URL_FILE
        said = LEDGER_URL_VARIABLE in os.environ or LEDGER_URL_FILE_VARIABLE in os.environ
        if not said and context.source.startswith(str(home())) and ledger.exists():
            os.environ[LEDGER_URL_FILE_VARIABLE] = str(ledger)
        _log(log_level)
        target = options.nats or (context.url if context.source.startswith(str(home())) else None)
        return run(target, replicas=replicas, name=name)

    gc.enable()
    return guarded(options, act)


def worker(
    *,
    id: Annotated[str | None, Parameter(help="The worker's id; the host's name by default.", value="ID")] = None,
    simulate: Annotated[
        str | None,
        Parameter(help="Simulated hosts: 4x8xH100, 2x4xL40S+8xH100, or a .toml or .json file.", value="HOSTS"),
    ] = None,
    state: Annotated[Path | None, Parameter(help="Folder of its journals and its supervisor.")] = None,
    label: Annotated[list[str] | None, Parameter(help="A label, as zone=a.", value="LABEL")] = None,
    drivers: Annotated[list[str] | None, Parameter(help="process, and on simulated ones noop.", value="NAME")] = None,
    secrets: Annotated[Path | None, Parameter(help="Folder of secrets that only the agent reads.")] = None,
    address: Annotated[str | None, Parameter(help="Where gang members reach this host.", value="HOST")] = None,
    log_level: _LogLevel = "INFO",
    options: Options = DEFAULTS,
) -> int:
    """Run a worker in the foreground: this machine's GPUs, or simulated ones.

    SIGTERM ends the agent; jobs run on under its supervisor, and the next agent on the same state folder takes them up.
    """

    def act() -> int:
        from moorage.cli.submit import pairs
        from moorage.client.errors import rejected
        from moorage.client.target import find_context, home
        from moorage.worker.run import run
        from moorage.worker.settings import MODES_DEFAULT, WorkerSettings

        state_dir = state or home() / WORKERS_FOLDER / (id or ("simulated" if simulate else "here"))
        try:
            settings = WorkerSettings(
                state_dir,
                id,
                labels=dict(pairs("label", label or ())),
                modes=("exclusive", "mps", "time-slice") if simulate else MODES_DEFAULT,
                simulate=simulate,
                drivers=tuple(drivers or (("process", "noop") if simulate else ("process",))),
                secrets_dir=secrets,
                address=address,
            )
        except ValueError as error:
            raise rejected("invalid-argument", str(error), next="moorage worker --help") from None
        context = find_context(options.nats)

        async def serve() -> None:
            stop, loop = asyncio.Event(), asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, stop.set)
            await run(settings, context, stop)

        _log(log_level)
        asyncio.run(serve())
        return 0

    gc.enable()
    return guarded(options, act)


def _log(level: str) -> None:
    logging.basicConfig(level=level, format=LOG_FORMAT, stream=sys.stderr)
