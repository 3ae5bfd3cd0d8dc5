"""A member on a simulated bus in virtual time: what callers get, and when; what it says of itself; how it ends."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from moorage.bus.connection import Connection
from moorage.bus.transport import Delivery
from moorage.calls.batches import Batches
from moorage.calls.function import answer_frame
from moorage.calls.inputs import SILENCE_S
from moorage.calls.member import QUIET_S, TICK_S
from moorage.calls.messenger import CLOSE_S, LOAD_QUIET_S, Messenger, Name
from moorage.calls.outbox import CONFIRM_S, KEPT_S, OUT_BYTES_MAX
from moorage.calls.program import Program
from moorage.calls.serve import LAST_S, _drained
from moorage.calls.streams import LISTENS_S
from moorage.calls.wire import FromProgram, ToProgram
from moorage.schemas.codec import Decoder, encode
from moorage.schemas.served import Answer, CallError, checked_headers
from moorage.schemas.service import (
    ERROR,
    HOPS_MAX,
    INPUT,
    PART,
    SEND_TO,
    BatchSpec,
    Found,
    MemberLoad,
    QueueSpec,
    Sought,
    Turn,
)
from moorage.schemas.subjects import asked_of
from moorage.testing.bus.bus import MAX_PAYLOAD_BYTES, SimulatedBus, SimulatedClock, SimulatedConnection
from tests.scenes import in_virtual_time, played_by

NAME = Name("moorage", "acme", "embed")
LONG_S = 100
decode: Decoder[MemberLoad] = Decoder(MemberLoad)


class Desk:
    """One member with one place, and a caller. Its program runs what it gets until the test answers."""

    def __init__(self, bus: SimulatedBus, queue: QueueSpec | None = None) -> None:
        self.caller = bus.connect("caller")
        self.running: list[int] = []
        self.heads: list[ToProgram] = []
        self.stopped: list[int] = []
        self.held: list[bool] = []
        self.loads: list[MemberLoad] = []
        self.messenger = Messenger(cast(Connection, bus.connect("member")), NAME, 1, queue=queue)
        self.messenger.program = cast(Program, self)

    def send(self, head: ToProgram, body: bytes = b"") -> None:
        if head.cancel:
            self.stopped.append(head.cancel)
        if head.call:
            self.heads.append(head)
            self.running.append(head.call)

    def send_all(self, frames: Sequence[tuple[ToProgram, bytes]]) -> None:
        for head, body in frames:
            self.send(head, body)

    def hold(self, on: bool) -> None:
        self.held.append(on)

    def answer(self) -> None:
        self.messenger.on_frame(FromProgram(answer=self.running.pop(0)), b"")

    def call(self, wait_ms: int | str | None = 3_600_000, endpoint: str = "", **headers: str) -> asyncio.Task[Delivery]:
        said = {} if wait_ms is None else {"Moorage-Wait-Ms": str(wait_ms)}
        asking = self.caller.request(f"{NAME.subject}{endpoint}", b"", 100 * LONG_S, said | headers)
        return asyncio.get_running_loop().create_task(asking)

    async def fetches(self) -> None:
        """Open it, with calls of other members alone."""
        await self.messenger.open()
        await self.messenger.fetch()

    async def full(self) -> asyncio.Task[Delivery]:
        """The call that has the only place."""
        call = self.call()
        await asyncio.sleep(1)
        assert len(self.running) == 1
        return call


def error_of(call: asyncio.Task[Delivery]) -> str:
    return (call.result().headers or {}).get(ERROR, "")


def now_s() -> float:
    return asyncio.get_running_loop().time()


def member(scene: Callable[[Desk], Awaitable[None]], queue: QueueSpec | None = None) -> None:
    """Play a scene with a member that takes calls."""

    async def main() -> None:
        desk = Desk(SimulatedBus(), queue)
        load = NAME.subjects.member(NAME.tenant, NAME.service, "load")
        await desk.caller.subscribe(load, lambda said: desk.loads.append(decode(said.data)))
        await desk.messenger.open()
        await desk.messenger.take()
        try:
            await scene(desk)
        finally:
            await desk.messenger.close()

    SimulatedClock().run(main())


@played_by(member)
async def test_a_call_waits_as_long_as_its_caller_says_and_no_longer(desk: Desk) -> None:
    running = await desk.full()
    began_s, late = now_s(), desk.call(wait_ms=90_000)
    await late
    assert error_of(late) == "expired"
    assert 0 <= round(now_s() - began_s - 90, 3) <= 2 * TICK_S
    assert not running.done()
    desk.answer()
    await running
    assert (error_of(running), desk.running) == ("", []), "the call that expired is not run behind it"


@played_by(member)
async def test_a_member_alone_asks_nobody_for_calls_since_its_own_have_says_nothing_of_other_rooms(desk: Desk) -> None:
    """A batch would wait for the answer."""
    wants: list[Delivery] = []
    want = NAME.subjects.member(NAME.tenant, NAME.service, "want")
    await desk.caller.subscribe(want, wants.append)
    calls = [desk.call(), desk.call()]
    for call in calls:
        await asyncio.sleep(0.05)
        desk.answer()
        await call
    assert wants == []


@played_by(member)
async def test_a_member_whose_calls_are_quick_opens_its_room_once_for_many_of_them(desk: Desk) -> None:
    opened: list[str] = []
    connection = desk.messenger._connection
    subscribe = connection.subscribe_ahead

    async def counted(subject: str, *more: Any) -> Any:
        opened.append(subject)
        return await subscribe(subject, *more)

    cast(Any, connection).subscribe_ahead = counted
    calls = []
    for _ in range(20):
        calls += [desk.call(), desk.call()]
        for _ in range(2):
            await asyncio.sleep(0.002)
            desk.answer()
    await asyncio.wait(calls)
    assert {error_of(each) for each in calls} == {""}
    assert len(opened) == 1


def test_many_bare_callers_wait_as_long_as_each_says_or_as_the_service_does() -> None:
    async def scene(desk: Desk) -> None:
        running = await desk.full()
        began_s = now_s()
        calls = {wait_ms: [desk.call(wait_ms) for _ in range(10)] for wait_ms in (None, 90_000, 0)}
        for wait_ms, after_s in ((0, 0), (None, 5), (90_000, 90)):
            await asyncio.wait(calls[wait_ms])
            assert {error_of(each) for each in calls[wait_ms]} == {"expired"}, "and none was busy"
            assert 0 <= round(now_s() - began_s - after_s, 3) <= 2 * TICK_S
        desk.answer()
        await running

    member(scene, QueueSpec(30, 5.0))


@in_virtual_time
async def test_a_member_fetches_no_call_before_its_program_is_ready() -> None:
    """It was lost where the program was not there yet, and kept its place for ever; or it waited until that had loaded
    its model, beside members that were idle."""
    bus = SimulatedBus()
    full, starts = Desk(bus), Desk(bus)
    await full.messenger.open()
    await full.messenger.take()
    running, waiting = await full.full(), full.call()
    await starts.messenger.open()
    await asyncio.sleep(LONG_S)
    assert (starts.heads, waiting.done()) == ([], False)
    await starts.messenger.take()
    await asyncio.sleep(1)
    assert len(starts.heads) == 1
    for each in (full, starts):
        each.answer()
    await asyncio.wait((running, waiting))
    assert [error_of(each) for each in (running, waiting)] == ["", ""]
    for each in (full, starts):
        await each.messenger.close()


@in_virtual_time
async def test_a_call_for_a_method_goes_from_member_to_member_that_has_it() -> None:
    """Of two versions of a service, one has no method `embed`: its idle members fetch no call from the other one's."""
    bus = SimulatedBus()
    old, new, idle = Desk(bus), Desk(bus), Desk(bus)
    for each in (new, idle):
        each.messenger.endpoints = frozenset({"embed"})
    await old.fetches()
    await new.messenger.open()
    await new.messenger.take()
    full, waiting = await new.full(), new.call(endpoint=".embed")
    await asyncio.sleep(10)
    assert (old.heads, waiting.done()) == ([], False)
    await idle.fetches()
    await asyncio.sleep(1)
    assert [head.endpoint for head in idle.heads] == ["embed"]
    idle.answer()
    new.answer()
    wrong = new.call(endpoint=".other")
    await asyncio.wait((full, waiting, wrong))
    assert [error_of(each) for each in (full, waiting, wrong)] == ["", "", "no-endpoint"]
    assert b"embed has no method 'other'; its methods: embed" in wrong.result().data
    for each in (old, new, idle):
        await each.messenger.close()


