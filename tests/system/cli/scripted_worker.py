"""A worker of a few lines, over plain nats-py, whose renewals hold what a test says: for drift."""

from __future__ import annotations

import asyncio
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg

from moorage.schemas.codec import Decoder, encode
from moorage.schemas.errors import Problem
from moorage.schemas.frames import (
    Device,
    Fact,
    FactAck,
    FactFrame,
    Goodbye,
    Held,
    Hello,
    Join,
    Joined,
    Place,
    Renew,
    Renewed,
    Wanted,
)
from moorage.schemas.subjects import Subjects
from moorage.worker.drivers.conformance import plain_nats

_decode_joined = Decoder[Joined | Problem](Joined | Problem)
_decode_renewed = Decoder[Renewed | Problem](Renewed | Problem)
_decode_ack = Decoder[FactAck | Problem](FactAck | Problem)
_decode_wanted = Decoder[Wanted](Wanted)


class ScriptedWorker:
    """`placed` are the placements that came; it acts on none by itself."""

    def __init__(self, url: str, worker: str) -> None:
        self.worker = worker
        self.placed: list[Place] = []
        self.session = ""
        self._url = url
        self._subjects = Subjects()
        self._n = 0
        self._no = 0
        self._nc: Client | None = None
        self._held: tuple[Held, ...] = ()
        self._turn = asyncio.Lock()
        self._renewing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> ScriptedWorker:
        self._nc = await plain_nats.connect(self._url)
        await self._nc.subscribe(self._subjects.worker(self.worker, "wanted"), cb=self._on_wanted)
        hello = Hello(
            self.worker,
            "boot-1",
            drivers=["process"],
            labels={"only": self.worker},
            cpu_milli=1000,
            memory_mib=1024,
            gpu_pool=[Device(0, "nvidia", "NVIDIA Drifter", f"SIM-{self.worker}", 1024)],
            simulated=True,
        )
        joined = _decode_joined(await self._ask("join", Join(f"machine-{self.worker}", "boot-1", 1, hello)))
        assert isinstance(joined, Joined), joined
        self.session = joined.session
        await self.renew()
        self._renewing = asyncio.create_task(self._renew_on())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._nc is not None
        if self._renewing is not None:
            self._renewing.cancel()
        await self._ask("join", Goodbye(self.session))
        await self._nc.close()

    async def renew(self, *held: Held) -> None:
        """Say that it holds these from now on."""
        self._held = held
        await self._renew()

    async def _renew(self) -> None:
        async with self._turn:
            self._n += 1
            frame = Renew(self.session, self._n, self._no, held=list(self._held))
            renewed = _decode_renewed(await self._ask("renew", frame))
        assert isinstance(renewed, Renewed), renewed

    async def _renew_on(self) -> None:
        """A test may last longer than a lease."""
        while True:
            await asyncio.sleep(2)
            await self._renew()

    async def tell(self, *facts: Fact) -> None:
        async with self._turn:
            self._no += 1
            acknowledged = _decode_ack(await self._ask("fact", FactFrame(self.session, self._no, list(facts))))
        assert isinstance(acknowledged, FactAck), acknowledged

    async def _ask(self, verb: str, frame: Any) -> bytes:
        assert self._nc is not None
        answer = await self._nc.request(self._subjects.worker(self.worker, verb), encode(frame, json=False), timeout=60)
        return answer.data

    async def _on_wanted(self, msg: Msg) -> None:
        self.placed += _decode_wanted(msg.data).place


def fact(kind: Any, place: Place, **fields: Any) -> Fact:
    return Fact(kind, place.tenant, place.job, place.replica, place.attempt, place.fence, **fields)
