"""Which of many cases run often, and which, marked `slow`, more seldom: the same ones every day.

Other seeds are run by hand: `make sim FROM=1000`, `python -m tests.release.workloads.many --from 1000`. `make mutants`
runs more of them, since a defect may need the one case that shows it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final

import pytest

ALL: Final = "MOORAGE_TEST_ALL"


def turns(cases: Sequence[Any], often: int, more: int | None = None) -> list[Any]:
    """Return the cases: the first `often` for each run, then `more`, or all others, marked `slow`."""
    rest = cases[often:] if more is None or ALL in os.environ else cases[often : often + more]
    return [*cases[:often], *(pytest.param(case, marks=pytest.mark.slow) for case in rest)]


def seeds(often: int, more: int, start: int = 0) -> list[Any]:
    """Return the seeds from `start` on: `often` for each run, then `more`, marked `slow`."""
    more *= 3 if ALL in os.environ else 1
    return turns(range(start, start + often + more), often, more)
