"""Serve the calls of a service with a program, until it is asked to end or the program has ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from moorage.bus.connect_logged import Refusals
from moorage.bus.connection import connect
from moorage.bus.contexts import Context
from moorage.bus.errors import BusError, PermissionRefused
from moorage.calls.batcher import OnFrame
from moorage.calls.batches import Batches
from moorage.calls.child import END_S, BeforeKill
from moorage.calls.discovery import PREFIX
from moorage.calls.engine_sleep import EngineSleep
from moorage.calls.http_program import HttpProgram
from moorage.calls.messenger import CLOSE_S, Messenger, Name, attempt_of
from moorage.calls.program import Program
from moorage.calls.wire import AHEAD_MAX, FromProgram
from moorage.schemas.held_calls import HELD_VARIABLE, most_held
from moorage.schemas.http_service import HttpSpec, SleepBy
from moorage.schemas.service import (
    CONCURRENCY_MAX,
    INPUT_BYTES_DEFAULT,
    OUTPUT_BYTES_DEFAULT,
    READY_VARIABLE,
    VERSION_VARIABLE,
    BatchSpec,
    QueueSpec,
    too_many,
)
from moorage.system.passed_signals import PASSED_ON

#: of the grace, what is kept to answer the calls that do not end in it, and to end the program
LAST_S: Final = 1.0
LAST_PART: Final = 0.25

log = logging.getLogger("moorage.calls")


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """What is served, where, and by what. `grace_s` is how long calls may take once the member is asked to end; None
    for as long as they need."""

    context: Context
    name: Name
    argv: Sequence[str]
    concurrency: int = 1
    grace_s: float | None = None
    input_bytes: int = INPUT_BYTES_DEFAULT
    output_bytes: int = OUTPUT_BYTES_DEFAULT
    batch: BatchSpec | None = None
    queue: QueueSpec | None = None
    http: HttpSpec | None = None
    sleep_by: SleepBy | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.concurrency <= CONCURRENCY_MAX:
            raise ValueError(f"concurrency must be 1..{CONCURRENCY_MAX}, found {self.concurrency}")
        wrong = None if self.batch is None else self.batch.trouble or too_many(self.concurrency, self.batch)
        wrong = wrong or (None if self.http is None else self.http.trouble)
        if self.http is not None and self.batch is not None:
            raise ValueError("a server of HTTP takes each call by itself: leave out batch, or http")
        if self.sleep_by is not None:
            if self.http is None:
                raise ValueError("the service sleeps by a request, and its program is no HTTP server: --http /health")
            if reached := self.sleep_by.reached((*self.http.paths, self.http.path)):
                raise ValueError(f"callers would reach {reached}, which is the worker's alone: --paths without it")
        if wrong := wrong or (None if self.queue is None else self.queue.trouble):
            raise ValueError(f"{wrong.message}: found {wrong.found}, allowed are {wrong.allowed}")


def function_argv(target: str, batch: BatchSpec | None = None) -> list[str]:
    """Return the program that serves with a Python function: of one call, or of a list of them."""
    return [sys.executable, "-u", "-m", "moorage.calls.function", target, *([] if batch is None else ["--batch"])]


async def serve(
    serving: Serving,
    environment: Mapping[str, str] | None = None,
    on_ready: Callable[[Messenger], None] | None = None,
    before_kill: BeforeKill | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT (then drain, and return 0) or the end of the program (then return its code, 1 if
    that is 0, 128 and the signal's number for a signal). `on_ready` is called once calls are taken, `before_kill`
    before a program that does not end by itself is killed.

    Raises BusError if there is no server, or the key may not serve, and OSError if the program cannot be started.
    """
    loop = asyncio.get_running_loop()
    asked, over, ready = asyncio.Event(), asyncio.Event(), asyncio.Event()
    said: list[str] = []
    ready_file = _ReadyFile(os.environ.get(READY_VARIABLE, ""))
    variables = dict(os.environ if environment is None else environment)
    held = variables.pop(HELD_VARIABLE, "")  # its own alone: a member that the program starts has another file
    places = serving.concurrency

    refusals = Refusals(log)
    named: list[Messenger] = []  # which knows how subjects are written

    def on_error(error: BusError) -> None:
        if not isinstance(error, PermissionRefused):
            refusals.on_error(error)
        elif not error.subject.startswith(PREFIX.lower()):
            refusals.on_error(error if not named else named[0].as_written(error))

    connection = await connect(
        serving.context,
        f"service {serving.name.service}",
        inbox_prefix=serving.name.subjects.member_inbox(serving.name.tenant),
        on_error=on_error,
        on_regained=refusals.on_regained,
    )
    async with connection:
        attempt = attempt_of(variables)
        folder = None if attempt is None else Path(variables.get("HOME", ""))  # the attempt's own, which goes with it
        messenger = Messenger(
            connection,
            serving.name,
            places,
            attempt,
            serving.input_bytes,
            folder,
            serving.queue,
            serving.output_bytes,
            variables.get(VERSION_VARIABLE, ""),
        )

        named.append(messenger)

        def on_frame(head: FromProgram, body: bytes) -> None:
            if head.ready and ready.is_set():
                log.warning("the program says again that it is ready: that changes nothing")
            elif head.ready:
                messenger.endpoints = frozenset(head.endpoints)
                messenger.member.allow(min(places, max(1, head.ready)), ahead=min(head.ahead, AHEAD_MAX))
                ready.set()
            else:
                answered(head, body)

        def on_load(running: int, waiting: int) -> None:
            messenger.member.engine_has(running, waiting, time.monotonic())

        def on_over(why: str) -> None:
            said.append(why)
            over.set()

        program: Program | HttpProgram
        if serving.http is None:
            program = messenger.program = Program(on_frame, on_over, before_kill)
        else:
            failed = messenger.member.meter.failed
            program = messenger.program = HttpProgram(
                serving.http, on_frame, on_over, before_kill, failed, ready_file.show, on_load, serving.sleep_by
            )
        answered: OnFrame = messenger.on_frame
        if serving.batch is not None:
            answered = messenger.run_in_batches(program, Batches(serving.batch, places))
        with _signals(loop, asked.set, program.signal):
            await messenger.open()
            if held:
                most = most_held(places, serving.batch, serving.queue)
                messenger.hold_in(Path(held), most)
            await program.start(serving.argv, places, variables)
            try:
                await _first(ready, asked, over)
                if ready.is_set() and not over.is_set() and not asked.is_set():
                    await messenger.take()
                    if on_ready is not None:
                        on_ready(messenger)
                    async with contextlib.AsyncExitStack() as listens:
                        own = Path(held).parent if held else folder  # a job may have given itself another HOME
                        if own is not None and isinstance(program, HttpProgram) and program.can_sleep:
                            await listens.enter_async_context(EngineSleep(own, program, messenger.member))
                        listens.enter_context(ready_file)
                        await _first(asked, over)
                if over.is_set():
                    log.error("%s%s", said[0], "" if ready.is_set() else " before it was ready")
                    await messenger.died()
                    await messenger.close()
                    return _exit_code(await program.finish())
                await _drained(messenger, over, serving.grace_s)
                half_s = None if serving.grace_s is None else min(LAST_S, serving.grace_s * LAST_PART) / 2
                await messenger.close(CLOSE_S if half_s is None else half_s)
                await program.finish(END_S if half_s is None else half_s)
                return 0
            finally:
                await program.kill()


