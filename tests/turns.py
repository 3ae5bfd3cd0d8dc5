"""Which of many cases run today: some in `make test`, others each day, and the rest, marked `slow`, in `make test-all`.

The day is that of the process which started the run: its workers, and a run over midnight, keep to it. The cases of
another day: `MOORAGE_TEST_DAY=2026-11-23 make test`. `make mutants` runs more of them, since a defect may need the
one case that shows it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, date, datetime
from typing import Any, Final

import pytest

DAY: Final = "MOORAGE_TEST_DAY"
ALL: Final = "MOORAGE_TEST_ALL"
SEEDS: Final = 10_000  # as many as `make sim-long` and `make workloads` run


def today() -> int:
    """The day's number; from one to the next it grows by 1."""
    return date.fromisoformat(os.environ.setdefault(DAY, datetime.now(UTC).date().isoformat())).toordinal()


def turns(cases: Sequence[Any], often: int, more: int | None = None) -> list[Any]:
    """Today's cases: `often` for `make test`, then `more` for `make test-all`, or all others.

    Each case has its turn in `make test` within `len(cases) / often` days.
    """
    first = today() * often % len(cases)
    today_s = [cases[(first + number) % len(cases)] for number in range(len(cases))]
    rest = today_s[often:] if more is None or ALL in os.environ else today_s[often : often + more]
    return [*today_s[:often], *(pytest.param(case, marks=pytest.mark.slow) for case in rest)]


def seeds(often: int, more: int, start: int = 0) -> list[Any]:
    """Today's seeds: `often` for `make test`, then `more` for `make test-all`. Tomorrow's are the next ones.

    They are `SEEDS` numbers from `start` on.
    """
    first = today() * (often + more)
    more *= 3 if ALL in os.environ else 1
    chosen = [start + (first + number) % SEEDS for number in range(often + more)]
    return [*chosen[:often], *(pytest.param(seed, marks=pytest.mark.slow) for seed in chosen[often:])]
