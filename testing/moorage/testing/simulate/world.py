"""A trace on a simulated fleet: hosts join, jobs arrive, and attempts run as long as the trace says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from moorage.scheduler.answers.waiting import explain_job
from moorage.scheduler.core.config import Config
from moorage.scheduler.core.events import Cancel, FromWorker, Order
from moorage.scheduler.core.ledger import records
from moorage.scheduler.core.ledger.acts import Epoch
from moorage.scheduler.core.ledger.fold import fold
from moorage.scheduler.core.ledger.record import Record
from moorage.scheduler.core.ledger.state import State
from moorage.scheduler.core.outputs.outputs import Outputs
from moorage.scheduler.whatif.play import Held, Play
from moorage.schemas.errors import Problem
from moorage.schemas.frames import Goodbye, Hello, Join
from moorage.schemas.gpu import SHARERS_MAX
from moorage.schemas.operate import act_of
from moorage.schemas.subjects import Subjects
from moorage.testing.simulate.standing import StandingEngine, Stands
from moorage.testing.simulate.trace import Ran, SimHost, TraceEvent, TraceJob

#: ledger time at which a simulation begins
BEGIN_MS: Final = 1_000_000
#: workers that join in one record, since a hello takes some KiB of it
JOINS_MAX: Final = 64
#: ended jobs in memory, and rows of finished ones: `World.runs` has all results
ENDED_MAX: Final = 1_000
FINISHED_MAX: Final = 100_000
#: jobs that never started whose reason is reported
NEVER_NAMED_MAX: Final = 5
_LEADER: Final = 1

#: of the events at the beginning, what was before
_BEFORE: Final = ("join", "ran", "usage")

_encode: Final = msgspec.json.Encoder().encode


class Run(msgspec.Struct, gc=False):
    """The result of one job of the trace; times in ms from the trace's beginning, -1 for what did not happen.

    `state` is QUEUED until the job ends. `attempts` is the most of any replica. `leased` counts ms of thousandths of a
    GPU: what its attempts had, each from its placement until it was gone.
    """

    job: TraceJob
    started_ms: int = -1  # when its first replica first ran
    ended_ms: int = -1
    state: str = "QUEUED"
    attempts: int = 0
    leased: int = 0


class Moment(msgspec.Struct, frozen=True, gc=False):
    """The fleet after one moment: GPUs leased in thousandths (a share is its part), and jobs that have not run yet."""

    at_ms: int
    leased_milli: int
    waiting: int


class World(Play):
    """Plays a trace. `jobs` are in order of arrival, `orders` are operators' orders before the first arrival.

    `on_moment` is called after every `step`.
    """

    def __init__(
        self,
        hosts: Sequence[SimHost],
        jobs: Sequence[TraceJob],
        config: Config,
        on_moment: Callable[[Moment], None] | None = None,
        orders: Sequence[Order] = (),
        events: Sequence[TraceEvent] = (),
    ) -> None:
        config = msgspec.structs.replace(
            config, ended_max=min(config.ended_max, ENDED_MAX), finished_rows=min(config.finished_rows, FINISHED_MAX)
        )
        state = State()
        epoch = Record(records.FORMAT, 1, _LEADER, 0, BEGIN_MS, 0, acts=[Epoch("simulated", "simulate", 0.0)])
        fold(state, epoch, 1)
        self._engine = StandingEngine(state, config, Subjects(), _LEADER, 0)
        super().__init__(self._engine, BEGIN_MS)
        #: ledger time at which the trace begins
        self._begin_ms = BEGIN_MS + max((job.waited_ms for job in jobs), default=0)
        self.jobs = jobs
        self.runs = {(job.tenant, _name(job)): Run(job) for job in jobs}
        self.gpus = sum(len(host.devices) for host in hosts)
        self.decided = 0
        self.ended = 0
        self._on_moment = on_moment
        self._leased_milli = 0
        self._waiting = 0
        self._next = 0
        self._events, self._next_event = events, 0
        self._usage: dict[str, int] = {}
        #: by tenant and job: when and where each attempt was placed, as `TraceJob.placed` has it
        self.placed: dict[tuple[str, str], dict[str, tuple[int, str, list[int]]]] = {}
        self._joins = 0
        if not self._has_past():
            self._engine.open({})
        self._join(hosts)
        for order in orders:
            self.engine.offer(order)
        self.settle()
        if not self._engine.is_open:
            self._play_past()

    @property
    def now_ms(self) -> int:
        """The time since the trace's beginning, in ms."""
        return self.time_ms - self._begin_ms

    def _has_past(self) -> bool:
        """Return whether the trace begins in the middle of a ledger."""
        past = any(job.waited_ms or job.stands for job in self.jobs)
        return past or any(event.kind in ("ran", "usage") for event in self._events)

    def _play_past(self) -> None:
        """Let what came before the beginning come at its moment, and place what stands then when it was placed."""
        before = [event for event in self._events if event.kind in _BEFORE and not event.at_ms]
        for event in before:
            self._happen(event)
        self._events = [event for event in self._events if event.kind not in _BEFORE or event.at_ms]
        past = [job for job in self.jobs if job.waited_ms or job.stands]
        self.jobs = [job for job in self.jobs if not (job.waited_ms or job.stands)]
        moments: list[tuple[int, int, int, TraceJob, Stands | None]] = []
        for at, job in enumerate(past):
            moments.append((-job.waited_ms, at, 0, job, None))
            moments.extend((-ms, at, nth, job, stands) for nth, (ms, stands) in enumerate(_standing(job), 1))
        for ms, _, _, job, stands in sorted(moments, key=lambda row: row[:3]):
            self.go_to(self._begin_ms + ms)
            if stands is None:
                self._submit(job)
            else:
                self._engine.stand(stands)
            self.settle()
        self.go_to(self._begin_ms)

    def _join(self, hosts: Sequence[SimHost]) -> None:
        for at in range(0, len(hosts), JOINS_MAX):
            for host in hosts[at : at + JOINS_MAX]:
                self._offer_join(host)
            self.record()

    def _offer_join(self, host: SimHost) -> None:
        self._joins += 1
        frame = Join(f"machine-{host.name}", "boot", self._joins, hello_of(host))
        self.engine.offer(FromWorker(host.name, frame, "", False, f"{self._joins:032x}"))

    def step(self) -> bool:
        """Go on to the next event; return False if nothing more will happen."""
        at = self.next_ms()
        if at is None:
            return False
        while self._next_event < len(self._events) and self._begin_ms + self._events[self._next_event].at_ms <= at:
            self._happen(self._events[self._next_event])
            self._next_event += 1
        while self._next < len(self.jobs) and self._begin_ms + self.jobs[self._next].at_ms <= at:
            self._submit(self.jobs[self._next])
            self._next += 1
        self.go_to(at)
        if not self._engine.is_open:
            self._engine.open(self._usage)
        self.settle()
        if self._on_moment is not None:
            self._on_moment(Moment(self.now_ms, self._leased_milli, self._waiting))
        return True

    def next_ms(self) -> int | None:
        if not self._engine.is_open:
            return self._begin_ms
        at = super().next_ms()
        comes = [self._begin_ms + self.jobs[self._next].at_ms] if self._next < len(self.jobs) else []
        if self._next_event < len(self._events):
            comes.append(self._begin_ms + self._events[self._next_event].at_ms)
        if comes:
            at = min(comes) if at is None else min(at, *comes)
        if at is None:
            return None  # the jobs that still wait can never start
        return int(min(at, self.next_pass_ms()))

    def _happen(self, event: TraceEvent) -> None:
        """Let what a trace says beside its jobs happen now."""
        data = dict(event.data)
        if event.kind == "order":
            verb = data.pop("verb", "")
            self.engine.offer(Order(verb, act_of(verb, {"by": "trace", **data}), "", True))
        elif event.kind == "cancel":
            self.engine.offer(Cancel(data["tenant"], data["job"], "cancelled"))
        elif event.kind == "look":
            self.engine.look_at_once()
        elif event.kind == "ran":
            self._engine.learn(msgspec.convert(data, Ran), self._begin_ms)
        elif event.kind == "usage":
            self._usage = data
        elif event.kind == "join":
            host = msgspec.convert(data, SimHost)
            self.gpus += len(host.devices)
            self._offer_join(host)
        elif (worker := self.engine.state.workers.get(data["host"])) is not None and worker.session:
            for name, held in list(self.held.items()):
                if held.worker == worker.id:
                    del self.held[name]
                    self.on_left(held)
            self.engine.offer(FromWorker(worker.id, Goodbye(worker.session), "", False))

    def _submit(self, job: TraceJob) -> None:
        self.engine.offer(self.engine.submitted(job.tenant, _encode(job.request), lambda: _name(job)))
        self._waiting += 1

    # ------------------------------------------------------------------------------------- what the trace says

    def runs_ms(self, held: Held) -> int:
        job = self.runs[held.name[:2]].job
        limit_s = job.request.workload.timeout_s
        if (known := job.attempts.get(_key(held))) is not None:
            return known[0]
        return job.runs_ms if limit_s is None else min(job.runs_ms, int(limit_s * 1000))

    def ends(self, held: Held) -> tuple[int, str]:
        job = self.runs[held.name[:2]].job
        limit_s = job.request.workload.timeout_s
        if (known := job.attempts.get(_key(held))) is not None:
            return known[1], "exit"
        return (-15, "timeout") if limit_s is not None and job.runs_ms > limit_s * 1000 else (0, "exit")

    def on_placed(self, held: Held) -> None:
        milli = self._milli(held)
        self._leased_milli += milli
        self.runs[held.name[:2]].leased -= milli * max(0, self.now_ms)
        if self._engine.is_open:
            self.decided += 1
            self.placed.setdefault(held.name[:2], {})[_key(held)] = self.now_ms, held.worker, held.slots

    def on_started(self, held: Held) -> None:
        run = self.runs[held.name[:2]]
        run.attempts = max(run.attempts, held.attempt)
        if run.started_ms < 0:
            run.started_ms = max(0, self.now_ms)
            self._waiting -= 1

    def on_left(self, held: Held) -> None:
        milli = self._milli(held)
        self._leased_milli -= milli
        self.runs[held.name[:2]].leased += milli * self.now_ms

    def on_outputs(self, out: Outputs) -> None:
        for job in out.ended:
            run = self.runs[(job.tenant, job.name)]
            run.state, run.ended_ms = job.state, self.now_ms
            self.ended += 1
            if run.started_ms < 0:
                self._waiting -= 1

    def never(self) -> dict[str, str]:
        """Return a few jobs that never started, as tenant/job, and why not, as of now."""
        found: dict[str, str] = {}
        for (tenant, name), run in self.runs.items():
            if run.started_ms >= 0 or len(found) >= NEVER_NAMED_MAX:
                continue
            told = explain_job(self.engine, tenant, name)
            if isinstance(told, Problem):  # the clock was stopped before it arrived
                continue
            asks = f" (it asks for {told.asks})" if told.asks else ""
            why = f"{told.reason}: {told.means}" if told.reason else told.why
            found[f"{tenant}/{name}"] = f"{why or told.state}{asks}"
        return found

    def _milli(self, held: Held) -> int:
        """Return what an attempt leases, in thousandths of a GPU; a share without a compute cap is a whole one."""
        spec = self.runs[held.name[:2]].job.request.effective_gpu
        percent = spec.share.compute_percent if spec is not None and spec.share is not None else 100
        return len(held.slots) * percent * 10


