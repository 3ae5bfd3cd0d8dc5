"""The program of `moorage serve package.module:name`: answers calls with a Python function, in a process of its own.

It is run as `python -m moorage.calls.function package.module:name`, with its socket in `MOORAGE_CALL_FD`. The name is a
function, a coroutine function, a generator (its values are the parts of the answer), or a class: that is made once, its
`load` is called, if it has one, and its `call` answers the calls; its methods that are an `endpoint` answer those for
them.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol

import msgspec

from moorage.calls.ahead import Given
from moorage.calls.wire import (
    AHEAD_MAX,
    ANSWER_BYTES_MAX,
    BODY_BYTES_MAX,
    FromProgram,
    ToProgram,
    decode_to_program,
    frame,
)
from moorage.schemas.arrays import ARRAY, decoded_array, encoded_array
from moorage.schemas.errors import MoorageError
from moorage.schemas.handler import Result, decode_result, encode_result
from moorage.schemas.names import SERVICE, is_service
from moorage.schemas.served import ENDPOINT_MARK, Answer, CallError, checked_headers
from moorage.schemas.service import AHEAD_VARIABLE, CONCURRENCY_VARIABLE, CONTENT_TYPE, FD_VARIABLE, NOT_ENDPOINTS
from moorage.system.loops import loop_factory
from moorage.system.spans import served_span

_MESSAGE_CHARS_MAX: Final = 2000
#: attributes of spans, for a member that is an attempt of a job
_ATTRIBUTES: Final = {
    f"moorage.{name.lower()}": value
    for name in ("TENANT", "JOB", "REPLICA")
    if (value := os.environ.get(f"MOORAGE_{name}"))
}


class Context:
    """What a function may know of its call, as its second argument if it takes one.

    `headers` are the caller's; `endpoint` is the method that it calls, "" for the service itself. `wait_ms` is how long
    its caller waits, in milliseconds from the start. `cancelled` is set once the caller waits no longer; a coroutine is
    also cancelled then.
    """

    def __init__(self, call: ToProgram) -> None:
        self.headers = call.headers
        self.endpoint = call.endpoint
        self.wait_ms = call.wait_ms
        self.cancelled = False

    def cancel(self) -> None:
        """Say that its caller waits no longer."""
        self.cancelled = True


class CannotServe(Exception):
    """The target is none: the message says why, and what to write."""


class Served:
    """What answers the calls: a function, or the methods of an object. `endpoints` are the names of the marked ones."""

    def __init__(self, found: Any, target: str) -> None:
        """Make it, if it is a class. Raises CannotServe, and what the target's own code raises."""
        if inspect.isclass(found):
            made = found()
            load = getattr(made, "load", None)
            if load is not None:
                loading = load()
                if inspect.isawaitable(loading):
                    raise CannotServe(f"{target}.load must be a plain method")
            functions = {name: getattr(made, name) for name in _endpoints_of(found, target)}
            if hasattr(made, "call"):
                functions[""] = made.call
            if not functions:
                raise CannotServe(f"the class {target} has no method call, and none that is an @endpoint")
        else:
            functions = {"": found}
        for each in functions.values():
            if not callable(each):
                kind = type(each).__name__
                raise CannotServe(f"{target} is a {kind}: name a function, or a class with a method call")
        self._target = target
        self._functions: dict[str, Callable[..., Any]] = functions
        self.endpoints = [name for name in functions if name]
        code = {name: _code_of(each) for name, each in functions.items()}
        kinds = {inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each) for each in code.values()}
        if len(kinds) > 1:
            raise CannotServe(f"{target}: either all methods that answer calls are async, or none is")
        [self.is_async] = kinds
        self._takes_context = {name: _positional(each) > 1 for name, each in functions.items()}
        #: whether it can hear that its caller waits no longer, while it runs
        self.hears_cancel = any(
            self._takes_context[name] or inspect.isgeneratorfunction(each) for name, each in code.items()
        )

    def span(self, *contexts: Context) -> AbstractContextManager[None]:
        """Return a span around the function's work for these calls, where their spans are exported."""
        return served_span(self._target, [context.headers for context in contexts], _ATTRIBUTES)

    def __call__(self, data: Any, context: Context | Sequence[Context]) -> Any:
        endpoint = context.endpoint if isinstance(context, Context) else ""
        function = self._functions.get(endpoint)
        if function is None:
            raise CallError(404, f"call one of its methods: {', '.join(self.endpoints)}")
        return function(data, context) if self._takes_context[endpoint] else function(data)


