"""Frames of output name the offsets of their bytes, also where the supervisor dropped pieces in between."""

import random

import pytest

from moorage.schemas import frames
from moorage.schemas.codec import Decoder
from moorage.worker.drivers.output_frames import OutputFrames
from moorage.worker.supervisor.protocol import Ended, Output

NAME = ("t", "job", 0, 1, 7)
read = Decoder[frames.Output](frames.Output)


def ended(size: int) -> Ended:
    return Ended(key="k", reason="exit", proof="cgroup", exit_code=0, stdout_bytes=size)


def piece(offset: int, data: bytes) -> Output:
    return Output(key="k", stream="stdout", offset=offset, data=data)


def test_half_a_character_before_a_gap_keeps_its_offset() -> None:
    output = OutputFrames()
    output.add(NAME, piece(0, b"ab\xc3"))
    output.add(NAME, piece(100, b"cd\xe2\x82"))
    output.end(NAME, ended(200))
    sent = [read(data) for name, data in output.take()]
    got = [(each.offset, each.next, each.data or each.text.encode(), each.end) for each in sent if each.stream == "out"]
    assert got == [
        (0, 2, b"ab", False),
        (2, 3, b"\xc3", False),
        (100, 102, b"cd", False),
        (102, 104, b"\xe2\x82", False),
        (200, 200, b"", True),
    ]


@pytest.mark.parametrize("seed", range(30))
def test_each_frame_has_the_bytes_that_its_offsets_name(seed: int) -> None:
    draw = random.Random(seed)
    letters = ["a", "ä", "€", "😀", "\n"]
    whole = b"".join(
        draw.randbytes(1) if draw.random() < 0.1 else draw.choice(letters).encode() for _ in range(draw.randrange(200))
    )
    output, at, given = OutputFrames(), 0, bytearray(len(whole))
    sent: list[frames.Output] = []
    while at < len(whole):
        size = draw.randrange(1, 9)
        if draw.random() < 0.8:
            output.add(NAME, piece(at, whole[at : at + size]))
            given[at : at + size] = b"\1" * len(whole[at : at + size])
        at += size
        if draw.random() < 0.5:
            sent += [read(data) for name, data in output.take()]
    output.end(NAME, ended(len(whole)))
    sent += [each for each in (read(data) for name, data in output.take()) if each.stream == "out"]
    seen = bytearray(len(whole))
    for each in sent:
        data = each.text.encode() if each.data is None else each.data
        assert data == whole[each.offset : each.next]
        for byte in range(each.offset, each.next):
            assert not seen[byte]
            seen[byte] = 1
    assert seen == given
    assert [each.end for each in sent] == [False] * (len(sent) - 1) + [True]
