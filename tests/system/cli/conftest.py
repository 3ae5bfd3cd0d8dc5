"""`node`: one `moorage up --simulate 2x4xH100` for the whole session. Use a tenant of your own (`unique`)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.system.cli.node import Node, start_node


@pytest.fixture(scope="session")
def node_loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory, node_loop: asyncio.AbstractEventLoop) -> Iterator[Node]:
    running = node_loop.run_until_complete(start_node(tmp_path_factory.mktemp("up")))
    yield running
    code = node_loop.run_until_complete(running.stop())
    assert code == 0


@pytest.fixture(scope="module")
def node_of_its_own(tmp_path_factory: pytest.TempPathFactory, node_loop: asyncio.AbstractEventLoop) -> Iterator[Node]:
    """A node that no other file's tests have left workers or jobs on."""
    running = node_loop.run_until_complete(start_node(tmp_path_factory.mktemp("up")))
    yield running
    assert node_loop.run_until_complete(running.stop()) == 0
