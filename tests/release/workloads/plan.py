"""What a case asks of the scheduler, drawn from a seed: a fleet, settings, and some hundred steps as plain data.

A plan knows nothing of what becomes of it. A step that names a job, a worker or a running attempt names it by a number,
which is taken modulo what there is by then. So a plan with steps left out is a plan, too (`shrink`), and one seed is
the same case everywhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from moorage.schemas.frames import NOT_HERE, NOT_PERMITTED
from moorage.testing.requests import after_of, beside
from tests.release.workloads.themes import (
    ADDED,
    ADDED_FROM,
    ALL,
    BEHIND,
    BEHIND_FROM,
    LABELLED,
    LABELLED_FROM,
    LENT,
    LENT_FROM,
    RANGES,
    RANGES_FROM,
    THEMES,
)

H100: Final = "NVIDIA H100 80GB HBM3"
L40S: Final = "NVIDIA L40S"
A10: Final = "NVIDIA A10"
A100: Final = "NVIDIA A100-SXM4-80GB"
T4: Final = "Tesla T4"
MI300: Final = "AMD Instinct MI300X"
VENDOR_OF: Final = {MI300: "amd"}
MEMORY_OF: Final = {H100: 81_559, L40S: 46_068, A10: 23_028, A100: 81_920, T4: 15_360, MI300: 196_592}
#: models that are asked for; nobody has the last three
ASKED: Final = (None, None, None, "H100", "L40S", "=A10", "A10", ["A100", "T4"], "mi300", "B300", "GH200", ["X", "Y9"])
TENANTS: Final = ("t", "t", "u", "v")
#: profiles of MIG slices, with their memory; no worker has the last one
PROFILES: Final = {"1g.10gb": 9_728, "1g.12gb": 11_264, "3g.40gb": 40_192, "7g.80gb": 80_896}
#: how workers keep jobs to their part of a device: by driver and sharing mode, as a hello tells it
_GUARDED: Final = {"memory": "guarded", "compute": "advisory"}
_HARD: Final = {"memory": "hard", "compute": "hard"}
LEVELS: Final[tuple[dict[str, Any], ...]] = (
    {"noop": {"enforced": {"mps": _GUARDED}}},
    {"noop": {"enforced": {"mps": _HARD, "time-slice": _GUARDED}}, "process": {"enforced": {"mps": _GUARDED}}},
    {"noop": {"gpu_enabled": False}, "process": {"enforced": {"exclusive": _GUARDED, "mps": _HARD}}},
)
#: why a worker refuses a placement; the first two are about the job, which then goes elsewhere
REFUSALS: Final = (
    NOT_PERMITTED + "tenant t may not have this here",
    NOT_HERE + "no handler of that name",
    "device-busy 0",
    "start-failed: request: no memory",
    "time-slicing-config-missing",
    "",
)


class Step(NamedTuple):
    """One thing that happens: `verb` is a method of `world.World`, `given` its arguments by name."""

    verb: str
    given: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.verb} " + " ".join(f"{name}={value!r}" for name, value in self.given.items())


class Plan(NamedTuple):
    """`settings` are fields of the scheduler's `Config`; `small` makes the bounds of soft tables small."""

    seed: int
    theme: str
    settings: dict[str, Any]
    small: bool
    steps: list[Step]


