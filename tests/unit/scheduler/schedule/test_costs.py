"""What operators' orders and refused requests cost the leader, as curves: four times as many cost four times as much.

Costs are counted in calls of functions, which a busy machine does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.events import Order
from moorage.scheduler.core.fleet import fleet
from moorage.scheduler.core.lifecycle import timers
from moorage.schemas.capabilities import Capabilities
from moorage.schemas.frames import Goodbye
from moorage.schemas.operate import ACTS, act_of
from tests.calls import Calls
from tests.levels import know_next, raise_level
from tests.unit.scheduler.driving import Driving

CAN = {"noop": Capabilities(relimits=True, freezes=True, resizes={"time-slice": "live"})}
#: orders in one record, jobs or hosts beside them: the small and the large number
FEW, MANY = 40, 160
GROWS = MANY / FEW
#: by so much may the larger case cost more than in proportion
SPARE = 1.4
#: calls that one order may cost more for what is beside it, such as a longer list that is sorted
BESIDE = 60


@pytest.fixture(autouse=True)
def next_level(monkeypatch: pytest.MonkeyPatch) -> None:
    know_next(monkeypatch)


def running(jobs: int, hosts: int) -> Driving:
    """Jobs that run, each on half of a GPU, on the first of the hosts, and a tenant with a name of its own for each."""
    drive = Driving()
    drive.checks = False
    for number in range(hosts):
        drive.worker(f"w{number}", 8, capabilities=CAN)
    for number in range(jobs):
        gpu = {"count": 1, "sharing": "time-slice", "share": {"memory_mib": 1_000}} if number % 2 else {"count": 1}
        drive.offer_submit(f"j{number}", gpu=gpu, retries_on_lost=5)
        drive.offer_submit("x", tenant=f"t{number}", gpu={"count": 64})
    drive.tick()
    drive.settle()
    assert {drive.job(f"j{number}").state for number in range(jobs)} == {"RUNNING"}
    return drive


def _of_jobs(verb: str, **fields: Any) -> Callable[[Driving, int], Iterator[str]]:
    def offer(drive: Driving, count: int) -> Iterator[str]:
        shared = verb == "resize"
        for number in range(count):
            yield drive.offer_order(verb, job=f"j{2 * number + shared}", **fields)

    return offer


def _of_tenants(verb: str, **fields: Any) -> Callable[[Driving, int], Iterator[str]]:
    def offer(drive: Driving, count: int) -> Iterator[str]:
        for number in range(count):
            yield drive.offer_order(verb, tenant=f"t{number}", **fields)

    return offer


def _of_workers(verb: str, **fields: Any) -> Callable[[Driving, int], Iterator[str]]:
    def offer(drive: Driving, count: int) -> Iterator[str]:
        for number in range(count):
            yield drive.offer_operate(verb, f"w{number}", **fields)

    return offer


def _of_gone(drive: Driving, count: int) -> Iterator[str]:
    for number in range(count):
        drive.send(f"w{number}", Goodbye(drive.workers.pop(f"w{number}").session))
    drive.tick()
    yield from _of_workers("forget")(drive, count)


def _of_new(drive: Driving, count: int) -> Iterator[str]:
    for number in range(count):
        yield drive.offer_operate("admit", f"spot-{number}", pool="spot", token="UAT6")


def _of_counters(drive: Driving, count: int) -> Iterator[str]:
    for number in range(count):
        act = act_of("counter", {"name": f"c{number}", "most": 9, "by": "ana"})
        drive.engine.offer(Order("counter", act, f"c{number}", True))
        yield f"c{number}"


def _of_waiting(drive: Driving, count: int) -> Iterator[str]:
    list(_of_workers("cordon")(drive, len(drive.workers)))
    drive.tick()
    for number in range(count):
        drive.offer_submit(f"p{number}", gpu=None)
    drive.tick()
    for number in range(count):
        yield drive.offer_order("place", job=f"p{number}", on=f"w{number}")


#: by case: the verb, what comes before it, and how it is offered so often, each time for another job, tenant or worker
ORDERS: dict[str, tuple[str, str, Callable[[Driving, int], Iterator[str]]]] = {
    "hold a job": ("hold", "", _of_jobs("hold")),
    "release a job": ("release", "hold a job", _of_jobs("release")),
    "first for a tenant": ("share", "", _of_tenants("share", weight=2)),
    "hold a tenant": ("hold", "first for a tenant", _of_tenants("hold")),
    "release a tenant": ("release", "hold a tenant", _of_tenants("release")),
    "release a worker": ("release", "", _of_workers("release")),
    "requeue": ("requeue", "", _of_jobs("requeue")),
    "requeue what is frozen": ("requeue", "freeze", _of_jobs("requeue")),
    "place": ("place", "", _of_waiting),
    "freeze": ("freeze", "", _of_jobs("freeze")),
    "resume": ("resume", "freeze", _of_jobs("resume")),
    "priority": ("priority", "", _of_jobs("priority", priority=60)),
    "time limit": ("time-limit", "", _of_jobs("time-limit", timeout_s=7_200)),
    "first resize": ("resize", "", _of_jobs("resize", compute_percent=30)),
    "resize": ("resize", "first resize", _of_jobs("resize", compute_percent=20)),
    "limit": ("limit", "first for a tenant", _of_tenants("limit", gpus=3)),
    "share": ("share", "first for a tenant", _of_tenants("share", weight=3)),
    "counter": ("counter", "", _of_counters),
    "cordon": ("cordon", "", _of_workers("cordon")),
    "uncordon": ("uncordon", "cordon", _of_workers("uncordon")),
    "drain": ("drain", "", _of_workers("drain")),
    "forget": ("forget", "", _of_gone),
    "admit": ("admit", "", _of_new),
    "drain later": ("drain", "", _of_workers("drain", from_s=600)),
}
#: the first resize after a host came or left sums up the fleet once; what may give room to jobs that wait has each
#: tenant's queue group looked at again
WALKS = {"first for a tenant", "first resize", "resize", "uncordon"}
#: an order of which a ledger has one a release
ONCE = {"feature-level"}


def test_every_verb_of_an_operator_has_its_curve() -> None:
    assert {verb for verb, _, _ in ORDERS.values()} | ONCE == set(ACTS)


def cost(drive: Driving) -> int:
    """How many functions the leader calls for the next record."""
    calls, engine = Calls(), drive.engine
    steps = ("build", "prepare_outputs", "commit")
    before = {step: getattr(engine, step) for step in steps}
    for step in steps:
        setattr(engine, step, calls.inside(before[step]))
    drive.tick()
    for step in steps:
        setattr(engine, step, before[step])
    return calls.made


def ordered(case: str, count: int, jobs: int, hosts: int) -> int:
    """What a record with so many orders costs more than one without."""
    _, first, offer = ORDERS[case]
    drive = running(jobs, hosts)
    raise_level(drive)
    if first:
        list(ORDERS[first][2](drive, count))
        drive.tick()
        drive.settle()
    drive.tick()
    idle = cost(drive)
    replies = list(offer(drive, count))
    made = cost(drive)
    assert {drive.answers[reply]["kind"] for reply in replies} == {"done"}, drive.answers[replies[0]]
    return made - idle


@pytest.mark.slow
@pytest.mark.parametrize("case", ORDERS)
def test_many_orders_in_one_record_cost_in_proportion(case: str) -> None:
    size = {"jobs": 2 * MANY, "hosts": MANY}
    few, many = ordered(case, FEW, **size), ordered(case, MANY, **size)
    assert many <= SPARE * GROWS * few


@pytest.mark.parametrize("case", sorted(ORDERS.keys() - WALKS))
def test_an_order_costs_the_same_however_many_jobs_and_hosts_are_beside_it(case: str) -> None:
    few, many = ordered(case, 1, 2 * FEW, FEW), ordered(case, 1, 2 * MANY, MANY)
    assert many <= SPARE * few + BESIDE


#: requests that are refused, each with other words
REFUSED: dict[str, Callable[[int], dict[str, Any]]] = {
    "label": lambda number: {"requires": {f"k{number}": ["v"]}},
    "value of a label": lambda number: {"requires": {"zone": [f"v{number}"]}},
    "device": lambda number: {
        "gpu": {"count": 1},
        "driver_config": {"process": {"gpu_device_ids": [f"GPU-none-{number}"]}},
    },
    "model": lambda number: {"gpu": {"model": f"M{number}"}},
    "driver": lambda number: {"run": {"driver": f"d{number}", "argv": ["x"]}},
}


def _asks(number: int, **more: Any) -> dict[str, Any]:
    run = {"driver": "process", "argv": ["x", f"{number}"]}
    return {"run": run, "on_no_match": "reject", **more}


@pytest.mark.parametrize("refused", REFUSED)
def test_refused_requests_make_nothing_dearer_for_the_requests_after_them(
    refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "ASKED_MAX", MANY)
    drive = Driving(Config(ranker="pack"))
    drive.checks = False
    for number in range(FEW):
        drive.worker(f"w{number}", 8, labels={"zone": "abc"[number % 3], "host": f"n{number}"})

    def refuse(first: int, count: int) -> int:
        for number in range(first, first + count):
            drive.offer_submit(f"r{number}", **_asks(number, **REFUSED[refused](number)))
        return cost(drive)

    def accept(first: int) -> int:
        for worker in drive.workers.values():
            worker.boot += "+"
            assert drive.join(worker)["kind"] == "joined"
        drive.renew()
        for number in range(first, first + FEW):
            drive.offer_submit(f"a{number}", **_asks(number, gpu={}, resources={"cpu_milli": 1 + number}))
        return cost(drive)

    accept(0)
    before = refuse(0, FEW), accept(FEW)
    for number in range(8):
        refuse(MANY * (number + 1), MANY)
    after = refuse(MANY * 20, FEW), accept(2 * FEW)
    assert [many <= SPARE * few for few, many in zip(before, after, strict=True)] == [True, True], (before, after)
    assert "r0" not in drive.state.tenants["t"].jobs


def test_a_second_does_not_walk_the_timers_of_jobs_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timers, "TIMERS_SPARE", 16)
    drive, replicas = Driving(), 8 * FEW
    drive.checks = False
    for number in range(FEW):
        drive.worker(f"w{number}", 8, auto=False)
    drive.submit("j", gpu={}, replicas=replicas)
    drive.reports([("refused", "j", index, 0, "device-busy") for index in range(replicas)])
    assert len(drive.engine.timers.rows) == replicas, "each waits for its next try"
    calls = Calls()
    clear_out = calls.inside(drive.engine.timers.clear_out)
    clear_out()
    walked = calls.made
    clear_out()
    assert walked > replicas
    assert calls.made - walked < 20
    drive.cancel("j")
    drive.renew()
    drive.submit("k", gpu={}, replicas=replicas)
    drive.reports([("refused", "k", index, 0, "device-busy") for index in range(replicas)])
    assert len(drive.engine.timers.rows) == 2 * replicas
    drive.submit("l", gpu={"count": 64}, deadline_s=600)
    clear_out()
    assert len(drive.engine.timers.rows) == replicas + 1, "there are twice as many, and the half are of an ended job"
