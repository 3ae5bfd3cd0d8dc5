"""The simulated bus does what nats-server does: every scene here runs on both, and what only a simulation can do below.

A scene is a coroutine of `connect(name)` and a name of its own for subjects and streams; `on_both` makes it two tests.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, Final, Protocol, cast

import pytest

from moorage.bus import connection as real
from moorage.bus.connection import Connection
from moorage.bus.errors import (
    BadSubject,
    ConnectionClosed,
    Disconnected,
    JetStreamRefused,
    NoResponders,
    PayloadTooLarge,
    RequestTimeout,
    StreamGap,
    StreamMismatch,
)
from moorage.bus.inbox import Mux
from moorage.bus.jetstream import (
    ERR_STREAM_NOT_FOUND,
    ERR_WRONG_LAST_SEQUENCE,
    EXPECTED_LAST_SEQUENCE,
    EXPECTED_LAST_SUBJECT_SEQUENCE,
    EXPECTED_LAST_SUBJECT_SEQUENCE_SUBJECT,
    MESSAGE_ID,
    Ack,
    JetStream,
    JsError,
)
from moorage.bus.simulated import (
    SERVER,
    Faults,
    FaultyNetwork,
    SimulatedBus,
    SimulatedClock,
    SimulatedConnection,
    Stalled,
)
from moorage.bus.transport import Delivery
from moorage.scheduler.core.records import FORMAT, Act, Record, decode_record, encode_record
from moorage.scheduler.core.state import State
from moorage.scheduler.ledger import Deposed, Ledger
from moorage.scheduler.service import Scheduler
from moorage.schemas.subjects import Subjects
from tests.waiting import until

#: a request that nobody answers is given up after this; in the simulation it costs nothing
SILENCE_S: Final = 0.3

Connect = Callable[[str], Awaitable[Any]]
Scene = Callable[[Connect, str], Coroutine[Any, Any, None]]


class World(Protocol):
    def run(self, scene: Scene, unique: str) -> None: ...


class SimulatedWorld:
    def __init__(self) -> None:
        self.bus = SimulatedBus()

    def run(self, scene: Scene, unique: str) -> None:
        async def connect(name: str) -> SimulatedConnection:
            return self.bus.connect(name)

        SimulatedClock().run(scene(connect, unique))


class RealWorld:
    def __init__(self, url: str) -> None:
        self.url = url

    def run(self, scene: Scene, unique: str) -> None:
        opened: list[Connection] = []

        async def connect(name: str) -> Connection:
            opened.append(await real.connect(self.url, name))
            return opened[-1]

        async def closing() -> None:
            try:
                await scene(connect, unique)
            finally:
                for each in opened:
                    await each.close()

        asyncio.run(closing())


@pytest.fixture(params=["simulated", "nats-server"])
def world(request: pytest.FixtureRequest) -> World:
    return SimulatedWorld() if request.param == "simulated" else RealWorld(request.getfixturevalue("nats_url"))


def on_both(scene: Scene) -> Callable[[World, str], None]:
    def test(world: World, unique: str) -> None:
        world.run(scene, unique)

    test.__name__, test.__doc__ = scene.__name__, scene.__doc__
    return test


async def all_heard(connection: Any, *subscribers: Any) -> None:
    """Wait until what was sent so far has been handed to handlers: a marker after it, on each subscriber."""
    for subscriber in subscribers:
        marks: list[Delivery] = []
        subject = f"mark.{id(marks)}"
        subscription = await subscriber.subscribe(subject, marks.append)
        await connection.send([(subject, b"", "")])
        await until(lambda marks=marks: marks, what="the marker")
        await subscription.unsubscribe()


def answering(connection: Any, payload: bytes | None = None) -> Callable[[Delivery], None]:
    """A handler that answers with `payload`, or with what came."""
    tasks: set[asyncio.Task[int]] = set()

    def answer(delivery: Delivery) -> None:
        task = asyncio.ensure_future(connection.send([(delivery.reply, payload or delivery.data, "")]))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    return answer


# ------------------------------------------------------------------------------------------------- core, on both


@on_both
async def test_wildcards(connect: Connect, unique: str) -> None:
    a, b = await connect("a"), await connect("b")
    heard: dict[str, list[str]] = {}
    for pattern in ("x", "*", "x.*", "x.>", "*.y", "x.*.z", "*.*", ">", "x.y.z"):
        names = heard[pattern] = []
        await b.subscribe(f"{unique}.{pattern}", lambda d, names=names: names.append(d.subject[len(unique) + 1 :]))
    await a.send([(f"{unique}.{subject}", b"", "") for subject in ("x", "x.y", "x.y.z", "w.y", "x.y.z.v", "w")])
    await all_heard(a, b)
    assert heard == {
        "x": ["x"],
        "*": ["x", "w"],
        "x.*": ["x.y"],
        "x.>": ["x.y", "x.y.z", "x.y.z.v"],
        "*.y": ["x.y", "w.y"],
        "x.*.z": ["x.y.z"],
        "*.*": ["x.y", "w.y"],
        ">": ["x", "x.y", "x.y.z", "w.y", "x.y.z.v", "w"],
        "x.y.z": ["x.y.z"],
    }


@on_both
async def test_order_replies_and_ones_own_messages(connect: Connect, unique: str) -> None:
    a = await connect("a")
    heard: list[Delivery] = []
    await a.subscribe(f"{unique}.*", heard.append)
    assert await a.send((f"{unique}.{n % 3}", b"%d" % n, f"reply.{n}") for n in range(300)) == 300
    await until(lambda: len(heard) == 300)
    assert [(d.subject, d.data, d.reply, d.headers) for d in heard] == [
        (f"{unique}.{n % 3}", b"%d" % n, f"reply.{n}", None) for n in range(300)
    ]
    assert all(one.received_monotonic_s <= two.received_monotonic_s for one, two in itertools.pairwise(heard))


@on_both
async def test_a_queue_group_shares_and_a_plain_subscription_hears_all(connect: Connect, unique: str) -> None:
    a, b, c = await connect("a"), await connect("b"), await connect("c")
    heard: Counter[str] = Counter()
    for name, connection, queue in (("b", b, "q"), ("c", c, "q"), ("other", c, "r"), ("plain", b, "")):
        await connection.subscribe(unique, lambda _, name=name: heard.update([name]), queue)
    await a.send([(unique, b"", "")] * 200)
    await all_heard(a, b, c)
    await until(lambda: heard["b"] + heard["c"] == heard["other"] == heard["plain"] == 200)
    assert heard["b"] > 0
    assert heard["c"] > 0


@on_both
async def test_requests_answers_silence_and_nobody(connect: Connect, unique: str) -> None:
    a, b = await connect("a"), await connect("b")
    with pytest.raises(NoResponders):
        await a.request(unique, b"x", SILENCE_S)
    subscription = await b.subscribe(unique, answering(b))
    assert (await a.request(unique, b"x", 5)).data == b"x"
    many = await asyncio.gather(*(a.request(unique, b"%d" % n, 5) for n in range(100)))
    assert [each.data for each in many] == [b"%d" % n for n in range(100)]
    await subscription.unsubscribe()
    await b.flush()
    with pytest.raises(NoResponders):
        await a.request(unique, b"x", SILENCE_S)
    seen: list[Delivery] = []
    await b.subscribe(unique, seen.append)
    with pytest.raises(RequestTimeout) as silence:
        await a.request(unique, b"late", SILENCE_S, {"traceparent": "00-ä"})
    assert (silence.value.subject, silence.value.timeout_s) == (unique, SILENCE_S)
    assert (seen[0].data, seen[0].headers) == (b"late", {"traceparent": "00-ä"})
    await b.send([(seen[0].reply, b"too late", "")])
    await until(lambda: a.late_answers == 1)


@on_both
async def test_what_may_not_leave(connect: Connect, unique: str) -> None:
    a = await connect("a")
    heard: list[Delivery] = []
    await a.subscribe(unique, heard.append)
    large = bytes(a.max_payload_bytes + 1)
    assert (
        await a.send([(unique, large, ""), ("a b", b"", ""), ("", b"", ""), (unique, b"1", "r r"), (unique, b"2", "")])
        == 1
    )
    assert a.counters.sent_dropped == 4
    with pytest.raises(PayloadTooLarge):
        await a.request(unique, bytes(a.max_payload_bytes), 1, {"a": "b"})
    with pytest.raises(BadSubject):
        await a.request("a b", b"", 1)
    for bad in ("a b", "a..b", ">.a", "a.b>", ""):
        with pytest.raises(BadSubject):
            await a.subscribe(bad, heard.append)
    await until(lambda: heard)
    assert [each.data for each in heard] == [b"2"]
    await a.close()
    assert a.closed.is_set()
    for use in (a.send([(unique, b"", "")]), a.request(unique, b"", 1), a.subscribe(unique, heard.append), a.flush()):
        with pytest.raises(ConnectionClosed):
            await use


@on_both
async def test_a_close_ends_what_is_awaited(connect: Connect, unique: str) -> None:
    a, b = await connect("a"), await connect("b")
    await b.subscribe(unique, lambda _: None)
    waiting = asyncio.ensure_future(a.request(unique, b"", 30))
    await asyncio.sleep(0)
    await a.close()
    with pytest.raises(ConnectionClosed):
        await waiting


@on_both
async def test_the_sdks_inbox(connect: Connect, unique: str) -> None:
    a, b = await connect("a"), await connect("b")
    await b.subscribe(unique, answering(b))
    mux = await Mux.open(a)
    answers = await asyncio.gather(*(mux.request(unique, b"%d" % n, 5) for n in range(20)))
    assert [answer.data for answer in answers] == [b"%d" % n for n in range(20)]
    with pytest.raises(NoResponders):
        await mux.request(f"{unique}.none", b"", 5)
    await mux.close()


# -------------------------------------------------------------------------------------------- JetStream, on both


async def stream(connect: Connect, unique: str, **more: Any) -> tuple[Any, JetStream]:
    connection = await connect("js")
    js = JetStream(connection)
    settings = {"name": unique, "subjects": [f"{unique}.>"], "storage": "file", "retention": "limits", "discard": "new"}
    await js.ensure_stream({**settings, "allow_direct": True, **more})
    return connection, js


async def filled(connect: Connect, unique: str, letters: str) -> JetStream:
    _, js = await stream(connect, unique)
    for number, letter in enumerate(letters, 1):
        assert await js.append(f"{unique}.{letter}", b"%d" % number) == Ack(unique, number)
    return js


@on_both
async def test_fences(connect: Connect, unique: str) -> None:
    _, js = await stream(connect, unique)
    epoch, record = f"{unique}.epoch", f"{unique}.record"

    async def append(subject: str, last: int | None, of_subject: int | None = None, name: str = "") -> int | str:
        headers = {} if last is None else {EXPECTED_LAST_SEQUENCE: str(last)}
        if of_subject is not None:
            headers[EXPECTED_LAST_SUBJECT_SEQUENCE] = str(of_subject)
        if name:
            headers[EXPECTED_LAST_SUBJECT_SEQUENCE_SUBJECT] = name
        answer = await js.append(subject, b"x", headers)
        if isinstance(answer, Ack):
            return answer.seq
        assert (answer.code, answer.err_code) == (400, ERR_WRONG_LAST_SEQUENCE)
        return answer.description

    assert await append(epoch, 0) == 1
    assert await append(record, 1, 1, epoch) == 2
    assert await append(epoch, 2) == 3
    assert await append(record, 3, 1, epoch) == "wrong last sequence: 3"
    assert await append(record, 2, 3, epoch) == "wrong last sequence: 3"
    assert await append(record, 3, 3, epoch) == 4
    assert await append(record, None, 4) == 5
    assert await append(record, None, 4) == "wrong last sequence: 5"
    assert await append(record, None, 5, f"{unique}.*") == 6
    assert await append(record, None, 0, f"{unique}.never") == 7
    # both guards are wrong: the subject's speaks first
    assert await append(record, 1, 1, epoch) == "wrong last sequence: 3"
    assert (await js.stream_info(unique)).last_seq == 7


@on_both
async def test_a_known_message_id_is_stored_once_but_fences_come_first(connect: Connect, unique: str) -> None:
    _, js = await stream(connect, unique)
    subject = f"{unique}.a"
    assert await js.append(subject, b"1", {MESSAGE_ID: "m", EXPECTED_LAST_SEQUENCE: "0"}) == Ack(unique, 1)
    again = await js.append(subject, b"1", {MESSAGE_ID: "m", EXPECTED_LAST_SEQUENCE: "0"})
    assert again == JsError(400, ERR_WRONG_LAST_SEQUENCE, "wrong last sequence: 1")
    fenced = await js.append(subject, b"1", {MESSAGE_ID: "m", EXPECTED_LAST_SUBJECT_SEQUENCE: "0"})
    assert fenced == JsError(400, ERR_WRONG_LAST_SEQUENCE, "wrong last sequence: 1")
    assert await js.append(subject, b"2", {MESSAGE_ID: "m"}) == Ack(unique, 1, duplicate=True)
    assert await js.append(subject, b"2", {MESSAGE_ID: "m", EXPECTED_LAST_SEQUENCE: "1"}) == Ack(
        unique, 1, duplicate=True
    )
    assert await js.append(subject, b"2", {MESSAGE_ID: "n"}) == Ack(unique, 2)
    assert (await js.stream_info(unique)).messages == 2


@on_both
async def test_reads_purges_and_deletes(connect: Connect, unique: str) -> None:
    js = await filled(connect, unique, "abacab")
    found = await js.get_message(unique, 4)
    assert found is not None
    assert (found.subject, found.seq, found.data, found.headers) == (f"{unique}.c", 4, b"4", None)
    assert found.stored_at.endswith("Z")
    assert await js.get_message(unique, 7) is None
    last = await js.get_last(unique, f"{unique}.a")
    assert last is not None
    assert last.seq == 5
    assert await js.get_last(unique, f"{unique}.z") is None
    with pytest.raises(JetStreamRefused) as missing:
        await js.get_message(f"{unique}-none", 1)
    assert (missing.value.status, missing.value.err_code) == (404, ERR_STREAM_NOT_FOUND)
    info = await js.stream_info(unique, f"{unique}.>")
    assert info.subjects == {f"{unique}.a": 3, f"{unique}.b": 2, f"{unique}.c": 1}
    assert await js.purge(unique, subject=f"{unique}.a", below_seq=4) == 2
    assert await js.purge(unique, subject=f"{unique}.b", keep=1) == 1
    info = await js.stream_info(unique)
    assert (info.messages, info.first_seq, info.last_seq) == (3, 4, 6)
    await js.delete_message(unique, 5)
    with pytest.raises(JetStreamRefused, match="sequence 5 not found"):
        await js.delete_message(unique, 5)
    assert await js.purge(unique, below_seq=6) == 1
    assert await js.purge(unique) == 1
    info = await js.stream_info(unique)
    assert (info.messages, info.first_seq, info.last_seq) == (0, 7, 6)
    assert await js.append(f"{unique}.a", b"", {EXPECTED_LAST_SUBJECT_SEQUENCE: "0"}) == Ack(unique, 7)
    await js.delete_stream(unique)
    with pytest.raises(JetStreamRefused):
        await js.stream_info(unique)
    assert await js.append(f"{unique}.a", b"") == JsError(503, 0, f"nobody answers on {unique}.a")


@on_both
async def test_direct_get_in_batches(connect: Connect, unique: str) -> None:
    js = await filled(connect, unique, "ababa")

    async def seqs(**request: Any) -> list[int]:
        return [message.seq for message in await js.direct_get_batch(unique, **request)]

    assert await seqs(seq=1) == [1, 2, 3, 4, 5]
    assert await seqs(seq=2, next_by_subject=f"{unique}.a") == [3, 5]
    assert await seqs(seq=1, next_by_subject=f"{unique}.*", batch=3) == [1, 2, 3]
    assert await seqs(seq=4, batch=1) == [4]
    assert await seqs(seq=6) == []
    assert await seqs(seq=1, next_by_subject=f"{unique}.none") == []
    assert await seqs(seq=1, max_bytes=1) == [1]
    assert await seqs(seq=1, max_bytes=2 * len(f"{unique}.a1")) == [1, 2]
    await js.append(f"{unique}.a", b"", {"Status": "204", "Nats-Sequence": "999", MESSAGE_ID: "m"})
    [faked] = await js.direct_get_batch(unique, seq=6)
    assert (faked.seq, faked.data) == (6, b"")
    assert faked.headers is not None
    assert faked.headers[MESSAGE_ID] == "m"
    with pytest.raises(JetStreamRefused, match="503"):
        await js.direct_get_batch(f"{unique}-none", seq=1)


@on_both
async def test_replay_and_its_gaps(connect: Connect, unique: str) -> None:
    js = await filled(connect, unique, "ab" * 20)
    assert [m.seq async for m in js.read_range(unique, batch_bytes=100)] == list(range(1, 41))
    assert [m.seq async for m in js.read_range(unique, f"{unique}.b", 21)] == list(range(22, 41, 2))
    await js.delete_message(unique, 30)
    gaps: list[tuple[int, int]] = []
    found = [m.seq async for m in js.read_range(unique, from_seq=28, on_gap=lambda *gap: gaps.append(gap))]
    assert (found, gaps) == ([28, 29, *range(31, 41)], [(30, 31)])
    with pytest.raises(StreamGap) as gap:
        _ = [m async for m in js.read_range(unique)]
    assert (gap.value.expected, gap.value.found) == (30, 31)


@on_both
async def test_settings(connect: Connect, unique: str) -> None:
    connection, js = await stream(connect, unique, max_msgs=3, deny_delete=True)
    assert (await js.ensure_stream({"name": unique, "max_msgs": 3})).config["discard"] == "new"
    with pytest.raises(StreamMismatch):
        await js.ensure_stream({"name": unique, "discard": "old"})
    raised = await js.ensure_stream({"name": unique, "max_msgs": 4}, frozenset({"max_msgs"}))
    assert raised.config["max_msgs"] == 4
    with pytest.raises(JetStreamRefused, match="overlap"):
        await js.ensure_stream({"name": f"{unique}-2", "subjects": [f"{unique}.*.x"]})
    await js.append(f"{unique}.a", b"")
    with pytest.raises(JetStreamRefused, match="not permitted"):
        await js.delete_message(unique, 1)
    # a message that nobody asks an answer for is stored too, and who listens on its subject hears it
    heard: list[Delivery] = []
    await connection.subscribe(f"{unique}.>", heard.append)
    await connection.send([(f"{unique}.b", b"bare", "")])
    await until(lambda: heard)
    await until(_ends_at(js, unique, 2))


@on_both
async def test_a_rollup_keeps_the_newest_of_its_subject_or_of_all(connect: Connect, unique: str) -> None:
    _, js = await stream(connect, unique, allow_rollup_hdrs=True, description="rolled up")

    async def publish(word: str, **headers: str) -> Any:
        return await js.append(f"{unique}.{word}", b"x", headers and {"Nats-Rollup": headers["rollup"]})

    for word in ("a", "b", "a"):
        await publish(word)
    assert await publish("a", rollup="sub") == Ack(unique, 4)
    assert [message.seq async for message in js.read_range(unique, f"{unique}.>")] == [2, 4]
    await publish("c", rollup="all")
    assert [message.seq async for message in js.read_range(unique, f"{unique}.>")] == [5]
    odd = await publish("a", rollup="odd")
    assert isinstance(odd, JsError)
    _, strict = await stream(connect, f"{unique}-strict")
    plain = await strict.append(f"{unique}-strict.a", b"x", {"Nats-Rollup": "sub"})
    assert isinstance(plain, JsError)
    told = [(error.code, error.err_code, error.description) for error in (odd, plain)]
    assert told == [(500, 10111, 'rollup value invalid: "odd"'), (500, 10111, "rollup not permitted")]


def _ends_at(js: JetStream, name: str, seq: int) -> Callable[[], Awaitable[bool]]:
    async def ends() -> bool:
        return (await js.stream_info(name)).last_seq == seq

    return ends


TOLD_OTHERWISE: Final = {
    "type",
    "ts",
    "created",
    "time",
    "metadata",
    "first_ts",
    "last_ts",
    "leader",
    "Nats-Time-Stamp",
}
#: settings that the simulated bus refuses, so that it never shows them
NOT_SIMULATED: Final = {
    "mirror_direct",
    "sealed",
    "consumer_limits",
    "allow_msg_ttl",
    "did_create",
}


def compared(value: Any) -> Any:
    """An answer without what no two servers say alike, and without what the server leaves out where it is empty."""
    if isinstance(value, dict):
        rest = {key: compared(each) for key, each in value.items() if key not in TOLD_OTHERWISE | NOT_SIMULATED}
        return {str(getattr(key, "value", key)): each for key, each in rest.items() if each not in (0, False, {}, "")}
    return value


async def transcript(connect: Connect, unique: str) -> list[Any]:
    """Raw requests and appends, and all that is answered."""
    connection = await connect("raw")
    told: list[Any] = []

    async def api(verb: str, request: Any = None) -> None:
        payload = b"" if request is None else json.dumps(request).encode()
        answer = await connection.request(f"$JS.API.{verb}", payload, 5)
        told.append([verb, request, compared(json.loads(answer.data))])

    async def publish(subject: str, size: int = 1, **headers: str) -> None:
        named = {key.replace("_", "-"): value for key, value in headers.items()} or None
        try:
            answer = await connection.request(subject, b"x" * size, 5, named)
            told.append([subject, named, compared(json.loads(answer.data))])
        except NoResponders:
            told.append([subject, named, "nobody"])

    async def direct(name: str, *, single: bool = False, **request: Any) -> None:
        last: Callable[[Delivery], bool] = lambda d: single or "Nats-Sequence" not in (d.headers or {})  # noqa: E731
        replies = await connection.request_many(f"$JS.API.DIRECT.GET.{name}", json.dumps(request).encode(), 5, last)
        told.append([request, [(reply.data, compared(reply.headers)) for reply in replies]])

    base = {"storage": "file", "retention": "limits", "discard": "new", "allow_direct": True}
    s, t = f"S{unique}", f"T{unique}"
    await api(f"STREAM.CREATE.{s}", {**base, "name": s, "subjects": [f"{s}.>"]})
    await api(f"STREAM.INFO.{s}", {"subjects_filter": f"{s}.>"})
    await api(f"STREAM.CREATE.{s}", {**base, "name": s, "subjects": [f"{s}.>"]})
    await api(f"STREAM.CREATE.{s}", {**base, "name": s, "subjects": [f"{s}.>"], "max_msgs": 5})
    await api(f"STREAM.CREATE.{t}", {**base, "name": t, "subjects": [f"{s}.a"]})
    await api(f"STREAM.CREATE.{t}", {**base, "name": s})
    for verb in ("INFO", "PURGE", "DELETE"):
        await api(f"STREAM.{verb}.{t}")
    await api(f"STREAM.UPDATE.{t}", {**base, "name": t})
    for verb in ("GET", "DELETE"):
        await api(f"STREAM.MSG.{verb}.{t}", {"seq": 1})
    await publish(f"{s}.a", Nats_Msg_Id="m1")
    await publish(f"{s}.a", Nats_Msg_Id="m1", Nats_Expected_Last_Sequence="9")
    await publish(f"{s}.a", Nats_Msg_Id="m1")
    await publish(f"{s}.a", Nats_Msg_Id="m2", Nats_Expected_Last_Sequence="1")
    await publish(f"{s}.a", Nats_Msg_Id="")
    await publish(f"{s}.b", Nats_Expected_Last_Subject_Sequence="0")
    await publish(f"{s}.b", Nats_Expected_Last_Subject_Sequence="9", Nats_Expected_Last_Sequence="8")
    await publish(f"{s}.b", Nats_Expected_Last_Subject_Sequence_Subject=f"{s}.*")
    await publish(f"{s}.b", Nats_Expected_Last_Sequence="x")
    await publish(f"{s}.b", Nats_Expected_Stream=t)
    await publish(f"{s}.b", Nats_Expected_Stream=s)
    await publish(f"{s}.c", 20)
    await api(f"STREAM.INFO.{s}", {"subjects_filter": f"{s}.>"})
    for get in ({"seq": 1}, {"seq": 3}, {"seq": 99}, {"seq": 0}, {}, {"last_by_subj": f"{s}.*"},
                {"seq": 2, "next_by_subj": f"{s}.b"}, {"last_by_subj": "none"}):  # fmt: skip
        await api(f"STREAM.MSG.GET.{s}", get)
    for batch in ({"seq": 1, "batch": 2}, {"seq": 1, "batch": 9}, {"seq": 77, "batch": 9}, {"batch": 3},
                  {"seq": 1, "batch": 9, "next_by_subj": f"{s}.b"}, {"seq": 1, "batch": 9, "next_by_subj": "none"},
                  {"seq": 1, "batch": 9, "max_bytes": 1}, {"seq": 1, "batch": 9, "max_bytes": 150}):  # fmt: skip
        await direct(s, **batch)
    for one in ({"seq": 1}, {"seq": 99}, {"last_by_subj": f"{s}.b"}, {}):
        await direct(s, single=True, **one)
    await api(f"STREAM.MSG.DELETE.{s}", {"seq": 2})
    await api(f"STREAM.MSG.DELETE.{s}", {"seq": 2})
    await api(f"STREAM.MSG.DELETE.{s}", {"seq": 1})
    await api(f"STREAM.INFO.{s}")
    for purge in ({"filter": f"{s}.b", "keep": 1}, {"seq": 5}, {"seq": 5, "keep": 2}, None):
        await api(f"STREAM.PURGE.{s}", purge)
        await api(f"STREAM.INFO.{s}", {"subjects_filter": f"{s}.>"})
    bounds = {"max_msgs": 2, "max_msgs_per_subject": 1, "discard_new_per_subject": True, "max_msg_size": 10}
    await api(f"STREAM.CREATE.{t}", {**base, "name": t, "subjects": [f"{t}.*"], "deny_delete": True, "deny_purge": True, **bounds})  # fmt: skip  # noqa: E501
    for letter in "aabc":
        await publish(f"{t}.{letter}")
    await publish(f"{t}.c", 11)
    await api(f"STREAM.MSG.DELETE.{t}", {"seq": 1})
    await api(f"STREAM.PURGE.{t}")
    bounded: dict[str, dict[str, Any]] = {
        "U": {"max_bytes": 150, "discard": "new"},
        "V": {"max_msgs": 2, "discard": "old"},
        "W": {"max_msgs_per_subject": 1},
        "X": {"max_bytes": 150, "discard": "old"},
    }
    for name, settings in bounded.items():
        await api(f"STREAM.CREATE.{name}{unique}", {**base, "name": f"{name}{unique}", **settings})
        for _ in range(4):
            await publish(f"{name}{unique}", 10)
        await api(f"STREAM.INFO.{name}{unique}")
    await publish(f"none-{unique}")
    for name in "STUVWX":
        await api(f"STREAM.DELETE.{name}{unique}")
    await publish(f"{s}.a")
    return told


def test_the_api_answers_word_for_word_as_the_server_does(nats_url: str, unique: str) -> None:
    told: list[list[Any]] = []

    async def scene(connect: Connect, unique: str) -> None:
        told.append(await transcript(connect, unique))

    for each in (SimulatedWorld(), RealWorld(nats_url)):
        each.run(scene, unique)
    simulated, server = told
    assert len(simulated) == len(server)
    for ours, theirs in zip(simulated, server, strict=True):
        assert ours == theirs


# ------------------------------------------------------------------------------------- what a simulation adds


def simulate(scene: Callable[[SimulatedBus], Coroutine[Any, Any, Any]], **faults: Any) -> Any:
    bus = SimulatedBus(FaultyNetwork(**faults))
    return SimulatedClock().run(scene(bus))


def test_time_passes_only_when_nobody_has_anything_to_do() -> None:
    clock, story = SimulatedClock(wall_start_s=1000), []

    async def sleeper(seconds: float) -> None:
        await asyncio.sleep(seconds)
        story.append((seconds, clock.now_s))

    async def scene() -> None:
        import time

        await asyncio.gather(sleeper(3600), sleeper(0.5), sleeper(60))
        assert time.monotonic() == clock.now_s == 3600
        assert time.time() == 4600
        assert time.clock_gettime(time.CLOCK_BOOTTIME) == 3600
        timer = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(5, timer.set_result, None)
        clock.advance(100)  # stopped for longer than the timer: it comes late
        await timer
        assert clock.now_s == 3700
        assert await asyncio.to_thread(lambda: 7) == 7

    clock.run(scene())
    assert story == [(0.5, 0.5), (60, 60), (3600, 3600)]
    with pytest.raises(ValueError, match="back"):
        clock.advance(-1)


def test_a_simulation_that_cannot_go_on_says_so() -> None:
    async def waits_for_nothing() -> None:
        await asyncio.Event().wait()

    async def never_ends() -> None:
        loop = asyncio.get_running_loop()
        for second in itertools.count(1):
            timer = loop.create_future()
            loop.call_at(second, timer.set_result, None)
            await timer

    with pytest.raises(Stalled, match="every task waits"):
        SimulatedClock().run(waits_for_nothing())
    with pytest.raises(Stalled, match="limit of 30"):
        SimulatedClock().run(never_ends(), limit_s=30)


def test_everything_says_simulated() -> None:
    bus = SimulatedBus()
    for each in (bus, bus.connect("a"), bus.network, SimulatedClock()):
        assert "simulated" in repr(each)
    assert bus.connect("b").server_version == "simulated"


async def chatter(bus: SimulatedBus, count: int = 300) -> list[tuple[int, float]]:
    """What b hears of a's numbered messages, a millisecond apart, and when."""
    a, b = bus.connect("a"), bus.connect("b")
    heard: list[tuple[int, float]] = []
    await b.subscribe("x", lambda d: heard.append((int(d.data), d.received_monotonic_s)))
    for n in range(count):
        await a.send([("x", b"%d" % n, "")])
        await asyncio.sleep(0.001)
    await asyncio.sleep(1)
    return heard


