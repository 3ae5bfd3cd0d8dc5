"""Keeps what a screen over a fleet has heard, and makes a `View` of it. It asks nobody and reads no clock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from moorage.client.durations import age
from moorage.client.view.view import Counts, Fit, Idle, Trouble, View, Waiting, WorkerCells
from moorage.schemas.actors import words
from moorage.schemas.cells import FOREIGN, FREE, FROZEN, GUEST, LEASED, LOST, NOT_LENT, SICK
from moorage.schemas.frames import FleetFrame, Hello, Load, Standing
from moorage.schemas.job import QUEUED
from moorage.schemas.units import many

#: the leader sends two frames a second; after so long a silence nobody leads, or the network is cut
SILENT_MS: Final = 5_000
#: a scheduler that has not said so for this long does not lead any more
STANDING_MS: Final = 10_000
#: a worker tells its load every 2 s; what is older is not shown
LOAD_MS: Final = 10_000
#: health of a slot that closes it, in the order of `SlotLoad`; the others are told by the leader
_WELL: Final = frozenset({"ok", "probation"})
#: stopped in order: its GPUs are no part of the fleet
LEFT: Final = "left"
#: states of workers that are as an operator wants them
_OPEN: Final = frozenset({"up", "claimed-locally"})
_AS_WANTED: Final = _OPEN | {LEFT}
_GRAVE: Final = frozenset({"lost", "stale", "not-heard", "starts-fail"})
_BY_SIGN: Final = {
    FREE: "free",
    LEASED: "leased",
    FROZEN: "frozen",
    GUEST: "frozen",
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
        self._fleet: dict[str, Any] | None = None
        self._jobs: dict[str, list[dict[str, Any]]] = {}
        self._counts: dict[str, dict[str, int]] = {}
        self._why: dict[tuple[str, str], dict[str, Any]] = {}
        self._idle_since: dict[tuple[str, str, str], int] = {}
        self._idle: list[Idle] = []
        self.unseen: list[str] = []
        self.sees_fleet = True  # whether the leader's frames may be heard

    @property
    def frame(self) -> FleetFrame | None:
        """The leader's last frame; None before the first."""
        return self._frame

    @property
    def loads(self) -> frozenset[str]:
        """The workers whose load was heard."""
        return frozenset(self._loads)

    # ----------------------------------------------------------------------------------------------- what is fed

    def hear(self, frame: FleetFrame | Hello | Load | Standing, now_ms: int) -> None:
        """Take a public frame."""
        if isinstance(frame, FleetFrame):
            if self._frame is None or frame.epoch >= self._frame.epoch:  # a leader that was deposed may speak once more
                self._frame, self._frame_ms = frame, now_ms
        elif isinstance(frame, Hello):
            self._hellos[frame.worker] = frame
        elif isinstance(frame, Load):
            self._loads[frame.worker] = now_ms, frame
        elif frame.leads:
            self._leader = now_ms, frame.scheduler

    def told_fleet(self, data: dict[str, Any]) -> None:
        """Take the leader's answer to an operator's question `fleet`."""
        self._fleet = data

    def told_jobs(self, tenant: str, data: Mapping[str, Any]) -> None:
        """Take the answer to `ls` of a tenant, of the jobs that are not over."""
        self._jobs[tenant], self._counts[tenant] = data["jobs"], data["counts"]

    def keep_tenants(self, tenants: Sequence[str]) -> None:
        """Forget the jobs of all other tenants, which have none any more."""
        for tenant in self._jobs.keys() - set(tenants):
            del self._jobs[tenant], self._counts[tenant]

    def told_why(self, tenant: str, data: dict[str, Any]) -> None:
        """Take the answer to `explain` of a waiting job."""
        self._why[tenant, data["job"]] = data

    def oldest(self) -> list[tuple[str, str]]:
        """Return tenant and id of the job of each tenant that has waited longest: those to be explained, the longest
        first."""
        first = {tenant: rows[-1] for tenant in self._jobs if (rows := self._queued(tenant))}
        for key in self._why.keys() - {(tenant, row["job"]) for tenant, row in first.items()}:
            del self._why[key]
        return [(tenant, row["job"]) for tenant, row in sorted(first.items(), key=lambda each: -each[1]["age_ms"])]

    def _queued(self, tenant: str) -> list[dict[str, Any]]:
        return [row for row in self._jobs[tenant] if row["state"] == QUEUED]

    # ----------------------------------------------------------------------------------------------- what is seen

    def view(self, now_ms: int, at_ms: int) -> View:
        """Return this moment; `at_ms` is what the wall clock says."""
        frame = self._frame
        workers = list(self._workers(now_ms))
        simulated = [worker.simulated for worker in workers]
        if not self.sees_fleet:  # then what its own jobs run on is known
            simulated = [row["simulated"] for rows in self._jobs.values() for row in rows if row["worker"]]
        return View(
            at_ms=at_ms,
            leader=self._leads(now_ms),
            epoch=0 if frame is None else frame.epoch,
            heard_ms_ago=None if frame is None else now_ms - self._frame_ms,
            simulated="all" if simulated and all(simulated) else "some" if any(simulated) else "",
            queued=0 if frame is None else frame.queued,
            running=0 if frame is None else frame.running,
            counts=counted(workers),
            use=self._use(workers),
            troubles=list(self._troubles(now_ms, workers)),
            fits=self._fits(workers),
            waiting=self._waiting(),
            idle=self._held_idle(now_ms, workers),
            workers=workers,
            jobs=sorted(
                (row for rows in self._jobs.values() for row in rows),
                key=lambda row: (row["state"] != QUEUED, -row["age_ms"]),
            ),
            unseen=list(self.unseen),
            sees_fleet=self.sees_fleet,
        )

    def _leads(self, now_ms: int) -> str:
        """Return the scheduler that leads: who said so lately, or else who answered; "" if neither is known."""
        if self._leader is not None:
            said_ms, scheduler = self._leader
            return scheduler if now_ms - said_ms < STANDING_MS else ""
        return "" if self._fleet is None else str(self._fleet["leader"])

    def _load_of(self, worker: str, now_ms: int) -> Load | None:
        heard = self._loads.get(worker)
        return heard[1] if heard is not None and now_ms - heard[0] < LOAD_MS else None

    def _workers(self, now_ms: int) -> Iterator[WorkerCells]:
        models = {} if self._fleet is None else {row["worker"]: row["models"] for row in self._fleet["workers"]}
        for row in () if self._frame is None else self._frame.workers:
            name, cells = row["worker"], row["cells"]
            hello, load = self._hellos.get(name), self._load_of(name, now_ms)
            known = models.get(name) or sorted({device.name for device in hello.gpu_pool} if hello else ())
            slots = [] if load is None or len(load.gpu_pool) != len(cells) else load.gpu_pool
            use: list[int | None] = [*(slot.util_percent for slot in slots)] or [None for _ in cells]
            yield WorkerCells(name, row["state"], row["simulated"], " + ".join(known), cells, use)

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
        used = [] if self._fleet is None else self._fleet.get("used_now", [])
        devices = sum(row["read"] for row in used)
        return round(100 * sum(row["at_work"] for row in used) / devices) if devices else None

    def _fits(self, workers: Sequence[WorkerCells]) -> list[Fit]:
        if self._fleet is not None:
            return [Fit(row["model"], row["gpus"], row["free"], row["largest"]) for row in self._fleet["fits_now"]]
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
        for tenant in self._jobs:
            rows = self._queued(tenant)
            jobs = self._counts[tenant].get(QUEUED, len(rows))
            if rows:
                oldest = rows[-1]
                why = self._why.get((tenant, oldest["job"]), {})
                found.append(
                    Waiting(
                        tenant,
                        jobs,
                        oldest["job"],
                        oldest["gpu"],
                        oldest["age_ms"],
                        more=jobs > len(rows),
                        reason=why.get("reason", ""),
                        means=why.get("means", ""),
                        because=why.get("because", "") or why.get("needs", ""),
                        starts_ms=why.get("starts_in_ms", why.get("starts", {}).get("p50_ms")),
                    )
                )
        return sorted(found, key=lambda row: -row.oldest_ms)

    def _held_idle(self, now_ms: int, workers: Sequence[WorkerCells]) -> list[Idle]:
        """Return who holds GPUs of which at least one does nothing, those that were seen so for longest first."""
        rows: list[tuple[str, str, str, str, int, int]] = []
        for jobs in self._jobs.values():
            for row in jobs:
                used = row.get("use")
                if used and not used["percent_min"]:
                    of = row["tenant"], row["job"], row["worker"], row["gpu"]
                    rows.append((*of, used["percent_min"], used["percent_max"]))
        if not self._jobs:
            for worker in workers:
                leased = [
                    use
                    for sign, use in zip(worker.cells, worker.use, strict=True)
                    if use is not None and is_leased(sign)
                ]
                if leased and not min(leased):
                    gpu = f"{leased.count(0)} of {len(leased)}"
                    rows.append(("", "", worker.worker, gpu, 0, max(leased)))
        since = self._idle_since
        self._idle_since = {row[:3]: since.get(row[:3], now_ms) for row in rows}
        found = [
            Idle(tenant, job, worker, gpu, now_ms - self._idle_since[tenant, job, worker], least, most)
            for tenant, job, worker, gpu, least, most in rows
        ]
        return sorted(found, key=lambda row: (-row.for_ms, row.most, row.tenant, row.job))

    def _troubles(self, now_ms: int, workers: Sequence[WorkerCells]) -> Iterator[Trouble]:
        """Yield what is wrong, the gravest first: nobody leads, workers that are away, GPUs that cannot be used."""
        silent_ms = now_ms - self._frame_ms
        if silent_ms > SILENT_MS and self.sees_fleet:
            old = "; what is shown here is as old" if self._frame is not None else " since this screen began"
            yield Trouble("scheduler", f"no frame of a leader for {age(silent_ms)}{old}", grave=True)
        told = list(self._told_by_leader()) if self._fleet is not None else list(self._heard(now_ms, workers))
        yield from sorted(told, key=lambda trouble: not trouble.grave)

    def _told_by_leader(self) -> Iterator[Trouble]:
        """Yield the troubles of the leader's answer, with their causes and times; a worker's state is its own."""
        assert self._fleet is not None
        state_now = {row["worker"]: row["state"] for row in (self._frame.workers if self._frame is not None else ())}
        for worker in self._fleet["workers"]:
            name = worker["worker"]
            state = state_now.get(name, worker["state"])
            if state not in _AS_WANTED:
                heard = worker.get("heard_ms_ago")
                by, drain = words(worker.get("by", ""), worker.get("said", "")), worker.get("drain") or {}
                if drain.get("why"):
                    by += f": {drain['why']}"
                more = f" (by {by})" if by else ""
                if state in _GRAVE and heard is not None:
                    more = f", heard {age(heard)} ago"
                yield Trouble(name, f"{state}{more}", grave=state in _GRAVE)
            if (fails := worker.get("starts_fail")) is not None:
                yield Trouble(name, f"jobs fail to start: {fails['why']}", grave=True)
            for down in worker.get("drivers_down", ()):
                since = age(1000 * down["for_s"])
                yield Trouble(name, f"driver {down['driver']} is down: {down['why']}, since {since}", grave=True)
            for row in worker.get("troubles", ()):
                detail = row.get("detail", "")
                what = f"used by {detail}" if row["kind"] == "foreign" else f"{row['kind']}: {detail}".rstrip(": ")
                since = f", since {age(row['since_ms'])}" if "since_ms" in row else ""
                yield Trouble(f"{name} GPU {row['slot']}", what + since)

    def _heard(self, now_ms: int, workers: Sequence[WorkerCells]) -> Iterator[Trouble]:
        """Yield what the public frames say alone: states of workers, signs of GPUs, and the loads' words for them."""
        for worker in workers:
            if worker.state not in _AS_WANTED:
                yield Trouble(worker.worker, worker.state, grave=worker.state in _GRAVE)
            load = self._load_of(worker.worker, now_ms)
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
