"""The production engine, whole, under a virtual clock: hosts join, jobs come, members run as long as the trace says.

Every step goes through the engine's own door (`offer`, `build`, `commit`): the records are folded, the workers obey
the wanted frames and answer with facts, as on a real fleet. What is not modelled: time on the wire, claims that a pool
refuses, lost workers. Liveness is not at stake, so the monotonic clock stands still; all decisions go by ledger time,
which jumps from event to event.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Final

import msgspec

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.events import FromWorker, Submit
from moorage.scheduler.core.fold import fold
from moorage.scheduler.core.records import FORMAT, Act, Record
from moorage.scheduler.core.state import State
from moorage.scheduler.simulate.trace import SimHost, TraceJob
from moorage.schemas.codec import Decoder
from moorage.schemas.frames import Fact, FactFrame, FactKind, Hello, Join, Place, Start, Wanted
from moorage.schemas.gpu import SHARERS_MAX
from moorage.schemas.subjects import Subjects

#: somebody may lose patience (reservations, decayed usage) though nothing happens: so often the core is asked again
LOOK_MS: Final = 60_000
#: records that one moment may take before it counts as a defect: a decision that never settles
RECORDS_MAX: Final = 100_000
#: ledger time at which a simulation begins
BEGIN_MS: Final = 1_000_000
#: workers that join with one record: a hello takes some KiB of it
JOINS_MAX: Final = 64
_LEADER: Final = 1

_decode_wanted: Final[Decoder[Wanted]] = Decoder(Wanted)
_encode: Final = msgspec.json.Encoder().encode

_Key = tuple[str, str, int, int]  # tenant, job, replica, fence


class Run(msgspec.Struct, gc=False):
    """What became of one job of the trace; times in ms from its beginning, -1 for what did not happen."""

    job: TraceJob
    started_ms: int = -1  # its first replica ran first
    ended_ms: int = -1
    state: str = "QUEUED"
    attempts: int = 0


class Moment(msgspec.Struct, frozen=True, gc=False):
    """The fleet after one moment: GPUs leased (a share counts as its part), in thousandths, and jobs that wait."""

    at_ms: int
    leased_milli: int
    waiting: int


class _Held(msgspec.Struct, gc=False):
    """A member on its worker."""

    place: Place
    worker: int
    running: bool = False


class _Worker(msgspec.Struct, gc=False):
    id: str
    session: str
    no: int = 0
    facts: list[Fact] = []


class World:
    """`jobs` in the order of their coming. `on_moment` is told of every moment at which something changed."""

    def __init__(
        self,
        hosts: Sequence[SimHost],
        jobs: Sequence[TraceJob],
        config: Config,
        on_moment: Callable[[Moment], None] | None = None,
    ) -> None:
        self.jobs = jobs
        self.runs = {(job.tenant, _name(job)): Run(job) for job in jobs}
        self.gpus = sum(len(host.devices) for host in hosts)
        self.records = 0
        self.decided = 0
        self.ended = 0
        self.now_ms = 0
        self._on_moment = on_moment
        self._ends: list[tuple[int, int, _Key]] = []
        self._order = itertools.count()
        self._held: dict[_Key, _Held] = {}
        self._talking: dict[int, None] = {}  # workers with facts to tell, in order
        self._leased_milli = 0
        self._waiting = 0
        self._next = 0
        # ended jobs are let go at once: what became of them stands in `runs`
        config = msgspec.structs.replace(config, ended_max=min(config.ended_max, 1_000), finished_rows=100_000)
        state = State()
        epoch = Record(FORMAT, 1, _LEADER, 0, BEGIN_MS, 0, acts=[[Act.EPOCH, "simulated", "simulate", 0.0]])
        fold(state, epoch, 1)
        self.engine = Engine(state, config, Subjects(), _LEADER, 0)
        self._workers: list[_Worker] = []
        self._join(hosts)

    def _join(self, hosts: Sequence[SimHost]) -> None:
        for at in range(0, len(hosts), JOINS_MAX):
            for number, host in enumerate(hosts[at : at + JOINS_MAX], at):
                session = f"{number + 1:032x}"
                frame = Join(f"machine-{host.name}", "boot", 1, hello_of(host))
                self._workers.append(_Worker(host.name, session))
                self.engine.offer(FromWorker(host.name, frame, "", True, session))
            self._record()
        self._by_id = {worker.id: number for number, worker in enumerate(self._workers)}

    # ------------------------------------------------------------------------------------------- the clock

    def step(self) -> bool:
        """Go on to the next moment at which something happens; False when nothing will any more."""
        at = self._next_ms()
        if at is None:
            return False
        self.now_ms = at
        while self._next < len(self.jobs) and self.jobs[self._next].at_ms <= at:
            self._submit(self.jobs[self._next])
            self._next += 1
        while self._ends and self._ends[0][0] <= at:
            self._end(heappop(self._ends)[2])
        self._settle()
        if self._on_moment is not None:
            self._on_moment(Moment(at, self._leased_milli, self._waiting))
        return True

    def _next_ms(self) -> int | None:
        times = []
        if self._next < len(self.jobs):
            times.append(self.jobs[self._next].at_ms)
        if self._ends:
            times.append(self._ends[0][0])
        if self.engine.next_timer_ms != float("inf"):
            times.append(max(self.now_ms, int(self.engine.next_timer_ms) - BEGIN_MS))
        if not times:
            return None  # what waits still can never start
        if self.engine.queue.size:
            times.append(self.now_ms + LOOK_MS)
        return min(times)

    def _settle(self) -> None:
        """Records until nothing is left to say at this moment."""
        for _ in range(RECORDS_MAX):
            facts = self._offer_facts()
            if not self._record() and not facts and not self.engine.urgent:
                return
        raise RuntimeError(f"the core did not settle within {RECORDS_MAX} records at {self.now_ms} ms")

    def _record(self) -> bool:
        """One record, acknowledged at once; whether it moved anything on a worker."""
        engine = self.engine
        engine.build(BEGIN_MS + self.now_ms, 0)
        out = engine.commit(engine.state.seq + 1, 0)
        self.records += 1
        for job in out.ended:
            job.kept = 1  # as written to the history
            run = self.runs[(job.tenant, job.name)]
            run.state, run.ended_ms = job.state, self.now_ms
            self.ended += 1
            if run.started_ms < 0:
                self._waiting -= 1
        for _, payload, _ in out.messages:
            self._obey(_decode_wanted(payload))
        return bool(out.messages)

    # ------------------------------------------------------------------------------------------ the workers

    def _submit(self, job: TraceJob) -> None:
        name, asked = self.engine.requests.read(_encode(job.request))
        shape = self.engine.shape_of_asked(asked)
        self.engine.offer(Submit(job.tenant, name or _name(job), _encode(job.request), asked.request, shape))
        self._waiting += 1

    def _obey(self, frame: Wanted) -> None:
        number = self._by_id[frame.worker]
        for place in frame.place:
            key = (place.tenant, place.job, place.replica, place.fence)
            if key in self._held:
                continue
            held = self._held[key] = _Held(place, number)
            self.decided += 1
            self._leased_milli += self._milli(place)
            self._say(number, "claimed", place, f"{frame.worker}:29500" if place.hold and not place.replica else "")
            if not place.hold:
                self._begin(key, held)
        for start in frame.start:
            self._start(start)
        for end in frame.end:
            key = (end.tenant, end.job, end.replica, end.fence)
            if key in self._held:
                self._finish(key, -15, "end")

    def _start(self, start: Start) -> None:
        key = (start.tenant, start.job, start.replica, start.fence)
        held = self._held.get(key)
        if held is not None and not held.running:
            self._begin(key, held)

    def _begin(self, key: _Key, held: _Held) -> None:
        place = held.place
        held.running = True
        self._say(held.worker, "started", place)
        run = self.runs[(place.tenant, place.job)]
        run.attempts = max(run.attempts, place.attempt)
        if run.started_ms < 0:
            run.started_ms = self.now_ms
            self._waiting -= 1
        runs_ms, limit_s = run.job.runs_ms, run.job.request.workload.timeout_s
        if limit_s is not None:
            runs_ms = min(runs_ms, int(limit_s * 1000))
        heappush(self._ends, (self.now_ms + runs_ms, next(self._order), key))

    def _end(self, key: _Key) -> None:
        held = self._held.get(key)
        if held is None:
            return  # it was ended before
        job = self.runs[key[:2]].job
        limit_s = job.request.workload.timeout_s
        late = limit_s is not None and job.runs_ms > limit_s * 1000
        self._finish(key, -15 if late else 0, "timeout" if late else "exit")

    def _finish(self, key: _Key, code: int, why: str) -> None:
        held = self._held.pop(key)
        self._leased_milli -= self._milli(held.place)
        if not held.running:
            self._say(held.worker, "withdrawn", held.place)
            return
        self._say(held.worker, "exited", held.place, why, code)
        self._say(held.worker, "freed", held.place)

    def _milli(self, place: Place) -> int:
        """What a placement leases, in thousandths of a GPU; a share without a cap on compute counts as a whole one."""
        spec = self.runs[(place.tenant, place.job)].job.request.effective_gpu
        percent = spec.share.compute_percent if spec is not None and spec.share is not None else 100
        return len(place.slots) * percent * 10

    def _say(self, number: int, kind: FactKind, place: Place, detail: str = "", code: int = 0) -> None:
        name = (place.tenant, place.job, place.replica, place.attempt, place.fence)
        self._workers[number].facts.append(Fact(kind, *name, code, detail))
        self._talking[number] = None

    def _offer_facts(self) -> bool:
        talkers, self._talking = self._talking, {}
        for number in talkers:
            worker = self._workers[number]
            worker.no += 1
            facts, worker.facts = worker.facts, []
            self.engine.offer(FromWorker(worker.id, FactFrame(worker.session, worker.no, facts), "", True))
        return bool(talkers)


def _name(job: TraceJob) -> str:
    name = job.request.job
    assert name is not None, "a trace names its jobs"
    return name


def hello_of(host: SimHost) -> Hello:
    """A host of a trace as a worker would say hello."""
    return Hello(
        host.name,
        "boot",
        drivers=["docker", "handler", "noop", "process"],
        modes=["exclusive", "mps", "time-slice"],
        sharers_max=dict(SHARERS_MAX),
        cpu_milli=host.cpu_milli,
        memory_mib=host.memory_mib,
        gpu_pool=list(host.devices),
        simulated=True,
    )
