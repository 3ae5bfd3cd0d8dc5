"""Streams of commands on one worker: how many there are at a time, of one tenant and in all."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from typing import Any, cast

from moorage.bus.transport import Delivery, Handler, Subscribed
from moorage.schemas.codec import Decoder
from moorage.schemas.frames import DEAD_S, CommandEnd, Exec, Mark, piece, read_piece
from moorage.schemas.subjects import Subjects
from moorage.worker.agent.command_streams import KNOWN_MAX_TENANT, STREAMS_MAX_TENANT, CommandStreams
from moorage.worker.driver import Driver
from moorage.worker.session.attempt_messages import Event, Log
from tests.scenes import in_virtual_time

SUBJECTS = Subjects()
_decode_end = Decoder[CommandEnd](CommandEnd)


class Subscription:
    """One that the desk forgets."""

    def __init__(self, desk: Desk, subject: str) -> None:
        self._desk, self._subject = desk, subject

    async def unsubscribe(self) -> None:
        del self._desk.heard[self._subject]


class Desk:
    """The agent of the streams, and its connection: `heard` has the subjects to which it subscribes."""

    def __init__(self) -> None:
        self.dropped = Counter[str]()
        self.heard: dict[str, Handler] = {}
        self.posted: list[tuple[str, bytes]] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.streams = CommandStreams(self, self, "w1", SUBJECTS, {}, {})

    async def subscribe(self, subject: str, handler: Handler) -> Subscribed:
        self.heard[subject] = handler
        return cast(Subscribed, Subscription(self, subject))

    def post(self, subject: str, payload: bytes, reply: str = "") -> None:
        self.posted.append((subject, payload))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def enqueue(self, event: Event) -> None: ...
    def wake(self) -> None: ...
    def say(self, line: Log) -> None: ...
    def call_driver(self, driver: Driver, step: Any) -> str:
        return ""

    def ask(self, tenant: str, stream: str) -> None:
        self.streams.open(Exec(tenant, "j", 0, 1, 7, stream, ["true"]))

    async def refusal(self, tenant: str, stream: str) -> str:
        """Come as the caller of a stream, and return with which code its command ended."""
        self.heard[SUBJECTS.tty(tenant, "w1", stream, "in")](Delivery("", "", piece(Mark.GO, 0, b"{}")))
        while True:
            for subject, payload in self.posted:
                if subject == SUBJECTS.tty(tenant, "w1", stream, "out"):
                    mark, _, rest = read_piece(payload)
                    if mark is Mark.END:
                        return str(_decode_end(rest).error)
            await asyncio.sleep(0.1)


@in_virtual_time
async def test_the_commands_of_one_tenant_leave_room_for_others() -> None:
    desk = Desk()
    for number in range(STREAMS_MAX_TENANT + 20):
        desk.ask("acme", f"a{number}")
    desk.ask("beta", "b")
    await asyncio.sleep(0)
    assert await desk.refusal("acme", f"a{STREAMS_MAX_TENANT}") == "overloaded"
    assert await desk.refusal("beta", "b") == "failed-precondition", "it has a place, and no such attempt"


@in_virtual_time
async def test_the_end_of_input_waits_once_however_often_it_comes() -> None:
    """It takes nothing of the window that bounds the input."""
    desk = Desk()
    desk.ask("acme", "a")
    await asyncio.sleep(0)
    [hear] = desk.heard.values()
    for _ in range(1000):
        hear(Delivery("", "", piece(Mark.EOF)))
    [stream] = desk.streams._streams.values()
    assert stream._input.qsize() == 1


@in_virtual_time
async def test_streams_whose_callers_do_not_come_are_bounded_and_end() -> None:
    desk = Desk()
    for number in range(2 * KNOWN_MAX_TENANT):
        desk.ask("acme", f"a{number}")
    desk.ask("beta", "b")
    await asyncio.sleep(0)
    assert len(desk.heard) == len(desk.tasks) == KNOWN_MAX_TENANT + 1
    assert desk.dropped["too-many-streams"] == KNOWN_MAX_TENANT
    await asyncio.sleep(2 * DEAD_S)
    assert not desk.heard
    assert not desk.tasks
