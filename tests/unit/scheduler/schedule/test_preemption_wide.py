"""Preemption on more hosts than one search compares or reads: the victims are found wherever they run."""

from __future__ import annotations

import random

import pytest

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.fleet.host import Host
from moorage.scheduler.core.schedule.victims import Preemption, _Read
from tests.turns import turns
from tests.unit.scheduler.driving import Driving
from tests.unit.scheduler.schedule.test_preemption import ON, urgent


def policy_of(drive: Driving) -> Preemption:
    return drive.engine.planner.preempting.policy


def wide(priorities: list[int], gpus: int = 1) -> Driving:
    """A host for each of these priorities, full of jobs of one GPU that have run long enough to be ended."""
    drive = Driving(ON)
    for number, priority in enumerate(priorities):
        drive.worker(f"w{number}", gpus)
        for _ in range(gpus):
            drive.submit(f"j{len(drive.state.jobs)}", gpu={}, priority=priority)
    drive.settle()
    drive.pass_time(70_000)
    return drive


def seek_always(drive: Driving) -> None:
    """A gang of more ranks than there are GPUs: victims are looked for every second, in vain."""
    drive.submit("never", priority=85, replicas=len(drive.workers) + 1, gpu={"scheduling": "gang"})
    drive.pass_time(5_000)


def test_another_priority_has_only_the_hosts_of_its_job_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    drive = wide([70] * 6)
    seek_always(drive)
    policy, read = policy_of(drive), set[str]()
    read_anew = policy._read_anew

    def noted(host: Host) -> _Read:
        read.add(host.worker.id)
        return read_anew(host)

    monkeypatch.setattr(policy, "_read_anew", noted)
    drive.order("priority", job="j2", priority=60)
    drive.pass_time(3_000)
    assert read == {"w2"}


def ended(drive: Driving) -> list[str]:
    return [
        job.name for job in drive.state.jobs.values() if job.name[0] == "j" and drive.states(job.name)[0] != "RUNNING"
    ]


@pytest.mark.parametrize("others", [70, 95], ids=["could-end-too", "may-not-end"])
def test_the_lowest_priority_ends_on_whatever_host_it_runs(others: int) -> None:
    drive = wide([others] * 8 + [10, 20])
    policy_of(drive).compared_max = 2
    urgent(drive)
    drive.settle()
    assert (ended(drive), drive.states("urgent")) == (["j8"], ["RUNNING"])


def test_where_one_low_priority_is_not_enough_the_host_counts_by_the_highest_that_it_takes() -> None:
    drive = wide([70, 70, 70, 40], gpus=2)
    for number in range(3):
        drive.order("priority", job=f"j{2 * number}", priority=10)
    policy_of(drive).compared_max = 1
    urgent(drive, gpu={"count": 2})
    drive.settle()
    assert ended(drive) == ["j6", "j7"]


def test_a_host_whose_low_priority_frees_too_few_processors_hides_no_other() -> None:
    drive = Driving(ON)
    for number, jobs in enumerate([[(10, 1_000), (70, 7_000)], [(40, 8_000)]]):
        drive.worker(f"w{number}", 2, cpu_milli=8_000)
        for priority, cpu in jobs:
            drive.submit(f"j{priority}", gpu={}, priority=priority, resources={"cpu_milli": cpu})
    drive.settle()
    drive.pass_time(70_000)
    policy_of(drive).compared_max = 1
    urgent(drive, resources={"cpu_milli": 6_000})
    drive.settle()
    assert ended(drive) == ["j40"]


def test_what_begins_to_run_with_the_record_of_the_search_may_end() -> None:
    """Where nothing runs in peace; the search went by the record before, and ended a job of a higher priority."""
    drive = Driving(Config(preempt_priority=80, preempt_after=0.0))
    for number, priority in enumerate((70, 60)):
        drive.worker(f"w{number}", 1, auto=False)
        drive.submit(f"j{priority}", gpu={}, priority=priority)
    drive.reports([("claimed", "j70", 0, 0, ""), ("started", "j70", 0, 0, "")])
    drive.submit("urgent", priority=90, gpu={})
    drive.reports([("claimed", "j60", 0, 0, ""), ("started", "j60", 0, 0, "")], tick=False)
    drive.tick(1_000)
    assert ended(drive) == ["j60"]


def test_a_new_leader_ends_nobody_before_it_has_read_every_host() -> None:
    drive = wide([50] * 8 + [10])
    policy_of(drive).read_max = 3
    drive.submit("urgent", priority=90, gpu={})
    assert ended(drive) == []
    drive.pass_time(4_000)
    drive.settle()
    assert ended(drive) == ["j8"]


def test_an_operators_priority_of_a_running_job_counts_at_once() -> None:
    drive = wide([50] * 6)
    policy_of(drive).compared_max = 1
    seek_always(drive)
    drive.order("priority", job="j4", priority=5)
    urgent(drive)
    drive.settle()
    assert ended(drive) == ["j4"]


@pytest.mark.parametrize("seed", turns(range(8), often=1))
def test_of_jobs_that_come_and_go_the_lowest_priority_ends(seed: int) -> None:
    """What is remembered of hosts is what runs there, also where one job ends and the next starts in one record."""
    chance = random.Random(seed)
    drive = wide([chance.randrange(20, 80) for _ in range(9)])
    policy = policy_of(drive)
    policy.compared_max = chance.choice((1, 3, 256))
    seek_always(drive)
    for turn in range(6):
        for _ in range(chance.randrange(3, 5)):
            drive.offer_submit(f"j{turn}-{chance.randrange(10**6)}", gpu={}, priority=chance.randrange(80))
        held = [(worker, key) for worker in drive.workers.values() for key in worker.held]
        for worker, key in chance.sample(held, 3):
            worker.finish(key, 0)
        for _ in range(8):
            drive.engine.planner.preempting.seek_at_once()
            drive.report_all()
        if chance.random() < 0.4:
            name = chance.choice([job.name for job in drive.state.jobs.values() if not job.over])
            drive.order("priority", job=name, priority=chance.randrange(80))
        drive.pass_time(75_000)
        running = {m.replica.job.name: policy.priority_of(m.replica.job) for m in drive.state.attempts()}
        if len(running) < 9:
            continue
        drive.submit(f"urgent{turn}", priority=90, gpu={})
        drive.pass_time(6_000, step=1_000)
        drive.settle()
        gone = [running[name] for name in running if name not in {m.replica.job.name for m in drive.state.attempts()}]
        least = min(priority for priority in running.values())
        assert gone == [least], turn