@in_virtual_time
async def test_a_member_is_handed_the_calls_of_its_own_methods_and_asks_no_more_often_than_it_hears_of_calls() -> None:
    """A full member of an older version has a method that the idle ones lack: they fetched none of its calls, not even
    those that they could run, and each asked it a hundred times a second."""
    bus = SimulatedBus()
    old, idle = Desk(bus), Desk(bus)
    old.messenger.endpoints, idle.messenger.endpoints = frozenset({"gone", "stays"}), frozenset({"stays"})
    asked = Counter[str]()
    for what in ("have", "want"):
        subject = NAME.subjects.member(NAME.tenant, NAME.service, what)
        await old.caller.subscribe(subject, lambda said: asked.update([said.subject]))
    await old.messenger.open()
    await old.messenger.take()
    full, gone, stays = await old.full(), old.call(endpoint=".gone"), old.call(endpoint=".stays")
    await asyncio.sleep(1)
    await idle.fetches()
    await asyncio.sleep(LONG_S)
    assert [head.endpoint for head in idle.heads] == ["stays"]
    idle.answer()
    asked.clear()
    await asyncio.sleep(LONG_S)
    assert list(asked) == [NAME.subjects.member(NAME.tenant, NAME.service, "have")], "and no want"
    for _ in range(2):
        old.answer()
        await asyncio.sleep(1)
    await asyncio.wait((full, gone, stays))
    assert [error_of(each) for each in (full, gone, stays)] == ["", "", ""]
    for each in (old, idle):
        await each.messenger.close()


