"""The follower of the ledger on a real server: GPU time is exact whatever ends it, but for a gap that is told."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Final

import pytest

from moorage.bus.connection import connect
from moorage.bus.embedded import EmbeddedServer
from moorage.bus.errors import JetStreamRefused
from moorage.bus.jetstream import JetStream
from moorage.scheduler.follower import beside
from moorage.scheduler.follower.beside import FollowerBeside
from moorage.scheduler.follower.fleet_past import FleetPast
from moorage.scheduler.follower.follower import Question
from moorage.scheduler.follower.operators_acts import OperatorsActs
from moorage.scheduler.follower.saves import Overtaken, Saved, Saves, Written
from moorage.scheduler.follower.series import AllSeries
from moorage.scheduler.follower.waits import Waits
from moorage.scheduler.ledger.evidence import Placements
from moorage.scheduler.ledger.snapshot_follower import Command
from moorage.schemas.answers.operators import ActRow
from moorage.schemas.codec import Decoder
from moorage.schemas.frames import HistoryFrame
from moorage.schemas.job import TERMINAL
from moorage.schemas.subjects import Subjects
from tests.system.live.stack import ANSWER_S, Caller, RealProcess, Stack, caller, is_alive, stack, unique_prefix
from tests.unit.scheduler.driving import Driving
from tests.waiting import until

#: snapshots are looked after more often than they would be, and a stopped follower is not ended for being silent
HASTY: Final[dict[str, float]] = {
    "moorage.scheduler.leader.term.SNAPSHOT_LOOK_S": 0.1,
    "moorage.scheduler.follower.beside.SILENT_S_MAX": 600.0,
}
#: jobs leave the leader's memory soon after their end: what is told of them is what the follower wrote
SMALL: Final[dict[str, float]] = {"snapshot_records": 100, "ended_max": 20}
_read_frame: Final = Decoder[HistoryFrame](HistoryFrame)


def follower_of(leader: RealProcess) -> int:
    """The pid of the leader's follower; 0 while there is none."""
    for pid in Path(f"/proc/{leader.pid}/task/{leader.pid}/children").read_text().split():
        with contextlib.suppress(OSError):  # another child, which has ended meanwhile
            if b"follower.process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return int(pid)
    return 0


async def led_by(made: Stack, one: Caller, name: str, epoch: int) -> RealProcess:
    leader = await made.set_scheduler(name, SMALL, made.url, made.ledger_url, HASTY)
    await one.leader(epoch)
    await until(lambda: follower_of(leader), ANSWER_S, "the follower's process")
    return leader


async def usage_of(one: Caller) -> dict[str, Any]:
    """The tenant's GPU time; asked for again while the follower is behind."""

    async def told() -> dict[str, Any] | None:
        answer = await one.api("usage", {"by": ["tenant"], "since_s": 86_400})
        if answer["kind"] == "answer":
            return dict(answer["data"])
        assert (answer["code"], answer["retry_after_s"] > 0) == ("behind", True)
        return None

    return dict(await until(told, ANSWER_S, "the GPU time"))


async def some_end(one: Caller, name: str, count: int = 16) -> None:
    """Jobs that come and end, each of some milliseconds."""
    jobs = [f"{name}-{number}" for number in range(count)]
    await asyncio.gather(*[one.submit(job) for job in jobs])
    await until(lambda: all(one.states.get(job) in TERMINAL for job in jobs), ANSWER_S, f"the end of {name}")


def held_ms(one: Caller, gaps: list[list[int]]) -> int:
    """What a stopwatch beside every attempt says, without the time of the gaps."""
    total = 0
    for history in one.heard.values():
        since = 0
        for _, change in sorted(history.items()):
            if change["state"] == "PLACED":
                since = change["time_ms"]
            elif since and change["state"] in (*TERMINAL, "QUEUED"):
                total += change["time_ms"] - since
                for begin, end in gaps:
                    total -= max(0, min(change["time_ms"], end) - max(since, begin))
                since = 0
        assert not since
    return total


