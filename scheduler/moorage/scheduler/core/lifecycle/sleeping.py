"""Members of services that sleep while no calls come: which are to be frozen, and which are to run on.

A member says what it has to do (`MemberLoad`), at once when a call comes after a while without. One that had no call
for `service.sleep_after_s` is frozen, and runs on once a call waits in it. From then on all is as for other frozen
members (`lifecycle.frozen`): it waits for its own devices. These also take members of other services that sleep, so
one that runs on may find another on them. That one is frozen as soon as it has been awake for `service.awake_s`, once
it has no call, or its grace is over too. The calls that run there then wait, as those for any member that sleeps. A
member that cannot be frozen ends, if the other one was placed there first.

The ledger has only the words (`acts.Freeze`), in the name of the worker: no operator has ordered it. A new leader
counts from when it hears a member first.
"""

from __future__ import annotations

from typing import Final

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.ledger.acts import Freeze
from moorage.scheduler.core.ledger.records import BY_WORKER, Count
from moorage.scheduler.core.ledger.state import FREEZE, FROZEN, RESUME, RUNNING, Member, State
from moorage.scheduler.core.lifecycle.freezing import stays_frozen
from moorage.scheduler.core.lifecycle.scaling import member_of
from moorage.scheduler.core.lifecycle.transitions import Lifecycle
from moorage.schemas.attempt import AttemptName
from moorage.schemas.service import MemberLoad, ServiceSpec
from moorage.schemas.units import many

#: a guest of a service that sleeps ends once it was to be frozen so often, and was not
VAIN_MAX: Final = 2
#: for how long its service is no guest then: it may only have loaded its model
GUEST_AGAIN_MS: Final = 600_000
NOT_FROZEN_WHY: Final = "it could not be frozen for the service that was on its GPUs first"


class _Heard:
    """What one member has said last. Times are monotonic milliseconds."""

    __slots__ = ("asked", "awake_ms", "called_ms", "load", "member", "vain")

    def __init__(self, member: Member, load: MemberLoad | None, mono_ms: int) -> None:
        self.member = member
        self.load = load  # None: it has said nothing yet, as one that loads its model
        self.called_ms = mono_ms  # when it had a call last, or was heard first
        self.awake_ms: int | None = mono_ms  # since when it runs; None while it is frozen
        self.asked = False  # it was to be frozen since its last call: its worker may have refused that
        self.vain = 0  # how often it was to be frozen for another one, and was not

    def take(self, load: MemberLoad, mono_ms: int) -> None:
        before, self.load = self.load, load
        if before is None or self.is_called or (load.ended, load.refused) != (before.ended, before.refused):
            self.called_ms, self.asked = mono_ms, False

    @property
    def is_called(self) -> bool:
        """Whether calls run or wait there; one that loads its model has to do as well."""
        return self.load is None or bool(self.load.running or self.load.waiting)


