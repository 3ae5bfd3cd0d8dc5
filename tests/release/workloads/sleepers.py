"""Random sites with services that sleep and take turns: `python -m tests.release.workloads.sleepers --seeds 200`.

The leader is the real one, and so is each member's own state (`moorage.calls.member`); what they tell each other takes
a moment. A program works on its calls only while its member has its GPUs. Its memory takes its time to leave them, and
to be back. Meanwhile leaders change, swaps are held up, hosts have no RAM, members crash, jobs are held, preemptible
jobs and others come.

In each third world no driver freezes, and services sleep by a request to their own program: it gets no call from when
it is asked to until it is awake.

In each second world some services share GPUs by memory; in some a service says within what time it is to be awake.

After each record no device has two awake holders, but sharers of one mode that fit into its memory. In the end each
call was answered once: by the service, or with why not. Called all the time, each service with a member answers some of
its calls in each round of turns: nobody starves. One without a member waits, as any job, for a GPU of which no other
one has need.

What members are told is true. The time until they have their GPUs is never more than the turns of all on their host
take, and a member that wakes is told what is left of that. Behind one that wakes it has all of its turn. In the last
round, where all swaps were seen before, no member has its GPUs long before it was told. Why a member could not be
frozen is what its own host said.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from moorage.calls.member import Call, Member
from moorage.scheduler.core.ledger import state as ledger
from moorage.scheduler.core.outputs.outputs import Outputs
from moorage.schemas.attempt import AttemptName
from moorage.schemas.capabilities import Capabilities
from moorage.schemas.frames import Freeze
from moorage.schemas.frames.use import AttemptUse, DeviceUse
from moorage.schemas.service import BUSY, HOPS_MAX, MemberLoad, Turn
from moorage.testing.requests import beside
from tests.unit.scheduler.driving import Driving
from tests.unit.scheduler.honest_worker import HeldAttempt

SLEEPERS_FROM: Final = 800_000
CAN: Final = {"process": Capabilities(answers_calls=True, freezes=True)}
ASKS: Final = {"process": Capabilities(answers_calls=True, sleeps_engines=True)}
BY_REQUEST: Final = {"sleep": {"path": "/sleep"}, "wake": {"path": "/wake_up"}}
ACTS: Final = (
    "call", "call", "call", "call", "burst", "wait", "wait", "lead", "swap", "no-ram", "crash", "hold", "guest", "over",
)  # fmt: skip
#: seconds until a member has loaded its model
WARM_S: Final = 2
#: why a host freezes none of its members
NO_RAM: Final = ("no-ram: its GPU memory does not fit into the RAM of {}", "CUDA error 801 on {}")
#: the most time that calls of a turn have to end in
GRACE_S: Final = 8
#: the memory of a GPU, and the parts that services ask for: all, or as much of a shared one
GPU_MIB: Final = 81_559
SHARES_MIB: Final = (0, 10_000, 30_000, 30_000, 50_000, 80_000)
WITHIN_S: Final = (0, 0, 0, 3, 10, 60)
#: the memory of a service, and of a member that loads its model
SIZES_MIB: Final = (200, 2_000, 8_192, 30_000)
LOADING_MIB: Final = 300
#: what a swap takes besides that of its memory, and how fast that is
SWAP_S: Final = 1.5
OUT_MIB_S: Final = 2_000
IN_MIB_S: Final = 5_600
#: until a swap of a service was seen, it may be said to take so many times as long
SLOWER_MAX: Final = 4
#: by so much what is told may be off: members, workers and the leader look once a second
LATE_S: Final = 3
#: services are asked for by calls that wait for so long in the end
PATIENT_MS: Final = 10_000_000


class Told(NamedTuple):
    """When a member has its GPUs as it was told, in milliseconds of the site's time, and the record that gave it them;
    0 if it waits for them."""

    at_ms: int
    leased: int


class Sleeper:
    """One member of a service, and its program. `Outside` of its `Member`."""

    def __init__(self, site: Sleepers, held: HeldAttempt, places: int) -> None:
        self.site = site
        self.job = held.place.job
        self.held = held
        self.member = Member(f"m{held.place.fence}-{held.place.replica}", self, places, attempt=held.name)
        self.left_s: dict[int, int] = {}  # work on the calls that run
        self.said: MemberLoad | None = None
        self.said_s = -100.0
        self.has_room = False
        self.turn: Turn | None = None
        self.told: list[Told] = []  # since it had its GPUs last
        self.warm_s = site.now_s + WARM_S
        self.is_over = False
        self.is_asleep = False  # by a request, or about to be

    def run(self, number: int, call: Call, left_ms: int) -> None:
        assert not self.is_asleep, "an engine may die of a call while it sleeps"
        self.left_s[number] = self.site.dice.choice([1, 1, 1, 3, 12])

    def run_next(self, number: int, call: Call, left_ms: int) -> None:
        raise AssertionError("this program is given no call ahead")

    def take_back(self) -> list[int]:
        return []

    def stop(self, number: int) -> None: ...

    def hand(self, to: str, call: Call | None, waited_ms: int) -> None:
        asker = self.site.sleepers[to]
        given = None if call is None else again(call, self.site.now_s, waited_ms)
        if asker.is_over and given is not None:
            self.site.later(lambda: self.site.deliver(self.job, given))
        else:
            self.site.later(lambda: asker.member.on_given(given, self.site.now_s))

    def have(self) -> None:
        for other in self.site.of(self.job):
            if other is not self:
                self.site.later(lambda other=other: other.member.on_have(self.site.now_s))  # type: ignore[misc]

    def want(self) -> None:
        self.site.later(self._asks)

    def _asks(self) -> None:
        rooms = [other for other in self.site.of(self.job) if other.has_room and other is not self]
        if rooms:
            self.site.dice.choice(rooms).member.on_want(self.member.name, self.site.now_s)
        else:
            self.member.on_given(None, self.site.now_s, is_any_open=False)

    def want_later(self) -> None:
        self.site.later(lambda: self.member.ask_again(self.site.now_s))

    def gathered(self) -> None: ...

    def send_on(self, call: Call, waited_ms: int) -> None:
        sent = again(call, self.site.now_s, waited_ms)
        self.site.later(lambda: self.site.deliver(self.job, sent))

    def refuse(self, call: Call, error: str, retry_after_ms: int, why: str = "") -> None:
        assert why or error != BUSY or call.hops >= HOPS_MAX or self.is_over
        self.site.answer(call.reply, error)

    def open_room(self, is_open: bool) -> None:
        self.has_room = is_open

    def works(self) -> None:
        """A second of work goes by, if it has its GPUs for it."""
        if self.held.phase != "running":
            return
        for number in list(self.left_s):
            self.left_s[number] -= 1
            if self.left_s[number] <= 0:
                del self.left_s[number]
                call = self.member.on_end(number, self.site.now_s)
                assert call is not None
                self.site.answer(call.reply, "done")
                self.site.done[self.job] += 1

    def says(self) -> None:
        """It says what it has to do, as a real one does: once a second while that changes, and each 10 s."""
        load = self.member.load(self.site.now_s)
        if load != self.said or self.site.now_s - self.said_s >= 10:
            self.said, self.said_s = load, self.site.now_s
            self.site.engine.offer_member_load("t", self.job, load, self.site.now)

    def dies(self) -> None:
        self.is_over = True
        self.member.died(self.site.now_s)
        self.member.give_up(self.site.now_s)


class Sleepers(Driving):
    """A site of one seed."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = random.Random(seed)
        self.sleepers: dict[str, Sleeper] = {}  # by the member's name, also those that are over
        self.events: list[Any] = []
        self.soon: list[Callable[[], None]] = []
        self.answers_of = Counter[str]()
        self.kinds = Counter[str]()
        self.done = Counter[str]()
        self.asked = 0
        self.checked = Counter[str]()  # what was looked at
        #: swaps that go on: whether out, since when, and when that was asked for last
        self.swaps: dict[AttemptName, tuple[bool, float, float]] = {}
        self.held_up = set[str]()  # hosts on which one took longer than it should
        self.seen: set[str] = set()  # services that were seen to wake by this leader
        self.shares_mib: dict[str, int] = {}
        self.most_beside = 0  # MiB of shares that were awake on one GPU
        self.is_calm = False  # nothing else happens than calls, and all swaps were seen
        super().__init__()
        self.by_request = seed % 3 == 0
        self.hosts = [f"w{number}" for number in range(dice.choice([1, 2, 2]))]
        for host in self.hosts:
            worker = self.worker(host, dice.randint(1, 2), capabilities=ASKS if self.by_request else CAN)
            worker.has_swapped = self.has_swapped
            worker.freezes, worker.not_frozen = dice.random() < 0.6, dice.choice(NO_RAM).format(host)
        self.services = [f"s{number}" for number in range(dice.randint(2, 5))]
        self.sizes_mib = {name: dice.choice(SIZES_MIB) for name in self.services}
        self.awake_s: dict[str, int] = {}
        self.shares_mib = {name: dice.choice(SHARES_MIB) if seed % 2 else 0 for name in self.services}
        for name in self.services:
            self.awake_s[name] = dice.choice([0, 5, 20])
            service = {
                "name": name,
                "concurrency": dice.choice([1, 2, 8]),
                "sleep_after_s": dice.choice([1, 5, 20]),
                "awake_s": self.awake_s[name],
            }
            service |= {"sleep_by": BY_REQUEST} if self.by_request else {}
            service |= {"wake_within_s": dice.choice(WITHIN_S)} if seed % 4 > 1 else {}
            share = {"sharing": "time-slice", "share": {"memory_mib": self.shares_mib[name]}}
            run = {"driver": "process", "argv": ["serve"], "grace_s": dice.choice([5, GRACE_S]), "restart": "always"}
            replicas = 2 if dice.random() < 0.4 else 1
            gpu = share if self.shares_mib[name] else {}
            self.submit(name, **beside({"service": service, "run": run, "replicas": replicas, "gpu": gpu}))
            self.pass_seconds(dice.randint(0, 30))

    @property
    def now_s(self) -> float:
        return self.now / 1000

    def of(self, job: str) -> list[Sleeper]:
        return [each for each in self.sleepers.values() if each.job == job and not each.is_over]

    def later(self, what: Callable[[], None]) -> None:
        self.soon.append(what)

    def call(self, job: str, wait_ms: int) -> None:
        if any(each.warm_s <= self.now_s for each in self.of(job)):  # else its caller hears that nobody serves it
            self.asked += 1
            made = Call(f"c{self.asked}", b"", {}, self.now_s, wait_ms)
            self.later(lambda: self.deliver(job, made))

    def deliver(self, job: str, call: Call) -> None:
        members = [each for each in self.of(job) if each.warm_s <= self.now_s]
        if members:
            self.dice.choice(members).member.on_call(call, self.now_s)
        else:
            self.answer(call.reply, "nobody")

    def answer(self, reply: str, kind: str) -> None:
        self.answers_of[reply] += 1
        self.kinds[kind] += 1
        assert self.answers_of[reply] == 1, f"{reply} is answered twice"

    def run(self) -> None:
        for _ in range(self.dice.randint(10, 25)):
            self.act()
            self.pass_seconds(self.dice.randint(1, 12))
        self.rest()
        self.round_of_turns()
        self.is_calm = True
        self.held_up.clear()
        before, placed = dict(self.done), [name for name in self.services if self.of(name)]
        self.round_of_turns()
        for name in placed:
            assert self.done[name] > before.get(name, 0), f"{name} starves: {before}, {dict(self.done)}"
        self.is_calm = False
        self.pass_seconds(self.turns_s())
        for name in self.services:
            self.checked["wakes told"] += bool(self.engine.sleeping.wakes(self.job(name)))
        self.checked["most beside"] += self.most_beside > max(self.shares_mib.values())
        open_ = self.asked - self.answers_of.total()
        assert not open_, f"{open_} of {self.asked} calls were never answered: {dict(self.kinds)}"

    def rest(self) -> None:
        """All is well again."""
        for host in self.hosts:
            self.workers[host].freezes = self.workers[host].hears_freezes = True
        for job in list(self.state.jobs.values()):
            if job.hold is not None:
                self.order("release", job=job.name)
            if job.name.startswith("guest") and job.live:
                self.cancel(job.name)
        self.pass_seconds(620 if self.engine.fleet.no_guests else 20)  # one that could not be frozen is no guest yet

    def turns_s(self) -> int:
        """For how long the turns of all take at most, if they all have to share one GPU."""
        swaps_s = max(self.swap_s(name, out=out) for name in self.services for out in (False, True))
        return len(self.services) * (20 + GRACE_S + 12 + 5 + 2 * round(swaps_s)) * 2

    def round_of_turns(self) -> None:
        for _ in range(self.turns_s()):
            for name in self.services:
                if len(self.of(name)) and sum(len(each.member.room) for each in self.of(name)) < 2:
                    self.call(name, PATIENT_MS)
            self.pass_seconds(1)

    def act(self) -> None:
        """Do one thing."""
        dice, worker = self.dice, self.workers[self.dice.choice(self.hosts)]
        what, name = dice.choice(ACTS), dice.choice(self.services)
        if what == "call":
            self.call(name, dice.choice([0, 2_000, 30_000, PATIENT_MS]))
        elif what == "burst":
            for _ in range(dice.randint(5, 20)):
                self.call(dice.choice(self.services), dice.choice([2_000, 30_000, PATIENT_MS]))
        elif what == "lead":
            self.lead()
            self.seen.clear()
            self.renew()
        elif what == "swap":
            worker.hears_freezes = not worker.hears_freezes
            self.held_up.add(worker.id)
        elif what == "no-ram":
            freezes = not worker.freezes
            for each in [worker] if dice.random() < 0.5 else self.workers.values():
                each.freezes = freezes
        elif what == "crash":
            running = [held for held in worker.held.values() if held.phase == "running" and held.place.job == name]
            if running:
                worker.finish(dice.choice(running).name, 1)
        elif what == "hold":
            self.order("release" if self.job(name).hold is not None else "hold", job=name)
        elif what == "guest":
            run = {"driver": "process", "argv": ["work"], "grace_s": 1}
            fields = {"gpu": {}, "preemptible": dice.random() < 0.7, "run": run}
            self.submit(f"guest{self.now}", **beside(fields))
        elif what == "over":
            for job in [job.name for job in self.state.jobs.values() if job.name.startswith("guest") and job.live]:
                self.cancel(job)

    def swap_s(self, name: str, *, out: bool) -> float:
        """Return how long the memory of a service takes to leave its GPU, or to be back."""
        return SWAP_S + self.sizes_mib[name] / (OUT_MIB_S if out else IN_MIB_S)

    def has_swapped(self, held: HeldAttempt, order: Freeze) -> bool:
        is_out, since_s, asked_s = self.swaps.get(held.name, (not order.on, 0.0, 0.0))
        if is_out is not order.on or self.now_s - asked_s > LATE_S:
            since_s = self.now_s
        self.swaps[held.name] = order.on, since_s, self.now_s
        has_swapped = self.now_s - since_s >= self.swap_s(held.place.job, out=order.on)
        return has_swapped and not (self.by_request and self._has_calls(held, order))

    def _has_calls(self, held: HeldAttempt, order: Freeze) -> bool:
        """Return whether a member that is asked to sleep by a request has calls left: it begins no more from now on."""
        sleeper = self.sleepers.get(f"m{held.place.fence}-{held.place.replica}")
        if sleeper is None:
            return False
        sleeper.is_asleep = order.on
        sleeper.member.set_shut(order.on, self.now_s)
        return order.on and bool(sleeper.member.running)

    def use(self) -> None:
        """Workers see how much memory their members have on their GPUs."""
        for worker in self.workers.values():
            worker.use = []
            for held in worker.held.values():
                place = held.place
                if held.phase == "running" and place.job in self.services:
                    sleeper = self.sleepers.get(f"m{place.fence}-{place.replica}")
                    is_warm = sleeper is not None and sleeper.warm_s <= self.now_s
                    mib = self.sizes_mib[place.job] if is_warm else LOADING_MIB
                    on = [DeviceUse(place.slots[0], 0, mib, None)]
                    worker.use.append(
                        AttemptUse(place.fence, on, 0, place.tenant, place.job, place.replica, place.attempt)
                    )

    def pass_seconds(self, seconds: int) -> None:
        for _ in range(seconds):
            self.use()
            self.pass_time(1_000)
            self.settle()
            self.look()
            for each in [each for each in self.sleepers.values() if not each.is_over]:
                each.works()
                each.member.tick(self.now_s)
            self.come()
            for each in [each for each in self.sleepers.values() if not each.is_over and each.warm_s <= self.now_s]:
                each.says()
            self.settle()

    def come(self) -> None:
        """All that is under way comes, and what follows from it."""
        for _ in range(10_000):
            if not self.soon:
                return
            what, self.soon = self.soon, []
            for each in what:
                each()
        raise AssertionError("they have always something to say")

    def look(self) -> None:
        """Members begin with their attempts, hear of their turns, and die with their attempts."""
        held: dict[AttemptName, HeldAttempt] = {}
        for worker in self.workers.values():
            held |= {name: each for name, each in worker.held.items() if each.phase in ("running", "frozen")}
        for each in held.values():
            if each.place.job in self.services:
                request = self.engine.reader.request_of(self.job(each.place.job))
                assert request.service is not None
                key = f"m{each.place.fence}-{each.place.replica}"
                if key not in self.sleepers:
                    self.sleepers[key] = Sleeper(self, each, request.service.concurrency)
        for sleeper in [sleeper for sleeper in self.sleepers.values() if not sleeper.is_over]:
            if sleeper.held.name not in held:
                sleeper.dies()
            elif (turn := self.turns.get(sleeper.member.name)) is not None and turn is not sleeper.turn:
                sleeper.turn = turn
                self.look_at_turn(sleeper, turn)
                sleeper.member.on_turn(turn, self.now_s)
        self.look_at_reasons()
        self.come()

    def look_at_turn(self, sleeper: Sleeper, turn: Turn) -> None:
        """What a member is told of its turn is true."""
        member = self.attempt(sleeper.job, sleeper.held.place.replica)
        host = member.worker
        if turn.awake:
            self._look_at_end(sleeper, len(host.attempts))
            return
        if host.id not in self.held_up:
            most_s = sum(self._most_s(other) for other in host.attempts.values())
            assert turn.in_ms <= 1000 * most_s, f"{turn.member} has its turn in {turn.in_ms} ms: {turn.why}"
            self.checked["times"] += 1
        if turn.stuck or member.replica.state != ledger.FROZEN or member.freeze:
            return  # nothing tells when it has its GPUs, or it is not called
        told = Told(self.now + turn.in_ms, member.leased if member.mask else 0)
        before = sleeper.told[-1] if sleeper.told else None
        if before is not None and before.leased == told.leased > 0 and sleeper.job in self.seen and not self.held_up:
            assert told.at_ms <= before.at_ms + 1_500, f"{turn.member} is waking, and told {turn.in_ms} ms again"
            self.checked["waking"] += 1
        for other in host.attempts.values():
            has_gpus = other.mask & member.home & ~member.mask
            mib = [self.shares_mib.get(each.replica.job.name) or GPU_MIB for each in (member, other)]
            has_gpus = has_gpus if sum(mib) > GPU_MIB else 0  # else they are beside each other
            if has_gpus and other.replica.state == ledger.FROZEN and not other.freeze and turn.in_ms:
                self._look_behind(sleeper, turn, other.replica.job.name)
        sleeper.told.append(told)

    def _look_at_end(self, sleeper: Sleeper, members: int) -> None:
        """A member has its GPUs not long before it was told."""
        told, sleeper.told = sleeper.told, []
        if told and told[-1].leased:
            self.seen.add(sleeper.job)
        if self.is_calm and not self.shares_mib[sleeper.job]:  # sharers may be awake before those that come first
            early_s = max((each.at_ms for each in told), default=0) / 1000 - self.now_s
            assert early_s <= GRACE_S + LATE_S * members, (
                f"{sleeper.member.name} has its turn {early_s} s early: {told}"
            )
            self.checked["turns"] += len(told)

    def _look_behind(self, sleeper: Sleeper, turn: Turn, waking: str) -> None:
        """A member is told all of the turn of one that wakes on its GPUs."""
        least_s: float = self.awake_s[waking] - LATE_S
        if self.is_calm:
            least_s += self.swap_s(waking, out=True) + self.swap_s(sleeper.job, out=False)
        assert turn.in_ms >= 1000 * least_s, f"{turn.member} is told {turn.in_ms} ms, and {waking} wakes on its GPUs"
        self.checked["behind one that wakes"] += 1

    def _most_s(self, member: ledger.Attempt) -> float:
        """Return how long the turn of a member may take, by what is known of its swaps; 0 if it has none."""
        name = member.replica.job.name
        if name not in self.sizes_mib:
            return 0
        swaps_s = self.swap_s(name, out=True) + self.swap_s(name, out=False)
        return self.awake_s[name] + GRACE_S + SLOWER_MAX * (swaps_s + LATE_S)

    def look_at_reasons(self) -> None:
        """Why a member could not be frozen is what its own host said."""
        sleeping = self.engine.sleeping
        for member in self.state.attempts():
            why = sleeping.stays_awake(member)
            if why.startswith("a wake takes about "):
                self.checked["too slow to sleep"] += 1
            elif why:
                assert why.endswith(f" {member.worker.id}"), f"{member.name} of {member.worker.id} stays awake: {why}"
                self.checked["reasons"] += 1

    def tick(self, ms: int = 1, *, obey: bool = True) -> Outputs:
        out = super().tick(ms, obey=obey)
        held = [member for member in self.state.attempts() if member.mask]
        shared = Counter[tuple[int, int]]()
        for member in held:
            if share_mib := self.shares_mib.get(member.replica.job.name, 0):
                shared[member.worker.num, member.mask] += share_mib
                self.most_beside = max(self.most_beside, shared[member.worker.num, member.mask])
        assert self.most_beside <= GPU_MIB, f"sharers awake on one GPU have {self.most_beside} MiB"
        for at, member in enumerate(held):
            for other in held[at + 1 :]:
                both = member.mask & other.mask if member.worker is other.worker else 0
                if all(self.shares_mib.get(each.replica.job.name) for each in (member, other)):
                    continue
                assert not both, f"{member.name} and {other.name} both hold {both:b} of {member.worker.id}"
        return out


def again(call: Call, now_s: float, waited_ms: int) -> Call:
    """Return a call as the next member gets it."""
    return Call(call.reply, call.data, call.headers, now_s, call.wait_ms, waited_ms, call.hops)


def failure(seed: int, checked: Counter[str] | None = None) -> str:
    """Return what is wrong with the site of a seed, "" if nothing is; `checked` counts what was looked at."""
    try:
        site = Sleepers(seed)
        site.run()
    except Exception as error:  # whatever is raised is the finding
        return f"{type(error).__name__}: {error}"
    if checked is not None:
        checked.update(site.checked + site.kinds)
    return ""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--from", dest="first", type=int, default=SLEEPERS_FROM)
    asked = parser.parse_args(arguments)
    wrong, checked = 0, Counter[str]()
    for seed in range(asked.first, asked.first + asked.seeds):
        if found := failure(seed, checked):
            wrong += 1
            print(f"seed {seed}: {found}", flush=True)
    print(f"{asked.seeds - wrong} of {asked.seeds} sites hold: {dict(checked)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
