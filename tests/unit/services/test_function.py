"""The program of a function: what its member hears of calls that cannot be answered."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from moorage.calls.ahead import Ahead, Given
from moorage.calls.function import Served, serve_async, serve_plain
from moorage.calls.wire import Frames, ToProgram, frame


@pytest.mark.parametrize("places", [1, 2])
@pytest.mark.parametrize("is_async", [False, True])
def test_data_in_parts_that_cannot_be_read_fail_their_call_alone(tmp_path: Path, places: int, is_async: bool) -> None:
    async def size_later(data: bytes) -> int:
        return len(data)

    (tmp_path / "there").write_bytes(b"abc")
    member, program = socket.socketpair()
    with member:
        for number, name in enumerate(("gone", "there"), 1):
            member.sendall(frame(ToProgram(number, file=str(tmp_path / name))))
        member.sendall(frame(ToProgram(end=True)))
        if is_async:
            asyncio.run(serve_async(Served(size_later, "size_later"), program, places))
        else:
            with program:
                serve_plain(Served(len, "len"), program, places)
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
