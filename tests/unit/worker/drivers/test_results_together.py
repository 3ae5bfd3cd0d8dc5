"""Small results of functions: those that a worker finishes in one turn are one message, which its reports name."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moorage.bus.connection import connect
from moorage.bus.embedded import EmbeddedServer
from moorage.bus.jetstream import JetStream
from moorage.bus.results import CHUNK_BYTES, ResultStore
from moorage.schemas.frames import Report, Results, result_of
from moorage.schemas.handler import TOGETHER_BYTES_MAX, Result, decode_result, line_of, result_bucket, result_object
from moorage.testing.conformance.leader import ScriptedLeader
from moorage.worker import EmbeddedWorker, HandlerContext, WorkerSettings
from moorage.worker.drivers.handler import driver as handler
from tests.unit.worker.drivers.test_handler import body, name_of, place
from tests.waiting import until

#: what its level says is learnt with an answer to a renewal, and renewals are frequent here
RENEW_S = 0.05
GPUS = 8


class Service:
    """A worker whose functions all return once the test lets them, each what the test says for its job."""

    def __init__(self, url: str, prefix: str, state: Path) -> None:
        self.running: set[str] = set()
        self.go_on = asyncio.Event()
        self.values: dict[str, Any] = {}
        self.worker = EmbeddedWorker(url, WorkerSettings(state, "w1", prefix, simulate=f"{GPUS}xH100", load_s=60))
        self.worker.handler("give")(self.give)

    async def give(self, context: HandlerContext) -> Any:
        self.running.add(context.job)
        await self.go_on.wait()
        return self.values[context.job]

    @property
    def joined(self) -> bool:
        agent = self.worker._agent
        return agent is not None and agent.attempts.session.phase == "live"


class World:
    def __init__(self, leader: ScriptedLeader, service: Service, jetstream: JetStream, prefix: str) -> None:
        self.leader, self.service, self.jetstream = leader, service, jetstream
        self.bucket = result_bucket(prefix, "acme")
        self.store = ResultStore(jetstream, prefix)

    async def finish(self, **values: Any) -> dict[str, Report]:
        """Have one function a name return that value, all in one turn; how each ended."""
        service, leader = self.service, self.leader
        names = {job: name_of(job, 10 + at) for at, job in enumerate(values)}
        service.values, service.running = values, set()
        service.go_on.clear()
        await leader.want("w1", *(place(name, body("give"), (at,)) for at, name in enumerate(names.values())))
        await until(lambda: service.running == set(values), what="all run")
        service.go_on.set()
        return {job: await leader.await_report("w1", "exited", name) for job, name in names.items()}

    async def messages(self) -> list[tuple[str, bytes]]:
        """What the tenant's stream holds: the last token of each subject, or the first of the meaning, and the data."""
        info = await self.jetstream.stream_info(f"OBJ_{self.bucket}")
        found = []
        for seq in range(info.first_seq, info.last_seq + 1):
            message = await self.jetstream.get_message(f"OBJ_{self.bucket}", seq)
            if message is not None:
                found.append((message.subject.split(".")[2], message.data))
        return found

    async def value(self, job: str, report: Report) -> Any:
        found = await self.store.get("acme", result_object(job, 0, report.fence), result_of(report.detail))
        return None if found is None else decode_result(found)


@contextlib.asynccontextmanager
async def world(url: str, prefix: str, state: Path) -> AsyncIterator[World]:
    async with ScriptedLeader(url, prefix, renew_s=RENEW_S) as leader, await connect(url, "test") as connection:
        service = Service(url, prefix, state)
        made = World(leader, service, JetStream(connection), prefix)
        async with service.worker:
            await leader.joined("w1")
            await until(lambda: service.joined, what="the answer to the join")
            yield made
            service.go_on.set()
        with contextlib.suppress(Exception):  # a bucket has its bound set aside while it is there
            await made.jetstream.delete_stream(f"OBJ_{made.bucket}")


async def test_what_ends_in_one_turn_is_one_message(nats_url: str, unique: str, tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "a": {"n": [1, 2.5, None]},
        "b": "wörter\nin zwei Zeilen",
        "c": b"\x00\xff bytes",
        "d": "",
        "e": [],
        "f": 2**60,
    }
    async with world(nats_url, unique, tmp_path) as it:
        ends = await it.finish(**values)
        assert {report.code for report in ends.values()} == {0}
        assert {report.detail for report in ends.values()} == {"result:1"}, "one append, for all"
        [(kind, data)] = await it.messages()
        assert (kind, len(msgspec.json.decode(data, type=Results).results)) == ("C", len(values))
        sent = [frame for subject, frame in it.leader.output if subject == it.leader.subjects.results("acme")]
        assert sent == [msgspec.json.decode(data)], "once, to all that wait"
        for job, value in values.items():
            assert await it.value(job, ends[job]) == value
            line = msgspec.json.decode(it.leader.text(name_of(job, ends[job].fence)))
            assert line["result"] == f"{job}.0.{ends[job].fence}", "the line on its log subject as well"
        other = Report("exited", "acme", "a", 0, 1, 99, 0, "result:1")
        assert await it.value("a", other) is None, "an attempt that is not in it has none there"


