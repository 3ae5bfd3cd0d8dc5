"""1,000 calls by 16 callers while two of three members are killed: the table on the page of warm services.

    python -m bench.kills

A call takes 5 ms, in batches with 0.1 ms for each; every run is noted in a file. The process of the function is killed
with SIGKILL after 300 answers, and that of another member after 600. The bare service is of nats-py's own `nats.micro`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

from moorage.bus.connection import Connection, connect
from moorage.bus.embedded import EmbeddedServer
from moorage.bus.errors import NoResponders, RequestTimeout
from moorage.schemas.service import ERROR
from moorage.system.loops import loop_factory
from tests.waiting import until

CALLS: Final = 1000
CALLERS: Final = 16
MEMBERS: Final = 3
KILL_AFTER: Final = (300, 600)
PATIENCE_S: Final = 5.0
SUBJECT: Final = "moorage.call.bench.noted"
FUNCTIONS: Final = """
import os, time

def note(items):
    number = os.open("runs", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(number, b"".join(item + b"\\n" for item in items))
    os.close(number)

def noted(item):
    note([item])
    time.sleep(0.005)
    return item[::-1]

def together(items):
    note(items)
    time.sleep(0.005 + len(items) * 0.0001)
    return [item[::-1] for item in items]
"""
MICRO: Final = f"""
import asyncio, sys
import nats, nats.micro
from functions import noted

async def main():
    link = await nats.connect(sys.argv[1])
    service = await nats.micro.add_service(link, name="noted", version="1.0.0")

    async def answer(request):
        await request.respond(noted(request.data))

    await service.add_endpoint(name="call", subject="{SUBJECT}", handler=answer)
    await link.flush()
    print("serves", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
SERVE: Final = ("-m", "moorage.cli", "serve", "--name", "noted", "--tenant", "bench", "--nats")
ROWS: Final = {
    "`moorage serve`": (*SERVE, "URL", "--queue", "32", "functions:noted"),
    "`moorage serve --batch 8,5ms`": (*SERVE, "URL", "--queue", "32", "--batch", "8,5ms", "functions:together"),
    "bare micro service, Python": ("-m", "micro", "URL"),
}


class Member:
    """A member as a process; `kill` kills the process that runs the function."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    def kill(self) -> None:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        os.kill(int(children[0]) if children else self.process.pid, signal.SIGKILL)


async def ended(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
        await process.wait()


async def caller(link: Connection, take: Callable[[], int | None], told: Counter[str], longest: list[float]) -> None:
    while (number := take()) is not None:
        data = b"%d" % number
        began = time.perf_counter()
        try:
            answer = await link.request(SUBJECT, data, PATIENCE_S)
            error = (answer.headers or {}).get(ERROR)
            told[error or ("right" if answer.data == data[::-1] else "WRONG")] += 1
        except RequestTimeout:
            told["timed out"] += 1
        except NoResponders:
            told["nobody serves"] += 1
        longest.append(time.perf_counter() - began)


async def row(words: tuple[str, ...]) -> tuple[Counter[str], int, float]:
    """Return what callers were told, how many calls ran twice, and the longest call in milliseconds."""
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moorage-kills-")))
        (folder / "functions.py").write_text(FUNCTIONS)
        (folder / "micro.py").write_text(MICRO)
        server = await EmbeddedServer.start(folder / "nats")
        stack.push_async_callback(server.stop)
        log = folder / "log"
        members = []
        for _ in range(MEMBERS):
            with log.open("ab") as out:
                argv = [server.url if word == "URL" else word for word in words]
                process = await asyncio.create_subprocess_exec(
                    sys.executable, *argv, cwd=folder, stdout=out, stderr=out
                )
            stack.push_async_callback(ended, process)
            members.append(Member(process))
        await until(lambda: log.read_text().count("serves") == MEMBERS, 60, "all members serve")
        link = await stack.enter_async_context(await connect(server.url, "caller"))
        numbers, told, longest = itertools.count(), Counter[str](), list[float]()
        victims = dict(zip(KILL_AFTER, members, strict=False))

        def take() -> int | None:
            number = next(numbers)
            if number in victims:
                victims[number].kill()
            return number if number < CALLS else None

        await asyncio.gather(*(caller(link, take, told, longest) for _ in range(CALLERS)))
        runs = Counter((folder / "runs").read_text().split())
        return told, sum(count > 1 for count in runs.values()), max(longest) * 1e3


def main() -> int:
    print("| | answered | `member-died` | `busy` | timed out | ran twice | longest |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        for name, words in ROWS.items():
            told, twice, longest_ms = runner.run(row(words))
            counts = [told.pop(what, 0) for what in ("right", "member-died", "busy", "timed out")]
            assert not told, told
            print(f"| {name} | {' | '.join(map(str, counts))} | {twice} | {longest_ms:,.0f} ms |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
