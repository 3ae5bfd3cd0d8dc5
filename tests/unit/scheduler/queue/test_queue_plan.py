"""Who goes first, where it goes, and that nobody feasible starves."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moorage.scheduler.core.fleet.shape import SHAPES_MAX, Shapes, shape_key
from moorage.schemas.job import Request, Run
from tests.unit.scheduler.driving import PATIENCE_MS, Driving

LIMITED = {"driver": "noop", "timeout_s": 86_400}


def order_of(drive: Driving) -> list[str]:
    """Jobs in the order in which they were placed."""
    return [event["job"] for event in drive.events for change in event["changes"] if change["state"] == "PLACED"]


def drain(drive: Driving, ticks: int = 60) -> list[str]:
    for _ in range(ticks):
        for name in drive.workers:
            drive.run_out(name)
        drive.settle(3)
    return order_of(drive)


# ----------------------------------------------------------------------------------------------------------- order


def test_priority_then_arrival() -> None:
    drive = Driving.with_hosts(1)
    drive.submit("first", gpu={})
    for name, priority in (("low", 10), ("a", 50), ("high", 90), ("b", 50), ("higher", 91)):
        drive.submit(name, gpu={}, priority=priority)
    assert drain(drive) == ["first", "higher", "high", "a", "b", "low"]


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), min_size=1, max_size=14), st.integers(1, 14))
def test_what_is_placed_at_once_is_the_head_of_the_queue(asks: list[tuple[int, int]], gpus: int) -> None:
    """Jobs of one GPU each, whatever their shapes: those placed are the first by priority and arrival."""
    drive = Driving()
    for index, (cpu, priority) in enumerate(asks):
        drive.offer_submit(f"j{index}", gpu={}, resources={"cpu_milli": 1 + cpu}, priority=priority)
    drive.tick()
    drive.worker("w0", gpus, cpu_milli=10**6)
    drive.tick()
    ranked = sorted(range(len(asks)), key=lambda index: (-asks[index][1], index))
    placed = {int(name[1:]) for name in order_of(drive)}
    assert placed == set(ranked[:gpus])


def test_a_cancelled_head_does_not_let_its_line_jump_the_queue() -> None:
    drive = Driving.with_hosts(1)
    drive.submit("holder", gpu={})
    drive.settle()
    drive.submit("a1", gpu={}, resources={"cpu_milli": 1})
    drive.submit("b", gpu={})
    drive.submit("a2", gpu={}, resources={"cpu_milli": 1})
    drive.cancel("a1")
    assert drain(drive) == ["holder", "b", "a2"]


def test_equal_requests_share_a_shape_and_different_ones_do_not() -> None:
    shapes = Shapes()
    noop, zones = Run(driver="noop"), (["a"], ["b"], ["a", "b"])
    requests = [Request(run=noop), Request(run=Run(driver="process", argv=["x"]))]
    requests += [Request(run=noop, requires={"zone": zone}) for zone in zones]
    keys = {shape_key(request) for request in requests}
    assert len(keys) == len(requests)
    again = Request(run=Run(driver="noop"), requires={"zone": ["b", "a"]}, labels={"x": "y"}, priority=3)
    assert shapes.of(requests[-1]) is shapes.of(again)
    assert len(shapes) == 1
    assert SHAPES_MAX >= 10_000


# --------------------------------------------------------------------------------------------------------- placement


def test_cpu_and_memory_of_the_host_are_counted_and_given_back() -> None:
    drive = Driving.with_hosts(8, cpu_milli=10_000, memory_mib=1_000)
    drive.submit("cpu", replicas=4, gpu={}, resources={"cpu_milli": 3_000})
    assert drive.states("cpu") == ["PLACED"] * 3 + ["QUEUED"]
    drive.submit("memory", replicas=3, resources={"memory_mib": 400})
    assert drive.states("memory") == ["PLACED", "PLACED", "QUEUED"]
    drain(drive, 4)
    host = drive.engine.fleet.hosts[0]
    assert (host.cpu_free, host.memory_free, host.open) == (10_000, 1_000, 0xFF)


def test_a_worker_that_does_not_say_its_size_is_not_counted() -> None:
    drive = Driving.with_hosts(1)
    drive.submit("j", replicas=3, resources={"cpu_milli": 10**9, "memory_mib": 2**31})
    assert drive.states("j") == ["PLACED"] * 3


@pytest.mark.parametrize(
    ("share", "fit"),
    [
        ({}, 8),
        ({"memory_mib": 20_000}, 4),
        ({"compute_percent": 30}, 3),
        ({"compute_percent": 100}, 8),
        ({"memory_mib": 30_000, "compute_percent": 10}, 2),
        ({"memory_mib": 10, "compute_percent": 1}, 8),
    ],
)
def test_shares_of_memory_and_compute_add_up(share: dict[str, int], fit: int) -> None:
    drive = Driving.with_hosts(1)
    drive.submit("j", replicas=9, gpu={"sharing": "mps", "share": share})
    assert drive.states("j").count("PLACED") == fit
    drain(drive, 2)
    drive.submit("whole", gpu={})
    assert drive.states("j").count("SUCCEEDED") >= fit


@pytest.mark.parametrize("order", [(50, None), (None, 50)])
def test_a_share_without_a_cap_goes_beside_one_with_whoever_was_first(order: tuple[int | None, int | None]) -> None:
    drive = Driving.with_hosts(1)
    for index, percent in enumerate(order):
        share = {"memory_mib": 100} if percent is None else {"compute_percent": percent}
        drive.submit(f"j{index}", gpu={"sharing": "mps", "share": share})
    assert [drive.states(f"j{index}") for index in (0, 1)] == [["PLACED"]] * 2


def test_sharers_join_the_fullest_device_and_leave_the_others_whole() -> None:
    drive = Driving.with_hosts(4)
    drive.submit("j", replicas=10, gpu={"sharing": "mps"})
    slots = [drive.slots("j", index)[0] for index in range(10)]
    assert slots == [0] * 8 + [1] * 2
    assert drive.free_gpus() == 2


def test_pack_leaves_the_biggest_room() -> None:
    drive = Driving()
    for name, size in (("eight", 8), ("two", 2), ("four", 4)):
        drive.worker(name, size)
    for name, count in (("a", 2), ("b", 3), ("c", 8)):
        drive.submit(name, gpu={"count": count})
    assert [drive.placed_on(name) for name in "abc"] == [["two"], ["four"], ["eight"]]


def test_cpu_jobs_go_where_there_are_no_gpus() -> None:
    drive = Driving()
    drive.worker("gpus", 8)
    drive.worker("none", 0)
    drive.submit("cpu")
    assert drive.placed_on("cpu") == ["none"]


def test_min_memory_is_exact_and_a_mixed_host_counts_by_device() -> None:
    drive = Driving()
    drive.worker("small", 1, gpu_memory_mib=81_559)
    drive.submit("more", gpu={"min_memory_mib": 81_560})
    drive.submit("same", gpu={"min_memory_mib": 81_559})
    assert (drive.states("more"), drive.states("same")) == (["QUEUED"], ["PLACED"])


def test_time_slice_index_is_a_filter_on_the_device() -> None:
    drive = Driving.with_hosts(4)
    drive.submit("j", replicas=5, gpu={"sharing": "time-slice", "time_slice_index": 2})
    assert drive.states("j") == ["PLACED"] * 4 + ["QUEUED"]
    assert {drive.slots("j", index)[0] for index in range(4)} == {2}


def test_adopted_beyond_a_smaller_cap_stays_consistent() -> None:
    import msgspec

    drive = Driving()
    worker = drive.worker("w0", 1)
    drive.submit("j", replicas=4, gpu={"sharing": "mps"})
    drive.settle()
    worker.hello = msgspec.structs.replace(worker.hello, sharers_max={"mps": 2})
    drive.join(worker)
    assert drive.states("j") == ["RUNNING"] * 4
    drive.submit("k", gpu={"sharing": "mps"})
    for key in list(worker.held)[:3]:
        worker.finish(key)
        drive.settle()
    assert drive.states("k") == ["RUNNING"]


# ---------------------------------------------------------------------------------------------------- starvation


class Stream:
    """An endless stream of jobs of one GPU that keeps a fleet full: one ends, two more ask."""

    def __init__(self, drive: Driving, **fields: Any) -> None:
        self.drive = drive
        self.fields = fields
        self.count = 0

    def step(self, ms: int = 1_000) -> None:
        drive = self.drive
        for worker in drive.workers.values():
            running = [key for key, held in worker.held.items() if held.phase == "running" and key[1].startswith("s")]
            for key in running[: max(1, len(running) // 3)]:
                worker.finish(key)
            frame = worker.report_frame()
            if frame is not None:
                drive.send(worker.id, frame)
                worker.report_answered(frame.no)
            drive.send(worker.id, worker.renew_frame())
        for _ in range(3 * len(drive.workers)):
            self.count += 1
            drive.offer_submit(f"s{self.count}", **{"gpu": {}, **self.fields})
        drive.tick(ms)

    def until_started(self, name: str, at_most_s: int = 200) -> int:
        began = self.drive.now
        while self.drive.states(name)[0] == "QUEUED":
            self.step()
            assert self.drive.now - began < at_most_s * 1_000, f"{name} starves"
        return self.drive.now - began


@pytest.mark.parametrize(
    ("asks", "workers", "gpus"),
    [
        ({"gpu": {"count": 8}}, 1, 8),
        ({"gpu": {"count": 8}}, 3, 8),
        ({"gpu": {"scheduling": "gang", "count": 4}, "replicas": 6}, 3, 8),
        ({"gpu": {"scheduling": "gang"}, "replicas": 12}, 3, 4),
        ({"gpu": {"scheduling": "gang", "sharing": "mps"}, "replicas": 32}, 2, 2),
        ({"gpu": {"scheduling": "gang"}, "replicas": 4, "resources": {"cpu_milli": 4_000}}, 2, 8),
        ({"gpu": {}, "resources": {"cpu_milli": 8_000}}, 2, 8),
    ],
)
def test_promise_11_the_biggest_starts_under_an_endless_stream(asks: dict[str, Any], workers: int, gpus: int) -> None:
    drive = Driving.with_hosts(*[gpus] * workers, cpu_milli=8_000)
    stream = Stream(drive, resources={"cpu_milli": 1_000})
    for _ in range(5):
        stream.step()
    drive.submit("big", **asks)
    waited = stream.until_started("big")
    assert waited < PATIENCE_MS + 60_000
    before = drive.engine.state.transitions
    for _ in range(6):
        stream.step()
    assert drive.engine.state.transitions > before, "the hosts are open again"
    assert drive.engine.planner.verdicts.reservation is None or drive.states("big")[0] != "QUEUED"


def test_several_big_ones_start_one_after_the_other() -> None:
    drive = Driving.with_hosts(4, 4)
    stream = Stream(drive)
    for _ in range(3):
        stream.step()
    for name in ("big1", "big2", "big3"):
        drive.submit(name, gpu={"count": 4})
    for name in ("big1", "big2", "big3"):
        stream.until_started(name, 400)
        for worker in drive.workers.values():
            for key in [key for key, held in worker.held.items() if key[1] == name]:
                if worker.held[key].phase == "running":
                    worker.finish(key)


def test_an_infeasible_elder_does_not_hide_who_could_be_helped() -> None:
    drive = Driving.with_hosts(4)
    for index in range(5):
        drive.submit(f"never{index}", gpu={"count": 5 + index}, priority=60)
    stream = Stream(drive)
    for _ in range(3):
        stream.step()
    drive.submit("big", gpu={"count": 4})
    stream.until_started("big")


def test_an_elder_of_the_same_line_does_not_wedge_the_reservation() -> None:
    """A retry returns in front of the job that has the reservation, asks alike, and must not be excluded from it."""
    drive = Driving.with_hosts(8)
    drive.submit("elder", gpu={"count": 8}, retries=1, run=LIMITED)
    drive.settle()
    drive.submit("younger", gpu={"count": 8})
    drive.pass_time(PATIENCE_MS + 5_000)
    assert drive.engine.planner.verdicts.reservation is not None
    drive.run_out("w0", code=1)
    assert drive.states("younger") == ["RUNNING"]  # the elder pauses for a second
    drive.pass_time(3_000)
    assert drive.states("elder") == ["QUEUED"]
    drive.submit("third", gpu={"count": 8})
    drive.pass_time(PATIENCE_MS + 5_000)
    drive.run_out("w0")
    drive.settle()
    assert drive.states("elder") == ["RUNNING"]
    drive.run_out("w0")
    drive.settle()
    assert drive.states("third") == ["RUNNING"]


def test_a_retry_in_front_of_the_reserved_job() -> None:
    drive = Driving.with_hosts(8)
    drive.submit("elder", gpu={"count": 4}, retries=1, run=LIMITED)
    drive.submit("other", gpu={"count": 4}, run=LIMITED)
    drive.settle()
    drive.submit("reserved", gpu={"count": 4})
    drive.pass_time(PATIENCE_MS + 5_000)
    assert drive.engine.planner.verdicts.reservation is not None
    worker = drive.workers["w0"]
    elder = next(key for key in worker.held if key[1] == "elder")
    worker.finish(elder, 1, freed=False)
    drive.settle()
    drive.pass_time(2_000)  # the elder stands first in the line again, the reserved one behind it
    worker.free(elder)
    drive.settle()
    assert drive.states("elder") == ["RUNNING"]
    drive.run_out("w0")
    drive.settle()
    assert drive.states("reserved") == ["RUNNING"]


@pytest.mark.parametrize("how", ["cordon", "lost", "sick", "waiting"])
def test_a_reservation_moves_when_its_hosts_fail_it(how: str) -> None:
    drive = Driving.with_hosts(4, 4)
    stream = Stream(drive)
    for _ in range(3):
        stream.step()
    drive.submit("big", gpu={"count": 4})
    keeper = {name: next(iter(worker.held)) for name, worker in drive.workers.items()}
    for _ in range(60):
        if drive.engine.planner.verdicts.reservation is not None:
            break
        drive.pass_time(1_000)
    held = drive.reservation
    assert keeper
    host = drive.engine.fleet.hosts[next(iter(held.hosts))]
    name = host.worker.id
    if how == "cordon":
        drive.operate("cordon", name)
    elif how == "sick":
        drive.load(name, s0="ecc", s1="ecc")
    elif how == "waiting":
        drive.workers[name].waiting = True
        drive.renew()
    else:
        drive.workers[name].session = ""
        drive.workers[name].held.clear()
        for _ in range(30):
            for other in drive.workers.values():
                if other.session:
                    drive.send(other.id, other.renew_frame())
            drive.tick(1_000)
        del drive.workers[name]
    stream.until_started("big", 300)
    assert drive.placed_on("big") != [name]


def test_a_reservation_does_not_wait_for_what_is_not_ours_to_free() -> None:
    """Two of four devices are held by somebody in the worker's own process: no host is closed for a job of four."""
    drive = Driving()
    worker = drive.worker("w0", 4)
    worker.local = {0, 1}
    drive.renew()
    drive.submit("big", gpu={"count": 4})
    drive.pass_time(PATIENCE_MS + 5_000)
    assert drive.engine.planner.verdicts.reservation is None
    drive.submit("small", gpu={})
    assert drive.states("small") == ["PLACED"]
