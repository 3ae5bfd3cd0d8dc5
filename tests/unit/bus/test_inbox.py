"""The SDK's inbox: numbered tokens, single and coalesced answers."""

from __future__ import annotations

import asyncio
import functools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moorage.bus.connection import connect
from moorage.bus.errors import Disconnected, NoResponders, RequestTimeout, TooManyWaiting
from moorage.bus.inbox import CLOCK_S, DUE_SPARE, Answers, Mux, mux_frames, split_mux_reply
from moorage.bus.transport import Delivery
from moorage.testing.bus.clock import SimulatedClock
from tests.waiting import until


@pytest.mark.parametrize(
    ("reply", "found"),
    [
        ("_INBOX.abc.mux.7", ("_INBOX.abc.mux", 7)),
        ("_INBOX.me.abc.mux.12345", ("_INBOX.me.abc.mux", 12345)),
        ("_INBOX.abc.7", None),
        ("_INBOX.abc.mux.all", None),
        ("_INBOX.abc.mux.7x", None),
        ("_INBOX.abc.mux.-7", None),
        ("_INBOX.abc.mux.²", None),
        ("_INBOX.abc.mux." + "9" * 30, None),
        ("_INBOX.abcmux.7", None),
        ("mux.7", None),
        ("", None),
    ],
)
def test_split_mux_reply(reply: str, found: tuple[str, int] | None) -> None:
    assert split_mux_reply(reply) == found


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10**18 - 1), st.binary(max_size=60)), max_size=40), st.integers(40, 300))
def test_frames_keep_every_answer_in_order_within_the_bound(pairs: list[tuple[int, bytes]], bytes_max: int) -> None:
    found: list[tuple[int, bytes]] = []
    for subject, payload, reply in mux_frames({"_INBOX.r.mux": pairs}, bytes_max):
        assert reply == ""
        if subject == "_INBOX.r.mux.all":
            assert len(payload) <= bytes_max + 5
            found += msgspec.msgpack.decode(payload, type=list[tuple[int, bytes]])
        else:
            found.append((int(subject.rpartition(".")[2]), payload))
    assert found == pairs


async def test_single_and_coalesced_answers_meet_their_requests(nats_url: str, unique: str) -> None:
    async with await connect(nats_url, "sdk") as sdk, await connect(nats_url, "scheduler") as scheduler:
        asked: list[Delivery] = []
        await scheduler.subscribe(unique, asked.append)
        mux = await Mux.open(sdk)
        requests = [asyncio.create_task(mux.request(unique, b"%d" % i, 30)) for i in range(100)]
        await until(lambda: len(asked) == 100)
        answers: dict[str, list[tuple[int, bytes]]] = {}
        for delivery in asked[:-1]:
            reply = split_mux_reply(delivery.reply)
            assert reply is not None
            answers.setdefault(reply[0], []).append((reply[1], b"answer " + delivery.data))
        frames = list(mux_frames(answers))
        assert len(frames) == 1
        await scheduler.send([*frames, (asked[-1].reply, b"alone", "")])
        got = await asyncio.gather(*requests)
        assert got == [b"answer %d" % i for i in range(99)] + [b"alone"]
        assert mux.waiting == 0
        # The same frame once more: all late, nothing awaited is touched.
        await scheduler.send(frames)
        await until(lambda: mux.late == 99)
        await mux.close()


async def test_a_bad_frame_is_counted_and_harms_nobody(nats_url: str, unique: str) -> None:
    async with await connect(nats_url, "sdk") as sdk:
        asked: list[Delivery] = []
        await sdk.subscribe(unique, asked.append)
        mux = await Mux.open(sdk)
        waiting = asyncio.create_task(mux.request(unique, b"", 30))
        await until(lambda: asked)
        base = asked[0].reply.rpartition(".")[0]
        junk = [b"", b"\xc1", msgspec.msgpack.encode([[1]]), msgspec.msgpack.encode({"a": 1}), b"\x91" * 5000]
        await sdk.send([(f"{base}.all", data, "") for data in junk] + [(f"{base}.other", b"", "")])
        await until(lambda: mux._answers.bad_frames == len(junk) + 1)
        assert not waiting.done()
        await sdk.send([(asked[0].reply, b"fine", "")])
        assert await waiting == b"fine"


async def test_refusals_and_bounds(nats_url: str, unique: str) -> None:
    async with await connect(nats_url, "sdk") as sdk:
        mux = await Mux.open(sdk, waiting_max=2)
        with pytest.raises(NoResponders):
            await mux.request(unique, b"", 5)
        await sdk.subscribe(unique, lambda _: None)
        with pytest.raises(RequestTimeout):
            await mux.request(unique, b"", 0.02)
        held = [asyncio.create_task(mux.request(unique, b"", 30)) for _ in range(2)]
        await until(lambda: mux.waiting == 2)
        with pytest.raises(TooManyWaiting):
            await mux.request(unique, b"", 5)
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        assert mux.waiting == 0


def test_one_timer_serves_all_waits_and_each_ends_at_its_own_time() -> None:
    """Also where a later wait is due earlier, and where those that were due first were answered long ago."""
    ended: dict[float, float] = {}

    async def scene() -> None:
        answers, loop = Answers("_INBOX.a"), asyncio.get_running_loop()
        long, _ = answers.open("s", 60.0)
        began_s = loop.time()
        waits = {timeout_s: answers.open("s", timeout_s) for timeout_s in (0.2, 0.1, 5.0, 0.15, 0.02)}
        for timeout_s in (0.1, 5.0):
            answers.deliver(Delivery(answers.reply_subject(waits.pop(timeout_s)[0]), "", b""))

        def note(timeout_s: float, future: asyncio.Future[list[Delivery]]) -> None:
            ended[timeout_s] = loop.time() - began_s

        for timeout_s, (_, future) in waits.items():
            future.add_done_callback(functools.partial(note, timeout_s))
        found = await asyncio.gather(*(future for _, future in waits.values()), return_exceptions=True)
        assert [type(each) for each in found] == [RequestTimeout] * 3
        assert len(answers) == 1
        answers.abandon(long)
        answers.fail_all(Disconnected)

    SimulatedClock().run(scene())
    assert list(ended) == [0.02, 0.15, 0.2]
    assert all(took_s == pytest.approx(timeout_s, abs=CLOCK_S) for timeout_s, took_s in ended.items())


async def test_what_was_answered_is_not_remembered_until_its_time() -> None:
    answers = Answers("_INBOX.a")
    for _ in range(3 * DUE_SPARE):
        token, _ = answers.open("s", 60.0)
        answers.deliver(Delivery(answers.reply_subject(token), "", b""))
    assert len(answers._due) <= DUE_SPARE + 1
    answers.fail_all(Disconnected)
