"""Random sites of teams that ask much of one queue at once; each promise is judged from requests and reports alone.

Nothing here asks the scheduler how it decides: `Attempts` counts ends by the words of the requests.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, Final

from msgspec.structs import replace

from moorage.scheduler.core.events import ChangeOrder, Order
from moorage.scheduler.core.ledger.holding import spent_at
from moorage.scheduler.core.ledger.state import Job
from moorage.scheduler.core.outputs.outputs import Outputs
from moorage.schemas.attempt import AttemptName
from moorage.schemas.capabilities import Capabilities
from moorage.schemas.codec import decode_request
from moorage.schemas.job import STATES
from moorage.schemas.operate import ChangeAsked, act_of
from tests.unit.scheduler.driving import H100, Driving
from tests.unit.scheduler.honest_worker import devices
from tests.unit.scheduler.lifecycle.gang_worlds import is_whole

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
    *("submit",) * 6, *("end",) * 8, *("limit",) * 2, *("time",) * 2, "requeue", "lead", "counter", "release", "relimit"
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
    *(("gpus_of", (1, 2, 2)),) * 4,
)
#: what requests ask of labels, and which values pass; None: without the label
LABELS: Final[tuple[tuple[dict[str, Any], tuple[str | None, ...]], ...]] = (
    ({"requires": {"tier": ["fast"]}}, ("fast",)),
    ({"requires": {"tier": ["fast", "slow"]}}, ("fast", "slow")),
    ({"where": ["tier!=slow"]}, ("fast", None)),
)
MODELS: Final = {"H100": H100, "L4": "NVIDIA L4"}
WEIGHTS: Final = {"L4": 0.2}
#: gangs of unlike parts: the GPUs of each rank and their model, the cores in thousandths, how many ranks
GROUPS: Final = (
    ((1, "H100", 0, 2), (1, "L4", 1_000, 1)),
    ((2, None, 4_000, 1), (0, None, 2_000, 1)),
    ((1, "L4", 0, 1), (1, None, 0, 2)),
)


def _group(row: tuple[int, str | None, int, int], at: int) -> dict[str, Any]:
    gpus, model, cpu_milli, replicas = row
    found: dict[str, Any] = {"name": f"part{at}", "replicas": replicas}
    if gpus:
        found["gpu"] = {"count": gpus, **({"model": model} if model else {})}
    if cpu_milli:
        found["resources"] = {"cpu_milli": cpu_milli}
    return found


def ranks_of(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """What each rank of a gang asks for; of another job, what a replica does."""
    groups = fields.get("groups", [])
    return [group for group in groups for _ in range(group["replicas"])] if groups else [fields]


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
        self.models: dict[str, str] = {}  # by host
        self.cameras: dict[str, int] = {}
        self.labels = random.Random(f"labels {seed}")  # drawn apart: seeds that showed something stay as they were
        self.tiers: dict[str, list[str | None]] = {}  # by host, the label of each GPU, and last its own
        self.passing: dict[tuple[str, str], tuple[str | None, ...]] = {}  # by job, the labels that it asks for
        self.of_models: dict[str, dict[str, int]] = {each: {} for each in TENANTS}  # limits of tenants
        self.had_of = {each: Counter[str]() for each in TENANTS}
        self.spent: dict[str, float] = {}  # of tenants with a budget, thousandths of GPU ms
        self.counted_ms = 0
        self.rates = dict.fromkeys(TENANTS, 0.0)  # what their attempts count in a budget
        self.hosts = [f"w{number}" for number in range(dice.randint(1, 4))]
        for host in self.hosts:
            # an agent of an earlier release cannot change the time limit of what runs
            can = {"noop": Capabilities(relimits=dice.random() < 0.8)}
            self.models[host] = model = dice.choice(("H100", "H100", "L4"))
            gpus = dice.choice([2, 4])
            self.cameras[host] = cameras = dice.choice([0, 1, 2])
            counts = {"camera": cameras} if cameras else {}
            more: dict[str, Any] = {"cpu_milli": 32_000, "memory_mib": 64_000, "counts": counts, "capabilities": can}
            self.tiers[host] = tiers = [self.labels.choice(("fast", "slow", None)) for _ in range(gpus + 1)]
            pool = [
                replace(device, labels={"tier": tier} if tier else {})
                for device, tier in zip(devices(host, [MODELS[model]] * gpus), tiers, strict=False)
            ]
            own = {"tier": tiers[-1]} if tiers[-1] else {}
            self.worker(host, gpu_pool=pool, labels=own, **more)
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
        if dice.random() < 0.2:
            fields = {"groups": [_group(each, at) for at, each in enumerate(dice.choice(GROUPS))]}
        elif dice.random() < 0.4:
            fields["gpu"]["model"] = dice.choice(("H100", "L4", ["L4", "H100"]))
        is_gang = "groups" in fields
        if rows and not is_gang:
            fields["retry"] = rows
        if dice.random() < 0.4 and not is_gang:
            fields["resources"] = {
                "cpu_milli": dice.choice([1_000, 4_000, 9_000]),
                "memory_mib": dice.choice([0, 9_000]),
            }
        if dice.random() < 0.3:
            names = dice.sample(("lic", "mine"), dice.choice([1, 1, 2]))
            fields["uses"] = {name: dice.choice([1, 1, 2]) for name in names}
        if dice.random() < 0.2:
            fields.setdefault("uses", {})["host.camera"] = 1
        if dice.random() < 0.15:
            fields["hold"] = True
        if dice.random() < 0.4:
            fields["fair_key"] = dice.choice(("ana", "bo"))
            if dice.random() < 0.2:
                fields["fair_weight"] = dice.choice((1, 3, 100))
        asks, passing = self.labels.choice(LABELS) if self.labels.random() < 0.3 else ({}, ())
        answer = self.submit(job, tenant=tenant, on_no_match="wait", **fields, **asks)
        over = self.over(tenant, fields)
        if passing and set(over) <= {"gpus_of"} and any(self.of_models[tenant].values()):
            over = ["gpus_of"] * (answer["kind"] != "accepted")  # it goes by the models whose GPUs have the labels
        assert (answer["kind"] == "accepted") == (not over), (answer, over)
        self.names += 1
        if not over:
            self.jobs[tenant, job] = fields
            if passing:
                self.passing[tenant, job] = passing
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
        cameras = Counter[str]()
        for attempt in self.state.attempts():
            cameras[attempt.worker.id] += self.jobs[attempt.name[:2]].get("uses", {}).get("host.camera", 0)
        assert all(count <= self.cameras[host] for host, count in cameras.items()), f"{cameras} of {self.cameras}"
        self.ends["cameras"] += cameras.total()
        for (tenant, name), fields in self.jobs.items():
            job = self.state.job(tenant, name)
            if job is None or not job.waits or self.explained(name, tenant)["reason"] != "counter":
                continue
            has = {"lic": total["lic"], "mine": used[tenant]["mine"]}
            wants = [row for row in fields["uses"].items() if row[0] in has]
            ranks = len(ranks_of(fields))
            short = [each for each, n in wants if has[each] + n * ranks > self.counters.get(each, 0)]
            assert short, f"{name} waits for no counter"
            self.ends["counted"] += 1

    def _limit(self) -> None:
        """An operator sets or removes one limit of a tenant."""
        dice, tenant = self.dice, self.dice.choice(TENANTS)
        name, values = dice.choice(LIMITS)
        value = dice.choice([0, *values])
        if name == "gpus_of":
            model = dice.choice(sorted(MODELS))
            assert self.order("limit", tenant=tenant, gpus_of={model: value})["kind"] == "done"
            self.of_models[tenant][model] = int(value)
            self.had_of = {each: self.has_of(each) for each in TENANTS}
            return
        on_spent = {"period": "day", "on_spent": dice.choice(("wait", "preemptible")), "gpu_weights": WEIGHTS}
        more = on_spent if name == "gpu_hours" else {}
        assert self.order("limit", tenant=tenant, **{name: value}, **more)["kind"] == "done"
        self.limits.setdefault(tenant, {})[name] = value
        if name == "gpu_hours":
            self.spent.setdefault(tenant, 0)
            if not value:
                del self.spent[tenant]
        self.had = {each: self.has(each) for each in TENANTS}

    def needs(self, fields: dict[str, Any]) -> dict[str, float]:
        """What one replica of a job, or a gang, needs, by the limits that count it."""
        found = dict.fromkeys(("gpus", "cores", "memory_mib"), 0.0)
        for part in ranks_of(fields):
            for name, need in self.held_by(part).items():
                found[name] += need
        return {**found, "running": 1}

    @staticmethod
    def held_by(part: dict[str, Any]) -> dict[str, float]:
        """What a replica holds, as its request or its group says."""
        host = part.get("resources", {})
        cores, memory = host.get("cpu_milli", 0) / 1000, host.get("memory_mib", 0)
        return {"gpus": part.get("gpu", {}).get("count", 0), "cores": cores, "memory_mib": memory}

    def needs_of(self, fields: dict[str, Any], model: str) -> int:
        """How many GPUs a job needs of a model, if all comes on it that may and the fleet has it."""
        there = model in self.models.values()
        parts = [part["gpu"] for part in ranks_of(fields) if "gpu" in part and there]
        return sum(gpu["count"] for gpu in parts if not gpu.get("model") or model in gpu["model"])

    def must_have(self, fields: dict[str, Any], models: list[str]) -> bool:
        """Whether some of a job can come on hosts with one of these models alone."""
        others = set(self.models.values()) - set(models)
        parts = [part["gpu"].get("model") for part in ranks_of(fields) if "gpu" in part]
        return any(not others & set([model] if isinstance(model, str) else model or MODELS) for model in parts)

    def short_of(self, tenant: str, fields: dict[str, Any]) -> list[str]:
        """The models of which the limits leave too few for a job."""
        has = self.has_of(tenant)
        bounds = self.of_models[tenant].items()
        return [model for model, most in bounds if most and self.needs_of(fields, model) > most - has[model]]

    def has_of(self, tenant: str) -> Counter[str]:
        """How many GPUs of each model a tenant's attempts hold."""
        found = Counter[str]()
        for attempt in self.state.attempts():
            if attempt.name[0] == tenant:
                found[self.models[attempt.worker.id]] += attempt.mask.bit_count()
        return found

    def tick(self, ms: int = 1, *, obey: bool = True) -> Outputs:
        out = super().tick(ms, obey=obey)
        self._count()
        return out

    def _count(self) -> None:
        """Add to what tenants have spent what they held up to the last record."""
        passed, self.counted_ms = self.state.time_ms - self.counted_ms, self.state.time_ms
        for tenant in self.spent:
            self.spent[tenant] += passed * self.rates[tenant]
        for tenant in TENANTS:
            self.rates[tenant] = sum(n * WEIGHTS.get(model, 1) for model, n in self.has_of(tenant).items())

    def over(self, tenant: str, fields: dict[str, Any]) -> list[str]:
        """Which limits a job could never start under."""
        found, needs = self.limits.get(tenant, {}), self.needs(fields)
        names = ("gpus", "cores", "memory_mib")
        for part in ranks_of(fields) if "groups" not in fields else []:
            full = [model for model, most in self.of_models[tenant].items() if 0 < most < self.needs_of(part, model)]
            if part["gpu"].get("model") and full and self.must_have(part, full):
                return ["gpus_of"]
        for group in fields.get("groups", ()):
            whole = {"groups": [group]}
            full = [model for model, most in self.of_models[tenant].items() if 0 < most < self.needs_of(whole, model)]
            if group.get("gpu", {}).get("model") and full and self.must_have(whole, full):
                return ["gpus_of"]
        return [name for name in names if 0 < found.get(name, 0) < needs[name]] + [
            "job_gpus" for _ in range(1) if 0 < found.get("job_gpus", 0) < needs["gpus"]
        ]

    def has(self, tenant: str) -> dict[str, float]:
        """What a tenant's attempts hold, as their workers say, with those that their workers do not know of yet."""
        found = dict.fromkeys(("gpus", "cores", "memory_mib", "running"), 0.0)
        for attempt in self.state.attempts():
            if attempt.name[0] == tenant:
                fields, index = self.jobs[attempt.name[0], attempt.name[1]], attempt.name[2]
                part = ranks_of(fields)[index] if "groups" in fields else fields
                for name, need in self.held_by(part).items():
                    found[name] += need
                found["running"] += "groups" not in fields or index == 0
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
        if "groups" in self.jobs[name[0], name[1]]:
            code, detail, causes = ENDS[0]  # what an end of a rank does to its gang is a matter of other worlds
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
            if job.gang:
                is_whole(job)
                self.ends["gangs"] += job.on_workers > 0
        for tenant in TENANTS:
            self._judge_limits(tenant)
        self._judge_counters()
        self._judge_labels()
        for host in self.hosts:
            for key, held in self.workers[host].held.items():
                asked = decode_request(held.place.body).workload.timeout_s
                assert asked == self.times.get(key[:2]), f"{key} has {asked} s"
        for tenant, name in self.held:
            assert not self.job(name, tenant).on_workers, f"{tenant}/{name} is on hold, and starts"

    def _judge_labels(self) -> None:
        """Each GPU of an attempt has the label that its job asks for; one without the label, if its host has it."""
        for attempt in self.state.attempts():
            passing = self.passing.get(attempt.name[:2])
            *of_gpus, own = self.tiers[attempt.worker.id]
            has = [tier or own for slot, tier in enumerate(of_gpus) if attempt.home >> slot & 1] or [own]
            assert passing is None or set(has) <= set(passing), f"{attempt.name} has {has}, and asks for {passing}"
            self.ends["labelled"] += passing is not None

    def _judge_limits(self, tenant: str) -> None:
        limits, has, had = self.limits.get(tenant, {}), self.has(tenant), self.had.get(tenant, {})
        for name, held in has.items():
            most = limits.get(name, 0)
            assert not most or held <= max(most, had.get(name, 0)), f"{tenant} has {held} of {most} {name}"
        self.had[tenant] = has
        has_of, had_of = self.has_of(tenant), self.had_of[tenant]
        for model, most in self.of_models[tenant].items():
            assert not most or has_of[model] <= max(most, had_of[model]), f"{tenant} has {has_of} of {most} {model}"
        self.had_of[tenant] = has_of
        row = self.state.tenants.get(tenant)
        if row is not None and row.spent is not None:
            told = spent_at(row, self.state.time_ms).gpu_ms
            assert abs(told - self.spent[tenant]) <= 500, f"{tenant} has spent {told}, and held {self.spent[tenant]}"
            self.ends["spent"] += told > 0
        self._judge_keys(tenant)
        for job in self.state.tenants[tenant].jobs.values() if tenant in self.state.tenants else ():
            if job.waits and self.explained(job.name, tenant)["reason"] == "limit":
                short = [
                    name
                    for name, need in self.needs(self.jobs[tenant, job.name]).items()
                    if limits.get(name, 0) and need > limits[name] - has[name]
                ]
                fields = self.jobs[tenant, job.name]
                ranks = len(ranks_of(fields)) if "groups" in fields else 1
                short += [key for key in self.keys[tenant] if self.keys[tenant][key] + ranks > self.per_key(tenant)]
                short += ["fair_key"] if ranks > self.per_key(tenant) else []
                by_model = self.short_of(tenant, fields)
                self.ends["by model"] += bool(by_model)
                short += by_model
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
        ) or any(self.short_of(job.tenant, self.jobs[job.tenant, each.name]) for each in others)

    def _judge_ends(self, job: Job) -> None:
        for index in range(job.size):
            key, state = (job.tenant, job.name, index), STATES[job.state_of(index) or 0]
            failed = state == "FAILED"
            assert failed == (key in self.fails), f"{key} is {state}, and {'may' if failed else 'may not'} go on"
