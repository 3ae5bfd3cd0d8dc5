"""A reference scheduler: it says of each job that waits why it may, or that it could start. Plain, and slow.

It goes by the state that the ledger gives, by what the workers themselves know, by the requests, and by what runs have
taken (`ran`): no index, nothing of the planner but the job, the hosts and the start of its reservation. Whether that
keeps a job waiting, and whether a job could ever start, it reckons itself. Asked in rest: nothing is on its way.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, Final, NamedTuple, Protocol

from moorage.scheduler.core.ledger.state import Attempt, Job, Replica, State, Worker
from moorage.schemas.codec import decode_request
from moorage.schemas.gpu import SHARERS_MAX, format_token, model_matches
from moorage.schemas.job import STATES, Request
from tests.release.workloads import behind, ranges
from tests.release.workloads.ran import Ran
from tests.release.workloads.record import Record

#: how a job is kept to its part of a device, the weakest first
LEVELS: Final = ("advisory", "guarded", "hard")
#: the mode that an attempt's number stands for
MODES: Final = ("", "exclusive", "mps", "time-slice")
#: what the signs of conditions about numbers say
_COMPARED: Final = {">=": operator.ge, "<=": operator.le, "<": operator.lt, ">": operator.gt}
#: how long a job without a time limit must be able to run before a drain, see `lifecycle.windows`
SETTLE_MS: Final = 600_000
#: of a tenant's jobs that ask for the same, so many are tried beside a reservation: half of them the first ones
TRIED_MAX: Final = 64
#: by how much later a reservation may be expected to start since the last record, 2 s ago, by what outlives all known
UNNOTICED_MS: Final = 5_000
#: how often the reservation is looked at
LOOK_MS: Final = 2_000
ON_THE_WAY: Final = ("PLACED", "CLAIMED", "ENDING", "CANCELLING")


def request_of(job: Job) -> Request:
    """Return a job's request, with the part of a device that an operator has given it since."""
    return decode_request(job.body).with_part(job.part)


class World(Protocol):
    """What is confirmed of a world; `tests.release.workloads.world` says what each is."""

    drive: Record
    ill: dict[str, dict[str, str]]
    resting: bool
    renewed: dict[str, int]
    silent: dict[str, int]
    ran: Ran


