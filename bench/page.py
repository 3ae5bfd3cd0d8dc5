"""Processor time of `moorage page` over simulated GPUs whose use changes all the time: `python -m bench.page`.

A tab is a reader of the stream of a page, which is drawn at most four times a second; it reads what it is sent, and
draws nothing. Processor time is that of the process of the page, from /proc. All tabs show the map, or with `--views`
each the next view; then the time of each view's first and second answer is measured, too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

HOSTS: Final = 125
GPUS: Final = 8
#: percent of one core that the page may take with one tab
BOUND_PERCENT: Final = 20.0
TABS: Final = (0, 1, 8, 10)
VIEWS: Final = (
    "/", "/queue", "/queue?tenant=t001", "/lanes", "/past", "/past?span=7d", "/past?tenant=t001", "/usage",
    "/worker/sim-0000", "/job/t001/runs",
)  # fmt: skip
#: what stands in the place of numbers that the stream brings
TO_COME: Final = b"The numbers are on their way."
CHARTS: Final = b"charts"
MEASURED_S: Final = 20.0
#: until frames of all hosts have come, and the first picture is drawn
WARM_S: Final = 8.0
#: until all jobs run or wait, and the leader answers as it does on other days
CALM_S: Final = 60.0
CHANGED_S: Final = 1.0
MOORAGE: Final = str(Path(sysconfig.get_path("scripts")) / "moorage")


async def _ready(process: asyncio.subprocess.Process, wanted: str) -> str:
    assert process.stderr is not None
    text = ""
    async with asyncio.timeout(120):
        while not (found := re.search(wanted, text)):
            piece = await process.stderr.read(4096)
            if not piece:
                raise RuntimeError(f"ended without {wanted}: {text}")
            text += piece.decode()
    return found[1]


async def _start(env: dict[str, str], *words: str) -> asyncio.subprocess.Process:
    quiet = asyncio.subprocess.DEVNULL
    return await asyncio.create_subprocess_exec(
        MOORAGE, *words, env=env, stdin=quiet, stdout=quiet, stderr=asyncio.subprocess.PIPE
    )


async def _change(file: Path, hosts: int) -> None:
    """Let every GPU be used otherwise, once a second."""
    drawn = random.Random(47)
    while True:
        rows = {
            f"sim-{host:04d}": {str(slot): {"percent": drawn.randrange(101)} for slot in range(GPUS)}
            for host in range(hosts)
        }
        partial = file.with_suffix(".new")
        partial.write_text(json.dumps(rows))
        partial.replace(file)
        await asyncio.sleep(CHANGED_S)


async def _tab(port: int, cookie: str, sent: list[int], view: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
    writer.write(f"GET /live{view} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nCookie: {cookie}\r\n\r\n".encode())
    try:
        while line := await reader.readline():
            if line.startswith(b"data: "):
                sent.append(len(line))
    finally:
        writer.close()


async def _numbers_s(port: int, cookie: str, view: str) -> float:
    """Return the seconds until the stream of a view has brought the numbers that its first answer left to come."""
    began_s = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
    writer.write(f"GET /live{view} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nCookie: {cookie}\r\n\r\n".encode())
    while line := await reader.readline():
        if line.startswith(b"data: ") and CHARTS in line:
            break
    writer.close()
    return time.monotonic() - began_s


async def _timed(port: int, cookie: str, view: str) -> tuple[float, bytes]:
    """Return the seconds until a view has come, and what came."""
    began_s = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
    head = f"GET {view} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nCookie: {cookie}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode())
    answer = await reader.read()
    writer.close()
    if not answer.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"{view}: {answer[:200]!r}")
    return time.monotonic() - began_s, answer


JOINED: Final = """
import sys
from moorage.client import Client

with Client() as m:
    sys.exit(sum(row.state == "up" for row in m.fleet.show().workers) < int(sys.argv[1]))
"""
#: each tenant has a job that runs and one that waits; together they hold nine GPUs of ten
SUBMITS: Final = """
import asyncio, sys
from moorage.client import AsyncClient

