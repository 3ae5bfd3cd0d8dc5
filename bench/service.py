"""A service with one function, for measurements: `service.py URL STATE 8xH100 handler`.

The function returns a small JSON value that the caller checks: the number that it was given, and its own clock.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from pathlib import Path
from typing import Any

import uvloop

from moorage.worker import EmbeddedWorker, HandlerContext, WorkerSettings


async def numbered(context: HandlerContext) -> dict[str, Any]:
    return {"number": context.input, "at_ns": time.time_ns(), "words": ["a", "small", "result"]}


async def main() -> None:
    url, state, word, _ = sys.argv[1:]
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    worker = EmbeddedWorker(url, WorkerSettings(Path(state), "service", simulate=word))
    worker.handler("numbered")(numbered)
    async with worker:
        while not worker.is_live:  # noqa: ASYNC110  it has no event for it
            await asyncio.sleep(0.05)
        print(1, flush=True)
        await worker.serve(stop)


if __name__ == "__main__":
    uvloop.run(main())