class Room:
    """What is left on one worker for new work; None of it where the worker takes none."""

    def __init__(self, world: World, num: int, without: Iterable[Attempt] = (), *, empty: bool = False) -> None:
        self.worker = worker = world.drive.state.worker_by_num[num]
        real = world.drive.workers[worker.id]
        hello = self.hello = worker.hello
        gone = set(without)
        attempts = [] if empty else [attempt for attempt in worker.attempts.values() if attempt not in gone]
        self.users: list[list[tuple[str, str, int, int]]] = [[] for _ in hello["gpu_pool"]]
        self.cpu, self.memory = hello["cpu_milli"], hello["memory_mib"]
        self.awaited: set[int] = set()  # devices that frozen jobs wait for: preemptible jobs alone get them
        self.needed: set[int] = set()  # those of them that a frozen job is to have now: no job gets them
        for attempt in attempts:
            request = request_of(attempt.replica.job)
            if attempt.mask != attempt.home:
                self.awaited |= slots_of(attempt.home)
                asked_ms = attempt.replica.job.history[-1][1] if STATES[attempt.replica.state] == "ENDING" else -1
                needs = needs_devices(attempt, request) and may_run_on(world, attempt)
                if needs and asked_ms != world.drive.state.time_ms:  # else by this very pass
                    self.needed |= slots_of(attempt.home)
            resources, gpu = request.resources, request.effective_gpu
            self.cpu -= resources.cpu_milli if resources else 0
            self.memory -= resources.memory_mib if resources else 0
            for slot in slots_of(attempt.mask):
                user = user_of(hello, attempt.replica.job, request)
                self.users[slot].append((MODES[attempt.mode], user, *share_of(gpu)))
        lent = hello.get("lent_slots")
        shut = shut_on(world, worker, empty=empty)
        waiting = real.waiting and not empty
        if not world.resting:
            waiting = waiting or (world.drive.engine.fleet.hosts[num].waiting and not empty)
        self.lent = [slot for slot in range(len(self.users)) if lent is None or slot in lent]
        self.slots = [] if waiting else [slot for slot in self.lent if slot not in shut]

    def put(self, job: Job, request: Request, *, avoiding: bool = True) -> bool:
        """Put one replica there; False where it has no room."""
        slots = self._choose(job, request, avoiding)
        if slots is None:
            return False
        gpu, resources = request.effective_gpu, request.resources
        for slot in slots:
            user = user_of(self.hello, job, request)
            self.users[slot].append((gpu.effective_sharing if gpu else "", user, *share_of(gpu)))
        self.cpu -= resources.cpu_milli if resources else 0
        self.memory -= resources.memory_mib if resources else 0
        return True

    def may(self, job: Job, request: Request) -> bool:
        """Whether the worker takes such jobs, and has the processors and the memory left, whatever of devices."""
        hello, gpu, resources = self.hello, request.effective_gpu, request.resources
        driver, rules = request.workload.driver, hello.get("drivers_for") or {}
        if driver not in hello["drivers"] or (rules and driver not in rules.get(job.tenant, rules.get("*", ()))):
            return False
        if gpu is None and not labels_do(hello["labels"], request):
            return False
        if resources and hello["cpu_milli"] and resources.cpu_milli and resources.cpu_milli > self.cpu:
            return False
        if resources and hello["memory_mib"] and resources.memory_mib and resources.memory_mib > self.memory:
            return False
        return gpu is None or (gpu.effective_sharing in hello["modes"] and keeps_to_parts(hello, request))

    def _choose(self, job: Job, request: Request, avoiding: bool) -> list[int] | None:
        if not self.may(job, request):
            return None
        gpu = request.effective_gpu
        if gpu is None:  # it avoids none but workers that refused it
            return None if avoiding and self.worker.num in dict(job.avoid) else []
        avoid = slots_of(dict(job.avoid).get(self.worker.num, 0)) if avoiding else set()
        found = [slot for slot in self.slots if slot not in avoid and self.takes(slot, job, request)]
        if request.device_ids:
            exact = self.named(request)
            return exact if exact and set(exact) <= set(found) else None
        found.sort(key=lambda slot: -len(self.users[slot]))
        return found[: gpu.count] if len(found) >= gpu.count else None

    def named(self, request: Request) -> list[int]:
        """The devices that a request names, each another one; empty where the worker does not have them.

        Of several that have a name it is always the same one, also while that is taken.
        """
        pool = self.hello["gpu_pool"]
        answering = [slot for slot, device in enumerate(pool) if self.does(device, request)]
        choices = [[slot for slot in answering if one in names(pool[slot])] for one in request.device_ids]
        taken: list[int] = []
        for slots in sorted(choices, key=len):
            left = [slot for slot in slots if slot not in taken]
            if not left:
                return []
            taken.append(left[0])
        return taken

    def does(self, device: dict[str, Any], request: Request) -> bool:
        """Whether a device is one that a request asks for, and has the labels, where its own go before its worker's."""
        return answers(device, request) and labels_do(self.hello["labels"] | device.get("labels", {}), request)

    def takes(self, slot: int, job: Job, request: Request) -> bool:
        """Whether a device takes one more that asks so."""
        device, users, gpu = self.hello["gpu_pool"][slot], self.users[slot], request.effective_gpu
        assert gpu is not None
        mib, percent = share_of(gpu)
        memory, mode = device.get("memory_mib", 0), gpu.effective_sharing
        if not self.does(device, request) or slot in (self.needed if request.preemptible else self.awaited):
            return False
        if mode == "exclusive":
            return not users
        most = min(SHARERS_MAX[mode], self.hello["sharers_max"].get(mode, SHARERS_MAX[mode]))
        if len(users) >= max(1, most) or any(user[0] != mode for user in users):
            return False
        if any(user[1] != user_of(self.hello, job, request) for user in users):
            return False
        if percent and sum(user[3] for user in users) + percent > 100:
            return False
        return not mib or sum(user[2] for user in users) + mib <= memory


def needs_devices(attempt: Attempt, request: Request) -> bool:
    """Whether a frozen job is to run on, or to end and may save its work."""
    state = STATES[attempt.replica.state]
    if attempt.replica.attempt is not attempt:
        return True
    return not attempt.freeze if state == "FROZEN" else request.workload.grace_s > 0


def shut_on(world: World, worker: Worker, *, empty: bool = False) -> set[int]:
    """The devices of a worker that are in other use, unwell or in quarantine; none of them once it is `empty`."""
    shut = set[int]()
    if not empty:
        shut |= world.drive.workers[worker.id].local | slots_of(worker.quarantined | worker.unwell_mask)
        shut |= {int(name[1:]) for name in world.ill.get(worker.id, ())}
    if not world.resting:  # the scheduler learns with the next renewal what became of these devices
        host = world.drive.engine.fleet.hosts[worker.num]
        shut |= slots_of(host.busy | host.sick | world.drive.shut_before.get(worker.num, 0))
    return shut