@played_by(member)
async def test_a_bare_caller_says_a_priority_and_hears_what_a_header_cannot_be(desk: Desk) -> None:
    running = await desk.full()
    wrong = [desk.call("2s"), desk.call(**{"moorage-priority": "101"}), desk.call(**{"Moorage-Priority": "high"})]
    await asyncio.wait(wrong)
    assert {error_of(each) for each in wrong} == {"bad-header"}
    assert b"Moorage-Priority must be a whole number from 0 to 100, found '101'" in wrong[1].result().data
    low, high = desk.call(**{"Moorage-Priority": "20"}), desk.call(**{"moorage-priority": "80"})
    await asyncio.sleep(1)
    desk.answer()
    await running
    await asyncio.sleep(1)
    desk.answer()
    await high
    assert not low.done()
    desk.answer()
    await low


@played_by(member)
async def test_it_says_what_it_has_to_do_when_that_changes_and_else_each_ten_seconds(desk: Desk) -> None:
    await asyncio.sleep(LONG_S)
    assert len(desk.loads) == LONG_S / LOAD_QUIET_S
    await asyncio.sleep(LOAD_QUIET_S / 2)
    before = len(desk.loads)
    await desk.full()
    await asyncio.sleep(1)
    assert len(desk.loads) == before + 1
    await desk.messenger.died()
    before = len(desk.loads)
    await desk.messenger.close()
    await asyncio.sleep(1)
    assert [load.counts.errors for load in desk.loads[before:]] == [{"502": 1}], "at its end it says the rest"


@played_by(member)
async def test_an_end_without_a_grace_waits_for_its_calls_however_long_they_take(desk: Desk) -> None:
    running, waiting = await desk.full(), desk.call()
    await asyncio.sleep(1)
    ending = asyncio.create_task(_drained(desk.messenger, asyncio.Event(), None))
    await asyncio.sleep(LONG_S)
    assert [each.done() for each in (ending, running, waiting)] == [False, False, False]
    desk.answer()
    await running
    await asyncio.sleep(LONG_S)
    assert [each.done() for each in (ending, waiting)] == [False, False]
    desk.answer()
    await asyncio.gather(ending, waiting)
    assert (error_of(running), error_of(waiting)) == ("", "")


@played_by(member)
async def test_calls_that_outlast_the_grace_are_answered_just_before_it_is_over(desk: Desk) -> None:
    running, waiting = await desk.full(), desk.call()
    await asyncio.sleep(1)
    began_s = now_s()
    await _drained(desk.messenger, asyncio.Event(), 60.0)
    assert now_s() - began_s == 60 - LAST_S
    await asyncio.gather(running, waiting)
    assert (error_of(running), error_of(waiting)) == ("member-died", "busy")
    told: Any = msgspec.json.decode(waiting.result().data)
    assert told["started"] is False


