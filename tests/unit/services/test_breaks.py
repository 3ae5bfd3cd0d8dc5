"""Calls through breaks of connections, in virtual time: what members keep, what callers ask, and what is told of them.

The worlds of `tests/release/breaks/simulated.py`, some seeds of them, and one scene for each of their parts.
"""

from __future__ import annotations

import asyncio
import time
from typing import cast

import pytest

from moorage.bus.transport import Delivery
from moorage.calls.outbox import CONFIRM_S, KEPT_S, RECEIPT_S
from moorage.calls.wire import FromProgram
from moorage.client import AsyncClient, Unreachable
from moorage.client.whereabouts import ASK_AFTER_S, BACK_S, SILENT_S
from moorage.schemas.service import ERROR
from moorage.testing import SimFleet
from moorage.testing.bus.bus import SimulatedConnection
from tests.release.breaks.simulated import World
from tests.scenes import in_virtual_time, played_by
from tests.unit.services.test_messenger import NAME, Desk, link_of, member


@pytest.mark.parametrize("seed", range(40))
def test_a_call_that_a_member_received_is_answered_behind_a_break_and_no_other_one_of_the_sdk_hangs(seed: int) -> None:
    world = World(seed)
    world.run()
    assert not world.wrong


async def heard(desk: Desk) -> asyncio.Queue[Delivery]:
    said: asyncio.Queue[Delivery] = asyncio.Queue()
    await desk.caller.subscribe("inbox.a", said.put_nowait)
    return said


async def begun(desk: Desk) -> asyncio.Queue[Delivery]:
    """What its caller hears of a call that runs."""
    said = await heard(desk)
    await desk.caller.publish(NAME.subject, b"", "inbox.a", {})
    await asyncio.sleep(RECEIPT_S / 2)
    return said


@played_by(member)
async def test_an_answer_has_no_byte_for_a_receipt_where_no_break_can_lie_before_it(desk: Desk) -> None:
    said = await begun(desk)
    desk.answer()
    await asyncio.sleep(RECEIPT_S)
    answer = said.get_nowait()
    names = {"Moorage-Member", "Moorage-Ran-Ms", "Moorage-Waited-Ms"}
    assert (answer.reply, set(answer.headers or {})) == ("", names)


@pytest.mark.parametrize("away_s", [0.3, KEPT_S - 5])
def test_an_answer_that_nobody_hears_is_sent_until_its_caller_is_back(away_s: float) -> None:
    async def scene(desk: Desk) -> None:
        said = await begun(desk)
        await asyncio.sleep(RECEIPT_S)
        desk.caller.lose()
        desk.answer()
        await asyncio.sleep(away_s)
        desk.caller.restore()
        await asyncio.sleep(1)
        assert said.qsize() == 1
        await asyncio.sleep(KEPT_S)
        assert said.qsize() == 1, "and no more, once it is heard"
        assert not desk.messenger._outbox._kept or not desk.messenger._outbox._untaken

    member(scene)


@played_by(member)
async def test_a_caller_that_does_not_come_back_is_given_up_after_a_minute(desk: Desk) -> None:
    said = await begun(desk)
    await asyncio.sleep(RECEIPT_S)
    desk.caller.lose()
    desk.answer()
    await asyncio.sleep(KEPT_S + 2)
    desk.caller.restore()
    await asyncio.sleep(KEPT_S)
    assert (said.qsize(), len(desk.messenger._outbox._untaken)) == (0, 0)


@played_by(member)
async def test_what_a_server_took_with_it_is_sent_again_also_to_who_is_back_later_than_the_member(desk: Desk) -> None:
    """All calls under way hung where the member was back before its callers: it sent its answers once, to nobody."""
    said = await begun(desk)
    desk.answer()
    desk.caller._bus.network.isolate("member")  # it is lost with the server
    await asyncio.sleep(CONFIRM_S / 2)
    desk.caller._bus.network.heal()
    desk.caller.lose()
    link_of(desk).lose()
    link_of(desk).restore()
    await asyncio.sleep(3)
    desk.caller.restore()
    await asyncio.sleep(1)
    assert said.qsize() == 1


@played_by(member)
async def test_the_answers_of_a_member_that_ends_right_behind_a_break_find_their_callers(desk: Desk) -> None:
    said = await begun(desk)
    for link in (desk.caller, link_of(desk)):
        link.lose()
    desk.answer()
    link_of(desk).restore()
    closing = asyncio.create_task(desk.messenger.close())
    await asyncio.sleep(2)
    assert not closing.done()
    desk.caller.restore()
    await closing
    assert said.qsize() == 1


@played_by(member)
async def test_data_in_parts_that_a_break_may_have_lost_are_refused_at_once(desk: Desk) -> None:
    said = await heard(desk)
    await desk.caller.publish(NAME.subject, b"", "inbox.a", {"Moorage-Input": "3000000"})
    await asyncio.sleep(1)
    assert "Moorage-Send" in (said.get_nowait().headers or {})
    link_of(desk).lose()
    link_of(desk).restore()
    await asyncio.sleep(1)
    assert (said.get_nowait().headers or {})[ERROR] == "expired"
    assert (desk.running, desk.messenger.member.is_empty) == ([], True)


