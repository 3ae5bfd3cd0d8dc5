"""A world with more of what a site has: `python -m tests.release.sim.many --wide`.

Schedulers of different settings; services that follow their jobs and ask about them with the SDK, submit arrays, and
submit on the condition that nothing was decided since; operators who restore backups and raise no term by hand;
schedulers and agents that are stopped in order; workers that leave, and hosts that come back with other devices; jobs
that are frozen and resumed, and others that have their devices meanwhile.

It is a world of its own, so that the seeds of the plain one show what they have always shown.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import random
from collections.abc import Callable
from typing import Any, Final
from unittest import mock

import msgspec

from moorage.bus.errors import BusError
from moorage.scheduler.core.config import Config
from moorage.scheduler.core.ledger.state import AT_RUNNING, LOST_KEPT
from moorage.schemas.job import QOS
from moorage.schemas.staying import Ready
from moorage.schemas.subjects import Subjects
from moorage.worker.agent.ready_watch import ReadyWatch
from moorage.worker.session.attempt_messages import LEAVE_S_MAX, Attempt
from tests.release.sim import sweeps
from tests.release.sim.accidents import FEW_ACTS, Accidents
from tests.release.sim.afters import ASKED, is_known_to_all, some_of
from tests.release.sim.callers import ANSWER_S, TENANTS, Callers
from tests.release.sim.cluster import CONFIG
from tests.release.sim.followers import Followers
from tests.release.sim.restores import Restores
from tests.release.sim.stays import let_stay
from tests.release.sim.world import World

SUBJECTS: Final = Subjects()
#: what members of services have at most until others serve, on a worker that leaves for good
LEAVE_S: Final = 2.5
#: between two looks of an operator for jobs that wait for a machine which is gone
GIVE_UP_EVERY_S: Final = 60.0
BATCHED: Final = 0.1
#: so long after a submit at most, another job is run again
AGAIN_S_MAX: Final = 60.0
CONDITIONAL: Final = 0.1
#: of the jobs that may be preemptible
PREEMPTIBLE: Final = 0.5
#: of the worlds whose workers freeze what is not used, and after how many seconds
FREEZING: Final = 0.7
AUTO_FREEZE_S: Final = {"low": 1, "medium": 3, "high": 10}


class WideWorld(World):
    """As `World`."""

    callers: WideCallers

    def __init__(self, seed: int, *, faults: float = 1.0, jobs: int = 40) -> None:
        chance = random.Random(f"wide {seed}")
        super().__init__(seed, faults=faults, schedulers=chance.choice((2, 2, 3)), jobs=jobs)
        self.whole = dict(self.hosts)
        self.followers = Followers(self.bus, random.Random(chance.random()), self.judge)
        self.restores = Restores(self, self._restore_began, self._forgotten)
        self.judge.on_accepted = self.followers.accepted
        takeover_s = chance.choice((4.0, 4.0, 2.0, 6.0))
        if chance.random() < FREEZING:
            self.freezing = {"limiter": True, "auto_freeze": True, "auto_freeze_s": AUTO_FREEZE_S}
        leases = random.Random(f"leases {seed}")  # of its own: the rest of each world stays as it was
        self.lease_s = {name: leases.choice((0.0, 0.0, 30.0, 60.0)) for name in self.hosts}
        self._lease_most = leases.choice((0.0, 45.0, 60.0))  # of all schedulers, as after a restore one goes by its own
        self._configs = {name: self._settings(chance, takeover_s) for name in self.schedulers}

    def _settings(self, chance: random.Random, takeover_s: float) -> Config:
        """Of one scheduler. Who may end whom is everybody's, since the judge goes by it; and so is `takeover_s`: by its
        own a leader knows for how long nobody else can lead, and may answer what is asked about the state."""
        return msgspec.structs.replace(
            self.config,
            takeover_s=takeover_s,
            lease_most=self._lease_most,
            lease_s=chance.choice((20.0, 20.0, 12.5, 40.0)),
            grace_s=chance.choice((5.0, 1.0, 8.0)),
            margin_s=chance.choice((3.0, 1.0)),
            renew_s=chance.choice((2.0, 1.5)),
            ranker=chance.choice(("fragments", "pack", "headroom")),
            reserve_after=chance.choice((30.0, 30.0, 3.0, 0.0)),
            ageing=chance.choice((0.0, 600.0)),
            jobs_max=chance.choice((CONFIG.jobs_max, 40)),
            ended_max=chance.choice((CONFIG.ended_max, 0, 5)),
        )

    def config_of(self, name: str) -> Config:
        return self._configs[name]

    def _patch(self, patches: contextlib.ExitStack) -> None:
        super()._patch(patches)
        self.restores.patched(patches)

        async def look(watch: ReadyWatch, attempt: Attempt, ready: Ready) -> str:
            return await self.judge.stays.look(watch, attempt, ready)

        patches.enter_context(mock.patch.object(ReadyWatch, "_look", look))

    def _hazards(self) -> Accidents:
        return WideAccidents(self)

    async def _begin(self) -> None:
        self.callers = WideCallers(self.callers, self)
        await self.followers.open(TENANTS)

    async def _end(self) -> None:
        await self.followers.close()

    async def _until_over(self) -> None:
        await super()._until_over()
        await self.followers.until_ends()

    def give_up_kept(self) -> None:
        """What an operator does for jobs that wait for a machine which is another one now."""
        for tenant, job in sorted(self.judge.accepted):
            known = self.judge.state.job(tenant, job)
            if known is not None and any(replica.state == LOST_KEPT for replica in known.replicas):
                self.ask_admin("requeue", {"tenant": tenant, "job": job, "by": "sim"})
        if self.did["reinstall"]:
            self.later(GIVE_UP_EVERY_S, self.give_up_kept)

    def _restore_began(self) -> None:
        self.followers.restores += 1

    def _forgotten(self, tenant: str, job: str) -> None:
        """A restore has taken a job back that was accepted: its caller submits it again."""
        self.callers.again(tenant, job)


class WideCallers(Callers):
    """With requests in arrays, on the condition that nothing was decided since, of jobs that start after others, and of
    sweeps, some of which are run again."""

    def __init__(self, plain: Callers, world: WideWorld) -> None:
        self.__dict__ |= plain.__dict__
        self._world = world
        self._batch: dict[str, list[dict[str, Any]]] = {}
        self._behind = random.Random(f"behind {world.seed}")
        self._staying = random.Random(f"stays {world.seed}")
        self._sweeping = random.Random(f"sweeps {world.seed}")

    def again(self, tenant: str, job: str) -> None:
        """A restored ledger has forgotten it: whoever sent it sends it again."""
        self.asked.append(asyncio.create_task(self._submit_again(tenant, job)))

    async def _submit_again(self, tenant: str, job: str) -> None:
        body = {key: value for key, value in self._judge.requests[(tenant, job)].items() if key != "if_seq"}
        answer = await self.ask(SUBJECTS.api(tenant, "submit"), body)
        if answer.get("code") == "conflict":  # of a later restore: that ledger knows it, with its condition
            return
        self._judge.answered(tenant, job, body, answer)
        if answer.get("kind") == "error":  # such as for a limit that is in force again: its sender is told so
            self._judge.accepted.discard((tenant, job))

    async def _submit(self, tenant: str, job: str, body: dict[str, Any]) -> None:
        gpu = body.get("gpu") or {}
        alone = "gpu" in body and gpu.get("sharing", "exclusive") == "exclusive" and gpu.get("scheduling") != "gang"
        if alone and body.get("on_partition") != "keep" and self._rng.random() < PREEMPTIBLE:
            body["preemptible"] = True
        if self._rng.random() < 0.5:
            body["qos"] = self._rng.choice(QOS)
        let_stay(self._staying, body)
        known = self._judge.known(tenant)
        if known and self._behind.random() < ASKED:
            body["after"] = some_of(self._behind, known)
        sweeps.numbered(self._sweeping, body)
        if known and self._sweeping.random() < sweeps.AGAIN:
            self.asked.append(asyncio.create_task(self._run_again(tenant, self._sweeping.choice(known[-10:]))))
        if self._rng.random() < BATCHED:
            await self._submit_batch(tenant, job, body)
            return
        if self._rng.random() < CONDITIONAL:
            body["if_seq"] = max(0, self._judge.state.seq - self._rng.choice((0, 0, 1)))
        restores = self._world.restores.done
        answer = await self.ask(SUBJECTS.api(tenant, "submit"), body)
        if answer.get("code") == "moved-on" and restores == self._world.restores.done:
            self._judge.refused.add((tenant, job))
        elif answer.get("code") == "unknown-job":
            if is_known_to_all(body["after"]) and not self._world.did["restore"]:  # which forgets some
                self._judge.violated(f"{tenant}/{job} names jobs that were accepted, and is refused: {answer}")
        elif answer.get("field") != "$.if_seq":  # a record that a restored ledger does not have
            self._judge.answered(tenant, job, body, answer)

    async def _run_again(self, tenant: str, job: str) -> None:
        """What of a job did not succeed, after a while and in two messages, as a bare caller does it."""
        await asyncio.sleep(self._sweeping.uniform(0, AGAIN_S_MAX))
        judge, restores = self._judge, self._world.restores.done
        before = judge.sweeps.bad(judge.state, tenant, job)
        answer = await self.ask(SUBJECTS.api(tenant, "again"), {"job": job, "failed": True})
        if answer.get("kind") != "answer":
            return
        data = answer["data"]
        if restores == self._world.restores.done:
            after = judge.sweeps.bad(judge.state, tenant, job)
            judge.sweeps.confirm(f"{tenant}/{job}", data["request"], before, after)
        accepted = await self.ask(SUBJECTS.api(tenant, "submit"), data["request"])
        if accepted.get("code") != "conflict" and restores == self._world.restores.done:  # of two, one has the id
            judge.answered(tenant, data["job"], data["request"], accepted)

    async def _submit_batch(self, tenant: str, job: str, body: dict[str, Any]) -> None:
        bodies = [{**body, "job": f"{job}{letter}"} for letter in "abc"]
        payload, left = json.dumps(bodies).encode(), dict(enumerate(bodies))
        began_s = asyncio.get_running_loop().time()
        while left and self._is_patient(began_s):
            with contextlib.suppress(BusError):
                answers = json.loads((await self._link.request(SUBJECTS.api(tenant, "submit"), payload, ANSWER_S)).data)
                for at, answer in enumerate(answers) if isinstance(answers, list) else ():
                    if at in left and answer.get("code") not in ("not-leading", "queue-full"):
                        self._judge.answered(tenant, left[at]["job"], left.pop(at), answer)
            await asyncio.sleep(self._rng.uniform(0.1, 2 * ANSWER_S))
        if left:
            self._judge.violated(f"the batch of {tenant}/{job} was not answered")


class WideAccidents(Accidents):
    world: WideWorld

    def __init__(self, world: WideWorld) -> None:
        super().__init__(world)
        more = (
            self.back_up,
            self.back_up,
            self.restore,
            self.stop_scheduler,
            self.stop_agent,
            self.worker_leaves,
            self.other_devices,
            self.reinstall,
            self.cancel_by_queue,
            self.freeze_or_resume,
            self.freeze_or_resume,
            self.two_acts_on_a_frozen_job,
            self.two_acts_on_a_frozen_job,
        )
        if len(self._acts) > FEW_ACTS:
            self._acts += more
        else:
            self._acts += tuple(self.rng.sample(more, 3))

    def back_up(self) -> None:
        self.world.restores.back_up()

    def restore(self) -> None:
        if not self.snapshots_were_lost() and not self.world.did["lost the newest snapshot"]:
            self.world.restores.restore()

    def lose_snapshots(self) -> None:
        """A restored ledger has one snapshot and no record before it: of that nobody is promised anything."""
        if not self.world.restores.done:
            super().lose_snapshots()

    def freeze_or_resume(self) -> None:
        """Some jobs that run, or are frozen: each comes to rest one way or the other."""
        for attempt in list(self.world.judge.state.attempts()):
            job = attempt.replica.job
            if attempt.phase == AT_RUNNING and self.rng.random() < 0.5:
                verb = "resume" if attempt.freeze and self.rng.random() < 0.8 else "freeze"
                self._operate(verb, {"tenant": job.tenant, "job": job.name})

    def two_acts_on_a_frozen_job(self) -> None:
        """Two things that may happen to one, to its worker or to its leader, with little or some time between."""
        rng, world = self.rng, self.world
        frozen = [attempt for attempt in world.judge.state.attempts() if attempt.mask != attempt.home]
        if not frozen:
            return
        attempt = rng.choice(frozen)
        job, worker = attempt.replica.job, attempt.worker.id
        named, link = {"tenant": job.tenant, "job": job.name}, world.connect("operator")
        acts: tuple[Callable[[], object], ...] = (
            lambda: self._operate("resume", named),
            lambda: self._operate("freeze", named),
            lambda: self._operate("requeue", named),
            lambda: self._operate("drain", {"worker": worker, "within_s": 1.0, "for_s": 10.0}),
            lambda: self.spawn(
                link.request(SUBJECTS.api(job.tenant, "cancel"), json.dumps({"job": job.name}).encode(), ANSWER_S)
            ),
            lambda: world.kill(worker, rng.choice((0.2, 3.0, 45.0))),
            lambda: world.machines[worker].kill_supervisor(),
            lambda: self._reboot(worker),
            self.kill_scheduler,
        )
        first, second = rng.choice(acts), rng.choice(acts)
        first()
        world.later(rng.choice((0.0, 0.05, 0.5, 3.0)), second)

    def _reboot(self, worker: str) -> None:
        self.world.machines[worker].reboot()
        self.world.kill(worker, 3.0)

    def stop_scheduler(self) -> None:
        """SIGTERM, as in an upgrade."""
        world, name = self.world, self.rng.choice(self.world.schedulers)
        scheduler, process = world.leaders.get(name), world.processes[name]
        if scheduler is None or process.is_dead:
            return
        back_s = self.rng.choice((0.2, 3.0, 15.0))

        async def stop() -> None:
            await scheduler.resign()
            world.kill_process(name, process, back_s)

        process.run(stop())

    def stop_agent(self) -> None:
        """SIGTERM, as in an upgrade of a worker."""
        self._end_agent(self._a_worker(), self.rng.choice((0.2, 3.0, 20.0)), for_good=False)

    def worker_leaves(self) -> None:
        """For good, with goodbye; the machine is booted anew some time later."""
        self._end_agent(self._a_worker(), self.rng.choice((3.0, 20.0, 45.0)), for_good=True)

    def _end_agent(self, name: str, back_s: float, *, for_good: bool) -> None:
        world = self.world
        process = world.processes[name]
        if process.is_dead or name not in world.agents:
            return
        fleet_host, agent = world.agents[name]

        async def stop() -> None:
            if for_good:
                within_s = LEAVE_S if back_s > LEAVE_S + LEAVE_S_MAX else 0.0
                agent.leave(within_s)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(within_s + agent.longest_grace_s + LEAVE_S_MAX):
                        await agent.left.wait()
            else:
                agent.leave_if_idle()
            await fleet_host.close()
            world.kill_process(name, process, back_s)

        process.run(stop())

    def other_devices(self) -> None:
        """A device is gone at the agent's next start, or what was gone is back; the machine is booted anew, or not."""
        name, rng = self._a_worker(), self.rng
        whole, host = self.world.whole[name], self.world.hosts[name]
        if len(host.devices) < len(whole.devices):
            self.world.hosts[name] = whole
        elif len(whole.devices) > 1:
            gone = rng.choice(whole.devices).uuid
            left = [device for device in whole.devices if device.uuid != gone]
            devices = tuple(msgspec.structs.replace(device, index=at) for at, device in enumerate(left))
            self.world.hosts[name] = dataclasses.replace(whole, devices=devices)
        if rng.random() < 0.5:
            self.world.machines[name].reboot()
        self.world.kill(name, rng.choice((0.2, 3.0, 20.0)))

    def reinstall(self) -> None:
        """The machine comes back with an empty disk, and takes its worker's id again."""
        name = self._a_worker()
        self.world.kill(name, self.rng.choice((0.2, 3.0, 45.0)))
        self.world.machines[name].reinstall()

    def cancel_by_queue(self) -> None:
        """By the durable queue, which is read in its own time."""
        asked = sorted(self.world.judge.accepted)
        if asked:
            tenant, job = self.rng.choice(asked)
            link, body = self.world.connect("operator"), json.dumps({"job": job}).encode()
            self.spawn(link.request(SUBJECTS.request(tenant, "cancel"), body, ANSWER_S))

    def heal(self) -> None:
        for name, whole in self.world.whole.items():
            if self.world.hosts[name] is not whole:
                self.world.hosts[name] = whole
                self.world.processes[name].kill()
        super().heal()
        self.world.give_up_kept()
