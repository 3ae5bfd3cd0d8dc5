"""The ledger's promises on a real server: who may append, what an unclear answer means, what a recovery begins with."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from moorage.bus import connection
from moorage.bus.connection import Connection, connect
from moorage.bus.errors import JetStreamRefused, RequestTimeout
from moorage.bus.jetstream import ERR_WRONG_LAST_SEQUENCE, Ack, JetStream, JsError
from moorage.bus.jetstream_answers import StreamInfo
from moorage.bus.transport import Outgoing
from moorage.scheduler.core.config import Config
from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.events import SnapshotTaken
from moorage.scheduler.core.ledger import acts
from moorage.scheduler.core.ledger.record import Record, encode_record
from moorage.scheduler.core.ledger.records import FORMAT
from moorage.scheduler.core.ledger.state import State
from moorage.scheduler.follower.beside import FollowerBeside
from moorage.scheduler.follower.follower import Position
from moorage.scheduler.leader import service, term
from moorage.scheduler.ledger import ledger as ledger_room
from moorage.scheduler.ledger import state_bytes
from moorage.scheduler.ledger.invariants import validate
from moorage.scheduler.ledger.ledger import Deposed, Ledger, LedgerBroken, SnapshotsUnread
from moorage.scheduler.ledger.snapshot_follower import Command, take_snapshot
from moorage.scheduler.ledger.snapshots import Snapshots, follow_and_write, recover
from moorage.scheduler.ledger.state_bytes import FORMAT_ABOVE_LEVEL, dump
from moorage.scheduler.pacing.write_stall import NOT_CONNECTED, stall_problem, what_next
from moorage.schemas.subjects import Subjects
from tests.servers import MortalServer, Server
from tests.system.live.scripted_worker import scripted_worker
from tests.system.live.stack import ANSWER_S, QUICK, caller, request, stack
from tests.waiting import until


class WireJetStream(JetStream):
    """The real one, whose answers a test may lose or change on their way back."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self.lose = 0  # so many answers never arrive
        self.refuse = 0  # so many come as 10071, though the message was stored
        self.sent = 0
        self.begun = 0

    async def append(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None, timeout_s: float = 5.0
    ) -> Ack | JsError:
        self.begun += 1
        answer = await super().append(subject, payload, headers, timeout_s)
        self.sent += 1
        if self.lose:
            self.lose -= 1
            assert isinstance(answer, Ack), "only the answer of a stored append is lost here"
            raise RequestTimeout(subject, timeout_s)
        if self.refuse:
            self.refuse -= 1
            assert isinstance(answer, Ack)
            return JsError(400, ERR_WRONG_LAST_SEQUENCE, "wrong last sequence")
        return answer


@dataclass
class Leader:
    """A ledger, the state folded from it, and an engine that makes its records."""

    ledger: Ledger
    state: State
    wire: WireJetStream
    subjects: Subjects
    number: int
    engine: Engine | None = None

    async def lead(self) -> None:
        await self.ledger.follow(self.state)
        await self.ledger.take_over(self.state, f"leader-{self.number}", secrets.token_hex(8), 1000, time.time())
        self.engine = Engine(self.state, Config(), self.subjects, self.number, 0)

    async def append(self, *jobs: str, snapshot: tuple[str, int, str] | None = None) -> int:
        """One record that accepts these jobs; its sequence."""
        engine = self.engine
        assert engine is not None
        for job in jobs:
            body = msgspec.json.encode(request(job))
            engine.offer(engine.submitted("acme", body, lambda: "none"))
        if snapshot is not None:
            engine.offer(SnapshotTaken(*snapshot))
        after, payload = self.state.seq, engine.build(self.state.time_ms + 1, 0, folds=False)
        names = engine.names_snapshot
        seq = await self.ledger.append_record(self.state, after, engine.rid, payload, names_snapshot=names)
        engine.commit(seq, 0)
        return seq


class Desk:
    """A prefix on the ledger's account, and leaders on it."""

    def __init__(self, connection: Connection, prefix: str, url: str) -> None:
        self.connection = connection
        self.subjects = Subjects(prefix)
        self.url = url
        self.js = JetStream(connection)
        self.snapshots = Snapshots(self.js, self.subjects)

    async def leader(self) -> Leader:
        wire, number = WireJetStream(self.connection), secrets.randbits(62)
        ledger = Ledger(wire, self.subjects, number)
        await ledger.ensure()
        await self.snapshots.ensure()
        return Leader(ledger, State(), wire, self.subjects, number)

    async def folded(self) -> tuple[State, Ledger]:
        """The whole ledger folded by somebody else."""
        state, ledger = State(), Ledger(self.js, self.subjects, 0)
        await ledger.follow(state)
        validate(state)
        return state, ledger

    async def end(self) -> int:
        return (await self.js.stream_info(self.subjects.ledger_stream)).last_seq


@contextlib.asynccontextmanager
async def desk(server: Server, prefix: str) -> AsyncIterator[Desk]:
    async with await connect(server.ledger_url, "test") as connection:
        yield Desk(connection, prefix, server.ledger_url)


