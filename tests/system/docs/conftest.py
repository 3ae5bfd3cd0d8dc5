"""`fleet`: one `moorage up` for all how-to pages, with hosts of two models; pages leave nothing running on it.

`pytest -k leaf_node` also finds the run of a page by a heading of the page, as no test repeats what the page shows.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.system.cli.node import Node, start_node

FLEET = "4x8xH100+4xL40S"


def pytest_itemcollected(item: pytest.Item) -> None:
    if isinstance(item, pytest.Function) and item.originalname == "test_every_step_does_what_the_page_says":
        page = item.callspec.params["path"]
        assert isinstance(page, Path)
        headings = re.findall(r"^##+ (.+)$", page.read_text(), re.MULTILINE)
        item.extra_keyword_matches.update(heading.replace(" ", "_") for heading in headings)


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with _runs(tmp_path_factory.mktemp("fleet"), is_open=False) as node:
        yield node


@pytest.fixture(scope="session")
def open_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """For libraries of NATS that read no nats context: the page says `moorage up --open`."""
    with _runs(tmp_path_factory.mktemp("open"), is_open=True) as node:
        yield node


@contextmanager
def _runs(folder: Path, *, is_open: bool) -> Iterator[Node]:
    with asyncio.Runner() as runner:
        node = runner.run(start_node(folder / ".moorage", simulate=FLEET, is_open=is_open))
        yield node
        assert runner.run(node.stop()) == 0
