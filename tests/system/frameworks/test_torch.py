"""torch finds the gang's variables; torchrun makes one world of the replicas, with ranks in each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.cli.node import Node
from tests.system.frameworks.gangs import from_page, run_gang

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("command", "said"),
    [("python reduce.py", "2 ranks, sum 3"), ("torchrun --nproc-per-node=2 reduce.py", "4 ranks, sum 10")],
)
async def test_replicas_are_one_world_with_torchrun_and_without(
    command: str, said: str, node: Node, unique: str, tmp_path: Path
) -> None:
    (tmp_path / "reduce.py").write_text(from_page("run-a-gang-with-torchrun", "reduce.py"))
    assert await run_gang(node, unique, tmp_path, *command.split()) == [said]
