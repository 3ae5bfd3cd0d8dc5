"""The program of a function: what its member hears of calls that cannot be answered."""

from __future__ import annotations

import asyncio
import functools
import os
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from moorage.calls.ahead import Ahead, Given
from moorage.calls.function import serve_async, serve_plain
from moorage.calls.served import Served
from moorage.calls.wire import Frames, ToProgram, frame


@pytest.mark.parametrize("places", [1, 2])
@pytest.mark.parametrize("is_async", [False, True])
def test_data_in_parts_that_cannot_be_read_fail_their_call_alone(tmp_path: Path, places: int, is_async: bool) -> None:
    async def size_later(data: bytes) -> int:
        return len(data)

    (tmp_path / "there").write_bytes(b"abc")
    member, program = socket.socketpair()
    with member, program:
        for number, name in enumerate(("gone", "there"), 1):
            member.sendall(frame(ToProgram(number, file=str(tmp_path / name))))
        member.sendall(frame(ToProgram(end=True)))
        if is_async:
            asyncio.run(serve_async(Served(size_later, "size_later"), program, places))
        else:
            serve_plain(Served(len, "len"), program, places)
            program.close()
        said = {head.error or head.answer: (head.kind, body) for head, body in Frames().feed(member.recv(1 << 16))}
    assert said == {0: ("", b""), 1: ("FileNotFoundError", b""), 2: ("", b"3")}


def test_a_call_that_was_taken_back_from_ahead_is_not_run_and_the_later_ones_are() -> None:
    ran: list[bytes] = []
    ahead = Ahead()
    member, program = socket.socketpair()
    with member, program:
        for number in (1, 2):
            ahead.put(number)
        assert ahead.take_back() == [1, 2]
        for number in (3, 4):
            ahead.put(number)
        for number in (1, 2, 3, 4):
            member.sendall(frame(ToProgram(number, bytes=1, ahead=True), b"%d" % number))
        member.sendall(frame(ToProgram(end=True)))
        serve_plain(Served(ran.append, "append"), program, 1, Given(os.dup(ahead.theirs)))
        assert ran == [b"3", b"4"]
        assert ahead.take_back() == [], "what has begun cannot be taken back"


class Later:
    """An object that is called, and answers later."""

    async def __call__(self, data: Any) -> Any:
        await asyncio.sleep(0)
        return data


async def later(data: Any, more: str = "") -> Any:
    await asyncio.sleep(0)
    return data


@functools.wraps(later)
def wrapped(data: Any) -> Any:
    return later(data)


async def parts(data: Any) -> AsyncIterator[Any]:
    yield data


def answers(served: Served, is_batch: bool) -> list[bytes]:
    """What one call with the data `[1]` is answered: its parts, or the answer."""
    member, program = socket.socketpair()
    with member, program:
        call = ToProgram(1, bytes=3, headers={"Content-Type": "application/json"})
        member.sendall(frame(call, b"[1]") + frame(ToProgram(end=True)))
        served.in_batches = is_batch
        if served.is_async:
            asyncio.run(serve_async(served, program, 1))
        else:
            serve_plain(served, program, 1)
            program.close()
        return [body for head, body in Frames().feed(member.recv(1 << 16)) if not head.ready and body]


@pytest.mark.parametrize("is_batch", [False, True])
@pytest.mark.parametrize(
    "function",
    [Later(), Later().__call__, later, functools.partial(later, more="x"), wrapped, lambda data: later(data)],
)
def test_whatever_answers_later_is_awaited(function: Callable[[Any], Any], is_batch: bool) -> None:
    """They were ready, and failed every call: "Encoding objects of type coroutine is unsupported"."""
    assert answers(Served(function, "it"), is_batch) == [b"[1]"]


@pytest.mark.parametrize("is_batch", [False, True])
@pytest.mark.parametrize("function", [parts, lambda data: parts(data)])
def test_whatever_answers_in_parts_later_is_awaited(function: Callable[[Any], Any], is_batch: bool) -> None:
    assert answers(Served(function, "it"), is_batch) == [b"[1]"]


@pytest.mark.parametrize(
    "kind", ["application/json", "application/json; charset=utf-8", "APPLICATION/JSON", "application/ld+json;a=b"]
)
def test_json_is_a_value_however_its_type_is_written(kind: str) -> None:
    seen: list[Any] = []
    member, program = socket.socketpair()
    with member, program:
        for number, named in enumerate((kind, "Text/Plain", "application/jsonish"), 1):
            member.sendall(frame(ToProgram(number, bytes=3, headers={"Content-Type": named}), b"[1]"))
        member.sendall(frame(ToProgram(end=True)))
        serve_plain(Served(seen.append, "append"), program, 1)
    assert seen == [[1], "[1]", b"[1]"]
