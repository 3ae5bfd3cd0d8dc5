"""JetStream's streams and its API: the same scenes on the simulated bus and on nats-server."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, Final

import pytest

from moorage.bus.errors import JetStreamRefused, NoResponders, StreamGap, StreamMismatch
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
from moorage.bus.transport import Delivery
from tests.unit.bus.both_buses import Connect, RealWorld, SimulatedWorld, on_both, world
from tests.waiting import until

__all__ = ["world"]  # the fixture that makes each scene two tests


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
async def test_a_stream_begins_where_it_is_told_to(connect: Connect, unique: str) -> None:
    js = JetStream(await connect("js"))
    asked: list[int] = []

    async def first_seq() -> int:
        asked.append(8)
        return 8

    settings = {"name": unique, "subjects": [f"{unique}.>"], "storage": "file", "allow_direct": True}
    made = await js.ensure_stream(settings, first_seq=first_seq)
    assert (made.messages, made.first_seq, made.last_seq) == (0, 8, 7)
    assert await js.append(f"{unique}.a", b"1") == Ack(unique, 8)
    assert (await js.ensure_stream(settings, first_seq=first_seq)).last_seq == 8
    assert asked == [8], "of one that is there nothing is asked"


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
    assert await js.purge(unique, subject=f"{unique}.b", below_seq=6) == 1
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
    assert [m.seq async for m in js.read_range(unique, from_seq=30, to_seq=35)] == list(range(30, 36))
    await js.delete_message(unique, 30)
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
    for purge in ({"filter": f"{s}.b"}, {"seq": 5}, None):
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
