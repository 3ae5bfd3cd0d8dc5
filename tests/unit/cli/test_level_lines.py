"""`moorage admin feature-level`: whoever may raise the level is told how."""

from __future__ import annotations

import pytest

from moorage.cli.fleet.ledger import level_lines

RAISE = "to raise it: moorage admin feature-level --to"


@pytest.mark.parametrize(
    ("level", "known", "said"),
    [
        (1, [2, 2, 2], ["feature level 1", f"{RAISE} 2 --schedulers 3"]),
        (1, [2, 1], ["feature level 1"]),
        (2, [2], ["feature level 2"]),
        (1, [], ["feature level 1"]),
    ],
)
def test_the_command_that_raises_the_level_is_told_once_all_schedulers_know_it(
    level: int, known: list[int], said: list[str]
) -> None:
    assert level_lines(level, known) == said