def _standing(job: TraceJob) -> list[tuple[int, Stands]]:
    """Return what stands of a job at the beginning, and for how many ms; a gang as a whole."""
    name, rows = _name(job), job.stands
    at = {index: (host, sum(1 << slot for slot in set(slots))) for index, (_, host, slots) in rows.items()}
    ran = {index: min(ran_ms, job.waited_ms) for index, (ran_ms, _, _) in rows.items()}
    if job.request.is_gang and rows:
        return [(max(ran.values()), Stands(job.tenant, name, at))]
    return [(ran[index], Stands(job.tenant, name, {index: at[index]})) for index in rows]


def _key(held: Held) -> str:
    return f"{held.replica}/{held.attempt}"


def _name(job: TraceJob) -> str:
    name = job.request.job
    assert name is not None, "a trace names its jobs"
    return name


def hello_of(host: SimHost) -> Hello:
    """Return the hello that a worker on this host would send."""
    return Hello(
        host.name,
        "boot",
        drivers=["docker", "handler", "noop", "process"],
        modes=["exclusive", "mps", "time-slice"],
        labels=host.labels,
        sharers_max=dict(SHARERS_MAX),
        cpu_milli=host.cpu_milli,
        memory_mib=host.memory_mib,
        gpu_pool=list(host.devices),
        simulated=True,
    )
