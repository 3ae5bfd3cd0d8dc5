"""What became of jobs: written beside the loop, out of memory only once acknowledged, read back without gap or double.

The engine and its folding are driven record by record; the writer and the reader run over the simulated JetStream in
virtual time.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from moorage.bus.jetstream import Ack, JetStream
from moorage.bus.transport import Delivery
from moorage.scheduler.answers import views
from moorage.scheduler.answers.history_reader import QUESTIONS_MAX_TENANT, HistoryReader
from moorage.scheduler.core.config import Config
from moorage.scheduler.core.events import Cancel
from moorage.scheduler.core.ledger import acts
from moorage.scheduler.core.ledger.ceilings import CEILINGS
from moorage.scheduler.core.ledger.record import decode_record
from moorage.scheduler.core.ledger.records import SEQUENCES_AHEAD
from moorage.scheduler.follower.beside import FollowerBeside
from moorage.scheduler.follower.follower import Follower, Position, Question
from moorage.scheduler.history import packing
from moorage.scheduler.ledger.ledger import Ledger
from moorage.schemas.answers.fleet import FollowerRow
from moorage.schemas.codec import FRAME_BYTES_MAX, Decoder
from moorage.schemas.errors import Problem, Refused
from moorage.schemas.frames import HistoryFrame, Peaks, Report, ReportKind
from moorage.schemas.ranges import parse_ranges
from moorage.testing.bus.bus import SimulatedBus
from moorage.testing.bus.clock import SimulatedClock
from tests.levels import know_next, raise_level
from tests.scenes import in_virtual_time
from tests.unit.scheduler.driving import SUBJECTS, Driving, wire
from tests.waiting import until

SUBJECT = SUBJECTS.history("t")


class Writing(Driving):
    """A leader with its follower, which reads the records from a simulated JetStream and writes the history there."""

    def __init__(self, config: Config | None = None) -> None:
        self.bus = SimulatedBus()
        self.ledger_js = JetStream(self.bus.connect("ledger"))
        self.link = self.bus.connect("scheduler")
        self.js = JetStream(self.link)
        self.tasks: list[asyncio.Task[None]] = []
        self.answered: dict[str, Any] = {}
        self.questions = 0
        self.stored = 0
        super().__init__(config or Config(ended_max=0))
        self.tasks.append(asyncio.get_running_loop().create_task(self._store()))
        self.follows()

    def follows(self, save_records: int = 1_000_000) -> None:
        """A follower begins, or another one instead."""
        for task in self.tasks[1:]:
            task.cancel()
        del self.tasks[1:]
        self.follower = Follower(self.ledger_js, self.js, SUBJECTS, self.config, 1, save_records)
        self.tasks.append(asyncio.get_running_loop().create_task(self.follower.run()))

    async def _store(self) -> None:
        """The records as they come, in the ledger's stream."""
        await Ledger(self.ledger_js, SUBJECTS, 0).ensure()
        while True:
            while self.stored < len(self.records):
                payload = self.records[self.stored]
                begins = any(isinstance(act, acts.Epoch) for act in decode_record(payload).acts)
                subject = SUBJECTS.ledger_epoch if begins else SUBJECTS.ledger_record
                ack = await self.ledger_js.append(subject, payload)
                assert isinstance(ack, Ack)
                self.stored += 1
                assert ack.seq == self.stored
            await asyncio.sleep(0.01)

    def lead(self) -> None:
        super().lead()
        self.reader = HistoryReader(self.js, SUBJECTS, self.engine, self.where, self._on_answer)

    async def where(self, tenant: str, job: str) -> Any:
        answer = await self.follower.answer(Question("where", self.state.seq, tenant, {"job": job}))
        if isinstance(answer, Problem):
            raise Refused(answer)
        return answer["parts"], answer["seq"]

    async def written(self, seconds: float = 1.0) -> None:
        """The follower has had its time, and what is over has left memory."""
        self.tick()
        self.tick()
        await asyncio.sleep(seconds)

    def _on_answer(self, verb: str, data: Any, reply: str, json: bool) -> None:
        self.answered[reply] = data

    async def asked(self, verb: str, job: str, tenant: str = "t", **arguments: Any) -> Any:
        """What a caller is answered, as plain data; a `Problem` as it is."""
        self.questions += 1
        reply = f"q{self.questions}"
        if verb == "show":
            data = self.reader.show(tenant, job, reply, True)
        else:
            data = self.reader.history(tenant, {"job": job, **arguments}, reply, True)
        if data is None:
            await until(lambda: reply in self.answered, 60, f"an answer to {verb} {job}")
            data = self.answered[reply]
        return data if isinstance(data, Problem) else wire(data)

    async def pages(self, job: str, limit: int = 1000, after: int = 0) -> list[dict[str, Any]]:
        """All of a job's transitions, page by page; nothing is missing and nothing comes twice."""
        changes: list[dict[str, Any]] = []
        while True:
            page = await self.asked("history", job, after_rev=after, limit=limit)
            assert not isinstance(page, Problem), page
            assert page["complete"], page
            assert len(page["changes"]) <= limit
            changes += page["changes"]
            if not page["more"]:
                return changes
            after = changes[-1]["rev"]

    def frames(self) -> list[HistoryFrame]:
        stream = self.bus.streams()[SUBJECTS.history_stream]
        return [_decode(message.data) for message in stream.read(1, SUBJECT)]

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.reader.close()


