"""What leaves: an answer that the server would not take is replaced by one that says so."""

from __future__ import annotations

import msgspec
import pytest

from moorage.scheduler.leader.outgoing import coalesced
from moorage.schemas.codec import encode

TAKES = 1_000


@pytest.mark.parametrize("json", [True, False])
@pytest.mark.parametrize(("more", "arrives"), [(0, True), (1, False)])
def test_an_answer_that_is_too_large_to_arrive_is_refused_instead(json: bool, more: int, arrives: bool) -> None:
    frame = {"kind": "answer", "data": ""}
    room = TAKES - len(encode(frame, json=json)) - (0 if json else 2)  # a text of this length has two bytes more
    answer = encode({**frame, "data": "x" * (room + more)}, json=json)
    assert (len(answer) == TAKES) == arrives
    [(subject, payload, _)] = coalesced([("_INBOX.a", answer)], TAKES)
    decoded = msgspec.json.decode(payload) if json else msgspec.msgpack.decode(payload)
    assert subject == "_INBOX.a"
    assert decoded["kind"] == ("answer" if arrives else "error")
    if not arrives:
        assert decoded["code"] == "too-large"
        assert f"{TAKES + 1} bytes" in decoded["message"]
        assert "max_payload" in decoded["next"]
