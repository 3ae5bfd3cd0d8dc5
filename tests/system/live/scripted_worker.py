"""A worker of a few lines, over plain nats-py, that takes no step unless a test says so."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterable
from typing import Any, Final

import msgspec
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from moorage.schemas.codec import Decoder, encode
from moorage.schemas.frames import (
    Device,
    End,
    Goodbye,
    Held,
    Hello,
    Join,
    Place,
    Renew,
    Report,
    ReportFrame,
    Start,
    Wanted,
)
from moorage.schemas.subjects import Subjects
from tests.asking import answered
from tests.system.live.stack import ANSWER_S, TRY_S
from tests.waiting import until

RENEW_S: Final = 0.2
_decode_wanted: Final = Decoder[Wanted](Wanted)
#: what is still to be reported of an attempt, by the phase it is in
_REST: Final[dict[str, tuple[str, ...]]] = {
    "placed": ("claimed", "started", "exited", "freed"),
    "claimed": ("started", "exited", "freed"),
    "running": ("exited", "freed"),
    "exited": ("freed",),
}
_PHASE_AFTER: Final = {"claimed": "claimed", "started": "running", "exited": "exited"}


class ScriptedWorker:
    """Joins, renews and remembers what it is asked; reports leave when `tell` is called.

    `placed`, `started` and `ended` hold every frame's items in order of arrival, repeats too.
    """

    def __init__(self, nc: Client, subjects: Subjects, worker: str, gpus: int, machine: str = "") -> None:
        self.nc = nc
        self.subjects = subjects
        self.worker = worker
        self.machine = machine or f"machine-{worker}"
        self.hello = Hello(
            worker,
            "boot-1",
            drivers=["process"],
            labels={"host": worker},
            cpu_milli=1_000_000,
            memory_mib=1_000_000,
            gpu_pool=[Device(i, "nvidia", "NVIDIA H100", f"GPU-{worker}-{i:016x}", 81559) for i in range(gpus)],
            simulated=True,
        )
        self.join_n = 0
        self.session = ""
        self.no = 0
        self.held: dict[tuple[str, int, int], tuple[Place, str]] = {}
        self.placed: list[Place] = []
        self.started: list[Start] = []
        self.ended: list[End] = []
        self.epochs: set[int] = set()
        self.answers: list[dict[str, Any]] = []
        self._renew_n = itertools.count(1)
        self._renewing: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()

    async def open(self) -> None:
        await self.nc.subscribe(self.subjects.worker(self.worker, "wanted"), cb=self._on_wanted)
        for _ in range(2):  # nats-py sends the first PING ahead of the subscription
            await self.nc.flush()
        await self.join()
        self._renewing = asyncio.create_task(self._renew())

    async def close(self) -> None:
        self._closing.set()
        if self._renewing is not None:
            await self._renewing

    async def ask(self, verb: str, frame: object, deadline_s: float = ANSWER_S) -> dict[str, Any]:
        """Ask until it is answered; the answer as plain data."""
        subject, payload = self.subjects.worker(self.worker, verb), encode(frame)
        answer = await answered(self.nc, subject, payload, deadline_s, TRY_S)
        return dict(msgspec.json.decode(answer.data))

    async def join(self, reports: Iterable[Report] = (), machine: str = "") -> dict[str, Any]:
        self.join_n += 1
        frame = Join(
            machine or self.machine,
            self.hello.boot,
            self.join_n,
            self.hello,
            reports=list(reports),
            holding=self._holding(),
        )
        answer = await self.ask("join", frame)
        if answer["kind"] == "joined":
            self.session, self.no = answer["session"], 0
        return answer

    async def goodbye(self) -> dict[str, Any]:
        return await self.ask("join", Goodbye(self.session))

    def _holding(self) -> list[Held]:
        return [
            Held(place.tenant, place.job, place.replica, place.attempt, place.fence, phase)
            for place, phase in self.held.values()
            if phase != "placed"
        ]

    async def _renew(self) -> None:
        while not self._closing.is_set():
            frame = Renew(self.session, next(self._renew_n), self.no, held=self._holding())
            with contextlib.suppress(nats.errors.Error):
                subject = self.subjects.worker(self.worker, "renew")
                answer = await self.nc.request(subject, encode(frame), timeout=TRY_S)
                self.answers.append(msgspec.json.decode(answer.data))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RENEW_S):
                    await self._closing.wait()

    async def _on_wanted(self, msg: Msg) -> None:
        wanted = _decode_wanted(msg.data)
        if wanted.session != self.session:
            return
        self.epochs.add(wanted.epoch)
        for place in wanted.place:
            self.placed.append(place)
            self.held.setdefault((place.job, place.replica, place.fence), (place, "placed"))
        self.started += wanted.start
        self.ended += wanted.end

    async def wants(self, job: str, replica: int = 0) -> Place:
        """Wait for a placement of this replica."""

        def found() -> Place | None:
            return next(
                (place for place, _ in self.held.values() if (place.job, place.replica) == (job, replica)), None
            )

        place = await until(found, ANSWER_S, f"{self.worker}: a placement of {job}/{replica}")
        assert isinstance(place, Place)
        return place

    def fences(self, job: str, replica: int = 0) -> set[tuple[int, int]]:
        """Every (attempt, fence) that was ever asked for."""
        return {(p.attempt, p.fence) for p in self.placed if (p.job, p.replica) == (job, replica)}

    def report(self, kind: Any, place: Place, code: int = 0, detail: str = "") -> Report:
        return Report(kind, place.tenant, place.job, place.replica, place.attempt, place.fence, code, detail)

    def next_frame(self, *reports: Report) -> ReportFrame:
        """The next numbered frame; counts as told, so that a test may lose its answer."""
        self.no += 1
        for report in reports:
            key = (report.job, report.replica, report.fence)
            if report.kind in _PHASE_AFTER:
                self.held[key] = (self.held[key][0], _PHASE_AFTER[report.kind])
            else:
                self.held.pop(key, None)
        return ReportFrame(self.session, self.no, list(reports))

    async def tell(self, *reports: Report) -> None:
        """Send reports in one frame, until they are recorded."""
        frame = self.next_frame(*reports)
        answer = await self.ask("fact", frame)
        assert answer == {"kind": "recorded", "no": frame.no, "reign": answer.get("reign"), "v": 1}, answer

    async def step(self, job: str, *kinds: str, replica: int = 0) -> None:
        """Send reports about this replica's placement, a frame each."""
        place = await self.wants(job, replica)
        for kind in kinds:
            await self.tell(self.report(kind, place))

    async def finish(self, job: str, replica: int = 0) -> None:
        """Report whatever is left until the device is free."""
        place = await self.wants(job, replica)
        for kind in _REST[self.held[(job, replica, place.fence)][1]]:
            await self.tell(self.report(kind, place))


@contextlib.asynccontextmanager
async def scripted_worker(
    nc: Client, subjects: Subjects, worker: str, gpus: int, machine: str = ""
) -> AsyncIterator[ScriptedWorker]:
    one = ScriptedWorker(nc, subjects, worker, gpus, machine)
    try:
        await one.open()
        yield one
    finally:
        await one.close()