_decode: Decoder[HistoryFrame] = Decoder(HistoryFrame)


def scene(
    config: Config | None = None,
) -> Callable[[Callable[[Writing], Coroutine[Any, Any, None]]], Callable[[], None]]:
    def wrap(play: Callable[[Writing], Coroutine[Any, Any, None]]) -> Callable[[], None]:
        async def run() -> None:
            drive = Writing(config)
            try:
                await play(drive)
            finally:
                await drive.end()

        def test() -> None:
            SimulatedClock().run(run())

        test.__name__, test.__doc__ = play.__name__, play.__doc__
        return test

    return wrap


def refused_often(drive: Writing, job: str, times: int) -> None:
    """The worker refuses the job again and again: two transitions each."""
    for _ in range(times):
        while drive.states(job) != ["PLACED"]:
            drive.now += 10_000
            drive.renew()
        drive.report("refused", job, detail="no")


def told(drive: Writing, job: str) -> list[dict[str, Any]]:
    """What was said of a job in events."""
    return [change for event in drive.events if event["job"] == job for change in event["changes"]]


# -------------------------------------------------------------------------------------------------------- writing


@scene()
async def test_a_job_leaves_memory_by_the_leaders_own_rule_and_is_told_as_before(drive: Writing) -> None:
    drive.worker("w0", 2)
    for name in ("a", "b"):
        drive.submit(name, gpu={})
    drive.settle()
    drive.run_out("w0", 3)
    drive.cancel("c", sequence=2)
    drive.offer_submit("c", sequence=1)
    for _ in range(4):
        drive.tick()
    assert not drive.state.jobs, "nobody has written anything yet"
    before = {name: msgspec.json.encode(told(drive, name)) for name in ("a", "b", "c")}
    for name, changes in before.items():
        assert msgspec.json.encode(await drive.pages(name)) == changes
        assert msgspec.json.encode(await drive.pages(name, limit=1)) == changes
    histories = [history for frame in drive.frames() for history in frame.jobs]
    assert sorted(history.job for history in histories) == ["a", "b", "c"]
    assert all(history.over for history in histories)
    assert drive.frames()[-1].ledger == len(drive.records)


