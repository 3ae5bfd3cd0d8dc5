"""What operators are told of the fleet: who came and went with how many jobs, who ordered what, which GPUs are out."""

from __future__ import annotations

from moorage.scheduler.core.outputs.outputs import Outputs
from moorage.schemas.frames import Unwell
from tests.unit.scheduler.driving import Driving


class Told(Driving):
    """Collects the events of the fleet, in words."""

    def __init__(self) -> None:
        self.told: list[str] = []
        super().__init__()

    def tick(self, ms: int = 1, *, obey: bool = True) -> Outputs:
        out = super().tick(ms, obey=obey)
        self.told += [event.words for event in out.fleet]
        return out

    def take(self) -> list[str]:
        told, self.told = self.told, []
        return told


def test_joins_losses_orders_and_gpus_are_told_with_jobs_actors_and_reasons() -> None:
    drive = Told()
    worker = drive.worker("w0", 2)
    drive.worker("w1", 2)
    assert drive.take() == ["worker w0: joined: 2 GPUs", "worker w1: joined: 2 GPUs"]
    drive.submit("j", gpu={"count": 2})
    drive.submit("k", gpu={"count": 2})
    drive.settle()
    assert drive.take() == []
    drive.operate("drain", "w1", why="new disks")
    drive.operate("uncordon", "w1")
    by = "operator, unverified (says me)"
    assert drive.take() == [f"worker w1: draining by {by}: new disks", f"worker w1: open by {by}"]
    uuid = worker.hello.gpu_pool[1].uuid
    worker.unwell = [Unwell(1, "xid", "Xid 79", False)]
    drive.renew("w0")
    drive.tick()
    worker.unwell = []
    drive.renew("w0")
    drive.tick()
    assert drive.take() == [f"worker w0: GPU {uuid} out: xid: Xid 79", f"worker w0: GPU {uuid} back"]
    worker.die()
    drive.pass_time(60_000)
    assert [word for word in drive.take() if "lost" in word] == ["worker w0: lost, 1 job on it"]


def test_a_gpu_in_quarantine_is_out_until_it_is_released_or_freed_and_is_told_once() -> None:
    drive = Told()
    worker = drive.worker("w0", 2, auto=False)
    first, second = (f"worker w0: GPU {device.uuid}" for device in worker.hello.gpu_pool)
    for job in ("j", "k"):
        drive.submit(job, gpu={})
        drive.reports([("claimed", job, 0, 0, ""), ("exited", job, 0, 0, "exit")])
    drive.take()
    drive.reports([("quarantined", "j", 0, 0, "0"), ("quarantined", "k", 0, 0, "1")])
    assert drive.take() == [f"{first} out: quarantined", f"{second} out: quarantined"]
    worker.unwell = [Unwell(0, "xid", "Xid 79", False)]
    drive.renew("w0")
    assert drive.take() == [], "it is out already"
    drive.operate("release", "w0", slots=[0], why="looked at it")
    assert drive.take() == [f"{first} back by operator, unverified (says me): looked at it"]
    drive.report("freed", "k")
    assert drive.take() == [f"{second} back"]


def test_an_order_that_lifts_only_what_a_job_avoids_brings_no_gpu_back() -> None:
    drive = Told()
    worker = drive.worker("w0", 1)
    drive.submit("j", gpu={})
    drive.settle()
    for worker.unwell in ([Unwell(0, "xid", "Xid 79", True)], []):
        drive.renew("w0")
        drive.settle()
    assert [words.rpartition(" GPU ")[2].split()[1] for words in drive.take()[1:]] == ["out:", "back"]
    assert drive.operate("release", "w0")["slots"] == [0]
    assert drive.take() == []
