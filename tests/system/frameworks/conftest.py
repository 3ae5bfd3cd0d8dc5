"""`node`, that of `tests/system/cli`, for tests that need the frameworks of `build`."""

from __future__ import annotations

import pytest

from tests.system.cli.conftest import node, node_loop
from tests.system.frameworks.gangs import why_no_frameworks

__all__ = ["node", "node_loop"]


@pytest.fixture(scope="session", autouse=True)
def frameworks() -> None:
    """Without them a test is skipped; in CI it fails."""
    if why := why_no_frameworks():
        pytest.skip(why)
