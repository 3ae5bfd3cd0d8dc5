"""What fails and works in turns is told in the log as one outage."""

from __future__ import annotations

from moorage.scheduler.pacing.outage import CALM_S, Outage


def test_a_standby_that_is_answered_by_a_stale_copy_now_and_then_tells_so_once() -> None:
    now_s = 100.0
    outage = Outage(lambda: now_s)
    assert outage.works() is None, "nothing has failed"
    logged: list[bool] = []
    for record in range(40, 60):
        logged.append(outage.failed(f"the ledger ends at record {record}, but record {record + 400} was read"))
        now_s += 0.2
        assert outage.works() is None, "it may fail again"
    assert logged == [True] + [False] * 19
    assert outage.failed("connection lost"), "another trouble"
    now_s += CALM_S
    lasted_s = outage.works()
    assert lasted_s is not None
    assert round(lasted_s, 6) == 4.0, "from the first to the last failure"
    assert outage.works() is None, "it is told once"
    assert outage.failed("the ledger ends at record 70, but record 71 was read"), "a new outage"
