"""Calls through breaks on the simulated bus, in virtual time, by seed: servers stop, and links of members and of
callers are cut and joined again.

Members are real `Messenger`s, whose programs are played here. Callers are clients of the SDK, and bare ones: those only
send and hear, as the library of any language does.

    python -m tests.release.breaks.simulated --seeds 1000
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, cast

import msgspec

from moorage.bus.connection import Connection
from moorage.bus.errors import BusError
from moorage.bus.health import State
from moorage.bus.transport import STATUS_HEADER, Delivery
from moorage.calls.member import Call
from moorage.calls.messenger import Messenger, Name
from moorage.calls.outbox import RECEIPT_S
from moorage.calls.program import Program
from moorage.calls.wire import FromProgram, ToProgram
from moorage.client import AsyncClient, CallFailed, CallRefused, ClientError, TimedOut, Unreachable
from moorage.client.transport import Link
from moorage.schemas.service import ERROR
from moorage.testing.bus.bus import FaultyNetwork, SimulatedBus, SimulatedClock, SimulatedConnection

NAME: Final = Name("moorage", "default", "embed")
#: a message takes at most so long
WAY_S: Final = 0.002
#: who has lost its connection looks for the server this often, at most
REDIAL_S: Final = 1.0
#: behind its caller's return, its member's, and the end of its run, a call that a member has received is answered
ANSWERED_S: Final = 2.0
#: none is to wait for so long
PATIENCE_S: Final = 120.0
CALLS_S: Final = 6.0


def now_s() -> float:
    return asyncio.get_running_loop().time()


class Made(msgspec.Struct, eq=False):
    """A call: who made it, and what became of it."""

    number: int
    caller: SimulatedConnection
    takes_s: float
    is_of_sdk: bool
    sent_s: float
    came: list[tuple[float, Desk]] = []
    began: list[tuple[float, Desk]] = []
    ended_s: float = 0.0
    told: str = ""
    told_s: float = 0.0


class Desk:
    """A member and its program, which works on each call for as long as its data say."""

    def __init__(self, world: World, at: int) -> None:
        self.world = world
        self.link = world.connect(f"member-{at}")
        self.messenger = Messenger(cast(Connection, self.link), NAME, world.dice.choice((1, 2, 4)))
        self.messenger.program = cast(Program, self)
        on_call = self.messenger.member.on_call

        def noted(call: Call, at_s: float) -> None:
            world.calls[int(call.data.split()[0])].came.append((now_s(), self))
            on_call(call, at_s)

        cast(Any, self.messenger.member).on_call = noted

    def send(self, head: ToProgram, body: bytes = b"") -> None:
        if not head.call:
            return
        call = self.world.calls[int(body.split()[0])]
        call.began.append((now_s(), self))
        asyncio.get_running_loop().call_later(call.takes_s, self._answer, head.call, call)

    def _answer(self, number: int, call: Made) -> None:
        call.ended_s = now_s()
        self.messenger.on_frame(FromProgram(answer=number), str(call.number).encode())

    def send_all(self, frames: Sequence[tuple[ToProgram, bytes]]) -> None:
        for head, body in frames:
            self.send(head, body)

    def hold(self, on: bool) -> None: ...

    def take_back(self) -> list[int]:
        return []


class Bus:
    """What connects a client of the SDK."""

    where = "simulated"
    upkeep = None

    def __init__(self, world: World, name: str) -> None:
        self.link = world.connect(name)

    async def connect(self, name: str, on_state: Callable[[State], None], on_error: Callable[[BusError], None]) -> Link:
        return self.link

    async def release(self, link: Link) -> None:
        await self.link.close()


class World:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.dice = random.Random(seed)
        self.bus = SimulatedBus(FaultyNetwork(seed, delay_ms=(0.1, WAY_S * 1000)))
        self.wrong: list[str] = []
        self.kinds = Counter[str]()
        self.calls: dict[int, Made] = {}
        self.servers = self.dice.choice((1, 1, 3))
        self.server_of: dict[SimulatedConnection, int] = {}
        self.breaks: dict[SimulatedConnection, list[tuple[float, float]]] = {}  # of each link, from when to when
        self.is_down = [False] * self.servers
        self.desks = [Desk(self, at) for at in range(self.dice.choice((1, 2, 4)))]

    def connect(self, name: str) -> SimulatedConnection:
        link = self.bus.connect(name)
        self.server_of[link] = self.dice.randrange(self.servers)
        self.breaks[link] = []
        return link

    # -- calls

    def make(self, caller: SimulatedConnection, *, is_of_sdk: bool) -> Made:
        takes_s = self.dice.choice((0.001, 0.02, 0.2, 0.2, 1.0, 3.0)) * self.dice.uniform(0.7, 1.3)
        call = Made(len(self.calls), caller, takes_s, is_of_sdk, now_s())
        self.calls[call.number] = call
        return call

    async def sdk(self, at: int) -> None:
        wire = Bus(self, f"sdk-{at}")

        async def calls(client: AsyncClient) -> None:
            while now_s() < CALLS_S:
                call = self.make(wire.link, is_of_sdk=True)
                try:
                    told = await client.call(NAME.service, f"{call.number}", timeout=PATIENCE_S)
                except TimedOut:
                    call.told = "hung"
                except Unreachable as error:
                    call.told = error.code
                except (CallFailed, CallRefused) as error:
                    call.told = error.code
                except ClientError as error:
                    call.told = f"WRONG {error!r}"
                else:
                    call.told = "right" if told == str(call.number).encode() else f"WRONG {told!r}"
                call.told_s = now_s()
                await asyncio.sleep(self.dice.uniform(0, 0.3))

        async with AsyncClient(transport=cast(Any, wire)) as client:
            await asyncio.gather(*(calls(client) for _ in range(self.dice.choice((1, 4)))))

    async def bare(self, at: int) -> None:
        link, waiting = self.connect(f"bare-{at}"), dict[str, asyncio.Future[Delivery]]()

        def heard(delivery: Delivery) -> None:
            future = waiting.pop(delivery.subject, None)
            if future is not None:
                future.set_result(delivery)

        await link.subscribe(f"_INBOX.bare{at}.*", heard)

        async def calls() -> None:
            while now_s() < CALLS_S:
                call, reply = self.make(link, is_of_sdk=False), f"_INBOX.bare{at}.{len(self.calls)}"
                waiting[reply] = asyncio.get_running_loop().create_future()
                await link.publish(NAME.subject, f"{call.number}".encode(), reply, {})
                try:
                    told = await asyncio.wait_for(waiting[reply], PATIENCE_S)
                except TimeoutError:
                    call.told = "hung"
                else:
                    headers = told.headers or {}
                    kind = headers.get(ERROR) or ("nobody" if STATUS_HEADER in headers else "")
                    call.told = kind or ("right" if told.data == str(call.number).encode() else f"WRONG {told!r}")
                call.told_s = now_s()
                await asyncio.sleep(self.dice.uniform(0, 0.3))

        await asyncio.gather(*(calls() for _ in range(self.dice.choice((1, 4)))))

    # -- breaks

    async def cut(self, link: SimulatedConnection, for_s: float) -> None:
        """Cut a link, and join it again once there is a server."""
        if not link.is_connected:
            return
        began_s = now_s()
        link.lose()
        await asyncio.sleep(for_s)
        while self.is_down[self.server_of[link]]:
            self.server_of[link] = self.dice.randrange(self.servers)
            await asyncio.sleep(self.dice.uniform(0.01, REDIAL_S / 2))
        self.breaks[link].append((began_s, now_s()))
        link.restore()

    async def stop(self, server: int, for_s: float) -> None:
        """Stop a server: what is on its way through it is lost, and so are the links to it."""
        self.is_down[server] = True
        cut = [link for link, its in self.server_of.items() if its == server and link.is_connected]
        self.bus.network.isolate(*(link.name for link in cut))
        asyncio.get_running_loop().call_later(2 * WAY_S, self.bus.network._isolated.clear)

        async def down() -> None:
            await asyncio.sleep(for_s)
            self.is_down[server] = False

        await asyncio.gather(down(), *(self.cut(link, self.dice.uniform(0.005, REDIAL_S / 2)) for link in cut))

    async def happen(self) -> None:
        for _ in range(self.dice.choice((1, 2, 3))):
            await asyncio.sleep(self.dice.uniform(0.3, 2.0))
            for_s = self.dice.choice((0.005, 0.05, 0.5, 2.0, 5.0))
            some = self.dice.choice(("server", "members", "callers", "both"))
            if some == "server":
                await self.stop(self.dice.randrange(self.servers), for_s)
                continue
            names = {"members": ("member",), "callers": ("sdk", "bare"), "both": ("member", "sdk", "bare")}[some]
            links = [link for link in self.server_of if link.name.startswith(names) and self.dice.random() < 0.7]
            cuts = (self.cut(link, for_s * self.dice.uniform(0.5, 1.0)) for link in links)
            await asyncio.gather(*cuts)

    async def play(self) -> None:
        for desk in self.desks:
            await desk.messenger.open()
            await desk.messenger.take()
        callers: list[Coroutine[Any, Any, None]] = [self.sdk(at) for at in range(self.dice.choice((1, 2)))]
        callers += [self.bare(at) for at in range(self.dice.choice((1, 2)))]
        await asyncio.gather(*callers, self.happen())
        for desk in self.desks:
            await desk.messenger.close()

    # -- what has to hold

    def judge(self) -> None:
        for call in self.calls.values():
            self.kinds[f"{'sdk' if call.is_of_sdk else 'bare'} {call.told or 'nothing'}"] += 1
            what = f"call {call.number} of {call.caller.name}, sent at {call.sent_s:.3f}"
            if len(call.began) > 1:
                self.wrong.append(f"{what}, ran {len(call.began)} times")
            if not call.told or call.told.startswith("WRONG"):
                self.wrong.append(f"{what}: {call.told}")
            if call.is_of_sdk and call.told == "hung":
                self.wrong.append(f"{what}, hung to its time-out")
            if call.began:
                self._judge_begun(call, what)
            elif call.came and call.told == "hung":
                self.kinds["lost in a member's hands"] += 1

    def _judge_begun(self, call: Made, what: str) -> None:
        [(began_s, desk)] = call.began[:1]
        back_s = [ends for link in (call.caller, desk.link) for _, ends in self.breaks[link] if ends <= call.told_s]
        due_s = max(call.ended_s, *back_s, 0.0) + ANSWERED_S
        if call.told != "right" and not self._is_excused(call, desk):
            self.wrong.append(
                f"{what}, ran from {began_s:.3f} to {call.ended_s:.3f} at {desk.link.name}, and is {call.told} at "
                f"{call.told_s:.3f}; breaks: {self.breaks[call.caller]}, {self.breaks[desk.link]}"
            )
        elif call.told == "right" and call.told_s > due_s:
            self.wrong.append(
                f"{what}, ended at {call.ended_s:.3f}, was answered at {call.told_s:.3f}, due {due_s:.3f}"
            )

    def _is_excused(self, call: Made, desk: Desk) -> bool:
        """Of a bare caller whose link alone broke: what the server wrote into that link, and calls without receipts."""
        if call.is_of_sdk:
            return False
        quick = call.came and call.ended_s - call.came[-1][0] < RECEIPT_S
        for begins, ends in self.breaks[call.caller]:
            if begins - WAY_S <= call.ended_s <= (ends if quick else begins) + WAY_S:
                return True
        return False

    def run(self) -> None:
        SimulatedClock().run(self.play())
        self.judge()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.release.breaks.simulated", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first of them")
    asked = parser.parse_args()
    kinds, failed = Counter[str](), 0
    for seed in range(asked.first, asked.first + asked.seeds):
        world = World(seed)
        world.run()
        kinds += world.kinds
        if world.wrong:
            failed += 1
            print(f"seed {seed}: {len(world.wrong)} wrong, as {world.wrong[0]}", flush=True)
    print(f"{asked.seeds} worlds, {sum(kinds.values())} calls: {dict(sorted(kinds.items()))}; {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