@scene()
async def test_show_of_a_job_long_over_is_whole(drive: Writing) -> None:
    drive.worker("w0", 2)
    drive.submit("a", gpu={}, priority=7, run={"driver": "noop", "argv": ["x", "y"]})
    drive.settle()
    drive.run_out("w0", 3)
    shown = await drive.asked("show", "a")
    await drive.written()
    later = await drive.asked("show", "a")
    assert later["compacted"]
    for field in ("job", "tenant", "state", "rev", "gpu", "priority", "attempt", "worker", "code", "why", "request"):
        assert later[field] == shown[field], field
    assert later["changes"] == shown["changes"]
    assert (later["state"], later["code"], later["worker"]) == ("FAILED", 3, "w0")
    assert later["ended_ms"] == shown["changes"][-1]["time_ms"]
    assert later["kept_until_ms"] > later["ended_ms"] // 1000


@scene()
async def test_what_its_attempts_had_at_most_is_shown_of_a_job_long_over(drive: Writing) -> None:
    with pytest.MonkeyPatch.context() as patch:
        know_next(patch)
        raise_level(drive)
        await _with_peaks(drive)


async def _with_peaks(drive: Writing) -> None:
    worker = drive.worker("w0", 4, auto=False)
    for job, (replicas, code) in (("a", (1, 0)), ("b", (1, 3)), ("c", (3, 0)), ("d", (3, 3))):
        drive.submit(job, gpu={}, replicas=replicas, max_failed=None)
        kinds: list[ReportKind] = ["claimed", "started", "exited"]
        for kind in kinds:
            drive.reports([(kind, job, replica, code, "") for replica in range(replicas)])
        for attempt in drive.job(job).attempts:
            worker.gathered.append(
                Report(
                    "freed", *attempt.name, peaks=Peaks(memory_mib=100 + attempt.replica.index), reported={"loss": 0.5}
                )
            )
        drive.report_all()
        shown = await drive.asked("show", job)
        await drive.written()
        later = await drive.asked("show", job)
        assert later["compacted"]
        assert later["peaks"] == {"memory_mib": 99 + replicas}
        assert later["reported"] == {"loss": 0.5}
        for field in ("peaks", "reported", "started_ms", "ended_ms", "state", "replicas"):
            assert later.get(field) == shown.get(field), field


@scene()
async def test_why_some_replicas_were_cancelled_is_not_why_the_job_failed(drive: Writing) -> None:
    drive.worker("w0", 2, auto=False)
    drive.submit("sweep", gpu={}, replicas=4)
    drive.engine.offer(Cancel("t", "sweep", "not needed", replicas=parse_ranges("1-3"), by="tenant:t"))
    drive.tick()
    assert views.summary(drive.engine, drive.job("sweep")).why == "", "the rest of it goes on"
    for kind in ("claimed", "started", "exited", "freed"):
        drive.reports([(kind, "sweep", 0, 3, "")])
    drive.reports([("withdrawn", "sweep", 1, 0, "")])
    shown = await drive.asked("show", "sweep")
    await drive.written()
    later = await drive.asked("show", "sweep")
    assert later["compacted"]
    for answer in (shown, later):
        assert (answer["state"], answer["code"], answer["why"]) == ("FAILED", 3, "")


@scene()
async def test_who_cancelled_all_that_was_left_said_why_it_is_cancelled(drive: Writing) -> None:
    drive.worker("w0", 1)
    drive.submit("sweep", gpu={}, replicas=2)
    drive.run_out("w0", 0)
    drive.engine.offer(Cancel("t", "sweep", "not needed", replicas=parse_ranges("1"), by="tenant:t"))
    drive.settle()
    shown = await drive.asked("show", "sweep")
    await drive.written()
    later = await drive.asked("show", "sweep")
    assert later["compacted"]
    for answer in (shown, later):
        assert (answer["state"], answer["why"]) == ("CANCELLED", "not needed")


