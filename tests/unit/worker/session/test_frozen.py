"""Frozen attempts of a worker: when they give their devices up, and when they get them again."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from moorage.schemas.attempt import AttemptName
from moorage.schemas.capabilities import KNOWN
from moorage.schemas.codec import decode_request
from moorage.schemas.errors import problem
from moorage.schemas.frames import Device, End, Freeze, Report, Wanted
from moorage.worker.devices.pool import GpuPool, SlotsRefused
from moorage.worker.session.attempt_messages import (
    AnswerRefused,
    Attempt,
    Command,
    EndAttempt,
    Ended,
    FreezeAnswered,
    FreezeAttempt,
    LeaseAnswered,
    NotFree,
    ProbeFree,
    Release,
    Restored,
    SeenFree,
    TryLease,
    Unlease,
)
from moorage.worker.session.attempts import Attempts
from tests.unit.worker.attempt_bench import Bench, body, name_of, of, place

OWNER = name_of("owner", fence=10)
OTHER = name_of("other", fence=11)


class Freezing(Bench):
    """A bench whose driver freezes. `taken` are the slots that the pool does not give to frozen attempts."""

    def __init__(self) -> None:
        super().__init__()
        drivers = {"process": replace(KNOWN["process"], freezes=True)}
        self.attempts = Attempts("w1", drivers, join_n=0, tombstones_max=100, free_wait_s=10)
        self.join()

    def order(self, *, on: bool, n: int = 0, name: AttemptName = OWNER) -> list[Command]:
        freeze = [Freeze(*name, on, n)]
        return self.do(Wanted("w1", self.session, self.epoch, place=[], start=[], end=[], freeze=freeze))

    def answer(self, now: str, why: str = "", name: AttemptName = OWNER) -> list[Command]:
        return self.do(FreezeAnswered([(name, now, why)]))

    def frozen(self, slots: tuple[int, ...] = (0,), **run: Any) -> None:
        self.run(OWNER, slots=slots, request=body(run=run))
        self.order(on=True)
        self.answer("frozen")
        assert len(of(Unlease, self.do(SeenFree([OWNER])))) == 1
        assert self.kinds() == ["frozen"]

    def lease(self, commands: list[Command], why: str = "") -> list[Command]:
        """Answer for the pool."""
        (asked,) = of(TryLease, commands)
        return self.do(LeaseAnswered(asked.attempt, why))

    def words(self) -> list[tuple[str, int]]:
        return [(report.kind, report.code) for report in self.reports()]


@pytest.fixture
def bench() -> Freezing:
    return Freezing()


def test_an_attempt_is_reported_as_frozen_once_its_devices_are_seen_free(bench: Freezing) -> None:
    bench.run(OWNER)
    assert [command.on for command in of(FreezeAttempt, bench.order(on=True))] == [True]
    assert len(of(ProbeFree, bench.answer("frozen"))) == 1
    assert bench.kinds() == []
    bench.do(NotFree([(OWNER, (0,))]))
    assert bench.kinds() == []
    assert len(of(Unlease, bench.do(SeenFree([OWNER])))) == 1
    assert bench.kinds() == ["frozen"]
    bench.order(on=True)
    assert bench.kinds() == ["frozen"], "asked again, it says so again"
    assert bench.attempts.held[OWNER].freezes == 1


def test_one_whose_memory_stays_runs_on(bench: Freezing) -> None:
    bench.run(OWNER)
    bench.order(on=True)
    bench.answer("frozen")
    bench.now += 11
    assert [command.on for command in of(FreezeAttempt, bench.do(NotFree([(OWNER, (0,))])))] == [False]
    bench.answer("running")
    assert bench.kinds() == ["not-frozen"]


def test_its_devices_are_free_for_others_meanwhile(bench: Freezing) -> None:
    bench.frozen()
    bench.want(place(OTHER))
    assert bench.kinds() == ["claimed"]


def test_it_is_resumed_if_the_pool_gives_its_devices(bench: Freezing) -> None:
    bench.frozen()
    assert [command.on for command in of(FreezeAttempt, bench.lease(bench.order(on=False, n=7)))] == [False]
    assert of(TryLease, bench.order(on=False, n=7)) == [], "it is under way"
    bench.answer("running")
    assert bench.words() == [("resumed", 7)]
    bench.order(on=False, n=7)
    assert bench.words() == [("resumed", 7)], "asked again, it says so again"


def test_what_the_pool_refused_stays_refused_and_a_later_order_is_tried(bench: Freezing) -> None:
    bench.frozen()
    bench.lease(bench.order(on=False, n=7), "leased 0")
    assert bench.reports()[-1] == Report("not-resumed", *OWNER, 7, "leased 0")
    assert of(TryLease, bench.order(on=False, n=7)) == [], "the leader counts on the first answer"
    assert bench.words() == [("not-resumed", 7)]
    assert of(FreezeAttempt, bench.lease(bench.order(on=False, n=9)))


def test_one_that_does_not_run_on_gives_its_devices_up_again(bench: Freezing) -> None:
    bench.frozen()
    bench.lease(bench.order(on=False, n=7))
    assert len(of(ProbeFree, bench.answer("frozen", "CUDA error 2"))) == 1
    assert len(of(Unlease, bench.do(SeenFree([OWNER])))) == 1
    assert bench.words() == [("not-resumed", 7)]


def test_an_order_that_takes_the_freeze_back_is_carried_out_between_two_looks(bench: Freezing) -> None:
    bench.run(OWNER)
    bench.order(on=True)
    bench.answer("frozen")
    assert of(FreezeAttempt, bench.order(on=False)) == [], "a look is under way"
    bench.do(NotFree([(OWNER, (0,))]))
    assert of(FreezeAttempt, bench.order(on=False))
    bench.do(SeenFree([OWNER]))
    bench.answer("running")
    assert bench.kinds() == ["not-frozen"]


def test_one_that_is_broken_is_lost(bench: Freezing) -> None:
    bench.frozen()
    bench.lease(bench.order(on=False, n=7))
    assert len(of(EndAttempt, bench.answer("broken", "no memory"))) == 1
    bench.do(Ended([(OWNER, -9, "end")]))
    assert [(report.kind, report.detail) for report in bench.reports()] == [("exited", "lost")]


# ------------------------------------------------------------------------------------------------- its end


def test_one_that_is_to_end_is_resumed_for_that_if_its_devices_are_free(bench: Freezing) -> None:
    bench.frozen()
    ended = bench.want(End(*OWNER, "cancelling"))
    assert len(of(EndAttempt, ended)) == 1
    assert [command.on for command in of(FreezeAttempt, bench.lease(ended))] == [False]
    bench.answer("running")
    probed = bench.do(Ended([(OWNER, -15, "end")]))
    assert len(of(ProbeFree, probed)) == 1, "it has memory again"
    bench.do(SeenFree([OWNER]))
    assert [(report.kind, report.detail) for report in bench.reports()][:2] == [("exited", "end"), ("freed", "")]


def test_one_whose_devices_come_free_within_its_grace_is_resumed_then(bench: Freezing) -> None:
    bench.frozen()
    bench.run(OTHER)
    assert (
        of(FreezeAttempt, bench.lease(bench.want(End(*OWNER, "cancelling"), End(*OTHER, "ending")), "leased 0")) == []
    )
    assert of(TryLease, bench.do(Ended([(OTHER, -15, "end")]))) == [], "its memory may be there"
    assert of(FreezeAttempt, bench.lease(bench.do(SeenFree([OTHER]))))


def test_one_whose_devices_do_not_come_free_ends_while_it_is_frozen(bench: Freezing) -> None:
    bench.frozen()
    bench.lease(bench.want(End(*OWNER, "cancelling")), "leased 0")
    ended = bench.do(Ended([(OWNER, -9, "end")]))
    assert (of(ProbeFree, ended), len(of(Release, ended))) == ([], 1), "it has nothing on its devices"
    assert [(report.kind, report.detail) for report in bench.reports()] == [
        ("exited", "ended while frozen"),
        ("freed", ""),
    ]


def test_one_without_a_grace_ends_as_it_is(bench: Freezing) -> None:
    bench.frozen(grace_s=0)
    assert of(TryLease, bench.want(End(*OWNER, "cancelling"))) == []


def test_one_that_was_to_be_frozen_and_is_to_end_runs_on_for_that(bench: Freezing) -> None:
    bench.run(OWNER)
    bench.order(on=True)
    assert of(FreezeAttempt, bench.want(End(*OWNER, "cancelling"))) == [], "the driver has not answered"
    assert [command.on for command in of(FreezeAttempt, bench.answer("frozen"))] == [False]


def test_the_end_of_the_lease_ends_it_too(bench: Freezing) -> None:
    bench.frozen()
    over = AnswerRefused("renew", 1, problem("session-over", "over"))
    assert len(of(EndAttempt, bench.do(over))) == 1


# ------------------------------------------------------------------------------------------------- another agent


@pytest.mark.parametrize("leased", [True, False])
def test_one_of_an_earlier_agent_holds_its_devices_until_they_are_seen_free(leased: bool) -> None:
    bench = Bench()
    placed = place(OWNER)
    attempt = Attempt(OWNER, placed, decode_request(placed.body), 0.0)
    attempt.frozen, attempt.leased = True, leased
    commands = bench.do(Restored([(attempt, "running", 0, "")], [], []))
    assert len(of(ProbeFree, commands)) == leased
    bench.now += 1_000
    assert of(FreezeAttempt, bench.do(NotFree([(OWNER, (0,))]))) == [], "the ledger may have leased them to another"
    assert len(of(Unlease, bench.do(SeenFree([OWNER])))) == leased


@pytest.mark.parametrize("leased", [True, False])
def test_one_that_runs_against_the_record_runs_on_if_it_has_its_devices_and_else_ends(leased: bool) -> None:
    """The driver is asked once the worker has joined, so the record counts until then."""
    bench = Bench()
    placed = place(OWNER)
    attempt = Attempt(OWNER, placed, decode_request(placed.body), 0.0)
    attempt.frozen, attempt.leased = True, leased
    bench.do(Restored([(attempt, "running", 0, "")], [], []))
    ended = of(EndAttempt, bench.do(FreezeAnswered([(OWNER, "running", "")])))
    assert [end.why for end in ended] == ([] if leased else ["lost"])
    assert of(Unlease, bench.do(SeenFree([OWNER]))) == [], "a look from before says nothing of one that runs"
    bench.attempts.validate()
    assert bench.attempts.table.held_list()[0].phase == ("running" if leased else "ending")


def test_of_two_that_run_on_one_device_the_one_without_it_ends() -> None:
    """As where the record of what is frozen was lost, so that an agent resumed both."""
    bench = Bench()
    held = []
    for name in (OTHER, OWNER):
        placed = place(name)
        attempt = Attempt(name, placed, decode_request(placed.body), 0.0)
        attempt.leased = name == OWNER
        held.append((attempt, "running", 0, ""))
    assert [end.attempt.name for end in of(EndAttempt, bench.do(Restored(held, [], [])))] == [OTHER]


def test_a_pool_takes_one_holder_again() -> None:
    pool = GpuPool([Device(0, "nvidia", "card", "GPU-0")])
    lease = pool.take_again([0], "exclusive", "j")
    with pytest.raises(SlotsRefused):
        pool.take_again([0], "exclusive", "k")
    lease.release()
    pool.try_claim_slots([0], "exclusive", "k")
    pool.validate()