def may_run_on(world: World, attempt: Attempt) -> bool:
    """Whether nothing but its devices keeps a frozen job that is to run on: else nobody gives them up for it."""
    job, worker = attempt.replica.job, attempt.worker
    tenant = world.drive.state.tenants[job.tenant]
    if attempt.replica.attempt is not attempt or STATES[attempt.replica.state] != "FROZEN":
        return True  # it ends
    if job.hold is not None or tenant.hold is not None:
        return False
    if slots_of(attempt.home) & shut_on(world, worker):
        return False
    if not tenant.gpus_max:
        return True
    own = (each for each in worker.attempts.values() if each.replica.job.tenant == job.tenant)
    given = sum(each.mask.bit_count() for each in own if each.mask & attempt.home)
    return tenant.gpus - given + attempt.home.bit_count() <= tenant.gpus_max


def answers(device: dict[str, Any], request: Request) -> bool:
    """Whether a device is one that a request asks for, whatever runs there."""
    gpu = request.effective_gpu
    assert gpu is not None
    if gpu.effective_vendor not in ("", device["vendor"].lower()):
        return False
    if device.get("modes") and gpu.effective_sharing not in device["modes"]:
        return False
    if gpu.models and not any(model_matches(model, device["name"]) for model in gpu.models):
        return False
    if device.get("memory_mib", 0) < max(gpu.min_memory_mib or 0, share_of(gpu)[0]):
        return False
    least = gpu.min_compute_capability
    if least is not None and tuple(map(int, (device.get("compute") or "0.0").split("."))) < tuple(
        map(int, least.split("."))
    ):
        return False
    profile = device.get("profile", "")
    if gpu.profile is not None and profile != gpu.profile:
        return False
    if profile and gpu.profile is None:  # a slice answers who asks for nothing but memory
        whole = gpu.count > 1 or gpu.effective_sharing != "exclusive" or gpu.models
        if whole or not gpu.min_memory_mib:
            return False
    return gpu.time_slice_index is None or gpu.time_slice_index == device["index"]


def labels_do(labels: dict[str, str], request: Request) -> bool:
    """Whether these labels are what a request requires of labels."""
    if any(labels.get(name) not in values for name, values in request.requires.items()):
        return False
    for text in request.where:
        name, sign, asked = next(text.partition(each) for each in ("!=", ">=", "<=", "<", ">") if each in text)
        has = labels.get(name)
        if sign == "!=":
            if has == asked:
                return False
        elif has is None or not has[:1].isdigit() or not _COMPARED[sign](float(has), float(asked)):
            return False
    return True


def user_of(hello: dict[str, Any], job: Job, request: Request) -> str:
    """The user of a worker that a sharer runs as; "" where sharers may run as any."""
    gpu, told = request.effective_gpu, hello.get("mps_users")
    if told is None or gpu is None or gpu.effective_sharing != "mps":
        return ""
    return str(told.get(job.tenant, told.get("*", request.workload.user or "the agent's own")))


def names(device: dict[str, Any]) -> tuple[str, ...]:
    """The names by which a request may ask for a device; a uuid's letter case does not count."""
    kind, _, rest = device["uuid"].partition("-")
    return str(device["index"]), f"{kind}-{rest.lower()}", device.get("pci", "")


def keeps_to_parts(hello: dict[str, Any], request: Request) -> bool:
    """Whether the worker gives GPUs to jobs of the request's driver, and keeps them to their parts as it asks."""
    gpu, driver = request.effective_gpu, request.workload.driver
    assert gpu is not None
    told = (hello.get("capabilities") or {}).get(driver, {})
    if not told.get("gpu_enabled", True):
        return False
    if gpu.enforce is None:
        return True
    whole = "hard" if gpu.effective_sharing == "exclusive" else "advisory"
    kept = told.get("enforced", {}).get(gpu.effective_sharing, {"memory": whole, "compute": whole})
    asked = {"memory": gpu.enforce.memory, "compute": gpu.enforce.compute}
    return all(LEVELS.index(kept.get(of, "advisory")) >= LEVELS.index(asked[of] or "advisory") for of in asked)