def test_data_in_parts_are_kept_in_order_until_the_answer_and_given_up_after_silence(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)

    async def scene(desk: Desk) -> None:
        async def begin() -> tuple[asyncio.Task[Delivery], str]:
            """Ask to send 6 bytes; return the call, and the subject for them."""
            asked: asyncio.Queue[Delivery] = asyncio.Queue()
            subscribed = await desk.caller.subscribe(f"inbox.{len(calls)}", asked.put_nowait)
            await desk.caller.publish(NAME.subject, b"", f"inbox.{len(calls)}", {INPUT: "6", "Moorage-Wait-Ms": "9000"})
            calls.append(subscribed)
            to = ((await asked.get()).headers or {})[SEND_TO]
            return asyncio.get_running_loop().create_task(asked.get()), to

        async def put(to: str, number: int, data: bytes) -> None:
            await desk.caller.publish(to, data, "", {PART: str(number)})
            await asyncio.sleep(1)

        calls: list[Any] = []
        whole, to = await begin()
        await put(to, 1, b"abc")
        assert (desk.running, len(list(tmp_path.iterdir()))) == ([], 1)
        await put(to, 2, b"def")
        assert Path(desk.heads[0].file).read_bytes() == b"abcdef"
        desk.answer()
        assert (await whole).headers
        assert list(tmp_path.iterdir()) == []

        async def cancel() -> None:
            await desk.caller.send([(f"{NAME.subject}.cancel", f"inbox.{len(calls) - 1}".encode(), "")])
            await asyncio.sleep(1)

        read, to = await begin()
        await put(to, 1, b"abcdef")
        await cancel()
        assert Path(desk.heads[-1].file).read_bytes() == b"abcdef", "the program may be reading it"
        desk.answer()
        assert (read.cancel(), list(tmp_path.iterdir())) == (True, [])

        lost, to = await begin()
        await put(to, 1, b"abc")
        await put(to, 3, b"def")
        assert ((await lost).headers or {})[ERROR] == "expired"
        silent, to = await begin()
        await put(to, 1, b"abc")
        assert not silent.done()
        await asyncio.sleep(SILENCE_S)
        assert ((await silent).headers or {})[ERROR] == "expired"
        left, to = await begin()
        await cancel()
        await desk.full()  # the only place is free again
        assert not left.done()
        left.cancel()
        assert list(tmp_path.iterdir()) == []

    member(scene)


@played_by(member)
async def test_what_waits_at_a_member_that_died_is_told_within_a_second_if_nobody_fetches_it(desk: Desk) -> None:
    """Members that always have calls of their own fetch none: callers heard it after five seconds."""
    running, waiting = await desk.full(), desk.call()
    await asyncio.sleep(1)
    began_s, dying = now_s(), asyncio.create_task(desk.messenger.died())
    await waiting
    assert error_of(waiting) == "busy"
    assert now_s() - began_s == pytest.approx(1, abs=0.2)
    await asyncio.gather(running, dying)


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_call_whose_data_never_came_whole_has_not_run_when_its_member_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    monkeypatch.chdir(tmp_path)

    async def scene(desk: Desk) -> None:
        said: asyncio.Queue[Delivery] = asyncio.Queue()
        await desk.caller.subscribe("inbox.a", said.put_nowait)
        await desk.caller.publish(NAME.subject, b"", "inbox.a", {INPUT: "6"})
        await desk.caller.publish(((await said.get()).headers or {})[SEND_TO], b"abc", "", {PART: "1"})
        await asyncio.sleep(1)
        if is_killed:
            await desk.messenger.died()
        else:
            desk.messenger.give_up()
        told: Any = msgspec.json.decode((await said.get()).data)
        assert (told["error"], told["started"]) == ("busy", False), "its caller may send it again"
        assert list(tmp_path.iterdir()) == []

    member(scene)


@played_by(member)
async def test_a_frame_for_a_call_whose_batch_has_not_begun_is_none(desk: Desk) -> None:
    """A program that counts on its own answered it: its batch never began, and the member was full for ever."""
    on_frame = desk.messenger.run_in_batches(cast(Program, desk), Batches(BatchSpec(2, 5_000), 1))
    first = desk.call()
    await asyncio.sleep(1)
    assert desk.running == []
    for early in (FromProgram(part=1), FromProgram(error=1), FromProgram(answer=1)):
        on_frame(early, b"")
    second = desk.call()
    await asyncio.sleep(1)
    assert (desk.running, first.done()) == ([1, 2], False)
    for number in desk.running:
        on_frame(FromProgram(answer=number), b"")
    await asyncio.gather(first, second)
    assert (error_of(first), error_of(second)) == ("", "")


def test_the_headers_with_which_a_server_says_that_nobody_listens_are_no_service_s_and_no_caller_s() -> None:
    """An empty answer with such a status was taken for nobody's: the call, which had run, was sent once more."""

    async def main() -> None:
        bus = SimulatedBus()
        busy, idle = Desk(bus), Desk(bus)
        await busy.messenger.open()
        await busy.messenger.take()
        full, waiting = await busy.full(), busy.call(Status="503", description="mine", Other="kept")
        await asyncio.sleep(1)
        await idle.fetches()
        await asyncio.sleep(1)
        assert [head.headers for head in idle.heads] == [{"Moorage-Wait-Ms": "3600000", "Other": "kept"}]
        idle.messenger.on_frame(FromProgram(answer=idle.running.pop(), headers={"status": "503", "Status": "503"}), b"")
        busy.answer()
        await asyncio.gather(full, waiting)
        assert {"Status", "status"} & set(waiting.result().headers or {}) == set()
        for each in (busy, idle):
            await each.messenger.close()

    SimulatedClock().run(main())
    for name in ("Status", "description", "a/b", "a b", "ä"):
        with pytest.raises(ValueError, match="none of moorage's own"):
            checked_headers({name: "503"})


