"""A moorage on this host's real GPUs, for the checks: `moorage up` with all that shares a GPU, and a client of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from moorage.client.answers import JobInfo
from moorage.client.client import AsyncClient
from moorage.client.job import AsyncJob
from moorage.schemas.gpu import GpuSpec, Share, Sharing
from moorage.schemas.job import TERMINAL
from tests.ports import free_ports
from tests.waiting import until

HOLD: Final = str(Path(__file__).with_name("hold_memory.py"))
TRAIN: Final = str(Path(__file__).with_name("train.py"))
SETTINGS: Final = """
[worker]
id = "here"
modes = ["exclusive", "time-slice"{more}]
limiter = true
auto_freeze = true
auto_freeze_s = {{ low = 3, medium = 0, high = 0 }}
{mps}
"""
ONE: Final = GpuSpec()
#: the control program of MPS
CONTROL: Final = "nvidia-cuda-mps-control"
START_S: Final = 60.0
WRITE_S: Final = 60.0
LOOK_S: Final = 0.05


def part(mode: Sharing, memory_mib: int, compute_percent: int = 100) -> GpuSpec:
    """A part of the memory of one GPU, and of its compute."""
    return GpuSpec(sharing=mode, share=Share(memory_mib, compute_percent))


class Failed(Exception):
    """A check found what it should not."""


class Skipped(Exception):
    """A check cannot be made here."""


class Rig:
    """What the checks use: a client, and a folder for what jobs write."""

    def __init__(self, client: AsyncClient, folder: Path, log: Path, launches: int) -> None:
        self.client = client
        self.folder = folder
        self.log = log
        self.launches = launches
        """Launches of a kernel in a measurement."""
        self.daemon: dict[str, str] = {}
        """The fields of a request that name the operator's MPS daemon; empty without one."""
        self._count = 0

    async def start(
        self,
        what: str,
        *more: str,
        gpu: GpuSpec | None = ONE,
        before: tuple[str, ...] = (),
        program: str = HOLD,
        **fields: Any,
    ) -> tuple[AsyncJob, Path]:
        """Run hold_memory.py, or this program, as a job; return it, and the file that it writes."""
        self._count += 1
        file = self.folder / f"{what}-{self._count}"
        # where nvidia-smi and libcuda are, on a host that keeps them in folders of its own
        env = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "STUB_NVIDIA") if name in os.environ}
        bare = ["-IS"] if program == HOLD else []
        argv = [*before, sys.executable, *bare, program, what, str(file), *more]
        job = await self.client.submit(argv, gpu=gpu, env=env, **{"grace_s": 2.0, **fields})
        return job, file

    async def wrote(self, job: AsyncJob, file: Path, limit_s: float = WRITE_S) -> Any:
        """Return what the job wrote, once it has. Raises Failed if it ends without, or takes too long."""
        ends_s = asyncio.get_running_loop().time() + limit_s
        while not file.exists():
            state = (await job.show()).state
            if state in TERMINAL and not file.exists():
                raise Failed(f"the job is {state}: {(await job.show()).why}: {await self.output(job)}")
            if asyncio.get_running_loop().time() > ends_s:
                raise Failed(f"the job wrote nothing within {limit_s:g} s; it is {state}")
            await asyncio.sleep(LOOK_S)
        return json.loads(file.read_text())

    async def answer(self, what: str, *more: str, **how: Any) -> tuple[Any, AsyncJob]:
        """Run hold_memory.py, or another program, to its end; return what it wrote."""
        job, file = await self.start(what, *more, **how)
        return await self.wrote(job, file), job

    async def output(self, job: AsyncJob) -> str:
        text = ""
        with contextlib.suppress(Exception):
            async with asyncio.timeout(5):
                async for piece in job.logs(follow=False):
                    text += piece.text
        return " ".join(text.split())[-300:]

    async def until(self, what: str, look: Callable[[], Awaitable[Any]], limit_s: float = WRITE_S) -> tuple[Any, float]:
        """Return what `look` returns once that is true, and how many seconds it took. Raises Failed after `limit_s`."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        while not (found := await look()):
            if loop.time() > began_s + limit_s:
                raise Failed(f"not within {limit_s:g} s: {what}")
            await asyncio.sleep(LOOK_S)
        return found, loop.time() - began_s

    async def ended(self, job: AsyncJob, limit_s: float = WRITE_S) -> JobInfo:
        """Return the job once it has ended, however it has."""

        async def over() -> JobInfo | None:
            shown = await job.show()
            return shown if shown.state in TERMINAL else None

        found, _ = await self.until(f"job {job.job} has ended", over, limit_s)
        ended: JobInfo = found
        return ended

    async def leased(self, job: AsyncJob) -> list[str]:
        """Return the uuids of the GPUs that the job was placed on."""
        changes = (await job.show()).changes
        return next((list(change.gpus) for change in reversed(changes) if change.gpus), [])

    async def cells(self) -> str:
        [worker] = [row for row in (await self.client.fleet.show()).workers if row.worker == "here"]
        return str(worker.cells)


@contextlib.asynccontextmanager
async def mps_daemon(pipe: Path, log: Path) -> AsyncIterator[dict[str, str]]:
    """Run an MPS daemon as an operator does, in these directories; yield the fields of a request that name it."""
    variables = {"CUDA_MPS_PIPE_DIRECTORY": str(pipe), "CUDA_MPS_LOG_DIRECTORY": str(log)}
    for folder in (pipe, log):
        folder.mkdir(parents=True)
    environment = {**os.environ, **variables}
    daemon = await asyncio.create_subprocess_exec(
        CONTROL, "-f", env=environment, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        await until((pipe / "control").exists, what="the MPS daemon listens")
        yield {"mps_pipe_dir": str(pipe), "mps_log_dir": str(log)}
    finally:
        quits = await asyncio.create_subprocess_exec(
            CONTROL, env=environment, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL
        )
        await quits.communicate(b"quit -t 5\n")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(daemon.wait(), 30)
        if daemon.returncode is None:
            daemon.kill()
            await daemon.wait()


@contextlib.asynccontextmanager
async def operators_rig(launches: int) -> AsyncIterator[Rig]:
    """Start `moorage up` beside an operator's MPS daemon in a directory of its own: no setting of a GPU changes."""
    with tempfile.TemporaryDirectory(prefix="moorage-mps-") as name:
        Path(name).chmod(0o755)
        async with mps_daemon(Path(name) / "pipe", Path(name) / "log") as daemon, rig(launches, mps="operator") as made:
            made.daemon = daemon
            yield made