@played_by(member)
async def test_data_of_no_bytes_are_whole_at_once(desk: Desk) -> None:
    """Such a call kept its place for half a minute, and could not be ended: a part without bytes is none."""
    said = await heard(desk)
    await desk.caller.publish(NAME.subject, b"", "inbox.a", {"Moorage-Input": "0"})
    await asyncio.sleep(1)
    desk.answer()
    await asyncio.sleep(1)
    assert [(each.headers or {}).get(ERROR) for each in [said.get_nowait() for _ in range(said.qsize())]] == [None]


class Fleet:
    """A service whose calls run until the test lets them, a client, and their links."""

    def __init__(self, fleet: SimFleet, moorage: AsyncClient) -> None:
        self.fleet = fleet
        self.moorage = moorage
        self.may_end = asyncio.Event()
        self.began: list[str] = []

    async def run(self, data: str) -> str:
        self.began.append(data)
        await self.may_end.wait()
        return data

    @property
    def caller(self) -> SimulatedConnection:
        return cast(SimulatedConnection, self.moorage._wire.link)

    @property
    def member(self) -> SimulatedConnection:
        inbox = self.moorage._wire.subjects.member_inbox(self.moorage.tenant)
        [link] = [each for each in self.fleet._bus.connections if each.inbox_prefix == inbox]
        return link


@in_virtual_time
async def test_a_call_of_the_sdk_outlives_a_break_and_hears_what_was_answered_meanwhile() -> None:
    """It ended as unreachable, though its answer was there."""
    async with SimFleet("8xH100") as fleet, AsyncClient(transport=fleet) as moorage:
        scene = Fleet(fleet, moorage)
        await fleet.serve("slow", scene.run)
        scene.may_end.set()
        assert await moorage.call("slow", "quick") == "quick"
        scene.may_end.clear()
        for away_s in (0.005, 5.0):
            calling = asyncio.create_task(moorage.call("slow", f"{away_s}", timeout="1m"))
            await asyncio.sleep(RECEIPT_S / 2)
            scene.caller.lose()
            scene.may_end.set()
            await asyncio.sleep(away_s)
            scene.may_end.clear()
            assert not calling.done()
            scene.caller.restore()
            async with asyncio.timeout(2):
                assert await calling == f"{away_s}"
        assert scene.began == ["quick", "0.005", "5.0"], "each ran once"


@pytest.mark.parametrize("idempotent", [False, True])
def test_a_call_that_no_member_has_ends_at_once_behind_a_break_or_is_tried_again(idempotent: bool) -> None:
    @in_virtual_time
    async def scene() -> None:
        async with SimFleet("8xH100") as fleet, AsyncClient(transport=fleet) as moorage:
            scene = Fleet(fleet, moorage)
            await fleet.serve("slow", scene.run)
            scene.may_end.set()
            assert await moorage.call("slow", "first") == "first"
            cancels: list[Delivery] = []
            await fleet._bus.connect("witness").subscribe("moorage.call.default.slow.cancel", cancels.append)
            fleet._bus.network.isolate(scene.member.name)  # the server has read it, and goes with it
            calling = asyncio.create_task(moorage.call("slow", "lost", timeout="10m", idempotent=idempotent))
            await asyncio.sleep(0.1)
            scene.caller.lose()
            fleet._bus.network.heal()
            scene.caller.restore()
            async with asyncio.timeout(BACK_S + 2):
                if idempotent:
                    assert await calling == "lost"
                else:
                    with pytest.raises(Unreachable, match="no member has the call any more") as told:
                        await calling
                    assert told.value.code == "unreachable"
            await asyncio.sleep(1)
            assert (scene.began, len(cancels)) == (["first"] + ["lost"] * idempotent, 1)

    scene()


@in_virtual_time
async def test_a_question_that_was_on_its_way_as_the_connection_broke_puts_off_none_behind_the_break() -> None:
    """The answer was lost in a server that stood still; nobody asked for it for five seconds more."""
    async with SimFleet("8xH100") as fleet, AsyncClient(transport=fleet) as moorage:
        scene = Fleet(fleet, moorage)
        await fleet.serve("slow", scene.run)
        await asyncio.sleep(1)
        calling = asyncio.create_task(moorage.call("slow", "x", timeout="1m"))
        await asyncio.sleep(ASK_AFTER_S - 0.1)
        fleet._bus.network.isolate(scene.member.name)
        await asyncio.sleep(0.9)  # the second question, to all, is on its way
        scene.may_end.set()
        await asyncio.sleep(0.05)
        fleet._bus.network.heal()
        scene.caller.lose()
        scene.caller.restore()
        async with asyncio.timeout(2):
            assert await calling == "x"