@pytest.mark.parametrize("save_records", [1, 7, 1_000_000])
@in_virtual_time
async def test_a_follower_that_begins_again_writes_nothing_twice_and_leaves_nothing_out(save_records: int) -> None:
    drive = Writing()
    drive.worker("w0", 1, auto=False)
    drive.submit("long", gpu={})
    for number in range(12):
        refused_often(drive, "long", 9)
        drive.submit(f"j{number}", gpu={"count": 8})
        drive.cancel(f"j{number}")
        drive.tick()
        await asyncio.sleep(number % 4 * 0.1)
        drive.follows(save_records)
        if number % 5 == 4:
            drive.lead()
            drive.renew()
    drive.cancel("long")
    await drive.written()
    for name in ("long", *[f"j{number}" for number in range(12)]):
        assert await drive.pages(name) == told(drive, name)
    histories = [history for frame in drive.frames() for history in frame.jobs]
    rows = Counter((history.job, move.rev) for history in histories for move in history.moves)
    assert max(rows.values()) == 1
    assert len(rows) == sum(change["rev"] > 1 for event in drive.events for change in event["changes"])
    await drive.end()


@scene()
async def test_of_two_followers_one_writes(drive: Writing) -> None:
    """As after a takeover, while the leader before and its follower only were asleep."""
    other = Follower(drive.ledger_js, drive.js, SUBJECTS, drive.config, 1, 5)
    drive.tasks.append(asyncio.get_running_loop().create_task(other.run()))
    for number in range(40):
        drive.submit(f"j{number}")
        drive.cancel(f"j{number}")
        drive.tick()
        await asyncio.sleep(0.1)
    await drive.written(100)
    rows = Counter(history.job for frame in drive.frames() for history in frame.jobs)
    assert rows == Counter({f"j{number}": 1 for number in range(40)})
    for follower in (drive.follower, other):
        drive.follower = follower
        assert len(await drive.pages("j7")) == 2


@scene(Config(ended_max=10))
async def test_a_stream_that_takes_nothing_stops_nobody_and_what_is_not_written_waits(drive: Writing) -> None:
    drive.checks = False
    await drive.written()
    drive.link.lose()
    for first in range(0, 2_000, 200):
        for offer in (drive.offer_submit, drive.offer_cancel):
            for number in range(first, first + 200):
                offer(f"j{number}")
            drive.tick()
        await asyncio.sleep(1)
    for _ in range(10):
        drive.tick()
    assert len(drive.state.ended) == 10
    drive.submit("last")
    drive.cancel("last")
    drive.tick()
    answer = await drive.asked("history", "j0")
    assert (answer.code, answer.retry_after_s > 0) == ("behind", True)
    assert (await drive.asked("show", "j0"))["state"] == "CANCELLED"
    drive.link.restore()
    await drive.written(60)
    for name in ("j0", "j1234", "j1999", "last"):
        assert [change["state"] for change in await drive.pages(name)] == ["ACCEPTED", "CANCELLED"]
    assert drive.follower.position.waiting == 0


@scene()
async def test_a_follower_that_cannot_begin_or_go_on_says_why_until_it_can(drive: Writing) -> None:
    """Its leader tells the doctor, which said that history is written, while the log warned and questions failed."""

    async def set_to(discard: str) -> None:
        changed = {"name": SUBJECTS.follower_stream, "discard": discard}
        await drive.ledger_js.ensure_stream(changed, frozenset({"discard"}))

    def follower_of_fleet() -> FollowerRow:
        beside = FollowerBeside(None, lambda: drive.follower)
        beside._here = drive.follower
        return beside.figures(drive.state.seq)

    await drive.written()
    assert not follower_of_fleet().trouble
    await set_to("old")
    drive.follows()
    await drive.written()
    told = follower_of_fleet()
    assert told.trouble.startswith(f"stream {SUBJECTS.follower_stream} exists with other settings: discard is 'old'")
    assert told.next == "change the stream yourself, or give moorage another prefix"
    await set_to("new")
    await drive.written(60)
    assert not follower_of_fleet().trouble

    drive.link.lose()  # the history's: what waits to be written cannot be
    drive.submit("j")
    drive.cancel("j")
    await drive.written(20)
    assert follower_of_fleet().trouble
    drive.link.restore()
    await drive.written(60)
    assert not follower_of_fleet().trouble

    drive.link.lose()
    drive.follows()
    await drive.written(20)
    assert follower_of_fleet().trouble, "also while it is tried again, before that is given up"
    drive.link.restore()
    await drive.written(60)
    assert not follower_of_fleet().trouble