def milli_of(request: Request) -> int:
    """What one of its devices counts in the sums of GPU time, in thousandths: a sharer its part of the device."""
    gpu = request.effective_gpu
    if gpu is None or gpu.effective_sharing == "exclusive":
        return 1000
    percent = share_of(gpu)[1]
    return max(10 * percent, 1000 // SHARERS_MAX[gpu.effective_sharing])


def slots_of(mask: int) -> set[int]:
    return {slot for slot in range(mask.bit_length()) if mask >> slot & 1}


def share_of(gpu: object) -> tuple[int, int]:
    """(MiB, percent) that a sharer counts on its device; 100 percent is no cap, and not counted."""
    share = getattr(gpu, "share", None)
    return (share.memory_mib, share.compute_percent % 100) if share is not None else (0, 0)


class Waiting(NamedTuple):
    """A replica that waits, or a gang with all of its own."""

    job: Job
    replica: Replica
    request: Request
    priority: int

    @property
    def together(self) -> int:
        gpu = self.request.effective_gpu
        return self.request.copies if gpu is not None and gpu.scheduling == "gang" else 1

    @property
    def gpus(self) -> int:
        gpu = self.request.effective_gpu
        return gpu.count * self.together if gpu is not None else 0

    @property
    def name(self) -> str:
        return f"{self.job.tenant}/{self.job.name}/{self.replica.index}"


def as_waiting(job: Job, index: int | None = None) -> Waiting:
    """A replica of a job; without an index the first that waits, or else the first."""
    request = request_of(job)
    queued = [replica for replica in job.replicas if STATES[replica.state] == "QUEUED"]
    every = job.replicas
    replica = (queued or every)[0] if index is None else next(each for each in every if each.index == index)
    return Waiting(job, replica, request, job.priority if job.priority >= 0 else request.priority)


def waiting_in(state: State) -> list[Waiting]:
    """All that waits for a host, in order of arrival."""
    found: list[Waiting] = []
    for job in state.jobs.values():
        if request_of(job).after and behind.missing(state, job):
            continue
        queued = [replica.index for replica in job.replicas if STATES[replica.state] == "QUEUED"]
        rows = [as_waiting(job, index) for index in queued[: ranges.room(job)]]
        found += rows[:1] if rows and rows[0].together > 1 else rows
    return found


def starts(world: World, who: Waiting, excluded: Iterable[int], without: Iterable[Attempt] = ()) -> bool:
    """Whether it could start now on open workers that are not `excluded`, were the attempts `without` gone."""
    return startable(world, who, who.together, excluded, without) == who.together


def startable(world: World, who: Waiting, most: int, excluded: Iterable[int], without: Iterable[Attempt] = ()) -> int:
    """How many replicas like it could start there, of at most so many."""
    left, gone = most, list(without)
    for num in open_workers(world):
        if num in excluded:
            continue
        room = Room(world, num, gone)
        while left and room.put(who.job, who.request):
            left -= 1
    return most - left


def could_ever(world: World, who: Waiting, *, avoiding: bool = True) -> bool:
    """Whether all workers together could hold it, were they empty and well; `avoiding` those that refused it."""
    left = who.together
    for worker in world.drive.state.workers.values():
        if worker.session:
            room = Room(world, worker.num, empty=True)
            while left and room.put(who.job, who.request, avoiding=avoiding):
                left -= 1
    return not left


def open_workers(world: World) -> list[int]:
    return [worker.num for worker in world.drive.state.workers.values() if worker.session and worker.flag == "open"]


def left_too_soon(state: State, who: Waiting) -> set[int]:
    """The workers that a drain empties before it surely has ended."""
    now, limit_s = state.time_ms, who.request.workload.timeout_s
    ends = [now + int(limit_s * 1000)] if limit_s is not None else []
    if who.request.deadline_s is not None:
        ends.append(who.job.accepted_ms + int(who.request.deadline_s * 1000))
    end = min(ends, default=now + SETTLE_MS) + int(min(3_600, who.request.workload.grace_s) * 1000)
    return {num for num, w in state.windows.items() if w.window is not None and now <= w.window.leave_ms < end}


def taken_back(world: World, who: Waiting) -> set[int]:
    """The workers on which others end, or have just ended, for another job that waits."""
    found: set[int] = set()
    for job in world.drive.state.preempting.values():
        if job.preempts is not None and (job.tenant != who.job.tenant or not alike(as_waiting(job), who)):
            found |= set(job.preempts[0])
    return found


def marked(world: World, who: Waiting) -> set[int]:
    """The workers on which jobs have failed quickly: some minutes it starts on another open one that could hold it."""
    return set(world.drive.engine.lifecycle.starts.quick.barred_from(who.job.num))


def alike(one: Waiting, other: Waiting) -> bool:
    """Whether two jobs have the same priority and ask for the same."""
    return one.priority == other.priority and _asked(one) == _asked(other)


def _asked(who: Waiting) -> tuple[object, ...]:
    request = who.request
    named = (request.workload.driver, request.workload.user, request.preemptible, request.device_ids, request.requires)
    return (request.effective_gpu, request.resources, who.together, *named, request.where, who.job.avoid)


# --------------------------------------------------------------------------------------------- why something waits


def confirm(world: World) -> tuple[list[str], dict[str, list[Waiting]]]:
    """(what is wrong, what waits by the reason that was confirmed)."""
    state = world.drive.state
    every = waiting_in(state)
    wrong = [f"{attempt_name(m)} is {STATES[m.replica.state]} for ever" for m in state.attempts() if _is_stuck(m)]
    found: dict[str, list[Waiting]] = {}
    for who in every:
        reason = why(world, who, every)
        if reason:
            found.setdefault(reason, []).append(who)
        else:
            wrong.append(f"{who.name} waits, and could start ({format_token(who.request.effective_gpu)})")
    return wrong + _wrong_reservation(world, every) + _wrong_preemptions(world), found


def why(world: World, who: Waiting, every: list[Waiting]) -> str:
    """The reason for which it waits, confirmed; empty where there is none."""
    state = world.drive.state
    tenant = state.tenants[who.job.tenant]
    if who.job.hold is not None or tenant.hold is not None:
        return "held"
    if who.replica.not_before > state.time_ms:
        return "pause"
    if over_limit(world, who):
        return "limit"
    if any(_goes_first(world, other, who, every) for other in every if over_limit(world, other)):
        return "limit of another"
    soon, taken = left_too_soon(state, who), taken_back(world, who)
    if not starts(world, who, ()):
        return "no room"
    if not starts(world, who, soon):
        return "leaving"
    if not starts(world, who, soon | taken):
        return "taken back"
    bad = marked(world, who)
    if not starts(world, who, soon | taken | bad):
        return "marked"
    return "reserved" if is_kept_back(world, who, every, soon | taken | bad) else ""


def over_limit(world: World, who: Waiting) -> bool:
    """Whether its tenant may not lease so many GPUs more."""
    most = world.drive.state.tenants[who.job.tenant].gpus_max
    return bool(most and who.gpus and _leased(world, who.job.tenant) + who.gpus > most)


def _leased(world: World, tenant: str, *, endless: bool = False) -> int:
    """How many GPUs a tenant leases; `endless`: to jobs whose end nobody knows."""
    state = world.drive.state
    attempts = [m for m in state.attempts() if m.replica.job.tenant == tenant and m.replica.attempt is m]
    return sum(
        m.mask.bit_count() for m in attempts if not endless or not world.ran.has_end(state, as_waiting(m.replica.job))
    )


def _goes_first(world: World, other: Waiting, who: Waiting, every: list[Waiting]) -> bool:
    """Whether another job of its tenant waits for the limit, and what comes behind it has to wait as well.

    What has no known end is not waited for: beside that it must be able to start under the limit.
    """
    state = world.drive.state
    if other.job.tenant != who.job.tenant or not who.gpus or other.job.hold is not None:
        return False
    left = state.tenants[who.job.tenant].gpus_max - _leased(world, who.job.tenant, endless=True)
    if other.gpus > left or other.replica.not_before > state.time_ms:
        return False
    return comes_before(world, other, who, every) and could_ever(world, other)


def comes_before(world: World, other: Waiting, who: Waiting, every: list[Waiting]) -> bool:
    """Of two jobs of one tenant: by priority, with its age where jobs age, then by arrival.

    If the tenant is guaranteed GPUs, either may come first: the guarantee may have room for one of them.
    """
    state, config = world.drive.state, world.drive.config
    if state.tenants[who.job.tenant].guaranteed:
        return True

    def key(one: Waiting) -> tuple[int, int, int]:
        priority, ages = one.priority, config.ages
        if ages is not None:
            classes = sorted({each.priority for each in every})
            priority = ages.standing(classes, priority, state.time_ms - one.job.may_start_ms)
        return -priority, one.job.num, one.replica.index

    return key(other) < key(who)


def reserved(world: World, who: Waiting, *, for_good: bool = True) -> set[int]:
    """The workers that the reservation closes to it; none where it is its own, or the reservation is void.

    Also none where it takes the reservation over once nothing else keeps it waiting, unless `for_good` is False.
    """
    held = world.drive.engine.planner.verdicts.reservation
    if held is None or _void(world):
        return set()
    owner = as_waiting(world.drive.state.jobs[held.num])
    passes = alike(owner, who) or (for_good and _takes_over(world, who, owner))
    return set() if passes else set(held.hosts)


def is_kept_back(world: World, who: Waiting, every: list[Waiting], closed: set[int]) -> bool:
    """Whether the reservation keeps it from starting on workers that are not `closed`."""
    if starts(world, who, closed | reserved(world, who)):
        return False
    return not (surely_ends(world, who) and is_tried(who, every))


def _takes_over(world: World, who: Waiting, owner: Waiting) -> bool:
    """Whether a job need not wait for another one's reservation, as it may end that one, or is due for it itself.

    By priority alone: where jobs age, or tenants are guaranteed GPUs, either may come first. A gang is due later.
    """
    config, state = world.drive.config, world.drive.state
    if config.ages is not None or who.priority <= owner.priority:
        return False
    overdue_ms = state.time_ms - _waits_from_ms(state, who) - int(config.reserve_after * 1000)
    is_due = not any(row.guaranteed for row in state.tenants.values()) and who.together == 1 and overdue_ms > LOOK_MS
    return who.priority >= config.preempt_priority or is_due


def _waits_from_ms(state: State, who: Waiting) -> int:
    """Since when nothing was placed of those that are alike and come no later than it: they go on one by one."""
    alike_ms = (
        row.job.placed_ms
        for row in waiting_in(state)
        if row.job.tenant == who.job.tenant and row.job.num <= who.job.num and row.job.size > 1 and alike(row, who)
    )
    return max(who.job.may_start_ms, *alike_ms, 0)


def surely_ends(world: World, who: Waiting) -> bool:
    """Whether it surely ends before the reservation is expected to start, also when that was last planned."""
    held, state = world.drive.engine.planner.verdicts.reservation, world.drive.state
    longest_ms = world.ran.longest_ms(state, who)
    if held is None or longest_ms is None:
        return False
    return longest_ms + UNNOTICED_MS <= held.start_ms - state.time_ms


def is_tried(who: Waiting, every: list[Waiting]) -> bool:
    """Whether it is tried beside a reservation in each plan; of a crowd those behind the first have turns."""
    before = [other for other in every if other.job.tenant == who.job.tenant and alike(other, who)]
    return len(before) <= TRIED_MAX or who in before[: TRIED_MAX // 2]


def _void(world: World) -> str:
    """Why the reservation should not stand; empty where it may."""
    held, state = world.drive.engine.planner.verdicts.reservation, world.drive.state
    if held is None:
        return ""
    job = state.jobs.get(held.num)
    if job is None or job.over:
        return "its job is over"
    who = as_waiting(job)
    replica = who.replica
    if STATES[replica.state] != "QUEUED":
        return f"{who.name} is {STATES[replica.state]}"
    if job.hold is not None or state.tenants[job.tenant].hold is not None:
        return f"{who.name} is held"
    if over_limit(world, who):
        return f"{who.name} is over its tenant's limit"
    if replica.not_before > state.time_ms:
        return f"{who.name} waits out a pause"
    return ""


def _wrong_reservation(world: World, every: list[Waiting]) -> list[str]:
    """That its job may start and cannot is confirmed with the job itself."""
    void = _void(world)
    if void and every:  # where nothing waits it closes no host to anything, and goes with the next pass
        return [f"hosts are reserved, and {void}"]
    return []


def _wrong_preemptions(world: World) -> list[str]:
    """In rest nothing ends any more, so no host is held for what others have ended for."""
    return [
        f"hosts are held for {job.tenant}/{job.name}, for which nothing ends"
        for job in world.drive.state.preempting.values()
    ]


def _is_stuck(attempt: Attempt) -> bool:
    return STATES[attempt.replica.state] in ON_THE_WAY and bool(attempt.worker.session) and attempt.phase < 3


def attempt_name(attempt: Attempt) -> str:
    return f"{attempt.replica.job.tenant}/{attempt.replica.job.name}/{attempt.replica.index} on {attempt.worker.id}"
