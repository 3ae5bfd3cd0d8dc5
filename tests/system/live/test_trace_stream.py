"""The stream of traces on a real server: a trace reaches back behind the ledger, and has each event once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moorage.bus.connection import connect
from moorage.bus.jetstream import JetStream
from moorage.scheduler.core.config import Config
from moorage.scheduler.follower import trace_stream
from moorage.scheduler.follower.follower import Follower
from moorage.scheduler.follower.saves import Overtaken
from moorage.scheduler.follower.trace_stream import TraceStream
from moorage.scheduler.ledger.traced import Told, keep, read_trace
from moorage.testing.simulate.from_ledger import TraceWriter
from tests.servers import Server
from tests.system.live.test_ledger_reader import Written, written


async def follow(made: Written) -> None:
    """Have a follower read the ledger to its end, as each leader's does, and go away."""
    await Follower(made.jetstream, made.jetstream, made.subjects, Config(), 1, 10).finish()


async def traced(server: Server, prefix: str, since_ms: int | None = None) -> tuple[list[dict[str, Any]], Told]:
    trace, told = await read_trace(server.url, prefix, TraceWriter, since_ms)
    return [json.loads(line) for line in trace.lines()], told


async def run_job(made: Written, name: str) -> None:
    made.drive.submit(name, gpu={}, tenant="late")
    made.drive.settle()
    made.drive.run_out("w1")
    await made.store()


async def cut(made: Written) -> None:
    """Leave of the ledger what is behind its older snapshot, which is made now."""
    await made.snapshot()
    behind = made.drive.state.seq
    await made.snapshot()
    await made.ledger.purge_below(behind)


def jobs_of(lines: list[dict[str, Any]]) -> list[str]:
    return [line["request"]["job"] for line in lines if "request" in line]


async def test_a_trace_begins_in_the_stream_and_goes_on_with_the_ledger(nats_server: Server, unique: str) -> None:
    async with written(nats_server, unique) as made:
        await follow(made)
        assert await keep(nats_server.url, unique, 16 * 1024**2) == made.subjects.trace_stream
        await follow(made)  # the base
        for name in ("one", "two"):
            await run_job(made, name)
            await follow(made)  # another one each time
        await run_job(made, "three")
        whole, told = await traced(nats_server, unique)
        assert told == Told(), "the ledger has all"
        await follow(made)
        await cut(made)
        await run_job(made, "four")
        await follow(made)  # stream and ledger both have this
        await run_job(made, "five")  # no follower has read the end
        lines, told = await traced(nats_server, unique)
        assert told == Told(from_stream=True)
        names = jobs_of(lines)
        assert sorted(names) == sorted({*names, "one", "two", "three", "four", "five"}), "each once"
        assert sum("look" in line for line in lines) == 5, "one for each that was placed"
        assert [line["placed"] for line in lines if line.get("request", {}).get("job") == "two"] != [{}]
        begin = {"one", "two"}
        fields = [
            [(line["request"]["job"], len(line["placed"]), line["attempts"]) for line in of if "request" in line]
            for of in (whole, lines)
        ]
        assert [row for row in fields[0] if row[0] in begin] == [row for row in fields[1] if row[0] in begin]
        ends = {line["request"]["job"]: line for line in lines if "request" in line}["one"]["at_s"]
        assert 0 <= ends <= lines[0]["until_s"]
        text = json.dumps(
            [
                json.loads(line)
                for line in (
                    await read_trace(nats_server.url, unique, lambda base: TraceWriter(base, anonymous=True), None)
                )[0].lines()
            ]
        )
        assert not any(word in text for word in ('"two"', '"late"', '"w1"'))
        await keep(nats_server.url, unique, 0)
        lines, told = await traced(nats_server, unique)
        assert ("two" in jobs_of(lines), told) == (False, Told()), "off: what the ledger has"


async def test_a_follower_that_reads_records_again_appends_none_twice(
    nats_server: Server, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on from an older save, as one that was killed before it saved."""
    async with written(nats_server, unique) as made:
        await keep(nats_server.url, unique, 16 * 1024**2)
        await follow(made)

        async def killed(_: object) -> None:
            raise KeyboardInterrupt

        for name in ("one", "two"):
            await run_job(made, name)
            with monkeypatch.context() as patched:
                patched.setattr(Follower, "_save", killed)
                with pytest.raises(KeyboardInterrupt):
                    await follow(made)
        await follow(made)
        through, seen = 0, list[str]()
        async for message in made.jetstream.read_range(made.subjects.trace_stream):
            batch = trace_stream.decode(message.data)
            assert batch.base or batch.after == through
            through = batch.through
            seen += [event[4]["job"] for _, events in batch.rows for event in events if event[0] == "job"]
        assert [name for name in seen if name in ("one", "two")] == ["one", "two"]
        assert through == made.drive.state.seq


async def test_of_two_followers_one_appends_and_a_gap_is_told(nats_server: Server, unique: str) -> None:
    async with written(nats_server, unique) as made:
        await keep(nats_server.url, unique, 16 * 1024**2)
        await follow(made)
        one, two = (TraceStream(made.jetstream, made.subjects) for _ in range(2))
        for each in (one, two):
            await each.begin(made.drive.shadow)
        made.drive.submit("told", gpu={})
        await made.store()
        await one.write(mark=True)
        with pytest.raises(Overtaken):
            await two.write(mark=True)
        assert (await traced(nats_server, unique))[1] == Told(), "the ledger has all"
        await run_job(made, "lost")
        await made.snapshot()
        await made.snapshot()
        await made.ledger.purge_below(made.drive.state.seq - 1)
        assert (await traced(nats_server, unique))[1] == Told(is_cut=True), "the stream ends before the ledger begins"
        await made.jetstream.delete_stream(made.subjects.follower_stream)
        await follow(made)  # from the newest snapshot on: a gap, and a base
        await run_job(made, "behind")
        await follow(made)
        await cut(made)
        lines, told = await traced(nats_server, unique)
        assert told == Told(from_stream=True, is_cut=True)
        assert "behind" in jobs_of(lines)


async def test_a_large_base_comes_in_parts_that_count_together(
    nats_server: Server, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_stream, "BYTES_MAX", 300)
    async with written(nats_server, unique) as made, await connect(nats_server.url, "test") as connection:
        jetstream = JetStream(connection)
        await keep(nats_server.url, unique, 16 * 1024**2)
        await follow(made)
        await run_job(made, "one")
        await follow(made)
        await cut(made)
        lines, told = await traced(nats_server, unique)
        assert told == Told(from_stream=True)
        assert ({line["join"]["name"] for line in lines if "join" in line}, "one" in jobs_of(lines)) == (
            {"w0", "w1"},
            True,
        )
        parts = [
            message.seq
            async for message in jetstream.read_range(made.subjects.trace_stream)
            if trace_stream.decode(message.data).base
        ]
        assert len(parts) > 2
        await jetstream.delete_message(made.subjects.trace_stream, parts[1])
        lines, told = await traced(nats_server, unique)
        assert not told.from_stream, "without one of its parts there is no base"
