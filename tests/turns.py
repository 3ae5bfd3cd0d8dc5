"""Which of many cases run today: some in `make test`, others each day, and the rest, marked `slow`, in `make test-all`.

The day is that of the process which started the run: its workers, and a run over midnight, keep to it. The cases of
another day: `MOORAGE_TEST_DAY=2026-11-23 make test`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, date, datetime
from typing import Any, Final

import pytest

DAY: Final = "MOORAGE_TEST_DAY"
SEEDS: Final = 10_000  # as many as `make sim-long` and `make workloads` run


def today() -> int:
    """The day's number; from one to the next it grows by 1."""
    return date.fromisoformat(os.environ.setdefault(DAY, datetime.now(UTC).date().isoformat())).toordinal()


def turns(cases: Sequence[Any], often: int) -> list[Any]:
    """All cases, of which `often` run today in `make test`: each has its turn within `len(cases) / often` days."""
    first = today() * often % len(cases)
    chosen = {(first + number) % len(cases) for number in range(often)}
    return [case if at in chosen else pytest.param(case, marks=pytest.mark.slow) for at, case in enumerate(cases)]


def seeds(often: int, more: int) -> list[Any]:
    """Today's seeds: `often` for `make test`, then `more` for `make test-all`. Tomorrow's are the next ones."""
    first = today() * (often + more)
    chosen = [(first + number) % SEEDS for number in range(often + more)]
    return [*chosen[:often], *(pytest.param(seed, marks=pytest.mark.slow) for seed in chosen[often:])]