@contextlib.asynccontextmanager
async def rig(launches: int, *, mps: str) -> AsyncIterator[Rig]:
    """Start `moorage up` in a folder of its own, and end it. Raises Failed with its log if it does not come up.

    `mps` is the setting of the worker; empty for none.
    """
    has_mps = mps and shutil.which(CONTROL) is not None and (mps == "operator" or os.geteuid() == 0)
    with tempfile.TemporaryDirectory(prefix="moorage-gpu-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        file, log = folder / "moorage.toml", folder / "up.log"
        file.write_text(SETTINGS.format(more=', "mps"' if has_mps else "", mps=f'mps = "{mps}"' if has_mps else ""))
        [port] = free_ports(1)
        words = ["up", "--data", str(folder / "data"), "--port", str(port), "--open", "--settings", str(file)]
        with log.open("wb") as out:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "moorage.cli", *words, stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=out
            )
        try:
            async with AsyncClient(f"nats://127.0.0.1:{port}", connect_timeout=START_S, timeout=START_S) as client:
                (folder / "jobs").mkdir()
                made = Rig(client, folder / "jobs", log, launches)

                async def is_up() -> bool:
                    if process.returncode is not None:
                        raise Failed(f"moorage up ended with {process.returncode}: {log.read_text()[-2000:]}")
                    workers = (await client.fleet.show()).workers
                    return any(row.worker == "here" and row.state == "up" for row in workers)

                await made.until(f"the worker is up: {log.read_text()[-2000:]}", is_up, START_S)
                yield made
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), 30)
            if process.returncode is None:
                process.kill()
                await process.wait()
