"""What goes wrong, one thing after another: processes, machines, the network, the server, disks, and operators."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Callable, Coroutine
from typing import Any, Final

from moorage.bus.errors import BusError
from moorage.schemas.subjects import Subjects
from moorage.testing.bus.bus import SERVER
from moorage.testing.bus.network import Faults
from moorage.testing.bus.streams import Stream
from moorage.worker.devices.readers.faults import Fault, Gravity
from tests.release.sim.callers import ANSWER_S, TENANTS
from tests.release.sim.cluster import REORDER_MS, Cluster

SUBJECTS: Final = Subjects()
#: what a doomed process still does before it dies
DOOMED_ACTS_MAX: Final = 60

#: kinds of accident in half of the worlds: where all kinds happen, a rare sequence of one of them hardly ever does
#: ("Swarm testing", Groce and others, ISSTA 2012)
FEW_ACTS: Final = 4
#: a standby that finds no snapshot looks again some times, and gives up so long after its last look at most
LOOKED_S_MAX: Final = 5.0


class Accidents:
    """`run` until cancelled, then `heal`. `world.faults` scales how much goes wrong."""

    def __init__(self, world: Cluster) -> None:
        self.world = world
        self.rng = world.rng
        self._lost: Stream | None = None  # the snapshots' stream, while it is
        self._put_back_s = -math.inf
        self._asked: list[asyncio.Task[None]] = []
        self._acts: tuple[Callable[[], object], ...] = (
            self.kill_scheduler,
            self.crash_between_two_acts,
            self.crash_between_two_acts,
            self.stop_somebody,
            self.stop_somebody,
            self.kill_agent,
            self.kill_agent,
            self.kill_supervisor,
            self.reboot,
            self.partition,
            self.partition,
            self.server_gap,
            self.reconnect,
            self.lose_ack,
            self.operate_worker,
            self.drain,
            self.device_fails,
            self.operate_job,
            self.operate_tenant,
            self.guarantee,
            self.cancel_a_preemptor,
            self.wall_clock_jumps,
            self.junk,
            self.disk_full,
            self.stream_full,
            self.lose_snapshots,
        )
        if self.rng.random() < 0.5:
            self._acts = tuple(self.rng.sample(self._acts, FEW_ACTS))

    def snapshots_were_lost(self) -> bool:
        """Now, or when whoever gives up now has looked for them last."""
        lately = asyncio.get_running_loop().time() - self._put_back_s < LOOKED_S_MAX
        return self._lost is not None or lately

    async def run(self) -> None:
        faults, rng = self.world.faults, self.rng
        if not faults:
            return
        self.world.network.faults = Faults(
            drop=rng.choice((0, 0, 0.01, 0.05)) * faults,
            duplicate=rng.choice((0, 0.02, 0.1)) * faults,
            reorder=rng.choice((0, 0.02, 0.1)) * faults,
            reorder_ms=rng.choice(REORDER_MS),
            delay_ms=(0.1, rng.choice((1, 20, 300))),
            lose_ack=rng.choice((0, 0.02, 0.1)) * faults,
            deny_ack=rng.choice((0, 0.5)),
        )
        while True:
            await asyncio.sleep(rng.expovariate(faults / 4.0))
            act = rng.choice(self._acts)
            self.world.did[act.__name__] += 1
            act()

    def heal(self) -> None:
        """Faults stop; who is dead comes back, who is stopped goes on, disks have room, operators take all back."""
        world = self.world
        world.network.heal()
        world.network.faults = Faults(delay_ms=(0.1, 2))
        for machine in world.machines.values():
            machine.disk_is_full = False
            machine.hurry()
        for account in ("users", "ledger"):
            for stream in world.bus.streams(account).values():
                stream.is_full = False
        world.come_back()
        for link in world.bus.connections:
            link.restore()
        if self._lost is not None:
            self._restore_snapshots(self._lost)
        for task in self._asked:
            task.cancel()
        self.take_back()

    def take_back(self) -> None:
        """What operators did is undone. Once more when the network holds no message of theirs any more."""
        world = self.world
        for name in world.hosts:  # one that never joined is not known, and not cordoned
            world.ask_admin("uncordon", {"worker": name, "by": "sim"})
        for tenant in TENANTS:
            world.ask_admin("release", {"tenant": tenant, "by": "sim"})
            world.ask_admin("limit", {"tenant": tenant, "gpus": 0, "jobs": 0, "by": "sim"})
            world.ask_admin("share", {"tenant": tenant, "weight": 0, "gpus": 0, "by": "sim"})
        for tenant, job in sorted(self.world.judge.accepted):
            if (known := self.world.judge.state.job(tenant, job)) is not None and not known.over:
                world.ask_admin("release", {"tenant": tenant, "job": job, "by": "sim"})

    # ----------------------------------------------------------------------------------------- processes, machines

    def kill_scheduler(self) -> None:
        self.world.kill(self.rng.choice(self.world.schedulers), self.rng.choice((0.2, 3.0, 15.0)))

    def crash_between_two_acts(self) -> None:
        """Whatever it was about to send or write does not happen, what it did before has."""
        world, rng = self.world, self.rng
        name = rng.choice((*world.schedulers, *world.schedulers, *world.hosts))
        process, back_s = world.processes[name], rng.choice((0.2, 3.0))
        process.doom(rng.randint(1, DOOMED_ACTS_MAX), lambda: world.kill_process(name, process, back_s))

    def kill_agent(self) -> None:
        self.world.kill(self._a_worker(), self.rng.choice((0.2, 3.0, 20.0, 45.0)))

    def kill_supervisor(self) -> None:
        self.world.machines[self._a_worker()].kill_supervisor()

    def reboot(self) -> None:
        name = self._a_worker()
        self.world.machines[name].reboot()
        self.world.kill(name, self.rng.uniform(2, 40))

    def stop_somebody(self) -> None:
        """SIGSTOP: from the blink of an eye to more than any lease."""
        world = self.world
        process = world.processes[self.rng.choice((*world.schedulers, *world.schedulers, *world.hosts))]
        if not process.is_dead and not process.is_stopped:
            process.stop()
            world.later(self.rng.choice((0.1, 2.0, 6.0, 30.0, 60.0)), process.go_on)

    def wall_clock_jumps(self) -> None:
        self.world.clock.jump_wall(self.rng.choice((-3600, -5, 5, 3600)))

    def device_fails(self) -> None:
        """A driver tells of an event: what runs there leaves it, and it is on probation before it is used again."""
        name = self._a_worker()
        process, inventory = self.world.processes[name], self.world.machines[name].inventory
        if inventory is not None and (devices := inventory.devices()):
            fault = Fault("xid", Gravity.FAILED, "an event of the simulation")
            process.call(inventory.happen, self.rng.randrange(len(devices)), fault)

    # --------------------------------------------------------------------------------------- the network, the server

    def partition(self) -> None:
        world, rng = self.world, self.rng
        parties = (*world.schedulers, *world.hosts)
        cut = [name for name in parties if rng.random() < 0.3]
        rest = [name for name in (*parties, "callers") if name not in cut]
        world.network.partition(cut, [*rest, SERVER])
        world.later(rng.choice((1.0, 8.0, 40.0)), world.network.partition)

    def server_gap(self) -> None:
        """No JetStream for a while, as in a change of its leader; core messages go on."""
        world = self.world
        world.network.partition([SERVER], [*world.schedulers, *world.hosts, "callers"])
        world.later(self.rng.uniform(0.5, 8), world.network.partition)

    def reconnect(self) -> None:
        """The server restarts: every connection is lost, and back a little later."""
        for link in self.world.bus.connections:
            link.lose()
            self.world.later(self.rng.uniform(0.1, 3), link.restore)

    def lose_ack(self) -> None:
        self.world.network.lose_next_ack(self.rng.choice(self.world.schedulers), self.rng.choice((1, 1, 3)))

    def junk(self) -> None:
        """Somebody without accounts writes into the ledger (H37)."""
        link = self.world.bus.connect("junk", account="ledger")
        subject = self.rng.choice((SUBJECTS.ledger_record, SUBJECTS.ledger_epoch, SUBJECTS.ledger_snapshot))
        self.spawn(link.send([(subject, self.rng.randbytes(40), "")]))

    # ------------------------------------------------------------------------------------------------------- storage

    def disk_full(self) -> None:
        """A worker's journal takes nothing, or half of a record: the agent must not go on, and comes back in time."""
        machine = self.world.machines[self._a_worker()]
        machine.disk_is_full = True
        self.world.later(self.rng.choice((2.0, 30.0)), setattr, machine, "disk_is_full", False)

    def stream_full(self) -> None:
        """The server refuses what one stream would store, for a while."""
        account, name = self.rng.choice(
            (
                ("ledger", SUBJECTS.ledger_stream),
                ("ledger", SUBJECTS.snapshot_stream),
                ("users", SUBJECTS.request_stream),
                ("users", SUBJECTS.history_stream),
            )
        )
        stream = self.world.bus.streams(account).get(name)
        if stream is not None:
            stream.is_full = True
            self.world.later(self.rng.choice((1.0, 5.0, 20.0)), setattr, stream, "is_full", False)

    def lose_snapshots(self) -> None:
        """The newest snapshot is lost for good, or all are until they are put back."""
        streams = self.world.bus.streams("ledger")
        stream = streams.get(SUBJECTS.snapshot_stream)
        named = self.world.judge.state.snapshot
        if stream is None or named is None or self._lost is not None:
            return
        if self.rng.random() < 0.5:
            if not self.world.did["lost the newest snapshot"]:  # of two that are lost nobody is promised anything
                self.world.did["lost the newest snapshot"] += 1
                stream.purge(SUBJECTS.snapshot(named[0]), 0)
            return
        self._lost = streams.pop(SUBJECTS.snapshot_stream)
        self.world.later(self.rng.choice((3.0, 15.0)), self._restore_snapshots, self._lost)

    def _restore_snapshots(self, stream: Stream) -> None:
        """They are put back, beside what was written meanwhile."""
        streams = self.world.bus.streams("ledger")
        if self._lost is not stream:
            return  # they were put back already
        anew, stream.is_full = streams.get(SUBJECTS.snapshot_stream), False
        for message in anew.messages.values() if anew is not None else ():
            stream.append(message.subject, message.data, message.headers)
        streams[SUBJECTS.snapshot_stream] = stream
        self._lost, self._put_back_s = None, asyncio.get_running_loop().time()

    # ----------------------------------------------------------------------------------------------------- operators

    def operate_worker(self) -> None:
        verb = self.rng.choice(("cordon", "drain", "uncordon", "uncordon", "release"))
        self._operate(verb, {"worker": self._a_worker()})

    def drain(self) -> None:
        """Now or later, with a deadline or without, for a while or until somebody opens the worker again."""
        rng = self.rng
        begins = rng.choice(({}, {"from_s": 10.0}))
        leaves = rng.choice(({}, {"within_s": 0.0}, {"within_s": 5.0}))
        ends = rng.choice(({}, {"for_s": 20.0}))
        self._operate("drain", {"worker": self._a_worker(), **begins, **leaves, **ends})

    def operate_job(self) -> None:
        rng = self.rng
        asked = sorted(self.world.judge.accepted)
        if asked:
            tenant, job = rng.choice(asked)
            verb = rng.choice(("hold", "release", "requeue", "priority"))
            more = {"priority": rng.choice((10, 90))} if verb == "priority" else {}
            self._operate(verb, {"tenant": tenant, "job": job, **more})

    def operate_tenant(self) -> None:
        verb = self.rng.choice(("hold", "release", "limit", "share"))
        more = {"gpus": self.rng.choice((0, 1, 3))} if verb in ("limit", "share") else {}
        self._operate(verb, {"tenant": self.rng.choice(TENANTS), **more})

    def guarantee(self) -> None:
        """A tenant is promised GPUs: what others borrow of them is to come back."""
        share = {"weight": self.rng.choice((1, 3)), "gpus": self.rng.choice((1, 2))}
        self._operate("share", {"tenant": self.rng.choice(TENANTS), **share})

    def cancel_a_preemptor(self) -> None:
        """Whoever others are ending for is wanted no more."""
        waiting = [job for job in self.world.judge.state.preempting.values() if job.preempts is not None]
        if waiting:
            job = self.rng.choice(waiting)
            link, payload = self.world.connect("operator"), json.dumps({"job": job.name}).encode()
            self.spawn(link.request(SUBJECTS.api(job.tenant, "cancel"), payload, ANSWER_S))
            self.world.did["cancelled a preemptor"] += 1

    def _operate(self, verb: str, body: dict[str, Any]) -> None:
        link, payload = self.world.connect("operator"), json.dumps({**body, "by": "sim"}).encode()
        self.spawn(link.request(SUBJECTS.admin(verb), payload, ANSWER_S))

    # -------------------------------------------------------------------------------------------------------- within

    def _a_worker(self) -> str:
        return self.rng.choice(list(self.world.hosts))

    def spawn(self, work: Coroutine[Any, Any, object]) -> None:
        self._asked.append(asyncio.create_task(_quiet(work)))


async def _quiet(work: Coroutine[Any, Any, object]) -> None:
    with contextlib.suppress(BusError):
        await work
