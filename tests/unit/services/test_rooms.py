"""What members promise by the calls that they pass among themselves, in virtual time, with random calls and members.

Each member is a real `Messenger` on a simulated bus; its program is played here, and so is the leader that says which
members have their GPUs. Members rest, drain and die, and a `have` or a `want` may be lost; some run calls in batches.
During a rollout, members have other methods than others. In some worlds the programs of two are ready late.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import pytest

from moorage.bus.connection import Connection
from moorage.bus.transport import STATUS_HEADER, Delivery
from moorage.calls.batcher import OnFrame
from moorage.calls.batches import Batches
from moorage.calls.member import Call
from moorage.calls.messenger import Messenger, Name
from moorage.calls.program import Program
from moorage.calls.wire import FromProgram, ToProgram
from moorage.schemas.codec import encode
from moorage.schemas.service import BUSY, ERROR, EXPIRED, MEMBER_DIED, NO_ENDPOINT, BatchSpec, QueueSpec, Turn
from moorage.testing.bus.bus import FaultyNetwork, SimulatedBus, SimulatedClock

NAME: Final = Name("moorage", "acme", "embed")
MEMBERS: Final = 5
#: the methods of each member during a rollout: the last two, which stay, have all of them between them
ROLLOUT: Final = ({"stays", "gone"}, {"stays", "new"}, {"stays", "gone"}, {"stays", "gone"}, {"stays", "new"})
#: a method that no member has
UNKNOWN: Final = "unknown"
#: calls that may wait at a member: never too many, also where it alone has a method and rests
ROOM: Final = 2_000
#: a message takes at most this long
WAY_S: Final = 0.002
#: a turn has come, and what was sent before it
TOLD_S: Final = 4 * WAY_S
#: no call waits for longer in a room while some member has a free place; if no two messages in a row are lost
WAITS_S_MAX: Final = 0.05
WAITS_S_MAX_LOSSY: Final = 0.3
SAMPLE_S: Final = 0.002
#: how often a program hangs between two calls
HANGS_PART: Final = 0.2
CALLS_S: Final = 3.0
OVER_S: Final = 30.0


def now_s() -> float:
    return asyncio.get_running_loop().time()


class LossyBus(SimulatedBus):
    """Loses some of `have` and `want`, no two in a row of one member: a call and its answer are never lost."""

    def __init__(self, seed: int, losses: float) -> None:
        super().__init__(FaultyNetwork(seed, delay_ms=(0.1, WAY_S * 1000)))
        self._losses = losses
        self._lost: set[tuple[str, str]] = set()
        self._dice = random.Random(seed)

    def publish(
        self, sender: str, account: Any, subject: str, payload: bytes, reply: str, headers: Mapping[str, str] | None
    ) -> None:
        if subject.endswith((".have", ".want")):
            if (sender, subject) in self._lost:
                self._lost.discard((sender, subject))
            elif self._dice.random() < self._losses:
                self._lost.add((sender, subject))
                return
        super().publish(sender, account, subject, payload, reply, headers)


class Desk:
    """A member, and its program, which works on each call for as long as its data say."""

    def __init__(self, site: Site, at: int) -> None:
        self.site = site
        connection = cast(Connection, site.bus.connect(f"member {at}", on_error=site.wrong.append))
        self.messenger = Messenger(connection, NAME, site.places, queue=QueueSpec(most=ROOM))
        self.messenger.program = cast(Program, self)
        self.messenger.endpoints = frozenset(ROLLOUT[at] if site.is_rollout else ())
        self._on_frame: OnFrame = self.messenger.on_frame
        if site.batch is not None:
            self._on_frame = self.messenger.run_in_batches(cast(Program, self), Batches(site.batch, site.places))
        if site.batch is None:
            self.messenger.member.allow(site.places, ahead=4)
        self._program, self.messenger.program = self.messenger.program, None
        self._ahead: list[tuple[int, bytes]] = []  # calls that it has, and has not begun
        self.has_gpu = True
        self.takes = False  # its program is ready, and it is neither to end, nor dead
        self.free_s: float | None = None  # since when it could begin a call
        self.began_s = 0.0  # when it has begun one last: it fetches one after another, also for several places
        self._is_dead = False
        self._losing: asyncio.TimerHandle | None = None

    def send(self, head: ToProgram, body: bytes = b"") -> None:
        if head.call:
            if head.ahead:
                self._ahead.append((head.call, body))
            else:
                self._begin(head.call, body)
            if head.endpoint and head.endpoint not in self.messenger.endpoints:
                self.site.wrong.append(f"{body!r} begins at a member that has no method {head.endpoint}")

    def take_back(self) -> list[int]:
        ahead, self._ahead = self._ahead, []
        return [number for number, _ in ahead]

    def _begin(self, call: int, body: bytes) -> None:
        number, _, takes_s = body.decode().partition(" ")
        if not self.has_gpu:
            self.site.wrong.append(f"call {number} begins at {now_s():.3f} at a member without its GPUs")
        self.site.began[int(number)] += 1
        self.began_s = now_s()
        asyncio.get_running_loop().call_later(float(takes_s), self._answer, call)

    def send_all(self, frames: Sequence[tuple[ToProgram, bytes]]) -> None:
        for head, body in frames:
            self.send(head, body)

    def hold(self, on: bool) -> None: ...

    def _answer(self, number: int) -> None:
        if self._is_dead:
            return
        if self._ahead:
            hangs_s = self.site.dice.choice((0.01, 0.05)) if self.site.dice.random() < HANGS_PART else 0.0
            if hangs_s:
                asyncio.get_running_loop().call_later(hangs_s, self._begin_next, self._ahead[0])
            else:
                self._begin_next(self._ahead[0])
        self._on_frame(FromProgram(answer=number), b"")

    def _begin_next(self, call: tuple[int, bytes]) -> None:
        """Begin a call that it has ahead, unless that was taken back."""
        if self._ahead and self._ahead[0] is call and not self._is_dead:
            self._begin(*self._ahead.pop(0))

    def look(self) -> None:
        """Note since when it could begin a call: it has a place and its GPUs."""
        member = self.messenger.member
        has_place = len(member.running) < member.places and not (member.batches and member.batches.is_full)
        is_free = self.takes and self.has_gpu and not member.rests and has_place
        self.free_s = (self.free_s or now_s()) if is_free else None

    def waiting(self) -> list[Call]:
        """Return the calls that wait here for a place, in the room or ahead at the program."""
        member = self.messenger.member
        ahead = [] if member.batches else [call for call in member.running.values() if call.started_s < 0]
        return [*member.room, *ahead]

    def has(self, endpoint: str) -> bool:
        return not endpoint or endpoint in self.messenger.endpoints

    # -- what the leader does

    async def turn(self, awake: bool, in_s: float = 0.0) -> None:
        if self._losing is not None:
            self._losing.cancel()
        if awake:
            self.has_gpu = True
        else:
            self._losing = asyncio.get_running_loop().call_later(TOLD_S, self._lose_gpu)
        told = Turn(self.messenger.id, awake, round(in_s * 1000), "" if awake else "the service sleeps")
        subject = NAME.subjects.member(NAME.tenant, NAME.service, "turn")
        await self.site.caller.send([(subject, encode(told), "")])

    def _lose_gpu(self) -> None:
        if self.site.batch is not None and self.messenger.member.running:  # a batch may wait for calls before it begins
            self._losing = asyncio.get_running_loop().call_later(TOLD_S, self._lose_gpu)
        else:
            self.has_gpu = False

    async def rest(self, seconds: float) -> None:
        """Have no GPUs for so long, which the leader repeats."""
        ends_s = now_s() + seconds
        while (left_s := ends_s - now_s()) > 0:
            await self.turn(False, left_s)
            await asyncio.sleep(min(left_s, 1.0))
        await self.turn(True)

    # -- its begin and its end

    async def begin(self) -> None:
        """Its program is ready."""
        self.messenger.program = self._program
        await self.messenger.take()
        self.takes = True

    async def drain(self) -> None:
        self.takes = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5):
                await self.messenger.drain()
        self.messenger.give_up()
        await self.messenger.close()

    async def die(self) -> None:
        self.takes, self._is_dead = False, True
        await self.messenger.died()
        await self.messenger.close()


class Site:
    """Members, and callers of theirs."""

    def __init__(
        self, seed: int, losses: float = 0.0, batch: BatchSpec | None = None, *, is_rollout: bool = False
    ) -> None:
        self.batch = batch
        self.is_rollout = is_rollout
        self.dice = random.Random(seed)
        self.wrong: list[object] = []
        self.bus = LossyBus(seed, losses)
        self.caller = self.bus.connect("caller", on_error=self.wrong.append)
        self.places = 1 + seed % 2
        #: members whose programs are ready late: the others have all methods until then
        self.late: tuple[int, ...] = (0, 3) if seed % 3 == 1 else ()
        self.slow_part = (0.0, 0.02, 0.2)[seed % 3]
        self.quick_s = ((0.001, 0.005), (0.0002, 0.002))[seed // 2 % 2]
        self.is_lossy = losses > 0
        self.sent = 0
        self.endpoints: dict[int, str] = {}  # by call: the method that it is for
        self.began = Counter[int]()
        self.answers = Counter[int]()
        self.all_answered = asyncio.Event()
        self.kinds = Counter[str]()
        self.desks = [Desk(self, at) for at in range(MEMBERS)]

    def answered(self, delivery: Delivery) -> None:
        headers = delivery.headers or {}
        kind = headers.get(ERROR) or ("nobody" if STATUS_HEADER in headers else "ok")
        number = int(delivery.subject.rpartition(".")[2])
        self.answers[number] += 1
        self.kinds[kind] += 1
        if len(self.answers) == self.sent:
            self.all_answered.set()
        endpoint = self.endpoints[number]
        if (kind == NO_ENDPOINT) is not (endpoint == UNKNOWN):
            self.wrong.append(f"a call for the method {endpoint!r} is {kind} at {now_s():.3f}")
        free = [desk for desk in self.desks if desk.free_s is not None and desk.has(endpoint)]
        free_s = min((max(desk.free_s or 0, desk.began_s) for desk in free), default=None)
        if kind in (BUSY, EXPIRED) and not self.is_lossy and free_s is not None and now_s() - free_s > WAITS_S_MAX:
            self.wrong.append(f"a call is {kind} at {now_s():.3f}, and a member has a free place")

    @property
    def named(self) -> list[str]:
        """The methods that calls are for; "" is the service itself."""
        return ["", *sorted(set().union(*ROLLOUT))] if self.is_rollout else [""]

    async def watch(self) -> None:
        """See that no call waits while a member could begin it."""
        most_s = WAITS_S_MAX_LOSSY if self.is_lossy else WAITS_S_MAX
        while True:
            await asyncio.sleep(SAMPLE_S)
            for desk in self.desks:
                desk.look()
            for endpoint in self.named:
                free = [desk for desk in self.desks if desk.free_s is not None and desk.has(endpoint)]
                idle = [max(desk.free_s or 0, desk.began_s) for desk in free]
                rooms = [call for desk in self.desks for call in desk.waiting()]
                came = [call.came_s for call in rooms if call.endpoint == endpoint]
                if idle and came and now_s() - max(min(idle), min(came)) > most_s:
                    self.wrong.append(f"a call waits at {now_s():.3f}, and a member has a free place")

    async def call(self) -> None:
        is_slow = self.dice.random() < self.slow_part
        takes_s = self.dice.uniform(0.1, 0.3) if is_slow else self.dice.uniform(*self.quick_s)
        wait_ms = self.dice.choice((400, 1500, 60_000, 60_000))
        self.sent += 1
        self.all_answered.clear()
        is_unknown = self.is_rollout and self.dice.random() < 0.02
        endpoint = self.endpoints[self.sent] = UNKNOWN if is_unknown else self.dice.choice(self.named)
        data = f"{self.sent} {takes_s}".encode()
        subject = f"{NAME.subject}.{endpoint}" if endpoint else NAME.subject
        await self.caller.publish(subject, data, f"answers.{self.sent}", {"Moorage-Wait-Ms": str(wait_ms)})

    async def calls(self) -> None:
        mean_s = sum(self.quick_s) / 2 + self.slow_part * 0.2
        load = self.dice.choice((0.2, 0.4))
        ends_s = now_s() + CALLS_S
        while now_s() < ends_s:
            await asyncio.sleep(self.dice.expovariate(load * MEMBERS * self.places / mean_s))
            await self.call()

    async def happen(self) -> None:
        """Members rest one after another, and several at a time; one drains, one does as it rests, one dies.

        Some begin before that, when calls come already.
        """
        first, second, third, *stay = self.desks

        async def rests(desk: Desk) -> None:
            for _ in range(2):
                await asyncio.sleep(self.dice.uniform(0.05, 0.5))
                await desk.rest(self.dice.uniform(0.2, 1.0))

        async def drains_as_it_rests() -> None:
            await asyncio.sleep(self.dice.uniform(0.1, 1.5))
            await second.turn(False, self.dice.uniform(0.5, 3))
            await asyncio.sleep(self.dice.uniform(0, 0.5))
            await second.drain()

        async def begins(desk: Desk) -> None:
            await asyncio.sleep(self.dice.uniform(0.05, 0.45))
            await desk.begin()

        async def later(desk: Desk, *, dies: bool) -> None:
            await asyncio.sleep(self.dice.uniform(0.5, 2))
            await (desk.die() if dies else desk.drain())

        late = [self.desks[at] for at in self.late]
        ends = (later(first, dies=False), drains_as_it_rests(), later(third, dies=True))
        await asyncio.gather(*ends, *map(rests, stay), *map(begins, late))

    async def play(self) -> None:
        await self.caller.subscribe("answers.*", self.answered)
        for at, desk in enumerate(self.desks):
            await desk.messenger.open()
            if at not in self.late:
                await desk.begin()
        watching = asyncio.get_running_loop().create_task(self.watch())
        await asyncio.gather(self.calls(), self.happen())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OVER_S):
                await self.all_answered.wait()
        watching.cancel()
        assert len(self.answers) == self.sent, f"{self.sent - len(self.answers)} calls are not answered"
        for desk in self.desks[3:]:
            await desk.messenger.close()


@pytest.mark.parametrize("is_rollout", [False, True])
@pytest.mark.parametrize("batch", [None, BatchSpec(4, 5)])
@pytest.mark.parametrize("losses", [0.0, 0.1])
@pytest.mark.parametrize("seed", range(12))
def test_each_call_is_answered_once_and_none_waits_or_is_refused_while_a_member_has_a_free_place(
    seed: int, losses: float, batch: BatchSpec | None, is_rollout: bool
) -> None:
    async def main() -> Site:
        site = Site(seed, losses, batch, is_rollout=is_rollout)
        asyncio.get_running_loop().set_exception_handler(lambda _, told: site.wrong.append(told))
        await site.play()
        return site

    site = SimulatedClock().run(main())
    assert not site.wrong
    assert set(site.answers.values()) == {1}
    assert max(site.began.values()) == 1, "at most once"
    assert set(site.kinds) <= {"ok", BUSY, EXPIRED, MEMBER_DIED, *([NO_ENDPOINT] if is_rollout else [])}
    assert site.kinds["ok"] > 0.7 * site.sent