async def main(hosts, tenants, gpus):
    each = max(1, hosts * 9 // 10 // tenants)
    for number in range(tenants):
        async with AsyncClient(tenant=f"t{number:03}") as m:
            for name, replicas in (("runs", each), ("waits", 20)):
                await m.submit(["sleep", "36000"], gpu=f"{gpus}xH100", replicas=replicas, job=name)

asyncio.run(main(*map(int, sys.argv[1:])))
"""


async def _submit(env: dict[str, str], hosts: int, tenants: int) -> None:
    words = "-c", SUBMITS, str(hosts), str(tenants), str(GPUS)
    process = await asyncio.create_subprocess_exec(sys.executable, *words, env=env)
    if await process.wait():
        raise RuntimeError("not all jobs could be submitted")


async def _until_joined(env: dict[str, str], hosts: int) -> None:
    """Wait until all hosts have joined: on a busy machine a thousand take minutes."""
    while True:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", JOINED, str(hosts), env=env)
        if not await process.wait():
            return
        await asyncio.sleep(1)


async def _enter(port: int, key: str) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET /?key={key} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n".encode())
    answer = (await reader.read()).decode()
    writer.close()
    found = re.search(r"set-cookie: ([^;]+)", answer)
    if found is None:
        raise RuntimeError(f"no cookie: {answer}")
    return found[1]


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def run(hosts: int, tenants: int, views: Sequence[str]) -> dict[int, tuple[float, float, float]]:
    """Return percent of a core, frames a second and kB a second, each of one tab, by the number of tabs."""
    found: dict[int, tuple[float, float, float]] = {}
    with tempfile.TemporaryDirectory(prefix="moorage-bench-") as name:
        folder = Path(name) / "up"
        env = {"PATH": os.environ.get("PATH", ""), "HOME": name, "MOORAGE_HOME": str(folder)}
        up = await _start(env, "up", "--open", "--simulate", f"1x{GPUS}xL40S", "--data", str(folder), "--port", "0")
        page = worker = None
        changing = None
        try:
            url = await _ready(up, r"server +(nats://\S+)[\s\S]*Ctrl-C ends")
            words = "--nats", url, "--state", str(Path(name) / "many"), "--simulate", f"{hosts}x{GPUS}xH100"
            worker = await _start(env, "worker", *words)
            await _until_joined(env, hosts)
            faults = next((Path(name) / "many").rglob("faults.json"), Path(name) / "many" / "faults.json")
            changing = asyncio.create_task(_change(faults, hosts))
            await _submit(env, hosts, tenants)
            page = await _start(env, "page", "--listen", "0")
            port, key = (await _ready(page, r"page at http://127.0.0.1:(\S+) \(until")).split("/?key=")
            cookie = await _enter(int(port), key)
            await asyncio.sleep(CALM_S if len(views) > 1 else 0)
            for view in views if len(views) > 1 else ():
                first_s, answer = await _timed(int(port), cookie, view)
                came = f", numbers {await _numbers_s(int(port), cookie, view):.3f} s later" if TO_COME in answer else ""
                second_s, answer = await _timed(int(port), cookie, view)
                size = len(answer) // 1000
                print(f"{view:20} first {first_s:.3f} s{came}, then {second_s:.3f} s, {size} kB", flush=True)
            for tabs in TABS:
                sent: list[int] = []
                reading = [
                    asyncio.create_task(_tab(int(port), cookie, sent, views[at % len(views)])) for at in range(tabs)
                ]
                await asyncio.sleep(WARM_S)
                sent.clear()
                began_s, before_s = time.monotonic(), _cpu_s(page.pid)
                await asyncio.sleep(MEASURED_S)
                wall_s = time.monotonic() - began_s
                used = 100 * (_cpu_s(page.pid) - before_s) / wall_s
                each = max(tabs, 1)
                found[tabs] = used, len(sent) / wall_s / each, sum(sent) / 1000 / wall_s / each
                for task in reading:
                    task.cancel()
                await asyncio.gather(*reading, return_exceptions=True)
        finally:
            if changing is not None:
                changing.cancel()
            for process in (page, worker, up):
                if process is not None and process.returncode is None:
                    process.terminate()
                    await process.communicate()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit code 1 when the bound is broken")
    parser.add_argument("--hosts", type=int, default=HOSTS, help="hosts with eight GPUs each")
    parser.add_argument("--tenants", type=int, default=1)
    parser.add_argument("--views", action="store_true", help="each tab shows another view, and views are timed")
    arguments = parser.parse_args()
    found = asyncio.run(run(arguments.hosts, arguments.tenants, VIEWS if arguments.views else ("/",)))
    print("| tabs | percent of a core | frames a second | kB a second, each tab |")
    print("| ---: | ---: | ---: | ---: |")
    for tabs, (used, frames, sent) in found.items():
        print(f"| {tabs} | {used:.1f} | {frames:.1f} | {sent:.0f} |")
    return 1 if arguments.check and found[1][0] > BOUND_PERCENT else 0


if __name__ == "__main__":
    sys.exit(main())
