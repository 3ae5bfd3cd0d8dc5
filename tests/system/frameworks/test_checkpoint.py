"""A launcher's ranks all save: on the checkpoint signal of a drain, and on SIGTERM under torchrun alone."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from moorage.client import AsyncClient, AsyncJob
from tests.system.cli.node import Node
from tests.system.frameworks.gangs import from_page, variables
from tests.waiting import until, until_state

pytestmark = pytest.mark.slow

ANSWER_S: Final = 90.0
TRAIN: Final = from_page("checkpoint-before-a-time-out", "train_ranks.py")
#: the same with Open MPI in place of torch
TRAIN_MPI: Final = """
import os
import signal
import time
from pathlib import Path

from mpi4py import MPI

world = MPI.COMM_WORLD
asked = []
signal.signal(signal.SIGUSR1, lambda number, frame: asked.append(number))
world.Barrier()  # all can be asked
checkpoint = Path(f"{os.environ['CHECKPOINT']}.{world.Get_rank()}")
step = 0
while step < 30:
    time.sleep(0.05)
    step += 1
    if world.allreduce(len(asked)):
        checkpoint.write_text(str(step))
        world.Barrier()
        os._exit(75)  # without MPI_Finalize, in which ranks wait for each other, too
"""
#: command, environment and program of each launcher, and its status where its ranks exit with 75
LAUNCHERS: Final = {
    "torchrun": ("torchrun --standalone --nproc-per-node=2", "torch", TRAIN, "1"),
    "Open MPI": ("mpirun -n 2 python", "openmpi", TRAIN_MPI, "75"),
    "MPICH": ("mpirun -n 2 python", "mpich", TRAIN_MPI, "75"),
    "MPICH, SIGUSR2": ("mpirun -n 2 python", "mpich", TRAIN_MPI.replace("SIGUSR1", "SIGUSR2"), "75"),
}


async def train(client: AsyncClient, folder: Path, command: str, venv: str, program: str, save_s: float) -> AsyncJob:
    """Start a training without an end, whose rank 1 saves slowly, and return once all its ranks train."""
    for old, new in {
        "while step < 30:": "Path('training').touch()\nwhile True:",
        "checkpoint.write_text(": f"checkpoint.suffix == '.1' and time.sleep({save_s}); checkpoint.write_text(",
    }.items():
        assert program.count(old) == 1
        program = program.replace(old, new)
    (folder / "train.py").write_text(program)
    job = await client.submit(
        ["sh", "-c", f"{command} train.py; echo $? >status"],
        gpu="1xH100",
        cwd=folder,
        env={"CHECKPOINT": str(folder / "saved"), **variables(venv)},
        checkpoint_signal="SIGUSR2" if "SIGUSR2" in program else "SIGUSR1",
        checkpoint_before_s=600,
    )
    await until((folder / "training").exists, ANSWER_S, "the ranks train")
    return job


@pytest.mark.parametrize("name", LAUNCHERS)
async def test_each_rank_saves_on_the_checkpoint_signal(name: str, node: Node, unique: str, tmp_path: Path) -> None:
    command, venv, program, status = LAUNCHERS[name]
    async with AsyncClient(node.url, tenant=unique) as client:
        job = await train(client, tmp_path, command, venv, program, save_s=2)
        worker = (await job.show()).worker
        await client.fleet.drain(worker, within="5m")
        try:
            found = tmp_path / "status"
            said = await until(lambda: found.exists() and found.read_text(), ANSWER_S, "the launcher ends")
        finally:
            await client.fleet.uncordon(worker)
            await job.cancel()
        assert said == f"{status}\n"
        assert sorted(path.name for path in tmp_path.glob("saved.*")) == ["saved.0", "saved.1"]


@pytest.mark.parametrize(
    ("name", "save_s", "saved"), [("torchrun", 2, True), ("Open MPI", 20, False), ("MPICH", 2, True)]
)
async def test_open_mpi_gives_its_ranks_no_time_to_save_on_sigterm(
    name: str, save_s: float, saved: bool, node: Node, unique: str, tmp_path: Path
) -> None:
    command, venv, program, _ = LAUNCHERS[name]
    async with AsyncClient(node.url, tenant=unique) as client:
        job = await train(client, tmp_path, command, venv, program.replace("SIGUSR1", "SIGTERM"), save_s)
        await job.cancel()
        await until_state(job, "CANCELLED")
        assert (tmp_path / "saved.1").exists() is saved