def test_the_same_seed_is_the_same_run() -> None:
    faults = {"drop": 0.1, "duplicate": 0.1, "reorder": 0.1, "delay_ms": (1, 30)}
    runs = [simulate(chatter, seed=seed, **faults) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_drops_doubles_delays_and_reordering_are_each_their_own() -> None:
    numbers = list(range(300))
    assert [n for n, _ in simulate(chatter)] == numbers
    delayed = simulate(chatter, delay_ms=(5, 40))
    assert [n for n, _ in delayed] == numbers  # in order, whatever the delays
    assert all(0.005 <= at - n / 1000 < 0.3 for n, at in delayed)
    dropped = [n for n, _ in simulate(chatter, drop=0.2)]
    assert dropped == sorted(set(dropped))
    assert 180 < len(dropped) < 290
    doubled = [n for n, _ in simulate(chatter, duplicate=0.2)]
    assert sorted(set(doubled)) == numbers
    assert 310 < len(doubled) < 420
    reordered = [n for n, _ in simulate(chatter, reorder=0.2)]
    assert sorted(reordered) == numbers != reordered


def test_faults_of_one_pair_are_not_those_of_another() -> None:
    async def scene(bus: SimulatedBus) -> None:
        bus.network.between("a", "b", Faults(drop=1.0))
        a, b, c = bus.connect("a"), bus.connect("b"), bus.connect("c")
        heard: list[str] = []
        await b.subscribe("x", lambda _: heard.append("b"))
        await c.subscribe("x", lambda _: heard.append("c"))
        await a.send([("x", b"", "")])
        await asyncio.sleep(1)
        assert heard == ["c"]
        bus.network.heal()
        await a.send([("x", b"", "")])
        await asyncio.sleep(1)
        assert heard == ["c", "b", "c"]

    simulate(scene)


def test_a_partition_cuts_both_ways_and_what_is_under_way() -> None:
    async def scene(bus: SimulatedBus) -> None:
        a, b, c = bus.connect("a"), bus.connect("b"), bus.connect("c")
        heard: list[bytes] = []
        await b.subscribe("x", lambda d: heard.append(d.data))
        await c.subscribe("ask", answering(c))
        await a.send([("x", b"under way", "")])
        bus.network.partition({"a", "c"}, {"b", SERVER})
        await a.send([("x", b"cut", "")])
        assert (await a.request("ask", b"same side", 1)).data == b"same side"
        with pytest.raises(RequestTimeout):
            await b.request("ask", b"", 1)
        with pytest.raises(RequestTimeout):
            await a.request("$JS.API.STREAM.INFO.S", b"", 1)
        bus.network.heal()
        await a.send([("x", b"healed", "")])
        await asyncio.sleep(1)
        assert heard == [b"healed"]

    simulate(scene, delay_ms=(1, 2))


def test_a_lost_link_fails_what_is_awaited_and_comes_back_with_its_subscriptions() -> None:
    async def scene(bus: SimulatedBus) -> None:
        states: list[str] = []
        a, b = bus.connect("a", on_state=lambda state: states.append(state.value)), bus.connect("b")
        heard: list[bytes] = []
        await a.subscribe("x", lambda d: heard.append(d.data))
        await b.subscribe("silent", lambda _: None)
        waiting = asyncio.ensure_future(a.request("silent", b"", 30))
        await asyncio.sleep(0)
        a.lose()
        with pytest.raises(Disconnected):
            await waiting
        assert await a.send([("y", b"", "")] * 3) == 0
        assert a.counters.sent_dropped == 3
        await b.send([("x", b"lost", "")])
        with pytest.raises(RequestTimeout):
            await a.request("silent", b"", 1)
        with pytest.raises(NoResponders):
            await b.request("x", b"", 1)
        await b.subscribe("echo", answering(b))
        later = asyncio.ensure_future(a.request("echo", b"back", 30))
        await asyncio.sleep(3)
        a.restore()
        assert (await later).data == b"back"
        await b.send([("x", b"heard", "")])
        await asyncio.sleep(0.1)
        assert heard == [b"heard"]
        assert states == ["reconnecting", "connected"]
        assert a.counters.reconnects == 1

    simulate(scene)


def test_a_defect_in_a_handler_is_told_and_stops_nothing() -> None:
    async def scene(bus: SimulatedBus) -> None:
        errors: list[Exception] = []
        a = bus.connect("a", on_error=errors.append)
        heard: list[bytes] = []
        await a.subscribe("x", lambda d: heard.append(d.data[5:] if d.data[0] else b""))
        await a.send([("x", b"", ""), ("x", b"after", "")])
        await asyncio.sleep(0.1)
        assert len(heard) == 1
        assert a.counters.handler_failures == 1
        assert "IndexError" in str(errors[0])

    simulate(scene)


def test_an_ambiguous_acknowledgement_is_stored_and_looks_like_silence() -> None:
    async def scene(bus: SimulatedBus) -> None:
        a = bus.connect("a")
        js = JetStream(a)
        await js.ensure_stream({"name": "S", "allow_direct": True})
        bus.network.lose_next_ack("a")
        with pytest.raises(RequestTimeout):
            await js.append("S", b"1", {MESSAGE_ID: "m"})
        assert await js.append("S", b"1", {MESSAGE_ID: "m"}) == Ack("S", 1, duplicate=True)
        assert bus.network.counters["lost_acks"] == 1
        await asyncio.sleep(121)  # the window of two minutes is over
        assert await js.append("S", b"1", {MESSAGE_ID: "m"}) == Ack("S", 2)
        assert len(bus.streams()["S"].messages) == 2

    simulate(scene)


def test_accounts_do_not_see_each_other() -> None:
    async def scene(bus: SimulatedBus) -> None:
        users, ledger = bus.connect("a"), bus.connect("a", account="ledger")
        await JetStream(ledger).ensure_stream({"name": "L"})
        heard: list[Delivery] = []
        await users.subscribe("x", heard.append)
        await ledger.send([("x", b"", "")])
        with pytest.raises(JetStreamRefused):
            await JetStream(users).stream_info("L")
        assert await JetStream(users).append("L", b"") == JsError(503, 0, "nobody answers on L")
        assert heard == []

    simulate(scene)


def test_what_is_not_simulated_is_refused() -> None:
    async def scene(bus: SimulatedBus) -> None:
        a = bus.connect("a")
        for settings in ({"mirror": {"name": "T"}}, {"retention": "workqueue"}):
            with pytest.raises(JetStreamRefused, match="simulated") as refused:
                await JetStream(a).ensure_stream({"name": "S", **settings})
            assert refused.value.status == 501
        answer = json.loads((await a.request("$JS.API.CONSUMER.CREATE.S", b"{}", 1)).data)
        assert answer["error"]["code"] == 501

    simulate(scene)


def test_old_messages_leave_by_age() -> None:
    async def scene(bus: SimulatedBus) -> None:
        js = JetStream(bus.connect("a"))
        await js.ensure_stream({"name": "S", "max_age": 10_000_000_000, "allow_direct": True})
        for _ in range(3):
            await js.append("S", b"")
            await asyncio.sleep(4)
        assert [m.seq for m in await js.direct_get_batch("S", seq=1)] == [2, 3]
        assert (await js.stream_info("S")).first_seq == 2

    simulate(scene)


# ----------------------------------------------------------------------------- the production code, simulated


def epoch_record(state: State, leader: int) -> Record:
    return Record(FORMAT, state.epoch + 1, leader, 0, 1, state.digest, acts=[[Act.EPOCH, "L", "s", 1.0]])


@pytest.mark.parametrize("seed", range(20))
def test_the_ledger_stores_each_record_once_through_every_fault(seed: int) -> None:
    subjects = Subjects("t")

    async def scene(bus: SimulatedBus) -> None:
        connection = bus.connect("leader")
        ledger, state = Ledger(JetStream(connection), subjects, 7), State()
        await ledger.ensure()
        bus.network.faults = Faults(drop=0.1, duplicate=0.1, reorder=0.1, delay_ms=(0, 20), lose_ack=0.3)
        await ledger.take_over(state, "s", "L", 1, 1.0)
        for rid in range(1, 20):
            record = Record(FORMAT, state.epoch, 7, rid, rid, state.digest, acts=[])
            ledger.fold_message(state, await stored(ledger, state, connection, subjects, record))
        messages = bus.streams()[subjects.ledger_stream].messages
        assert [decode_record(message.data).rid for message in messages.values()] == list(range(20))

    simulate(scene, seed=seed)


async def stored(ledger: Ledger, state: State, connection: Any, subjects: Subjects, record: Record) -> Any:
    seq = await ledger.append_record(state, record.rid, encode_record(record))
    js = JetStream(connection)

    async def read() -> Any:
        try:
            return await js.get_message(subjects.ledger_stream, seq)
        except RequestTimeout:
            return None

    return await until(read, 300)


def test_a_stale_leader_is_deposed_by_its_next_append() -> None:
    subjects = Subjects("t")

    async def scene(bus: SimulatedBus) -> None:
        old, new = (Ledger(JetStream(bus.connect(name)), subjects, n) for n, name in enumerate(("old", "new"), 1))
        await old.ensure()
        state, other = State(), State()
        await old.take_over(state, "old", "L", 1, 1.0)
        await new.follow(other)
        bus.network.partition({"old"}, {"new", SERVER})
        stale = asyncio.ensure_future(
            old.append_record(state, 1, encode_record(Record(FORMAT, 1, 1, 1, 2, state.digest, acts=[])))
        )
        await asyncio.sleep(10)
        await new.take_over(other, "new", "L", 2, 2.0)
        bus.network.heal()
        with pytest.raises(Deposed):
            await stale
        assert bus.streams()[subjects.ledger_stream].last_seq == 2

    simulate(scene)


@pytest.fixture
def _collector() -> Iterator[None]:
    """A leading scheduler freezes the heap and changes the collector's numbers; a test process takes both back."""
    numbers = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*numbers)


