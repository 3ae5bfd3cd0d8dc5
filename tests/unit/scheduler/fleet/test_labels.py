"""Labels tell hosts apart as far as some request has required them: each host has one of its own, as its name."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from moorage.ranking.mix import LOOK_FIRST
from moorage.ranking.table import HostTable, nearly
from moorage.scheduler.answers.waiting import explain_job
from moorage.scheduler.core.config import Config
from moorage.scheduler.core.fleet import fleet, shape
from moorage.scheduler.core.ledger.state import QUEUED
from tests.unit.scheduler.driving import Driving, wire

HOSTS = 12
MIB = 1024 * 1024


def named(hosts: int = HOSTS, ranker: str = "fragments", gpus: int = 1) -> Driving:
    """Hosts in zones a, b and c, each with its own name."""
    drive = Driving(Config(ranker=ranker))
    for number in range(hosts):
        drive.worker(f"w{number}", gpus, labels=labels_of(number))
    return drive


def labels_of(number: int) -> dict[str, str]:
    return {"host": f"n{number}", "zone": "abc"[number % 3]}


def where(drive: Driving, job: str) -> list[str]:
    return [replica.attempt.worker.id for replica in drive.job(job).replicas if replica.attempt is not None]


def sizes(drive: Driving) -> list[int]:
    """How many hosts each class has."""
    return sorted(len(cls.hosts) for cls in drive.engine.fleet.classes.values())


def test_hosts_are_one_class_but_for_labels_that_were_required() -> None:
    drive = named()
    drive.submit("any", gpu={})
    assert sizes(drive) == [HOSTS]
    drive.submit("one", gpu={}, requires={"host": ["n7", "nobody"]})
    assert where(drive, "one") == ["w7"]
    assert sizes(drive) == [1, HOSTS - 1]
    drive.submit("zone", gpu={}, requires={"zone": ["c"]}, replicas=4)
    assert {int(worker[1:]) % 3 for worker in where(drive, "zone")} == {2}
    assert sizes(drive) == [1, 4, HOSTS - 5]


def test_a_host_is_told_apart_once_a_mix_is_known_too() -> None:
    """The ranker looks at its table of hosts by then, and no longer at the classes themselves."""
    drive = named(gpus=8)
    drive.submit("mix", gpu={"count": 2}, replicas=LOOK_FIRST)
    drive.submit("any", gpu={"count": 2})
    free = {host.worker.num: host for host in drive.engine.fleet.hosts.values() if host.open.bit_count() >= 2}
    last = free[max(free)].worker.id
    drive.submit("one", gpu={"count": 2}, requires={"host": [last.replace("w", "n")]})
    assert where(drive, "one") == [last]


def test_hosts_that_tell_a_little_more_memory_or_less_are_of_one_type() -> None:
    """As machines of one kind do; a ranker weighs each type of hosts anew with each mix of requests."""
    drive = Driving()
    for number in range(HOSTS):
        drive.worker(f"w{number}", cpu_milli=128_000, memory_mib=1_031_000 + number)
    drive.worker("half", cpu_milli=128_000, memory_mib=515_500)
    table = HostTable(drive.engine.fleet)
    assert [(kind.memory_mib, kind.gpus) for kind in table.types] == [(1_024_000, 1), (512_000, 1)]
    assert table.kinds_of_type.tolist() == [[0, 0]]
    assert [nearly(memory) for memory in (0, 1, 127, 262_144, 393_216)] == [0, 1, 127, 262_144, 393_216]


def test_whatever_labels_hosts_have_their_devices_are_asked_once() -> None:
    """Of many required labels come as many classes as hosts: a new shape asked each of them, some 50 µs."""
    drive = named()
    drive.submit("rest", gpu={"model": "H100"}, requires={"host": ["nobody", *(f"n{n}" for n in range(HOSTS))]})
    classes = list(drive.engine.fleet.classes.values())
    assert len(classes) == HOSTS
    assert len({id(cls.fits) for cls in classes}) == 1
    drive.submit("one", gpu={"model": "H100"}, requires={"host": ["n7"]})
    drive.submit("none", gpu={"model": "A100"}, requires={"host": ["n7"]})
    drive.submit("driver", gpu={"model": "H100"}, requires={"host": ["n7"]}, run={"driver": "odd"})
    reasons = {
        job: sorted({cls.fit(drive.engine.reader.shape_of(drive.job(job))).reason for cls in classes})
        for job in ("rest", "one", "none", "driver")
    }
    assert reasons == {"rest": [""], "one": ["", "label"], "none": ["label", "model"], "driver": ["driver"]}
    known = len(classes[0].fits)
    drive.worker("late", 1, labels={"host": "n7"})
    assert len({id(cls.fits) for cls in drive.engine.fleet.classes.values()}) == 1
    assert len(classes[0].fits) == known


def test_what_was_required_before_a_host_came_is_found_on_it() -> None:
    drive = named(1)
    drive.submit("late", gpu={}, requires={"zone": ["c"], "host": ["n5"]})
    data = wire(explain_job(drive.engine, "t", "late"))
    assert data["reason"] == "label"
    drive.worker("w4", labels=labels_of(4))
    drive.tick()
    assert drive.states("late") == ["QUEUED"]
    drive.worker("w5", labels=labels_of(5))
    drive.tick()
    assert where(drive, "late") == ["w5"]


def test_a_new_leader_tells_them_apart_by_what_waits() -> None:
    drive = named(3)
    drive.submit("hog", gpu={}, requires={"zone": ["b"]})
    drive.settle()
    drive.submit("waits", gpu={}, requires={"zone": ["b"]})
    drive.lead()
    drive.renew()
    drive.run_out("w1")
    drive.settle()
    assert where(drive, "waits") == ["w1"]


def test_a_host_that_is_told_apart_keeps_what_it_holds() -> None:
    drive = Driving.with_hosts(4, labels={"host": "n0"})
    drive.worker("w1", 4, labels={"host": "n1"})
    drive.submit("whole", gpu={"count": 2}, replicas=2)
    drive.submit("shared", gpu={"sharing": "mps"}, replicas=3)
    drive.settle()
    before = {host.worker.id: (host.free, host.held) for host in drive.engine.fleet.hosts.values()}
    drive.submit("apart", gpu={"count": 4}, requires={"host": ["n0"]})  # each tick looks at the shelves, too
    assert {host.worker.id: (host.free, host.held) for host in drive.engine.fleet.hosts.values()} == before
    (host,) = {worker.replace("w", "n") for worker in where(drive, "shared")}
    drive.submit("beside", gpu={"sharing": "mps"}, requires={"host": [host]})
    assert where(drive, "beside") == where(drive, "shared")[:1]


@pytest.mark.parametrize("remembered", [0, 5, 4_096])
@pytest.mark.parametrize("ranker", ["fragments", "pack", "headroom"])
@pytest.mark.parametrize("seed", range(2))
def test_whatever_is_required_runs_on_hosts_that_have_it_and_waits_only_where_none_is_free(
    seed: int, ranker: str, remembered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "ASKED_MAX", remembered)
    chance, drive = random.Random(seed), named(6, ranker, gpus=2)
    asked: dict[str, dict[str, list[str]]] = {}
    for number in range(40):
        if chance.random() < 0.2 and number % 2:
            drive.worker(f"w{6 + number}", 2, labels=labels_of(6 + number))
        if chance.random() < 0.3 and asked:
            drive.cancel(chance.choice(list(asked)))
            drive.settle()
        requires: dict[str, list[str]] = {}
        if chance.random() < 0.7:
            requires["zone"] = chance.sample("abcd", chance.randint(1, 2))
        if chance.random() < 0.4:
            requires["host"] = [f"n{chance.randrange(50)}" for _ in range(chance.randint(1, 20))]
        asked[f"j{number}"] = requires
        drive.submit(f"j{number}", gpu={"count": chance.choice((1, 1, 2))}, requires=requires)
        drive.settle()
        _check(drive, asked)


def _check(drive: Driving, asked: dict[str, dict[str, list[str]]]) -> None:
    engine, hosts = drive.engine, drive.engine.fleet.hosts
    for name, requires in asked.items():
        job = drive.job(name)
        able = {
            num
            for num, host in hosts.items()
            if all(host.labels.get(label) in values for label, values in requires.items())
        }
        (replica,) = job.replicas
        if replica.state == QUEUED:  # hosts that join later are told apart only by what waits
            found = engine.fleet.capable(engine.reader.shape_of(job))
            assert {host.worker.num for cls, _ in found for host in cls.hosts.values()} == able
        if replica.attempt is not None:
            assert replica.attempt.worker.num in able
        elif replica.state == QUEUED:
            most = max((hosts[num].open.bit_count() for num in able), default=0)
            assert most < engine.reader.shape_of(job).count, f"{name} waits beside free GPUs"


def rejoin(drive: Driving) -> None:
    for worker in drive.workers.values():
        worker.boot += "-2"
        assert drive.join(worker)["kind"] == "joined"


@pytest.mark.parametrize(
    "asked",
    [
        lambda number: {"requires": {"host": [f"nowhere-{number}"]}},
        lambda number: {"requires": {f"label-{number}": ["n0"]}},
        lambda number: {"driver_config": {"process": {"gpu_device_ids": [f"GPU-nowhere-{number}"]}}},
    ],
    ids=["value", "label", "device"],
)
def test_refused_requests_for_what_no_host_has_leave_hosts_alike(
    monkeypatch: pytest.MonkeyPatch, asked: Callable[[int], dict[str, Any]]
) -> None:
    monkeypatch.setattr(fleet, "ASKED_MAX", 8)
    drive = named()
    for number in range(20):
        run = {"driver": "process", "argv": ["x"]}
        answer = drive.submit(f"j{number}", gpu={}, run=run, on_no_match="reject", **asked(number))
        assert answer["code"] == "failed-precondition"
    rejoin(drive)
    assert sizes(drive) == [HOSTS]


def test_hosts_are_alike_again_once_no_host_has_what_was_required() -> None:
    drive = named()
    drive.submit("one", gpu={}, requires={"host": ["n7"]}, run={"driver": "noop", "timeout_s": 1, "grace_s": 1})
    assert sizes(drive) == [1, HOSTS - 1]
    drive.run_out("w7")
    rejoin(drive)
    assert sizes(drive) == [HOSTS]


def test_a_job_waits_for_its_host_in_a_backoff_or_on_hold_as_in_the_queue() -> None:
    drive = named(2)
    w1 = drive.workers["w1"]
    w1.auto = False
    drive.submit("backoff", gpu={}, requires={"host": ["n1"]})
    drive.report("refused", "backoff", detail="device-busy 0")
    drive.submit("held", gpu={}, requires={"host": ["n9"]})
    drive.order("hold", job="held")
    rejoin(drive)
    drive.worker("w9", labels=labels_of(9))
    drive.order("release", job="held")
    drive.pass_time(60_000)
    assert where(drive, "held") == ["w9"]
    assert where(drive, "backoff") == ["w1"]


def many_labels(number: int, keys: int, values: int, chars: int = 8) -> dict[str, list[str]]:
    words = [[f"{number}-{key}-{at}".rjust(chars, "x") for at in range(values)] for key in range(keys)]
    return {f"k{number}-{key}": of_key for key, of_key in enumerate(words)}


def long_driver(number: int) -> dict[str, Any]:
    return {"run": {"argv": ["true"], "driver": f"{number}".rjust(20_000, "d")}}


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked", [lambda number: {"requires": many_labels(number, 16, 16)}, long_driver], ids=["labels", "driver"]
)
def test_refused_requests_with_ever_other_words_make_nothing_grow(
    monkeypatch: pytest.MonkeyPatch, asked: Callable[[int], dict[str, Any]]
) -> None:
    monkeypatch.setattr(shape, "WORD_BYTES_MAX", 2 * MIB)
    drive = Driving()
    drive.submit("j", gpu={"count": 1})

    def flood(first: int, last: int) -> None:
        for number in range(first, last):
            assert drive.submit("j", **asked(number))["code"] in ("conflict", "invalid-argument")

    flood(0, 200)
    tracemalloc.start()
    try:
        flood(200, 800)
        grown = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert grown < 6 * MIB, f"{grown} bytes for requests of which none was accepted"


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"requires": many_labels(0, 5, 52)}, "$.requires"),
        ({"requires": many_labels(0, 1, 1, chars=257)}, "$.requires"),
        ({"run": {"argv": ["true"], "driver": "d" * 257}}, "$.run.driver"),
        ({"gpu": {"vendor": "v" * 257}}, "$.gpu.vendor"),
    ],
)
def test_more_words_than_a_request_is_counted_for_are_refused(asked: dict[str, Any], field: str) -> None:
    answer = Driving().submit("j", **asked)
    assert (answer["code"], answer["field"]) == ("invalid-argument", field)


def test_a_warning_names_few_of_many_labels() -> None:
    drive = Driving()
    drive.worker("w", 1)
    [warning] = drive.submit("j", requires={"zone": [f"z{at:02}" for at in range(64)]})["warnings"]
    assert "zone=z00 or zone=z01 or zone=z02 or …: " in warning
