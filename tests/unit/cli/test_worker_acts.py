"""What an operator is told of the attempts on a worker."""

from __future__ import annotations

import pytest

from moorage.cli.fleet.worker_acts import _goes_on
from moorage.schemas.operate import Done


@pytest.mark.parametrize(
    ("members", "ending", "said"),
    [
        (0, 0, ""),
        (1, 0, ", 1 attempt on this worker goes on"),
        (2, 0, ", 2 attempts on this worker go on"),
        (1, 1, ", 1 attempt on this worker is ending"),
        (3, 1, ", 2 attempts on this worker go on, 1 is ending"),
    ],
)
def test_what_is_ending_does_not_go_on(members: int, ending: int, said: str) -> None:
    assert _goes_on(Done("uncordon", True, worker="w0", members=members, ending=ending)) == said
