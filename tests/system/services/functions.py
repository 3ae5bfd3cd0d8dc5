"""What the members of the tests serve with."""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from moorage.serve import Answer, CallError, endpoint


def echo(data: Any) -> Any:
    return data


def pid(data: Any) -> str:
    return str(os.getpid())


#: the member of this program: once it is gone, as where a test has failed, no gate holds anything
MEMBER = os.getppid()


def _entered(data: bytes | str) -> Path:
    """Note at a `Gate` that this call runs, and return the file that opens it."""
    gate = Path(os.fsdecode(data))
    number = os.open(gate / "runs", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(number, b"x")
    os.close(number)
    return gate / "open"


def _is_held(opened: Path) -> bool:
    return not opened.exists() and os.getppid() == MEMBER


def held(data: bytes | str) -> bytes | str:
    """Occupy a thread until the test opens the `Gate` that the data names; without data return at once."""
    if data:
        opened = _entered(data)
        while _is_held(opened):
            time.sleep(0.01)
    return data


async def aheld(data: bytes | str) -> bytes | str:
    """Do the same without a thread, so that a cancel ends it."""
    if data:
        opened = _entered(data)
        while _is_held(opened):  # noqa: ASYNC110 - another process opens it
            await asyncio.sleep(0.01)
    return data


def die(data: bytes | str) -> bytes | str:
    if data == b"die":
        os.kill(os.getpid(), 9)
    if data == b"leave":
        os._exit(3)
    return held(data)


def digest(data: bytes) -> list[Any]:
    return [len(data), hashlib.sha256(data).hexdigest(), [path.name for path in Path.home().glob(".moorage-input-*")]]


def wrong(data: Any) -> Any:
    raise ValueError(f"no such thing: {data!r}")


class NoSuchWord(CallError):
    """A service may have classes of its own for its errors."""


def own(data: Any) -> Any:
    """Answer with headers, or with an error of the service's own."""
    if data == b"bad":
        raise NoSuchWord(422, "no such\nword: é", {"X-Field": "word", "Content-Type": "text/plain"})
    if data == b"code":
        raise CallError(200, "no error")
    return Answer({"size": len(data)}, {"Moorage-Part": "7"} if data == b"part" else {"X-Model": "tiny"})


class Untold(Exception):
    def __str__(self) -> str:
        raise RuntimeError("it cannot say what is wrong")


#: what a function may raise that is no ordinary exception
ODD = {b"exit": SystemExit(3), b"interrupt": KeyboardInterrupt(), b"untold": Untold(), b"no text": OSError("\udcff")}


def odd(data: bytes) -> bytes:
    if data in ODD:
        raise ODD[data]
    return data


async def aodd(data: bytes) -> bytes:
    return odd(data)


def endless(data: bytes) -> Iterator[int]:
    """Parts without an end, of which each takes so many milliseconds; closing it is noted."""
    try:
        while True:
            time.sleep(float(data) / 1000)
            yield 1
    finally:
        print("closed", file=sys.stderr, flush=True)


def until_cancelled(data: bytes, context: Any) -> bytes:
    while data == b"wait" and not context.cancelled:
        time.sleep(0.01)
    return data


def large(data: bytes) -> bytes:
    return bytes(int(data))


def told(data: Any, context: Any) -> dict[str, Any]:
    return {"headers": context.headers, "wait_ms": context.wait_ms, "cancelled": context.cancelled}


async def nap(data: Any) -> Any:
    await asyncio.sleep(float(data) / 1000)
    return data


def count(data: bytes) -> Iterator[int]:
    yield from range(int(data))


async def acount(data: bytes) -> AsyncIterator[int]:
    for each in range(int(data)):
        await asyncio.sleep(0)
        yield each


class Model:
    def load(self) -> None:
        self.loaded = os.getpid()

    def call(self, data: Any) -> list[Any]:
        return [self.loaded == os.getpid(), data]


def batch(items: list[bytes]) -> list[Any]:
    """Answer each of a batch with its size and the item; one is an error, one fails all, one spoils the list."""
    if b"raise" in items:
        raise OSError("no more")
    if b"short" in items:
        return items[1:]
    return [ValueError("mine") if item == b"error" else [len(items), item.decode()] for item in items]


def steps(items: list[bytes]) -> Iterator[list[Any]]:
    """Answer each of a batch in as many parts as it says."""
    for step in range(max(map(int, items))):
        yield [step if step < int(item) else StopIteration for item in items]


class text:
    """Two methods, and nothing for the service itself; the tests name a service as what it serves."""

    @endpoint
    def size(self, data: Any) -> int:
        return len(data)

    @endpoint
    def turned(self, data: Any, context: Any) -> list[Any]:
        return [data[::-1], context.endpoint]

    def hidden(self, data: Any) -> None:
        raise AssertionError("it is no endpoint")


def swift(data: bytes) -> bytes | str:
    """Answer at once, or hold one call at this member's gate."""
    return held(data) if data.startswith(b"/") else data


class older:
    """An older version of `text`, without one of its methods."""

    @endpoint
    def size(self, data: Any) -> int:
        return len(data)


NUMBER = 7


def noted(data: bytes) -> bytes:
    """Note that this call runs, where the test counts, before anything else; then take up to 30 ms."""
    number = os.open(os.environ["RUNS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(number, data + b"\n")
    os.close(number)
    time.sleep((int(data) % 30) / 1000)
    return data[::-1]


class Traced:
    """Answers with the trace and the parent of the span in which it runs, as hexadecimal numbers."""

    def load(self) -> None:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider

        trace.set_tracer_provider(TracerProvider())

    def call(self, data: Any) -> list[str]:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import Span

        span = trace.get_current_span()
        assert isinstance(span, Span)
        if data == "fail":
            raise ValueError("as asked")
        parent = f"{span.parent.span_id:016x}" if span.parent else ""
        return [span.name, f"{span.context.trace_id:032x}", parent]


def doubled(data: Any) -> Any:
    """Twice an array."""
    return data * 2


def rows(data: Any) -> Iterator[Any]:
    """The rows of an array, as parts."""
    yield from data


def summed(items: list[Any]) -> Any:
    """A batch: a row for each array, with its sum."""
    import numpy

    return numpy.stack([item.sum(keepdims=True).reshape(1) for item in items])


def word(data: str) -> dict[str, Any]:
    return {"text": data, "size": len(data)}


def words(data: str) -> Iterator[dict[str, Any]]:
    yield from (word(each) for each in data.split())


def mixed(data: Any) -> Any:
    """Fail, answer with bytes, or wait at a `Gate`, as the data say; return all other data."""
    if data == "fail":
        raise ValueError("no such")
    if data == "bytes":
        return b"\x00\xff"
    return held(data) if isinstance(data, str) and data.startswith("/") else data
