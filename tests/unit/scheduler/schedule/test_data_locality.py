"""Data that hosts have: of hosts that are as good else, a job gets one that has what it reads, and waits for none."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from moorage.scheduler.core.config import Config
from moorage.schemas.frames import NOT_HERE, Load
from moorage.schemas.held_data import HELD_MAX, held_key, keys_below
from tests.unit.scheduler.driving import Driving
from tests.unit.scheduler.queries.test_plan_verb import planned

SET = "https://example.org/set.csv"
MODEL = "hf:org/name@main"


def site(*gpus: int) -> Driving:
    drive = Driving()
    for number, count in enumerate(gpus):
        drive.worker(f"w{number}", count)
    return drive


def has(drive: Driving, name: str, *sources: str, tenant: str = "t", driver: str = "process") -> None:
    drive.workers[name].data = [held_key(tenant, driver, source) for source in sources]
    drive.load(name)


def reads(drive: Driving, job: str, *sources: str, **fields: object) -> None:
    run = {"argv": ["true"], "data": {f"d{at}": source for at, source in enumerate(sources)}}
    drive.submit(job, run=run, **{"gpu": {}, **fields})


def test_of_equal_hosts_the_one_with_most_of_the_data_is_taken() -> None:
    drive = site(4, 4, 4)
    has(drive, "w1", SET)
    has(drive, "w2", SET, MODEL)
    reads(drive, "both", SET, MODEL)
    drive.submit("none", gpu={"count": 4})
    drive.settle()
    assert drive.placed_on("both") == ["w2"]
    assert drive.placed_on("none") == ["w0"]
    reads(drive, "four", SET, gpu={"count": 4})
    drive.settle()
    assert drive.placed_on("four") == ["w1"]


def test_a_host_that_is_better_for_the_fleet_comes_first_and_none_waits() -> None:
    drive = site(4, 4)
    drive.submit("fills", gpu={"count": 3})
    drive.settle()
    assert drive.placed_on("fills") == ["w0"]
    has(drive, "w1", SET)
    reads(drive, "packed", SET)
    drive.settle()
    assert drive.placed_on("packed") == ["w0"]
    drive.submit("more", gpu={"count": 4})
    drive.settle()
    assert drive.placed_on("more") == ["w1"]
    drive.worker("w9", 4)
    reads(drive, "elsewhere", SET)
    drive.settle()
    assert drive.placed_on("elsewhere") == ["w9"]


def test_what_is_anothers_or_of_another_driver_or_gone_counts_for_nothing() -> None:
    for whose in ({"tenant": "other"}, {"driver": "docker"}, {}):
        drive = site(2, 2)
        has(drive, "w1", SET, **whose)
        if not whose:
            has(drive, "w1")
        reads(drive, "a", SET)
        drive.settle()
        assert drive.placed_on("a") == ["w0"], whose


def test_a_gang_and_many_replicas_prefer_hosts_too() -> None:
    drive = site(2, 2, 2, 2)
    for name in ("w1", "w3"):
        has(drive, name, SET)
    reads(drive, "gang", SET, gpu={"scheduling": "gang", "count": 2}, replicas=2)
    drive.settle()
    assert set(drive.placed_on("gang")) == {"w1", "w3"}
    drive = site(2, 2, 2, 2)
    has(drive, "w3", SET)
    reads(drive, "sweep", SET, replicas=4)
    drive.settle()
    assert sorted(drive.placed_on("sweep")) == ["w0", "w0", "w3", "w3"]


def test_explain_names_the_data_of_a_host_that_is_full() -> None:
    drive = site(2, 2)
    drive.submit("fills", gpu={"count": 2}, replicas=2)
    drive.settle()
    has(drive, "w1", SET)
    reads(drive, "late", SET)
    told = drive.explained("late")["held_by"]
    assert told[-2:] == ["w0: 2 of 2 GPUs leased", "w1: 2 of 2 GPUs leased, has data d0"]


@pytest.mark.parametrize("seed", range(12))
def test_in_random_worlds_data_change_no_room_and_no_turn(seed: int) -> None:
    """The same world with and without data places as many jobs on hosts as full, whatever the hosts have."""
    dice = random.Random(seed)
    counts, asked = [dice.choice((2, 4, 8)) for _ in range(6)], [dice.choice((1, 1, 2, 4)) for _ in range(20)]
    having = [dice.sample((SET, MODEL), dice.randrange(3)) for _ in counts]
    shapes: list[list[tuple[str, list[int]]]] = []
    for with_data in (False, True):
        drive = site(*counts)
        for number, sources in enumerate(having if with_data else ()):
            has(drive, f"w{number}", *sources)
        for at, count in enumerate(asked):
            reads(drive, f"j{at}", (SET, MODEL)[at % 2], gpu={"count": count})
        drive.settle()
        left: dict[str, int] = {f"w{number}": count for number, count in enumerate(counts)}
        placed = 0
        for at, count in enumerate(asked):
            for name in set(drive.placed_on(f"j{at}")) - {"-"}:
                left[name] -= count
                placed += 1
        kinds = [sorted(left[f"w{n}"] for n, of in enumerate(counts) if of == size) for size in (2, 4, 8)]
        shapes.append([("placed", [placed]), *((str(size), kind) for size, kind in zip((2, 4, 8), kinds, strict=True))])
    assert shapes[0] == shapes[1]


def test_a_load_frame_tells_of_a_bounded_number() -> None:
    frame = Load("w", "b", 1, 1, data=["0" * 16] * HELD_MAX)
    body = msgspec.json.encode(frame)
    assert msgspec.json.decode(body, type=Load) == frame
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode(msgspec.structs.replace(frame, data=["0"] * (HELD_MAX + 1))), type=Load)


# ------------------------------------------------------------------------------------------------ data_wait


def waiting_site(*gpus: int, wait_s: float = 60, **config: Any) -> Driving:
    drive = Driving(Config(data_wait=wait_s, **config))
    for number, count in enumerate(gpus):
        drive.worker(f"w{number}", count, labels={"host": f"w{number}"})
    return drive


def fills(drive: Driving, name: str, tenant: str = "t") -> None:
    """Fill a host, which has the data that the next jobs read."""
    drive.submit(f"on-{name}", tenant=tenant, gpu={"count": 2}, requires={"host": [name]})
    drive.settle()
    assert drive.placed_on(f"on-{name}", tenant) == [name]
    has(drive, name, SET)


def goes_by(drive: Driving, ms: int) -> None:
    """Time goes by, in which workers renew and tell of their load."""
    while ms > 0:
        for name in drive.workers:
            drive.load(name)
        drive.pass_time(min(ms, 2_000))
        ms -= 2_000


def test_a_job_waits_for_a_host_with_its_data_and_no_longer_than_data_wait() -> None:
    drive = waiting_site(2, 2)
    fills(drive, "w0")
    reads(drive, "late", SET)
    drive.submit("other", gpu={"count": 1})
    drive.settle()
    assert drive.placed_on("other") == ["w1"], "it reads nothing, and passes the one that waits"
    told = drive.explained("late")
    assert (told["state"], told["reason"]) == ("QUEUED", "data")
    assert told["because"].endswith("s any worker with room will do")
    assert told["held_by"] == ["job on-w0: 2 GPUs", "w0: 2 of 2 GPUs leased, has data d0"]
    goes_by(drive, 30_000)
    assert drive.placed_on("late") == ["-"]
    goes_by(drive, drive.job("late").accepted_ms + 59_999 - drive.now)
    assert drive.placed_on("late") == ["-"]
    assert drive.engine.planner.moment_ms() == drive.job("late").accepted_ms + 60_000
    drive.tick()
    assert drive.placed_on("late") == ["w1"], "by time alone, at the moment for which the leader wakes"


def test_a_plan_says_that_a_job_would_wait_for_its_data_and_until_when() -> None:
    drive = waiting_site(2, 2)
    fills(drive, "w0")
    run = {"argv": ["true"], "data": {"d0": SET}}
    told = planned(drive, {"gpu": {}, "run": run})
    assert told.waiting is not None
    assert (told.starts, told.waiting.reason, told.on) == ("later", "data", "w1")
    assert told.in_ms is not None
    assert told.in_ms.p50_ms == 60_000
    assert planned(drive, {"gpu": {}, "run": run | {"data": {"d0": MODEL}}}).starts == "now", "no host has it"


def test_a_host_with_the_data_that_becomes_free_ends_the_wait() -> None:
    drive = waiting_site(2, 2)
    fills(drive, "w0")
    reads(drive, "late", SET)
    drive.settle()
    assert drive.placed_on("late") == ["-"]
    drive.run_out("w0")
    drive.settle()
    assert drive.placed_on("late") == ["w0"]


def test_none_waits_where_no_host_that_could_run_it_has_the_data() -> None:
    drive = waiting_site(2, 4)
    has(drive, "w0", SET)
    reads(drive, "wide", SET, gpu={"count": 4})
    reads(drive, "unread", MODEL, gpu={"count": 2})
    drive.settle()
    assert drive.placed_on("wide") == ["w1"]
    assert drive.placed_on("unread") == ["w0"]
    drive.operate("cordon", "w0")
    drive.worker("w2", 2)
    reads(drive, "closed", SET)
    drive.settle()
    assert drive.placed_on("closed") == ["w2"]


def test_a_gang_waits_only_for_hosts_that_could_hold_all_of_it() -> None:
    for with_data, placed in ((1, ["w1", "w2"]), (2, ["-", "-"])):
        drive = waiting_site(2, 2, 2)
        fills(drive, "w0")
        for name in ("w0", "w1")[:with_data]:
            has(drive, name, SET)
        reads(drive, "gang", SET, gpu={"scheduling": "gang", "count": 2}, replicas=2)
        drive.settle()
        assert sorted(drive.placed_on("gang")) == placed
        goes_by(drive, 61_000)
        drive.settle()
        assert sorted(drive.placed_on("gang")) == ["w1", "w2"]


def test_many_that_wait_keep_no_other_tenant_from_its_data_and_all_start_once_it_is_over() -> None:
    drive = waiting_site(2, 64, 64)
    fills(drive, "w0", tenant="other")  # whose turn is the later one then
    for number in range(70):
        drive.offer_submit(f"j{number}", run={"argv": ["true"], "data": {"d0": SET}}, gpu={})
    drive.offer_submit("theirs", tenant="other", run={"argv": ["true"], "data": {"d0": SET}}, gpu={})
    drive.settle()
    assert {drive.placed_on(f"j{number}")[0] for number in range(70)} == {"-"}
    assert drive.placed_on("theirs", tenant="other") == ["w1"], "no host has what is its own"
    goes_by(drive, 61_000)
    drive.settle()
    assert {drive.placed_on(f"j{number}")[0] for number in range(70)} == {"w1", "w2"}


def test_no_job_ends_for_one_that_waits_for_its_data() -> None:
    drive = waiting_site(2, 2, preempt_priority=50, preempt_after=0)
    fills(drive, "w0")
    reads(drive, "urgent", SET, priority=90)
    goes_by(drive, 10_000)
    assert drive.placed_on("on-w0") == ["w0"]
    assert drive.states("on-w0") == ["RUNNING"]
    goes_by(drive, 61_000)
    drive.settle()
    assert drive.placed_on("urgent") == ["w1"]


def test_a_sweep_waits_once_and_not_for_each_of_its_replicas() -> None:
    drive = waiting_site(2, 8)
    has(drive, "w0", SET)
    reads(drive, "sweep", SET, replicas=8)
    drive.settle()
    assert sorted(drive.placed_on("sweep")) == ["-"] * 6 + ["w0"] * 2
    goes_by(drive, 61_000)
    drive.settle()
    assert sorted(drive.placed_on("sweep")) == ["w0"] * 2 + ["w1"] * 6


# ------------------------------------------------------------------------------------------------ paths of data_dirs


def lists(drive: Driving, name: str, *names: str, folder: str = "/data/") -> None:
    drive.workers[name].data = keys_below("process", folder, list(names))
    drive.load(name)


@pytest.mark.parametrize(
    ("path", "taken"),
    [("/data/coco", "w1"), ("/data//coco/train/", "w1"), ("/data", "w0"), ("/data/none", "w0"), ("/srv/x", "w0")],
)
def test_a_path_of_data_dirs_sends_a_job_to_a_host_that_has_it(path: str, taken: str) -> None:
    drive = site(4, 8)
    lists(drive, "w0", "imagenet")
    lists(drive, "w1", "coco", "pile")
    reads(drive, "j", path)
    drive.settle()
    assert drive.placed_on("j") == [taken], "the smaller host is better, if both may have it"


def test_a_job_waits_for_the_hosts_that_have_its_path_and_for_no_time() -> None:
    drive = site(2, 2)
    drive.submit("fills", gpu={"count": 2})
    drive.settle()
    lists(drive, "w0", "coco")
    lists(drive, "w1", "pile")
    reads(drive, "late", "/data/coco")
    goes_by(drive, 40_000)
    told = drive.explained("late")
    assert (told["state"], told["reason"]) == ("QUEUED", "data")
    assert told["because"] == "those with room have not its paths of data_dirs"
    assert told["held_by"] == ["job fills: 2 GPUs", "w0: 2 of 2 GPUs leased, has data d0"]
    lists(drive, "w1", "pile", "coco")  # it was copied there
    drive.settle()
    assert drive.placed_on("late") == ["w1"]


def test_a_path_that_no_host_tells_of_is_looked_for_on_more_hosts_than_a_secret() -> None:
    for count, ends in ((16, False), (17, True)):
        drive = Driving.with_hosts(*[1] * 20, auto=False)
        reads(drive, "j", "/mnt/set")
        tried = set()
        for _ in range(count - 1):
            tried.add(drive.placed_on("j")[0])
            drive.report("refused", "j", code=126, detail=NOT_HERE + "data: there is no /mnt/set on this host")
            drive.pass_time(60_000)
        assert len(tried) == count - 1
        assert drive.states("j") == (["FAILED"] if ends else ["PLACED"])


def test_a_host_that_tells_of_a_path_and_refuses_it_is_left_also_by_the_next_leader() -> None:
    """What is told is what a folder has, not what lies deeper."""
    drive = Driving.with_hosts(1, 1, auto=False)
    lists(drive, "w0", "coco")
    reads(drive, "j", "/data/coco/deep")
    assert drive.placed_on("j") == ["w0"]
    drive.report("refused", "j", code=126, detail=NOT_HERE + "data: there is no /data/coco/deep on this host")
    drive.lead()
    for name in drive.workers:
        drive.load(name)
    goes_by(drive, 40_000)
    assert drive.placed_on("j") == ["w1"]
