"""A faulty world (`faulty_world`) whose scheduler has defects: functions raise as a record is built.

By its seed a world has defects of one moment, or one after the other that lasts for a while and is about one job,
request, worker or shape. Beside the latter a tenant has a host and a driver of its own, which nothing disturbs: its
jobs are accepted, and start, as if there were no defect.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Final
from unittest import mock

from moorage.scheduler.core.contained_engine import ContainedEngine
from moorage.scheduler.core.containment import STEP_PAUSE_MS
from moorage.scheduler.core.engine import HalfFolded
from moorage.scheduler.core.events import Event
from moorage.scheduler.core.ledger.state import State
from moorage.scheduler.core.outputs.outputs import Outputs
from moorage.schemas.job import STATES
from tests.unit.scheduler.driving import SUBJECTS, Driving
from tests.unit.scheduler.faulty_world import Clock, FaultyWorld
from tests.unit.scheduler.honest_worker import Worker
from tests.unit.scheduler.picture import picture
from tests.unit.scheduler.raising import Entity, Once, Poison, Raised, Seen, chosen, poisoned, profiled

#: the tenant, its host, its driver and its kind of GPU that no defect is about
CALM: Final = "calm"
CALM_GPUS: Final = 2
#: what may pass until a job of that tenant runs: its worker renews, and is sent its placement once more
STARTS_MS: Final = 10_000
#: after so much time at once its worker has no lease any more, and joins again
JUMP_MS: Final = 5_000
#: how long a defect lasts that is about something
LASTS_MS: Final = (5_000, 40_000, 130_000)
#: an order is waited for in so many records at most
WAITS_TICKS: Final = 11
#: a function that is not called again within so many steps raises never
STEPS_MAX: Final = 10


class Defective(Driving):
    """Driven as a leader is: contained. A term that a defect ends is followed by the next one."""

    def __init__(self, config: Any = None) -> None:
        self.once: Once | None = None
        self.poison: Poison | None = None
        self.seen = Seen()
        self.looks = False  # whether to see which functions run in the next record
        self.ended = ""  # what ended the last term
        super().__init__(config)

    def make_engine(self, state: State) -> ContainedEngine:
        with self._poisoned():
            return ContainedEngine(state, self.config, SUBJECTS, 7 + state.epoch, self.now, self._explain)

    @contextmanager
    def _poisoned(self) -> Iterator[None]:
        """Let the defect that lasts be there: the ledger is folded without it."""
        if self.poison is not None:
            self.poison.is_active = True
        try:
            yield
        finally:
            if self.poison is not None:
                self.poison.is_active = False

    def record(self) -> Outputs:
        engine, payload = self.engine, None
        asked, failures = self._asked(), engine.containment.counts["output"]
        if self.looks:
            self.seen = Seen()
        try:
            with self._poisoned(), profiled(self.once or (self.seen if self.looks else None)):
                payload = engine.build(self.now, self.now)
                engine.prepare_outputs(self.now)
            out = engine.commit(self.store(payload), self.now)
        except (Raised, HalfFolded) as raised:
            self._end_term(raised, payload)
            return Outputs()
        lost = asked - {reply for reply, _ in out.answers} - self._asked()
        assert not lost or engine.containment.counts["output"] > failures, f"{lost} have no answer"
        return out

    def _end_term(self, raised: Exception, payload: bytes | None) -> None:
        """The next leader begins, from the ledger: what was built is stored, or not."""
        assert self.once is not None, f"a defect that is about {self.poison} ends the term: {raised}"
        assert self.once.may_end, f"{self.once}, and the term ends"
        if payload is not None:
            self.store(payload)
        self.ended = str(self.once)
        self.lead()

    def _asked(self) -> set[str]:
        """Return the reply subjects of all that waits for a record."""
        engine, pending = self.engine, self.engine.pending
        assert isinstance(engine, ContainedEngine)
        every: list[Any] = [*pending.submits, *pending.rest, *pending.cancels._put_off]
        every += [event for mine in pending.cancels._by_tenant.values() for event in mine]
        every += [event for mine in engine._wait.values() for event in mine]
        return {event.reply for event in every if getattr(event, "reply", "")}

    def operate(self, verb: str, worker: str, **drain: Any) -> dict[str, Any]:
        reply = self.offer_operate(verb, worker, **drain)
        self.tick()
        answer: dict[str, Any] = self.answers.get(reply, {})
        return answer

    def order(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """As of one who waits: while the timers are left out, orders wait with them."""
        reply = self.offer_order(verb, **arguments)
        self.tick()
        for _ in range(WAITS_TICKS):
            if reply in self._asked():
                self.tick(STEP_PAUSE_MS // (WAITS_TICKS - 1))
        answer: dict[str, Any] = self.answers.get(reply, {})
        return answer


class Forgiving(ContainedEngine):
    """A leader's engine with defects of one moment, of which nothing is set aside: all goes on as if there were none.

    What they leave undone is taken back to the last row, and its tables are made anew in the midst of all that happens.
    """

    dice: ClassVar[random.Random]
    #: in how many of a hundred records a function raises
    percent: ClassVar[int]
    #: which ones did, in this process
    raised: ClassVar[Counter[str]] = Counter()

    def __init__(self, *begins: Any) -> None:
        self._seen = Seen()
        self._once: Once | None = None
        super().__init__(*begins)

    def build(self, time_ms: int, mono_ms: int, *, folds: bool = True) -> bytes:
        draw, known, once = self.dice.randrange(100), list(self._seen.codes), None
        if draw < self.percent and known:
            once = chosen(self.dice, self._seen, [code for code in known if code not in self._seen.half])
            self._before = picture(self.state)
        self._once = once
        with profiled(once if once is not None else self._seen if draw < 2 * self.percent else None):
            return super().build(time_ms, mono_ms, folds=folds)

    def _at_fault(self, raised: Exception, now_ms: int, *, goes_on: bool) -> list[Event] | None:
        if not isinstance(raised, Raised):
            raise raised
        self.raised[str(self._once)] += 1
        self.planner.placing.asks = ""
        return []

    def _take_back(self) -> None:
        assert picture(self.state) == self._before, f"{self._once}, and not all of it is taken back"
        super()._take_back()


@contextmanager
def forgiving(seed: int, percent: int = 10) -> Iterator[None]:
    """Have every world that is driven (`Driving`) led by such engines."""

    def make_engine(drive: Driving, state: State) -> ContainedEngine:
        return Forgiving(state, drive.config, SUBJECTS, 7 + state.epoch, drive.now, drive._explain)

    Forgiving.dice, Forgiving.percent = random.Random(seed), percent
    with mock.patch.object(Driving, "make_engine", make_engine):
        yield


class BrokenWorld(FaultyWorld):
    drive: Defective

    def __init__(self, seed: int) -> None:
        self.lasts = seed % 2 == 1
        super().__init__(seed, workers=2 + seed % 3, driving=Defective, jobs_max=400 if self.lasts else 60)
        self.defects = random.Random(seed + 5_000_000)
        self.until_ms = 0  # when the defect that lasts is over
        self.steps_left = 0  # until the one of a moment is given up
        self.did = Counter[str]()  # which defects raised
        self.ends = 0  # terms that they ended
        self.undisturbed_ms = 0  # since when nothing else disturbs the calm tenant
        self.calm = ""  # its job that does not run yet, which could since:
        self.calm_since_ms = 0
        self._calm_jobs = 0
        self._calm_reply = ""
        if self.lasts:
            self.drive.worker(CALM, CALM_GPUS, model=CALM, auto=False, drivers=[CALM], capabilities={})
            self.clocks[CALM] = Clock(base_ms=self.drive.now)

    def step(self) -> None:
        drive = self.drive
        drive.looks = self.faulty and self.defects.random() < 0.15
        if self.faulty and self.lasts:
            self._poison()
            self._submit_calm()
        elif self.faulty:
            self._break_once()
        epoch, now = drive.state.epoch, drive.now
        super().step()
        if drive.ended:
            self.ends, drive.ended = self.ends + 1, ""
            self.sent.clear()
        if drive.state.epoch != epoch or drive.now - now > JUMP_MS:
            self.undisturbed_ms = drive.now + JUMP_MS
        self._look_at_calm()

    def _break_once(self) -> None:
        drive, once = self.drive, self.drive.once
        if once is None:
            if drive.seen.codes and self.defects.random() < 0.2:
                drive.once, self.steps_left = chosen(self.defects, drive.seen), STEPS_MAX
            return
        self.steps_left -= 1
        self.did[str(once)] += once.has_raised
        if once.has_raised or not self.steps_left:
            drive.once = None

    def _poison(self) -> None:
        drive, dice = self.drive, self.defects
        if drive.poison is not None and drive.now > self.until_ms:
            self.cure()
        if drive.poison is None and dice.random() < 0.05:
            found = poisoned(dice, drive.seen)
            if found is None or self._is_of_calm(found.entity):
                return
            drive.poison, self.until_ms = found, drive.now + dice.choice(LASTS_MS)
            found.spread()
            if dice.random() < 0.5:  # also what the next leader does as it begins
                drive.lead()
                self.sent.clear()

    def cure(self) -> None:
        """All defects are mended."""
        if (poison := self.drive.poison) is not None:
            poison.cure()
            self.did[str(poison)] += poison.raised > 0
        self.drive.poison = self.drive.once = None

    def _is_of_calm(self, entity: Entity) -> bool:
        kind, which = entity
        if kind == "job":
            job = self.drive.state.jobs.get(which)
            return job is None or job.tenant == CALM
        return CALM in str(which)

    def _submit_calm(self) -> None:
        if not self.calm:
            self._calm_jobs += 1
            self.calm, self.calm_since_ms = f"c{self._calm_jobs}", self.drive.now
            gpu, run = {"model": CALM}, {"driver": CALM}
            self._calm_reply = self.drive.offer_submit(self.calm, tenant=CALM, gpu=gpu, run=run)

    def _look_at_calm(self) -> None:
        """What the calm tenant submits is accepted with the next record, and runs soon."""
        drive = self.drive
        answer = drive.answers.pop(self._calm_reply, None)
        assert answer is None or answer["kind"] == "accepted", f"{answer}, and {drive.poison}"
        if not self.calm:
            return
        state = drive.state
        job, worker = state.job(CALM, self.calm), state.workers[CALM]
        if job is None or STATES[job.replicas[0].state] not in ("QUEUED", "PLACED", "CLAIMED"):
            self.calm = ""  # it ran, or the next leader has not heard of it
        elif (len(worker.attempts) == CALM_GPUS and not job.attempts) or self._is_left_out():
            self.calm_since_ms = drive.now
        else:
            waited_ms = drive.now - max(self.calm_since_ms, self.undisturbed_ms)
            assert waited_ms < STARTS_MS, f"{job.name} is {job.state} for {waited_ms} ms, and {drive.poison}"

    def _is_left_out(self) -> bool:
        """Return whether nothing is placed for a moment: the defect is about what jobs are placed beside, and no group
        of the queue is at fault."""
        poison, until = self.drive.poison, self.drive.engine.containment.until
        return poison is not None and poison.entity[0] in ("worker", "job") and ("step", "placing") in until

    def disturbed(self) -> list[Worker]:
        return [worker for worker in super().disturbed() if worker.id != CALM]

    def _post(self, to: str, what: Any) -> None:
        if to != CALM:
            super()._post(to, what)
            return
        self._ties += 1
        self.mail.append((self.drive.now, self._ties, to, what))

    def _check_after(self) -> None:
        engine = self.drive.engine
        if not engine.containment.until and engine.next_timer_ms > self.drive.now:
            super()._check_after()

    def _sets_requests_aside(self) -> bool:
        until, now_ms = self.drive.engine.containment.until, self.drive.state.time_ms
        return any(key[0] == "requests" and at_ms > now_ms for key, at_ms in until.items())

    def heal(self, steps: int = 1_500) -> None:
        self.cure()
        while self._sets_requests_aside():  # of a tenant, for a while: its cancels, too
            self.step()
        super().heal(steps)


def failure(seed: int, did: Counter[str] | None = None) -> str:
    """Return what is wrong in the world of a seed, "" if nothing is; `did` counts the defects that raised."""
    world = BrokenWorld(seed)
    try:
        world.run(220)
        world.heal()
    except Exception as error:  # whatever is raised is the finding
        return f"{type(error).__name__}: {error}"
    finally:
        world.cure()
        if did is not None:
            did.update(world.did)
    return ""
