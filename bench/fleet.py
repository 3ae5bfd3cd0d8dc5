"""A fleet of simulated workers as a process, for measurements: `fleet.py URL STATE 256x8xH100 noop`.

The production agents and drivers; beside them only a note of when each attempt was started, asked for on
`bench.starts`. The name of a measured job ends in the monotonic microseconds at which it was submitted.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from pathlib import Path

import msgspec
import uvloop

from moorage.bus.transport import Delivery
from moorage.system.collector import leave_what_stays
from moorage.worker.agent.run import start
from moorage.worker.driver import Assignment, Driver
from moorage.worker.settings import WorkerSettings

STARTS = "bench.starts"


async def main() -> None:
    url, state, word, driver = sys.argv[1:]
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    worker = await start(WorkerSettings(Path(state), simulate=word, drivers=(driver,), stream_output=False), url)
    waits_us: list[int] = []
    for agent in worker.agents:
        for each in agent.drivers.values():
            _note_starts(each, waits_us)

    def on_ask(delivery: Delivery) -> None:
        payload = msgspec.json.encode(waits_us)
        waits_us.clear()
        sending.append(asyncio.ensure_future(worker.connection.send([(delivery.reply, payload, "")])))

    sending: list[asyncio.Future[int]] = []
    await worker.connection.subscribe(STARTS, on_ask)
    print(len(worker.agents), flush=True)
    leave_what_stays()
    await stop.wait()
    await worker.stop()


def _note_starts(driver: Driver, waits_us: list[int]) -> None:
    begin = driver.start

    def noted(assignments: list[Assignment]) -> None:
        now_us = time.monotonic_ns() // 1000
        for assignment in assignments:
            _, _, stamp = assignment.name[1].rpartition("-")
            if stamp.isdigit():
                waits_us.append(now_us - int(stamp))
        begin(assignments)

    driver.start = noted  # type: ignore[method-assign]


if __name__ == "__main__":
    uvloop.run(main())
