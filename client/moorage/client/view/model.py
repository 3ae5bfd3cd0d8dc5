"""Keeps what a screen over a fleet has heard, and makes a `View` of it. It sends no questions and reads no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from moorage.client.durations import age
from moorage.client.view.checks import no_worker_is_up, warnings
from moorage.client.view.closed import closed_words, device_words, down_words
from moorage.client.view.view import Counts, Fit, Idle, Trouble, View, Waiting, WorkerCells
from moorage.schemas.answers.fleet import FleetAnswer
from moorage.schemas.answers.jobs import Explained, JobRow
from moorage.schemas.cells import FOREIGN, FREE, FROZEN, LEASED, LOST, NOT_LENT, SICK
from moorage.schemas.frames import (
    AGENT_STOPPED,
    DISK_FULL,
    FleetDetail,
    FleetFrame,
    FleetRow,
    Hello,
    Load,
    Standing,
    UsedJob,
)
from moorage.schemas.job import QUEUED, TERMINAL
from moorage.schemas.reasons import BACKOFF, REASONS, SCALED
from moorage.schemas.units import many

#: the leader sends two frames a second; after so long a silence nobody leads, or the network is cut
SILENT_MS: Final = 5_000
#: a scheduler that has not said so for this long does not lead any more
STANDING_MS: Final = 10_000
#: a worker tells its load every 2 s; what is older is not shown
LOAD_MS: Final = 10_000
#: workers of which something was heard and that no frame has, before they are forgotten
GONE_MAX: Final = 64
#: readings of a job's use that are kept, one every 2 s
SPARKS_MAX: Final = 28
#: a job of which such an attempt did not last fails again and again
FAILING_TRIES: Final = 3
#: health of a slot that closes it, in the order of `SlotLoad`; the others are told by the leader
_WELL: Final = frozenset({"ok", "probation"})
#: stopped in order: its GPUs are no part of the fleet
LEFT: Final = "left"
#: states of workers that are as an operator wants them
_OPEN: Final = frozenset({"up", "claimed-locally"})
_AS_WANTED: Final = _OPEN | {LEFT}
_GRAVE: Final = frozenset({"lost", "stale", "not-heard", "starts-fail", DISK_FULL})
_BY_SIGN: Final = {
    FREE: "free",
    LEASED: "leased",
    FROZEN: "frozen",
    SICK: "sick",
    FOREIGN: "foreign",
    NOT_LENT: "not_lent",
    LOST: "lost",
}


class Model:
    """What was heard of a fleet so far. Times are milliseconds of one clock that never goes back; it began at
    `now_ms`."""

    def __init__(self, now_ms: int) -> None:
        self._frame: FleetFrame | None = None
        self._frame_ms = now_ms  # of the last frame, or the beginning
        self._hellos: dict[str, Hello] = {}
        self._loads: dict[str, tuple[int, Load]] = {}
        self._leader: tuple[int, str] | None = None
        self._fleet: FleetAnswer | None = None
        self._jobs: Sequence[JobRow] | None = None  # None: this key may read none
        self._waits = self._live = 0
        self._more = False
        self._why: dict[tuple[str, str], Explained] = {}
        self._idle_since: dict[tuple[str, str], int] = {}
        self._detail: FleetDetail | None = None
        self._sparks: dict[str, deque[int]] = {}
        self.unseen: list[str] = []
        self.own = ""
        self.hour: dict[str, list[float | None]] = {}
        #: why nothing can be heard now: the server is away, or refuses the key; "" if it can
        self.unheard = ""
        self.sees_fleet = True  # whether the leader's frames may be heard

    @property
    def frame(self) -> FleetFrame | None:
        """The leader's last frame; None before the first."""
        return self._frame

    @property
    def detail(self) -> FleetDetail | None:
        """The leader's last frame for operators; None before the first."""
        return self._detail

    @property
    def loads(self) -> frozenset[str]:
        """The workers whose load was heard."""
        return frozenset(self._loads)

    # ----------------------------------------------------------------------------------------------- what is fed

    def take_frame(self, frame: FleetFrame | Hello | Load | Standing, now_ms: int) -> None:
        """Take a public frame."""
        if isinstance(frame, FleetFrame):
            # a leader that was deposed may speak once more, and a fleet may begin a new ledger, at epoch 1
            is_old = self._frame is not None and frame.epoch < self._frame.epoch
            if not is_old or now_ms - self._frame_ms > SILENT_MS:
                self._frame, self._frame_ms = frame, now_ms
                self._forget_gone(frame, now_ms)
        elif isinstance(frame, Hello):
            self._hellos[frame.worker] = frame
        elif isinstance(frame, Load):
            self._loads[frame.worker] = now_ms, frame
        elif frame.leads:
            self._leader = now_ms, frame.scheduler

    def _forget_gone(self, frame: FleetFrame, now_ms: int) -> None:
        """Forget what workers said that are no more, once they are many: a screen may be open for months."""
        if len(self._hellos.keys() | self._loads.keys()) > 2 * len(frame.workers) + GONE_MAX:
            there = {row.worker for row in frame.workers}
            there |= {name for name, (at_ms, _) in self._loads.items() if now_ms - at_ms < LOAD_MS}  # it comes
            self._hellos = {name: hello for name, hello in self._hellos.items() if name in there}
            self._loads = {name: heard for name, heard in self._loads.items() if name in there}

    def take_fleet(self, fleet: FleetAnswer, now_ms: int) -> None:
        """Take the leader's answer to an operator's question `fleet`; until the first frame, it is used as one."""
        self._fleet = fleet
        if self._frame is None and fleet.epoch:
            rows = [FleetRow(row.worker, row.state, row.cells, row.simulated) for row in fleet.workers]
            running = sum(row.members for row in fleet.workers)
            self.take_frame(
                FleetFrame(fleet.epoch, fleet.ledger, workers=rows, queued=fleet.queued, running=running), now_ms
            )

    def take_jobs(self, rows: Sequence[JobRow], counts: Mapping[str, int], *, more: bool) -> None:
        """Take rows of `ls` of jobs that are not over, how many jobs there are in each state, and whether `more` wait
        than rows are of such."""
        asleep = sum(row.state == QUEUED and _is_scaled(row) for row in rows)
        self._jobs, self._waits, self._more = rows, counts.get(QUEUED, 0) - asleep, more
        self._live = sum(jobs for state, jobs in counts.items() if state not in TERMINAL)
        if self._detail is None:
            self._draw_sparks({f"{row.tenant}/{row.job}": row.use.percent for row in rows if row.use is not None})

    @property
    def knows_how_long(self) -> bool:
        """Whether the leader has said for how long jobs have done nothing."""
        return self._detail is not None

    def take_detail(self, frame: FleetDetail) -> None:
        """Take the frame for operators."""
        self._detail = frame
        self._draw_sparks({f"{row.tenant}/{row.job}": row.percent for row in frame.jobs})

    def _draw_sparks(self, found: Mapping[str, int]) -> None:
        """Add the newest reading of each job that runs, and forget the others."""
        self._sparks = {name: self._sparks.get(name, deque(maxlen=SPARKS_MAX)) for name in found}
        for name, percent in found.items():
            self._sparks[name].append(percent)

    def take_why(self, tenant: str, why: Explained) -> None:
        """Take the answer to `explain` of a waiting job."""
        self._why[tenant, why.job] = why

    def oldest(self) -> list[tuple[str, str]]:
        """Return tenant and id of the oldest job of each tenant and reason, the longest first: they are explained."""
        first = [max(rows, key=_age) for rows in self._groups().values()]
        for key in self._why.keys() - {(row.tenant, row.job) for row in first}:
            del self._why[key]
        return [(row.tenant, row.job) for row in sorted(first, key=_age, reverse=True)]

    def _groups(self) -> dict[tuple[str, str], list[JobRow]]:
        """Return the jobs that wait, or some of whose replicas do, by tenant and reason; no services that rest."""
        found: dict[tuple[str, str], list[JobRow]] = {}
        for row in self._jobs or ():
            if (row.state == QUEUED or row.waiting) and not _is_scaled(row):
                found.setdefault((row.tenant, row.reason), []).append(row)
        return found

    # ----------------------------------------------------------------------------------------------- what is seen

    def view(self, now_ms: int, at_ms: int) -> View:
        """Return this moment; `at_ms` is what the wall clock says."""
        frame = self._frame
        workers = list(self._workers(now_ms))
        simulated = [worker.simulated for worker in workers]
        if not self.sees_fleet:  # then what its own jobs run on is known
            simulated = [row.simulated for row in self._jobs or () if row.worker]
        return View(
            at_ms=at_ms,
            leader=self._leads(now_ms),
            epoch=0 if frame is None else frame.epoch,
            heard_ms_ago=None if frame is None else now_ms - self._frame_ms,
            simulated="all" if simulated and all(simulated) else "some" if any(simulated) else "",
            queued=0 if frame is None else max(0, frame.queued - self._resting()),
            running=0 if frame is None else frame.running,
            counts=counted(workers),
            use=self._use(workers),
            troubles=list(self._troubles(now_ms, workers)),
            fits=self._fits(workers),
            waiting=self._waiting(),
            waits=self._waits,
            idle=self._held_idle(now_ms, workers),
            workers=workers,
            jobs=sorted(self._jobs or (), key=lambda row: (row.state != QUEUED, -row.age_ms)),
            live=self._live,
            sparks={name: list(readings) for name, readings in self._sparks.items()},
            failed=[] if self._detail is None else self._detail.failed,
            services=[] if self._detail is None else self._detail.services,
            promised=(0, 0, 0) if self._detail is None else self._detail.promised,
            unseen=list(self.unseen),
            own=self.own,
            hour=self.hour,
            sees_fleet=self.sees_fleet,
        )

    def _resting(self) -> int:
        """Return how many replicas of the listed services the frame counts as waiting, though no calls need them."""
        counts = ((row, row.replicas.states if row.replicas is not None else {QUEUED: 1}) for row in self._jobs or ())
        return sum(row.waiting or counted.get(QUEUED, 0) for row, counted in counts if _is_scaled(row))

    def _leads(self, now_ms: int) -> str:
        """Return the scheduler that leads: who said so lately, or else who answered; "" if neither is known."""
        if self._leader is not None:
            said_ms, scheduler = self._leader
            return scheduler if now_ms - said_ms < STANDING_MS else ""
        return "" if self._fleet is None else self._fleet.leader

    def hello_of(self, worker: str) -> Hello | None:
        """Return what a worker said of itself; None if that was not heard."""
        return self._hellos.get(worker)

    def load_of(self, worker: str, now_ms: int) -> Load | None:
        """Return a worker's newest load; None if that is old, or none was heard."""
        heard = self._loads.get(worker)
        return heard[1] if heard is not None and now_ms - heard[0] < LOAD_MS else None

    def _workers(self, now_ms: int) -> Iterator[WorkerCells]:
        models = {} if self._fleet is None else {row.worker: row.models for row in self._fleet.workers}
        for row in () if self._frame is None else self._frame.workers:
            name, cells = row.worker, row.cells
            hello, load = self._hellos.get(name), self.load_of(name, now_ms)
            known = models.get(name) or sorted({device.name for device in hello.gpu_pool} if hello else ())
            slots = [] if load is None or len(load.gpu_pool) != len(cells) else load.gpu_pool
            use: list[int | None] = [*(slot.util_percent for slot in slots)] or [None for _ in cells]
            yield WorkerCells(name, row.state, row.simulated, " + ".join(known), cells, use)

    def _use(self, workers: Sequence[WorkerCells]) -> int | None:
        """Return the mean use of leased GPUs: what the loads say, or else the leader."""
        read = [
            use
            for worker in workers
            for sign, use in zip(worker.cells, worker.use, strict=True)
            if use is not None and is_leased(sign)
        ]
        if read:
            return round(sum(read) / len(read))
        used = [] if self._fleet is None else self._fleet.used_now
        devices = sum(row.read for row in used)
        return round(100 * sum(row.at_work for row in used) / devices) if devices else None

    def _fits(self, workers: Sequence[WorkerCells]) -> list[Fit]:
        if self._fleet is not None:
            return [Fit(row.model, row.gpus, row.free, row.largest) for row in self._fleet.fits_now]
        found: dict[str, list[int]] = {}
        for worker in workers:
            if worker.state == LEFT:
                continue
            row = found.setdefault(worker.model, [0, 0, 0])
            free = worker.cells.count(FREE) if worker.state in _OPEN else 0
            row[0] += len(worker.cells)
            row[1] += free
            row[2] = max(row[2], free)
        return [Fit(model, *row) for model, row in sorted(found.items()) if row[0]]

    def _waiting(self) -> list[Waiting]:
        found = []
        for (tenant, reason), rows in self._groups().items():
            oldest = max(rows, key=_age)
            why = self._why.get((tenant, oldest.job)) or Explained(job=oldest.job, tenant=tenant, state=oldest.state)
            name = why.reason or reason
            found.append(
                Waiting(
                    tenant,
                    len(rows),
                    oldest.job,
                    oldest.gpu,
                    oldest.age_ms,
                    more=self._more,
                    reason=name,
                    means=why.means or (REASONS[name].means if name in REASONS else ""),
                    because=why.because or why.needs,
                    starts_ms=_starts_ms(why),
                )
            )
        return sorted(found, key=lambda row: -row.oldest_ms)

    def _held_idle(self, now_ms: int, workers: Sequence[WorkerCells]) -> list[Idle]:
        """Return who holds GPUs of which at least one does nothing, those that have been so for longest first."""
        if self._jobs is None and self._detail is None:
            return self._idle_workers(now_ms, workers)
        if self._detail is not None:
            used = [row for row in self._detail.jobs if not row.percent_min]
        else:
            used = [
                UsedJob(tenant=row.tenant, job=row.job, worker=row.worker, **msgspec.structs.asdict(row.use))
                for row in self._jobs or ()
                if row.use is not None and not row.use.percent_min
            ]
            self._remember_idle(((row.tenant, row.job) for row in used), now_ms)
        by_tenant: dict[str, list[tuple[int, UsedJob]]] = {}
        for row in used:
            here_ms = now_ms - self._idle_since.get((row.tenant, row.job), now_ms)
            by_tenant.setdefault(row.tenant, []).append((here_ms if row.idle_ms is None else row.idle_ms, row))
        found = []
        for tenant, rows in by_tenant.items():
            for_ms, first = max(rows, key=lambda each: each[0])
            gpus = sum(row.idle or 1 for _, row in rows)  # 1: its leader does not tell how many
            least = min(row.percent_min for _, row in rows)
            most = max(row.percent_max for _, row in rows)
            found.append(Idle(tenant, len(rows), gpus, first.job, first.worker, for_ms, least, most))
        return sorted(found, key=lambda row: (-row.for_ms, -row.gpus, row.tenant))

    def _idle_workers(self, now_ms: int, workers: Sequence[WorkerCells]) -> list[Idle]:
        found = []
        for worker in workers:
            leased = [
                use for sign, use in zip(worker.cells, worker.use, strict=True) if use is not None and is_leased(sign)
            ]
            if leased and not min(leased):
                found.append((worker.worker, leased.count(0), max(leased)))
        self._remember_idle((("", name) for name, _, _ in found), now_ms)
        rows = [Idle("", 0, gpus, "", name, now_ms - self._idle_since["", name], 0, most) for name, gpus, most in found]
        return sorted(rows, key=lambda row: (-row.for_ms, row.most, row.worker))

    def _remember_idle(self, keys: Iterable[tuple[str, str]], now_ms: int) -> None:
        self._idle_since = {key: self._idle_since.get(key, now_ms) for key in keys}

    def _troubles(self, now_ms: int, workers: Sequence[WorkerCells]) -> Iterator[Trouble]:
        """Yield what is wrong, the gravest first: nobody leads, workers that are away, GPUs that cannot be used, and
        what `moorage doctor` warns of."""
        silent_ms = now_ms - self._frame_ms
        if silent_ms > SILENT_MS and self.sees_fleet:
            old = "; what is shown here is as old" if self._frame is not None else " since this screen began"
            silent = f"no frame of a leader for {age(silent_ms)}{old}"
            if self.unheard:  # no fault of the fleet, whose jobs may well run
                yield Trouble("connection", f"{self.unheard}: {silent}")
            else:
                yield Trouble("scheduler", silent, grave=True)
        told = list(self._leaders_troubles()) if self._fleet is not None else list(self._seen_troubles(now_ms, workers))
        told += [Trouble(check.name, check.found) for check in warnings(self._figures())]
        if self._frame is not None and (nobody := no_worker_is_up(self._frame.workers)):
            told.append(Trouble("fleet", nobody, grave=True))
        told += self._of_jobs()
        yield from sorted(told, key=lambda trouble: not trouble.grave)

    def _figures(self) -> FleetAnswer:
        """Return what the leader told of itself, the ledger and the queue; an observer hears of the copies alone."""
        if self._fleet is not None:
            return self._fleet
        return FleetAnswer(ledger_copies=None if self._frame is None else self._frame.ledger_copies)

    def _of_jobs(self) -> Iterator[Trouble]:
        """Yield what is wrong with jobs, by tenant: those that stall, that fail again and again, that can never run."""
        stalls: dict[str, dict[str, tuple[int, str]]] = {}  # by tenant and job: for how many seconds, and why
        failing: dict[str, list[JobRow]] = {}
        never: dict[tuple[str, str], list[JobRow]] = {}
        for row in self._jobs or ():
            if row.stalled:
                longest = max(row.stalled, key=lambda stall: stall.seconds)
                stalls.setdefault(row.tenant, {})[row.job] = longest.seconds, longest.why
            if _fails(row):
                failing.setdefault(row.tenant, []).append(row)
            elif row.state == QUEUED and row.reason in REASONS and REASONS[row.reason].is_never:
                never.setdefault((row.tenant, row.reason), []).append(row)
        for each in () if self._fleet is None else self._fleet.stalled:  # also of jobs that are not listed
            stalls.setdefault(each.tenant, {}).setdefault(each.job, (each.seconds, each.why))
        for tenant, found in stalls.items():
            job, (seconds, why) = max(found.items(), key=lambda each: each[1])
            yield Trouble(_named(tenant, job, len(found)), f"stalled for {age(1000 * seconds)}: {why}")
        for tenant, rows in failing.items():
            last = max(rows, key=lambda row: row.attempt)
            what = f"fails again and again, try {last.attempt}"
            what += ", none is ready" if last.ready == 0 else ""
            what += f": {last.why}" if last.why else ""
            yield Trouble(_named(tenant, last.job, len(rows)), what)
        for (tenant, reason), rows in never.items():
            oldest = max(rows, key=_age)
            means = REASONS[reason].means
            yield Trouble(_named(tenant, oldest.job, len(rows)), f"can never run as the fleet is: {means}")

    def _leaders_troubles(self) -> Iterator[Trouble]:
        """Yield the troubles of the leader's answer, with their causes and times; a worker's state is its own."""
        assert self._fleet is not None
        state_now = {row.worker: row.state for row in (self._frame.workers if self._frame is not None else ())}
        for worker in self._fleet.workers:
            name = worker.worker
            state = state_now.get(name, worker.state)
            if state not in _AS_WANTED and state not in (DISK_FULL, AGENT_STOPPED):  # its drivers say more of that
                heard = worker.heard_ms_ago
                what = state
                if state in _GRAVE:
                    what += f", heard {age(heard)} ago" if heard is not None else ""
                    what += self._jobs_on(name)
                elif state == worker.flag:
                    what = closed_words(worker) or state
                yield Trouble(name, what, grave=state in _GRAVE)
            if worker.starts_fail is not None:
                yield Trouble(name, f"jobs fail to start: {worker.starts_fail.why}", grave=True)
            for words in down_words(worker):
                yield Trouble(name, words, grave=not words.startswith(AGENT_STOPPED))
            if worker.warning:
                yield Trouble(name, worker.warning)
            for trouble in worker.troubles:
                yield Trouble(f"{name} GPU {trouble.slot}", device_words(trouble))

    def _jobs_on(self, worker: str) -> str:
        """Return how many jobs a worker has, in words; "" if none is known."""
        on_it = [row for row in self._jobs or () if row.worker == worker]
        tenants = ", ".join(sorted({row.tenant for row in on_it}))
        return f", with {many(len(on_it), 'job')} of {tenants}" if on_it else ""

    def _seen_troubles(self, now_ms: int, workers: Sequence[WorkerCells]) -> Iterator[Trouble]:
        """Yield what the public frames alone show: states of workers, signs of GPUs, and the loads' words for them."""
        for worker in workers:
            if worker.state not in _AS_WANTED:
                yield Trouble(worker.worker, worker.state, grave=worker.state in _GRAVE)
            load = self.load_of(worker.worker, now_ms)
            slots = load.gpu_pool if load is not None and len(load.gpu_pool) == len(worker.cells) else ()
            for at, sign in enumerate(worker.cells):
                slot = slots[at] if slots else None
                where = f"{worker.worker} GPU {at}"
                if sign == SICK:
                    bad = slot is not None and slot.health not in _WELL
                    yield Trouble(where, f"{slot.health}: {slot.detail}".rstrip(": ") if slot and bad else "sick")
                elif sign == FOREIGN:
                    yield Trouble(where, f"used by {slot.foreign}" if slot and slot.foreign else "used by others")
                if slot is not None and slot.warning:
                    yield Trouble(where, slot.warning)
        lost = sum(worker.cells.count(LOST) for worker in workers if worker.state == "up")
        if lost:
            yield Trouble("fleet", f"{many(lost, 'GPU')} gone from workers that are up", grave=True)