def _code_of(called: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that runs where this is called: behind `functools.partial`, and an object's `__call__`."""
    while isinstance(called, partial):
        called = called.func
    return called if inspect.isroutine(called) else type(called).__call__


def settled(value: Any) -> Any:
    """Return what a plain callable has returned, once that is there: it may be awaitable, as a decorator's may be."""
    if isinstance(value, AsyncIterator):
        return _each(value)
    if not inspect.isawaitable(value):
        return value
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_awaited(value))


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def _each(values: AsyncIterator[Any]) -> Iterator[Any]:
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        while True:
            try:
                value = runner.run(_awaited(anext(values)))
            except StopAsyncIteration:
                return
            yield value


def _endpoints_of(found: type, target: str) -> list[str]:
    """Return the names of the methods of a class that are marked as endpoints. Raises CannotServe."""
    names = [name for name in dir(found) if getattr(getattr(found, name, None), ENDPOINT_MARK, False)]
    for name in names:
        if not is_service(name) or name in NOT_ENDPOINTS:
            raise CannotServe(
                f"the method {name} of {target} cannot be an @endpoint: its name must be {SERVICE.pattern} and none of "
                + ", ".join(NOT_ENDPOINTS)
            )
    return names


def _found(target: str) -> Any:
    """Return what `package.module:name` names. Raises CannotServe, and what the import raises."""
    module, colon, name = target.partition(":")
    if not colon or not module or not name:
        raise CannotServe(f"{target!r} names no function: write package.module:function")
    if module.endswith(".py"):
        dotted = module.removesuffix(".py").removeprefix("./").replace("/", ".")
        raise CannotServe(f"{module} is a file, and not the name of a module: write {dotted}:{name}")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # it is there, and imports another one that is not
        raise CannotServe(
            f"there is no module {error.name} in {os.getcwd()} or installed for {sys.executable}"
        ) from None
    for part in name.split("."):
        if not hasattr(found, part):
            there = ", ".join(_functions_of(found))
            raise CannotServe(f"{module} has no {name}; " + (f"it has {there}" if there else "it has no function"))
        found = getattr(found, part)
    return found


def _functions_of(found: Any) -> list[str]:
    """Return the names of the functions and classes that are written in a module, or of the methods of a class."""
    home = getattr(found, "__module__", None) or getattr(found, "__name__", None)
    return [
        name
        for name, value in getattr(found, "__dict__", {}).items()
        if not name.startswith("_") and callable(value) and getattr(value, "__module__", None) == home
    ]


def _positional(function: Callable[..., Any]) -> int:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a function of C may have no signature
        return 1
    return sum(each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) and each.default is each.empty
               for each in parameters)  # fmt: skip


def data_of(call: ToProgram, body: bytes) -> Any:
    """Return a call's data: JSON and text as values if the caller says that they are, else bytes. Raises ValueError,
    and OSError or MemoryError for data that came in parts and cannot be read."""
    data = Path(call.file).read_bytes() if call.file else body
    if (array := call.headers.get(ARRAY)) is not None:
        return decoded_array(data, array)
    return decode_result(Result(call.headers.get(CONTENT_TYPE, ""), data))


