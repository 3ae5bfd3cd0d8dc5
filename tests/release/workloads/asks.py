"""Random sites of teams that ask much of one queue at once; each promise is judged from requests and reports alone.

Nothing here asks the scheduler how it decides: `Attempts` counts ends by the words of the requests.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, Final

from moorage.scheduler.core.events import ChangeOrder, Order
from moorage.scheduler.core.ledger.state import Job
from moorage.schemas.attempt import AttemptName
from moorage.schemas.capabilities import Capabilities
from moorage.schemas.codec import decode_request
from moorage.schemas.job import STATES
from moorage.schemas.operate import ChangeAsked, act_of
from tests.unit.scheduler.driving import Driving

ASKS_FROM: Final = 9_100_000
TENANTS: Final = ("t", "u", "v")
#: how an attempt may end by itself: code, the worker's word, and the causes that fit, most exact first
ENDS: Final = (
    (0, "exit", ()),
    (1, "exit", ("exit:1", "failure")),
    (75, "exit", ("exit:75", "failure")),
    (-11, "exit", ("signal", "exit:139", "failure")),
    (-9, "out of memory: it was killed by the kernel", ("oom signal", "exit:137", "failure")),
    (127, "start-failed: exec: no such file", ("start", "exit:127", "failure")),
    (-9, "lost", ("lost",)),
    (-15, "end", ()),  # what was asked to end counts for nothing
)
ACTS: Final = (
    *("submit",) * 6, *("end",) * 8, "requeue", "lead", "limit", "counter", "release", "time", "time", "relimit"
)  # fmt: skip
ROWS: Final[tuple[dict[str, Any], ...]] = (
    {"on": ["exit:75", "oom"], "times": 2},
    {"on": "failure", "times": 1, "pause_s": 3},
    {"on": "exit:1", "times": 0},
    {"on": ["signal"], "times": 3, "pause_s": 0},
    {"on": "lost", "times": 1},
    {"on": ["start", "exit:137"], "times": 1},
)


#: limits of a tenant, with values of each
LIMITS: Final[tuple[tuple[str, tuple[float, ...]], ...]] = (
    ("gpus", (1, 2, 4)),
    ("cores", (4, 9.5, 16)),
    ("memory_mib", (9_000, 20_000)),
    ("running", (1, 2, 5)),
    ("running_per_key", (1, 2, 4)),
    ("job_gpus", (1, 2)),
    ("gpu_hours", (0.01, 1)),
)


class Attempts:
    """What the ends of one replica's attempts allow: counted by the rows of its request."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        self.used = Counter[int]()
        self.losses = 0

    def allows(self, causes: tuple[str, ...]) -> bool:
        """Take one end with these causes; return whether another attempt follows it."""
        for fits in causes:
            for at, row in enumerate(self.rows):
                if not set(fits.split()).isdisjoint([row["on"]] if isinstance(row["on"], str) else row["on"]):
                    self.used[at] += 1
                    return self.used[at] <= int(row["times"])
        self.losses += causes == ("lost",)
        return causes == ("lost",) and self.losses <= 3