async def is_exact(made: Stack, one: Caller, gaps: list[list[int]]) -> None:
    """Each transition that was heard is once in the history, and GPU time is that of the events, to the ms.

    But for what happened in the gaps, which the history tells, too.
    """
    async with await connect(made.url, "test") as connection:

        async def frames() -> list[HistoryFrame]:
            found = JetStream(connection).read_range(made.subjects.history_stream, made.subjects.history(one.tenant))
            try:
                return [_read_frame(message.data) async for message in found]
            except JetStreamRefused:  # the follower was killed before it had made the stream
                return []

        async def all_else_is_written() -> bool:
            rows = {
                (history.job, move.rev) for frame in await frames() for history in frame.jobs for move in history.moves
            }
            return not [
                (job, rev)
                for job, history in one.heard.items()
                for rev, change in history.items()
                if rev > 1 and (job, rev) not in rows
                if not any(begin <= change["time_ms"] <= end for begin, end in gaps)
            ]

        await until(all_else_is_written, ANSWER_S, "the history")
        found = await frames()
    rows = Counter((history.job, move.rev) for frame in found for history in frame.jobs for move in history.moves)
    assert max(rows.values()) == 1
    assert [list(frame.gap[2:]) for frame in found if frame.gap is not None] == gaps
    (row,) = (await usage_of(one))["rows"]
    assert round(row["gpu_s"] * 1000) == held_ms(one, gaps)


@pytest.mark.slow
async def test_a_follower_that_is_killed_counts_nothing_twice(nats_server: EmbeddedServer) -> None:
    async with stack(nats_server, unique_prefix()) as made, caller(made) as one:
        leader = await led_by(made, one, "one", 1)
        await made.agent("a", "8xH100")
        await one.workers_up("sim-0000")
        for number in range(4):
            await some_end(one, f"j{number}")
            await is_exact(made, one, [])
            pid = await until(lambda: follower_of(leader), ANSWER_S, "the follower")
            os.kill(pid, signal.SIGKILL)
            await until(lambda pid=pid: follower_of(leader) not in (0, pid), ANSWER_S, "another follower")
        await some_end(one, "last")
        await is_exact(made, one, [])
        assert (await one.fleet())["follower"]["gaps"] == []


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("bound", [0, 512 * 1024])
async def test_a_follower_that_is_stopped_under_load_while_its_leader_is_killed(
    nats_server: EmbeddedServer, bound: int
) -> None:
    """With room in the ledger nothing is missing; in one that is half full, the gap that is told."""
    async with stack(nats_server, unique_prefix()) as made, caller(made) as one:
        first = await led_by(made, one, "one", 1)
        await made.agent("a", "8xH100")
        await one.workers_up("sim-0000")
        await one.submit("long", "sh", "-c", f"while [ ! -e {made.folder}/go ]; do sleep 0.05; done")
        await one.reaches("long", "RUNNING")
        async with await connect(made.ledger_url, "test") as connection:
            jetstream = JetStream(connection)
            name = made.subjects.ledger_stream
            if bound:
                await jetstream.ensure_stream({"name": name, "max_bytes": bound}, frozenset({"max_bytes"}))
            await some_end(one, "before")
            await usage_of(one)  # up to here the follower has read
            stopped = await until(lambda: follower_of(first), ANSWER_S, "the follower")
            os.kill(stopped, signal.SIGSTOP)
            last_seq = (await jetstream.stream_info(name)).last_seq
            rounds = 0

            async def enough() -> bool:
                nonlocal rounds
                rounds += 1
                await some_end(one, f"during{rounds}")
                info = await jetstream.stream_info(name)
                is_purged = info.messages < info.last_seq - last_seq
                return is_purged if bound else info.last_seq > last_seq + 400

            try:
                await until(enough, ANSWER_S, "records that nobody has counted")
                await first.kill()
                await led_by(made, one, "two", 2)
                if not bound:
                    kept = await jetstream.get_message(name, last_seq + 1)
                    assert kept is not None, "the ledger waits for what its follower has not read"
                await some_end(one, "after")
            finally:
                os.kill(stopped, signal.SIGCONT)
            await until(lambda: not is_alive(stopped), ANSWER_S, "the end of the follower whose leader is gone")
        (made.folder / "go").touch()
        await one.reaches("long", "SUCCEEDED")
        shown = await one.check_history("before-3")
        assert shown["compacted"], "it is told from the history"
        told = await usage_of(one)
        gaps = told.get("gaps", [])
        assert len(gaps) == (1 if bound else 0)
        assert [gap[:2] for gap in (await one.fleet())["follower"]["gaps"]] == gaps
        await until(lambda: one.states.get("long") == "SUCCEEDED", ANSWER_S, "the last event")
        await is_exact(made, one, gaps)


