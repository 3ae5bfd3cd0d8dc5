"""The fleet, its jobs and services over time: numbers at fixed steps, folded from the ledger. Pure: no I/O, no clock.

A sample is what stood at the end of a step. What the whole fleet, a cause or a pool has is kept every 10 s for a day,
and in means of 5 min for 31 days; so are the tenants that came first. Hosts, services and further tenants have a minute
for a day, and an hour for 31 days. A job has its life, in steps that grow. What GPUs, jobs and services do is not in
the ledger: the leader tells it (`told_use`), and what nobody told is unknown.
"""

from __future__ import annotations

import zlib
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from moorage.scheduler.core.ledger.folding import Folded
from moorage.scheduler.core.ledger.state import State
from moorage.scheduler.follower.rings import CLOSE, DAY_MS, KEPT_MS, UNKNOWN, WIDE, Life, Ring, Series, Steps
from moorage.scheduler.follower.told import Told
from moorage.schemas.errors import Problem, problem
from moorage.schemas.waited import ASKED, Cause, SeriesAnswer
from moorage.schemas.where import POOL

#: what the leader told is unknown once it has not told it for so long
USE_MS: Final = 30_000
#: of what there are series, how many, and in which steps. Further ones have none, which an answer says
KEPT: Final[dict[str, tuple[Steps, int]]] = {
    "fleet": (CLOSE, 10),
    "cause": (CLOSE, 24),
    "pool": (CLOSE, 90),
    "tenant": (CLOSE, 160),
    "tenants": (WIDE, 1_200),
    "host": (WIDE, 4_000),
    "service": (WIDE, 1_600),
}
#: of a host, and of a service, as the leader tells them
HOST_NUMBERS: Final = ("used", "memory_mib", "temperature_c")
SERVICE_NUMBERS: Final = ("calls", "errors", "members", "running", "ran_p50", "ran_p95", "waited_p95", "batch")
#: jobs with a life, and values of one that it reported
JOBS_MAX: Final = 1_000
REPORTED_MAX: Final = 6
#: points of a row, and numbers of an answer, which is one frame: of many tenants the steps are coarser. Waits of five
#: minutes whose quantiles are taken
POINTS_MAX: Final = 288
NUMBERS_MAX: Final = 90_000
WAITS_MAX: Final = 4_096
_NEXT: Final = "moorage usage --help"
_QUANTILES: Final = (("wait_p50", 0.5), ("wait_p90", 0.9))

#: what it is of (`fleet`, `cause`, `pool`, `tenant`, `tenants`, `host`, `service`), which one, and what
Name = tuple[str, str, str]
#: tenant and name
JobName = tuple[str, str]


class _SavedSeries(msgspec.Struct, array_like=True):
    name: Name
    fine: bytes
    fine_last: int
    coarse: bytes
    coarse_last: int
    sum: float
    count: int


class _SavedLife(msgspec.Struct, array_like=True):
    tenant: str
    job: str
    num: int
    what: str
    values: bytes
    begin_ms: int
    step_ms: int
    count: int
    last_ms: int


class _Saved(msgspec.Struct, array_like=True):
    series: list[_SavedSeries]
    at_ms: int
    left_out: int
    lives: list[_SavedLife] = []


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_Saved).decode


