"""The agent over a real nats-server, with a scripted leader and simulated devices; nothing runs but the agent."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from moorage.bus.connection import connect
from moorage.schemas.attempt import AttemptName
from moorage.schemas.codec import encode
from moorage.schemas.errors import Refused, problem
from moorage.schemas.frames import Output, Place, Report, ReportFrame
from moorage.schemas.job import Request
from moorage.system.simulated_hosts import simulated_hosts
from moorage.testing.conformance.leader import ScriptedLeader
from moorage.worker.agent.agent import MEMORY_COUNTED, Agent
from moorage.worker.agent.fleet_host import FleetHost
from moorage.worker.agent.journal import MemoryJournal
from moorage.worker.devices.readers.host import HostFacts
from moorage.worker.devices.readers.simulated import SimulatedInventory
from moorage.worker.driver import Assignment, Driver, Living
from moorage.worker.drivers.noop import NoopDriver
from moorage.worker.session.restoring import device_names
from moorage.worker.settings import WorkerSettings
from tests.servers import MortalServer
from tests.waiting import until

FACTS = HostFacts("w1", "host-1", "machine-1", "boot-1", 4000, 8192)


def body(*argv: str, driver: str = "noop", gpu: Any = None, **fields: Any) -> bytes:
    return encode({"gpu": {} if gpu is None else gpu, "run": {"driver": driver, "argv": list(argv)}, **fields})


def name_of(job: str = "a", replica: int = 0, fence: int = 10) -> AttemptName:
    return ("acme", job, replica, 1, fence)


def place(name: AttemptName, request: bytes, slots: tuple[int, ...] = (0,), **fields: Any) -> Place:
    mode = fields.get("mode", "exclusive" if slots else "none")
    return Place(*name, list(slots), mode, fields.get("hold", False), request)


class World:
    """A host on one connection, with its leader."""

    def __init__(self, host: FleetHost, leader: ScriptedLeader, tmp_path: Path, prefix: str) -> None:
        self.host = host
        self.leader = leader
        self.tmp_path = tmp_path
        self.prefix = prefix

    async def add(
        self, worker: str = "w1", *, driver: Driver | None = None, journal: MemoryJournal | None = None, **fields: Any
    ) -> Agent:
        settings = WorkerSettings(
            self.tmp_path, worker, self.prefix, modes=("exclusive", "mps", "time-slice"), **fields
        )
        inventory = SimulatedInventory(simulated_hosts("4xH100", name=worker)[0])
        agent = Agent(
            self.host, worker, settings, FACTS, inventory, [driver or NoopDriver()], journal or MemoryJournal()
        )
        await self.host.add(agent)
        return agent


@contextlib.asynccontextmanager
async def world(url: str, prefix: str, tmp_path: Path, **numbers: float) -> AsyncIterator[World]:
    async with ScriptedLeader(url, prefix, **numbers) as leader:
        connection = await connect(url, "agent under test")
        host = FleetHost(connection, prefix)
        await host.open()
        try:
            yield World(host, leader, tmp_path, prefix)
            if host.failed.done():
                host.failed.result()
        finally:
            await host.close()
            await connection.close()


async def test_a_worker_that_gives_its_id_up_ends_its_process_with_that_error(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    connection = await connect(nats_url, "agent under test")
    host = FleetHost(connection, unique)
    await host.open()
    try:
        host.give_up(problem("worker-id-in-use", "taken", next="--id"))
        host.give_up(problem("worker-id-in-use", "taken again"))
        with pytest.raises(Refused, match=r"taken$"):
            await host.serve(asyncio.Event())
    finally:
        await host.close()
        await connection.close()


async def test_a_placement_becomes_one_frame_of_reports(nats_url: str, unique: str, tmp_path: Path) -> None:
    async with world(nats_url, unique, tmp_path) as w:
        await w.add()
        seat = await w.leader.joined("w1")
        await w.leader.want("w1", place(name_of(), body()))
        await w.leader.await_report("w1", "freed", name_of())
        assert [[report.kind for report in frame.reports] for frame in seat.frames] == [["ran", "freed"]]
        assert seat.joins[0].hello.gpu_pool[0].name.startswith("NVIDIA H100")
        assert seat.joins[0].machine == "machine-1"


class Doubtful(NoopDriver):
    """A driver with an attempt of an earlier agent whose end is not proven, and that never comes."""

    def __init__(self) -> None:
        super().__init__()
        self.forgotten: list[AttemptName] = []

    async def open(self) -> list[Living]:
        return [Living(name_of(), "stuck")]

    def end(self, name: AttemptName, grace_s: float, why: str) -> None:
        pass

    def forget(self, names: list[AttemptName]) -> None:
        self.forgotten += names


async def test_a_stuck_attempt_that_an_operator_released_keeps_no_restarted_worker_out(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    """The agent died before the leader's answer, on which it would have had the driver forget the attempt."""
    driver, journal = Doubtful(), MemoryJournal()
    journal.placed([place(name_of(), body())])
    journal.reports(ReportFrame("of-before", 1, [Report("quarantined", *name_of(), 0, "0")]))
    journal.answered(1)
    over = [Report("exited", *name_of(), -9, "lost"), Report("freed", *name_of())]
    journal.reports(ReportFrame("of-before", 2, over))
    async with world(nats_url, unique, tmp_path) as w:
        agent = await w.add(driver=driver, journal=journal)
        seat = await w.leader.joined("w1")
        assert (seat.joins[0].reports, seat.joins[0].holding) == (over, [])
        assert driver.forgotten == [name_of()]
        assert not any(state.quarantine for state in agent.pool.slot_states()), "they were released, too"