def answer_frame(value: Any, *, answer: int = 0, part: int = 0) -> bytes:
    """Return the frame of a value: the answer of the call with this number, or a part of it."""
    own: dict[str, str] = {}
    if isinstance(value, Answer):
        value, own = value.value, checked_headers(value.headers)
    if (array := encoded_array(value)) is not None:
        result = encode_result(array[0])
        own = {ARRAY: array[1], **own}
    else:
        result = encode_result(value)
    if len(result.data) > ANSWER_BYTES_MAX:
        raise ValueError(f"the answer has {len(result.data)} bytes, allowed are {ANSWER_BYTES_MAX}")
    headers = {CONTENT_TYPE: result.content_type, **own}
    return frame(FromProgram(answer=answer, part=part, bytes=len(result.data), headers=headers), result.data)


def error_frame(call: ToProgram, error: BaseException) -> bytes:
    """Return the frame of a call that failed, whatever the exception: without one its caller waits for nothing."""
    own = error if isinstance(error, CallError) else None
    try:
        if own is not None:
            message = str(own.message)
        else:
            message = error.problem.message if isinstance(error, MoorageError) else str(error)
    except Exception as wrong:
        message = f"its message cannot be told: {type(wrong).__name__}"
    readable = message[:_MESSAGE_CHARS_MAX].encode(errors="backslashreplace").decode()  # names of files may be no text
    head = FromProgram(error=call.call, kind=type(error).__name__, message=readable)
    return frame(head if own is None else msgspec.structs.replace(head, code=own.code, headers=own.headers))


def _failed(call: ToProgram, error: BaseException) -> bytes:
    """Return the frame of a call whose function raised; what it did not mean to raise is in the log."""
    if not isinstance(error, CallError):
        traceback.print_exception(error)
    return error_frame(call, error)


class Writer(Protocol):
    """What a coroutine function writes its frames to: an `asyncio.StreamWriter`, or what stands in for one."""

    def write(self, data: bytes) -> None: ...

    async def drain(self) -> None: ...