@scene()
async def test_a_stream_that_was_deleted_is_made_again(drive: Writing) -> None:
    await asyncio.sleep(1)
    await drive.js.delete_stream(SUBJECTS.history_stream)
    drive.submit("a")
    drive.cancel("a")
    await drive.written(10)
    assert [change["rev"] for change in await drive.pages("a")] == [1, 2]


@scene()
async def test_at_most_four_frames_a_second_a_tenant(drive: Writing) -> None:
    for number in range(100):
        for tenant in ("t", "u"):
            drive.submit(f"j{number}", tenant=tenant)
            drive.cancel(f"j{number}", tenant=tenant)
        await asyncio.sleep(0.02)
    await drive.written()
    for tenant in ("t", "u"):
        stream = drive.bus.streams()[SUBJECTS.history_stream]
        frames = [_decode(message.data) for message in stream.read(1, SUBJECTS.history(tenant))]
        assert len(frames) <= 9
        assert sum(len(frame.jobs) for frame in frames) == 100


@scene(Config(ended_max=50_000))
async def test_histories_that_are_packed_together_are_each_written_once_and_whole(drive: Writing) -> None:
    """Of hundreds of plain runs, with others among them, in frames that have no room for all."""
    drive.checks = False
    drive.worker("w0", 8)
    names = [f"j{number}" for number in range(304)]
    for at in range(0, 304, 8):
        for name in names[at : at + 8]:
            drive.submit(name, gpu={}, labels={"a": "x" * 40})
        if at % 24 == 0:
            drive.submit(f"more{at}", gpu={})  # no room: it never runs
            drive.cancel(f"more{at}")
            names.append(f"more{at}")
        drive.settle()
        drive.run_out("w0", at % 3)
    before = {name: told(drive, name) for name in names}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "PACKED_BYTES_MAX", 12_000)
        await drive.written(60)
    frames = drive.frames()
    assert len(frames) > 3
    stream = drive.bus.streams()[SUBJECTS.history_stream]
    assert all(len(message.data) < 13_000 for message in stream.read(1))
    kept = [each.job for frame in frames for each in frame.jobs]
    assert sorted(kept) == sorted(names)
    for name in names:
        assert [change["rev"] for change in await drive.pages(name)] == [change["rev"] for change in before[name]]


# ----------------------------------------------------------------------------------------------------- long histories


@scene()
async def test_a_long_history_is_kept_in_parts_and_read_without_gap_or_double(drive: Writing) -> None:
    drive.worker("w0", 1, auto=False)
    drive.submit("a", gpu={})
    for _ in range(20):
        refused_often(drive, "a", 15)
        await drive.written()
        assert len(drive.job("a").history) <= CEILINGS.history + CEILINGS.history_each
    job = drive.job("a")
    assert len((await drive.where("t", "a"))[0]) >= 4
    expected = told(drive, "a")
    assert [change["rev"] for change in expected] == list(range(1, job.rev + 1))
    for limit in (1000, 64, 7):
        assert await drive.pages("a", limit) == expected
    assert await drive.pages("a", after=job.rev - 3) == expected[-3:]

    drive.lead_from_snapshot()
    drive.renew()
    assert await drive.pages("a") == told(drive, "a")
    refused_often(drive, "a", 15)
    drive.cancel("a")
    assert drive.states("a") == ["CANCELLED"]
    await drive.written()
    assert not drive.state.jobs
    for limit in (1000, 64):
        assert await drive.pages("a", limit) == told(drive, "a")
    shown = await drive.asked("show", "a")
    assert shown["changes"] == told(drive, "a")[-len(shown["changes"]) :]


