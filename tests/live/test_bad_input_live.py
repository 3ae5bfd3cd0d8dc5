"""Whatever arrives on whatever subject: a typed refusal where somebody waits for one, and the loop lives on."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from moorage.bus.connection import connect
from moorage.bus.jetstream import JetStream
from moorage.schemas.codec import encode
from moorage.schemas.errors import CODES
from moorage.schemas.frames import Device, Fact, FactFrame, Held, Hello, Join, Load, Renew, SlotLoad
from moorage.schemas.names import is_job
from tests.live.scripted_worker import ScriptedWorker, scripted_worker
from tests.live.stack import ANSWER_S, Caller, RealProcess, caller, request, stack
from tests.servers import MortalServer, Server
from tests.waiting import until

pytestmark = pytest.mark.any_server

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
    """The same reign answers, and accepts."""
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


async def test_rubbish_on_every_subject_is_refused_and_forgotten(nats_server: Server, unique: str) -> None:
    async with stack(nats_server, unique) as made, caller(made) as acme:
        scheduler = await made.scheduler()
        await acme.leader()
        await acme.submit("accepted-before", gpu={"model": "none such"})
        subjects = made.subjects
        async with scripted_worker(acme.nc, subjects, "w1", 2) as worker:
            asked = [
                *(subjects.api("acme", verb) for verb in ("submit", "cancel", "show", "explain", "nonsense")),
                *(subjects.admin(verb) for verb in ("cordon", "drain", "release", "nonsense")),
                *(subjects.worker("w1", verb) for verb in ("join", "renew", "fact")),
                subjects.api("BAD_TENANT", "submit"),
                subjects.worker("bad$worker", "join"),
            ]
            for subject in asked:
                for name, payload in RUBBISH.items():
                    answer = await ask(acme, subject, payload)
                    assert is_typed(answer), (subject, name, answer)
            for verb in ("ls",):
                for name, payload in RUBBISH.items():
                    answer = await ask(acme, subjects.api("acme", verb), payload)
                    assert answer["kind"] in ("answer", "error"), (verb, name, answer)
            for said in (subjects.hello("w1"), subjects.load("w1"), subjects.load("nobody"), f"{unique}.api.acme"):
                for payload in RUBBISH.values():
                    await acme.nc.publish(said, payload)
            await acme.nc.flush()
            await still_leads(acme, "accepted-behind")
            assert (await acme.show("accepted-before"))["rev"] == 1
            # the worker's session is what it was
            await until(lambda: worker.answers and worker.answers[-1]["kind"] == "renewed", what="a renewal answered")
            assert {answer["kind"] for answer in worker.answers} == {"renewed"}
        await end_of(scheduler)
        assert "defect" not in scheduler.words()
        assert "Traceback" not in scheduler.words()


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


@pytest.mark.slow
async def test_a_hostile_worker_harms_nobody_else(nats_server: Server, unique: str) -> None:
    """It holds a session of its own; frames are well formed, but false."""
    async with stack(nats_server, unique) as made, caller(made) as acme:
        scheduler = await made.scheduler()
        await acme.leader()
        subjects = made.subjects
        async with (
            scripted_worker(acme.nc, subjects, "good", 4) as good,
            scripted_worker(acme.nc, subjects, "evil", 4) as evil,
        ):
            on_good = {"requires": {"host": ["good"]}}
            await acme.submit("honest", **on_good)
            await good.step("honest", "claimed", "started")
            honest = await good.wants("honest")

            # another machine under the same id, and the old numbers again
            twin = ScriptedWorker(acme.nc, subjects, "good", 4, machine="another")
            twin.join_n = 10
            assert (await twin.join())["code"] == "worker-id-in-use"
            # and the same devices under another id, be it with one of its own before them
            own = Device(0, "nvidia", "NVIDIA H100 80GB HBM3", "GPU-00000000-0000-0000-0000-00000000000e", 81559)
            thief = ScriptedWorker(acme.nc, subjects, "thief", 1, machine="another")
            thief.hello = msgspec.structs.replace(thief.hello, gpu_pool=[own, good.hello.gpu_pool[3]])
            refused = await thief.join()
            assert (refused["code"], refused["field"]) == ("gpu-lent-twice", "$.hello.gpu_pool[1].uuid")
            assert (await good.ask("join", join_of(good, n=1)))["session"] == good.session
            assert (await good.ask("join", join_of(good, n=0)))["code"] == "stale-join"
            twice = await asyncio.gather(*(evil.ask("join", join_of(evil, n=n)) for n in (7, 7, 8, 8, 8)))
            assert {answer["kind"] for answer in twice} <= {"joined", "error"}
            evil.join_n = 100
            assert (await evil.join())["kind"] == "joined"

            # a session that is not its own, a frame again, a gap
            stolen = FactFrame(evil.session, 1, [good.fact("exited", honest)])
            assert (await good.ask("fact", stolen))["code"] == "session-over"
            assert (await evil.ask("fact", FactFrame(good.session, 3, [])))["code"] == "session-over"
            assert (await evil.ask("renew", Renew(good.session, 1)))["code"] == "session-over"
            again = FactFrame(good.session, 1, [good.fact("exited", honest), good.fact("freed", honest)])
            assert (await good.ask("fact", again))["no"] == good.no
            gap = await evil.ask("fact", FactFrame(evil.session, 5, []))
            assert (gap["code"], gap["allowed"]) == ("gap", "1")
            # facts about another worker's member, in its own session
            for kind in ("exited", "freed", "withdrawn", "not-held", "refused", "quarantined", "claimed", "started"):
                await evil.tell_raw(good.fact(kind, honest))
            assert (await acme.show("honest"))["state"] == "RUNNING"

            # numbers and words that are no numbers and words
            for fact in await hostile_facts(acme, evil):
                await evil.tell_raw(fact)
            for frame in (
                Renew(evil.session, 1, busy=[-1, 64, BIG, 10**9], held=[Held("a", "b", BIG, BIG, BIG, "running")]),
                Renew(evil.session, BIG, no=BIG, generation=-BIG),
                Renew(evil.session, 1, held=[Held("t", "j" * 200, 0, 0, n, "running") for n in range(2000)]),
            ):
                answer = await evil.ask("renew", frame)
                assert answer["kind"] in ("renewed", "error"), answer
            for name, join in hostile_joins(subjects_worker="evil").items():
                answer = await evil.ask("join", join)
                assert answer["kind"] in ("joined", "error"), (name, answer)
                await still_leads(acme, f"behind-{name}")

            # a flood of what is said
            flood = [encode(Load("good", "boot-1", n, n, gpu_pool=[SlotLoad(0)] * 100)) for n in range(2000)]
            hellos = [encode(Hello(f"w{n}", "b", gpu_pool=[Device(0, "nvidia", "x" * 1000, "u")])) for n in range(2000)]
            for load, hello in zip(flood, hellos, strict=True):
                await acme.nc.publish(subjects.load("good"), load)
                await acme.nc.publish(subjects.hello("good"), hello)
            await good.step("honest", "exited", "freed")
            assert await acme.state("honest") == "SUCCEEDED"
            await acme.submit("after", **on_good)
            await good.finish("after")
            await acme.reaches("after", "SUCCEEDED")
            assert {answer["kind"] for answer in good.answers} == {"renewed"}
            assert (await acme.fleet())["epoch"] == 1
        await end_of(scheduler)
        assert "Traceback" not in scheduler.words()


def join_of(worker: ScriptedWorker, n: int) -> Join:
    return Join(worker.machine, worker.hello.boot, n, worker.hello)


async def hostile_facts(acme: Caller, evil: ScriptedWorker) -> list[Fact]:
    """False details about members that are its own."""
    await acme.submit("gang", gpu={"scheduling": "gang"}, replicas=2, requires={"host": ["evil"]})
    await acme.submit("plain", requires={"host": ["evil"]})
    ranks, plain = [await evil.wants("gang", rank) for rank in (0, 1)], await evil.wants("plain")
    return [
        evil.fact("claimed", ranks[0], detail="no:such:port"),
        evil.fact("claimed", ranks[1], detail="x" * 100_000),
        evil.fact("claimed", plain),
        evil.fact("exited", plain, BIG, "x" * 100_000),
        evil.fact("exited", plain, 1, "exit"),
        evil.fact("quarantined", plain, detail="9999999999"),
        evil.fact("quarantined", plain, detail="-1, ²,0x1"),
        evil.fact("freed", plain),
        Fact("freed", "no", "such", BIG, -BIG, BIG),
    ]


def hostile_joins(subjects_worker: str) -> dict[str, Join]:
    def hello(**fields: Any) -> Hello:
        made: dict[str, Any] = {"drivers": ["process"], "labels": {"host": subjects_worker}, **fields}
        return Hello(subjects_worker, "boot-1", **made)

    device = Device(0, "nvidia", "NVIDIA H100", "GPU-0", 81559)
    hellos = {
        "cpu-big": hello(cpu_milli=BIG),
        "cpu-negative": hello(cpu_milli=-1),
        "memory-big": hello(memory_mib=BIG),
        "index-big": hello(gpu_pool=[msgspec.structs.replace(device, index=BIG)]),
        "device-memory-big": hello(gpu_pool=[msgspec.structs.replace(device, memory_mib=BIG)]),
        "device-memory-negative": hello(gpu_pool=[msgspec.structs.replace(device, memory_mib=-5)]),
        "peers-big": hello(gpu_pool=[msgspec.structs.replace(device, peers=[BIG])]),
        "slots-lent-beyond": hello(gpu_pool=[device], lent_slots=[-1, 5, 63, 64, 10**9]),
        "sharers-big": hello(gpu_pool=[device], modes=["mps"], sharers_max={"mps": BIG, "nonsense": -1}),
        "sharers-negative": hello(gpu_pool=[device], modes=["mps", "nonsense"], sharers_max={"mps": -4}),
        "twice-the-same-device": hello(gpu_pool=[device, device]),
        "devices-many": hello(gpu_pool=[msgspec.structs.replace(device, uuid=str(n)) for n in range(65)]),
        "words-long": hello(hostname="h" * 800_000),
        "labels-many": hello(labels={f"k{n}": "v" * 100 for n in range(5000)}),
        "another-worker": msgspec.structs.replace(hello(), worker="good"),
    }
    joins = {
        name: Join("machine-evil", "boot-1", 1000 + number, each) for number, (name, each) in enumerate(hellos.items())
    }
    joins["number-big"] = Join("machine-evil", "boot-1", BIG, hello())
    joins["boot-long"] = Join("machine-evil", "b" * 800_000, 5000, hello())
    joins["facts-false"] = Join(
        "machine-evil", "boot-1", 6000, hello(), facts=[Fact("exited", "acme", "plain", 0, 1, BIG, BIG, "x" * 1000)]
    )
    held = [Held("acme", "honest", 0, 1, fence, "running") for fence in (*range(200), BIG)]
    joins["holding-false"] = Join("machine-evil", "boot-1", 7000, hello(), holding=held)
    return joins


# ------------------------------------------------------------------------------------------------------- the server


@pytest.mark.slow
async def test_a_killed_server_costs_nothing_that_was_accepted(mortal_server: MortalServer, unique: str) -> None:
    async with stack(mortal_server, unique) as made, caller(made) as acme:
        leader, standby = await made.scheduler("leader"), await made.scheduler("standby")
        first = (await acme.leader())["leader"]
        await until(lambda: "folded" in leader.words() and "folded" in standby.words(), what="a leader and a standby")
        await made.agent("w", "2xH100", worker="w1")
        await acme.workers_up("w1")
        go = made.folder / "go"
        await acme.submit(
            "runs", "/bin/sh", "-c", f"echo $MOORAGE_FENCE >> {go}.ran; until [ -e {go} ]; do sleep 0.02; done"
        )
        await acme.submit("waits", gpu={"count": 2})
        await acme.reaches("runs", "RUNNING")
        sequence = await acme.queue("submit", request(None, gpu={"count": 2}))
        await mortal_server.kill()
        asking = asyncio.create_task(acme.submit("asked-meanwhile"))
        await mortal_server.start()
        assert (await asking)["kind"] == "accepted"
        go.touch()
        for job in ("runs", "waits", "asked-meanwhile", f"q{sequence}"):
            await acme.reaches(job, "SUCCEEDED")
            shown = await acme.check_story(job)
            assert shown["attempt"] == 1, shown
        assert len(Path(f"{go}.ran").read_text().split()) == 1
        await acme.all_free()
        assert (await acme.fleet())["leader"] in ("leader", "standby"), first
        await end_of(leader)
        await end_of(standby)


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