class Sleeping:
    """Follows the members of services that sleep, on the hosts of one fleet."""

    def __init__(self, state: State, fleet: Fleet, lifecycle: Lifecycle) -> None:
        self._state = state
        self._fleet = fleet
        self._lifecycle = lifecycle
        self._heard: dict[AttemptName, _Heard] = {}
        self._looked_ms = 0
        #: whether to look in the next record: a call waits in a member that sleeps, or one was told to run on
        self.is_called = False

    def heard(self, tenant: str, load: MemberLoad, mono_ms: int) -> None:
        """Take what a member says; a frame of no member of such a service is ignored."""
        member = member_of(self._state, tenant, load)
        if member is None or not self._lifecycle.request_of(member.replica.job).sleeps:
            return
        heard = self._heard.get(member.name)
        if heard is None:
            heard = self._heard[member.name] = _Heard(member, load, mono_ms)
        else:
            heard.take(load, mono_ms)
        self.is_called |= member.wakes and heard.is_called

    def awake_left_s(self, member: Member) -> float:
        """Return for how long a member keeps its devices from another one that sleeps and is called; 0 if unknown."""
        heard, request = self._heard.get(member.name), self._lifecycle.request_of(member.replica.job)
        if heard is None or heard.awake_ms is None or request.service is None:
            return 0
        least_s = request.service.awake_s + (request.workload.grace_s if heard.is_called else 0)
        return max(0.0, least_s - (self._looked_ms - heard.awake_ms) / 1000)

    def refused(self, draft: Draft, member: Member) -> bool:
        """Return whether a member without calls runs on because its worker could not freeze it."""
        heard = self._heard.get(member.name)
        if heard is None or not heard.asked or heard.is_called:
            return False
        return draft.replica(member.replica).state == RUNNING and not stays_frozen(draft, member)

    def pass_time(self, draft: Draft, mono_ms: int) -> None:
        """Have members frozen, or run on. To be called for a record if `is_called`, and about once a second."""
        self._looked_ms = mono_ms
        self._let_guests_again(mono_ms)
        self._find_silent(draft, mono_ms)
        stuck = self._fleet.stuck = {}
        for name, heard in list(self._heard.items()):
            member = heard.member
            if member in draft.gone or not self._lifecycle.is_on_worker(draft, member):
                del self._heard[name]
                continue
            if not draft.full:
                self._look(draft, heard, mono_ms)
            if heard.vain >= VAIN_MAX and self._is_needed(draft, member) and not self._is_guest(draft, member):
                stuck[member.worker.num] = stuck.get(member.worker.num, 0) | draft.mask_of(member)

    def _let_guests_again(self, mono_ms: int) -> None:
        """Let services be guests again whose time without is over."""
        until = self._fleet.no_guests
        kept = {num: at_ms for num, at_ms in until.items() if num in self._state.jobs and mono_ms < at_ms}
        if len(kept) < len(until):
            self._fleet.no_guests = kept
            self._fleet.opens()

    def _find_silent(self, draft: Draft, mono_ms: int) -> None:
        """Follow members, too, that have said nothing yet, once others wait for their devices."""
        for host in self._fleet.with_frozen.values():
            for member in host.worker.members.values() if host.needed & ~host.free else ():
                sleeps = self._lifecycle.request_of(member.replica.job).sleeps
                if sleeps and member.name not in self._heard and self._is_needed(draft, member):
                    self._heard[member.name] = _Heard(member, None, mono_ms)

    def _look(self, draft: Draft, heard: _Heard, mono_ms: int) -> None:
        member = heard.member
        state, is_to_sleep = draft.replica(member.replica).state, stays_frozen(draft, member)
        if is_to_sleep or state == FROZEN:
            heard.awake_ms = None
            if state == FROZEN:  # once it runs on, for whatever reason, it counts anew
                heard.asked, heard.called_ms, heard.vain = False, mono_ms, 0
            gives_way = state == RUNNING and self._is_needed(draft, member)  # it is first to be frozen for another one
            if is_to_sleep and member.wakes and heard.is_called and not gives_way:
                _write(draft, member, RESUME, "it is called")
                self.is_called = True  # another one may have to give up its devices for it
            return
        if state != RUNNING:
            return
        if heard.awake_ms is None:
            heard.awake_ms = mono_ms
        request = self._lifecycle.request_of(member.replica.job)
        spec = request.service
        assert spec is not None
        if why := self._why_freeze(draft, heard, spec, request.workload.grace_s, mono_ms):
            if self._is_needed(draft, member):
                if heard.vain >= VAIN_MAX and self._is_guest(draft, member):
                    self._lifecycle.leave(draft, member, NOT_FROZEN_WHY, Count.NONE)
                    self._fleet.no_guests[member.replica.job.num] = mono_ms + GUEST_AGAIN_MS
                    return
                heard.vain += 1
            heard.asked, heard.awake_ms = True, mono_ms
            _write(draft, member, FREEZE, why)

    def _why_freeze(self, draft: Draft, heard: _Heard, spec: ServiceSpec, grace_s: float, mono_ms: int) -> str:
        """Return why a member that runs is to be frozen now; "" if it is not."""
        member, awake_ms = heard.member, mono_ms - (heard.awake_ms or 0)
        if self._is_needed(draft, member):
            least_ms = 1000 * (spec.awake_s + (grace_s if heard.is_called else 0))
            return "the service that sleeps on its GPUs is called" if awake_ms >= least_ms else ""
        quiet_ms = mono_ms - heard.called_ms
        if heard.is_called or heard.asked or quiet_ms < spec.sleep_after_s * 1000:
            return ""
        return f"no call for {many(quiet_ms // 1000, 'second')}"

    def _is_needed(self, draft: Draft, member: Member) -> bool:
        """Return whether a frozen member that is to run on waits for devices that this one has."""
        host = self._fleet.hosts.get(member.worker.num)
        return host is not None and bool(draft.mask_of(member) & host.needed)

    def _is_guest(self, draft: Draft, member: Member) -> bool:
        """Return whether one that waits for the devices of this member was placed there before it."""
        mask = draft.mask_of(member)
        frozen = self._fleet.hosts[member.worker.num].frozen.values()
        waiting = [other for other in frozen if mask & other.home and not stays_frozen(draft, other)]
        return any(other.fence < member.fence for other in waiting)

    def could_freeze(self, member: Member) -> bool:
        """Return whether a member was frozen when it was last to be, or was not asked to be."""
        heard = self._heard.get(member.name)
        return heard is None or not heard.vain or member.freeze


def _write(draft: Draft, member: Member, word: int, why: str) -> None:
    draft.add(Freeze(member.replica.job.num, member.replica.index, word, BY_WORKER, why))