@scene()
async def test_a_long_history_that_cannot_be_written_yet_is_bounded_in_memory_and_whole_later(drive: Writing) -> None:
    await drive.written()
    drive.link.lose()
    drive.worker("w0", 1, auto=False)
    drive.submit("a", gpu={})
    refused_often(drive, "a", 400)
    assert len(drive.job("a").history) <= CEILINGS.history + CEILINGS.history_each
    assert (await drive.asked("history", "a")).code == "behind"
    drive.link.restore()
    await drive.written(60)
    assert await drive.pages("a") == told(drive, "a")


@scene()
async def test_parts_that_are_kept_no_longer_leave_the_rest(drive: Writing) -> None:
    drive.worker("w0", 1, auto=False)
    drive.submit("a", gpu={})
    for _ in range(10):
        refused_often(drive, "a", 15)
        await drive.written()
    first = (await drive.where("t", "a"))[0][0]
    await drive.js.purge(SUBJECTS.history_stream, below_seq=first[0] + 1)
    page = await drive.asked("history", "a")
    assert not page["complete"]
    assert [change["rev"] for change in page["changes"]] == [1, *range(first[2] + 1, drive.job("a").rev + 1)]


@pytest.mark.slow
@scene()
async def test_a_gang_of_1024_has_no_gap_in_its_revisions(drive: Writing) -> None:
    drive.checks = False
    for number in range(16):
        drive.worker(f"w{number}", 64)
    drive.submit("g", gpu={"scheduling": "gang"}, replicas=1024)
    for _ in range(6):
        drive.report_all()
    job = drive.job("g")
    for number in range(16):
        drive.run_out(f"w{number}")
    drive.settle()
    assert job.rev == 1 + 5 * 1024
    assert sorted(change["rev"] for change in told(drive, "g")) == list(range(1, job.rev + 1)), "no event was cut"
    for _ in range(10):
        await drive.written()
    assert not drive.state.jobs
    stream = drive.bus.streams()[SUBJECTS.history_stream]
    assert all(len(message.data) <= FRAME_BYTES_MAX for message in stream.read(1))
    assert await drive.pages("g") == told(drive, "g")


# ---------------------------------------------------------------------------------------------------------- asking


@scene()
async def test_a_job_is_told_to_its_own_tenant_alone(drive: Writing) -> None:
    for tenant in ("t", "u"):
        drive.submit("a", tenant=tenant)
        drive.cancel("a", tenant=tenant)
    drive.submit("mine")
    drive.cancel("mine")
    await drive.written()
    for verb in ("history", "show"):
        assert (await drive.asked(verb, "mine", tenant="u")).code == "not-found"
    for tenant in ("t", "u"):
        page = await drive.asked("history", "a", tenant=tenant)
        assert {change["by"] for change in page["changes"]} == {f"tenant:{tenant}"}


@scene()
async def test_a_row_that_names_another_tenants_frame_is_told_nothing(drive: Writing) -> None:
    """The sequence in a row is all that leads to a frame: what stands there must be the tenant's own."""
    drive.submit("a")
    drive.cancel("a")
    drive.submit("a", tenant="u")
    drive.cancel("a", tenant="u")
    await drive.written()
    assert not drive.state.jobs
    places = {tenant: await drive.where(tenant, "a") for tenant in ("t", "u")}

    async def where(tenant: str, job: str) -> Any:
        return places["u" if tenant == "t" else "t"]

    drive.reader = HistoryReader(drive.js, SUBJECTS, drive.engine, where, drive._on_answer)
    for tenant in ("t", "u"):
        assert (await drive.asked("history", "a", tenant=tenant)).code == "history-gone"


