"""`fleet`: one `moorage up` for all how-to pages, with hosts of two models; pages leave nothing running on it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.system.cli.node import Node, start_node

FLEET = "4x8xH100+4xL40S"


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with asyncio.Runner() as runner:
        node = runner.run(start_node(tmp_path_factory.mktemp("fleet") / ".moorage", simulate=FLEET))
        yield node
        assert runner.run(node.stop()) == 0
