"""Runs an engine under a virtual clock: records are acknowledged at once, and simulated workers obey its frames.

Every step uses the engine's normal methods (`offer`, `build`, `prepare_outputs`, `commit`), as on a real fleet. Network
delays, claims that a pool refuses and lost workers are not modeled. The monotonic clock stands still, since liveness
does not matter here; all decisions use ledger time, which jumps from event to event.
"""

from __future__ import annotations

import itertools
import math
from heapq import heappop, heappush
from typing import Final

import msgspec

from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.events import FromWorker
from moorage.scheduler.core.ledger.state import AT_RUNNING, Attempt
from moorage.scheduler.core.outputs.outputs import Outputs
from moorage.scheduler.tflops import resolved
from moorage.schemas.attempt import AttemptName, name_in
from moorage.schemas.codec import Decoder, canonical
from moorage.schemas.frames import End, Freeze, Place, Report, ReportFrame, ReportKind, Start, Wanted
from moorage.schemas.job import Request

#: time alone may make a job overdue or decay usage: the core is asked again at most this often
LOOK_MS: Final = 60_000
#: with more records than this in one moment, a decision never settles, which is a defect
RECORDS_MAX: Final = 100_000

_decode_wanted: Final[Decoder[Wanted]] = Decoder(Wanted)


class Held(msgspec.Struct, gc=False):
    """An attempt on its worker. `slots` are positions in the worker's pool; empty if the attempt was taken over."""

    tenant: str
    job: str
    replica: int
    attempt: int
    fence: int
    worker: str
    slots: list[int]
    running: bool = False

    @property
    def name(self) -> AttemptName:
        return name_in(self)


