"""An endless stream of small jobs, beside which large ones wait: none waits for ever, and no host idles for nothing.

A fleet whose hosts differ, jobs without a time limit that run for ever (services), and a stream that never lets the
queue run empty. Then large jobs come, of which each fits once all but the services have ended. Each must start within
`bound_s`. While hosts are reserved for a job, they must hold it once all but the services have left them.
"""

from __future__ import annotations

import random
from typing import Any, Final

from moorage.scheduler.core.ledger.state import Attempt
from moorage.schemas.job import STATES
from tests.release.workloads.plan import H100, L40S, Draw, Plan
from tests.release.workloads.reference import Waiting, request_of, starts, waiting_in
from tests.release.workloads.world import World

#: seeds from here on are streams
STREAM_FROM: Final = 300_000
THEME: Final = "stream"
STEP_MS: Final = 1_000
#: jobs of the stream that wait at any time, and the longest of their time limits, in s
WAITING: Final = 5
LIMITS_S: Final = (5, 10, 20)
#: how long a case runs on where tenants have shares
SHARES_S: Final = 120
SERVICE: Final = "service"
LARGE: Final = "large"


def bound_s(hosts: int, larges: int) -> int:
    """Return within how many s so many large replicas have to start, each of which may take a reservation's time."""
    return (hosts + larges + WAITING) * 2 * (max(LIMITS_S) + 5)


def made(seed: int) -> Plan:
    """The plan of a seed."""
    draw = Draw(seed, {"priority": 0.0})
    chance = draw.random
    hosts, gpus = draw.pick(1, 2, 3, 4), draw.pick(0, 1, 2, 4, 8)
    sharing = chance.random() < 0.3
    for number in range(hosts):
        count = gpus if chance.random() < 0.8 else draw.pick(0, 1, 4)
        spec: dict[str, Any] = {
            "models": [draw.pick(H100, L40S)] * count if chance.random() < 0.7 else [
                draw.pick(H100, L40S) for _ in range(count)
            ],
            "cpu_milli": draw.pick(0, 8_000, 16_000, 16_000),
            "memory_mib": draw.pick(0, 0, 65_536),
        }  # fmt: skip
        if count and chance.random() < 0.15:
            spec["profiles"] = [draw.pick("", "1g.10gb", "3g.40gb") for _ in range(count)]
        if chance.random() < 0.3:
            spec["labels"] = {"zone": draw.pick("a", "b")}
        draw.add("join", name=f"w{number}", spec=spec)
    settings: dict[str, Any] = {
        "reserve_after": draw.pick(1, 2, 10), "ranker": draw.pick("fragments", "fragments", "pack"),
        "fair_share_half_life": draw.pick(10, 600),
    }  # fmt: skip
    if chance.random() < 0.4:
        for tenant in ("t", "u"):
            draw.add("order", verb="share", tenant=tenant, weight=draw.pick(1, 2, 3), gpus=0)
    for number in range(draw.pick(0, 0, 1, 2)):
        run = {"driver": "noop", "argv": ["serve"]}
        fields = _request(draw, 2, sharing) | {"run": run, "replicas": draw.pick(1, 1, hosts)}
        draw.add("submit", tenant="v", job=f"{SERVICE}{number}", fields=fields)
    draw.add("tick", ms=400)
    kinds = [
        _request(draw, 2, sharing) | {"run": _limited(draw, ["small", str(number)]), "replicas": draw.pick(1, 1, 1, 2)}
        for number in range(draw.pick(1, 2, 4))
    ]
    draw.add("flow", kinds=kinds, salt=draw.salt(), for_s=20)
    larges = draw.pick(1, 1, 2, 3)
    replicas = 0
    for number in range(larges):
        fields = _request(draw, max(1, gpus), sharing) | {"run": _limited(draw, ["large"])}
        if draw.pick(True, False):
            fields |= {"replicas": draw.random.randrange(1, hosts + 1)}
            if fields["gpu"] is not None:
                fields["gpu"]["scheduling"] = draw.pick("gang", "gang", "spread", "best-effort")
        replicas += fields.get("replicas", 1)
        draw.add("submit", tenant=draw.pick("t", "u"), job=f"{LARGE}{number}", fields=fields)
    draw.add("flow", kinds=kinds, salt=draw.salt(), for_s=bound_s(hosts, replicas))
    draw.add("end all")
    return Plan(seed, THEME, settings, draw.random.random() < 0.3, draw.steps)


def _limited(draw: Draw, argv: list[str]) -> dict[str, Any]:
    return {"driver": "noop", "argv": argv, "timeout_s": draw.pick(*LIMITS_S), "grace_s": 1}


