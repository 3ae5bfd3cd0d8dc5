"""Check that a driver does what moorage relies on: its author derives a class from `DriverChecks`, and pytest runs it.

    from moorage.testing.conformance import DriverChecks

    class TestMine(DriverChecks):
        driver = "mine:Mine"
        dashes = {"children": "a job of mine has no processes"}

        def exits(self, code): return {"run": {"argv": ["exit", str(code)]}}
        ...

Each check starts a real worker with the driver, and a leader that places jobs on it, over a real nats-server; the GPUs
are simulated. The methods from `exits` to `takes_memory`, except `child`, return the job that a check needs, in the
form of the driver: the request as a caller would submit it, without the driver and without GPUs. `dashes` names the
checks that the driver cannot pass at all, each with the reason; pytest does not collect them.
"""

from __future__ import annotations

import sys

if "pytest" in sys.modules:  # `moorage check worker` uses the leader alone, where no pytest may be
    sys.modules["pytest"].register_assert_rewrite(f"{__name__}.checks")  # an author sees the values of a check

from moorage.testing.conformance.checks import CHECKS, DriverChecks

__all__ = ["CHECKS", "DriverChecks"]
