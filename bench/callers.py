"""Callers: closed loop with so many in flight, or open loop at a rate; through the endpoint or the durable queue."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import msgspec

from bench.stack import SUBJECTS, Stack
from moorage.bus.connection import Connection, connect
from moorage.bus.errors import BusError
from moorage.bus.inbox import Mux
from moorage.bus.transport import Delivery

TENANTS = 4
#: calls of a service that are answered before one is measured
WARM = 200
BODY = (
    b'{"job":"%s","replicas":1,"priority":50,"events":"tenant",'
    b'"gpu":{"count":1,"model":["H100"],"min_memory_mib":70000},'
    b'"resources":{"cpu_milli":1000,"memory_mib":1024},'
    b'"run":{"driver":"noop","env":{"SEED":"7","BATCH":"8"},"timeout_s":3600},"retries":2,"labels":{"team":"a"}}'
)
OVER = b'"state":"SUCCEEDED","ledger"'


class Callers:
    """`ended` counts successes by the tenants' event frames."""

    def __init__(self, stack: Stack, connection: Connection, mux: Mux, body: bytes = BODY, tenants: int = TENANTS):
        self.stack = stack
        self.connection = connection
        self.mux = mux
        self.body = body
        self.tenants = tenants
        self.made = 0
        self.ended = 0
        self._some = asyncio.Event()

    @classmethod
    async def open(cls, stack: Stack, body: bytes = BODY, tenants: int = TENANTS) -> Callers:
        connection = await connect(stack.url, "bench callers")
        self = cls(stack, connection, await Mux.open(connection), body, tenants)
        await connection.subscribe(SUBJECTS.events("*"), self._on_events)
        return self

    async def close(self) -> None:
        await self.mux.close()
        await self.connection.close()

    def _on_events(self, delivery: Delivery) -> None:
        self.ended += delivery.data.count(OVER)
        self._some.set()

    def next(self) -> tuple[str, bytes]:
        self.made += 1
        name = b"b%07d-%d" % (self.made, time.monotonic_ns() // 1000)
        return f"t{self.made % self.tenants}", self.body % name

    async def _call(self) -> None:
        tenant, body = self.next()
        answer = await self.mux.request(SUBJECTS.api(tenant, "submit"), body, 60.0)
        if b'"accepted"' not in answer:
            raise RuntimeError(answer)

    async def closed_loop(self, jobs: int, in_flight: int) -> None:
        """`jobs` submits, each caller sending its next once the one before is answered."""
        end = self.made + jobs

        async def caller() -> None:
            while self.made < end:
                await self._call()

        await asyncio.gather(*(caller() for _ in range(in_flight)))

    async def open_loop(self, jobs: int, per_s: float) -> None:
        began, calls = time.monotonic(), []
        for number in range(jobs):
            await asyncio.sleep(max(0.0, began + number / per_s - time.monotonic()))
            calls.append(asyncio.create_task(self._call()))
        await asyncio.gather(*calls)

    async def durable(self, jobs: int, in_flight: int) -> None:
        """The other door: a JetStream publish a request, each awaited."""
        end = self.made + jobs

        async def caller() -> None:
            while self.made < end:
                tenant, body = self.next()
                answer = await self.connection.request(SUBJECTS.request(tenant, "submit"), body, 60.0)
                if b'"seq"' not in answer.data:
                    raise RuntimeError(answer.data)

        await asyncio.gather(*(caller() for _ in range(in_flight)))

    async def until_ended(self, jobs: int) -> None:
        async with asyncio.timeout(120):
            while self.ended < jobs:
                self._some.clear()
                await self._some.wait()

    async def waits_ms(self) -> list[float]:
        """Submit to start of every job since the last question, in ms, sorted; measured at the worker."""
        answer = await self.connection.request("bench.starts", b"", 30.0)
        waits: list[Any] = msgspec.json.decode(answer.data)
        return sorted(wait / 1000 for wait in waits)


def quantile(values: list[float], at: float) -> float:
    return values[min(len(values) - 1, int(len(values) * at))]


async def warmed(link: Connection, subject: str, data: bytes) -> None:
    """Call a service until it has answered `WARM` calls; nobody may serve yet. Raises TimeoutError after a minute."""
    async with asyncio.timeout(60):
        warm = 0
        while warm < WARM:
            with contextlib.suppress(BusError):
                await link.request(subject, data, 5.0)
                warm += 1
                continue
            await asyncio.sleep(0.1)
