"""Frames of the supervisor's socket."""

import pytest

from moorage.system.framing import FrameReader, FrameTooLarge
from moorage.worker.supervisor import protocol as protocol
from moorage.worker.supervisor.protocol import (
    FRAME_BYTES_MAX,
    Done,
    Ended,
    Fence,
    Forget,
    List,
    Message,
    Output,
    Ping,
    Request,
    Shutdown,
    Start,
    StartAttempt,
    Started,
    decode_messages,
    decode_request,
    encode_messages,
    encode_request,
)

REQUESTS: list[Request] = [
    Start(n=1, attempts=(StartAttempt(key="t/j/0/1/7", argv=("a", ""), env={"A": "ä"}),)),
    Fence(n=2, deadline_boottime_s=None, grace_s=1.5),
    List(n=3),
    Forget(n=4, keys=("a", "b")),
    Ping(n=5),
    Shutdown(n=6, grace_s=0.0),
]
MESSAGES: list[Message] = [
    Done(n=1),
    Started(key="a", pid=7, started_boottime_s=1.25),
    Output(key="a", stream="stderr", offset=3, data=b"\0\xff"),
    Ended(key="a", reason="exit", proof="walk", exit_code=0),
]


@pytest.mark.parametrize("step", [1, 2, 3, 5, 1000])
def test_frames_arrive_whole_however_they_are_cut(step: int) -> None:
    stream = b"".join(encode_request(request) for request in REQUESTS)
    reader = FrameReader(FRAME_BYTES_MAX)
    bodies: list[bytes] = []
    for at in range(0, len(stream), step):
        bodies += reader.feed(stream[at : at + step])
    assert [decode_request(body) for body in bodies] == REQUESTS


def test_messages_of_one_turn_share_a_frame() -> None:
    (body,) = FrameReader(FRAME_BYTES_MAX).feed(encode_messages(MESSAGES))
    assert decode_messages(body) == MESSAGES


def test_messages_past_the_bound_are_cut_into_frames_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "FRAME_BYTES_MAX", 64)
    bodies = FrameReader(FRAME_BYTES_MAX).feed(encode_messages(MESSAGES))
    assert len(bodies) > 1
    assert [message for body in bodies for message in decode_messages(body)] == MESSAGES


def test_a_frame_past_the_bound_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "FRAME_BYTES_MAX", 64)
    with pytest.raises(FrameTooLarge):
        encode_request(Forget(n=1, keys=("x" * 100,)))
