"""A gang begins with sets of one step of all its ranks, whatever each has stored and in whichever order it is told."""

from __future__ import annotations

import random

import msgspec
import pytest

from moorage.scheduler.core.ledger.acts import Stored
from moorage.scheduler.core.ledger.gang_sets import common_of
from moorage.scheduler.core.ledger.record import decode_record
from moorage.scheduler.ledger import state_bytes as snapshots
from moorage.schemas.frames import GangSets, Place, Renewed, Report
from tests.levels import know_next, raise_level
from tests.unit.scheduler.driving import Driving
from tests.unit.scheduler.fleet.test_capabilities import shown

RUN = {"driver": "process", "argv": ["train"], "checkpoint": "ck", "checkpoint_step": r"step-(\d+)"}


@pytest.fixture(autouse=True)
def _next_level(monkeypatch: pytest.MonkeyPatch) -> None:
    know_next(monkeypatch)


def digest(rank: int, attempt: int, step: int) -> str:
    return f"SHA-256={rank:03}{attempt:03}{step:09}{'x' * 28}="


class Gang(Driving):
    """A gang `g` of so many ranks, each on a worker of its own, for which the test speaks."""

    ranks: int
    placed: list[Place]

    def begin(self, ranks: int, *, level: bool = True) -> Gang:
        self.ranks = ranks
        for rank in range(ranks):
            self.worker(f"w{rank}", 1, auto=False)
        if level:
            raise_level(self)
        self.submit("g", replicas=ranks, gpu={"scheduling": "gang"}, run=RUN, retries=40, retries_on_lost=40)
        self.run()
        return self

    def run(self) -> None:
        self.pass_time(600_000, step=20_000)
        self.placed = [place for frame in self.wanted for place in frame.place]
        for kind in ("claimed", "started"):
            address = "w0.local:29511" if kind == "claimed" else ""
            self.reports([(kind, "g", rank, 0, address if rank == 0 else "") for rank in range(self.ranks)])
        assert self.states("g") == ["RUNNING"] * self.ranks

    def tells(self, rank: int, step: int) -> None:
        attempt = self.attempt("g", rank)
        name = attempt.name
        report = Report("started", *name, step, checkpoint=digest(rank, attempt.no, step))
        self.workers[attempt.worker.id].gathered.append(report)
        self.report_all()

    def fails(self) -> None:
        """One rank fails, so all end; the next attempt runs."""
        self.end()
        self.run()

    def end(self) -> None:
        attempts = [self.attempt("g", rank) for rank in range(self.ranks)]
        for rank, attempt in enumerate(attempts):
            self.workers[attempt.worker.id].gathered += [
                Report("exited", *attempt.name, -15 if rank else 3, "exit"),
                Report("freed", *attempt.name),
            ]
            self.report_all()

    @property
    def begun(self) -> list[list[tuple[int, str]]]:
        """What the placements of the newest attempt say of the sets with which its ranks begin."""
        number = self.attempt("g", 0).no
        found = {place.replica: (place.checkpoints, place.untold) for place in self.placed if place.attempt == number}
        assert {untold for _, untold in found.values()} == {0}, "it begins with no other"
        return [found[rank][0] for rank in sorted(found)]

    def steps(self, rank: int) -> list[int]:
        return [step for _, step, _ in self.job("g").rows[rank].sets]


@pytest.mark.parametrize("level", [True, False])
def test_the_newest_step_that_all_ranks_have_is_that_of_the_next_attempt(level: bool) -> None:
    drive = Gang().begin(3, level=level)
    for step in (100, 200):
        for rank in range(3):
            drive.tells(rank, step)
    drive.tells(0, 300)
    drive.tells(1, 300)
    assert drive.steps(0) == [200, 300]
    drive.fails()
    assert drive.begun == [[(1, digest(rank, 1, 200))] for rank in range(3)]
    rows = shown(drive, "g").replica_states
    assert [(row.checkpoint and row.checkpoint.from_step, row.checkpoint and row.checkpoint.from_attempt)
            for row in rows] == [(200, 1)] * 3  # fmt: skip


def test_the_next_leader_knows_it_from_the_ledger_and_from_a_snapshot() -> None:
    drive = Gang().begin(2)
    drive.tells(0, 100)
    drive.tells(1, 100)
    drive.tells(1, 200)
    drive.lead()
    drive.renew()
    assert (drive.steps(0), drive.steps(1)) == ([100], [100, 200])
    found = snapshots.load(snapshots.dump(drive.state)).job("t", "g")
    assert found is not None
    assert common_of(found) == (1, 100)
    drive.fails()
    assert drive.begun == [[(1, digest(0, 1, 100))], [(1, digest(1, 1, 100))]]