async def test_memory_that_was_in_use_after_an_end_is_looked_at_again_by_the_next_agent(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    """Its driver never had the attempt, and it is in quarantine: it was taken for one that may still run."""
    journal = MemoryJournal()
    journal.join(1, [], device_names(SimulatedInventory(simulated_hosts("4xH100", name="w1")[0]).devices()))
    journal.placed([place(name_of(), body(), (0, 1))])
    end = Report("exited", *name_of(), -9, "end")
    journal.reports(ReportFrame("of-before", 1, [end, Report("quarantined", *name_of(), 0, "1")]))
    journal.answered(1)
    async with world(nats_url, unique, tmp_path) as w:
        agent = await w.add(journal=journal)
        seat = await w.leader.joined("w1")
        await w.leader.await_report("w1", "freed", name_of())
        assert seat.joins[0].reports[0] == end, "the ledger has it already, unless a backup was restored"
        await until(lambda: not agent.pool.busy_slots(), what="both devices are in use again")


class Unlimited(NoopDriver):
    """A driver whose host has no memory controller."""

    capabilities = replace(NoopDriver.capabilities, memory_limit=False)


async def test_memory_that_is_counted_and_not_enforced_is_told_to_who_follows_the_job(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    async with world(nats_url, unique, tmp_path) as w:
        await w.add(driver=Unlimited())
        await w.leader.joined("w1")
        told: list[tuple[str, bytes]] = []
        asked = await connect(nats_url, "who follows")
        try:
            await asked.subscribe(f"{unique}.log.>", lambda msg: told.append((msg.subject, msg.data)))
            asking = body(resources={"memory_mib": 64})
            for job, request in (("asks-not", body(resources={"cpu_milli": 100})), ("asks", asking)):
                await w.leader.want("w1", place(name_of(job), request, ()))
                await w.leader.await_report("w1", "freed", name_of(job))
            await until(lambda: told, what="the note about the second job, behind all about the first")
            notes = {at: msgspec.json.decode(data, type=Output).note for at, data in told if b"note" in data}
        finally:
            await asked.close()
        assert notes == {f"{unique}.log.acme.asks.0": MEMORY_COUNTED}


class Careless(NoopDriver):
    """A newcomer's: its check takes for granted what a request holds."""

    def check(self, request: Request) -> None:
        assert float(request.workload.argv[1]) >= 0


async def test_a_check_that_fails_refuses_that_placement_and_ends_no_agent(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    async with world(nats_url, unique, tmp_path) as w:
        await w.add(driver=Careless())
        await w.leader.joined("w1")
        await w.leader.want(
            "w1", place(name_of("odd"), body("hang")), place(name_of("good", fence=11), body("exit", "0"), (1,))
        )
        refused = await w.leader.await_report("w1", "refused", name_of("odd"))
        assert refused.detail.startswith("not-here: the driver noop broke: IndexError: list index out of range (")
        await w.leader.await_report("w1", "freed", name_of("good", fence=11))


async def test_the_rules_by_tenant_are_told_with_the_join_and_never_in_public(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    async with world(nats_url, unique, tmp_path) as w:
        await w.add(drivers_for={"beta": "noop", "acme": ""}, programs_for={"acme": "/opt/private/*"})
        seat = await w.leader.joined("w1")
        assert seat.joins[0].hello.drivers_for == {"beta": ["noop"], "acme": []}
        assert b"/opt/private" not in encode(seat.joins[0])
        assert b"acme" not in encode(seat.hellos[0])
        # the scheduler may not know, or lie: the worker looks by itself
        await w.leader.want("w1", place(name_of(), body()))
        assert (await w.leader.await_report("w1", "refused", name_of())).detail.startswith("not-permitted: ")


async def test_hello_and_load_are_public_json_and_name_no_job(nats_url: str, unique: str, tmp_path: Path) -> None:
    async with world(nats_url, unique, tmp_path) as w:
        await w.add(load_s=0.2, labels={"zone": "a"})
        seat = await w.leader.joined("w1")
        await w.leader.want("w1", place(name_of("secret-job"), body("hang"), (1, 2)))
        await until(lambda: seat.loads and seat.loads[-1].gpu_pool[1].leased, what="a load that shows the lease")
        load = seat.loads[-1]
        assert [slot.leased for slot in load.gpu_pool] == [False, True, True, False]
        assert load.simulated
        assert "secret-job" not in encode(load).decode()
        assert [later.n - earlier.n for earlier, later in zip(seat.loads, seat.loads[1:], strict=False)] == [1] * (
            len(seat.loads) - 1
        )
        hello = seat.hellos[0]
        assert (hello.worker, len(hello.gpu_pool), hello.drivers) == ("w1", 4, ["noop"])
        assert hello.labels.items() >= {"zone": "a", "host.name": "w1", "gpu.model": hello.gpu_pool[0].name}.items()


async def test_a_worker_that_gets_another_lease_than_it_asks_for_says_so(
    nats_url: str, unique: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(nats_url, unique, tmp_path) as w:
        given_s = w.leader.numbers[1]
        await w.add("w1", lease_s=given_s)
        await w.add("w2", lease_s=600.0)
        assert [(await w.leader.joined(name)).joins[0].hello.lease_s for name in ("w1", "w2")] == [given_s, 600.0]
        said = f"lease_s asks for 600 s, and the scheduler gives {given_s:g} s"
        await until(lambda: said in caplog.text, what="a line of the log")
        assert caplog.text.count("lease_s asks for") == 1


async def test_a_busy_slot_is_refused_with_the_reason(nats_url: str, unique: str, tmp_path: Path) -> None:
    async with world(nats_url, unique, tmp_path) as w:
        agent = await w.add()
        await w.leader.joined("w1")
        lease = agent.pool.try_claim()
        assert lease is not None
        await w.leader.want("w1", place(name_of(), body(), (0, 1)), place(name_of("b"), body(), (9,)))
        assert (await w.leader.await_report("w1", "refused", name_of())).detail == "leased 0"
        assert (await w.leader.await_report("w1", "refused", name_of("b"))).detail == "unknown-slot 9"
        seat = w.leader.seat("w1")
        await until(lambda: seat.renewals[-1].busy == [0], what="a renewal that tells the local claim")
        lease.release()
        await w.leader.want("w1", place(name_of("c", fence=11), body(), (0, 1)))
        await w.leader.await_report("w1", "freed", name_of("c", fence=11))


async def test_the_leader_alone_is_told_which_tenants_jobs_run_as_one_user(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    users = {"acme": "65534", "beta": "65533"}
    async with world(nats_url, unique, tmp_path) as w:
        agent = await w.add(mps="managed", run_as_for=users)
        assert (await w.leader.joined("w1")).joins[0].hello.mps_users == {"acme": 0, "beta": 1}
        assert agent.reporter.hello().mps_users is None
        await w.add("w2", run_as_for=users)
        assert (await w.leader.joined("w2")).joins[0].hello.mps_users is None, "the daemons are an operator's"


async def test_a_device_that_is_kept_for_other_modes_is_told_and_refused(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    async with world(nats_url, unique, tmp_path) as w:
        agent = await w.add(slot_modes={"1": "exclusive", "3": "mps time-slice"}, slot_labels={"1": "tier=fast wall=a"})
        hello = (await w.leader.joined("w1")).joins[0].hello
        assert [device.labels for device in hello.gpu_pool] == [{}, {"tier": "fast", "wall": "a"}, {}, {}]
        assert [device.modes for device in hello.gpu_pool] == [[], ["exclusive"], [], ["mps", "time-slice"]]
        assert agent.reporter.hello().gpu_pool == hello.gpu_pool
        await w.leader.want("w1", place(name_of("x"), body(), (1,), mode="mps"))
        assert (await w.leader.await_report("w1", "refused", name_of("x"))).detail == "mode-not-here 1"
        await w.leader.want("w1", place(name_of("y"), body(), (3,), mode="mps"))
        await w.leader.await_report("w1", "freed", name_of("y"))
        with pytest.raises(Refused, match="slot_modes names position 4"):
            await w.add("w2", slot_modes={"4": "mps"})


async def test_the_leader_is_told_of_the_cores_that_are_kept_for_each_gpu_and_of_counters(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    async with world(nats_url, unique, tmp_path) as w:
        await w.add(cores_per_gpu=2.5, counts={"camera": 2})
        hello = (await w.leader.joined("w1")).joins[0].hello
        assert (hello.gpu_cpu_milli, hello.counts) == (2_500, {"camera": 2})
        with pytest.raises(ValueError, match=r"counts.camera must be 1"):
            await w.add("w2", counts={"camera": 0})


async def test_a_frame_that_cannot_be_read_or_answers_nothing_that_was_asked_ends_no_agent(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    async with world(nats_url, unique, tmp_path) as w:
        agent = await w.add()
        await w.leader.joined("w1")
        join_n, refused = agent.attempts.session.join_n, encode(problem("internal", "made up"))
        for question in ("submit", "renew"):
            await w.leader.nc.publish(f"{w.host.inbox}.w1.{question}.{join_n}.last", refused)
        await w.leader.nc.publish(f"{w.host.inbox}.w1.submit.{join_n}.1", refused)
        for frame in (b"\xc1 no frame", refused):
            await w.leader.nc.publish(w.leader.subjects.worker("w1", "wanted"), frame)
        await until(lambda: sum(agent.dropped.values()) == 5, what="all dropped")
        assert agent.dropped == {"answer-to-nothing": 3, "undecodable: invalid-argument": 2}
        await w.leader.want("w1", place(name_of(), body()))
        await w.leader.await_report("w1", "freed", name_of())


async def test_many_agents_share_a_connection_and_leave_with_a_goodbye(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    async with world(nats_url, unique, tmp_path) as w:
        workers = [f"w{number}" for number in range(50)]
        agents = [await w.add(worker) for worker in workers]
        for worker in workers:
            await w.leader.joined(worker)
        for number, worker in enumerate(workers):
            await w.leader.want(worker, place(name_of(f"{worker}-job", fence=number), body()))
        for number, worker in enumerate(workers):
            await w.leader.await_report(worker, "freed", name_of(f"{worker}-job", fence=number))
        for agent in agents:
            agent.leave()
        await until(lambda: all(w.leader.seat(worker).said_goodbye for worker in workers), what="50 goodbyes")


async def test_it_carries_on_after_the_server_was_restarted(
    mortal_server: MortalServer, unique: str, tmp_path: Path
) -> None:
    async with world(mortal_server.url, unique, tmp_path) as w:
        await w.add()
        seat = await w.leader.joined("w1")
        await w.leader.want("w1", place(name_of(), body("sleep", "0.5")))
        await w.leader.await_report("w1", "started", name_of())
        await mortal_server.stop()
        await mortal_server.start()
        await w.leader.await_report("w1", "freed", name_of(), 60)
        assert seat.kinds(name_of()) == ["claimed", "started", "exited", "freed"]


async def test_the_noop_drivers_words(nats_url: str, unique: str, tmp_path: Path) -> None:
    words = {(): 0, ("exit", "3"): 3, ("sleep", "0.01"): 0, ("sleep", "0.01", "9"): 9}
    async with world(nats_url, unique, tmp_path) as w:
        await w.add()
        await w.leader.joined("w1")
        for number, (argv, code) in enumerate(words.items()):
            name = name_of(str(number))
            await w.leader.want("w1", place(name, body(*argv), (number,)))
            exited = await w.leader.await_report("w1", "exited", name)
            assert (exited.code, exited.detail) == (code, "exit")


@pytest.mark.parametrize(
    "argv",
    [
        ("exit", "9" * 20),
        ("exit", "256"),
        ("exit", "-65"),
        ("sleep", "nan"),
        ("sleep", "inf"),
        ("sleep", "-1"),
        ("sleep", "1", "99999"),
    ],
)
def test_the_noop_driver_refuses_what_no_process_could_do(argv: tuple[str, ...]) -> None:
    request = msgspec.json.decode(body(*argv), type=Request)
    with pytest.raises(Refused) as refused:
        NoopDriver().check(request)
    assert refused.value.problem.field == "$.run.argv"


async def test_the_noop_driver_times_out_fails_and_refuses_what_it_does_not_know(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    async with world(nats_url, unique, tmp_path) as w:
        await w.add()
        seat = await w.leader.joined("w1")
        timed = msgspec.json.encode({"gpu": {}, "run": {"driver": "noop", "argv": ["hang"], "timeout_s": 0.01}})
        await w.leader.want("w1", place(name_of("t"), timed), place(name_of("f"), body("fail", "no such file"), (1,)))
        await w.leader.want("w1", place(name_of("u"), body("dance"), (2,)))
        assert (await w.leader.await_report("w1", "exited", name_of("t"))).detail == "timeout"
        assert (await w.leader.await_report("w1", "exited", name_of("f"))).code == 127
        refused = await w.leader.await_report("w1", "refused", name_of("u"))
        assert refused.detail == "cannot-run: the driver noop does not know this argv"
        await w.leader.await_report("w1", "freed", name_of("f"))
        assert "started" not in seat.kinds(name_of("f"))


async def test_what_a_request_says_to_its_driver_is_checked_by_the_worker(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    async with world(nats_url, unique, tmp_path) as w:
        agent = await w.add()
        await w.leader.joined("w1")
        shape = body(driver_config={"noop": {"gpu_device_ids": ["0", "0"]}}, gpu={"count": 2})
        typo = body(driver_config={"noop": {"typo": 1}})
        no_gpus = agent.drivers["noop"]
        no_gpus.capabilities = replace(no_gpus.capabilities, gpu_enabled=False)
        asked = {"typo": typo, "shape": shape, "gpus": body()}
        slots = {"typo": (0,), "shape": (0, 1), "gpus": (0,)}
        for name, request in asked.items():
            await w.leader.want("w1", place(name_of(name), request, slots[name]))
        told = {name: (await w.leader.await_report("w1", "refused", name_of(name))).detail for name in asked}
        assert told == {
            "typo": "cannot-run: the driver noop reads no driver_config.noop.typo"
            " (it reads: gpu_device_ids, cdi_devices, device_ids)",
            "shape": "not-here: the driver noop has no GPU support here",
            "gpus": "not-here: the driver noop has no GPU support here",
        }


class Seeing(NoopDriver):
    """It keeps what reached it."""

    def __init__(self) -> None:
        super().__init__()
        self.got: list[Assignment] = []

    def start(self, assignments: list[Assignment]) -> None:
        self.got += assignments
        super().start(assignments)


async def test_fact_12_the_block_of_the_jobs_driver_alone_reaches_it(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    driver = Seeing()
    async with world(nats_url, unique, tmp_path) as w:
        await w.add(driver=driver)
        await w.leader.joined("w1")
        blocks = {"noop": {"device_ids": ["1"]}, "docker": {"secret": "of another driver"}}
        both: dict[str, dict[str, Any]] = {
            "plain": {"driver_config": blocks},
            "template": {"template": {"driver_config": blocks}},
        }
        for name, fields in both.items():
            await w.leader.want("w1", place(name_of(name), body(**fields), (1,)))
            await w.leader.await_report("w1", "freed", name_of(name))
        for assignment in driver.got:
            assert assignment.config.device_ids == ["1"]
            assert assignment.request.driver_config == {"noop": {"device_ids": ["1"]}}
            assert assignment.request.template is None
        assert len(driver.got) == 2
