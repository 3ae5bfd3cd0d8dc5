"""What leased GPUs do now, by model, for monitors."""

from __future__ import annotations

from moorage.scheduler.answers import views
from moorage.schemas.frames import AttemptUse, DeviceUse
from tests.unit.scheduler.fleet.test_slot_modes import fleet


def test_leased_gpus_at_work_and_idle_are_counted_by_model() -> None:
    drive = fleet(w0=("", "", "", ""))
    assert views.fleet(drive.engine, drive.now).used_now == []
    [host] = drive.engine.fleet.hosts.values()
    pair = [DeviceUse(0, 90, 1024, 300), DeviceUse(1, 0, None, None)]
    unread = [DeviceUse(2, None, 10, None), DeviceUse(9, 50, 10, None)]  # no reading; no device of this worker
    each = pair, unread, [DeviceUse(3, 25, 10, None)]
    host.use = {("t", "j", 0, 1, fence): AttemptUse(fence, devices) for fence, devices in enumerate(each, 1)}
    [row] = views.fleet(drive.engine, drive.now).used_now
    assert (row.read, row.at_work, row.idle) == (3, 1.15, 1)
    [fits] = views.fleet(drive.engine, drive.now).fits_now
    assert row.model == fits.model


def test_the_row_of_a_running_job_says_how_many_of_its_replicas_wait() -> None:
    drive = fleet(w0=("",))
    drive.submit("j", gpu={"count": 1}, replicas=3)
    drive.settle()
    row = views.summary(drive.engine, drive.job("j"))
    assert (row.state, row.waiting) == ("RUNNING", 2)
