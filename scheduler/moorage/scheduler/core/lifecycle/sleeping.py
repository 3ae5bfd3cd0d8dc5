"""Members of services that sleep while no calls come: which are to be frozen, and which are to run on.

A member says what it has to do (`MemberLoad`), at once when a call comes after a while without. One that had no call
for `service.sleep_after_s` is frozen, and runs on once a call waits in it. From then on all is as for other frozen
members (`lifecycle.frozen`): it waits for its own devices. These also take members of other services that sleep, so
one that runs on may find another on them. Once that one has been awake for `service.awake_s`, its turn is over: it is
told so (`Turn`), begins no more calls, and is frozen once none runs, or its grace is over too. Its other calls wait in
its room, as those for any member that sleeps. A member that cannot be frozen ends, if the other one was placed there
first.

The ledger has only the words (`acts.Freeze`), in the name of the worker: no operator has ordered it. A new leader
counts from when it hears a member first.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.host import EXCLUSIVE, Host
from moorage.scheduler.core.fleet.slots import slots_of
from moorage.scheduler.core.ledger.records import Count
from moorage.scheduler.core.ledger.state import (
    FREEZE,
    FROZEN,
    RESUME,
    RUNNING,
    Attempt,
    Job,
    State,
)
from moorage.scheduler.core.lifecycle.freezing import write_freeze
from moorage.scheduler.core.lifecycle.frozen import in_the_way, is_over_limit, since
from moorage.scheduler.core.lifecycle.scaling import member_of
from moorage.scheduler.core.lifecycle.swaps import Rung, Swaps
from moorage.scheduler.core.lifecycle.transitions import Lifecycle
from moorage.schemas.attempt import AttemptName
from moorage.schemas.frames import NO_RAM
from moorage.schemas.service import MemberLoad, ServiceSpec, Turn
from moorage.schemas.units import many

#: a guest of a service that sleeps ends once it was to be frozen so often, and was not
VAIN_MAX: Final = 2
#: for how long its service is no guest then: it may only have loaded its model
GUEST_AGAIN_MS: Final = 600_000
NOT_FROZEN_WHY: Final = "it could not be frozen for the service that was on its GPUs first"
#: a member that rests is told so again after so long: else it takes its leader for gone
TURN_AGAIN_MS: Final = 4_000


class Wait(NamedTuple):
    """When a member has its GPUs for a call that comes now, in milliseconds, None if nothing tells; what it does until
    then, without "it"; and whether that has no end yet."""

    ms: int | None
    why: str
    stuck: bool = False


class _Heard:
    """What one member has said last, and was told. Times are monotonic milliseconds."""

    __slots__ = (
        "asked", "awake_ms", "began", "called_ms", "calls_ms", "freezes_ms", "is_frozen", "is_refused", "load",
        "member", "told", "told_ms", "vain",
    )  # fmt: skip

    def __init__(self, member: Attempt, load: MemberLoad | None, mono_ms: int) -> None:
        self.member = member
        self.load = load  # None: it has said nothing yet, as one that loads its model
        self.called_ms = mono_ms  # when it had a call last, or was heard first
        self.awake_ms: int | None = mono_ms  # since when it runs; None while it is frozen
        self.asked = False  # it was to be frozen since its last call: its worker may have refused that
        self.vain = 0  # how often it was to be frozen for another one, and was not
        self.freezes_ms: int | None = None  # since when its worker is to freeze it
        self.is_frozen = False  # as of the last look
        self.calls_ms: int | None = None  # since when a call waits for it to be awake
        self.began = False  # it has said in this turn that it begins calls: it knows of its turn
        self.is_refused = False  # callers that cannot wait for it were refused while it rests: they call again
        self.told: Turn | None = None
        self.told_ms = 0

    def take(self, load: MemberLoad, mono_ms: int) -> None:
        before, self.load = self.load, load
        self.began |= not load.rests
        self.is_refused = load.rests and (self.is_refused or (before is not None and load.refused > before.refused))
        if before is None or self.is_called or (load.ended, load.refused) != (before.ended, before.refused):
            self.called_ms, self.asked = mono_ms, False

    @property
    def is_called(self) -> bool:
        """Whether calls run or wait there; one that loads its model has to do as well."""
        return self.load is None or bool(self.load.running or self.load.waiting or self.is_refused)

    @property
    def has_ended(self) -> bool:
        """Whether its turn is over by its own word: it begins no call any more, and none runs."""
        return self.began and self.load is not None and self.load.rests and not self.load.running

    @property
    def may_begin(self) -> bool:
        """Whether it may begin calls, by the last turn sent to it and by its last load."""
        return (self.told is None or self.told.awake) and not (self.load is not None and self.load.rests)


class Sleeping:
    """Follows the members of services that sleep, on the hosts of one fleet."""

    def __init__(self, state: State, fleet: Fleet, lifecycle: Lifecycle) -> None:
        self._state = state
        self._fleet = fleet
        self._lifecycle = lifecycle
        self._heard: dict[AttemptName, _Heard] = {}
        self._looked_ms = 0
        self.swaps = Swaps()
        #: whether to look in the next record: a call waits in a member that sleeps, one was told to run on, or has
        #: ended the calls of its turn
        self.is_called = False

    def on_load(self, tenant: str, load: MemberLoad, mono_ms: int) -> None:
        """Take a member's load; a frame of no member of such a service is ignored."""
        member = member_of(self._state, tenant, load)
        if member is None or not self._lifecycle.request_of(member.replica.job).sleeps:
            return
        heard = self._heard.get(member.name)
        if heard is None:
            heard = self._heard[member.name] = _Heard(member, load, mono_ms)
        else:
            heard.take(load, mono_ms)
        ends_turn = heard.has_ended and not member.freeze and member.replica.state == RUNNING
        self.is_called |= ends_turn or (member.wakes and heard.is_called)

    def waking(self, member: Attempt, began_ms: int = 0) -> str:
        """Return what it takes to have a frozen member's memory back on its GPUs, of which `began_ms` are over; "" if
        nothing is known of it."""
        swap = self.swaps.of(member.replica.job.num)
        size = f"{swap.mib / 1024:.3g} GiB from RAM" if swap.mib else ""
        takes = f"about {max(1, math.ceil((swap.in_ms - began_ms) / 1000))} s" if swap.in_ms > began_ms else ""
        return f"waking: {', '.join(filter(None, (size, takes)))}" if size or takes else ""

    def waits(self, member: Attempt) -> Wait:
        """Return for what a member that sleeps waits before it has its GPUs for a call, and about how long from now."""
        swap, waking, job = self.swaps.of(member.replica.job.num), self.waking(member), member.replica.job
        if job.hold is not None or self._state.read_tenant(job.tenant).hold is not None:
            return Wait(None, "is held")
        if is_over_limit(self._state.read_tenant(job.tenant), member):
            return Wait(None, "waits for the GPU limit of its tenant")
        then = f"; then {waking}" if waking else ""
        mask = member.mask
        if member.replica.state == FROZEN and mask:
            began_ms = self._wakes_ms(member)
            waking = self.waking(member, began_ms)
            return Wait(max(0, swap.in_ms - began_ms), f"is {waking}" if waking else "is resumed")
        host = self._fleet.hosts.get(member.worker.num)
        if host is None or (member.home & host.shut and not mask):  # no end of another one gives it all of its GPUs
            return Wait(None, "waits until its worker gives its GPUs")
        before = [
            other
            for other in host.frozen.values()
            if other.home & member.home
            and not (other.freeze or other.mask)
            and (mask or since(other) < since(member))
            and not self._fit(host, [member, other])
        ]
        before_ms = (self._out_ms(member) if mask else 0) + self._turns_ms(host, before)
        holders = [] if mask else in_the_way(host, member, self._lifecycle)
        if not all(self._lifecycle.request_of(other.replica.job).sleeps for other in holders):
            return Wait(None, "waits for the end of the job on its GPUs")
        refused = [other for other in holders if not self.could_freeze(other)]
        if refused:
            no_ram = any(other.not_frozen.startswith(NO_RAM) for other in refused)
            told = f": {NO_RAM}its host's RAM has no room for it" if no_ram else ""  # its size may be another tenant's
            left_ms = max(self._left_ms(other) for other in refused)
            why = f"waits for its turn on its GPUs: the service there could not be frozen, and is asked again{told}"
            return Wait(max(1000, left_ms) if no_ram else None, why, stuck=no_ram)
        left_ms = max((self._left_ms(other) for other in holders), default=0)
        in_ms = left_ms + max(map(self._out_ms, holders), default=0) + before_ms + swap.in_ms
        if mask:
            return Wait(in_ms, f"has had its turn, as another service that sleeps is called{then}")
        if not holders:
            return Wait(in_ms, f"is {waking}" if waking else "is resumed")
        first = f"is to sleep first, in about {math.ceil(left_ms / 1000)} s" if left_ms else "is to sleep first"
        return Wait(in_ms, f"waits for its turn on its GPUs: the service there {first}{then}")

    def _turns_ms(self, host: Host, members: list[Attempt]) -> int:
        """Return how long the turns of frozen members take: those that fit beside each other have theirs at once."""
        turns = list[list[Attempt]]()
        for member in sorted(members, key=since):
            beside = next((turn for turn in turns if self._fit(host, [*turn, member])), None)
            if beside is None:
                turns.append([member])
            else:
                beside.append(member)
        return sum(max(map(self._turn_ms, turn)) for turn in turns)

    def _fit(self, host: Host, members: list[Attempt]) -> bool:
        """Return whether members may be awake beside each other on the devices that they share."""
        held = dict[int, list[Attempt]]()
        for member in members:
            for slot in slots_of(member.home):
                held.setdefault(slot, []).append(member)
        for slot, sharers in held.items():
            share_mib = sum(self._lifecycle.shape_of(each.replica.job).share_mib for each in sharers)
            holds_all = EXCLUSIVE in [each.mode for each in sharers]
            if len(sharers) > 1 and (holds_all or share_mib > host.cls.devices[slot][3]):
                return False
        return True

    def _left_ms(self, member: Attempt) -> int:
        """Return for how long a member keeps its GPUs from another one that sleeps and is called; 0 if unknown.

        One that is waking has its turn first.
        """
        heard, request = self._heard.get(member.name), self._lifecycle.request_of(member.replica.job)
        if member.freeze or request.service is None:
            return 0
        least_ms = round(1000 * request.service.awake_s)
        if member.replica.state == FROZEN:
            waking_ms = self.swaps.of(member.replica.job.num).in_ms - self._wakes_ms(member)
            return max(0, waking_ms) + least_ms
        if heard is None:
            return 0
        awake_ms = 0 if heard.awake_ms is None else self._looked_ms - heard.awake_ms  # None: it runs on since just now
        if awake_ms >= least_ms and heard.is_called and not heard.has_ended:
            least_ms += round(1000 * request.workload.grace_s)
        return max(0, least_ms - awake_ms)

    def _out_ms(self, member: Attempt) -> int:
        """Return how long a member takes to leave its GPUs, less what is over of it."""
        heard, out_ms = self._heard.get(member.name), self.swaps.of(member.replica.job.num).out_ms
        since_ms = heard.freezes_ms if heard is not None and member.freeze else None
        return out_ms if since_ms is None else max(0, out_ms - (self._looked_ms - since_ms))

    def _wakes_ms(self, member: Attempt) -> int:
        """Return for how long a member that is to run on has had its GPUs again."""
        return max(0, self._state.time_ms - (member.leased_ms or self._state.time_ms))

    def _turn_ms(self, member: Attempt) -> int:
        """Return how long a turn of a frozen member takes, from its resume to the next one's."""
        swap, request = self.swaps.of(member.replica.job.num), self._lifecycle.request_of(member.replica.job)
        return swap.in_ms + swap.out_ms + round(1000 * (request.service.awake_s if request.service else 0))

    def refused(self, member: Attempt) -> bool:
        """Return whether a member without calls runs on because its worker could not freeze it."""
        heard = self._heard.get(member.name)
        return heard is not None and not heard.is_called and bool(self.stays_awake(member))

    def rung(self, job: Job) -> Rung:
        """Return what members of a service do while no calls come, so that the next one has a member in its time."""
        request = self._lifecycle.request_of(job)
        within_ms = round(1000 * request.service.wake_within_s) if request.service is not None else 0
        return self.swaps.rung(job.num, within_ms, may_end=request.ends_idle)

    def wakes(self, job: Job) -> str:
        """Return how often calls woke members in this term within the time that the service names; "" for none."""
        wakes, request = self.swaps.wakes(job.num), self._lifecycle.request_of(job)
        if not wakes.times or request.service is None or not request.service.wake_within_s:
            return ""
        return f"{wakes.within} of {many(wakes.times, 'wake')} took at most {request.service.wake_within_s:g} s"

    def stays_awake(self, member: Attempt) -> str:
        """Return why a member runs on that was to be frozen since its last call; "" if it was not, or is to be yet."""
        heard = self._heard.get(member.name)
        if member.replica.state == RUNNING and self.rung(member.replica.job) == "stays":
            service = self._lifecycle.request_of(member.replica.job).service
            assert service is not None
            in_s = math.ceil(self.swaps.of(member.replica.job.num).in_ms / 1000)
            return f"a wake takes about {in_s} s, and is to take at most {service.wake_within_s:g} s"
        if heard is None or not heard.asked or member.freeze:
            return ""
        return (member.not_frozen or "not frozen") if member.replica.state == RUNNING else ""

    def pass_time(self, draft: Draft, mono_ms: int) -> None:
        """Have members frozen, or run on. To be called for a record if `is_called`, and about once a second."""
        self._looked_ms = mono_ms
        self.swaps.keep(self._state.jobs)
        self._let_guests_again(mono_ms)
        self._find_silent(mono_ms)
        stuck = self._fleet.stuck = {}
        for name, heard in list(self._heard.items()):
            member = heard.member
            if not self._lifecycle.is_on_worker(member):
                del self._heard[name]
                continue
            if not draft.full:
                self._look(draft, heard, mono_ms)
                self._send_turn(draft, heard, mono_ms)
            if heard.vain >= VAIN_MAX and self._is_needed(member) and not self._is_guest(member):
                stuck[member.worker.num] = stuck.get(member.worker.num, 0) | member.mask

    def _let_guests_again(self, mono_ms: int) -> None:
        """Let services be guests again whose time without is over."""
        until = self._fleet.no_guests
        kept = {num: at_ms for num, at_ms in until.items() if num in self._state.jobs and mono_ms < at_ms}
        if len(kept) < len(until):
            self._fleet.no_guests = kept
            self._fleet.opens()

    def _find_silent(self, mono_ms: int) -> None:
        """Follow members, too, that have said nothing yet, once others wait for their devices."""
        for host in self._fleet.with_frozen.values():
            for member in host.worker.attempts.values() if host.needed & ~host.free else ():
                sleeps = self._lifecycle.request_of(member.replica.job).sleeps
                if sleeps and member.name not in self._heard and self._is_needed(member):
                    self._heard[member.name] = _Heard(member, None, mono_ms)

    def _look(self, draft: Draft, heard: _Heard, mono_ms: int) -> None:
        member = heard.member
        state, is_to_sleep = member.replica.state, member.freeze
        if is_to_sleep or state == FROZEN:
            heard.awake_ms = None
            if state == FROZEN:  # once it runs on, for whatever reason, it counts anew
                heard.asked, heard.called_ms, heard.vain = False, mono_ms, 0
                if heard.freezes_ms is not None:
                    self.swaps.left(member.replica.job.num, mono_ms - heard.freezes_ms)
                heard.freezes_ms, heard.is_frozen = None, True
            gives_way = state == RUNNING and self._is_needed(member)  # it is first to be frozen for another one
            if is_to_sleep and member.wakes and heard.is_called and not gives_way:
                if state == RUNNING:  # its worker has not said that it cannot be frozen
                    heard.vain = max(0, heard.vain - 1)
                heard.calls_ms = mono_ms
                write_freeze(draft, member, RESUME, "it is called")
                self.is_called = True  # another one may have to give up its devices for it
            return
        if state != RUNNING:
            return
        if heard.is_frozen and member.leased_ms:
            self.swaps.came(member.replica.job.num, draft.time_ms - member.leased_ms)
        heard.freezes_ms, heard.is_frozen = None, False
        if heard.awake_ms is None:
            heard.awake_ms, heard.began = mono_ms, False
        self.swaps.has(member.replica.job.num, self._used_mib(member))
        request = self._lifecycle.request_of(member.replica.job)
        spec = request.service
        assert spec is not None
        if heard.calls_ms is not None:
            self.swaps.woke(member.replica.job.num, mono_ms - heard.calls_ms, round(1000 * spec.wake_within_s))
            heard.calls_ms = None
        if member.ready_ms and member.ever_ready and not member.has_frozen:
            self.swaps.started(member.replica.job.num, member.fence, member.ready_ms - member.began_ms)
        if why := self._why_freeze(heard, spec, request.workload.grace_s, mono_ms):
            if self._is_needed(member):
                if heard.vain >= VAIN_MAX and self._is_guest(member):
                    self._lifecycle.leave(draft, member, NOT_FROZEN_WHY, Count.NONE)
                    self._fleet.no_guests[member.replica.job.num] = mono_ms + GUEST_AGAIN_MS
                    return
                heard.vain += 1
            heard.asked, heard.awake_ms, heard.freezes_ms = True, mono_ms, mono_ms
            write_freeze(draft, member, FREEZE, why)

    def _send_turn(self, draft: Draft, heard: _Heard, mono_ms: int) -> None:
        """Send a member its turn, whether it has its GPUs for calls: at each change, and at times while it rests."""
        member, load, told = heard.member, heard.load, heard.told
        if load is None:
            return
        rests = member.replica.state == FROZEN or member.freeze
        rests = rests or self._turn_is_over(heard, mono_ms)
        if not rests:
            if not heard.may_begin:
                self._add_turn(draft, heard, Turn(load.member, awake=True), mono_ms)
            return
        if told is None or told.awake or not load.rests or mono_ms - heard.told_ms >= TURN_AGAIN_MS:
            wait = self.waits(member)
            about = f", in about {math.ceil(wait.ms / 1000)} s" if wait.ms and not wait.stuck else ""
            why = f"the service sleeps{about}: it {wait.why}"
            self._add_turn(draft, heard, Turn(load.member, False, wait.ms or 0, why, wait.stuck), mono_ms)

    def _add_turn(self, draft: Draft, heard: _Heard, turn: Turn, mono_ms: int) -> None:
        job = heard.member.replica.job
        service = self._lifecycle.request_of(job).service
        assert service is not None
        heard.told, heard.told_ms = turn, mono_ms
        draft.turns.append((job.tenant, service.name, turn))

    def _turn_is_over(self, heard: _Heard, mono_ms: int) -> bool:
        """Return whether a member that runs gives its GPUs to another one that waits for them."""
        spec = self._lifecycle.request_of(heard.member.replica.job).service
        if spec is None or heard.awake_ms is None or not heard.began or not self._is_needed(heard.member):
            return False
        return mono_ms - heard.awake_ms >= 1000 * spec.awake_s

    def _used_mib(self, member: Attempt) -> int:
        """Return the memory that a member uses on its GPUs; 0 if its worker does not say."""
        host = self._fleet.hosts.get(member.worker.num)
        use = None if host is None else host.use.get(member.name)
        return 0 if use is None else sum(each.memory_mib or 0 for each in use.devices)

    def _why_freeze(self, heard: _Heard, spec: ServiceSpec, grace_s: float, mono_ms: int) -> str:
        """Return why a member that runs is to be frozen now; "" if it is not."""
        member, awake_ms = heard.member, mono_ms - (heard.awake_ms or 0)
        if self._is_needed(member):
            least_ms = 1000 * (spec.awake_s + (grace_s if heard.is_called and not heard.has_ended else 0))
            return "the service that sleeps on its GPUs is called" if awake_ms >= least_ms else ""
        quiet_ms = mono_ms - heard.called_ms
        if heard.is_called or heard.asked or quiet_ms < spec.sleep_after_s * 1000:
            return ""
        if self.rung(member.replica.job) != "sleeps":
            return ""
        return f"no call for {many(quiet_ms // 1000, 'second')}"

    def _is_needed(self, member: Attempt) -> bool:
        """Return whether a frozen member that is to run on waits for devices that this one has."""
        host = self._fleet.hosts.get(member.worker.num)
        return host is not None and any(member is other for way in host.ways.values() for other in way)

    def _is_guest(self, member: Attempt) -> bool:
        """Return whether one that waits for the devices of this member was placed there before it."""
        mask = member.mask
        frozen = self._fleet.hosts[member.worker.num].frozen.values()
        waiting = [other for other in frozen if mask & other.home and not other.freeze]
        return any(other.fence < member.fence for other in waiting)

    def could_freeze(self, member: Attempt) -> bool:
        """Return whether a member was frozen when it was last to be, or was not asked to be."""
        heard = self._heard.get(member.name)
        return heard is None or not heard.vain or member.freeze
