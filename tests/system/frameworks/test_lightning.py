"""Lightning finds its node in the gang's variables: NODE_RANK, which it takes nothing else for."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tests.system.cli.node import Node
from tests.system.frameworks.gangs import ONE_WORLD, run_gang

FIT: Final = """
import torch
from pytorch_lightning import LightningModule, Trainer

class Line(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, index):
        sum = self.trainer.strategy.reduce(torch.tensor(self.global_rank + 1.0), reduce_op="sum")
        print(f"rank {self.global_rank} of {self.trainer.world_size}, sum {int(sum)}", flush=True)
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters())

trainer = Trainer(
    accelerator="cpu", devices=1, num_nodes=2, strategy="ddp", max_steps=1,
    logger=False, enable_checkpointing=False, enable_progress_bar=False,
)
trainer.fit(Line(), torch.utils.data.DataLoader(torch.ones(2, 1)))
"""


@pytest.mark.slow
async def test_trainers_of_two_nodes_are_one_world(node: Node, unique: str, tmp_path: Path) -> None:
    (tmp_path / "fit.py").write_text(FIT)
    assert await run_gang(node, unique, tmp_path, "python", "fit.py") == ONE_WORLD
