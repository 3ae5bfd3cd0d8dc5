"""accelerate finds the gang's variables as torch does; its launcher wants them as options."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tests.system.cli.node import Node
from tests.system.frameworks.gangs import ONE_WORLD, from_page, run_gang

pytestmark = pytest.mark.slow

TRAIN: Final = """
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
sum = accelerator.reduce(torch.tensor(accelerator.process_index + 1), "sum")
print(f"rank {accelerator.process_index} of {accelerator.num_processes}, sum {int(sum)}", flush=True)
accelerator.end_training()
"""


async def test_replicas_are_one_world(node: Node, unique: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    assert await run_gang(node, unique, tmp_path, "python", "train.py") == ONE_WORLD


async def test_its_launcher_makes_one_world_with_the_options_of_the_page(
    node: Node, unique: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "launch.sh").write_text(from_page("run-a-gang-with-torchrun", "accelerate.sh"))
    assert await run_gang(node, unique, tmp_path, "sh", "launch.sh") == ONE_WORLD
