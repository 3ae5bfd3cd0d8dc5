"""What is remembered of what came has a bound each, and what is beyond it is forgotten or refused, as is said there."""

from __future__ import annotations

import msgspec

from moorage.ranking.table import TYPE, HostTable
from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.lifecycle.lending import Lending
from moorage.scheduler.questions.question_queue import RoundRobin
from moorage.schemas.frames import Goodbye
from tests.unit.ranking.test_fragments import add, worker
from tests.unit.scheduler.driving import Driving
from tests.unit.scheduler.lifecycle.test_lending import gpu, guest


def test_a_worker_that_joins_with_other_devices_each_time_leaves_no_lenders_behind() -> None:
    drive = Driving()
    drive.engine.sessions.lending = lending = Lending(drive.state, lambda worker: False, spare=4)
    drive.worker("w0", gpu_pool=[gpu(0)])
    drive.workers["w1"] = other = guest(gpu(1))
    for number in range(1, 40):
        other.hello = msgspec.structs.replace(other.hello, gpu_pool=[gpu(number)])
        assert drive.join(other)["kind"] == "joined"
        assert len(lending._lenders or ()) <= 2 * 2 + 4
    refused = drive.join(guest(gpu(39), name="w2"))
    assert (refused["code"], "worker w1" in refused["message"]) == ("gpu-lent-twice", True)


def test_a_worker_that_says_goodbye_leaves_no_count_of_its_joins_behind() -> None:
    drive = Driving()
    for number in range(3):
        worker = drive.worker(f"w{number}", 1)
        drive.send(worker.id, Goodbye(worker.session))
    drive.tick()
    assert not drive.engine.sessions.joins


def test_a_worker_that_only_joins_gets_no_jobs_though_its_sessions_are_lost_in_between() -> None:
    drive = Driving()
    worker = drive.worker("w0", 1)
    drive.join(worker)
    drive.pass_time(drive.engine.config.lost_ms + 2_000, renew=False)
    assert not drive.state.workers["w0"].session
    drive.join(worker)
    drive.submit("j", gpu={})
    assert drive.states("j") == ["QUEUED"]


def test_hosts_that_join_with_other_devices_or_processors_each_time_leave_no_numbers_behind() -> None:
    fleet = Fleet()
    add(fleet, worker(0, ["NVIDIA A10"]))  # so that the class stays, of which the other is at first
    table, made = HostTable(fleet, stale_spare=4), worker(1, ["NVIDIA A10"])
    for number in range(200):
        hello = made.hello
        hello["cpu_milli"] = 1_000 * number
        if number >= 100:
            hello["gpu_pool"] = [
                {"index": 0, "vendor": "nvidia", "name": f"A{number}", "uuid": "GPU-0", "memory_mib": number}
            ]
        add(fleet, made)
        table.look()
        assert len(table.types) <= 4 + 4 * 2 + 1
        assert len(table.classes) <= 4 + 4 * 2 + 1
        assert len(table.kinds) <= 2 * (4 + 4 * 2 + 1)
    assert [kind.name for kind in table.kinds][-1] == "A199"
    assert table.kinds[table.types[table.cells[TYPE, table.row_of[1]]].kinds[0]].name == "A199"


def test_what_waits_in_turns_is_bounded_for_all_tenants_together() -> None:
    queue: RoundRobin[int] = RoundRobin(most=3, most_of_all=10)
    taken = [queue.put(f"t{number % 7}", number) for number in range(40)]
    assert sum(taken) == queue.size == 10
    assert [queue.take() for _ in range(10)] == list(range(10))
    assert queue.put("t0", 0)
