"""`python -m moorage.scheduler.buckets.process`: passes on what workers ask of buckets, and sweeps those of
checkpoints, until stdin ends.

It writes a byte to stdout from time to time while it does. It logs to stderr, which is the scheduler's.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from typing import Final

from moorage.bus.connect_logged import connect_logged
from moorage.bus.errors import BusError
from moorage.scheduler.buckets.passing import log, passing
from moorage.scheduler.buckets.sweeping import keep_sweeping
from moorage.schemas.subjects import PREFIX_DEFAULT, Subjects
from moorage.system.logged import begin_log
from moorage.system.loops import loop_factory

#: between two signs of life
TELL_EVERY_S: Final = 1.0
EXIT_FAILED: Final = 1


async def serve(target: str | None, prefix: str) -> None:
    """Pass on until stdin ends, or stdout is closed. Raises `BusError`, `ConnectionError`."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    ended = asyncio.create_task(reader.read())
    async with (
        await connect_logged(target, "moorage-buckets", log, role=" (what workers ask of buckets)") as small,
        await connect_logged(target, "moorage-pieces", log, role=" (what workers store)") as large,
        passing(small, large, Subjects(prefix)),
    ):
        sweeping = asyncio.create_task(keep_sweeping(small, Subjects(prefix)))
        try:
            while not ended.done():
                os.write(sys.stdout.fileno(), b".")
                await asyncio.wait({ended}, timeout=TELL_EVERY_S)
        finally:
            sweeping.cancel()
            await asyncio.wait({sweeping})


def main() -> None:
    from moorage.scheduler.settings import NATS_VARIABLE

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefix", default=PREFIX_DEFAULT)
    parser.add_argument("--log-level", default="INFO")
    parser.add_argument("--log-format", default="text")
    arguments = parser.parse_args()
    begin_log(arguments.log_level, arguments.log_format)
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(serve(os.environ.get(NATS_VARIABLE), arguments.prefix))
    except BusError as error:
        print(error, file=sys.stderr)
        sys.exit(EXIT_FAILED)
    except (ConnectionError, KeyboardInterrupt):  # its scheduler is gone, or a terminal ends both
        sys.exit(EXIT_FAILED)


if __name__ == "__main__":
    main()
