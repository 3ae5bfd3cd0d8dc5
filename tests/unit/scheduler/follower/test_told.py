"""What the leader tells its follower: the use of hosts, pools and jobs, what jobs report, and calls of services."""

from __future__ import annotations

import msgspec

from moorage.scheduler.answers.call_totals import CallTotals
from moorage.scheduler.answers.over_time import told_now
from moorage.scheduler.follower.follower import Question
from moorage.scheduler.follower.told import Told
from moorage.scheduler.leader.fleet_detail import FleetDetails
from moorage.schemas.frames import AttemptUse, DeviceUse, Load, Reported, SlotLoad
from moorage.schemas.service import CALL_MS, CallCounts, MemberLoad
from tests.unit.scheduler.driving import H100, Driving

TIMES = len(CALL_MS) + 1


def test_use_heat_and_what_a_job_reports_are_told_and_read_again_from_a_pipe() -> None:
    drive = Driving.with_hosts(2, 2)
    drive.submit("a", gpu={"count": 2}, run={"driver": "noop"})
    attempt = drive.attempt("a")
    worker = drive.workers[attempt.worker.id]
    uses = [DeviceUse(slot, percent, 100, None) for slot, percent in ((0, 40), (1, 80))]
    name = attempt.name
    worker.use = [AttemptUse(attempt.fence, uses, 0, *name[:4])]
    worker.reported = [Reported(*name[:4], attempt.fence, {"loss": 0.5, "step": 7, "phase": "warm", "done": False})]
    drive.renew()
    slots = [SlotLoad(at, temperature_c=heat) for at, heat in enumerate((61, 75))]
    frame = Load(worker.id, worker.boot, worker.loads + 1, worker.loads + 1, gpu_pool=slots)
    drive.engine.offer_load(worker.id, frame, drive.now)
    drive.settle()
    details = FleetDetails(drive.engine, drive.term_counts)
    for _ in details.catch_up():
        pass
    told = told_now(drive.engine, details.jobs, CallTotals(drive.engine.state))
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(Question("used", 1, None, {"told": told})), type=Question)
    for read in (told, msgspec.convert(sent.arguments["told"], Told), msgspec.convert(told, Told)):
        assert read.hosts[worker.id] == (1.2, 200.0, 75.0)
        assert read.hosts[next(each for each in drive.workers if each != worker.id)] == (0.0, 0.0, None)
        assert read.pools == {H100: 1.2}
        assert read.jobs == [("t", "a", (60.0, 200.0, 2.0), {"loss": 0.5, "step": 7.0})]


def test_calls_are_told_by_the_second_and_what_has_no_calls_has_no_times() -> None:
    totals = CallTotals()

    def hear(ended: int, at_ms: int) -> None:
        ran = (0,) * 2 + (ended - ended // 10,) + (0,) * (TIMES - 4) + (ended // 10,)
        batches = (0, ended // 2, 0)
        counts = CallCounts({"500": ended // 20, "400": 1}, (ended, *[0] * (TIMES - 1)), ran, batches, ended)
        totals.add_load("t", "s", MemberLoad("m", 2, 1, 0, 0, False, 0, 0, 0, ended, 0, 0, "", counts=counts), at_ms)

    hear(0, 0)
    ((_, _, before),) = totals.over_time(1_000)
    assert before == (0.0, 0.0, 1.0, 1.0, None, None, None, None)
    for second in range(1, 21):
        hear(20 * second, 1_000 * second)
    ((tenant, service, row),) = totals.over_time(20_000)
    assert (tenant, service) == ("t", "s")
    calls, errors, members, running, half, most, waited, batch = row
    assert (calls, errors) == (20.0, 1.0), "what callers do wrong is no failure of the service"
    assert (members, running) == (1.0, 1.0)
    assert (half, most, waited) == (float(CALL_MS[2]), float(CALL_MS[-1]), float(CALL_MS[0]))
    assert batch is None, "classes of another number than ours count for nothing"