# ---------------------------------------------------------------------------------------------------- who may append


async def test_records_fold_to_the_leaders_memory(nats_server: Server, unique: str) -> None:
    async with desk(nats_server, unique) as here:
        one = await here.leader()
        await one.lead()
        for number in range(5):
            await one.append(*(f"job-{number}-{each}" for each in range(20)))
        other, _ = await here.folded()
        assert (other.digest, other.seq, other.epoch) == (one.state.digest, one.state.seq, 1)
        assert len(other.jobs) == 100


async def test_a_newer_epoch_fences_the_old_leader_for_good(nats_server: Server, unique: str) -> None:
    async with desk(nats_server, unique) as here:
        old, new = await here.leader(), await here.leader()
        await old.lead()
        await old.append("a")
        await new.lead()
        end = await here.end()
        with pytest.raises(Deposed):
            await old.append("b")
        assert await here.end() == end
        await new.append("c")
        state, ledger = await here.folded()
        assert set(state.tenants["acme"].jobs) == {"a", "c"}
        assert (state.epoch, ledger.junk) == (2, 0)


async def test_each_guard_refuses_alone(nats_server: Server, unique: str) -> None:
    async with desk(nats_server, unique) as here:
        old, new = await here.leader(), await here.leader()
        await old.lead()
        await old.append("a")
        # the sequence: somebody else's record stands where this one was to go, in the same term
        twin = await here.leader()
        await twin.ledger.follow(twin.state)
        twin.engine = Engine(twin.state, Config(), twin.subjects, twin.number, 0)
        await old.append("b")
        with pytest.raises(Deposed):
            await twin.append("c")
        # the epoch: the sequence would fit, since the old leader has seen the end, but not what the epoch record says
        await new.lead()
        old.state.seq = new.state.seq
        end = await here.end()
        answer = await here.js.append(
            here.subjects.ledger_record,
            b"stale",
            {
                "Nats-Expected-Last-Sequence": str(end),
                "Nats-Expected-Last-Subject-Sequence": str(old.state.epoch_seq),
                "Nats-Expected-Last-Subject-Sequence-Subject": here.subjects.ledger_epoch,
            },
        )
        assert isinstance(answer, JsError)
        assert answer.err_code == ERR_WRONG_LAST_SEQUENCE
        assert await here.end() == end


async def test_who_takes_over_from_a_leader_that_still_writes_is_deposed(nats_server: Server, unique: str) -> None:
    """The old one wrote between the last look and the epoch record: its record is acknowledged and must be folded."""
    async with desk(nats_server, unique) as here:
        old, new = await here.leader(), await here.leader()
        await old.lead()
        await old.append("a")
        await new.ledger.follow(new.state)
        await old.append("answered-meanwhile")
        with pytest.raises(Deposed):
            await new.ledger.take_over(new.state, "new", secrets.token_hex(8), 1000, time.time())
        await old.append("b")
        again = await here.leader()
        await again.lead()
        state, ledger = await here.folded()
        assert set(state.tenants["acme"].jobs) == {"a", "answered-meanwhile", "b"}
        assert (state.epoch, ledger.junk) == (2, 0)


async def test_of_two_that_begin_a_ledger_one_leads(nats_server: Server, unique: str) -> None:
    async with desk(nats_server, unique) as here:
        leaders = [await here.leader() for _ in range(4)]
        for leader in leaders:  # each has seen the same end before any of them begins
            await leader.ledger.follow(leader.state)
        tries = [leader.ledger.take_over(leader.state, "l", secrets.token_hex(8), 1000, 0.0) for leader in leaders]
        outcomes = await asyncio.gather(*tries, return_exceptions=True)
        assert sorted(type(outcome).__name__ for outcome in outcomes) == ["Deposed"] * 3 + ["NoneType"]
        assert await here.end() == 1


# ------------------------------------------------------------------------------------------------- unclear answers


@pytest.mark.parametrize("trouble", ["lose", "refuse"])
async def test_an_append_whose_answer_is_not_an_ack_is_found_and_stands_once(
    nats_server: Server, unique: str, trouble: str
) -> None:
    async with desk(nats_server, unique) as here:
        one = await here.leader()
        setattr(one.wire, trouble, 1)
        await one.lead()  # the epoch record's own answer
        setattr(one.wire, trouble, 1)
        seq = await one.append("a")
        assert (seq, await here.end(), one.ledger.unclear) == (2, 2, 2)
        assert one.wire.sent == 2, "it was read back, not sent again"
        await one.append("b")
        state, ledger = await here.folded()
        assert (state.digest, ledger.junk) == (one.state.digest, 0)


async def test_an_append_that_was_not_stored_is_sent_again(nats_server: Server, unique: str) -> None:
    """Nothing listens for a moment: the answer is 503, the record is not there, and the same bytes go again."""
    async with desk(nats_server, unique) as here:
        one = await here.leader()
        await one.lead()
        config = (await here.js.stream_info(here.subjects.ledger_stream)).config
        elsewhere = {**config, "subjects": [f"{unique}.elsewhere"]}
        await here.connection.request(
            f"$JS.API.STREAM.UPDATE.{here.subjects.ledger_stream}", msgspec.json.encode(elsewhere), 5
        )
        appending = asyncio.create_task(one.append("a"))
        await until(lambda: one.ledger.unclear, what="an unclear answer")
        await here.connection.request(
            f"$JS.API.STREAM.UPDATE.{here.subjects.ledger_stream}", msgspec.json.encode(config), 5
        )
        assert await appending == 2
        assert (await here.folded())[0].digest == one.state.digest