@scene()
async def test_what_is_kept_no_longer_is_said(drive: Writing) -> None:
    drive.submit("a")
    drive.cancel("a")
    await drive.written()
    await drive.js.purge(SUBJECTS.history_stream)
    answer = await drive.asked("history", "a")
    assert (answer.code, answer.fault) == ("history-gone", "fleet")
    shown = await drive.asked("show", "a")
    assert (shown["state"], shown["compacted"], "changes" in shown) == ("CANCELLED", True, False)


@scene()
async def test_an_older_job_of_the_name_is_not_told_for_the_newer(drive: Writing) -> None:
    drive.submit("a")
    drive.cancel("a")
    await drive.written()
    drive.tick(25 * 3600 * 1000)
    drive.submit("a", replicas=2)
    drive.cancel("a")
    assert [change["rev"] for change in await drive.pages("a")] == [1, 2, 3]
    await drive.written()
    assert [change["rev"] for change in await drive.pages("a")] == [1, 2, 3]


@scene()
async def test_questions_are_bounded_and_who_is_too_many_is_told_to_ask_again(drive: Writing) -> None:
    drive.submit("a")
    drive.cancel("a")
    await drive.written()
    answers = [drive.reader.history("t", {"job": "a"}, f"r{n}", True) for n in range(QUESTIONS_MAX_TENANT + 5)]
    assert drive.reader.later("show", asyncio.Event().wait, "r", True, "u", "a") is None, "another tenant has room"
    refused = [answer for answer in answers if answer is not None]
    assert [(answer.code, answer.retry_after_s > 0) for answer in refused] == [("overloaded", True)] * 5
    await asyncio.sleep(1)
    assert sum(f"r{n}" in drive.answered for n in range(QUESTIONS_MAX_TENANT)) == QUESTIONS_MAX_TENANT


@scene()
async def test_a_stream_that_cannot_be_read_now_is_busy_and_show_has_the_row(drive: Writing) -> None:
    drive.submit("a")
    drive.cancel("a")
    await drive.written()
    drive.link.lose()
    assert (await drive.asked("history", "a")).code == "overloaded"
    assert (await drive.asked("show", "a"))["state"] == "CANCELLED"
    drive.link.restore()
    assert len(await drive.pages("a")) == 2


async def refusing(drive: Writing, code: int, words: str) -> HistoryReader:
    """A reader for whom JetStream refuses each read with this error; the direct get has no listener."""

    async def refuse(delivery: Delivery) -> None:
        error = {"code": 503, "err_code": code, "description": words}
        await drive.link.send([(delivery.reply, msgspec.json.encode({"error": error}), "")])

    tasks: set[asyncio.Task[None]] = set()

    def heard(delivery: Delivery) -> None:
        tasks.add(asyncio.get_running_loop().create_task(refuse(delivery)))

    await drive.link.subscribe(f"refused.STREAM.MSG.GET.{SUBJECTS.history_stream}", heard)
    return HistoryReader(JetStream(drive.link, "refused"), SUBJECTS, drive.engine, drive.where, drive._on_answer)


@pytest.mark.parametrize(
    ("code", "words", "told"),
    [(10008, "JetStream system temporarily unavailable", "overloaded"), (10059, "stream not found", "history-gone")],
)
@in_virtual_time
async def test_a_stream_without_a_leader_is_busy_and_one_that_is_not_there_is_gone(
    code: int, words: str, told: str
) -> None:
    drive = Writing()
    drive.submit("a")
    drive.cancel("a")
    await drive.written()
    reader = drive.reader = await refusing(drive, code, words)
    try:
        assert (await drive.asked("history", "a")).code == told
    finally:
        await drive.end()
        await reader.close()


def test_how_far_a_follower_is_behind_counts_no_sequence_that_a_restore_skips() -> None:
    beside = FollowerBeside(None, lambda: pytest.fail("it is not run"))
    restored = SEQUENCES_AHEAD + 5000
    assert (beside.figures(restored).behind, beside.figures(restored + 10).behind) == (0, 10), "it has not told yet"
    beside._position = Position(seq=4990)
    assert beside.figures(restored).behind == 10