def test_calls_that_go_ahead_once_more_are_taken_back_as_soon_as_the_first_ones() -> None:
    """The member looked at them 50 ms later, as it slept since a moment at which none was ahead."""
    step_s = 0.0005

    class Ahead(Desk):
        def take_back(self) -> list[int]:
            taken, self.running = self.running[1:], self.running[:1]
            return taken

    async def until(condition: Callable[[], bool]) -> float:
        began_s = now_s()
        while not condition():
            await asyncio.sleep(step_s)
            assert now_s() - began_s < 1
        return now_s() - began_s

    async def main() -> None:
        desk = Ahead(SimulatedBus())
        desk.messenger.member.allow(1, ahead=4)
        await desk.messenger.open()
        await desk.messenger.take()
        for _ in range(3):
            call = desk.call()
            await until(lambda: bool(desk.running))
            desk.answer()
            await call
        calls = [desk.call() for _ in range(12)]
        for _ in range(2):  # the program hangs, and goes on once all that it has not begun is taken back
            await until(lambda: len(desk.running) > 1)
            assert await until(lambda: len(desk.running) == 1) < 3 * QUIET_S
            desk.answer()
            await until(lambda: bool(desk.running))
            desk.answer()
        while not all(call.done() for call in calls):
            await until(lambda: bool(desk.running))
            desk.answer()
            await asyncio.sleep(step_s)
        await desk.messenger.close()

    SimulatedClock().run(main())


def test_a_call_that_is_too_large_to_be_passed_on_is_refused_as_busy() -> None:
    """Nobody heard of it any more, and its caller waited for its whole time."""

    async def main(is_handed: bool) -> None:
        bus = SimulatedBus()
        busy, idle = Desk(bus, QueueSpec(1 if is_handed else 0)), Desk(bus)
        await busy.messenger.open()
        await busy.messenger.take()
        full = await busy.full()
        data = bytes(MAX_PAYLOAD_BYTES - 40)
        large = asyncio.create_task(busy.caller.request(NAME.subject, data, LONG_S, {"Moorage-Wait-Ms": "90000"}))
        await asyncio.sleep(1)
        await idle.fetches()
        await asyncio.sleep(1)
        told: Any = msgspec.json.decode((await large).data)
        assert (error_of(large), told["started"], idle.heads) == ("busy", False, [])
        small = busy.call()
        await asyncio.sleep(1)
        assert len(idle.heads) == int(is_handed), "it asks again"
        for each in (busy, idle):
            each.messenger.give_up()
            await each.messenger.close()
        await asyncio.gather(full, small)

    for is_handed in (True, False):
        SimulatedClock().run(main(is_handed))


@played_by(member)
async def test_a_call_has_waited_no_longer_than_its_caller_waits_whatever_its_headers_say(desk: Desk) -> None:
    running = desk.call(0, **{"Moorage-Waited-Ms": "86400000"})
    await asyncio.sleep(1)
    desk.answer()
    await running
    assert desk.messenger.member.load(0).waited_ms == 0


@played_by(member)
async def test_a_stream_that_nobody_hears_any_more_is_stopped(desk: Desk) -> None:
    """A caller that was killed says nothing, and an endless function held its place for ever."""
    heard: list[Delivery] = []
    listening = await desk.caller.subscribe("inbox.a", heard.append)
    await desk.caller.send([(NAME.subject, b"", "inbox.a")])
    await asyncio.sleep(1)
    for _ in range(5):
        desk.messenger.on_frame(FromProgram(part=1), b"more")
        await asyncio.sleep(LISTENS_S)
    assert (len(heard), desk.stopped) == (5, [])
    await listening.unsubscribe()
    desk.messenger.on_frame(FromProgram(part=1), b"more")
    await asyncio.sleep(LISTENS_S)
    desk.messenger.on_frame(FromProgram(part=1), b"more")
    assert desk.stopped == [1]
    desk.messenger.on_frame(FromProgram(error=1, kind="CancelledError"), b"")
    assert desk.messenger.member.is_empty


@played_by(member)
async def test_a_part_that_is_too_large_ends_its_call_and_what_runs_for_it(desk: Desk) -> None:
    """The caller has its error, and an endless function held the place for ever."""
    asked = await desk.full()
    desk.messenger.on_frame(FromProgram(part=1), bytes(MAX_PAYLOAD_BYTES + 1))
    await asked
    assert error_of(asked) == "too-large"
    assert b"answer in parts" in asked.result().data
    await asyncio.sleep(0)
    assert desk.stopped == [1]
    desk.messenger.on_frame(FromProgram(part=1), b"more")
    desk.messenger.on_frame(FromProgram(error=1, kind="CancelledError"), b"")
    assert desk.messenger.member.is_empty