class AllSeries:
    """All series up to the record at which `state` stands; `state` is folded by the caller."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._series: dict[Name, Series] = {}
        self._counts = Counter[str]()  # series, by what they are of
        self._lives: OrderedDict[JobName, tuple[int, dict[str, Life]]] = OrderedDict()  # the one told last at the end
        self._at_ms = state.time_ms
        self._told = Told()
        self._told_ms = 0
        self._waited: deque[tuple[str, int]] = deque(maxlen=WAITS_MAX)  # tenant and ms, of jobs that began
        self._begun = {num for num, job in state.jobs.items() if job.started}
        self.left_out = 0
        self._made_zeros: dict[Steps, tuple[int, Series]] = {}  # and the ms of the step for which they are

    def told_use(self, told: Told, at_ms: int) -> None:
        """Note what hosts, pools, jobs and services do, as the leader has heard it."""
        self._told, self._told_ms = told, at_ms

    def fold(self, folded: Folded, waiting: Iterable[tuple[str, str, int]]) -> None:
        """Follow a record; `waiting` has tenant, cause and number of what waits, and is read at the end of a step."""
        state = self._state
        for job in folded.jobs.values():
            if job.started and job.num not in self._begun:
                self._begun.add(job.num)
                self._waited.append((job.tenant, state.time_ms - job.may_start_ms))
        for job in folded.compacted:
            self._begun.discard(job.num)
        step_ms = CLOSE.fine_ms
        if state.time_ms // step_ms != self._at_ms // step_ms:
            self._sample(state.time_ms // step_ms * step_ms - step_ms, waiting)
        self._at_ms = state.time_ms

    # ------------------------------------------------------------------------------------------- sampling

    def _sample(self, at_ms: int, waiting: Iterable[tuple[str, str, int]]) -> None:
        """Put what stands into the step that begins at `at_ms`."""
        known = at_ms - self._told_ms <= USE_MS
        told = self._told if known else Told()
        self._sample_hosts(at_ms, told, known=known)
        causes, tenants = Counter[str](), Counter[str]()
        for tenant, cause, units in waiting:
            if cause not in (Cause.STARTING, Cause.PLACING):  # over in a moment, which a sample would make a step of
                causes[cause] += units
                tenants[tenant] += 0 if cause in ASKED else units
        self._put(("fleet", "", "waiting"), at_ms, tenants.total())
        for cause in {*causes, *(name for of, name, _ in self._series if of == "cause")}:
            self._put(("cause", cause, "waiting"), at_ms, causes[cause])
        for row in self._state.tenants.values():
            if row.gpus or tenants[row.name] or self._of_tenant(row.name, "granted") in self._series:
                self._put(self._of_tenant(row.name, "granted"), at_ms, row.gpus)
                self._put(self._of_tenant(row.name, "waiting"), at_ms, tenants[row.name])
        for tenant, job, numbers, reported in told.jobs:
            self._live(tenant, job, numbers, reported, at_ms)
        if at_ms % WIDE.fine_ms == 0:
            for tenant, service, figures in told.services:
                for what, value in zip(SERVICE_NUMBERS, figures, strict=False):
                    self._put(("service", f"{tenant}/{service}", what), at_ms, UNKNOWN if value is None else value)
        if at_ms // CLOSE.coarse_ms != (at_ms + CLOSE.fine_ms) // CLOSE.coarse_ms:  # the last of five minutes
            self._sample_waits(at_ms + CLOSE.fine_ms - CLOSE.coarse_ms)

    def _sample_hosts(self, at_ms: int, told: Told, *, known: bool) -> None:
        """Put the sums of the fleet and of each pool, and each minute those of each host. A pool is a model of GPUs, or
        the hosts with one label `pool=NAME`, which is its name here."""
        there, granted = Counter[str](), Counter[str]()
        pools = defaultdict[str, list[float]](lambda: [0.0, 0.0, 0.0])
        used = 0.0
        nothing = (UNKNOWN,) * len(HOST_NUMBERS)
        for worker in self._state.worker_by_num.values():
            leased = 0
            for attempt in worker.attempts.values():
                leased |= attempt.mask
            devices = worker.inventory.gpu_pool
            for slot, device in enumerate(devices):
                model = device.name
                there[model] += bool(worker.session)
                granted[model] += leased >> slot & 1
            numbers = told.hosts.get(worker.id, nothing)
            at_work = numbers[0] or 0 if worker.id in told.hosts else 0
            used += at_work
            if label := worker.inventory.labels.get(POOL):
                sums = pools[f"{POOL}={label}"]
                sums[0] += len(devices) * bool(worker.session)
                sums[1] += leased.bit_count()
                sums[2] += at_work
            if at_ms % WIDE.fine_ms == 0 and worker.session:
                self._put(("host", worker.id, "granted"), at_ms, leased.bit_count())
                for what, value in zip(HOST_NUMBERS, numbers, strict=False):
                    self._put(("host", worker.id, what), at_ms, UNKNOWN if value is None else value)
        self._put(("fleet", "", "gpus"), at_ms, there.total())
        self._put(("fleet", "", "granted"), at_ms, granted.total())
        self._put(("fleet", "", "used"), at_ms, used if known else UNKNOWN)
        for model in there:
            pools[model] = [there[model], granted[model], told.pools.get(model, 0.0)]
        for name, (gpus, leases, at_work) in pools.items():
            self._put(("pool", name, "gpus"), at_ms, gpus)
            self._put(("pool", name, "granted"), at_ms, leases)
            self._put(("pool", name, "used"), at_ms, at_work if known else UNKNOWN)

    def _sample_waits(self, from_ms: int) -> None:
        """Put the quantiles of the waits that ended in five minutes into the steps of these, in seconds."""
        of_tenants = defaultdict[str, list[int]](list)
        for tenant, waited_ms in self._waited:
            of_tenants[tenant].append(waited_ms)
        whole = sorted(waited_ms for _, waited_ms in self._waited)
        for what, part in _QUANTILES:
            for at_ms in range(from_ms, from_ms + CLOSE.coarse_ms, CLOSE.fine_ms):
                self._put(("fleet", "", what), at_ms, _quantile(whole, part))
            for tenant, waits in of_tenants.items():
                for at_ms in range(from_ms, from_ms + CLOSE.coarse_ms, WIDE.fine_ms):
                    self._put(("tenants", tenant, what), at_ms, _quantile(sorted(waits), part))
        self._waited.clear()

    def _of_tenant(self, tenant: str, what: str) -> Name:
        """Return the name of a tenant's series: of the tenants that came first, it has the fine steps."""
        of_all = ("tenants", tenant, "granted") in self._series
        is_close = not of_all and self._counts["tenant"] < KEPT["tenant"][1]
        return "tenant" if is_close or ("tenant", tenant, "granted") in self._series else "tenants", tenant, what

    def _live(
        self, tenant: str, job: str, numbers: Iterable[float | None], reported: Mapping[str, float], at_ms: int
    ) -> None:
        """Put what a job does into its life, which begins again with another job of its name."""
        row = self._state.job(tenant, job)
        if row is None or row.over:  # the leader is ahead of what is folded, or was behind it
            return
        num, lives = self._lives.get((tenant, job), (0, {}))
        if num != row.num:
            while len(self._lives) >= JOBS_MAX:
                _, (_, oldest) = next(iter(self._lives.items()))
                if max((life.last_ms for life in oldest.values()), default=0) > at_ms - 2 * USE_MS:
                    self.left_out += 1
                    return
                self._lives.popitem(last=False)
            lives = {}
        self._lives[tenant, job] = row.num, lives
        self._lives.move_to_end((tenant, job))
        found = [*zip(("used", "memory_mib", "gpus"), numbers, strict=False)]
        found += [(f"reported:{name}", value) for name, value in reported.items()]
        for what, value in found:
            if value is not None and (what in lives or len(lives) < 3 + REPORTED_MAX):
                lives.setdefault(what, Life(at_ms)).put(at_ms, value)

    def _put(self, name: Name, at_ms: int, value: float) -> None:
        series = self._series.get(name)
        if series is None:
            steps, most = KEPT[name[0]]
            if self._counts[name[0]] >= most and not self._make_room(name[0]):
                self.left_out += 1
                return
            series = self._series[name] = self._zeros(steps, at_ms) if _is_part(name) else Series(steps)
            self._counts[name[0]] += 1
        series.put(at_ms, value)

    def _zeros(self, steps: Steps, at_ms: int) -> Series:
        """Return the series of what was none so far: else the mean of its first step would leave out what came before
        it, and parts of the fleet would be more than the fleet."""
        made = self._made_zeros.get(steps)
        if made is None or made[0] != at_ms:  # many tenants may come at once
            whole = self._series.get(("fleet", "", "gpus"), Series(CLOSE))
            made = self._made_zeros[steps] = at_ms, Series.of_zeros(steps, whole, at_ms)
        return made[1].copy(steps)

    def _make_room(self, of: str) -> bool:
        """Forget one series that had no number for a day; return whether there was one."""
        for name, series in self._series.items():
            if name[0] == of and self._at_ms - series.fine.last * series.fine.step_ms > DAY_MS:
                del self._series[name]
                self._counts[of] -= 1
                return True
        return False

    def bridge(self, state: State) -> None:
        """Go on from a later state; the steps in between are unknown."""
        self._state = state
        self._at_ms = state.time_ms
        self._begun = {num for num, job in state.jobs.items() if job.started}
        self._waited.clear()

    # ----------------------------------------------------------------------------------------------- saves

    def dump(self) -> bytes:
        """Return all series, as msgpack."""
        rows = [
            _SavedSeries(
                name, zlib.compress(each.fine.values.tobytes(), 1), each.fine.last,
                zlib.compress(each.coarse.values.tobytes(), 1), each.coarse.last, each.sum, each.count,
            )
            for name, each in self._series.items()
        ]  # fmt: skip
        lives = [
            _SavedLife(
                tenant, job, num, what, each.values.tobytes(), each.begin_ms, each.step_ms, each.count, each.last_ms
            )
            for (tenant, job), (num, of) in self._lives.items()
            for what, each in of.items()
        ]  # fmt: skip
        return _encode(_Saved(rows, self._at_ms, self.left_out, lives))

    @classmethod
    def load(cls, saved: bytes, state: State) -> AllSeries:
        """Return the series of a save. Raises ValueError, zlib.error or msgspec's errors for other bytes."""
        found = cls(state)
        if not saved:
            return found
        told = _decode(saved)
        found._at_ms, found.left_out = told.at_ms, told.left_out
        for row in told.series:
            if row.name[0] not in KEPT:
                continue
            series = Series(KEPT[row.name[0]][0])
            series.fine = _ring(series.fine, row.fine, row.fine_last)
            series.coarse = _ring(series.coarse, row.coarse, row.coarse_last)
            series.sum, series.count = row.sum, row.count
            found._series[row.name] = series
            found._counts[row.name[0]] += 1
        for each in told.lives:
            life = Life(each.begin_ms)
            life.values, life.begin_ms = array("f", each.values), each.begin_ms
            life.step_ms, life.count, life.last_ms = each.step_ms, each.count, each.last_ms
            found._lives.setdefault((each.tenant, each.job), (each.num, {}))[1][each.what] = life
        return found

    # ------------------------------------------------------------------------------------------- questions

    def answer(self, tenant: str | None, arguments: dict[str, Any]) -> dict[str, Any] | Problem:
        """Return the series of the fleet, or with `worker` of a host; a tenant gets its own, or with `job` or `service`
        those of one of its own.

        `since_s` (a day without it) is at most 31 days; beyond a day the steps are coarser. A job has its whole life.
        """
        since_s = arguments.get("since_s")
        since_s = DAY_MS / 1000 if since_s is None else since_s
        if isinstance(since_s, bool) or not isinstance(since_s, int | float) or not 60 <= since_s <= KEPT_MS / 1000:
            said = f"since_s of series must be a number of seconds, 60..{KEPT_MS // 1000}"
            return problem("invalid-argument", said, field="$.since_s", found=since_s, next=_NEXT)
        if tenant is not None and (job := arguments.get("job")) is not None:
            return self._life_of(tenant, str(job))
        until_ms = self._state.time_ms
        from_ms = max(0, until_ms - int(since_s * 1000))
        wanted = self._wanted(tenant, arguments)
        answer = SeriesAnswer(from_ms=from_ms, until_ms=until_ms, left_out=self.left_out > 0)
        if wanted:
            span_ms = until_ms - from_ms
            own_ms = min(self._series[name].step_ms(span_ms) for name in wanted)
            points = min(POINTS_MAX, NUMBERS_MAX // len(wanted))
            answer.step_ms = own_ms * max(1, -(-span_ms // (own_ms * points)))
            answer.from_ms = from_ms // answer.step_ms * answer.step_ms
        for of, name, what in sorted(wanted):
            row = self._series[of, name, what].over(from_ms, until_ms, answer.step_ms)
            answer.series[f"{'tenant' if of == 'tenants' else of}/{name}/{what}"] = row
        plain: dict[str, Any] = msgspec.to_builtins(answer)
        return plain

    def _wanted(self, tenant: str | None, arguments: Mapping[str, Any]) -> list[Name]:
        of: tuple[str, ...]
        if tenant is not None and (service := arguments.get("service")) is not None:
            of, one = ("service",), f"{tenant}/{service}"
        elif tenant is not None:
            of, one = ("tenant", "tenants"), tenant
        elif (host := arguments.get("worker")) is not None:
            of, one = ("host",), str(host)
        else:
            return [name for name in self._series if name[0] not in ("host", "service")]
        return [name for name in self._series if name[1] == one and name[0] in of]

    def _life_of(self, tenant: str, job: str) -> dict[str, Any]:
        _, lives = self._lives.get((tenant, job), (0, {}))
        answer = SeriesAnswer(until_ms=self._state.time_ms, left_out=not lives and len(self._lives) >= JOBS_MAX)
        if lives:
            begin_ms = min(life.begin_ms for life in lives.values())
            step_ms = max(life.step_ms for life in lives.values())
            last_ms = max(life.last_ms for life in lives.values())
            answer.from_ms, answer.step_ms = begin_ms, step_ms
            answer.until_ms = last_ms
            for what, life in lives.items():
                row = life.over(begin_ms, step_ms, (last_ms - begin_ms) // step_ms + 1)
                answer.series[f"job/{job}/{what}"] = row
        plain: dict[str, Any] = msgspec.to_builtins(answer)
        return plain


def _is_part(name: Name) -> bool:
    """Return whether a series is of a part of the fleet's numbers: what it is not told of is none."""
    return name[0] in ("cause", "pool", "tenant", "tenants") and name[2] in ("gpus", "granted", "used", "waiting")


def _ring(empty: Ring, values: bytes, last: int) -> Ring:
    """Return the ring of a save. Raises ValueError if it has another size."""
    numbers = array("f", zlib.decompress(values))
    if len(numbers) != len(empty.values):
        raise ValueError(f"{len(numbers)} numbers are not {len(empty.values)}")
    empty.values, empty.last = numbers, last
    return empty


def _quantile(waits: list[int], part: float) -> float:
    """Return in seconds the wait that this part of the waits, in ms and sorted, does not exceed."""
    return waits[min(len(waits) - 1, int(part * len(waits)))] / 1000 if waits else UNKNOWN
