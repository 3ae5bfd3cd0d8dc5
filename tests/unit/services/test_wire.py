"""The frames between a member and its program."""

from __future__ import annotations

import pytest

from moorage.calls.wire import BadFrame, Frames, FromProgram


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
