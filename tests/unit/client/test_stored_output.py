"""Output as it comes joined to what is kept: whatever is lost, doubled or late, every byte is given once."""

from __future__ import annotations

import asyncio
import codecs
import io
import random
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from moorage.cli.jobs import run
from moorage.cli.jobs.progress import Progress
from moorage.cli.jobs.run import print_missing
from moorage.client import AsyncClient
from moorage.client import output as capturing
from moorage.client.errors import JobFailed, NoOutput, Overloaded
from moorage.client.follow.follower import Budget, Histories
from moorage.client.follow.watch import AsyncWatch
from moorage.client.output import REPLICAS_AHEAD, SPARE_BYTES, Captured, Joiner, Piece
from moorage.schemas.errors import problem
from moorage.schemas.frames import Change, Event, LogPage, LogsAsked, ReadLog
from moorage.testing import Ran, SimFleet, SimulatedClock, Task
from moorage.worker.attempt.output_pages import page_of
from tests.scenes import in_virtual_time
from tests.waiting import until

ALPHABET = [b"line\n", "né€🚢".encode(), b"\xff\xfe", b"\0" * 9, b"x" * 50, b"\xe2\x82"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Keeping:
    """What answers the verb `logs`: the worker's own paging over bytes in memory, as far as they are written."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.written = 0
        self.is_over = False
        self.asked = 0
        self.cap: int | None = None  # where the worker stops keeping
        self.ring = False  # it keeps the beginning and the end
        self.behind = 0  # questions for what is behind that
        self.refusals: list[Exception] = []

    async def read(self, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        if arguments["stream"] == "order":
            plain: dict[str, Any] = msgspec.to_builtins(LogPage(1, "order"))
            return plain
        self.asked += 1
        if self.refusals:
            raise self.refusals.pop()
        asked = msgspec.convert(arguments, LogsAsked)
        ask = ReadLog(
            "s", "acme", asked.job, asked.replica, 1, 7, "process", asked.stream, asked.offset, min(asked.limit, 64)
        )
        if self.ring and self.cap is not None and self.written > self.cap and asked.stream == "out":
            return msgspec.json.decode(msgspec.json.encode(self._of_ring(ask, self.cap)))  # type: ignore[no-any-return]
        self.behind += asked.stream == "out" and self.cap is not None and self.written > self.cap <= asked.offset
        kept = self.data[: self.written] if self.cap is None else self.data[: min(self.cap, self.written)]
        cut = len(kept) < self.written
        page = page_of(kept, ask, self.is_over or cut) if asked.stream == "out" else LogPage(1, "err")
        page = msgspec.structs.replace(page, truncated=cut)
        built: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(page))
        return built

    def _of_ring(self, ask: ReadLog, cap: int) -> LogPage:
        """The beginning and the end are kept."""
        head = cap // 4
        low = self.written - (cap - head)
        if ask.offset < head:
            page = page_of(self.data[:head], ask, False)
        else:
            ask = msgspec.structs.replace(ask, offset=max(ask.offset, low))
            page = page_of(self.data[: self.written], ask, self.is_over)
        return msgspec.structs.replace(page, size=self.written, truncated=True, cut_from=head, cut_to=low)


def joiner_on(source: Keeping, tail: int | None = None) -> Joiner:
    return Joiner(source.read, "j", tail)


def pieces_of(data: bytes, chance: random.Random) -> list[Piece]:
    """As a worker says them: cut anywhere, but text never inside a character."""
    decoder, pieces, at = codecs.getincrementaldecoder("utf-8")("replace"), [], 0
    begin = 0
    while at < len(data):
        size = chance.randint(1, 40)
        part = data[at : at + size]
        at += len(part)
        text = decoder.decode(part)
        behind = at - len(decoder.getstate()[0])
        exact = data[begin:behind]
        pieces.append(Piece(0, 1, "out", begin, text, next=behind, data=exact if text.encode() != exact else None))
        begin = behind
    rest = decoder.decode(b"", final=True)
    pieces.append(Piece(0, 1, "out", begin, rest, True, len(data), data[begin:] if begin < len(data) else None))
    return pieces


def raw(piece: Piece) -> bytes:
    return piece.text.encode() if piece.data is None else piece.data


async def test_a_character_that_a_page_has_cut_is_given_whole_by_the_piece_behind_it() -> None:
    """A page that is no text ends anywhere; the next piece of text begins with the character that it has cut."""
    data = b"\xff\xc3\xa4b"
    source = Keeping(data)
    source.written = 2
    joiner = joiner_on(source)
    got = [piece async for piece in joiner.kept(0, 1)]
    source.written = len(data)
    got += [piece async for piece in joiner.joined(Piece(0, 1, "out", 1, "\xe4b", next=4))]
    assert b"".join(map(raw, got)) == data


@pytest.mark.parametrize("seed", range(150))
def test_every_byte_is_given_once_whatever_is_lost_doubled_or_late(seed: int) -> None:
    chance = random.Random(seed)
    data = b"".join(chance.choice(ALPHABET) for _ in range(chance.randint(0, 40)))

    async def scenario() -> bytes:
        source = Keeping(data)
        joiner = joiner_on(source)
        got = b""

        def take(piece: Piece) -> None:
            nonlocal got
            assert piece.offset == len(got)
            got += raw(piece)
            assert piece.behind == len(got)

        pieces = pieces_of(data, chance)
        began = chance.randint(0, len(pieces))
        for at, piece in enumerate(pieces):
            source.written = piece.behind
            if at == began:
                async for each in joiner.kept(0, 1):
                    take(each)
            if at < began or chance.random() < 0.3:
                continue
            for again in [piece] * chance.choice([1, 1, 2]):
                async for each in joiner.joined(again):
                    take(each)
            if chance.random() < 0.1:
                async for each in joiner.joined(chance.choice(pieces[: at + 1])):
                    take(each)
        source.written, source.is_over = len(data), True
        async for each in joiner.kept(0, 1):
            take(each)
        assert joiner.lost == 0
        assert joiner.trouble is None
        assert joiner.is_over(0, 1, "out")
        return got

    assert asyncio.run(scenario()) == data


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_behind_what_a_worker_keeps_every_byte_is_given_or_counted_once(
    seed: int, ring: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    chance = random.Random(seed)
    data = b"".join(chance.choice(ALPHABET) for _ in range(chance.randint(1, 40)))

    async def scenario() -> None:
        source = Keeping(data)
        source.cap = chance.randint(0, len(data)) if seed % 3 else 0
        source.ring = ring and source.cap > 0
        joiner, captured, shown = joiner_on(source), Captured(Budget()), Progress("j", whole=True)
        given = 0
        pieces = pieces_of(data, chance)
        for piece in pieces:
            source.written = piece.behind
            if chance.random() < 0.5 and piece is not pieces[-1]:
                continue
            async for each in joiner.joined(piece):
                captured.take(each)
                shown.output(msgspec.structs.replace(each, text="", data=None, next=each.behind))
                given += each.behind - each.offset
        source.is_over = True
        async for each in joiner.kept(0, 1):
            captured.take(each)
            if source.ring:
                shown.output(msgspec.structs.replace(each, text="", data=None, next=each.behind))
                given += each.behind - each.offset
        assert given + captured.lost_bytes == len(data)
        assert joiner.lost == captured.lost_bytes
        written = capsys.readouterr()
        told = [int(line.split()[1]) for line in written.err.splitlines() if "did not arrive here" in line]
        told += [int(line.split()[1]) for line in written.out.splitlines() if "are dropped here" in line]
        assert sum(told) == captured.lost_bytes
        assert source.behind <= 1, "what is cut off is asked for once"

    asyncio.run(scenario())


def test_what_is_let_go_of_a_long_output_is_counted_as_it_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capturing, "STREAM_BYTES_MAX", 10)
    captured = Captured(Budget())
    for at in range(0, 40, 4):
        captured.take(Piece(0, 1, "out", at, "�" * 4, next=at + 4, data=b"\xff" * 4))
    assert (len(captured.text("out")), captured.lost_bytes) == (8, 32)


async def test_what_nobody_keeps_is_counted_and_the_rest_is_given() -> None:
    source = Keeping(b"0123456789")
    source.refusals = [NoOutput(problem("not-kept", "cleared"))]
    joiner = joiner_on(source)
    got = [each async for each in joiner.joined(Piece(0, 1, "out", 4, "4567", next=8))]
    assert [(each.offset, each.text) for each in got] == [(4, "4567")]
    assert joiner.lost == 4
    assert joiner.trouble is not None
    assert joiner.trouble.code == "not-kept"


async def test_what_an_attempt_lacks_is_no_news_once_a_later_one_is_heard() -> None:
    """An attempt that was placed on a worker just killed never ran: nobody misses what it said."""
    source = Keeping(b"0123")
    joiner = joiner_on(source)
    source.refusals = [NoOutput(problem("worker-lost", "gone")) for _ in range(4)]
    for replica in (0, 1):
        assert [each async for each in joiner.kept(replica, 1)] == []
    assert [each.offset async for each in joiner.joined(Piece(0, 2, "out", 0, "0123", True, 4))] == [0]
    assert joiner.trouble is not None, "of replica 1 nothing was heard since"
    source.written, source.is_over = 4, True
    _ = [each async for each in joiner.joined(Piece(1, 2, "out", 0, "0123", True, 4))]
    assert joiner.trouble is None
    source.refusals = [NoOutput(problem("worker-lost", "gone again"))]
    _ = [each async for each in joiner.joined(Piece(1, 3, "out", 2, "23", True, 4))]
    assert joiner.trouble is not None
    assert joiner.trouble.problem.message == "gone again"


async def test_run_warns_of_output_that_is_missing_and_logs_calls_it_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = Keeping(b"")
    watch = AsyncWatch(Histories(AsyncClient()._wire), "j")
    watch.joiner = joiner_on(source)
    source.refusals = [NoOutput(problem("not-kept", "the driver naps keeps no output")) for _ in range(2)]
    _ = [each async for each in watch.joiner.kept(0, 1)]
    print_missing(watch, asked_for=False)
    assert capsys.readouterr().err == "warning[not-kept]: the driver naps keeps no output\n"
    print_missing(watch, asked_for=True)
    assert capsys.readouterr().err.startswith("error[not-kept]: the driver naps keeps no output\n")


def test_it_waits_its_turn_where_too_much_is_asked() -> None:
    async def scenario() -> None:
        source = Keeping(b"hello")
        source.written, source.is_over = 5, True
        source.refusals = [Overloaded(problem("overloaded", "busy", retry_after_s=2.5)) for _ in range(3)]
        joiner = joiner_on(source)
        assert [each.text async for each in joiner.kept(0, 1)] == ["hello"]
        assert joiner.trouble is None

    clock = SimulatedClock()
    clock.run(scenario())
    assert clock.now_s == 5.0, "as long as the worker said, each time: one of the two streams was refused twice"


async def test_a_tail_is_the_last_lines_of_what_was_said_before() -> None:
    source = Keeping(b"one\ntwo\nthree\nfour\nfive\n")
    source.written = 19
    joiner = joiner_on(source, tail=2)
    assert [each.text async for each in joiner.kept(0, 1)] == ["three\nfour\n"]
    source.written = 24
    assert [each.text async for each in joiner.joined(Piece(0, 1, "out", 19, "five\n", next=24))] == ["five\n"]


@pytest.mark.parametrize("ends", [b"", b"\n"])
@pytest.mark.parametrize("said", ["short", "a line that is longer than the pages are, €" * 4, "50%\r60%\udcff", ""])
def test_a_tail_has_as_many_lines_as_asked_for_whatever_their_length(
    said: str, ends: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of long lines, and of many, the first guess holds too few; a bar that is drawn again and again is one."""
    monkeypatch.setattr("moorage.client.output.LOG_PAGE_BYTES_MAX", 64)
    line = said.encode(errors="surrogateescape")
    lines = [b"%d %b" % (at, line) for at in range(40)]
    data = b"\n".join(lines) + ends

    async def tail(count: int) -> bytes:
        source = Keeping(data)
        source.written, source.is_over = len(data), True
        return b"".join([raw(each) async for each in joiner_on(source, tail=count).kept(0, 1)])

    for count in (0, 1, 2, 7, 39, 40, 41, 1000):
        whole = b"\n".join(lines[-count:]) + ends if count else b""
        assert asyncio.run(tail(count)) == whole


class Both:
    """What a worker keeps of an attempt that wrote to both streams, with the order in which that arrived."""

    def __init__(self, parts: list[tuple[str, bytes]], told: int) -> None:
        self.data = {"out": b"", "err": b"", "order": b""}
        runs: list[int] = [0]
        for stream, data in parts:
            if len(runs) % 2 != (stream == "out"):
                runs.append(0)
            self.data[stream] += data
            runs[-1] += len(data)
        self.data["order"] = b"".join(run.to_bytes(4, "little") for run in runs[:told])

    async def read(self, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        asked = msgspec.convert(arguments, LogsAsked)
        ask = ReadLog("s", "acme", "j", 0, 1, 7, "process", asked.stream, asked.offset, min(asked.limit, 37))
        built: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(page_of(self.data[asked.stream], ask, True)))
        return built


@pytest.mark.parametrize("seed", range(60))
def test_both_streams_come_in_the_order_in_which_they_arrived(seed: int) -> None:
    chance = random.Random(seed)
    parts = [(chance.choice(["out", "err"]), chance.choice(ALPHABET)) for _ in range(chance.randint(0, 40))]
    told = chance.choice([0, 3, 1000])

    async def scenario() -> list[Piece]:
        return [piece async for piece in Joiner(Both(parts, told).read, "j").kept(0, 1)]

    pieces = asyncio.run(scenario())
    for stream in ("out", "err"):
        assert b"".join(raw(piece) for piece in pieces if piece.stream == stream) == Both(parts, 0).data[stream]
        assert [piece.end for piece in pieces if piece.stream == stream].count(True) == 1
    if told > len(parts) and all(Both(parts, 0).data[stream] for stream in ("out", "err")):
        assert b"".join(map(raw, pieces)) == b"".join(data for _, data in parts)


def test_what_a_run_collects_is_bounded_for_all_streams_together() -> None:
    budget = Budget(SPARE_BYTES + 30)
    captured = Captured(budget)
    for at in range(10):
        for replica in range(2 if at < 2 else 1):
            captured.take(Piece(replica, 1, "out", at * 5, f"{at}" * 5, next=at * 5 + 5))
    assert captured.text("out") == "66666777778888899999" + "0000011111", "the longest stream gives way"
    assert captured.lost_bytes == 60 - 30
    assert not Budget(SPARE_BYTES).take(1, SPARE_BYTES)
    captured.close()
    assert budget.left == SPARE_BYTES + 30
    full = Captured(Budget(SPARE_BYTES))
    full.take(Piece(0, 1, "out", 0, "lost", next=4))
    assert (full.text("out"), full.lost_bytes) == ("", 4)


def says_its_name(task: Task) -> Ran:
    return Ran(seconds=1, code=3 if task.replica % 500 == 499 else 0, out=f"{task.replica}\n")


@in_virtual_time
async def test_of_a_job_of_very_many_the_output_of_those_that_failed_and_of_the_first_is_given() -> None:
    async with AsyncClient(transport=SimFleet("16x8xH100", script=says_its_name)) as client:
        job = await client.submit(["x"], gpu=1, job="many", replicas=2_000)
        with pytest.raises(JobFailed):
            await job.result()
        for follow in (True, False):
            said = [int(piece.text) async for piece in job.logs(follow=follow) if piece.text]
            assert said == [*range(96), 499, 999, 1499, 1999]
        some = [piece.text async for piece in job.logs(replica="500-502") if piece.text]
        assert some == ["500\n", "501\n", "502\n"]
        async with client.watch("many", past=True) as watch:
            async for _ in watch:
                pass
        assert watch.joiner is not None
        assert watch.joiner.left_out == 1_900


def test_who_follows_a_job_on_a_silent_worker_is_told_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """`logs` said nothing, and told it once the job had ended; then it wrote it behind the line of the progress."""
    monkeypatch.setenv("NO_COLOR", "1")
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)

    async def scenario() -> None:
        monkeypatch.setattr(run, "SILENT_SAID_S", 0)
        source = Keeping(b"")
        watch, progress = AsyncWatch(Histories(AsyncClient()._wire), "j"), Progress("j")
        progress.event(Event("t", "j", 2, "RUNNING", 1, [Change(2, 0, 0, 1, "RUNNING", "w1")]))
        watch.joiner = joiner_on(source)
        source.refusals = [NoOutput(problem("worker-lost", "it ran on w1, which does not answer now"))] * 2
        saying = asyncio.create_task(run._print_silent(watch, progress))
        await asyncio.sleep(0)
        _ = [each async for each in watch.joiner.kept(0, 1)]
        await saying

    asyncio.run(scenario())
    told = "warning[worker-lost]: it ran on w1, which does not answer now; this command prints what comes\n"
    assert screen.getvalue().endswith(f"\r\x1b[K{told}")


async def test_the_output_of_the_next_replicas_is_asked_for_while_one_is_awaited_and_comes_in_their_order() -> None:
    """Of a running sweep of 100,000 each question waited for the answer to the one before it, on a busy machine for
    most of a minute."""
    asked, answered = list[int](), dict[int, asyncio.Event]()

    async def read(verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        replica = arguments["replica"]
        asked.append(replica)
        await answered.setdefault(replica, asyncio.Event()).wait()
        text = f"{replica}\n" if arguments["stream"] == "out" else ""
        page = LogPage(1, arguments["stream"], text=text, next=len(text), size=len(text), replica=replica, over=True)
        plain: dict[str, Any] = msgspec.to_builtins(page)
        return plain

    async def rest() -> str:
        return "".join([piece.text async for piece in joiner.kept_of(dict.fromkeys(range(6), 1), None)])

    joiner = Joiner(read, "j")
    reading = asyncio.create_task(rest())
    await until(lambda: len(asked) == 2 * REPLICAS_AHEAD)
    assert set(asked) == set(range(REPLICAS_AHEAD))
    for replica in reversed(range(6)):
        answered.setdefault(replica, asyncio.Event()).set()
    assert await reading == "0\n1\n2\n3\n4\n5\n"