@in_virtual_time
async def test_a_call_that_was_lost_at_its_member_ends_before_its_time_though_the_caller_saw_no_break() -> None:
    async with SimFleet("8xH100") as fleet, AsyncClient(transport=fleet) as moorage:
        scene = Fleet(fleet, moorage)
        await fleet.serve("slow", scene.run)
        await asyncio.sleep(1)
        fleet._bus.network.isolate(scene.member.name)
        calling = asyncio.create_task(moorage.call("slow", "lost", timeout="10m"))
        await asyncio.sleep(0.1)
        fleet._bus.network.heal()
        async with asyncio.timeout(ASK_AFTER_S + SILENT_S + 3):
            with pytest.raises(Unreachable):
                await calling


@in_virtual_time
async def test_a_call_that_its_member_took_along_ends_before_it_is_asked_for_and_one_that_another_has_goes_on() -> None:
    async with SimFleet("8xH100") as fleet, AsyncClient(transport=fleet) as moorage:
        scene = Fleet(fleet, moorage)
        await fleet.serve("slow", scene.run)
        running = asyncio.create_task(moorage.call("slow", "runs", timeout="10m"))
        await asyncio.sleep(0.1)
        assert moorage._calls is not None
        there = await moorage._calls.inbox()
        there._note("moorage.call.default.slow", "one that has ended in order", time.monotonic())
        await asyncio.sleep(SILENT_S)
        fleet._bus.network.isolate(scene.member.name)
        calling = asyncio.create_task(moorage.call("slow", "lost", timeout="10m"))
        await asyncio.sleep(0.1)
        fleet._bus.network.heal()

        worker, subject = fleet._bus.connect("worker"), "moorage.call.default.slow"

        telling: list[asyncio.Task[int]] = []

        def on_asked(asked: Delivery) -> None:
            telling.append(asyncio.create_task(worker.send([(asked.reply, b'{"member":"other","ended":true}', "")])))

        await worker.subscribe(f"{subject}.ASK", on_asked)
        await worker.send([(f"{there.answers.base}.ended", subject.encode(), "")])
        async with asyncio.timeout(ASK_AFTER_S - 0.1):
            with pytest.raises(Unreachable):
                await calling
        await asyncio.sleep(60)
        scene.may_end.set()
        assert await running == "runs"


@in_virtual_time
async def test_who_waits_for_a_long_call_waits_for_its_member_also_while_that_is_away() -> None:
    async with SimFleet("8xH100") as fleet, AsyncClient(transport=fleet) as moorage:
        scene = Fleet(fleet, moorage)
        await fleet.serve("slow", scene.run)
        calling = asyncio.create_task(moorage.call("slow", "long", timeout="10m"))
        await asyncio.sleep(300)
        scene.member.lose()
        await asyncio.sleep(KEPT_S - 10)
        scene.may_end.set()
        scene.member.restore()
        assert await calling == "long"


@in_virtual_time
async def test_members_of_an_earlier_release_are_asked_and_no_call_of_theirs_is_given_up() -> None:
    """They answer the question as a call for a method that they lack."""
    from moorage.calls.messenger import Messenger

    asked = Messenger._on_sought
    Messenger._on_sought = lambda self, delivery: None  # type: ignore[method-assign]
    try:
        async with SimFleet("8xH100") as fleet, AsyncClient(transport=fleet) as moorage:
            scene = Fleet(fleet, moorage)
            await fleet.serve("slow", scene.run)
            calling = asyncio.create_task(moorage.call("slow", "long", timeout="10m"))
            await asyncio.sleep(1)
            scene.caller.lose()
            scene.caller.restore()
            await asyncio.sleep(300)
            scene.may_end.set()
            assert await calling == "long"
    finally:
        Messenger._on_sought = asked  # type: ignore[method-assign]


@played_by(member)
async def test_a_member_says_of_which_calls_it_has_none_only_if_all_are_asked(desk: Desk) -> None:
    said = await begun(desk)
    assert isinstance(said, asyncio.Queue)
    ask = f"{NAME.subject}.ASK"
    found: asyncio.Queue[Delivery] = asyncio.Queue()
    await desk.caller.subscribe("inbox.b", found.put_nowait)
    for body in (b'{"calls":["inbox.c"]}', b"no JSON", b'{"calls":["inbox.a","inbox.c"]}',
                 b'{"calls":["inbox.c"],"all":true}'):  # fmt: skip
        await desk.caller.publish(ask, body, "inbox.b", {})
        await asyncio.sleep(0.01)
    told = [found.get_nowait().data.decode() for _ in range(found.qsize())]
    own = desk.messenger.id
    assert told == [f'{{"member":"{own}","calls":["inbox.a"]}}', f'{{"member":"{own}"}}']
    desk.messenger.on_frame(FromProgram(answer=desk.running.pop()), b"")
    await asyncio.sleep(0.1)
    await desk.caller.publish(f"{ask}.{own}", b'{"calls":["inbox.a"]}', "inbox.b", {})
    await asyncio.sleep(0.1)
    assert (said.qsize(), found.qsize()) == (2, 1), "it has sent the answer again"