def test_headers_that_are_too_large_fail_their_call_alone() -> None:
    """A function's were more than a line of the socket may have: its member took the program for broken."""
    large = {"X-Large": "ä" * 16_384}

    async def scene(desk: Desk) -> None:
        for frames in ([FromProgram(answer=1)], [FromProgram(part=2), FromProgram(answer=2)], [FromProgram(error=3)]):
            asked = await desk.full()
            head, *rest = (msgspec.structs.replace(each, headers=large, code=422) for each in frames)
            desk.messenger.on_frame(head, b"")
            await asked
            assert error_of(asked) == "too-large"
            assert b"have 32775 bytes, allowed are 32768" in asked.result().data
            for each in rest:
                desk.messenger.on_frame(each, b"")
            desk.running.clear()
        assert desk.messenger.member.is_empty

    member(scene)
    with pytest.raises(ValueError, match="have 32775 bytes"):
        CallError(422, "no", large)
    with pytest.raises(ValueError, match="have 32775 bytes"):
        answer_frame(Answer(b"", large))


@in_virtual_time
async def test_the_calls_of_a_batch_that_has_not_begun_go_to_another_member_where_the_program_dies() -> None:
    bus = SimulatedBus()
    first, other = Desk(bus), Desk(bus)
    for desk in (first, other):
        desk.messenger.run_in_batches(cast(Program, desk), Batches(BatchSpec(4, 5_000), 1))
        await desk.messenger.open()
    await first.messenger.take()
    calls = [first.call(**{"Moorage-Hops": str(hops)}) for hops in (0, 0, HOPS_MAX)]
    await asyncio.sleep(1)
    assert (len(first.messenger.member.running), first.heads) == (3, []), "their batch has not begun"
    await other.messenger.take()
    await first.messenger.died()
    await asyncio.sleep(10)
    assert len(other.running) == 3
    for _ in range(3):
        other.answer()
    await asyncio.wait(calls)
    assert [error_of(each) for each in calls] == ["", "", ""]
    assert first.messenger.member.meter.refused == 0
    for desk in (first, other):
        await desk.messenger.close()


@pytest.mark.parametrize("ends", [True, False])
@in_virtual_time
async def test_a_batch_waits_for_no_more_calls_once_the_member_is_to_end_or_its_turn_is_over(ends: bool) -> None:
    desk = Desk(SimulatedBus())
    desk.messenger.run_in_batches(cast(Program, desk), Batches(BatchSpec(4, 10_000), 1))
    await desk.messenger.open()
    await desk.messenger.take()
    calls = [desk.call() for _ in range(2)]
    await asyncio.sleep(1)
    assert desk.running == []
    turn = NAME.subjects.member(NAME.tenant, NAME.service, "turn")
    draining = asyncio.create_task(desk.messenger.drain()) if ends else None
    if not ends:
        await desk.caller.send([(turn, encode(Turn(desk.messenger.id, False, 60_000, "it sleeps")), "")])
    await asyncio.sleep(1)
    assert len(desk.running) == 2
    for _ in range(2):
        desk.answer()
    await asyncio.wait(calls)
    if draining is not None:
        await draining
    else:
        await desk.caller.send([(turn, encode(Turn(desk.messenger.id, True, 0, "")), "")])
        last = desk.call()
        await asyncio.sleep(9)
        assert desk.running == [], "it waits for others again"
        await asyncio.sleep(2)
        desk.answer()
        await last
    await desk.messenger.close()


def test_a_call_whose_data_came_in_parts_waits_for_its_batch_no_longer_than_its_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    async def scene(desk: Desk) -> None:
        on_frame = desk.messenger.run_in_batches(cast(Program, desk), Batches(BatchSpec(2, 0), 1))
        said: asyncio.Queue[Delivery] = asyncio.Queue()
        await desk.caller.subscribe("inbox.a", said.put_nowait)
        await desk.caller.publish(NAME.subject, b"", "inbox.a", {INPUT: "6", "Moorage-Wait-Ms": "9000"})
        to = ((await said.get()).headers or {})[SEND_TO]
        running, began_s = await desk.full(), now_s()
        await desk.caller.publish(to, b"abcdef", "", {PART: "1"})
        last = await said.get()
        assert (last.headers or {})[ERROR] == "expired"
        assert now_s() - began_s == pytest.approx(8, abs=0.2)
        assert list(tmp_path.iterdir()) == []
        assert desk.messenger.member.load(0).expired == 1
        on_frame(FromProgram(answer=desk.running.pop()), b"")
        await running
        await desk.full()
        assert said.empty()

    member(scene)


