"""Frames: cut as one likes, damaged, and too long."""

from __future__ import annotations

import asyncio

import pytest

from moorage.system.framing import FrameDamaged, FrameReader, FrameTooLarge, body_at, framed, read_frame

BODIES = [b"", b"a", bytes(range(256)), b"\0" * 1000]
STREAM = b"".join(framed(body, 1000) for body in BODIES)


@pytest.mark.parametrize("step", [1, 2, 7, 9, 4096])
def test_bodies_arrive_whole_however_the_stream_is_cut(step: int) -> None:
    reader = FrameReader(1000)
    found = [body for at in range(0, len(STREAM), step) for body in reader.feed(STREAM[at : at + step])]
    assert found == BODIES


def test_a_bit_that_changed_is_noticed_in_length_checksum_and_body() -> None:
    frame = framed(b"a body", 1000)
    for at in range(len(frame) * 8):
        changed = bytearray(frame)
        changed[at // 8] ^= 1 << at % 8
        try:
            assert body_at(changed, 0, 1000) is None
        except (FrameDamaged, FrameTooLarge):
            pass


def test_a_body_beyond_the_bound_is_refused_on_both_sides() -> None:
    with pytest.raises(FrameTooLarge, match="a frame of 5 bytes, at most 4 are allowed"):
        framed(b"12345", 4)
    with pytest.raises(FrameTooLarge):
        FrameReader(4).feed(framed(b"12345", 5)[:8])


async def test_a_connection_that_ends_within_a_frame_has_no_more_of_them() -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(framed(b"one", 9) + framed(b"two", 9)[:-1])
    reader.feed_eof()
    assert [await read_frame(reader, 9), await read_frame(reader, 9)] == [b"one", None]
    damaged = asyncio.StreamReader()
    damaged.feed_data(framed(b"one", 9)[:-1] + b"E")
    with pytest.raises(FrameDamaged):
        await read_frame(damaged, 9)
