"""What holds for all tests of the scheduler's rules."""

from __future__ import annotations

import pytest

from moorage.scheduler.whatif import fixes, foreseen


@pytest.fixture(autouse=True)
def _no_clock_ends_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search for fixes is bounded in time for the leader's sake, and its copies have a low priority.

    Beside other tests they may get no processor for seconds; which fixes are found must not depend on that.
    """
    monkeypatch.setattr(fixes, "LIMIT_S", 60.0)
    monkeypatch.setattr(foreseen, "FIXES_S", 60.0)
