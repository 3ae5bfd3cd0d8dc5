"""The frames between a member and its program."""

from __future__ import annotations

import asyncio

import pytest

from moorage.calls.program import Program
from moorage.calls.wire import BadFrame, Frames, FromProgram, ToProgram, frame


def test_the_frames_of_the_page_are_read_in_any_pieces() -> None:
    sent = b'{"ready": 2}\n{"answer": 7, "bytes": 3, "later": []}\nabc{"error": 8, "message": "no"}\n'
    for size in range(1, len(sent)):
        frames, got = Frames(), []
        for at in range(0, len(sent), size):
            got += list(frames.feed(sent[at : at + size]))
        assert got == [
            (FromProgram(ready=2), b""),
            (FromProgram(answer=7, bytes=3), b"abc"),
            (FromProgram(error=8, message="no"), b""),
        ]
    for bad in (b"[]\n", b'{"answer": "x"}\n', b'{"answer": 1, "bytes": -1}\n', b"x" * 300_000):
        with pytest.raises(BadFrame):
            list(Frames().feed(bad))


class Socket(asyncio.Transport):
    """What is written, by each write."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def is_closing(self) -> bool:
        return False


def test_what_is_sent_as_answers_of_one_read_free_places_leaves_in_one_write() -> None:
    program = Program(lambda head, body: program.send(ToProgram(head.answer + 10, len(body)), body), lambda why: None)
    socket = program._transport = Socket()
    program.data_received(frame(FromProgram(answer=1, bytes=2), b"ab") + frame(FromProgram(answer=2)) + b"no frame")
    program.send(ToProgram(13))
    assert socket.written == [frame(ToProgram(11, 2), b"ab") + frame(ToProgram(12)), frame(ToProgram(13))]