@played_by(member)
async def test_who_calls_a_method_of_a_service_without_methods_hears_that_there_is_none(desk: Desk) -> None:
    wrong = desk.call(endpoint=".foo")
    await asyncio.wait((wrong,))
    assert error_of(wrong) == "no-endpoint"
    assert b"embed has no method 'foo'; its methods: none" in wrong.result().data
    await desk.caller.send([(f"{NAME.subject}.cancel", b"inbox.a", "")])
    await asyncio.sleep(1)
    assert desk.heads == []


@in_virtual_time
async def test_an_idle_member_of_batches_fetches_as_many_calls_as_wait_before_its_batch_begins() -> None:
    bus = SimulatedBus()
    busy, idle = Desk(bus, QueueSpec(10)), Desk(bus)
    on_frame = idle.messenger.run_in_batches(cast(Program, idle), Batches(BatchSpec(4, 0), 1))
    await busy.messenger.open()
    await busy.messenger.take()
    calls = [await busy.full(), *(busy.call() for _ in range(6))]
    await asyncio.sleep(1)
    await idle.fetches()
    await asyncio.sleep(1)
    assert [head.more for head in idle.heads] == [True, True, True, False]
    for number in idle.running[:4]:
        on_frame(FromProgram(answer=number), b"")
    await asyncio.sleep(1)
    assert [head.more for head in idle.heads[4:]] == [True, False], "the others, though they are no whole batch"
    for number in idle.running[4:]:
        on_frame(FromProgram(answer=number), b"")
    busy.answer()
    await asyncio.gather(*calls)
    assert {error_of(call) for call in calls} == {""}
    await idle.messenger.close()
    await busy.messenger.close()


def link_of(desk: Desk) -> SimulatedConnection:
    return cast(SimulatedConnection, desk.messenger._connection)


async def heard(desk: Desk) -> asyncio.Queue[Delivery]:
    """What comes to the subject `inbox.a`, for calls whose answers are in parts."""
    said: asyncio.Queue[Delivery] = asyncio.Queue()
    await desk.caller.subscribe("inbox.a", said.put_nowait)
    await desk.caller.publish(NAME.subject, b"", "inbox.a", {"Moorage-Wait-Ms": "600000"})
    await asyncio.sleep(1)
    return said


@played_by(member)
async def test_a_call_that_ends_while_its_member_has_no_connection_is_answered_once_it_has_one(desk: Desk) -> None:
    """Its caller ran into its time-out, though the work was done."""
    call = await desk.full()
    link_of(desk).lose()
    desk.answer()
    await asyncio.sleep(KEPT_S / 2)
    assert not call.done()
    link_of(desk).restore()
    await call
    assert error_of(call) == ""


@played_by(member)
async def test_the_parts_of_an_answer_that_come_while_its_member_has_no_connection_are_sent_in_order(
    desk: Desk,
) -> None:
    said = await heard(desk)
    desk.messenger.on_frame(FromProgram(part=1), b"a")
    await asyncio.sleep(1)
    link_of(desk).lose()
    for body in (b"b", b"c"):
        desk.messenger.on_frame(FromProgram(part=1), body)
        await asyncio.sleep(1)
    desk.messenger.on_frame(FromProgram(error=1, kind="ValueError", message="no more"), b"")
    link_of(desk).restore()
    await asyncio.sleep(1)
    found = [said.get_nowait() for _ in range(said.qsize())]
    assert [each.data for each in found[:3]] == [b"a", b"b", b"c"]
    assert [(each.headers or {}).get(ERROR) for each in found] == [None, None, None, "failed"]


@played_by(member)
async def test_a_member_without_a_connection_keeps_no_answer_for_longer_than_a_minute_and_then_answers_others(
    desk: Desk,
) -> None:
    said = await heard(desk)
    link_of(desk).lose()
    desk.messenger.on_frame(FromProgram(answer=desk.running.pop()), b"")
    await asyncio.sleep(KEPT_S + 1)
    assert not desk.messenger._outbox._out
    link_of(desk).restore()
    await asyncio.sleep(1)
    assert said.empty()
    later = await desk.full()
    desk.answer()
    await later


