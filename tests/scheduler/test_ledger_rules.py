"""Rules of the ledger that no other test shows alone; docs/reliability-rules.md has them all."""

from __future__ import annotations

from tests.scheduler.driving import Driving


def test_an_attempt_keeps_the_fence_of_the_record_that_placed_it_over_every_reign() -> None:
    """H9: what an honest worker says of an attempt of the reign before counts, and nothing is placed anew."""
    drive = Driving()
    drive.worker("w0", 1)
    drive.submit("j", gpu={})
    fence, placed = drive.member("j").fence, drive.member("j").attempt
    for _ in range(3):
        drive.lead()
        drive.renew()
        drive.settle()
    assert (drive.member("j").fence, drive.member("j").attempt) == (fence, placed)
    drive.run_out("w0")
    assert drive.states("j") == ["SUCCEEDED"]


def test_two_tenants_may_use_one_job_id_and_neither_reaches_the_others() -> None:
    """H15: the key is (tenant, job), and the tenant is that of the subject."""
    drive = Driving()
    drive.worker("w0", 2)
    drive.submit("same", gpu={})
    drive.offer_submit("same", tenant="u", gpu={"count": 1}, priority=90)
    drive.settle()
    assert drive.job("same", "t") is not drive.job("same", "u")
    drive.cancel("same", tenant="u")
    drive.settle()
    assert drive.states("same", "u") == ["CANCELLED"]
    assert drive.states("same", "t") == ["RUNNING"]


def test_a_load_frame_frees_nothing() -> None:
    """H21: a frame that was made before a claim shows the GPU free; only a fact frees it."""
    drive = Driving()
    drive.worker("w0", 1)
    drive.submit("first", gpu={})
    drive.settle()
    drive.load("w0")  # everything idle and well, it says
    drive.submit("second", gpu={})
    drive.settle()
    assert drive.states("second") == ["QUEUED"]
    assert drive.free_gpus() == 0
    drive.run_out("w0")
    drive.settle()
    assert drive.states("second") == ["RUNNING"]


def test_a_worker_whose_own_claimers_wait_takes_no_placement() -> None:
    """H42: neither starves the other: a worker with pending local claimers is full for the scheduler."""
    drive = Driving()
    worker = drive.worker("w0", 2)
    worker.waiting = True
    drive.renew("w0")
    drive.submit("j", gpu={})
    drive.settle()
    assert drive.states("j") == ["QUEUED"]
    worker.waiting = False
    drive.renew("w0")
    drive.settle()
    assert drive.states("j") == ["RUNNING"]