def _request(draw: Draw, most: int, sharing: bool) -> dict[str, Any]:
    """What a job asks for, with at most so many GPUs a replica."""
    gpu: dict[str, Any] | None = {"count": draw.random.randrange(1, most + 1), "vendor": ""}
    chance = draw.random.random()
    if chance < 0.25:
        gpu = None
    elif chance < 0.4 and gpu is not None:
        gpu = {"count": gpu["count"], "model": draw.pick("H100", "L40S")}
    elif chance < 0.5 and gpu is not None:
        gpu |= {"min_memory_mib": draw.pick(5_000, 30_000)}
    elif chance < 0.8 and sharing:
        gpu = {"sharing": draw.pick("mps", "mps", "time-slice"), "vendor": ""}
        gpu["share"] = {"compute_percent": draw.pick(20, 50, 90)}
    fields: dict[str, Any] = {"gpu": gpu}
    if gpu is None or draw.random.random() < 0.5:
        part = draw.pick(500, 1_000, 2_000) if most <= 2 else draw.pick(1_000, 4_000, 8_000, 12_000, 16_000)
        fields["resources"] = {"cpu_milli": part, "memory_mib": draw.pick(0, 2 * part)}
    if draw.random.random() < 0.1:
        fields["requires"] = {"zone": [draw.pick("a", "b")]}
    return fields


class Stream(World):
    """A world with the step `flow`."""

    def __init__(self, plan: Plan, log: list[str] | None = None) -> None:
        super().__init__(plan, log)
        self.ends_ms: dict[Any, int] = {}
        self.streamed = 0
        self.reserved: tuple[int, frozenset[int]] = (-1, frozenset())

    def flow(self, kinds: list[dict[str, Any]], salt: int, for_s: int) -> None:
        """Time goes by; whenever fewer than `WAITING` jobs of the stream wait, more come."""
        draw = random.Random(salt)
        state = self.drive.state
        self.tick(1)
        larges = {job.name: job for job in state.jobs.values() if job.name.startswith(LARGE)}
        shares = any(tenant.weight for tenant in state.tenants.values())
        if shares:  # no start is promised: a tenant to which more is owed passes a reservation
            for_s = min(for_s, SHARES_S)
        for _ in range(for_s * 1_000 // STEP_MS):
            waiting = sum(who.job.name.startswith("s-") for who in waiting_in(state))
            for _ in range(max(0, WAITING - waiting)):
                self.streamed += 1
                self.submit(draw.choice("tu"), f"s-{self.streamed}", draw.choice(kinds))
            self._work(draw)
            self.tick(STEP_MS)
            self._confirm_reservation()
            larges = {
                name: job
                for name, job in larges.items()
                if any(STATES[replica.state] == "QUEUED" for replica in job.replicas)
            }
            if not larges and for_s > 20:
                break
        late = [who for who in waiting_in(state) if who.job.name in larges and self._is_promised(who)]
        assert not late or shares, (
            f"after {for_s} s there wait, though they fit beside services: {[who.name for who in late]}"
        )

    def _work(self, draw: random.Random) -> None:
        """What runs exits after a part of its time limit; services never do."""
        now = self.drive.now
        for worker in self.drive.workers.values():
            for key in [key for key, held in worker.held.items() if held.phase == "running"]:
                if key[1].startswith(SERVICE):
                    continue
                if key not in self.ends_ms:
                    job = self.drive.state.job(key[0], key[1])
                    assert job is not None
                    limit_s = request_of(job).workload.timeout_s or 0
                    self.ends_ms[key] = now + int(limit_s * 1000 * draw.choice((0.2, 0.6, 1.0, 1.0)))
                if self.ends_ms[key] <= now:
                    del self.ends_ms[key]
                    worker.finish(key)

    def _leaving(self) -> list[Attempt]:
        """All that runs but services, whose end nobody knows."""
        return [each for each in self.drive.state.attempts() if not each.replica.job.name.startswith(SERVICE)]

    def _fits_beside_services(self, who: Waiting, excluded: tuple[int, ...]) -> bool:
        return starts(self, who, excluded, without=self._leaving())

    def _is_promised(self, who: Waiting) -> bool:
        """Whether it must start: for a job that shares devices no host with a service is reserved."""
        gpu = who.request.effective_gpu
        shares = gpu is not None and gpu.effective_sharing != "exclusive"
        services = {m.worker.num for m in self.drive.state.attempts() if m.replica.job.name.startswith(SERVICE)}
        return self._fits_beside_services(who, tuple(services) if shares else ())

    def _confirm_reservation(self) -> None:
        """The hosts of a new reservation hold its job, once all but services have left them."""
        held = self.drive.engine.planner.verdicts.reservation
        if held is None or (held.num, held.hosts) == self.reserved:
            return
        self.reserved = held.num, held.hosts
        found = [who for who in waiting_in(self.drive.state) if who.job.num == held.num]
        others = tuple(host for host in self.drive.engine.fleet.hosts if host not in held.hosts)
        for who in found[:1]:
            self.found["reserved hosts"] += 1
            assert self._fits_beside_services(who, others), f"hosts are reserved for {who.name}, which they cannot hold"