@pytest.mark.slow
async def test_no_disk_is_blamed_while_there_is_no_server(
    mortal_server: MortalServer, unique: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What a scheduler says of an append whose server is gone, for longer than its tries take."""
    async with desk(mortal_server, unique) as here:
        one = await here.leader()
        await one.lead()
        await mortal_server.stop()
        appending = asyncio.create_task(one.append("a"))
        await until(lambda: one.wire.begun > 2, 90, what="it is tried again")
        refusal = stall_problem(one.ledger.appending, time.monotonic())
        await mortal_server.start()
        assert await appending == 2
    said = [record.getMessage() for record in caplog.records if record.name == "moorage.ledger"]
    assert len([line for line in said if "is unclear" in line]) == 1, said
    assert "disk" not in " ".join(said) + refusal.next
    assert NOT_CONNECTED in refusal.message


async def test_a_full_ledger_deposes_no_leader_and_forgets_nothing(
    nats_server: Server, unique: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The leader goes on trying, accepts nothing meanwhile, and no record makes room for another (ledger-rules H6).

    Its log says so once, and not at every try.
    """
    async with desk(nats_server, unique) as here:
        one = await here.leader()
        await one.lead()
        await one.append("a")
        config = (await here.js.stream_info(here.subjects.ledger_stream)).config
        update = f"$JS.API.STREAM.UPDATE.{here.subjects.ledger_stream}"
        await here.connection.request(update, msgspec.json.encode({**config, "max_msgs": 2}), 5)
        appending = asyncio.create_task(one.append("b"))
        await until(lambda: one.wire.sent > 3 or appending.done(), what="it is tried again")
        assert not appending.done()
        assert await here.end() == 2
        await here.connection.request(update, msgspec.json.encode(config), 5)
        assert await appending == 3
        said = [record.getMessage() for record in caplog.records if record.name == "moorage.ledger"]
        assert [re.sub(r"\d+ s$", "some s", words.partition(":")[0]) for words in said] == [
            "append 2 of epoch 1 is unclear (stored or not)", "the ledger is full",
                "the ledger accepts records again; it accepted none for some s",
        ], said  # fmt: skip
        state, _ = await here.folded()
        assert (state.digest, set(state.tenants["acme"].jobs)) == (one.state.digest, {"a", "b"})


async def test_the_advice_is_that_of_a_full_ledger_once_the_stream_has_a_leader_again(
    nats_server: Server, unique: str
) -> None:
    async with desk(nats_server, unique) as here:
        one = await here.leader()
        await one.lead()
        config = (await here.js.stream_info(here.subjects.ledger_stream)).config
        update = f"$JS.API.STREAM.UPDATE.{here.subjects.ledger_stream}"
        await here.connection.request(update, msgspec.json.encode({**config, "max_msgs": 1}), 5)
        appending = asyncio.create_task(one.append("a"))
        await until(lambda: one.wire.sent > 1, what="it is tried again")
        one.ledger.appending.headless = True  # as a read that found no leader of the stream says
        tried = one.wire.sent
        await until(lambda: one.wire.sent > tried + 1, what="it is tried again")
        assert "room" in what_next(one.ledger.appending)
        await here.connection.request(update, msgspec.json.encode(config), 5)
        assert await appending == 2


# -------------------------------------------------------------------------------------------------------------- junk


async def test_junk_is_skipped_counted_and_written_past(nats_server: Server, unique: str) -> None:
    stale = encode_record(Record(FORMAT, 0, 7, 7, 0, 0, acts=[acts.Gone(0, "never")]))
    async with desk(nats_server, unique) as here:
        one = await here.leader()
        await one.lead()
        await one.append("a")
        for junk in (b"", b"junk", b"\x81\xa1a\x01", msgspec.json.encode({"a": 1}), stale, b"\xc1" * 100_000):
            assert isinstance(await here.js.append(here.subjects.ledger_record, junk), Ack)
        await one.append("b")
        assert isinstance(await here.js.append(f"{unique}.ledger.other", b"junk"), Ack)
        await one.append("c")
        assert one.ledger.junk == 7
        state, ledger = await here.folded()
        assert state.digest == one.state.digest
        assert set(state.tenants["acme"].jobs) == {"a", "b", "c"}
        assert ledger.junk == 7  # the record of an epoch before among them


@pytest.mark.parametrize("subject", ["ledger_epoch", "ledger_snapshot"])
async def test_junk_where_the_guard_or_the_naming_record_stands_stops_nobody(
    nats_server: Server, unique: str, subject: str
) -> None:
    async with desk(nats_server, unique) as here:
        one = await here.leader()
        await one.lead()
        await one.append("a")
        assert isinstance(await here.js.append(getattr(here.subjects, subject), b"junk"), Ack)
        await one.append("b")
        other = await here.leader()
        other.state = await recover(other.ledger, here.snapshots)
        await other.lead()
        await other.append("c")
        with pytest.raises(Deposed):
            await one.append("d")
        state, _ = await here.folded()
        assert (state.digest, state.epoch) == (other.state.digest, 2)


@pytest.mark.slow
async def test_junk_that_comes_again_and_again_ends_one_term_and_keeps_nobody_from_work(
    nats_server: Server, unique: str
) -> None:
    """It stands before most records. Only the first of them was folded where it would have been without."""
    async with stack(nats_server, unique) as made, caller(made) as acme, desk(nats_server, unique) as here:
        await made.scheduler(config=QUICK)
        await acme.leader()
        await made.agent("a", "8xH100")
        await acme.workers_up("sim-0000")

        async def litter() -> None:
            while True:
                assert isinstance(await here.js.append(here.subjects.ledger_record, b"junk"), Ack)
                await asyncio.sleep(0.05)

        littering = asyncio.create_task(litter())
        try:
            for number in range(20):
                await acme.submit(f"job-{number}")
            for number in range(20):
                await acme.reaches(f"job-{number}", "SUCCEEDED")
            assert not littering.done()
            state, ledger = await here.folded()
            assert ledger.junk > 20
            assert state.epoch <= 2
        finally:
            littering.cancel()
            await asyncio.gather(littering, return_exceptions=True)


# --------------------------------------------------------------------------------------------------------- snapshots


async def test_a_snapshot_and_the_tail_are_the_whole_ledger(nats_server: Server, unique: str) -> None:
    async with desk(nats_server, unique) as here:
        one = await here.leader()
        await one.lead()
        await one.append(*(f"early-{n}" for n in range(50)))
        first = await follow_and_write(here.url, unique, 1)
        assert first[1] == one.state.seq
        assert (await recover(one.ledger, here.snapshots)).seq == 0, "no record names it: it does not count"
        await one.append("between", snapshot=first)
        await one.append("behind-the-first")
        second = await follow_and_write(here.url, unique, 1)
        await one.append(snapshot=second)
        await one.append("tail")

        other = await here.leader()
        other.state = await recover(other.ledger, here.snapshots)
        assert other.state.seq == second[1]
        assert await other.ledger.follow(other.state) == 2
        validate(other.state)
        whole, _ = await here.folded()
        assert other.state.digest == whole.digest == one.state.digest
        assert other.state.snapshot == second
        assert other.state.snapshot_before == first

        # the last but one: its chunks and the tail behind it give the same
        bad = here.subjects.snapshot(second[0])
        await here.js.append(bad, b"more than was named")
        other.state = await recover(other.ledger, here.snapshots)
        assert other.state.seq == first[1]
        await other.ledger.follow(other.state)
        assert other.state.digest == one.state.digest


async def test_a_snapshot_that_changed_does_not_count(nats_server: Server, unique: str) -> None:
    """Another whole snapshot in the place of the named one is none: the record names it with its digest (H12)."""
    async with desk(nats_server, unique) as here:
        one = await here.leader()
        await one.lead()
        await one.append("a")
        named = await follow_and_write(here.url, unique, 1)
        await one.append("b", snapshot=named)
        subject = here.subjects.snapshot(named[0])
        await here.js.purge(here.subjects.snapshot_stream, subject=subject)
        other = await here.leader()
        other.state.seq = named[1]  # so far as the one that was named, and empty
        assert isinstance(await here.js.append(subject, dump(other.state)), Ack)
        recovered = await recover(one.ledger, here.snapshots)
        assert recovered.seq == 0
        await one.ledger.follow(recovered)
        assert recovered.digest == one.state.digest


async def test_a_chunk_that_nobody_listens_to_yet_is_sent_again(nats_server: Server, unique: str) -> None:
    """A stream that a cluster has just made is not yet known to each of its servers: a restore failed by it."""
    async with desk(nats_server, unique) as here:
        wire = WireJetStream(here.connection)
        writing = asyncio.create_task(Snapshots(wire, here.subjects).write(State()))
        await until(lambda: wire.sent == 1, ANSWER_S, "the first try, while there is no stream")
        assert not writing.done()
        await here.snapshots.ensure()
        name, _, digest = await writing
        assert (await here.snapshots.read(name, digest)).seq == 0


async def test_a_leader_that_was_deposed_removes_no_snapshot_of_its_successor(nats_server: Server, unique: str) -> None:
    """It had read which snapshots there are before its purge, and took the newest one for an old one."""
    async with desk(nats_server, unique) as here:
        await here.snapshots.ensure()
        names = [(await here.snapshots.write(State()))[0] for _ in range(4)]
        await here.snapshots.purge_older(names[2], names[1])

        async def there() -> set[str]:
            info = await here.js.stream_info(here.subjects.snapshot_stream, here.subjects.snapshot_all)
            return {subject.rpartition(".")[2] for subject in info.subjects}

        assert await there() == set(names[1:]), "the first is older, and the last one the successor's"
        await here.js.purge(here.subjects.snapshot_stream, subject=here.subjects.snapshot(names[2]))
        await here.snapshots.purge_older(names[2], names[3])
        assert await there() == {names[1], names[3]}, "nothing goes while the newest that counts is missing"


async def test_a_purge_keeps_the_epoch_and_what_both_snapshots_need(nats_server: Server, unique: str) -> None:
    async with desk(nats_server, unique) as here:
        one = await here.leader()
        await one.lead()
        names = []
        for number in range(3):
            await one.append(f"job-{number}")
            names.append(await follow_and_write(here.url, unique, 1))
            await one.append(snapshot=names[-1])
        await one.append("tail")
        assert one.state.snapshot_before == names[1]
        assert await one.ledger.purge_below(names[1][1] + 1) > 0
        await here.snapshots.purge_older(names[2][0], names[1][0])
        kept = await here.js.stream_info(here.subjects.snapshot_stream, here.subjects.snapshot_all)
        assert {subject.rpartition(".")[2] for subject in kept.subjects} == {names[1][0], names[2][0]}

        assert await here.js.get_last(here.subjects.ledger_stream, here.subjects.ledger_epoch) is not None
        await one.append("after-the-purge")  # so that the guard's number is still right
        await here.js.append(here.subjects.ledger_snapshot, b"junk where the naming record stood")
        await one.append("past-the-junk")
        for damaged in (None, names[2], names[1]):
            if damaged is not None:
                await here.js.purge(here.subjects.snapshot_stream, subject=here.subjects.snapshot(damaged[0]))
            other = await here.leader()
            other.state = await recover(other.ledger, here.snapshots)
            if damaged == names[1]:
                with pytest.raises(LedgerBroken, match="gap"):
                    await other.ledger.follow(other.state)
            else:
                await other.ledger.follow(other.state)
                assert other.state.digest == one.state.digest
        with pytest.raises(LedgerBroken, match="older backup"):
            await Ledger(here.js, here.subjects, 0).follow(ahead(one.state.seq + 10))


async def test_snapshots_that_only_a_newer_release_can_read_are_told_as_such(
    nats_server: Server, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older scheduler said that records were lost, and advised to replace the ledger by the last backup."""
    async with desk(nats_server, unique) as here:
        one = await here.leader()
        await one.lead()
        named = []
        with monkeypatch.context() as newer:
            newer.setattr(state_bytes, "FORMAT_ABOVE_LEVEL", FORMAT_ABOVE_LEVEL + 1)
            for number in range(2):
                await one.append(f"job-{number}")
                named.append(await follow_and_write(here.url, unique, 1))
                await one.append(snapshot=named[-1])
        other = await here.leader()
        other.state = await recover(other.ledger, here.snapshots)
        await other.ledger.follow(other.state)
        assert other.state.digest == one.state.digest, "no record is deleted yet"
        assert await one.ledger.purge_below(named[0][1] + 1) > 0
        other.state = await recover(other.ledger, here.snapshots)
        with pytest.raises(SnapshotsUnread, match=rf"format {FORMAT + 2}, this release reads .*: use a newer release"):
            await other.ledger.follow(other.state)


async def test_no_record_of_a_later_format_is_stepped_over_whatever_its_form(nats_server: Server, unique: str) -> None:
    """It was skipped as junk: an older scheduler led on without all that it held, and ended the newer one's term."""
    async with desk(nats_server, unique) as here:
        one = await here.leader()
        await one.lead()
        await one.append("a")
        later = [FORMAT + 1, one.state.epoch, 5, 9, one.state.time_ms, one.state.digest, {"accepted": ["b"]}]
        other = await here.leader()
        for subject in (here.subjects.ledger_record, here.subjects.ledger_snapshot, here.subjects.ledger_epoch):
            await here.js.append(subject, msgspec.msgpack.encode(later))
            with pytest.raises(LedgerBroken, match=f"has format {FORMAT + 1}.*use a newer release"):
                await other.ledger.follow(other.state)
        with pytest.raises(LedgerBroken, match="use a newer release"):
            await recover(other.ledger, here.snapshots)


class EmptyCopy(JetStream):
    """A cluster's, where the server that answers has not fetched its copy yet."""

    empty = True

    async def stream_info(self, stream: str, subjects_filter: str = "", timeout_s: float = 5.0) -> StreamInfo:
        found = await super().stream_info(stream, subjects_filter, timeout_s)
        return msgspec.structs.replace(found, replicas=3, last_seq=0 if self.empty else found.last_seq)


async def test_a_copy_that_is_not_fetched_yet_is_no_older_backup(
    nats_server: Server, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A standby ended as the disk of one of three servers was replaced."""
    async with desk(nats_server, unique) as here:
        one = await here.leader()
        await one.lead()
        wire = EmptyCopy(here.connection)
        ledger = Ledger(wire, here.subjects, 0)
        with pytest.raises(JetStreamRefused, match="ends at record 0"):
            await ledger.follow(one.state)
        wire.empty = False
        assert await ledger.follow(one.state) == 0
        wire.empty = True
        with pytest.raises(JetStreamRefused):
            await ledger.follow(one.state)
        monkeypatch.setattr(ledger_room, "COPY_LAGS_S", 0.0)
        with pytest.raises(LedgerBroken, match="older backup"):
            await ledger.follow(one.state)


def ahead(seq: int) -> State:
    """A state from a ledger that went further than this one."""
    state = State()
    state.seq = seq
    return state


@contextlib.asynccontextmanager
async def leader_with_snapshots(server: Server, subjects: Subjects) -> AsyncIterator[service.Scheduler]:
    """A scheduler in this process that leads, and has a snapshot written every five records by a real process."""
    follower = Command([sys.executable, "-m", "moorage.scheduler.ledger.snapshots", "--prefix", subjects.prefix], {})
    async with await connect(server.url, "world") as world, await connect(server.ledger_url, "ledger") as ledger:
        scheduler = service.Scheduler(world, ledger, subjects=subjects, snapshot_command=follower, snapshot_records=5)
        running = asyncio.create_task(scheduler.run())
        try:
            await until(lambda: scheduler.leading.is_set() or running.done(), what="the first term")
            yield scheduler
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running


@pytest.mark.slow
async def test_the_leader_has_snapshots_written_named_and_the_ledger_shortened(
    nats_server: Server, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader's own part, in this process for its small numbers; the follower is a real process."""
    monkeypatch.setattr(term, "SNAPSHOT_LOOK_S", 0.05)
    everything = Position(kept_from=1 << 53)  # it has saved that: nothing stays for its sake
    monkeypatch.setattr(FollowerBeside, "position", everything)
    monkeypatch.setenv("MOORAGE_LEDGER_URL", nats_server.ledger_url)
    async with desk(nats_server, unique) as here, stack(nats_server, unique) as made, caller(made) as acme:
        async with leader_with_snapshots(nats_server, here.subjects) as scheduler:
            assert scheduler.term is not None
            state = scheduler.term.engine.state
            seen: set[Any] = set()

            async def three_and_purged() -> bool:
                await acme.submit(f"job-{len(seen)}-{secrets.token_hex(4)}")
                seen.add(state.snapshot)
                info = await here.js.stream_info(here.subjects.ledger_stream, here.subjects.ledger_all)
                return len(seen) > 3 and info.subjects[here.subjects.ledger_record] < info.last_seq - 10

            await until(three_and_purged, 90, "three snapshots and a shortened ledger")

            async def cut_to_the_newest() -> bool:
                kept = await here.js.stream_info(here.subjects.snapshot_stream, here.subjects.snapshot_all)
                named = [each[0] for each in (state.snapshot, state.snapshot_before) if each is not None]
                return {subject.rpartition(".")[2] for subject in kept.subjects} == set(named)

            await until(cut_to_the_newest, 90, "the newest two snapshots alone")
        reader = Ledger(here.js, here.subjects, 0)
        recovered = await recover(reader, here.snapshots)
        await reader.follow(recovered)
        validate(recovered)
        assert recovered.digest == state.digest
        # the newest is damaged: the one before it and the ledger behind that give the same
        assert state.snapshot is not None
        await here.js.purge(here.subjects.snapshot_stream, subject=here.subjects.snapshot(state.snapshot[0]))
        recovered = await recover(reader, here.snapshots)
        assert recovered.seq < state.snapshot[1]
        await reader.follow(recovered)
        assert recovered.digest == state.digest


@pytest.mark.slow
async def test_no_snapshot_is_written_or_removed_while_the_name_of_the_last_one_is_on_its_way(
    nats_server: Server, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record may take long. A second one of the same records was written meanwhile, and removed before its name."""
    monkeypatch.setattr(term, "SNAPSHOT_LOOK_S", 0.05)
    monkeypatch.setenv("MOORAGE_LEDGER_URL", nats_server.ledger_url)
    written: list[SnapshotTaken] = []
    begun = 0

    async def take(command: Command) -> SnapshotTaken | None:
        nonlocal begun
        begun += 1
        taken = await take_snapshot(command)
        if taken is not None:
            written.append(taken)
        return taken

    monkeypatch.setattr(term, "take_snapshot", take)
    async with (
        desk(nats_server, unique) as here,
        stack(nats_server, unique) as made,
        caller(made) as acme,
        leader_with_snapshots(nats_server, here.subjects) as scheduler,
    ):
        assert scheduler.term is not None
        engine = scheduler.term.engine
        offer, held = engine.offer, list[SnapshotTaken]()
        late = 2  # the name of the second one is late: the first one is there to be purged for it

        def hold_back(event: Any) -> None:
            if isinstance(event, SnapshotTaken) and len(written) >= late:
                held.append(event)  # the one behind it, too: named, it would have the first one purged below
            else:
                offer(event)

        monkeypatch.setattr(engine, "offer", hold_back)

        async def submitted_until(holds: Callable[[], bool]) -> bool:
            await acme.submit(f"job-{secrets.token_hex(4)}")
            return holds()

        await until(lambda: submitted_until(lambda: bool(held)), 90, "the second snapshot")
        since_ms, seq = engine.state.time_ms, engine.state.seq
        await until(
            lambda: submitted_until(lambda: engine.state.time_ms > since_ms + 1000 and engine.state.seq > seq + 10),
            90,
            "a second of ledger time, and records for two more",
        )
        assert begun == late
        offer(held[0])
        await until(lambda: submitted_until(lambda: len(written) > late), 90, "the next one")
        assert engine.state.snapshot is not None
        for name, _, digest in filter(None, (engine.state.snapshot, engine.state.snapshot_before)):
            await here.snapshots.read(name, digest)


@pytest.mark.slow
async def test_a_full_ledger_gets_room_by_what_was_acknowledged_while_its_follower_is_behind(
    nats_server: Server, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record that waits for room does not hold up the purge that makes it."""
    monkeypatch.setattr(term, "SNAPSHOT_LOOK_S", 0.05)
    monkeypatch.setenv("MOORAGE_LEDGER_URL", nats_server.ledger_url)
    async with (
        desk(nats_server, unique) as here,
        stack(nats_server, unique) as made,
        caller(made) as acme,
        leader_with_snapshots(nats_server, here.subjects) as scheduler,
    ):
        monkeypatch.setattr(FollowerBeside, "position", Position())  # it has saved nothing
        assert scheduler.term is not None
        state = scheduler.term.engine.state

        async def two_snapshots() -> bool:
            await acme.submit(f"job-{secrets.token_hex(4)}")
            return state.snapshot_before is not None

        await until(two_snapshots, 90, "two snapshots")
        info = await here.js.stream_info(here.subjects.ledger_stream)
        assert info.messages == info.last_seq, "the ledger waits for its follower"
        update = f"$JS.API.STREAM.UPDATE.{here.subjects.ledger_stream}"
        await here.connection.request(update, msgspec.json.encode({**info.config, "max_msgs": info.messages}), 5)
        await until(lambda: scheduler.ledger.appending.told, 60, "a record that finds no room")
        await until(lambda: not scheduler.ledger.appending.told and state.seq > info.last_seq + 2, 60, "room")
        await acme.submit("behind")


# ------------------------------------------------------------------------------------------------------- two schedulers


class WatchedConnection(Connection):
    """Tells `on_send` what leaves, when it leaves."""

    on_send: Callable[[str], None] = staticmethod(lambda subject: None)

    async def send(self, batch: Iterable[Outgoing]) -> int:
        messages = list(batch)
        for subject, _, _ in messages:
            self.on_send(subject)
        return await super().send(messages)


@pytest.mark.slow
async def test_a_read_leaves_only_while_nobody_else_can_lead(
    nats_server: Server, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, to see the leader's clock when an answer leaves. A second before the takeover is due, answers
    wait for another append; that second is for whatever holds this process up between its look and its write."""
    monkeypatch.setattr(connection, "Connection", WatchedConnection)
    config = msgspec.convert(
        QUICK | {"takeover_s": 1.5, "heartbeat_s": 59.0, "renew_s": 60.0, "lease_s": 90.0}, Config
    )  # the reads alone ask for records
    async with (
        await connect(nats_server.url, "world") as world,
        await connect(nats_server.ledger_url, "ledger") as ledger,
        stack(nats_server, unique) as made,
        caller(made) as acme,
    ):
        assert isinstance(world, WatchedConnection)
        scheduler = service.Scheduler(world, ledger, config=config, subjects=made.subjects)
        running = asyncio.create_task(scheduler.run())
        ages_ms: list[int] = []

        def on_send(subject: str) -> None:
            if subject.startswith("_INBOX"):
                assert scheduler.term is not None
                ages_ms.append(term.monotonic_ms() - scheduler.term._sent_ms)

        try:
            await until(lambda: scheduler.leading.is_set() or running.done(), what="the first term")
            await acme.submit("a", gpu={"model": "none such"})
            assert scheduler.term is not None
            world.on_send = on_send
            records = scheduler.term.records

            async def asked_through_some() -> bool:
                assert await acme.state("a") == "QUEUED"
                return scheduler.term is not None and scheduler.term.records > records + 2

            await until(asked_through_some, what="records that reads asked for")
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
        assert len(ages_ms) > 10
        assert max(ages_ms) < config.takeover_s * 1000


@pytest.mark.slow
async def test_who_folds_for_longer_than_a_leader_may_be_silent_lets_it_lead(nats_server: Server, unique: str) -> None:
    """What the leader wrote meanwhile is folded, too: until then it seemed silent, was not deposed, and all was folded
    once more."""
    config, tried = msgspec.convert(QUICK, Config), 0
    async with stack(nats_server, unique) as made, caller(made) as acme, desk(nats_server, unique) as here:
        await made.scheduler(config=QUICK)
        await acme.leader()
        async with await connect(nats_server.url, "standby") as world:
            standby = service.Scheduler(world, here.connection, config=config, subjects=Subjects(unique))
            ledger, follow, slow = standby.ledger, standby.ledger.follow, asyncio.Event()

            async def follow_slowly(state: State, patience_s: float = 5.0) -> int:
                count = await follow(state, patience_s)
                if not slow.is_set():

                    async def is_old() -> bool:
                        return await ledger.silent_for(state) > 1.5 * config.takeover_s

                    await until(is_old, what="what it folded being older than a leader may be silent")
                    slow.set()
                return count

            async def take_over(*_: object) -> None:
                nonlocal tried
                tried += 1

            ledger.follow, ledger.take_over = follow_slowly, take_over  # type: ignore[assignment,method-assign]
            running = asyncio.create_task(standby.run())
            await slow.wait()
            end = await here.end()

            async def follows() -> bool:
                return tried > 0 or standby._folded >= end

            await until(follows, what="the standby following")
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
            assert not tried


@pytest.mark.slow
async def test_a_standby_that_reads_every_other_time_tells_of_one_outage(
    nats_server: Server, unique: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As while a server that was cut off has an old copy: its log had two lines for each time."""
    caplog.set_level("INFO")
    async with stack(nats_server, unique) as made, caller(made) as acme, desk(nats_server, unique) as here:
        await made.scheduler(config=QUICK)
        await acme.leader()
        async with await connect(nats_server.url, "standby") as world:
            config = msgspec.convert(QUICK, Config)
            standby = service.Scheduler(world, here.connection, config=config, subjects=Subjects(unique))
            follow, looks = standby.ledger.follow, 0

            async def follow_at_times(state: State, patience_s: float = 5.0) -> int:
                nonlocal looks
                looks += 1
                if standby.caught_up.is_set() and looks % 2:
                    why = f"the ledger ends at record {looks}"
                    raise JetStreamRefused("the copy that was asked is not up to date", 503, 0, why)
                return await follow(state, patience_s)

            standby.ledger.follow = follow_at_times  # type: ignore[method-assign]
            running = asyncio.create_task(standby.run())
            await until(lambda: looks > 12, what="it looks again and again")
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
    told = [each.message for each in caplog.records if "be read" in each.message]
    assert len(told) == 1, told
    assert told[0].startswith("the ledger cannot be read now: the copy that was asked is not up to date")


@pytest.mark.slow
async def test_junk_in_the_ledger_is_no_sign_of_its_leaders_life(nats_server: Server, unique: str) -> None:
    """A record every tenth of a second that is not of the term: a standby counts its leader's silence all the same."""
    async with stack(nats_server, unique) as made, caller(made) as acme, desk(nats_server, unique) as here:
        first = await made.scheduler(config=QUICK)
        await acme.leader()
        second = await made.scheduler(config=QUICK)
        await until(lambda: "folded" in second.words(), what="the second standing by")
        await first.kill()
        leads = asyncio.create_task(acme.leader(2))
        while not leads.done():
            assert isinstance(await here.js.append(here.subjects.ledger_record, b"junk"), Ack)
            await asyncio.wait([leads], timeout=0.1)
        assert (await leads)["epoch"] in (2, 3)  # the junk may have ended the first of its terms


@pytest.mark.slow
async def test_a_stopped_leader_that_wakes_writes_and_answers_nothing_and_stands_by(
    nats_server: Server, unique: str
) -> None:
    async with stack(nats_server, unique) as made, caller(made) as acme, desk(nats_server, unique) as here:
        old = await made.scheduler(config=QUICK)
        await acme.leader()
        new = await made.scheduler(config=QUICK)
        await until(lambda: "folded" in new.words(), what="a standby")
        async with scripted_worker(acme.nc, made.subjects, "w1", 2) as worker:
            await acme.submit("before")
            await worker.step("before", "claimed", "started")
            old.stop()
            # its socket holds questions that it will find when it wakes: it answers none of them with what it knew
            inbox = acme.nc.new_inbox()
            answers = await acme.nc.subscribe(inbox)
            await acme.leader(2)
            await worker.step("before", "exited", "freed")
            await acme.submit("after", gpu={"model": "none"})
            for verb, body in (("show", {"job": "after"}), ("show", {"job": "before"}), ("ls", {})):
                await acme.nc.publish(made.subjects.api("acme", verb), msgspec.json.encode(body), inbox)
            await acme.nc.flush()
            told = [msgspec.json.decode((await answers.next_msg(ANSWER_S)).data) for _ in range(3)]
            assert [each["kind"] for each in told] == ["answer"] * 3
            old.wake()
            await until(lambda: "no longer leads" in old.words(), what="the old leader deposed")
            await until(lambda: old.words().count("folded") == 2, what="the old leader standing by")
            while answers.pending_msgs:  # what it said after all: never that a job is not there, never an old state
                answer = msgspec.json.decode((await answers.next_msg(1)).data)
                assert answer["kind"] != "error" or answer["code"] != "not-found", answer
                assert answer.get("data", {}).get("job") != "before" or answer["data"]["state"] == "SUCCEEDED", answer
            state, ledger = await here.folded()
            assert (state.epoch, ledger.junk) == (2, 0)
            # and it takes over again when its turn comes
            await new.kill()
            await acme.leader(3)
            assert await acme.state("before") == "SUCCEEDED"