async def test_a_large_one_is_an_object_and_nothing_is_nothing(nats_url: str, unique: str, tmp_path: Path) -> None:
    values = {
        "most": bytes(TOGETHER_BYTES_MAX),
        "more": bytes(TOGETHER_BYTES_MAX + 1),
        "pieces": bytes(2 * CHUNK_BYTES),
        "none": None,
    }
    async with world(nats_url, unique, tmp_path) as it:
        ends = await it.finish(**values)
        assert ends["none"].detail == "result:0"
        assert len({report.detail for report in ends.values()}) == 4
        for job in ("most", "more", "pieces"):
            assert await it.value(job, ends[job]) == values[job]
        by_name = [await it.store.get("acme", result_object(job, 0, ends[job].fence)) for job in values]
        assert [found is not None for found in by_name] == [False, True, True, False]


async def test_many_bytes_are_several_messages(nats_url: str, unique: str, tmp_path: Path) -> None:
    values = {f"j{number}": bytes([number]) * TOGETHER_BYTES_MAX for number in range(GPUS)}
    async with world(nats_url, unique, tmp_path) as it:
        ends = await it.finish(**values)
        assert [len(data) <= CHUNK_BYTES for _, data in await it.messages()] == [True, True]
        for job, value in values.items():
            assert await it.value(job, ends[job]) == value


async def test_a_result_that_cannot_be_written_fails_alone(nats_url: str, unique: str, tmp_path: Path) -> None:
    async with world(nats_url, unique, tmp_path) as it:
        ends = await it.finish(good=1, no_json=object(), no_utf8="\udcff", huge=bytes(65 << 20), also_good="x")
        assert {job: report.code for job, report in ends.items()} == {
            "good": 0, "no_json": 1, "no_utf8": 1, "huge": 1, "also_good": 0,
        }  # fmt: skip
        assert ends["huge"].detail.startswith("the result could not be kept: a result has at most")
        assert await it.value("good", ends["good"]) == 1
        assert await it.value("also_good", ends["also_good"]) == "x"


async def test_results_for_which_there_is_no_room_fail_their_jobs_and_no_others(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    async with world(nats_url, unique, tmp_path) as it:
        config = {"name": f"OBJ_{it.bucket}", "subjects": [f"$O.{it.bucket}.>"], "discard": "new", "max_bytes": 4096}
        await it.jetstream.ensure_stream(config)
        ends = await it.finish(a="x" * 4000, b="y" * 4000, none=None)
        assert {job: report.code for job, report in ends.items()} == {"a": 1, "b": 1, "none": 0}
        assert "maximum bytes exceeded" in ends["a"].detail
        assert (await it.finish(c="small"))["c"].code == 0


async def test_a_store_that_does_not_answer_holds_up_no_end_for_long(
    nats_url: str, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of those that wait for the message before theirs."""
    monkeypatch.setattr(handler, "STORE_S_MAX", 0.05)
    async with world(nats_url, unique, tmp_path) as it:
        silent = await it.leader.nc.subscribe(f"$O.{it.bucket}.>")
        values = {f"j{number}": bytes([number]) * TOGETHER_BYTES_MAX for number in range(GPUS)}
        ends = await it.finish(**values)
        assert {(report.code, report.detail) for report in ends.values()} == {
            (1, "the result could not be kept: not within 0.05 s")
        }
        await silent.unsubscribe()
        monkeypatch.undo()  # a store that answers may take its time
        assert (await it.finish(later=1))["later"].code == 0


async def test_a_message_that_is_gone_or_another_one_holds_no_result(nats_server: EmbeddedServer, unique: str) -> None:
    """Aged out, purged, or of a bucket that was made anew, where the sequence is some other message."""
    async with await connect(nats_server.url, "test") as connection:
        jetstream = JetStream(connection)
        store, stream = ResultStore(jetstream, unique), f"OBJ_{result_bucket(unique, 'acme')}"
        assert await store.get("acme", "a.0.1", 1) is None, "no bucket at all"
        large = Result("text/plain", bytes(2 * CHUNK_BYTES))
        small = Result("application/json", b"1")
        first = await store.put_together("acme", [line_of("a.0.1", small), line_of("a.0.10", large)])
        other = await store.put("acme", "b.0.1", large)
        try:
            assert await store.get("acme", "a.0.1", first) == small
            assert await store.get("acme", "a.0", first) is None
            assert await store.get("acme", "a.0.1", other) is None
            assert await store.get("acme", "a.0.1", other - 1) is None, "a piece of an object"
            assert await store.get("acme", "b.0.1", other) == large
            await jetstream.purge(stream)
            assert await store.get("acme", "a.0.1", first) is None
            assert await store.get("acme", "b.0.1", other) is None
        finally:
            await jetstream.delete_stream(stream)


def nested(levels: int) -> Any:
    found: Any = 0
    for _ in range(levels):
        found = [found]
    return found


async def test_a_result_that_cannot_be_read_again_spoils_no_other(nats_url: str, unique: str, tmp_path: Path) -> None:
    values = {"a": 1, "deep": nested(800), "b": {"x": 2}, "raw": {"x": msgspec.Raw(b"{no json")}, "c": nested(100)}
    async with world(nats_url, unique, tmp_path) as it:
        ends = await it.finish(**values)
        assert ends.pop("raw").code == 1
        assert {job: await it.value(job, end) for job, end in ends.items()} == {
            job: value for job, value in values.items() if job != "raw"
        }
        deep = ends.pop("deep")
        assert result_of(deep.detail) not in {result_of(end.detail) for end in ends.values()}