class Draw:
    """Draws from one seed. `odds` by name are the theme's: how often something is asked for."""

    def __init__(self, seed: int, odds: dict[str, float]) -> None:
        self.random = random.Random(seed)
        self.odds = odds
        self.jobs = 0
        self.of: dict[str, list[str]] = {}  # by tenant, its jobs that others may name
        self.workers = 0
        self.steps: list[Step] = []

    def pick(self, *of: Any) -> Any:
        return self.random.choice(of)

    def chance(self, name: str) -> bool:
        return self.random.random() < self.odds.get(name, 0.0)

    def may(self, name: str) -> bool:
        """As `chance`, for a kind that came later: the seeds before `ADDED_FROM` draw nothing for it."""
        return name in self.odds and self.chance(name)

    def add(self, step: str, /, **given: Any) -> None:
        self.steps.append(Step(step, given))

    def salt(self) -> int:
        return self.random.randrange(1 << 30)

    # ------------------------------------------------------------------------------------------------- the fleet

    def worker(self, **fixed: Any) -> None:
        """A worker joins; `fixed` fields are not drawn."""
        count = len(fixed.get("models", ())) or (self.pick(0, 1, 1, 2, 2, 4, 8) if not self.chance("large") else 64)
        model = self.pick(H100, H100, L40S, A10, A100, T4, MI300)
        models = [model] * count
        if count > 1 and self.chance("mixed host"):
            models = [self.pick(H100, L40S, A10) for _ in range(count)]
        spec: dict[str, Any] = {
            "models": models,
            "memory_known": not self.chance("no memory"),
            "cpu_milli": self.pick(0, 0, 4_000, 16_000, 64_000),
            "memory_mib": self.pick(0, 0, 16_384, 131_072),
        }
        if self.chance("label"):
            spec["labels"] = {"zone": self.pick("a", "b"), "host": f"w{self.workers}"}
        if self.chance("few modes"):
            spec["modes"] = self.pick(["exclusive"], ["exclusive", "mps"], ["mps", "time-slice"])
        if self.chance("few drivers"):
            spec["drivers"] = self.pick(["noop"], ["process"])
        if self.chance("rules"):
            spec["drivers_for"] = self.pick({"t": ["noop"], "*": ["process"]}, {"u": []}, {"*": ["noop"]})
        if self.chance("few sharers"):
            spec["sharers_max"] = {"mps": self.pick(1, 2), "time-slice": self.pick(1, 2, 3)}
        if count > 1 and self.chance("not all lent"):
            spec["lent_slots"] = sorted(self.random.sample(range(count), self.random.randrange(1, count)))
        if count > 1 and self.chance("linked"):
            spec["numa"] = count // 2
        self._describe(spec, count)
        self.workers += 1
        self.add("join", name=f"w{self.workers - 1}", spec=spec | fixed)

    def _describe(self, spec: dict[str, Any], count: int) -> None:
        """What a worker tells of its devices and drivers beside their number and models."""
        if self.may("slices"):
            spec["profiles"] = [self.pick("", *list(PROFILES)[:-1]) for _ in range(count)]
        if self.may("capability"):
            spec["computes"] = [self.pick("", "8.0", "8.6", "9.0") for _ in range(count)]
        if self.may("slot modes"):
            spec["slot_modes"] = [self.pick([], ["exclusive"], ["mps"], ["mps", "time-slice"]) for _ in range(count)]
        if self.may("slot labels"):
            of = {"zone": ("a", "b"), "tier": ("fast", "slow"), "rev": ("1", "2.5", "x")}
            spec["slot_labels"] = [
                {label: self.pick(*values) for label, values in of.items() if self.random.random() < 0.4}
                for _ in range(count)
            ]
        if self.may("users"):
            spec["mps_users"] = self.pick({}, {"*": 0}, {"t": 0, "u": 1, "v": 1}, {"t": 0, "*": 1}, {"u": 0})
        if self.may("levels"):
            spec["capabilities"] = self.pick(*LEVELS)
        if self.may("resize"):
            how = {"mps": self.pick("counted", "next-attempt"), "time-slice": self.pick("counted", "live")}
            spec["capabilities"] = {name: {"resizes": how} for name in ("noop", "process")}
        if self.may("freezing"):
            able = spec.get("capabilities", {}).get("noop", {}) if "resize" in self.odds else {}
            able = able | {"freezes": True}
            if self.may("no fence"):
                able["fence"] = "none"
            spec["capabilities"] = dict.fromkeys(("noop", "process"), able)

    # ------------------------------------------------------------------------------------------------- the requests

    def gpu(self) -> dict[str, Any] | None:
        """The `gpu` object of a request."""
        if self.chance("no gpu"):
            return None
        gpu: dict[str, Any] = {}
        if self.chance("many gpus"):
            gpu["count"] = self.pick(2, 2, 3, 4, 8, 64)
        model = self.pick(*ASKED)
        if model is not None and self.chance("model"):
            gpu["model"] = model
        elif self.chance("vendor"):
            gpu["vendor"] = self.pick("", "amd", "nvidia", "nobody")
        if self.chance("least memory"):
            gpu["min_memory_mib"] = self.pick(1, 20_000, 40_000, 80_000, 500_000)
        if self.chance("share"):
            gpu["sharing"] = self.pick("mps", "mps", "time-slice")
            if self.chance("part"):
                gpu["share"] = {"memory_mib": self.pick(0, 1_000, 20_000), "compute_percent": self.pick(10, 40, 100)}
            if gpu["sharing"] == "time-slice" and "count" not in gpu and self.chance("slot"):
                gpu["time_slice_index"] = self.pick(0, 0, 1, 9)
        if self.chance("gang"):
            gpu["scheduling"] = "gang"
        elif self.chance("spread"):
            gpu["scheduling"] = "spread"
        self._more_of(gpu)
        return gpu

    def _more_of(self, gpu: dict[str, Any]) -> None:
        if self.may("least capability"):
            gpu["min_compute_capability"] = self.pick("7.5", "8.0", "8.6", "9.0", "12.0")
        if "sharing" in gpu and self.may("prefer"):
            gpu["prefer"] = self.pick("pack", "spread")
        if self.may("enforce"):
            share = gpu.get("share", {})
            memory = self.pick("advisory", "guarded", "hard") if share.get("memory_mib") else None
            compute = self.pick("advisory", "hard") if share.get("compute_percent", 100) < 100 else None
            gpu["enforce"] = {"memory": memory, "compute": compute}
            if "sharing" not in gpu:
                gpu["enforce"] = {"memory": self.pick("guarded", "hard")}
        if self.may("profile"):
            for name in ("count", "sharing", "share", "prefer", "enforce", "time_slice_index"):
                gpu.pop(name, None)
            gpu["profile"] = self.pick(*PROFILES)

    def ids(self) -> list[str]:
        """Names of some devices: of one worker by uuid or address, or by their index on whatever worker."""
        worker = self.random.randrange(max(1, self.workers))
        slots = self.random.sample(range(self.pick(2, 4, 8)), self.pick(1, 1, 1, 2))
        spelled: dict[str, Callable[[int], str]] = {
            "uuid": lambda slot: f"gpu-OF-the-worker-w{worker}-{slot}",
            "slice": lambda slot: f"MIG-of-the-worker-w{worker}-{slot}",
            "address": lambda slot: address(f"w{worker}", slot),
            "index": str,
        }
        first, then = (self.pick("uuid", "uuid", "slice", "address", "index", "index") for _ in range(2))
        return [spelled[then if number else first](slot) for number, slot in enumerate(slots)]

    def request(self) -> dict[str, Any]:
        """The fields of a request, all but its id."""
        gpu = self.gpu()
        fields: dict[str, Any] = {
            "gpu": gpu,
            "replicas": self.pick(1, 1, 1, 1, 2, 3),
            "priority": self.pick(50, 50, 50, 10, 60, 80, 90) if self.chance("priority") else 50,
            "run": {"driver": "noop", "argv": [self.pick("a", "b")]},
            "retries": self.pick(0, 1),
        }
        if self.chance("limit of time"):
            fields["run"]["timeout_s"] = self.pick(1, 5, 5, 30, 600, 86_400)
            fields["run"]["grace_s"] = self.pick(0, 1, 10)
        if self.chance("other driver"):
            fields["run"] |= {"driver": self.pick("process", "docker"), "argv": ["true"]}
        if self.may("user"):
            fields["run"]["user"] = self.pick("alice", "bob")
        if self.chance("resources"):
            fields["resources"] = {
                "cpu_milli": self.pick(0, 500, 2_000, 8_000),
                "memory_mib": self.pick(0, 1_024, 16_384, 10**6),
            }
        if self.chance("requires"):
            fields["requires"] = self.pick({"zone": ["a"]}, {"zone": ["a", "b"]}, {"host": ["w0", "w1"]}, {"no": ["x"]})
        if self.may("requires of gpus"):
            both = {"tier": ["slow"], "zone": ["a", "b"]}
            fields["requires"] = self.pick({"tier": ["fast"]}, {"zone": ["a"]}, both, {})
            fields["where"] = self.pick([], [], ["zone!=a"], ["rev>=2"], ["rev<2", "tier!=slow"], ["host!=w0"])
        if self.chance("deadline"):
            fields["deadline_s"] = self.pick(1, 20, 60)
        if self.chance("start within"):
            fields["start_within_s"] = self.pick(1, 10)
        if self.chance("reject"):
            fields["on_no_match"] = "reject"
        if self.chance("keep"):
            fields["on_partition"] = "keep"
        elif gpu is not None and gpu.keys().isdisjoint(("sharing", "profile")) and self.may("preemptible"):
            fields["preemptible"] = gpu.get("scheduling") != "gang"
        if self.may("qos"):
            fields["qos"] = self.pick("low", "medium", "high", "critical")
        if gpu is not None and self.may("exact"):
            ids = self.ids() if "profile" not in gpu else self.ids()[:1]
            gpu |= {"count": len(ids)} if len(ids) > 1 or "count" in gpu else {}
            if len(ids) > 1:
                gpu.pop("time_slice_index", None)
            fields["driver_config"] = {fields["run"]["driver"]: {"gpu_device_ids": ids}}
        if (gpu or {}).get("scheduling") != "gang":
            self._number(fields)
        return beside(fields)

    def _number(self, fields: dict[str, Any]) -> None:
        """Replicas under numbers of their own, and bounds of how many run and fail."""
        if self.may("numbers"):
            del fields["replicas"]
            fields["indices"] = self.pick("0-7", "3-6,20,31-33", "1,3,5,7,9,11", "999999", "0-11")
        if self.may("max running"):
            fields["max_running"] = self.pick(1, 2, 2, 4)
        if self.may("max failed"):
            fields["max_failed"] = self.pick(1, 2, 3, None)

    def submit(self, **fixed: Any) -> None:
        """A job is submitted; the very same request several times over, where a batch comes."""
        fields = self.request() | fixed
        if (fields["gpu"] or {}).get("scheduling") == "gang":
            fields.pop("on_partition", None)
        tenant = self.pick(*TENANTS)
        for _ in range(self.random.randrange(2, 6) if self.chance("batch") else 1):
            if self.chance("own limit of time"):
                fields["run"] = fields["run"] | {"timeout_s": self.pick(1, 2, 60, 3_600)}
            self.jobs += 1
            if self.may("after") and (earlier := self.of.get(tenant)):
                fields = fields | {"after": after_of(self.random, earlier[-8:])}
            if "after" in self.odds:
                self.of.setdefault(tenant, []).append(f"j{self.jobs}")
            self.add("submit", tenant=tenant, job=f"j{self.jobs}", fields=fields)

    # ------------------------------------------------------------------------------------------------- what else

    def order(self) -> None:
        """An operator acts on a tenant or a job."""
        verb = self.pick("hold", "hold", "release", "limit", "limit", "share", "share", "priority", "requeue")
        given: dict[str, Any] = {"verb": verb, "tenant": self.pick("t", "t", "u", "v")}
        if verb == "limit":
            given["gpus"] = self.pick(0, 1, 2, 4, 8)
        elif verb == "share":
            given |= {"weight": self.pick(0, 1, 3), "gpus": self.pick(0, 0, 1, 4)}
        elif verb in ("priority", "requeue") or self.chance("order of a job"):
            given["job"] = self.salt()
        if verb == "priority":
            given["priority"] = self.pick(0, 50, 60, 90, 100)
        self.add("order", **given)

    def operate(self) -> None:
        """An operator acts on a worker."""
        verb = self.pick("cordon", "drain", "drain", "uncordon", "uncordon", "release")
        given: dict[str, Any] = {"verb": verb, "worker": self.salt()}
        if verb == "drain" and self.chance("window"):
            given["drain"] = self.pick(
                {"from_s": 5.0, "for_s": 10.0},
                {"from_s": 60.0, "within_s": 30.0},
                {"within_s": 20.0},
                {"from_s": 900.0, "for_s": 3_600.0},
            )
        self.add("operate", **given)

    def trouble(self) -> None:
        """Something happens to a worker or one of its devices."""
        verb = self.pick("busy", "busy", "claimer", "sick", "unwell", "restart", "die", "silence", "goodbye")
        given: dict[str, Any] = {"worker": self.salt()}
        if verb in ("busy", "sick", "unwell"):
            given["slot"] = self.salt()
        if verb == "silence":
            given["s"] = self.pick(5, 24, 40)
        self.add(verb, **given)

    def _use(self) -> None:
        """Jobs are not used and are to be frozen, or are used again; some cannot be, and some take long to end."""
        for verb in ("idle", "use"):
            if self.may(verb):
                self.add(verb, salt=self.salt(), percent=self.pick(20, 60, 100))
        if self.may("will not"):
            self.add("will not", worker=self.salt())
        if self.may("breaks"):
            self.add("breaks", worker=self.salt())
        for verb in ("lingers", "slow"):
            if self.may(verb):
                self.add(verb, percent=self.pick(0, 0, 50, 100))

    def round(self) -> None:
        """One round of a case: some of everything, then time goes on."""
        while self.chance("submit"):
            self.submit()
        if self.chance("cancel"):
            self.add("cancel", job=self.salt())
        if self.chance("order"):
            self.order()
        if self.may("resize"):
            part = {"compute_percent": self.pick(1, 10, 30, 50, 100), "memory_mib": self.pick(1, 1_000, 20_000, 80_000)}
            del part[self.pick("compute_percent", "memory_mib")]
            self.add("order", verb="resize", tenant="t", job=self.salt(), **part)
        if self.may("freeze"):
            self.add("order", verb=self.pick("freeze", "freeze", "resume"), tenant="t", job=self.salt())
        self._use()
        if self.chance("operate"):
            self.operate()
        if self.chance("trouble"):
            self.trouble()
        if self.chance("refuse"):
            self.add("refuse", salt=self.salt(), percent=self.pick(10, 50, 100), why=self.pick(*REFUSALS))
        elif self.chance("obey"):
            self.add("refuse", salt=0, percent=0, why="")
        if self.chance("join late"):
            self.worker()
        if self.chance("lead"):
            self.add("lead")
        if self.chance("work"):
            self.add("work", salt=self.salt(), percent=self.pick(10, 30, 100), code=self.pick(0, 0, 0, 1))
        if self.may("failing"):
            self.add("work", salt=self.salt(), percent=self.pick(10, 30), code=1)
        if self.may("again"):
            self.add("again", job=self.salt(), failed=self.pick(True, True, False))
        self.add("tick", ms=self.pick(5, 50, 400, 1_000, 2_000))


