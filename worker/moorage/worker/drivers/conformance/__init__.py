"""Checks that a driver does what moorage relies on; pytest runs them as its author derives a class from `DriverChecks`.

    from moorage.worker.drivers.conformance import DriverChecks

    class TestMine(DriverChecks):
        driver = "mine:Mine"
        dashes = {"children": "a job of mine has no processes"}

        def exits(self, code): return {"run": {"argv": ["exit", str(code)]}}
        ...

Each check starts a real worker with the driver, and a leader that places jobs on it, over a real nats-server; the GPUs
are simulated. The methods from `exits` to `children` say what a job of the driver looks like that does what the check
needs: they return the request as a caller would submit it, without the driver and without GPUs. What the driver cannot
do at all stands in `dashes`, by the name of the check and with the reason; that check is then not collected.
"""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(f"{__name__}.checks")  # an author sees the values that a check compared

from moorage.worker.drivers.conformance.checks import CHECKS, DriverChecks  # noqa: E402

__all__ = ["CHECKS", "DriverChecks"]
