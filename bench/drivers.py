"""What a driver of containers costs over its engine, and what it leaves behind.

    python -m bench.drivers [--rounds 20] [--containers 200] [--kills 20]

`overhead`: a container by the engine's API itself (create, start, look until it is over, remove), beside one by the
driver from `start` to its reported end, in turns; wall time, and the processor time of all that runs on this
machine. `left`: many containers through each driver, and what is left of them, of descriptors and memory. `kills`:
agents that are killed in the middle of a run; each container is adopted or ended. A part whose number is 0 is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from moorage.schemas.attempt import AttemptName
from moorage.worker.drivers.container.docker import Docker
from moorage.worker.drivers.container.engine import Engine
from moorage.worker.drivers.container.podman import Libpod
from moorage.worker.session.attempt_messages import Ended, NotStarted, StartFailed
from moorage.worker.supervisor.client import Supervised, SupervisorError
from tests.engines import DockerEngine, engine, why_no_dockerd
from tests.podmans import podman_home, why_no_podman
from tests.system.worker.drivers import test_podman_driver as podman
from tests.system.worker.drivers.test_docker_driver import IMAGE, Rig, settings
from tests.waiting import NeverHappened, until

#: a container run in one way, by its number
Way = Callable[[int], Awaitable[None]]

PROGRAM: Final = ("sh", "-c", ":")
#: how long an attempt may take to its reported end
ENDED_S: Final = 120.0
#: an agent of its own process that starts one container after the other, until it is killed
AGENT = """
import asyncio, sys
from pathlib import Path
from moorage.worker.drivers.container.docker import DockerSettings
from tests.podmans import PodmanHome
from tests.system.worker.drivers import test_docker_driver as docker, test_podman_driver as podman

def made(name, where, state):
    if name == "podman":
        return podman.Rig(PodmanHome(where), state)
    return docker.Rig(state, DockerSettings(socket=where, pull="never"))

async def main(name, where, state, first):
    async with made(name, Path(where), Path(state)) as rig:
        for number in range(int(first), int(first) + 4):
            rig.start(f"j{number}", "sleep", "2")
            await asyncio.sleep(0.3)
        await asyncio.sleep(600)

