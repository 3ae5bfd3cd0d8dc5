"""JAX finds a gang by what it is given of the gang's variables, as the page does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.cli.node import Node
from tests.system.frameworks.gangs import ONE_WORLD, from_page, run_gang


@pytest.mark.slow
async def test_replicas_are_one_world(node: Node, unique: str, tmp_path: Path) -> None:
    (tmp_path / "sum.py").write_text(from_page("run-a-gang-with-torchrun", "jax_sum.py"))
    assert await run_gang(node, unique, tmp_path, "python", "sum.py") == ONE_WORLD
