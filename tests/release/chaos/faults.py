"""The faults: each hits something that lives, undoes itself after a while, and says what it did.

Several are under way at once, on different targets; what is hit, and for how long, comes from the seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Final

from tests.disk import fill
from tests.release.chaos.world import Behind, World
from tests.system.live.stack import Caller

#: between the beginnings of two faults, at random
GAP_S: Final = (0.2, 1.8)
#: a process that was killed is started again after so long, at random
AWAY_S: Final = (0.1, 1.5)
AT_ONCE_MAX: Final = 3
#: a server that is away for long in a cluster would leave no majority with another one
PAUSE_OVER_LEASE: Final = (1.05, 1.35)
CUT_S: Final = (1.0, 7.0)
FULL_S: Final = (2.0, 8.0)

Say = Callable[[str], None]


class Faults:
    """Runs a plan: so many of each kind, in an order of the seed's own. `done` counts those that hit their target."""

    def __init__(self, world: World, caller: Caller, plan: dict[str, int], seed: str, say: Say) -> None:
        self.done: Counter[str] = Counter()
        self._world = world
        self._caller = caller
        self._random = random.Random(f"{seed} faults")
        self._say = say
        self._began_s = time.monotonic()
        self._busy: set[str] = set()
        self._freed = asyncio.Event()
        self._kinds = [kind for kind, count in plan.items() for _ in range(count)]
        self._random.shuffle(self._kinds)
        self._acts: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "leader-kill": self._kill_leader,
            "server-kill": self._kill_server,
            "worker-kill": self._kill_worker,
            "pause": self._pause,
            "partition": self._partition,
            "both-leaders": self._kill_both_leaders,
            "disk-full": self._fill_disk,
        }

    async def run(self) -> None:
        """Until the plan is done and every fault is undone. Raises what a fault raised."""
        async with asyncio.TaskGroup() as group:
            for kind in self._kinds:
                await asyncio.sleep(self._random.uniform(*GAP_S))
                while len(self._busy) >= AT_ONCE_MAX:
                    self._freed.clear()
                    await self._freed.wait()
                await self._begin(kind, group)

    async def _begin(self, kind: str, group: asyncio.TaskGroup) -> None:
        """Start one; the next begins once this one has found its target, so that no two take the same."""
        found = asyncio.Event()
        task = group.create_task(self._one(kind, found))
        waiting = asyncio.create_task(found.wait())
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()

    async def _one(self, kind: str, found: asyncio.Event) -> None:
        self._found = found
        await self._acts[kind]()
        self.done[kind] += 1

    @contextlib.asynccontextmanager
    async def _hit(self, *names: str) -> Any:
        """Take the targets for this fault alone, and let the next one begin."""
        self._busy.update(names)
        self._found.set()
        try:
            yield
        finally:
            self._busy.difference_update(names)
            self._freed.set()

    def _tell(self, text: str) -> None:
        self._say(f"{time.monotonic() - self._began_s:7.1f} s  {text}")

    async def _free(self, choose: Callable[[], list[Behind]]) -> Behind:
        """One of these that no fault has now; waits until there is one."""
        while True:
            free = [each for each in choose() if each.name not in self._busy]
            if free:
                return self._random.choice(free)
            self._freed.clear()
            await self._freed.wait()

    async def _leader(self) -> Behind:
        """A leader that no fault has now."""
        while True:
            leader = await self._world.leader(self._caller)
            if leader.name not in self._busy:
                return leader
            self._freed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._freed.wait(), 1.0)

    async def _away(self) -> None:
        await asyncio.sleep(self._random.uniform(*AWAY_S))

    # ------------------------------------------------------------------------------------------------------ kills

    async def _kill_leader(self) -> None:
        leader = await self._leader()
        async with self._hit(leader.name):
            assert leader.process is not None
            self._tell(f"kill leader {leader.name}")
            await leader.process.kill()
            await self._away()
            await self._world.start_scheduler(leader)

    async def _kill_worker(self) -> None:
        worker = await self._free(lambda: self._world.workers)
        what = self._random.choice(("agent", "supervisor", "both"))
        async with self._hit(worker.name):
            self._tell(f"kill {what} of {worker.name}")
            supervised = await self._world.supervisor_of(worker) if what != "agent" else None
            # both at once are proven over by their cgroups; where there are none that is not promised
            if what == "both" and supervised is not None and supervised.cgroup is None:
                what = "supervisor"
            if supervised is not None:
                supervised.kill()
                await supervised.wait_gone()
                supervised.close()
            if what != "supervisor":
                assert worker.process is not None
                await worker.process.kill()
                await self._away()
                await self._world.start_worker(worker)

    async def _kill_server(self) -> None:
        number = self._random.randrange(self._world.servers.count)
        await self._server_away(number)

    async def _server_away(self, number: int) -> None:
        while "server" in self._busy:  # two of three away would be no majority: promised is one
            self._freed.clear()
            await self._freed.wait()
        async with self._hit("server"):
            self._tell(f"kill server {number}")
            await self._world.servers.kill(number)
            await self._away()
            await self._world.servers.start(number)

    async def _kill_both_leaders(self) -> None:
        """The scheduler that leads and the server that leads the ledger's stream, at once: one machine's death."""
        leader = await self._leader()
        number = await self._world.servers.leads(self._world.made.subjects.ledger_stream)
        assert leader.process is not None
        self._tell(f"kill leader {leader.name} and server {number}, which leads the ledger")
        await asyncio.gather(self._kill_now(leader), self._server_away(number))

    async def _kill_now(self, leader: Behind) -> None:
        async with self._hit(leader.name):
            assert leader.process is not None
            await leader.process.kill()
            await self._away()
            await self._world.start_scheduler(leader)

    # --------------------------------------------------------------------------------------- pauses and partitions

    async def _pause(self) -> None:
        """SIGSTOP for longer than the lease, then SIGCONT: it knows nothing of the time between."""
        lasts_s = self._world.numbers["lease_s"] * self._random.uniform(*PAUSE_OVER_LEASE)
        what = self._random.choice(("leader", "leader", "agent", "agent", "agent", "server"))
        if what == "server":
            while "server" in self._busy:
                self._freed.clear()
                await self._freed.wait()
            number = self._random.randrange(self._world.servers.count)
            async with self._hit("server"):
                self._tell(f"stop server {number} for {lasts_s:.1f} s")
                self._world.servers.send(number, signal.SIGSTOP)
                try:
                    await asyncio.sleep(lasts_s)
                finally:
                    self._world.servers.send(number, signal.SIGCONT)
            return
        target = await self._leader() if what == "leader" else await self._free(lambda: self._world.workers)
        async with self._hit(target.name):
            process = target.process
            assert process is not None
            self._tell(f"stop {what} {target.name} for {lasts_s:.1f} s")
            process.stop()
            try:
                await asyncio.sleep(lasts_s)
            finally:
                process.wake()

    async def _partition(self) -> None:
        what = self._random.choice(("leader", "worker", "worker"))
        target = await self._leader() if what == "leader" else await self._free(lambda: self._world.workers)
        lasts_s = self._random.uniform(*CUT_S)
        async with self._hit(target.name):
            self._tell(f"cut {what} {target.name} off for {lasts_s:.1f} s")
            target.cut()
            try:
                await asyncio.sleep(lasts_s)
            finally:
                target.heal()

    # ------------------------------------------------------------------------------------------------------- disk

    async def _fill_disk(self) -> None:
        """Not a byte is left for a while; then there is room, and a server that gave up on its store starts again."""
        disk = self._world.disk
        assert disk is not None
        while "server" in self._busy:
            self._freed.clear()
            await self._freed.wait()
        async with self._hit("server"):
            self._tell("fill the disk")
            filler = await asyncio.to_thread(fill, disk)
            try:
                await asyncio.sleep(self._random.uniform(*FULL_S))
            finally:
                filler.unlink()
            await self._world.servers.kill(0)
            await self._world.servers.start(0)