asyncio.run(main(*sys.argv[1:]))
"""


class Kind(NamedTuple):
    """A driver on an engine that has no containers but ours. `where` says to another process which engine that is."""

    name: str
    where: Path
    rig: Callable[[Path], Rig | podman.Rig]
    containers: Callable[[], list[str]]


def busy_s() -> float:
    """Processor seconds of this machine: all that runs on it counts."""
    words = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    idle = int(words[3]) + int(words[4])
    return (sum(map(int, words[:8])) - idle) / os.sysconf("SC_CLK_TCK")


async def by_hand(api: Engine, number: int) -> None:
    host = {
        "NetworkMode": "none", "IpcMode": "private", "CapDrop": ["ALL"], "Binds": [], "Mounts": [], "PidsLimit": 4096,
        "LogConfig": {"Type": "local", "Config": {"max-size": "1048576"}},
    }  # fmt: skip
    config = {"Image": IMAGE, "Cmd": list(PROGRAM), "Env": [], "Labels": {}, "User": "", "HostConfig": host}
    container = await api.create(config, f"by-hand-{number}")
    await api.start(container)
    while True:
        state = await api.state(container)
        if state is None or state.is_over:
            break
        await asyncio.sleep(0.005)
    await api.remove(container)


async def by_driver(rig: Rig | podman.Rig, job: str) -> None:
    name = rig.start(job, *PROGRAM)
    await ended_well(rig, name)
    rig.driver.forget([name])


async def ended_well(rig: Rig | podman.Rig, name: AttemptName) -> None:
    """Return once an attempt has ended with code 0. Raises SystemExit with what was reported in its place."""
    found = await ended(rig, name)
    if found != (name, 0, "exit"):
        raise SystemExit(f"the driver {rig.driver.name} reported {found}")


async def ended(rig: Rig | podman.Rig, name: AttemptName) -> Any:
    """Return how an attempt ended. Raises SystemExit where the driver reports no end within ENDED_S."""
    kinds = (Ended, NotStarted, StartFailed)
    due_s = time.monotonic() + ENDED_S
    while time.monotonic() < due_s:
        for kind in kinds:
            if (found := rig.told(kind, name)) is not None:
                return found
        await asyncio.sleep(0.002)
    raise SystemExit(f"the driver {rig.driver.name} has reported no end of {name} within {ENDED_S:g} s")


async def overhead(docker: DockerEngine, folder: Path, rounds: int) -> None:
    """Docker by hand and by its driver, then podman by both, and again: each round changes which of the two begins."""
    figures: dict[str, list[tuple[float, float]]] = {}

    async def timed(kind: str, work: Awaitable[None]) -> None:
        wall_s, cpu_s = time.perf_counter(), busy_s()
        await work
        figures.setdefault(kind, []).append((time.perf_counter() - wall_s, busy_s() - cpu_s))

    async with contextlib.AsyncExitStack() as stack:
        api = Docker(docker.socket)
        stack.push_async_callback(api.close)
        rig = await stack.enter_async_context(Rig(folder / "overhead", settings(docker)))
        engines: dict[str, tuple[Way, Way]] = {
            "docker": (lambda number: by_hand(api, number), lambda number: by_driver(rig, f"o{number}"))
        }
        if why := why_no_podman():
            print(why)
        else:
            home = stack.enter_context(podman_home())
            home.make_image(IMAGE)
            home.make_image(podman.IMAGE)
            libpod = Libpod(home.socket)
            stack.push_async_callback(libpod.close)
            await libpod.about()
            other = await stack.enter_async_context(podman.Rig(home, folder / "podman"))
            engines["podman"] = (lambda number: by_hand(libpod, number), lambda number: by_driver(other, f"p{number}"))
        for number in range(rounds + 1):
            for name, ways in engines.items():
                turns = list(zip(("by hand", "by driver"), ways, strict=True))
                for way, work in turns[:: -1 if number % 2 else 1]:
                    await timed(f"{name} {way}", work(number))
    for name in engines:
        hand, driver = (figures[f"{name} {way}"][1:] for way in ("by hand", "by driver"))  # the first is warm-up
        for way, found in (("by hand", hand), ("by driver", driver)):
            wall, cpu = (statistics.median(each) for each in zip(*found, strict=True))
            print(f"{name} {way:9} median {wall * 1000:.0f} ms, {cpu * 1000:.0f} ms of all processors")
        pairs = list(zip(hand, driver, strict=True))
        wall, cpu = (statistics.median(b[at] / a[at] for a, b in pairs) - 1 for at in (0, 1))
        print(f"overhead of the driver {name}: {wall:+.0%} of wall time (bound 10%), median of {rounds} pairs")
        print(f"overhead of the driver {name}: {cpu:+.0%} of processor time")


async def left(kind: Kind, folder: Path, count: int) -> None:
    state = folder / f"{kind.name}-left"
    async with kind.rig(state) as rig:
        await by_driver(rig, "warm")
        before = len(os.listdir("/proc/self/fd")), memory_kib()
        names = [rig.start(f"l{number}", *PROGRAM) for number in range(count)]
        for name in names:
            await ended_well(rig, name)
        rig.driver.forget(names)
        await until(lambda: kind.containers() == [], deadline_s=120)
        with contextlib.suppress(NeverHappened):  # idle connections to the engine are closed after a while
            await until(lambda: len(os.listdir("/proc/self/fd")) <= before[0], deadline_s=60)
        after = len(os.listdir("/proc/self/fd")), memory_kib()
    folders = list((state / "folders").rglob("*"))
    print(
        f"{kind.name}, {count} containers: {len(kind.containers())} are left, folders {len(folders) - 1}, descriptors "
        f"{before[0]} -> {after[0]}, memory {before[1] / 1024:.0f} -> {after[1] / 1024:.0f} MiB"
    )


def memory_kib() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1])


async def kills(kind: Kind, folder: Path, count: int) -> None:
    state = folder / f"{kind.name}-kills"
    for number in range(count):
        words = [sys.executable, "-c", AGENT, kind.name, str(kind.where), str(state), str(4 * number)]
        seen = set(kind.containers())
        agent = await asyncio.create_subprocess_exec(*words)
        try:
            await until(lambda: not seen.issuperset(kind.containers()), deadline_s=120)  # noqa: B023
            await asyncio.sleep(0.1 * (number % 8))
        finally:
            agent.send_signal(signal.SIGKILL)
            await agent.wait()
    async with kind.rig(state) as rig:
        adopted = len(rig.living)
        for living in rig.living:
            if living.phase not in ("exited", "refused"):  # of those no end is reported again
                await ended(rig, living.name)
        with contextlib.suppress(NeverHappened):
            await until(lambda: kind.containers() == [], deadline_s=120)
    orphans = len(kind.containers())
    print(f"{kind.name}, {count} agents killed: {adopted} attempts were left to the last one, {orphans} orphans")


async def main(rounds: int, containers: int, count: int) -> None:
    if why := why_no_dockerd():
        raise SystemExit(why)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moorage-bench-")))
        docker = stack.enter_context(engine())
        docker.make_image(IMAGE)
        kinds = [Kind("docker", docker.socket, lambda state: Rig(state, settings(docker)), docker.containers)]
        if not why_no_podman():
            home = stack.enter_context(podman_home())
            home.make_image(podman.IMAGE)
            kinds.append(Kind("podman", home.folder, lambda state: podman.Rig(home, state), home.containers))
        if rounds:
            await overhead(docker, folder, rounds)
        for part, number in ((left, containers), (kills, count)):
            for kind in kinds if number else ():
                await part(kind, folder, number)
        for path in folder.iterdir():
            try:
                supervised = await Supervised.connect(path, spawn_if_absent=False)
                await supervised.shutdown(0.0)
            except SupervisorError:
                pass


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--containers", type=int, default=200)
    parser.add_argument("--kills", type=int, default=20)
    asked = parser.parse_args()
    asyncio.run(main(asked.rounds, asked.containers, asked.kills))