class Asks(Driving):
    """A site of one seed."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = random.Random(seed)
        super().__init__()
        self.hosts = [f"w{number}" for number in range(dice.randint(1, 4))]
        for host in self.hosts:
            # an agent of an earlier release cannot change the time limit of what runs
            can = {"noop": Capabilities(relimits=dice.random() < 0.8)}
            self.worker(host, dice.choice([2, 4]), cpu_milli=32_000, memory_mib=64_000, capabilities=can)
        self.limits: dict[str, dict[str, float]] = {}
        self.counters: dict[str, int] = {}
        self.held: set[tuple[str, str]] = set()  # jobs that their tenants hold
        self.used = {each: Counter[str]() for each in TENANTS}
        self.had: dict[str, dict[str, float]] = {}
        self.keys = {each: Counter[str]() for each in TENANTS}  # by tenant, the attempts of each fair key
        #: by job, the time limit of what runs and of what comes later
        self.times: dict[tuple[str, str], float] = {}
        self.names = 0
        self.jobs: dict[tuple[str, str], dict[str, Any]] = {}
        self.attempts: dict[tuple[str, str, int], Attempts] = {}
        self.fails: set[tuple[str, str, int]] = set()  # replicas of which no other attempt may follow
        self.ends = Counter[str]()  # of attempts by what followed: a world in which nothing ends shows nothing

    def run(self) -> None:
        for _ in range(self.dice.randint(40, 120)):
            self.act()
            self.settle()
            self.look()
        self.pass_time(90_000)
        self.look()

    # ------------------------------------------------------------------------------------------------- acts

    def act(self) -> None:
        """Do one thing."""
        what = self.dice.choice(ACTS)
        if what == "submit":
            self._submit()
        elif what == "end":
            self._end()
        elif what == "requeue" and self.jobs:
            tenant, job = self.dice.choice(sorted(self.jobs))
            self.order("requeue", tenant=tenant, job=job)
        elif what == "lead":
            self.dice.choice((self.lead, self.lead_from_snapshot))()
            self.renew()
        elif what == "release":
            self._release()
        elif what == "relimit" and self.jobs:
            self._relimit()
        elif what == "counter":
            self._counter()
        elif what == "limit":
            self._limit()
        elif what == "time":
            self.pass_time(self.dice.choice((1_000, 5_000, 61_000)), step=1_000)

    def _submit(self) -> None:
        dice, tenant, job = self.dice, self.dice.choice(TENANTS), f"j{self.names}"
        rows = dice.sample(ROWS, dice.randint(0, 3))
        fields: dict[str, Any] = {"gpu": {"count": dice.choice([1, 1, 2])}, "replicas": dice.choice([1, 1, 3])}
        if rows:
            fields["retry"] = rows
        if dice.random() < 0.4:
            fields["resources"] = {
                "cpu_milli": dice.choice([1_000, 4_000, 9_000]),
                "memory_mib": dice.choice([0, 9_000]),
            }
        if dice.random() < 0.3:
            names = dice.sample(("lic", "mine"), dice.choice([1, 1, 2]))
            fields["uses"] = {name: dice.choice([1, 1, 2]) for name in names}
        if dice.random() < 0.15:
            fields["hold"] = True
        if dice.random() < 0.4:
            fields["fair_key"] = dice.choice(("ana", "bo"))
        answer = self.submit(job, tenant=tenant, **fields)
        over = self.over(tenant, fields)
        assert (answer["kind"] == "accepted") == (not over), (answer, over)
        self.names += 1
        if not over:
            self.jobs[tenant, job] = fields
            if "hold" in fields:
                self.held.add((tenant, job))

    def _relimit(self) -> None:
        """A tenant or an operator changes the time limit of what runs of a job."""
        tenant, job = self.dice.choice(sorted(self.jobs))
        limit_s, hosts = self.dice.choice((600.0, 5_000.0)), {host for host, name in self.running() if name[1] == job}
        fails = {host for host in hosts if not self.workers[host].hello.capabilities["noop"].relimits}
        if self.dice.random() < 0.5:
            self.engine.offer(ChangeOrder(tenant, ChangeAsked(job=job, timeout_s=limit_s, running=True), "time", True))
            self.tick()
            answer = self.answers.pop("time")
        else:
            answer = self.order("time-limit", tenant=tenant, job=job, timeout_s=limit_s)
        is_over = self.job(job, tenant).live == 0
        if "reserved for another job" in answer.get("message", ""):
            assert self.engine.planner.verdicts.reservation is not None
            assert "verb" not in answer, "that keeps no operator"
            return
        assert (answer["kind"] != "error") == (not fails and not is_over), (answer, fails)
        if answer["kind"] != "error":
            self.times[tenant, job] = limit_s
            self.ends["relimited"] += 1

    def _release(self) -> None:
        """A tenant releases one of its jobs."""
        if self.held:
            tenant, job = self.dice.choice(sorted(self.held))
            self.engine.offer(ChangeOrder(tenant, ChangeAsked(job=job, hold=False), "change", True))
            self.tick()
            self.held.discard((tenant, job))

    def _counter(self) -> None:
        """An operator sets a counter, of the fleet or of each tenant."""
        name, most = self.dice.choice(("lic", "mine")), self.dice.choice((0, 1, 2, 3))
        per = "tenant" if name == "mine" else "fleet"
        answer = self.order("counter", name=name, most=most, per=per)
        assert answer["kind"] == "done", answer
        self.counters[name] = most
        self.used = {each: self.uses(each) for each in TENANTS}

    def order(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """An operator's act; that on a counter is about no tenant."""
        if verb != "counter":
            return super().order(verb, **arguments)
        self.engine.offer(Order(verb, act_of(verb, {"by": "ana", **arguments}), "counter", True))
        self.tick()
        return dict(self.answers.pop("counter"))

    def uses(self, tenant: str) -> Counter[str]:
        """How many of each counter a tenant's attempts use."""
        found = Counter[str]()
        for attempt in self.state.attempts():
            if attempt.name[0] == tenant:
                found.update(self.jobs[tenant, attempt.name[1]].get("uses", {}))
        return found

    def _judge_counters(self) -> None:
        used = {each: self.uses(each) for each in TENANTS}
        total, before = sum(used.values(), Counter[str]()), sum(self.used.values(), Counter[str]())
        assert total["lic"] <= max(self.counters.get("lic", 0), before["lic"]), f"{total} of {self.counters}"
        for tenant in TENANTS:
            most = max(self.counters.get("mine", 0), self.used[tenant]["mine"])
            assert used[tenant]["mine"] <= most, f"{tenant}: {used[tenant]} of {self.counters}"
        self.used = used
        for (tenant, name), fields in self.jobs.items():
            job = self.state.job(tenant, name)
            if job is None or not job.waits or self.explained(name, tenant)["reason"] != "counter":
                continue
            has = {"lic": total["lic"], "mine": used[tenant]["mine"]}
            wants = fields["uses"].items()
            assert any(has[each] + n > self.counters.get(each, 0) for each, n in wants), f"{name} waits for no counter"
            self.ends["counted"] += 1

    def _limit(self) -> None:
        """An operator sets or removes one limit of a tenant."""
        dice, tenant = self.dice, self.dice.choice(TENANTS)
        name, values = dice.choice(LIMITS)
        value = dice.choice([0, *values])
        more = {"period": "day", "on_spent": dice.choice(("wait", "preemptible"))} if name == "gpu_hours" else {}
        assert self.order("limit", tenant=tenant, **{name: value}, **more)["kind"] == "done"
        self.limits.setdefault(tenant, {})[name] = value
        self.had = {each: self.has(each) for each in TENANTS}

    def needs(self, fields: dict[str, Any]) -> dict[str, float]:
        """What one replica of a job needs, by the limits that count it."""
        host = fields.get("resources", {})
        return {
            "gpus": fields["gpu"]["count"],
            "cores": host.get("cpu_milli", 0) / 1000,
            "memory_mib": host.get("memory_mib", 0),
            "running": 1,
        }

    def over(self, tenant: str, fields: dict[str, Any]) -> list[str]:
        """Which limits a job could never start under."""
        found, needs = self.limits.get(tenant, {}), self.needs(fields)
        names = ("gpus", "cores", "memory_mib")
        return [name for name in names if 0 < found.get(name, 0) < needs[name]] + [
            "job_gpus" for _ in range(1) if 0 < found.get("job_gpus", 0) < needs["gpus"]
        ]

    def has(self, tenant: str) -> dict[str, float]:
        """What a tenant's attempts hold, as their workers say, with those that their workers do not know of yet."""
        found = dict.fromkeys(("gpus", "cores", "memory_mib", "running"), 0.0)
        for attempt in self.state.attempts():
            if attempt.name[0] == tenant:
                for name, need in self.needs(self.jobs[attempt.name[0], attempt.name[1]]).items():
                    found[name] += need
        return found

    def running(self) -> list[tuple[str, AttemptName]]:
        """The attempts that run, with their worker."""
        return [
            (host, name)
            for host in self.hosts
            for name, held in self.workers[host].held.items()
            if held.phase == "running" and STATES[self.job(name[1], name[0]).rows[name[2]].state] == "RUNNING"
        ]

    def _end(self) -> None:
        running = self.running()
        if not running:
            return
        host, name = self.dice.choice(running)
        code, detail, causes = self.dice.choice(ENDS[:-1])
        key = name[:3]
        rows = self.jobs[name[0], name[1]].get("retry", [])
        if code or detail != "exit":
            allowed = self.attempts.setdefault(key, Attempts(rows)).allows(causes)
            self.ends["again" if allowed else "failed"] += 1
            if not allowed:
                self.fails.add(key)
        self.workers[host].finish(name, code, detail)

    # ------------------------------------------------------------------------------------------------- looks

    def look(self) -> None:
        """Judge the state from what was asked."""
        for job in self.state.jobs.values():
            self._judge_ends(job)
        for tenant in TENANTS:
            self._judge_limits(tenant)
        self._judge_counters()
        for host in self.hosts:
            for key, held in self.workers[host].held.items():
                asked = decode_request(held.place.body).workload.timeout_s
                assert asked == self.times.get(key[:2]), f"{key} has {asked} s"
        for tenant, name in self.held:
            assert not self.job(name, tenant).on_workers, f"{tenant}/{name} is on hold, and starts"

    def _judge_limits(self, tenant: str) -> None:
        limits, has, had = self.limits.get(tenant, {}), self.has(tenant), self.had.get(tenant, {})
        for name, held in has.items():
            most = limits.get(name, 0)
            assert not most or held <= max(most, had.get(name, 0)), f"{tenant} has {held} of {most} {name}"
        self.had[tenant] = has
        self._judge_keys(tenant)
        for job in self.state.tenants[tenant].jobs.values() if tenant in self.state.tenants else ():
            if job.waits and self.explained(job.name, tenant)["reason"] == "limit":
                short = [
                    name
                    for name, need in self.needs(self.jobs[tenant, job.name]).items()
                    if limits.get(name, 0) and need > limits[name] - has[name]
                ]
                short += [key for key, count in self.keys[tenant].items() if count >= self.per_key(tenant)]
                assert short or self._is_behind(job, limits, has), f"{tenant}/{job.name} waits for no limit"
                self.ends["limited"] += 1

    def per_key(self, tenant: str) -> float:
        """How many attempts each key of a tenant may have."""
        has_keys = any("fair_key" in fields for (whose, _), fields in self.jobs.items() if whose == tenant)
        return (self.limits.get(tenant, {}).get("running_per_key", 0) if has_keys else 0) or float("inf")

    def _judge_keys(self, tenant: str) -> None:
        keys = Counter(
            self.jobs[tenant, each.name[1]].get("fair_key", "")
            for each in self.state.attempts()
            if each.name[0] == tenant
        )
        before, self.keys[tenant] = self.keys[tenant], keys
        for key, count in keys.items():
            assert count <= max(self.per_key(tenant), before[key]), f"{tenant} has {keys}"

    def _is_behind(self, job: Job, limits: dict[str, float], has: dict[str, float]) -> bool:
        """Whether another job of the tenant waits that needs more than a limit leaves."""
        others = [each for each in self.state.tenants[job.tenant].jobs.values() if each.waits and each is not job]
        return any(
            limits.get(name, 0) and need > limits[name] - has[name]
            for each in others
            for name, need in self.needs(self.jobs[job.tenant, each.name]).items()
        )

    def _judge_ends(self, job: Job) -> None:
        for index in range(job.size):
            key, state = (job.tenant, job.name, index), STATES[job.state_of(index) or 0]
            failed = state == "FAILED"
            assert failed == (key in self.fails), f"{key} is {state}, and {'may' if failed else 'may not'} go on"
