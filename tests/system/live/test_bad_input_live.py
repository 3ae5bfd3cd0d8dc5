"""Whatever arrives on whatever subject: a typed refusal where somebody waits for one, and the loop lives on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import pytest

from moorage.bus.connection import connect
from moorage.bus.jetstream import JetStream
from moorage.schemas.errors import CODES
from moorage.schemas.names import is_job
from tests.servers import Server
from tests.system.live.stack import ANSWER_S, Caller, RealProcess, caller, request, stack
from tests.waiting import until

BIG: Final = 10**30
DEEP: Final = 100_000

#: bytes that are no frame of any kind
RUBBISH: Final[dict[str, bytes]] = {
    "nothing": b"",
    "no-json": b"{",
    "words": b"hello",
    "null": b"null",
    "number": b"1",
    "text": b'"text"',
    "array": b"[]",
    "array-of-arrays": b"[[[]]]",
    "deep-array": b"[" * DEEP + b"]" * DEEP,
    "deep-object": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "msgpack-nil": b"\xc0",
    "msgpack-never": b"\xc1",
    "msgpack-bomb": b"\xdd\xff\xff\xff\xff",
    "msgpack-map-bomb": b"\xdf\xff\xff\xff\xff\xa1a",
    "msgpack-deep": b"\x91" * DEEP,
    "bad-utf8": b'{"job":"\xff\xfe"}',
    "surrogate": b'{"job":"\\ud800"}',
    "nul": b"\x00" * 100,
    "big-number": b'{"job":1e400,"v":' + str(BIG).encode() + b"}",
    "other-version": b'{"kind":"renew","session":"s","n":1,"v":99}',
    "unknown-kind": b'{"kind":"coup","v":1}',
    "oversized": b'{"job":"' + b"a" * 950_000 + b'"}',
    "gzip": b"\x1f\x8b\x08\x00",
}


def nested(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


def bodies() -> Iterator[tuple[str, bytes]]:
    """Requests that look well formed and are not, or are meant to do harm later."""
    good = msgspec.json.encode(request("x"))[:-1]
    for name, tail in {
        "unknown-field": b',"gpus":1}',
        "twice": b',"job":"y","priority":101}',
        "replicas-0": b',"replicas":0}',
        "replicas-many": b',"replicas":1000001}',
        "replicas-big": b',"replicas":%d}' % BIG,
        "priority-text": b',"priority":"high"}',
        "deadline-nan": b',"deadline_s":NaN}',
        "deadline-infinite": b',"deadline_s":1e999}',
        "deadline-negative": b',"deadline_s":-1}',
        "dot-in-id": b',"job":"a.b"}',
        "wildcard-in-id": b',"job":"*"}',
        "blank-in-id": b',"job":"a b"}',
        "empty-id": b',"job":""}',
        "long-id": b',"job":"' + b"a" * 65 + b'"}',
        "driver-config-deep": b',"driver_config":{"docker":' + nested(65) + b"}}",
        "driver-config-deeper": b',"driver_config":{"docker":' + nested(950) + b"}}",
        "driver-config-big": b',"driver_config":{"docker":{"n":%d}}}' % BIG,
        "big-body": b',"labels":{"a":"' + b"a" * 70_000 + b'"}}',
    }.items():
        yield name, good + tail
    wrong: dict[str, dict[str, Any]] = {
        "no-run": {"run": None},
        "no-argv": {"run": {"argv": []}},
        "nul-in-argv": {"run": {"argv": ["a\0b"]}},
        "env-name": {"run": {"argv": ["a"], "env": {"A=B": "c"}}},
        "gpus-0": {"gpu": {"count": 0}},
        "gpus-negative": {"gpu": {"count": -1}},
        "both-gpus": {"resource_requirements": {"gpu": {"count": 1}}},
        "share-nothing": {"gpu": {"sharing": "mps", "share": {"compute_percent": 0}}},
        "mixed-keys": {"driver_config": {"docker": {"a": 1, 2: 3}}},
        "extension": {"driver_config": {"docker": msgspec.msgpack.Ext(5, b"x")}},
    }
    for name, fields in wrong.items():
        made = {**request("x"), **fields}
        yield name, msgspec.msgpack.encode(made)


async def end_of(process: RealProcess) -> None:
    assert process.process.returncode is None, process.words()


async def still_leads(one: Caller, job: str) -> None:
    """The same term answers, and accepts."""
    fleet = await one.leader()
    assert fleet["epoch"] == 1
    assert (await one.submit(job, gpu={"model": "none such"}))["kind"] == "accepted"


def is_typed(answer: Any) -> bool:
    if isinstance(answer, list):  # a batch: each by itself
        return bool(answer) and all(map(is_typed, answer))
    return answer["kind"] == "error" and answer["code"] in CODES and bool(answer["message"]) and bool(answer["fault"])


async def ask(one: Caller, subject: str, payload: bytes, headers: dict[str, str] | None = None) -> Any:
    """One try: the answer decoded as what it is."""
    data = (await one.nc.request(subject, payload, timeout=ANSWER_S, headers=headers)).data
    return msgspec.json.decode(data) if data[:1] in (b"{", b"[") else msgspec.msgpack.decode(data)


@pytest.mark.slow
async def test_a_bad_request_is_refused_at_both_doors(nats_server: Server, unique: str) -> None:
    async with stack(nats_server, unique) as made, caller(made) as acme, caller(made, "beta") as beta:
        scheduler = await made.scheduler()
        await acme.leader()
        refused = dict(bodies())
        for name, body in refused.items():
            answer = await ask(acme, made.subjects.api("acme", "submit"), body)
            assert is_typed(answer), (name, answer)
            assert answer["code"] in ("invalid-argument", "too-large"), (name, answer)
            assert answer["fault"] == "caller"
        # a batch: each by itself
        batch = b"[" + b",".join(
            [msgspec.json.encode(request("one")), b'{"gpus":1}', msgspec.json.encode(request("two"))]
        )
        answers = await ask(acme, made.subjects.api("acme", "submit"), batch + b"]")
        assert [answer["kind"] for answer in answers] == ["accepted", "error", "accepted"]
        deep = request(
            "deep-but-fair", driver_config={"docker": msgspec.json.decode(nested(50))}, gpu={"model": "none"}
        )
        assert (await ask(acme, made.subjects.api("acme", "submit"), msgspec.json.encode(deep)))["kind"] == "accepted"

        # the durable door: what fits its bound is kept, read, and laid aside with the reason
        durable = {name: body for name, body in (refused | RUBBISH).items() if len(body) <= 60_000}
        for body in durable.values():
            await beta.queue("submit", body)
        cancels = [RUBBISH["nothing"], RUBBISH["no-json"], b'{"job":"a.b"}', b'{"job":5}', RUBBISH["msgpack-bomb"]]
        for body in cancels:
            await beta.queue("cancel", body)
        await beta.queue("submit", request("good", gpu={"model": "none such"}))
        await beta.reaches("good", "QUEUED")
        await beta.queue("submit", request("good", gpu={"model": "other than before"}))
        await beta.queue("submit", request("good", gpu={"model": "none such"}))
        async with await connect(nats_server.url, "test") as connection:
            js = JetStream(connection)
            subject, stream = made.subjects.dead_letter("beta"), made.subjects.dead_letter_stream

            async def all_buried() -> bool:
                info = await js.stream_info(stream, subject)
                return info.subjects.get(subject, 0) > len(durable) + len(cancels)

            await until(all_buried, what="every dead letter")
            letters = [msgspec.json.decode(m.data) async for m in js.read_range(stream, subject)]
        assert len(letters) == len(durable) + len(cancels) + 1
        assert {letter["problem"]["code"] for letter in letters} == {"invalid-argument", "conflict"}
        sequences = [letter["sequence"] for letter in letters]
        assert len(set(sequences)) == len(sequences)
        await still_leads(acme, "behind")
        await end_of(scheduler)
        assert "Traceback" not in scheduler.words()


async def test_headers_and_reply_subjects_do_no_harm(nats_server: Server, unique: str) -> None:
    async with stack(nats_server, unique) as made, caller(made) as acme:
        scheduler = await made.scheduler()
        await acme.leader()
        submit = made.subjects.api("acme", "submit")

        def body(job: str | None) -> bytes:
            return msgspec.json.encode(request(job, gpu={"model": "none such"}))

        # a traceparent that would burst the record is left out: this message is as large as the server takes
        room = acme.nc.max_payload - len(body("traced")) - 64
        answer = await ask(acme, submit, body("traced"), {"traceparent": "0" * room})
        assert answer["kind"] == "accepted"
        assert (await ask(acme, submit, body(None), {"Nats-Msg-Id": "named-by-header"}))["job"] == "named-by-header"
        named = await ask(acme, submit, body(None), {"Nats-Msg-Id": "not.a.name"})
        assert is_job(named["job"])
        # answers that are pointed at our own subjects, at a wildcard, at nothing
        replies = [
            submit,
            made.subjects.request("acme", "submit"),
            made.subjects.worker("w1", "fact"),
            "a.*.b",
            ">",
            "",
        ]
        for number, reply in enumerate(replies):
            await acme.nc.publish(submit, body(f"reflected-{number}"), reply=reply)
            await acme.nc.publish(made.subjects.api("acme", "show"), b'{"job":"never"}', reply=reply)
        # to and fro in one breath: the cancel was sent behind the submit, so the job is cancelled
        inbox = acme.nc.new_inbox()
        answers = await acme.nc.subscribe(inbox)
        for number in range(20):
            await acme.nc.publish(submit, body(f"breath-{number}"), inbox)
            await acme.nc.publish(
                made.subjects.api("acme", "cancel"), msgspec.json.encode({"job": f"breath-{number}"}), inbox
            )
        for _ in range(40):
            told = msgspec.json.decode((await answers.next_msg(ANSWER_S)).data)
            assert told["kind"] in ("accepted", "answer"), told
        for number in range(20):
            await acme.reaches(f"breath-{number}", "CANCELLED")
        await still_leads(acme, "behind")
        await end_of(scheduler)
        assert "Traceback" not in scheduler.words()


# ------------------------------------------------------------------------------------------------------- the server


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param("no-server", "cannot reach NATS", marks=pytest.mark.slow),
        ("wrong-user", "refused these credentials"),
        ("wrong-ledger", "refused these credentials"),
        ("no-context", "there is no context"),
    ],
)
def test_a_scheduler_that_reaches_nothing_says_so_in_a_line_and_what_to_do(
    nats_server: Server, unique: str, change: str, words: str
) -> None:
    url = {
        "no-server": "nats://127.0.0.1:1",
        "wrong-user": f"nats://moorage:wrong@127.0.0.1:{nats_server.port}",
        "no-context": "no-such-context",
    }.get(change, nats_server.url)
    ledger = f"nats://scheduler-ledger:wrong@127.0.0.1:{nats_server.port}" if change == "wrong-ledger" else url
    done = subprocess.run(
        [sys.executable, "-m", "moorage.scheduler", "--nats", url, "--prefix", unique],
        env=os.environ | {"MOORAGE_LEDGER_URL": ledger},
        capture_output=True,
        text=True,
        timeout=120,
    )
    told = [line for line in done.stderr.splitlines() if line.strip()]
    lines = [line for line in told if " INFO " not in line]  # which settings it found comes first
    assert "wrong@" not in done.stderr
    assert done.returncode == 5, done.stderr
    assert lines[0].startswith("error["), done.stderr
    assert words in lines[0]
    assert all(line.startswith("fix: ") for line in lines[1:]), done.stderr
    assert len(lines) <= 2, done.stderr
    assert "wrong@" not in lines[0]
