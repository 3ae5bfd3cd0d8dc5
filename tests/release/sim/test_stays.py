"""The judge of jobs that stay knows how long attempts ran, by what the ledger records of them."""

from __future__ import annotations

from typing import NoReturn

from tests.release.sim.stays import Stays
from tests.unit.scheduler.driving import Driving


def violated(what: str) -> NoReturn:
    raise AssertionError(what)


def test_an_attempt_that_ran_for_ten_minutes_lets_the_next_one_start_after_a_second_again() -> None:
    """It counted such an attempt as a short one, and found a restart after 2 s too early that was to come after 2 s."""
    drive, stays = Driving(), Stays(violated)
    drive.worker("w", 1, auto=False)
    drive.submit("j", gpu={}, retries=0, run={"argv": ["x"], "restart": "always"})
    for ran_s, wait_s in ((1, 1), (600, 1), (1, 2), (1, 4)):
        stays.after(drive.state)
        drive.reports([("claimed", "j", 0, 0, ""), ("started", "j", 0, 0, "")])
        stays.after(drive.state)
        drive.pass_time(ran_s * 1000)
        drive.reports([("exited", "j", 0, 1, "exit")])
        drive.report("freed", "j")
        stays.after(drive.state)
        drive.pass_time(wait_s * 1000)
        assert drive.states("j") == ["PLACED"]
    assert stays.restarts == 4
    stays.after(drive.state)


def test_a_restored_ledger_tells_again_what_was_and_no_restart_of_it_counts() -> None:
    """It took the restart before as one of now, and found that the attempt that followed came too early."""
    drive, stays = Driving(), Stays(violated)
    drive.worker("w", 1, auto=False)
    drive.submit("j", gpu={}, retries=0, run={"argv": ["x"], "restart": "always"})
    for restarts in range(3):
        stays.restored()
        stays.after(drive.state)
        drive.reports([("claimed", "j", 0, 0, ""), ("started", "j", 0, 0, ""), ("exited", "j", 0, 1, "exit")])
        drive.report("freed", "j")
        stays.restored()
        stays.after(drive.state)
        assert stays.restarts == 0, "what was before is not known"
        drive.pass_time(1000 << restarts)
        assert drive.states("j") == ["PLACED"]
        stays.after(drive.state)
