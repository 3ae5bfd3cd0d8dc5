"""`python -m moorage.scheduler.follower.process`: the follower as a process of its own, started by the leader.

See `pipe` for what the two say to each other. It logs to stderr, which is the leader's.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from contextlib import suppress
from typing import Final

from moorage.bus.connect_logged import Refusals
from moorage.bus.connection import Connection, connect
from moorage.bus.errors import BusError
from moorage.bus.jetstream import JetStream
from moorage.scheduler.core.config import Config
from moorage.scheduler.follower.follower import Follower
from moorage.scheduler.follower.pipe import Asked, Told, decode_asked, framed, read_frame
from moorage.schemas.errors import Problem
from moorage.schemas.subjects import PREFIX_DEFAULT, Subjects
from moorage.system.logged import begin_log

#: how often the position is told
TELL_EVERY_S: Final = 1.0
#: between two cancels of a task that goes on
CANCEL_AGAIN_S: Final = 1.0
EXIT_FAILED: Final = 1

log = logging.getLogger("moorage.scheduler")


async def serve(
    target: str | None, world: str | None, prefix: str, config: Config, replicas: int, save_records: int
) -> None:
    """Follow the ledger until stdin ends. Raises `BusError` if there is no server."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, sys.stdout.buffer)
    writer = asyncio.StreamWriter(transport, protocol, None, loop)
    async with await _connect(target, "moorage-follower") as ledger, await _connect(world, "moorage-history") as users:
        at = Subjects(prefix), config, replicas, save_records
        follower = Follower(JetStream(ledger), JetStream(users), *at)

        async def send(asked: Asked | None = None) -> None:
            answer = await follower.answer(asked.question) if asked is not None else None
            told = Told(
                follower.position,
                asked.number if asked is not None else 0,
                None if isinstance(answer, Problem) else answer,
                answer if isinstance(answer, Problem) else None,
            )
            writer.write(framed(told))
            with suppress(ConnectionError):
                await writer.drain()

        async def send_often() -> None:
            while True:
                await send()
                await asyncio.sleep(TELL_EVERY_S)

        following = [asyncio.create_task(follower.run()), asyncio.create_task(send_often())]
        answering: set[asyncio.Task[None]] = set()
        try:
            while (frame := await read_frame(reader)) is not None:
                task = asyncio.create_task(send(decode_asked(frame)))
                answering.add(task)
                task.add_done_callback(answering.discard)
        finally:
            left: set[asyncio.Task[None]] = {*following, *answering}
            while left:
                for task in left:
                    task.cancel()  # again: a `wait_for` that ends at this moment swallows it (Python 3.11)
                _, left = await asyncio.wait(left, timeout=CANCEL_AGAIN_S)


async def _connect(target: str | None, name: str) -> Connection:
    """Connect, and log what the server refuses. The scheduler logs a server that does not answer."""
    refusals = Refusals(log)
    return await connect(target, name, on_error=refusals.on_error, on_regained=refusals.on_regained)


def main() -> None:
    from moorage.scheduler.settings import NATS_VARIABLE, ledger_url

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefix", default=PREFIX_DEFAULT)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--save-records", type=int, required=True)
    parser.add_argument("--history-keep", type=float, required=True)
    parser.add_argument("--history-bytes", type=int, required=True)
    parser.add_argument("--log-level", default="INFO")
    parser.add_argument("--log-format", default="text")
    arguments = parser.parse_args()
    begin_log(arguments.log_level, arguments.log_format)
    os.nice(10)
    config = Config(history_keep=arguments.history_keep, history_bytes=arguments.history_bytes)
    world = os.environ.get(NATS_VARIABLE)
    at = arguments.prefix, config, arguments.replicas, arguments.save_records
    try:
        asyncio.run(serve(ledger_url() or world, world, *at))
    except BusError as error:
        print(error, file=sys.stderr)
        sys.exit(EXIT_FAILED)


if __name__ == "__main__":
    main()