class Play:
    """Drives `engine` from ledger time `time_ms` on. Subclasses say how long attempts run (`runs_ms`)."""

    def __init__(self, engine: Engine, time_ms: int, mono_ms: int = 0) -> None:
        self.engine = engine
        self.time_ms = time_ms
        self.records = 0
        self.held: dict[AttemptName, Held] = {}
        self._mono_ms = mono_ms
        self._ends: list[tuple[int, int, AttemptName]] = []
        self._order = itertools.count()
        self._reports: dict[str, list[Report]] = {}  # by worker, in the order of reporting

    # ------------------------------------------------------------------------------- what a player decides

    def runs_ms(self, held: Held) -> int | None:
        """Return how long an attempt runs from now, in ms; None if it does not end by itself."""
        raise NotImplementedError

    def ends(self, held: Held) -> tuple[int, str]:
        """Return the exit code and reason of an attempt that ends by itself."""
        return 0, "exit"

    def end_attempt(self, held: Held) -> None:
        """Simulate that an attempt must end: it does so at once, as most programs do at SIGTERM."""
        self._finish(held, -15, "end")

    def on_placed(self, held: Held) -> None:
        """Called when an attempt holds devices."""

    def on_started(self, held: Held) -> None:
        """Called when an attempt runs."""

    def on_left(self, held: Held) -> None:
        """Called when an attempt holds nothing any more."""

    def on_outputs(self, out: Outputs) -> None:
        """Called when a record was folded."""

    # ------------------------------------------------------------------------------------------- the clock

    def next_ms(self) -> int | None:
        """Return the ledger time of the next event; None if nothing more will happen."""
        times = []
        if self._ends:
            times.append(self._ends[0][0])
        timer = self.engine.next_timer_ms
        if timer != math.inf:
            times.append(max(self.time_ms, int(timer)))
        data_ms = self.engine.planner.order.data.next_ms()
        if self.time_ms < data_ms < math.inf:  # until when a job waits for a host with its data
            times.append(int(data_ms))
        return min([*times, *self._windows_ms()], default=None)

    def _windows_ms(self) -> list[int]:
        """Return the ledger times ahead at which a drain begins or is over, or a closed worker opens by itself."""
        state = self.engine.state
        if not state.windows and not state.shut:
            return []
        windows = [worker.window for worker in state.windows.values() if worker.window is not None]
        times = [at_ms for window in windows for at_ms in (window.from_ms, window.leave_ms, window.until_ms)]
        return [at_ms for at_ms in (*times, *(each.until_ms for each in state.shut.values())) if at_ms > self.time_ms]

    def next_pass_ms(self) -> float:
        """Return the ledger time at which time alone may let the core place more; infinity for never.

        The time is at least `LOOK_MS` from now.
        """
        return max(self.engine.planner.next_ms(), self.time_ms + LOOK_MS)

    def go_to(self, time_ms: int) -> None:
        """Advance time to a moment, and end the attempts that end then; `settle` must follow."""
        if any(at_ms <= time_ms for at_ms in self._windows_ms()):
            self.engine.look_at_once()  # the monotonic clock, by which it looks, stands still
        self.time_ms = time_ms
        while self._ends and self._ends[0][0] <= time_ms:
            held = self.held.get(heappop(self._ends)[2])
            if held is not None:
                self._finish(held, *self.ends(held))

    def settle(self) -> None:
        """Write records until nothing more happens at this moment. Raises RuntimeError after `RECORDS_MAX` records."""
        for _ in range(RECORDS_MAX):
            talked = self._offer_reports()
            if not self.record() and not talked and not self.engine.urgent:
                return
        raise RuntimeError(f"the core did not settle within {RECORDS_MAX} records at {self.time_ms} ms")

    def record(self) -> bool:
        """Build one record, acknowledged at once; return whether it sent anything to a worker."""
        self.engine.build(self.time_ms, self._mono_ms)
        return self.commit()

    def commit(self) -> bool:
        """Acknowledge the record in flight; return whether it sent anything to a worker."""
        self.engine.prepare_outputs(self._mono_ms)
        out = self.engine.commit(self.engine.seq_in_flight, self._mono_ms)
        self.records += 1
        self.on_outputs(out)
        for _, payload, _ in out.messages:
            self._obey(_decode_wanted(payload))
        return bool(out.messages)

    def submit(self, tenant: str, prefix: str, request: Request, reply: str = "", *, job: str | None = None) -> str:
        """Offer a request under the id `job`, or an unused one that begins with `prefix`, and return the id."""
        engine = self.engine
        unused = (f"{prefix}-{n}" for n in itertools.count() if engine.state.job(tenant, f"{prefix}-{n}") is None)
        name = job or next(unused)
        body = resolved(canonical(msgspec.structs.replace(request, job=job)), engine.config.tflops_file)
        event = engine.submitted(tenant, body, lambda: name, reply, json=False)
        event.request = msgspec.structs.replace(event.request, if_seq=None)
        engine.offer(event)
        return name

    # ------------------------------------------------------------------------------------------ the workers

    def take_over(self, attempt: Attempt) -> Held:
        """Hold an attempt that is on its worker already, and return it; no end is set, and its slots are left out."""
        held = Held(*attempt.name, attempt.worker.id, [], attempt.phase == AT_RUNNING)
        self.held[held.name] = held
        return held

    def _obey(self, frame: Wanted) -> None:
        for place in frame.place:
            self._place(frame.worker, place)
        for start in frame.start:
            held = self._held_of(start)
            if held is not None and not held.running:
                self.start(held)
        for end in frame.end:
            held = self._held_of(end)
            if held is not None:
                self.end_attempt(held)
        for freeze in frame.freeze:
            held = self._held_of(freeze)
            if held is not None and (freeze.on or freeze.n):
                self.send_report("frozen" if freeze.on else "resumed", held, code=freeze.n)

    def _held_of(self, order: Start | End | Freeze) -> Held | None:
        return self.held.get(name_in(order))

    def _place(self, worker: str, place: Place) -> None:
        held = Held(*name_in(place), worker, place.slots)
        if held.name in self.held:
            return
        self.held[held.name] = held
        self.on_placed(held)
        self.send_report("claimed", held, f"{worker}:29500" if place.hold and not place.replica else "")
        if not place.hold:
            self.start(held)

    def start(self, held: Held) -> None:
        held.running = True
        self.send_report("started", held)
        self.on_started(held)
        self.end_in(held, self.runs_ms(held))

    def end_in(self, held: Held, runs_ms: int | None) -> None:
        """Let an attempt end by itself after `runs_ms` ms; never for None."""
        if runs_ms is not None:
            heappush(self._ends, (self.time_ms + runs_ms, next(self._order), held.name))

    def ends_ms(self) -> dict[AttemptName, int]:
        """Return the ledger time of each attempt's end; attempts without a known end are left out.

        Attempts that have left may be included.
        """
        return {name: at_ms for at_ms, _, name in sorted(self._ends, reverse=True)}

    def _finish(self, held: Held, code: int, why: str) -> None:
        del self.held[held.name]
        self.on_left(held)
        if not held.running:
            self.send_report("withdrawn", held)
            return
        self.send_report("exited", held, why, code)
        self.send_report("freed", held)

    def send_report(self, kind: ReportKind, held: Held, detail: str = "", code: int = 0) -> None:
        """Have a worker report this; the report is offered with the next record."""
        self._reports.setdefault(held.worker, []).append(Report(kind, *held.name, code, detail))

    def _offer_reports(self) -> bool:
        told, self._reports = self._reports, {}
        for worker_id, reports in told.items():
            worker = self.engine.state.workers[worker_id]
            frame = ReportFrame(worker.session, worker.no + 1, reports)
            self.engine.offer(FromWorker(worker_id, frame, "", False))
        return bool(told)
