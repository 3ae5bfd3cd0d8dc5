"""Guests on a worker: who may have the devices of a frozen member, and when that is resumed."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from moorage.schemas.capabilities import KNOWN
from moorage.schemas.codec import decode_request
from moorage.schemas.frames import Device, End, Freeze, Place, Wanted
from moorage.worker.devices.pool import GpuPool, PoolLease, SlotsRefused
from moorage.worker.session.member_messages import (
    Command,
    Ended,
    EndMember,
    FreezeAnswered,
    FreezeMember,
    Member,
    MemberName,
    NotFree,
    ProbeFree,
    Release,
    Restored,
    SeenFree,
    Started,
)
from moorage.worker.session.members import Members
from tests.worker.member_bench import Bench, body, name_of, of, place

OWNER = name_of("owner", fence=10)
GUEST = name_of("guest", fence=11)


class Guested(Bench):
    """A bench whose driver freezes, and takes guests."""

    def __init__(self) -> None:
        super().__init__()
        drivers = {"process": replace(KNOWN["process"], freezes=True, guests=True)}
        self.members = Members("w1", drivers, join_n=0, tombstones_max=100, free_wait_s=10)
        self.join()

    def freeze(self, name: MemberName = OWNER, *, on: bool = True) -> list[Command]:
        return self.do(Wanted("w1", self.session, self.reign, place=[], start=[], end=[], freeze=[Freeze(*name, on)]))

    def frozen(self, slots: tuple[int, ...] = (0,), **run: Any) -> None:
        self.run(OWNER, slots=slots, request=body(run=run))
        self.freeze()
        self.do(FreezeAnswered([(OWNER, "frozen", "")]))
        assert self.kinds() == ["frozen"]

    def guest(self, name: MemberName = GUEST, slots: tuple[int, ...] = (0,)) -> list[str]:
        self.want(guest_of(place(name, slots)))
        return self.kinds()


def guest_of(one: Place) -> Place:
    return replace(one, guest=True)


@pytest.fixture
def bench() -> Guested:
    return Guested()


def test_a_guest_is_taken_in_beside_a_frozen_member_alone(bench: Guested) -> None:
    bench.run(OWNER)
    assert bench.guest() == ["refused"]
    bench.freeze()
    assert bench.guest(name_of("early", fence=12)) == ["refused"], "it is just being frozen"
    bench.do(FreezeAnswered([(OWNER, "frozen", "")]))
    bench.kinds()
    assert bench.guest(name_of("g", fence=13)) == ["claimed"]
    assert bench.guest(name_of("h", fence=14)) == ["refused"], "one guest a device"
    assert bench.guest(name_of("i", fence=15), (1,)) == ["refused"], "nobody has slot 1"


def test_no_guest_comes_to_a_member_that_is_being_resumed_or_is_to_end(bench: Guested) -> None:
    bench.frozen()
    bench.freeze(on=False)
    assert bench.guest() == ["refused"]
    bench.do(FreezeAnswered([(OWNER, "running", "")]))
    bench.freeze()
    bench.do(FreezeAnswered([(OWNER, "frozen", "")]))
    bench.want(End(*OWNER, "cancelling"))
    bench.kinds()
    assert bench.guest(name_of("late", fence=12)) == ["refused"]


def test_no_guest_comes_to_a_member_that_ends_frozen(bench: Guested) -> None:
    bench.frozen(grace_s=0)
    assert of(FreezeMember, bench.want(End(*OWNER, "cancelling"))) == []
    assert bench.guest() == ["refused"]


def test_a_member_is_not_resumed_before_its_guests_memory_is_seen_free(bench: Guested) -> None:
    bench.frozen()
    assert bench.guest() == ["claimed"]
    assert of(FreezeMember, bench.freeze(on=False)) == []
    bench.want(End(*GUEST, "ending"))
    bench.do(Ended([(GUEST, -15, "end")]))
    assert of(FreezeMember, bench.freeze(on=False)) == [], "its memory may be there"
    bench.do(SeenFree([GUEST]))
    assert [command.on for command in of(FreezeMember, bench.freeze(on=False))] == [False]


def test_a_frozen_member_that_is_to_end_is_resumed_for_that_once_its_guest_is_over(bench: Guested) -> None:
    bench.frozen()
    assert bench.guest() == ["claimed"]
    ended = bench.want(End(*OWNER, "cancelling"), End(*GUEST, "ending"))
    assert (len(of(EndMember, ended)), of(FreezeMember, ended)) == (2, [])
    bench.do(Ended([(GUEST, -15, "end")]))
    assert [command.on for command in of(FreezeMember, bench.do(SeenFree([GUEST])))] == [False]


def test_what_ends_frozen_leaves_its_devices_to_its_guest(bench: Guested) -> None:
    bench.frozen((0, 1))
    assert bench.guest() == ["claimed"]
    probes = of(ProbeFree, bench.do(Ended([(OWNER, 1, "exit")])))
    assert [sorted(member.left) for probe in probes for member in probe.members] == [[0]]
    assert of(Release, bench.do(SeenFree([OWNER])))
    assert bench.guest(name_of("second", fence=12)) != ["claimed"], "the guest has the slot alone"
    probes = of(ProbeFree, bench.do(Ended([(GUEST, 0, "exit")])))
    assert [sorted(member.left) for probe in probes for member in probe.members] == [[]]


def test_what_ends_frozen_with_guests_on_all_its_devices_is_free_of_them_at_once(bench: Guested) -> None:
    bench.frozen()
    assert bench.guest() == ["claimed"]
    done = bench.do(Ended([(OWNER, 1, "exit")]))
    assert (of(ProbeFree, done), len(of(Release, done))) == ([], 1)
    assert bench.kinds()[-2:] == ["exited", "freed"]


def test_a_guest_whose_memory_stays_keeps_the_member_frozen(bench: Guested) -> None:
    bench.frozen()
    assert bench.guest() == ["claimed"]
    bench.do(Ended([(GUEST, 0, "exit")]))
    bench.now += 11
    bench.do(NotFree([(GUEST, (0,))]))
    assert of(FreezeMember, bench.freeze(on=False)) == []
    bench.do(SeenFree([GUEST]))
    assert of(FreezeMember, bench.freeze(on=False))


def test_a_guest_that_is_frozen_itself_is_resumed_beside_the_frozen_member(bench: Guested) -> None:
    """Its memory has room there, so it runs on by an order, and to save its work within its grace."""
    bench.frozen()
    bench.want(guest_of(place(GUEST, (0,), request=body(run={"grace_s": 5}))))
    bench.do(Started([GUEST]))
    bench.freeze(GUEST)
    bench.do(FreezeAnswered([(GUEST, "frozen", "")]))
    assert [command.member.name for command in of(FreezeMember, bench.freeze(GUEST, on=False))] == [GUEST]
    bench.do(FreezeAnswered([(GUEST, "running", "")]))
    bench.freeze(GUEST)
    bench.do(FreezeAnswered([(GUEST, "frozen", "")]))
    assert [(c.member.name, c.on) for c in of(FreezeMember, bench.want(End(*GUEST, "ending")))] == [(GUEST, False)]


@pytest.mark.parametrize("frozen", [True, False])
def test_both_are_taken_over_from_an_earlier_agent_unless_the_member_runs(frozen: bool) -> None:
    """As where its note that the member is frozen was lost: then an agent has resumed it."""
    bench = Bench()
    held = []
    for name in (GUEST, OWNER):
        placed = guest_of(place(name)) if name == GUEST else place(name)
        member = Member(name, placed, decode_request(placed.body), 0.0)
        member.frozen = frozen and name == OWNER
        held.append((member, "running", 0, ""))
    commands = bench.do(Restored(held, [], []))
    assert [end.member.name for end in of(EndMember, commands)] == ([] if frozen else [GUEST])


# -------------------------------------------------------------------------------------------------------- the pool


def pool_of(slots: int) -> GpuPool:
    return GpuPool([Device(index, "nvidia", "card", f"GPU-{index}") for index in range(slots)])


def refused(pool: GpuPool, slots: list[int], mode: Any = "exclusive") -> str:
    before = pool.slot_states()
    with pytest.raises(SlotsRefused) as no:
        pool.try_claim_slots(slots, mode, "guest", guest=True)
    assert pool.slot_states() == before
    pool.validate()
    return no.value.reason


def claimed(pool: GpuPool, slots: list[int], mode: Any = "exclusive", *, guest: bool = False) -> PoolLease:
    lease = pool.try_claim_slots(slots, mode, "guest" if guest else "owner", guest=guest)
    pool.validate()
    return lease


def test_a_pool_has_one_guest_beside_one_holder() -> None:
    pool = pool_of(3)
    assert refused(pool, [0]) == "not-frozen", "nobody has it"
    owner = claimed(pool, [0, 1])
    guest = claimed(pool, [0], guest=True)
    assert pool.slot_states()[0].holders == ("owner", "guest")
    assert refused(pool, [0]) == "not-frozen"
    assert refused(pool, [1, 2]) == "not-frozen"
    owner.ended()
    assert refused(pool, [1]) == "not-frozen"
    owner.release()
    pool.validate()
    with pytest.raises(SlotsRefused):
        pool.try_claim_slots([0], "exclusive", "next")
    assert refused(pool, [0]) == "not-frozen", "a guest has no guests"
    guest.release()
    claimed(pool, [0, 1, 2])


def test_a_pool_gives_no_guest_what_is_shared_local_closed_or_waited_for() -> None:
    pool = pool_of(3)
    claimed(pool, [0], "time-slice")
    assert refused(pool, [0]) == "not-frozen"
    assert refused(pool, [0], "time-slice") == "not-frozen"
    local = pool.try_claim()
    assert local is not None
    assert refused(pool, [1]) == "not-frozen"
    claimed(pool, [2])
    pool.quarantine(2, "hot")
    assert refused(pool, [2]) == "quarantined"
    local.release()


@pytest.mark.parametrize("guest_first", [True, False])
def test_a_pool_takes_both_again_in_any_order(guest_first: bool) -> None:
    pool = pool_of(1)
    for guest in (guest_first, not guest_first):
        pool.take_again([0], "exclusive", "j", guest=guest)
        pool.validate()
    for guest in (True, False):
        with pytest.raises(SlotsRefused):
            pool.take_again([0], "exclusive", "j", guest=guest)