@pytest.mark.usefixtures("_collector")
def test_two_production_schedulers_and_a_partition_in_virtual_time() -> None:
    subjects = Subjects("t")

    async def scene(bus: SimulatedBus) -> None:
        def scheduler(name: str) -> Scheduler:
            world, ledger = bus.connect(name), bus.connect(name, account="ledger")
            return Scheduler(cast("Connection", world), cast("Connection", ledger), subjects=subjects, name=name)

        one, two = scheduler("one"), scheduler("two")
        running = [asyncio.ensure_future(one.run())]
        await until(one.leading.is_set, 60)
        running.append(asyncio.ensure_future(two.run()))
        caller = bus.connect("caller")
        body = json.dumps({"job": "j", "gpu": {}, "run": {"argv": ["true"]}}).encode()
        accepted = json.loads((await caller.request(subjects.api("acme", "submit"), body, 5)).data)
        assert (accepted["kind"], accepted["state"]) == ("accepted", "QUEUED")
        bus.network.partition({"one"}, {"two", "caller", SERVER})
        await until(two.leading.is_set, 60)
        again = json.loads((await caller.request(subjects.api("acme", "submit"), body, 5)).data)
        assert again["duplicate"] is True
        bus.network.heal()
        await until(lambda: not one.leading.is_set(), 60)
        assert two.reign is not None
        assert two.reign.engine.state.epoch == 2
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    simulate(scene, delay_ms=(0.2, 3))
