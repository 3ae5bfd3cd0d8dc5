"""What the tests of the worker share."""

from __future__ import annotations

import pytest

from tests.unit.worker.attempt_bench import Bench


@pytest.fixture
def bench() -> Bench:
    """A worker's state machine that has joined."""
    found = Bench()
    found.join()
    return found
