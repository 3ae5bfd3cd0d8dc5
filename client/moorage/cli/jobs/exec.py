"""`moorage exec`, `moorage shell` and `moorage attach`: a command, a shell, or the own terminal of a running job."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Annotated, Final

from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.console import fail, here, print_err
from moorage.cli.framework.exit_codes import shell_code
from moorage.cli.framework.options import DEFAULTS, Options, with_client
from moorage.cli.jobs.selectors import HELP_ONE, LISTED, replica_of
from moorage.client.errors import ClientError
from moorage.client.login import who
from moorage.schemas.names import word_of

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient
    from moorage.client.command import Command
    from moorage.schemas.frames import Terminal

PIECE: Final = 64 * 1024
#: bash where there is one, and else the shell that every host has
SHELL: Final = ("sh", "-c", "if command -v bash >/dev/null; then exec bash; else exec sh; fi")
#: Ctrl-P Ctrl-Q
LEAVE_KEYS: Final = b"\x10\x11"
#: signals that are passed on to a command without a terminal
PASSED_ON: Final = {signal.SIGINT: "INT", signal.SIGTERM: "TERM", signal.SIGHUP: "HUP", signal.SIGQUIT: "QUIT"}

OneJob = Annotated[str, Parameter(help=f"{HELP_ONE} /N behind it: replica N, else 0.", value="JOB", lists=LISTED)]


def exec_(
    job: OneJob,
    /,
    *command: Annotated[str, Parameter(help="What to run, after --.", command=True)],
    tty: Annotated[
        bool, Parameter(help="Give the command a terminal, as moorage shell does.", names=("-t", "--tty"))
    ] = False,
    options: Options = DEFAULTS,
) -> int:
    """Run a command in a running job, beside it; returns its exit code, or 127 or 126 if there is no such program or it
    cannot be run.

    The command has the user, folder, environment and GPUs of the job's attempt, and ends with it. stdin, stdout and
    stderr are this command's own; Ctrl-C and other signals are passed on. It keeps no job running, and stops when this
    command does. Where keys are configured, it needs a right of its own: moorage admin nats-config --exec TENANT.
    """

    async def work(client: AsyncClient) -> int:
        return await _run(client, job, command, options, is_terminal=tty)

    return with_client(options, work, sends=True)


def shell(job: OneJob, /, *, options: Options = DEFAULTS) -> int:
    """Open a shell in a running job; returns its exit code.

    It is bash, or sh where there is no bash, with the user, folder, environment and GPUs of the job's attempt, and ends
    with it. The job goes on when the shell ends. Where stdin is no terminal, it reads its commands there, without one.
    `moorage exec JOB -- CMD` runs one command.
    """

    async def work(client: AsyncClient) -> int:
        return await _run(client, job, SHELL, options, is_terminal=sys.stdin.isatty())

    return with_client(options, work, sends=True)


def attach(job: OneJob, /, *, options: Options = DEFAULTS) -> int:
    """Hold the terminal of a job that was started by `moorage run -it`; returns the job's exit code.

    Ctrl-P Ctrl-Q leaves it: the job goes on, and `moorage attach` takes it again. A terminal that is lost in another
    way, as by a closed window, ends the job's input after 60 s. One caller holds it at a time. The first bytes are the
    newest that it has shown.
    """

    async def work(client: AsyncClient) -> int:
        from moorage.cli.jobs.selectors import one_id

        name, replica = replica_of(job)
        found = await one_id(client, name, "attach", acts=True)
        code = await hold(client, found, replica)
        if code is None:
            print_left(found, replica)
            return 0
        return code

    return with_client(options, work, sends=True)


async def hold(client: AsyncClient, job: str, replica: int = 0) -> int | None:
    """Hold the terminal of a job's own program; return its exit code, None if the user has left it.

    Raises `ClientError` for an attempt that does not run, or has no terminal.
    """
    from moorage.client.command import Command

    has_terminal = sys.stdin.isatty()
    async with Command.of(client._wire, job, (), replica=replica, size=_size(), by=who(), attach=True) as command:
        with _raw() if has_terminal else contextlib.nullcontext():
            return await _carry(command, is_terminal=has_terminal, leaves=has_terminal)


def print_left(job: str, replica: int = 0) -> None:
    """Print that the job goes on, and how its terminal is taken again."""
    word = word_of(job)
    again = f"{word}/{replica}" if replica else word
    print_err("")  # the terminal is cooked again
    print_err(f"this command has left the terminal of job {job}, which goes on")
    print_err(f"  take it again: moorage attach {again}{here()}   cancel the job: moorage cancel {word}{here()}")


async def _run(client: AsyncClient, word: str, argv: tuple[str, ...], options: Options, *, is_terminal: bool) -> int:
    """Run a command and return its exit code; 126 or 127 if it cannot be started, as a shell has it."""
    from moorage.cli.jobs.selectors import one_id
    from moorage.client.command import Command

    name, replica = replica_of(word)
    job = await one_id(client, name, "exec", acts=True)
    has_terminal = is_terminal and sys.stdin.isatty()
    term = os.environ.get("TERM", "") if is_terminal else ""
    asked = Command.of(client._wire, job, argv, replica=replica, tty=is_terminal, term=term, size=_size(), by=who())
    try:
        async with asked as command:
            with _raw() if has_terminal else contextlib.nullcontext():
                code = await _carry(command, is_terminal=has_terminal)
                assert code is not None
                return code
    except ClientError as error:
        if asked.start_code is None:
            raise
        fail(error, json=options.json)
        return asked.start_code


def _size() -> Terminal:
    from moorage.schemas.frames import Terminal

    try:
        columns, rows = os.get_terminal_size(sys.stdin.fileno())
    except (OSError, ValueError):
        return Terminal()
    return Terminal(rows, columns)


@contextlib.contextmanager
def _raw() -> Iterator[None]:
    """Have the terminal pass every key on: the one in the job acts on Ctrl-C and the like."""
    import termios
    import tty

    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    tty.setraw(number, termios.TCSADRAIN)  # what was typed meanwhile is kept
    try:
        yield
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


async def _carry(command: Command, *, is_terminal: bool, leaves: bool = False) -> int | None:
    """Carry bytes both ways until the command is over; return its exit code as a shell tells it.

    With `leaves`, Ctrl-P Ctrl-Q leaves it: then it is None.
    """
    feeding = asyncio.create_task(_feed(command, leaves=leaves))
    reading = asyncio.create_task(_print(command))
    async with _signals(command, is_terminal=is_terminal):
        try:
            await asyncio.wait((feeding, reading), return_when=asyncio.FIRST_COMPLETED)
            if feeding.done() and feeding.exception() is None and feeding.result() and not reading.done():
                await command.detach()
                return None
            code = await reading
        finally:
            feeding.cancel()
            reading.cancel()
            await asyncio.wait((feeding, reading))
    return shell_code(code)


async def _print(command: Command) -> int:
    """Print what the command writes until it is over; return its code."""
    while (found := await command.read()) is not None:
        stream, data = found
        await asyncio.to_thread(_write, 1 if stream == "out" else 2, data)
    return await command.wait()


def _write(number: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(number, left) :]


async def _feed(command: Command, *, leaves: bool) -> bool:
    """Pass standard input on, until its end; return whether the keys that leave a terminal were typed.

    With `leaves` it is a terminal, which ends only where it is lost: its end is not passed on.
    """
    keys = LeaveKeys()
    async for data in _stdin():
        passed, has_left = keys.of(data) if leaves else (data, False)
        if passed:
            await command.write(passed)
        if has_left:
            return True
    if not leaves:
        await command.write_eof()
    return False


class LeaveKeys:
    """Finds Ctrl-P Ctrl-Q in what is typed. A Ctrl-P is passed on with the next key, if that is not Ctrl-Q."""

    def __init__(self) -> None:
        self._held = b""

    def of(self, data: bytes) -> tuple[bytes, bool]:
        """Return what is to be passed on of the next bytes, and whether both keys were typed."""
        before, both, _ = (self._held + data).partition(LEAVE_KEYS)
        if both:
            return before, True
        self._held = before[-1:] if before.endswith(LEAVE_KEYS[:1]) else b""
        return before.removesuffix(self._held) if self._held else before, False


async def _stdin() -> AsyncIterator[bytes]:
    """Yield what comes on standard input. A file cannot be awaited, and is read in a thread."""
    loop, number = asyncio.get_running_loop(), sys.stdin.fileno()
    ready = asyncio.Event()
    try:
        loop.add_reader(number, ready.set)
    except OSError:
        while data := await asyncio.to_thread(os.read, number, PIECE):
            yield data
        return
    try:
        while True:
            await ready.wait()
            ready.clear()
            if not select.select([number], [], [], 0)[0]:  # told twice of the same bytes; a read would block
                continue
            data = os.read(number, PIECE)
            if not data:
                return
            yield data
    except OSError:  # EIO: the terminal is gone
        return
    finally:
        loop.remove_reader(number)


@contextlib.asynccontextmanager
async def _signals(command: Command, *, is_terminal: bool) -> AsyncIterator[None]:
    """Pass on the terminal's size, and signals where the keys that make them do not pass a terminal."""
    loop = asyncio.get_running_loop()
    sending: set[asyncio.Task[None]] = set()

    def begin(number: signal.Signals) -> None:
        work = command.resize(_size()) if number == signal.SIGWINCH else command.signal(PASSED_ON[number])
        task = loop.create_task(work)
        sending.add(task)
        task.add_done_callback(sending.discard)

    numbers = [signal.SIGWINCH] if is_terminal else [*PASSED_ON]
    for number in numbers:
        loop.add_signal_handler(number, begin, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
        for task in list(sending):
            task.cancel()
        await asyncio.gather(*sending, return_exceptions=True)
