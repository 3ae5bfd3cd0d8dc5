"""The program of a function: what its member hears of calls that cannot be answered."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

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