def address(worker: str, slot: int) -> str:
    """Return the PCI address of a device of a generated worker."""
    return f"0000:{int(worker[1:]) % 256:02x}:{slot:02x}.0"


_PREEMPTED: Final = ("preemption", "exact devices, preempted", "lent, preempted")


def _settings(draw: Draw, theme: str) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "reserve_after": min(draw.pick(30, 30, 30, 30, 0), draw.pick(1, 1, 2, 30)),
        "ageing": draw.pick(0, 0, 0, 36_000),
        "ended_max": draw.pick(4, 20),
        "ranker": draw.pick(*["fragments"] * 6, "pack", "headroom"),
        "fair_share_half_life": draw.pick(10, 3_600),
    }
    if theme in _PREEMPTED or draw.random.random() < 0.15:
        settings |= {
            "preempt_priority": draw.pick(60, 80, 101) if theme not in _PREEMPTED else draw.pick(60, 80),
            "preempt_after": draw.pick(0.0, 0.05, 3.0),
            "reclaim": draw.pick(True, False),
        }
    if theme == "ever new shapes":
        settings |= {"ranker": "fragments", "ended_max": 4}
    if theme in ("backfill", "orders", "drains and reservations"):
        settings |= {"reserve_after": draw.pick(1, 1, 0)}
    return settings


