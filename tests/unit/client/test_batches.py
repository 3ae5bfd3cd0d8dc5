"""Requests of one submit in frames: as few as the bounds of a frame allow, each within both."""

from __future__ import annotations

import msgspec

from moorage.client.batches import BATCH_MAX, frames_of
from moorage.schemas.codec import FRAME_BYTES_MAX


def test_a_frame_has_at_most_so_many_requests() -> None:
    bodies = [b"%d" % number for number in range(2 * BATCH_MAX + 1)]
    frames = [msgspec.json.decode(frame) for frame in frames_of(bodies)]
    assert [len(frame) for frame in frames] == [BATCH_MAX, BATCH_MAX, 1]
    assert [number for frame in frames for number in frame] == list(range(len(bodies)))


def test_a_frame_has_at_most_so_many_bytes() -> None:
    body = b'"' + b"x" * 60_000 + b'"'
    frames = frames_of([body] * 40)
    assert all(len(frame) <= FRAME_BYTES_MAX for frame in frames)
    assert [len(msgspec.json.decode(frame)) for frame in frames] == [15, 15, 10]


def test_of_no_request_there_is_no_frame() -> None:
    assert frames_of([]) == []
