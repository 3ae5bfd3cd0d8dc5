"""DeepSpeed finds the gang's variables as torch does; its launcher wants them as options, and a file of hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tests.system.cli.node import Node
from tests.system.frameworks.gangs import ONE_WORLD, from_page, run_gang

pytestmark = pytest.mark.slow

TRAIN: Final = """
import deepspeed
import torch
from deepspeed import comm

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled, which takes a minute
deepspeed.init_distributed("gloo")
sum = torch.ones(1) * (comm.get_rank() + 1)
comm.all_reduce(sum)
print(f"rank {comm.get_rank()} of {comm.get_world_size()}, sum {int(sum)}", flush=True)
comm.destroy_process_group()
"""


async def test_replicas_are_one_world(node: Node, unique: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    assert await run_gang(node, unique, tmp_path, "python", "train.py") == ONE_WORLD


@pytest.mark.long
async def test_its_launcher_makes_one_world_with_the_options_of_the_page(
    node: Node, unique: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "launch.sh").write_text(from_page("run-a-gang-with-torchrun", "deepspeed.sh"))
    assert await run_gang(node, unique, tmp_path, "sh", "launch.sh") == ONE_WORLD