def _rounds(draw: Draw, rounds: int) -> None:
    for _ in range(rounds):
        draw.round()


def _ever_new(draw: Draw) -> None:
    """Steady work in great number, and beside it requests as nobody has made any: 3 in 100 replicas or so."""
    draw.worker(models=[], cpu_milli=0, memory_mib=1 << 30, drivers=["noop"])
    draw.worker(models=[H100] * 8, cpu_milli=0, memory_mib=1 << 30, drivers=["noop"])
    draw.add("order", verb="share", tenant="t", weight=1, gpus=0)
    kinds = draw.pick([{}], [None], [{"model": "M"}], [{}, None, {"min_memory_mib": 1}, {"model": "M"}])
    steady: dict[str, Any] = {"gpu": {}, "run": {"driver": "noop"}, "replicas": 1_024, "start_within_s": 0.0}
    for _ in range(10):
        draw.jobs += 1
        draw.add("submit", tenant="u", job=f"j{draw.jobs}", fields=steady)
        draw.add("tick", ms=50)
        for _ in range(35):
            number = draw.salt() % 100_000
            gpu: Any = draw.pick(*kinds)
            if gpu:
                gpu = {"min_memory_mib": 1 + number % 80_000} if "min_memory_mib" in gpu else {"model": f"M{number}"}
            draw.jobs += 1
            fields = {"gpu": gpu, "resources": {"memory_mib": 1 + number}, "run": {"driver": "noop"}}
            draw.add("submit", tenant=draw.pick(*TENANTS), job=f"j{draw.jobs}", fields=fields)
        draw.add("tick", ms=1_000)
        draw.add("cancel all")
        for _ in range(3):
            draw.add("tick", ms=1_000)