@pytest.mark.slow
async def test_of_two_followers_one_saves_and_a_damaged_save_is_not_read(
    nats_server: EmbeddedServer, unique: str
) -> None:
    drive = Driving()
    subjects = Subjects(unique)
    async with await connect(nats_server.ledger_url, "test") as connection:
        jetstream = JetStream(connection)
        one, two = Saves(jetstream, subjects), Saves(jetstream, subjects)
        for saves in (one, two):
            await saves.open()
            assert await saves.read() is None
        drive.worker("w0", gpus=8)
        row = ActRow(seq=1, at_ms=1, by="operator:ana", verb="hold", tenant="t")
        acts, placed = OperatorsActs([row]), Placements()

        def saved(written: Written) -> Saved:
            state = drive.shadow
            tables = Waits(state), AllSeries(state), FleetPast(), placed
            return Saved(state, drive.usage, written, acts, *tables)

        for number in range(3):
            drive.submit(f"j{number}", gpu={})
            written = Written(7, [(1, [(1, 2, 3, [0])], 0)])
            await one.write(saved(written))
        with pytest.raises(Overtaken):
            await two.write(saved(Written()))
        await two.open()
        read = await two.read()
        assert read is not None
        assert (read[0].seq, read[0].digest) == (drive.state.seq, drive.state.digest)
        assert read.usage.answer(None, {}) == drive.usage.answer(None, {})
        assert read.acts.dump() == acts.dump()
        assert (read.history.last, read.history.jobs) == (7, [(1, [(1, 2, 3, [0])], 0)])
        info = await jetstream.stream_info(subjects.follower_stream, subjects.follower_all)
        assert info.subjects[subjects.follower_chunk] == 2, "two saves are kept"
        assert two.kept_from < drive.state.seq
        await jetstream.delete_message(subjects.follower_stream, info.last_seq - 1)
        read = await two.read()
        assert read is not None
        assert read[0].seq == two.kept_from, "the one before counts if the newest is damaged"
        await jetstream.delete_stream(subjects.follower_stream)


async def test_a_follower_that_says_nothing_is_ended_and_what_was_asked_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(beside, "SILENT_S_MAX", 0.2)
    monkeypatch.setattr(beside, "AGAIN_S", 0.01)
    command = Command([sys.executable, "-c", "import time; time.sleep(1000)"], {})
    follower = FollowerBeside(command, lambda: pytest.fail("it is a process"))
    running = asyncio.create_task(follower.run())
    answers: list[Any] = []
    try:
        for _ in range(2):

            def asked() -> bool:
                """Whether a process is there to be asked."""
                told = follower.ask(Question("usage", 7, "acme", {}), answers.append)
                assert told is None or told.code == "behind"
                return told is None

            before = len(answers)
            await until(asked, ANSWER_S, "a process")
            await until(lambda before=before: len(answers) > before, ANSWER_S, "an answer")
            assert {answer.code for answer in answers} == {"behind"}
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