class _ReadyFile:
    """The file that tells the worker of this attempt that calls are taken, if it looks for one: there as long as this
    is entered, and the program is well."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._is_well = True
        self._is_entered = False

    def __enter__(self) -> None:
        self._is_entered = True
        self.show(self._is_well)

    def __exit__(self, *_: object) -> None:
        self._is_entered = False
        self.show(self._is_well)

    def show(self, is_well: bool) -> None:
        """Say whether the program is well."""
        self._is_well = is_well
        if not self._path:
            return
        if is_well and self._is_entered:
            with open(self._path, "wb"):
                pass
        else:
            with contextlib.suppress(OSError):
                os.unlink(self._path)


def _exit_code(code: int) -> int:
    """Return the member's exit code for that of its program, as a shell has it: the program should not have ended."""
    return 128 - code if code < 0 else code or 1


async def _drained(messenger: Messenger, over: asyncio.Event, grace_s: float | None) -> None:
    """Finish what the member has, within the grace; answer the rest as died."""
    draining = asyncio.create_task(messenger.drain())
    dying = asyncio.create_task(over.wait())
    timeout = None if grace_s is None else grace_s - min(LAST_S, grace_s * LAST_PART)
    await asyncio.wait((draining, dying), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    messenger.give_up()
    for task in (draining, dying):
        task.cancel()
    await asyncio.wait((draining, dying))


async def _first(*events: asyncio.Event) -> None:
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()


@contextlib.contextmanager
def _signals(
    loop: asyncio.AbstractEventLoop, act: Callable[[], None], pass_on: Callable[[int], None]
) -> Iterator[None]:
    """Call `act` at what ends the member; the program gets all other signals."""
    for number in PASSED_ON:
        if number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, act)
        elif signal.getsignal(number) is not signal.SIG_IGN:  # as `nohup` has it
            loop.add_signal_handler(number, pass_on, number)
    try:
        yield
    finally:
        for number in PASSED_ON:
            loop.remove_signal_handler(number)