def _age(row: JobRow) -> int:
    return row.age_ms


def _starts_ms(why: Explained) -> int | None:
    return why.starts_in_ms if why.starts_in_ms is not None or why.starts is None else why.starts.p50_ms


def _named(tenant: str, job: str, jobs: int) -> str:
    """Return `vision/train-42`, or `10 jobs of vision` for several."""
    return f"{tenant}/{job}" if jobs == 1 else f"{jobs} jobs of {tenant}"


def is_leased(sign: str) -> bool:
    """Return whether a GPU with this sign is leased, by one job or by several."""
    return sign == LEASED or sign.isdigit()


def counted(workers: Sequence[WorkerCells]) -> Counts:
    """Return how many of these workers' GPUs are in which state; those of a worker that was stopped are none."""
    found = dict.fromkeys((*_BY_SIGN.values(), "shared", "closed"), 0)
    for worker in workers:
        for sign in set(worker.cells) if worker.state != LEFT else ():
            number = worker.cells.count(sign)
            if sign.isdigit():
                found["leased"] += number
                found["shared"] += number if sign != "1" else 0
            else:
                found["closed" if sign == FREE and worker.state not in _OPEN else _BY_SIGN[sign]] += number
    gpus = sum(len(worker.cells) for worker in workers if worker.state != LEFT)
    return Counts(gpus=gpus, **found)


def _fails(row: JobRow) -> bool:
    """Return whether a job's attempts end one after another: it waits for one more, or one of its replicas does while
    others run, or no replica of a service has become ready."""
    if row.attempt < FAILING_TRIES or _is_scaled(row):
        return False
    return row.state == QUEUED or row.reason == BACKOFF.name or row.ready == 0


def _is_scaled(row: JobRow) -> bool:
    """Return whether what waits of a job waits for calls alone: there is nothing that it lacks."""
    return row.reason == SCALED.name
