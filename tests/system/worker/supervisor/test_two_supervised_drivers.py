"""Two drivers of one worker: each has its attempts, its boot word and its fence, under one supervisor or under two."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from moorage.schemas.capabilities import Capabilities
from moorage.testing.conformance.leader import ScriptedLeader
from moorage.worker.agent.run import SUPERVISOR_FOLDER, start
from moorage.worker.driver import CODE_LOST
from moorage.worker.drivers.noop import NoopDriver
from moorage.worker.drivers.process.driver import ProcessDriver
from moorage.worker.drivers.supervisor_link import owner_of
from moorage.worker.session.attempt_messages import Ended, Replaced
from moorage.worker.settings import WorkerSettings
from moorage.worker.supervisor.client import Supervised
from tests.servers import Server
from tests.system.live.stack import QUICK, Caller, caller, stack
from tests.system.worker.agent.test_agent_process import body, is_alive, name_of, pid_of, place, state_folder
from tests.waiting import until


class Site(ProcessDriver):
    """As a site would change the driver of processes."""

    name = "site"


@pytest.mark.slow
async def test_each_has_its_own_attempts_and_all_of_both_are_lost_with_the_supervisor(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    async with ScriptedLeader(nats_url, unique) as leader, state_folder() as state:
        drivers = ("process", "tests.system.worker.supervisor.test_two_supervised_drivers:Site", "noop")
        settings = WorkerSettings(state, "w1", unique, simulate="4xH100", drivers=drivers, leases=False)
        worker = await start(settings, nats_url)
        try:
            (agent,) = worker.agents
            await leader.joined("w1")
            assert owner_of("w1", "site") == "w1@site"
            boots = {name: driver.boot for name, driver in agent.drivers.items()}
            assert boots["process"] == boots["site"] != boots["noop"] == ""
            assert agent.boot == f"{agent.facts.boot}.{boots['process']}"
            plain, site, noop = (name_of(job, fence=at) for at, job in enumerate(("plain", "site", "noop"), 10))
            paths = [tmp_path / "plain", tmp_path / "site"]
            words = [f"echo $$ > {path}; exec sleep 600" for path in paths]
            await leader.want(
                "w1",
                place(plain, body(words[0]), (0,)),
                place(site, body(words[1], run={"driver": "site"}), (1,)),
                place(noop, body("", run={"driver": "noop", "argv": ["hang"]}), (2,)),
            )
            for name in (plain, site, noop):
                await leader.await_report("w1", "started", name)
            pids = [await pid_of(path) for path in paths]
            supervised = await Supervised.connect(state / SUPERVISOR_FOLDER, spawn_if_absent=False)
            listed = await supervised.list()
            assert {event.key.partition("|")[0] for event in listed.running} == {"w1", "w1@site"}
            supervised.kill()
            for name in (plain, site):
                assert (await leader.await_report("w1", "exited", name)).detail == "lost"
            await leader.joined("w1", joins=2)
            assert not any(map(is_alive, pids))
            seat = leader.seat("w1")
            assert [held.job for held in seat.joins[-1].holding] == ["noop"], "it never needed the supervisor"
            assert "exited" not in seat.kinds(noop)
            assert seat.joins[-1].boot == agent.boot != seat.joins[0].boot
        finally:
            await worker.stop()


class Engine(NoopDriver):
    """Its attempts run in an engine that the supervisor does not start, and that a test lets die."""

    name = "engine"
    capabilities = Capabilities(uses_devices=False, fence="supervisor")
    boot = "engine-1"
    fences: ClassVar[list[float]] = []

    def set_fence(self, deadline_s: float, grace_s: float) -> None:
        self.fences.append(deadline_s)

    def dies(self) -> None:
        lost, self._running = list(self._running), {}
        self.boot = "engine-2"
        self.report(Replaced(self.name))
        self.report(Ended([(name, CODE_LOST, "lost") for name in lost]))


@pytest.mark.slow
async def test_an_engine_that_dies_takes_its_own_jobs_and_the_scheduler_keeps_the_others(
    nats_server: Server, unique: str
) -> None:
    drivers = ("process", "tests.system.worker.supervisor.test_two_supervised_drivers:Engine")
    async with stack(nats_server, unique) as made, caller(made) as acme, state_folder() as state:
        await made.scheduler(config=QUICK)
        settings = WorkerSettings(state, "w1", unique, simulate="4xH100", drivers=drivers, leases=False)
        worker = await start(settings, made.url)
        try:
            (agent,) = worker.agents
            await acme.leader()
            await acme.workers_up("w1")
            await acme.submit("plain", "sleep", "600")
            await acme.api("submit", {"job": "boxed", "run": {"driver": "engine", "argv": ["hang"]}})
            for job in ("plain", "boxed"):
                await acme.reaches(job, "RUNNING")
            engine, boot = agent.drivers["engine"], agent.boot
            assert isinstance(engine, Engine)
            assert boot.startswith(f"{agent.facts.boot}.engine-1+")
            assert engine.fences, "what ends its attempts hears when the lease is over"
            engine.dies()
            again = await until(lambda: retried(acme, "boxed"), what="the lost job runs again")
            assert [each["why"] for each in again["changes"] if "why" in each] == ["lost with its host's supervisor"]
            assert agent.boot != boot
            plain = await acme.show("plain")
            assert (plain["state"], plain["attempt"]) == ("RUNNING", 1), "its supervisor lives"
            for job in ("plain", "boxed"):
                await acme.api("cancel", {"job": job})
                await acme.reaches(job, "CANCELLED")
            await acme.all_free()
        finally:
            await worker.stop()


async def retried(caller: Caller, job: str) -> dict[str, Any] | None:
    shown = await caller.show(job)
    return shown if (shown["state"], shown["attempt"]) == ("RUNNING", 2) else None