def _full_then_urgent(draw: Draw) -> None:
    """Many small hosts, full with work of all priorities; then urgent work comes."""
    hosts = draw.random.randrange(6, 16)
    gpus = draw.pick(1, 1, 2)
    for _ in range(hosts):
        draw.worker(models=[H100] * gpus, cpu_milli=0, memory_mib=0)
    for _ in range(hosts * gpus):
        draw.jobs += 1
        fields = {"gpu": {}, "priority": draw.pick(10, 50, 50, 70), "run": {"driver": "noop"}}
        draw.add("submit", tenant=draw.pick(*TENANTS), job=f"j{draw.jobs}", fields=fields)
    draw.add("tick", ms=1_000)
    draw.add("tick", ms=2_000)
    for _ in range(draw.random.randrange(1, 4)):
        draw.submit(gpu=draw.pick({}, {}, {"count": gpus}, {"scheduling": "gang"}), priority=draw.pick(80, 90))
        for _ in range(draw.random.randrange(1, 4)):
            draw.add("tick", ms=1_000)


def _crowd(draw: Draw) -> None:
    """A few hosts alike, filled with small jobs; a large job waits until hosts are reserved for it, others come behind.

    Then what the theme is about: jobs short enough to pass it, some of which workers refuse, or an operator's act.
    """
    gpus, hosts = draw.pick(4, 8), draw.pick(1, 1, 2, 3)
    for _ in range(hosts):
        draw.worker(models=[H100] * gpus, cpu_milli=0, memory_mib=0, drivers=["noop"])
    limits = {"timeout_s": draw.pick(600, 3_600)} if draw.random.random() < 0.8 else {}
    for _ in range(draw.random.randrange(hosts, hosts * gpus + 2)):
        gpu = {"count": draw.pick(1, 1, 2)}
        draw.jobs += 1
        run = {"driver": "noop", "grace_s": 1} | limits
        draw.add("submit", tenant=draw.pick(*TENANTS), job=f"j{draw.jobs}", fields={"gpu": gpu, "run": run})
    draw.add("tick", ms=400)
    if draw.random.random() < 0.5:
        draw.add("work", salt=draw.salt(), percent=draw.pick(10, 30), code=0)
    for _ in range(draw.pick(1, 1, 2)):
        draw.jobs += 1
        gpu = draw.pick({"count": gpus}, {"count": gpus // 2}, {"count": gpus // 2, "scheduling": "gang"})
        fields = {"gpu": gpu, "replicas": draw.pick(1, 2), "run": {"driver": "noop"}}
        draw.add("submit", tenant=draw.pick("t", "u"), job=f"j{draw.jobs}", fields=fields)
    for _ in range(3):
        draw.add("tick", ms=1_000)
    draw.add("work", salt=draw.salt(), percent=draw.pick(20, 40), code=0)


def _crowded(draw: Draw) -> None:
    _crowd(draw)
    for _ in range(draw.random.randrange(2, 5)):
        if draw.chance("refuse the job"):
            draw.add("refuse", salt=draw.salt(), percent=draw.pick(50, 80), why=draw.pick(*REFUSALS[:2]))
        draw.round()
        draw.submit(gpu={"count": draw.pick(1, 1, 2)}, requires={}, priority=50)
        draw.add("tick", ms=1_000)
    draw.add("rest")
    _rounds(draw, 5)


def _begin(draw: Draw, workers: int) -> None:
    for _ in range(workers):
        draw.worker()


def _mixed(draw: Draw) -> None:
    _begin(draw, draw.random.randrange(1, 6))
    _rounds(draw, 12)
    draw.add("rest")
    _rounds(draw, 6)


def _preemption(draw: Draw) -> None:
    _full_then_urgent(draw)
    draw.add("rest")
    _rounds(draw, 6)


_MAKERS: Final[dict[str, Callable[[Draw], None]]] = {
    "ever new shapes": _ever_new, "preemption": _preemption, "backfill": _crowded, "orders": _crowded,
    "exact devices, preempted": _preemption, "drains and reservations": _crowded,
}  # fmt: skip


#: the themes of the seeds from the first number on
_KINDS: Final = (
    (0, THEMES),
    (ADDED_FROM, ADDED),
    (LENT_FROM, LENT),
    (BEHIND_FROM, BEHIND),
    (RANGES_FROM, RANGES),
    (LABELLED_FROM, LABELLED),
)


def made(seed: int) -> Plan:
    """The plan of a seed. Every case ends in rest, and then in the end of all its jobs."""
    kinds = next(kinds for first, kinds in reversed(_KINDS) if seed >= first)
    theme = list(kinds)[seed % len(kinds)]
    draw = Draw(seed, ALL | kinds[theme])
    settings = _settings(draw, theme)
    _MAKERS.get(theme, _mixed)(draw)
    draw.add("rest")
    draw.add("end all")
    return Plan(seed, theme, settings, draw.random.random() < 0.5 or theme == "ever new shapes", draw.steps)