@played_by(member)
async def test_a_program_waits_while_more_of_its_answers_are_kept_than_may_be(desk: Desk) -> None:
    said, half = await heard(desk), bytes(OUT_BYTES_MAX // 2 + 1)
    link_of(desk).lose()
    desk.messenger.on_frame(FromProgram(part=1), half[:100])
    desk.messenger.on_frame(FromProgram(part=1), half)
    assert desk.held == []
    desk.messenger.on_frame(FromProgram(part=1), half)
    assert desk.held == [True]
    await asyncio.sleep(KEPT_S + 1)
    assert (desk.held, desk.messenger._outbox._out_bytes, said.qsize()) == ([True, False], 0, 0)


@played_by(member)
async def test_a_member_without_a_connection_keeps_nothing_of_what_it_says_to_others(desk: Desk) -> None:
    """Else each `have` of a tenth of a second would wait, and be told as one."""
    running, waits = await desk.full(), desk.call()
    await asyncio.sleep(1)
    link_of(desk).lose()
    await asyncio.sleep(10)
    assert not desk.messenger._outbox._out
    link_of(desk).restore()
    for call in (running, waits):
        desk.answer()
        await call


@played_by(member)
async def test_a_member_that_ends_without_a_connection_waits_for_one_within_its_grace(desk: Desk) -> None:
    call = await desk.full()
    link_of(desk).lose()
    desk.answer()
    draining = asyncio.create_task(_drained(desk.messenger, asyncio.Event(), 30.0))
    await asyncio.sleep(10)
    assert not draining.done()
    link_of(desk).restore()
    await draining
    await call
    began_s = now_s()
    link_of(desk).lose()
    desk.messenger._put("inbox.a", b"", "", {})
    await desk.messenger.close()
    assert now_s() - began_s < 2 * CLOSE_S + 1


@played_by(member)
async def test_an_answer_sent_over_a_connection_that_was_cut_off_is_sent_again_over_the_next_one(desk: Desk) -> None:
    """The member sees seconds later that the server has not got it. What was passed on is not sent again."""
    network, link = desk.caller._bus.network, link_of(desk)
    first = await desk.full()
    desk.answer()
    await first
    second, said = await desk.full(), desk.caller.late_answers
    network.isolate("member")
    desk.answer()
    desk.messenger._put("inbox.a", b"", "inbox.b", {"Moorage-Hops": "1"})
    await asyncio.sleep(CONFIRM_S / 2)
    link.lose()
    await asyncio.sleep(5)
    network.heal()
    passed_on = await heard_on(desk, "inbox.a")
    link.restore()
    await second
    assert error_of(second) == ""
    await asyncio.sleep(CONFIRM_S + 1)
    assert (passed_on, desk.caller.late_answers, len(desk.messenger._outbox._unconfirmed)) == ([], said, 0)


async def heard_on(desk: Desk, subject: str) -> list[Delivery]:
    said: list[Delivery] = []
    await desk.caller.subscribe(subject, said.append)
    return said


@played_by(member)
async def test_a_call_that_is_passed_on_has_waited_for_the_connection_too(desk: Desk) -> None:
    passed_on = await heard_on(desk, NAME.subject)
    running, waits = await desk.full(), desk.call(wait_ms=40_000)
    await asyncio.sleep(1)
    link_of(desk).lose()
    call = desk.messenger.member.room.take_next()
    desk.messenger.send_on(call, call.waited(now_s()))
    await asyncio.sleep(20)
    link_of(desk).restore()
    await asyncio.sleep(1)
    found = [each.headers or {} for each in passed_on if "Moorage-Hops" in (each.headers or {})]
    assert [int(each["Moorage-Waited-Ms"]) for each in found] == [pytest.approx(21_000, abs=100)]
    desk.answer()
    await running
    waits.cancel()


@played_by(member)
async def test_who_asks_hears_of_the_slowest_calls_with_their_codes_and_traces(desk: Desk) -> None:
    trace = f"00-{'ab' * 16}-{'cd' * 8}-01"
    first = await desk.full()
    second = desk.call(traceparent=trace)
    await asyncio.sleep(2)
    desk.answer()
    await first
    await asyncio.sleep(5)
    desk.messenger.on_frame(FromProgram(error=desk.running.pop(0), code=422, message="no"), b"")
    await second
    heard: list[Found] = []

    def is_last(said: Delivery) -> bool:
        heard.append(msgspec.json.decode(said.data, type=Found))
        return True

    await desk.caller.request_many(asked_of(NAME.subject), encode(Sought([], all=True, slow=True)), 10, is_last)
    [found] = heard
    told = [(call.code, round(call.waited_ms, -3), round(call.ran_ms, -3), call.trace) for call in found.slow]
    assert told == [(422, 2000, 5000, "ab" * 16), (0, 0, 3000, "")]
    heard.clear()
    await desk.caller.request_many(asked_of(NAME.subject), encode(Sought([], all=True)), 10, is_last)
    assert heard[0].slow == []
