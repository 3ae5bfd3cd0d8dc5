"""Large answers: what goes out when, what is given up, and what a caller makes of parts that are not all there."""

from __future__ import annotations

import random

import pytest

from moorage.bus.transport import Delivery
from moorage.calls import outputs as outputs_module
from moorage.calls.member import Call
from moorage.calls.outputs import Outputs
from moorage.client.errors import CallFailed
from moorage.client.services import _joined
from moorage.schemas.service import END, OUTPUT, PART, PARTS_AHEAD, SEND_TO
from tests.waiting import until

Sent = list[tuple[str, bytes, dict[str, str]]]


def made(on_silence: list[Call]) -> tuple[Outputs, Sent]:
    sent: Sent = []
    return Outputs(lambda *message: sent.append(message), on_silence.append), sent


def call(reply: str = "_INBOX.x.1") -> Call:
    return Call(reply, b"", {}, 0.0, 1000)


async def test_parts_go_out_as_they_are_asked_for_and_are_the_answer() -> None:
    outputs, sent = made([])
    body = random.Random(1).randbytes(10 * 40 - 3)
    outputs.begin(7, call(), body, {"Content-Type": "x"}, 20, "ask.7")
    asked = 0
    while outputs:
        assert len(sent) == asked + PARTS_AHEAD, "no more than the caller has asked for"
        assert outputs.waiting_bytes == len(body) - 10 * len(sent)
        asked = max(int(headers[PART]) for _, _, headers in sent if headers.get(SEND_TO) == "ask.7")
        outputs.send(7, asked + PARTS_AHEAD)
    *parts, (reply, end, headers) = sent
    assert (reply, end, headers) == ("_INBOX.x.1", b"", {"Content-Type": "x", END: "40", OUTPUT: "397"})
    assert b"".join(data for _, data, _ in parts) == body
    assert all(each[2][OUTPUT] == "397" for each in parts)
    outputs.send(7, 1000)
    assert len(sent) == 41, "it is over"


async def test_a_caller_that_asks_for_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs_module, "SILENCE_S", 0.01)
    silent: list[Call] = []
    outputs, sent = made(silent)
    slow, left = call(), call("_INBOX.x.2")
    outputs.begin(1, slow, bytes(1000), {}, 20, "ask.1")
    outputs.begin(2, left, bytes(1000), {}, 20, "ask.2")
    assert outputs.drop("_INBOX.x.2") == [left]
    await until(lambda: silent, what="it is given up")
    assert silent == [slow]
    assert not outputs
    assert len(sent) == 2 * PARTS_AHEAD


def answer(*parts: tuple[str, bytes], end: str, output: str) -> tuple[list[Delivery], Delivery]:
    pieces = [Delivery("r", "", data, {PART: number, OUTPUT: output}, 0.0) for number, data in parts]
    return pieces, Delivery("r", "", b"", {END: end, OUTPUT: output, "Content-Type": ""}, 0.0)


def test_parts_that_are_missing_twice_or_out_of_order_make_no_answer() -> None:
    assert _joined(*answer(("1", b"a"), ("2", b"b"), end="2", output="2")).data == b"ab"
    for parts, last in (
        answer(("1", b"a"), end="2", output="2"),
        answer(("1", b"a"), ("3", b"b"), end="2", output="2"),
        answer(("2", b"b"), ("1", b"a"), end="2", output="2"),
        answer(("1", b"a"), ("1", b"a"), end="2", output="2"),
        answer(("1", b"a"), ("2", b""), end="2", output="2"),
        answer(("1", b"a"), ("2", b"bb"), end="2", output="2"),
    ):
        with pytest.raises(CallFailed):
            _joined(parts, last)
