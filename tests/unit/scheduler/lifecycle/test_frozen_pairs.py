"""Whatever two things happen to a frozen job one after the other, with a preemptible job on its GPU: all of it ends.

`Driving` checks after each record that no device has two leases, and the workers that none has two jobs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest

from moorage.scheduler.core.config import Config
from moorage.schemas.capabilities import Capabilities
from tests.unit.scheduler.driving import Driving

CAN: Final = {"noop": Capabilities(freezes=True)}
OVER: Final = {"CANCELLED", "SUCCEEDED", "FAILED", "TIMED_OUT", "EXPIRED"}


def freeze(drive: Driving) -> None:
    drive.order("freeze", job="owner")


def resume(drive: Driving) -> None:
    drive.order("resume", job="owner")


def cancel(drive: Driving) -> None:
    drive.cancel("owner")


def requeue(drive: Driving) -> None:
    drive.order("requeue", job="owner")


def hold(drive: Driving) -> None:
    drive.order("hold", job="owner")


def drain(drive: Driving) -> None:
    drive.operate("drain", "w0", within_s=1)


def preempt(drive: Driving) -> None:
    drive.submit("urgent", gpu={}, priority=90)
    drive.pass_time(2_000)


def freeze_the_other(drive: Driving) -> None:
    drive.order("freeze", job="spot")


def resume_the_other(drive: Driving) -> None:
    drive.order("resume", job="spot")


def end_the_other(drive: Driving) -> None:
    worker = drive.workers["w0"]
    for key in [key for key, held in worker.held.items() if key[1] == "spot" and held.phase in ("running", "frozen")]:
        worker.finish(key)


def claim_locally(drive: Driving) -> None:
    drive.workers["w0"].local ^= {0}


def new_leader(drive: Driving) -> None:
    drive.lead_from_snapshot()


def join_anew(drive: Driving) -> None:
    drive.join(drive.workers["w0"])


def lose_host(drive: Driving) -> None:
    drive.workers["w0"].die()
    drive.pass_time(40_000, renew=False)
    drive.join(drive.workers["w0"])


def lose_frames(drive: Driving) -> None:
    drive.workers["w0"].auto = not drive.workers["w0"].auto


ACTS: Final[tuple[Callable[[Driving], None], ...]] = (
    freeze, resume, cancel, requeue, hold, drain, preempt, freeze_the_other, resume_the_other, end_the_other,
    claim_locally, new_leader, join_anew, lose_host, lose_frames,
)  # fmt: skip


@pytest.mark.parametrize("settles", [True, False])
@pytest.mark.parametrize("second", ACTS)
@pytest.mark.parametrize("first", ACTS)
def test_of_any_two_acts_on_a_frozen_job_nothing_stays_behind(
    first: Callable[[Driving], None], second: Callable[[Driving], None], *, settles: bool
) -> None:
    drive = Driving(Config(preempt_priority=60, preempt_after=0.0))
    worker = drive.worker("w0", 1, capabilities=CAN)
    drive.submit("owner", gpu={})
    drive.settle()
    drive.order("freeze", job="owner")
    drive.settle()
    drive.submit("spot", gpu={}, preemptible=True)
    drive.settle()
    assert (drive.states("owner"), drive.states("spot")) == (["FROZEN"], ["RUNNING"])

    for act in (first, second):
        act(drive)
        if settles:
            drive.renew()
            drive.settle()

    worker.auto, worker.local = True, set()
    for verb, whose in (("release", {"job": "owner"}), ("resume", {"job": "owner"}), ("resume", {"job": "spot"})):
        drive.order(verb, **whose)
    drive.operate("uncordon", "w0")
    drive.pass_time(5_000)
    for job in ("owner", "spot", "urgent"):
        if drive.state.job("t", job) is not None:
            drive.cancel(job)
    for _ in range(5):
        drive.renew()
        drive.settle()
        drive.pass_time(2_000)
    states = {job.name: job.state for job in drive.state.jobs.values()}
    assert set(states.values()) <= OVER, states
    assert not worker.held
    (host,) = drive.engine.fleet.hosts.values()
    assert (host.frozen, host.awaited, host.free) == ({}, 0, 1)
    drive.submit("next", gpu={})
    drive.settle()
    assert drive.states("next") == ["RUNNING"]