def test_at_level_1_no_record_has_it_and_workers_tell_the_next_leader_again() -> None:
    drive = Gang().begin(2, level=False)
    drive.tells(0, 100)
    drive.tells(1, 100)
    assert not [act for each in map(decode_record, drive.records) for act in each.acts if isinstance(act, Stored)]
    drive.lead()
    drive.renew()
    assert drive.steps(0) == []
    drive.tells(0, 100)
    drive.tells(1, 100)
    drive.fails()
    assert drive.begun == [[(1, digest(0, 1, 100))], [(1, digest(1, 1, 100))]]


def test_steps_of_different_attempts_are_never_mixed() -> None:
    drive = Gang().begin(2)
    drive.tells(0, 100)
    drive.tells(1, 100)
    drive.tells(0, 200)
    drive.fails()
    drive.tells(1, 200)
    drive.fails()
    assert drive.begun == [[(1, digest(0, 1, 100))], [(1, digest(1, 1, 100))]]


def test_a_step_that_a_rank_has_passed_without_storing_it_counts_no_more_and_its_place_is_free() -> None:
    drive = Gang().begin(2)
    for rank in (0, 1):
        drive.tells(rank, 100)
    drive.tells(0, 200)
    assert told(drive, 0) == GangSets(*drive.attempt("g", 0).name, [digest(0, 1, 100), digest(0, 1, 200)])
    drive.tells(1, 300)
    assert told(drive, 0) == GangSets(*drive.attempt("g", 0).name, [digest(0, 1, 100)])
    assert told(drive, 1) == GangSets(*drive.attempt("g", 1).name, [digest(1, 1, 100), digest(1, 1, 300)])
    drive.tells(0, 300)
    assert told(drive, 0) == GangSets(*drive.attempt("g", 0).name, [digest(0, 1, 300)])
    drive.fails()
    assert told(drive, 0) == GangSets(*drive.attempt("g", 0).name, [], earlier=True)


def told(drive: Gang, rank: int) -> GangSets:
    """What the newest renewal of a rank's worker was answered of its sets."""
    answers = [msgspec.convert(each, Renewed) for each in drive.renew()]
    return next(of for each in answers for of in each.sets if of.replica == rank)


def test_a_set_that_cannot_be_read_refuses_the_gangs_start_by_name_and_it_begins_with_no_part_of_that_step() -> None:
    drive = Gang().begin(2)
    drive.tells(0, 100)
    drive.tells(1, 100)
    drive.end()
    drive.pass_time(600_000, step=20_000)
    drive.reports([("claimed", "g", 0, 0, "w0.local:29511"), ("claimed", "g", 1, 0, "")])
    why = "not-here: checkpoint-refused: that of attempt 1 is damaged; all ranks of a gang begin at one step"
    drive.reports([("refused", "g", 1, 0, why)])
    drive.reports([("withdrawn", "g", 0, 0, "")])
    assert any(why.removeprefix("not-here: ") in change.why for change in shown(drive, "g").changes)
    drive.run()
    assert drive.begun == [[], []]


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(each, marks=pytest.mark.slow) for each in range(6, 60))])
def test_whatever_is_stored_lost_and_told_no_gang_begins_with_two_steps_or_an_older_one_than_all_had(seed: int) -> None:
    """Ranks store steps at their own pace, on workers that keep what they were told to, and no more."""
    rng = random.Random(seed)
    drive = Gang().begin(rng.randint(2, 4), level=rng.random() < 0.7)
    there: list[dict[str, tuple[int, int]]] = [{} for _ in range(drive.ranks)]  # by rank: what its places have
    complete = 0
    for _ in range(rng.randint(3, 8)):
        number, at = drive.attempt("g", 0).no, [complete] * drive.ranks
        for _ in range(rng.randint(0, 30)):
            rank = rng.randrange(drive.ranks)
            own = {each: key for each, key in there[rank].items() if key[0] == number}
            keeps = set(told(drive, rank).digests) if drive.job("g").rows[rank].sets else set(own)
            if len(keeps & own.keys()) >= 3:
                continue
            for free in [each for each in own if each not in keeps]:
                del there[rank][free]
            at[rank] += rng.choice((10, 10, 10, 20))
            there[rank][digest(rank, number, at[rank])] = (number, at[rank])
            drive.tells(rank, at[rank])
            common = set.intersection(*({key for key in each.values() if key[0] == number} for each in there))
            complete = max([complete, *(step for _, step in common)])
        drive.fails()
        begun = drive.begun
        steps = {there[rank][said] for rank, sets in enumerate(begun) for _, said in sets}
        assert len(steps) == (1 if complete else 0), f"{begun}"
        assert [step for _, step in steps] == ([complete] if complete else [])