class FrameWriter:
    """Writes frames whole, from any thread."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._lock = threading.Lock()

    def __call__(self, data: bytes) -> None:
        with self._lock:
            self._link.sendall(data)


def run(served: Served, call: ToProgram, body: bytes, context: Context, write: Callable[[bytes], None]) -> None:
    """Answer one call with a plain function or generator."""
    try:
        with served.span(context):
            value = settled(served(data_of(call, body), context))
            if isinstance(value, Iterator):
                for each in value:
                    if context.cancelled:
                        value = None
                        break
                    write(answer_frame(each, part=call.call))
                told = frame(FromProgram(answer=call.call, in_parts=True))
            else:
                told = answer_frame(value, answer=call.call)
    except BaseException as error:  # also sys.exit: in a thread it would end nothing but this call, and unheard
        told = _failed(call, error)
    write(told)


def serve_plain(served: Served, link: socket.socket, places: int, given: Given | None = None) -> None:
    """Answer calls with a plain function: in this thread if there is one place and nothing to hear meanwhile, else in
    as many threads as places."""
    write = FrameWriter(link)
    reader = link.makefile("rb")
    known: dict[int, Context] = {}
    pool = ThreadPoolExecutor(places, "call") if places > 1 or served.hears_cancel else None
    ahead = AHEAD_MAX if pool is None else 0  # one after another, in the order in which they were sent
    write(frame(FromProgram(ready=places, ahead=ahead, endpoints=served.endpoints)))
    for call, body in read_calls(reader):
        if call.cancel:
            context = known.get(call.cancel)
            if context is not None:
                context.cancel()
        elif call.call:
            if call.ahead and given is not None and not given.take(call.call):
                continue
            context = Context(call)
            if pool is None:
                run(served, call, body, context, write)
                continue
            known[call.call] = context
            future = pool.submit(run, served, call, body, context, write)
            future.add_done_callback(partial(_forget, known, call.call))
    if pool is not None:
        pool.shutdown(wait=True)


def read_calls(reader: BinaryIO) -> Iterator[tuple[ToProgram, bytes]]:
    """Yield the calls that a program is given until it ends; `reader` is closed then, as its socket would stay open."""
    with reader:
        while line := reader.readline():
            head: ToProgram = decode_to_program(line)
            if head.end:
                return
            yield head, reader.read(head.bytes) if head.bytes else b""


async def serve_async(served: Served, link: socket.socket, places: int) -> None:
    """Answer calls with a coroutine function, or an asynchronous generator, as tasks of one loop."""
    reader, writer = await asyncio.open_connection(sock=link, limit=BODY_BYTES_MAX)  # a line has the caller's headers
    running: dict[int, tuple[asyncio.Task[None], Context]] = {}
    writer.write(frame(FromProgram(ready=places, endpoints=served.endpoints)))
    while line := await reader.readline():
        call = decode_to_program(line)
        if call.end:
            break
        if call.cancel:
            task, context = running.get(call.cancel, (None, None))
            if task is not None and context is not None:
                context.cancel()
                task.cancel()
        elif call.call:
            body = await reader.readexactly(call.bytes) if call.bytes else b""
            context = Context(call)
            task = asyncio.get_running_loop().create_task(run_async(served, call, body, context, writer))
            running[call.call] = task, context
            task.add_done_callback(partial(_over, call, running, writer))
    if running:
        await asyncio.wait([task for task, _ in running.values()])
    await writer.drain()
    writer.close()
    await writer.wait_closed()  # the last answers may still lie in its buffer


def _forget(known: dict[int, Context], number: int, _: Future[None]) -> None:
    known.pop(number, None)


def _over(
    call: ToProgram,
    running: dict[int, tuple[asyncio.Task[None], Context]],
    writer: asyncio.StreamWriter,
    task: asyncio.Task[None],
) -> None:
    running.pop(call.call, None)
    if task.cancelled():  # also before its first step
        writer.write(error_frame(call, asyncio.CancelledError()))


async def run_async(served: Served, call: ToProgram, body: bytes, context: Context, writer: Writer) -> None:
    try:
        data = await asyncio.to_thread(data_of, call, body) if call.file else data_of(call, body)
        with served.span(context):
            value = served(data, context)
            if isinstance(value, AsyncIterator):
                async for each in value:
                    writer.write(answer_frame(each, part=call.call))
                    await writer.drain()
                told = frame(FromProgram(answer=call.call, in_parts=True))
            else:
                told = answer_frame(await value, answer=call.call)
    except asyncio.CancelledError:
        raise  # `_over` tells it
    except BaseException as error:
        told = _failed(call, error)
    writer.write(told)


def main(
    plain: Callable[[Served, socket.socket, int, Given], None] = serve_plain,
    in_loop: Callable[[Served, socket.socket, int], Coroutine[Any, Any, None]] = serve_async,
) -> int:
    """Answer calls until the member says that this ends: with `plain`, or `in_loop` for a coroutine function."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the member says when to end
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    link = socket.socket(fileno=int(os.environ.pop(FD_VARIABLE)))
    link.set_inheritable(False)
    given = Given(int(os.environ.pop(AHEAD_VARIABLE)))
    places = int(os.environ.pop(CONCURRENCY_VARIABLE))
    sys.path.insert(0, os.getcwd())
    try:
        served = Served(_found(sys.argv[1]), sys.argv[1])
        if served.endpoints and plain is not serve_plain:
            raise CannotServe("its methods are called one by one, and take no batches: leave out --batch")
    except CannotServe as error:
        print(f"error: {sys.argv[1]} cannot be served: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        print(f"error: {sys.argv[1]} cannot be served: {type(error).__name__}: {error}", file=sys.stderr)
        traceback.print_exc()
        return 1
    try:
        if served.is_async:
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                runner.run(in_loop(served, link, places))
        else:
            plain(served, link, places, given)
    except (BrokenPipeError, ConnectionResetError, msgspec.DecodeError):
        return 1  # the member is gone
    return 0


if __name__ == "__main__":
    sys.exit(main())
