"""Open MPI and MPICH take each replica of a gang for a world of its own; mpirun makes one world of a replica."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tests.system.cli.node import Node
from tests.system.frameworks.gangs import ONE_WORLD, run_gang

SUM: Final = """
from mpi4py import MPI

world = MPI.COMM_WORLD
sum = world.allreduce(world.Get_rank() + 1)
# in one piece: mpirun passes on what two ranks write as it comes
print(f"rank {world.Get_rank()} of {world.Get_size()}, sum {sum}\\n", end="", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
async def test_each_replica_is_a_world_of_its_own(mpi: str, node: Node, unique: str, tmp_path: Path) -> None:
    (tmp_path / "sum.py").write_text(SUM)
    alone = await run_gang(node, unique, tmp_path, "python", "sum.py", venv=mpi)
    assert alone == ["rank 0 of 1, sum 1"] * 2
    launched = await run_gang(node, unique, tmp_path, "mpirun", "-n", "2", "python", "sum.py", venv=mpi)
    assert launched == sorted(ONE_WORLD * 2)
