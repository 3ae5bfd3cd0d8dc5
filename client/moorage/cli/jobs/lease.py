"""`moorage lease`: run a program of this host on GPUs that its worker lends."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import TYPE_CHECKING, Annotated

from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.console import print_err, report
from moorage.cli.framework.exit_codes import exit_code_of_start
from moorage.cli.framework.interrupts import ENDING, comes_by_itself
from moorage.cli.framework.options import LOCAL, LocalOptions, guarded
from moorage.cli.local.mps_ends import announce_end
from moorage.system.passed_signals import PASSED_ON

if TYPE_CHECKING:
    from asyncio.subprocess import Process

    from moorage.client.lease import AsyncLease


def lease(
    gpu: Annotated[str, Parameter(help="The GPUs, as 1xL40S or 2: all on this host.", value="GPU")],
    /,
    *command: Annotated[str, Parameter(help="What to run, after --.", command=True)],
    purpose: Annotated[str, Parameter(help="What for, as text that the operators of this host see.")] = "",
    within: Annotated[str, Parameter(help="How long to wait for the GPUs: 30s, 2h.", value="DURATION")] = "1h",
    grace: Annotated[
        str,
        Parameter(
            help="What the program has between SIGTERM and SIGKILL where its lease is lost. A worker that asks for its "
            "GPUs says its own time.",
            value="DURATION",
        ),
    ] = "10s",
    socket: Annotated[
        str,
        Parameter(
            help="The worker's socket. By default $MOORAGE_LEASE_SOCKET, that of the moorage up of this folder, or the "
            "system's.",
            value="PATH",
        ),
    ] = "",
    options: LocalOptions = LOCAL,
) -> int:
    """Run a program of this host on GPUs that its worker lends, without a job; returns the program's exit code.

    The program has the variables that name its GPUs. The lease ends with it. If the worker asks for the GPUs, the
    program gets SIGTERM, and SIGKILL when the time is over. Ctrl-C and all other signals that can be caught reach it.
    """
    code = 0

    def act() -> None:
        nonlocal code
        from moorage.client.durations import seconds
        from moorage.client.errors import rejected

        if not command:
            raise rejected(
                "invalid-argument", "lease needs a program", next=f"moorage lease {gpu} -- PROGRAM, or -- bash"
            )
        code = asyncio.run(_held(gpu, command, purpose, seconds(within), seconds(grace), socket))

    failed = guarded(options, act)
    return code or failed


async def _held(gpu: str, command: tuple[str, ...], purpose: str, within_s: float, grace_s: float, socket: str) -> int:
    """Take the lease, run the program, and return its exit code as a shell tells it. Raises `ClientError`."""
    from moorage.client.lease import Lending

    async with Lending(gpu, purpose or command[0], within_s, socket or None, None) as held:
        simulated = " (simulated)" if held.simulated else ""
        print_err(f"worker {held.worker} lends {', '.join(device.name for device in held.devices)}{simulated}")
        signals = _Signals()
        process = await _started(command, held)
        if isinstance(process, int):
            return process
        signals.go_to(process)
        ending = asyncio.get_running_loop().create_task(_end_once_asked(process, held, grace_s))
        try:
            code = await process.wait()
        finally:
            ending.cancel()
        return 128 - code if code < 0 else code


async def _started(command: tuple[str, ...], held: AsyncLease) -> Process | int:
    """Start the program with these GPUs; it ends with this process. Return the exit code if it cannot be run, and say
    why."""
    from moorage.system.parentage import die_with_parent

    try:
        return await asyncio.create_subprocess_exec(
            *command, env=held.child_environment(), preexec_fn=die_with_parent()
        )
    except OSError as error:
        report(f"{command[0]} cannot be run: {error.strerror}")
        return exit_code_of_start(error)


class _Signals:
    """Passes signals on to the program. What is to end it and comes before it began, it gets then."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._came: list[int] = []
        for number in PASSED_ON:
            asyncio.get_running_loop().add_signal_handler(number, self._come, number)

    def go_to(self, process: Process) -> None:
        self._process = process
        for number in self._came:
            self._come(number)

    def _come(self, number: int) -> None:
        if self._process is None:
            self._came += [number] if number in ENDING else []
        elif not comes_by_itself(number):
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)


async def _end_once_asked(process: Process, held: AsyncLease, grace_s: float) -> None:
    """End the program once the worker asks for the GPUs, or the lease is lost: SIGTERM, and later SIGKILL."""
    asked = await held.wait_asked_back()
    left_s = grace_s if held.lost else asked.left_s
    report(f"the worker asks for the GPUs ({asked.reason}): the program has {left_s:.0f} s to end")
    from moorage.worker.supervisor.checkpoint import takes
    from moorage.worker.supervisor.mps_notice import NOTICE_S

    async def announce() -> None:
        if held.mode == "mps":
            await announce_end(process.pid, held.environment, NOTICE_S)

    loop = asyncio.get_running_loop()
    kills_s = loop.time() + left_s
    with contextlib.suppress(ProcessLookupError):
        if takes(process.pid, signal.SIGTERM) is False:
            await announce()
        process.terminate()
        await asyncio.sleep(kills_s - min(NOTICE_S, left_s / 2) - loop.time())
        await announce()
        await asyncio.sleep(kills_s - loop.time())
        process.kill()
