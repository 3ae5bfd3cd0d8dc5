"""A sweep as a grid of letters."""

from __future__ import annotations

from typing import Any

from moorage.cli.jobs.grid_lines import LINES_MAX, grid_lines
from moorage.client.answers import JobInfo
from moorage.client.reading import as_struct
from moorage.client.view.grid import grid
from moorage.scheduler.answers.views import show
from moorage.schemas.answers.jobs import ReplicaCounts
from tests.unit.scheduler.driving import Driving, wire


def shown(size: int, alive: dict[str, str], ended: dict[str, str], **more: Any) -> JobInfo:
    data = {"request": {"replicas": size, **more}}
    counts = ReplicaCounts(of=size, states={}, ended=ended)
    return JobInfo(job="j", tenant="t", state="RUNNING", alive=alive, data=data, replicas=counts)


def test_each_replica_has_a_letter_in_the_order_of_their_numbers() -> None:
    found = grid(shown(8, {"RUNNING": "2-3", "QUEUED": "6, 7", "PLACED": "5"}, {"FAILED": "1", "CANCELLED": "4"}))
    assert found is not None
    assert found.letters == ".FrrXsqq"
    assert found.counts == {"F": 1, "X": 1, "r": 2, "s": 1, "q": 2, ".": 1}
    assert found.lines(3) == [".Fr", "rXs", "qq"]


def test_of_very_many_the_worst_of_neighbours_is_shown() -> None:
    found = grid(shown(1_000_000, {"QUEUED": "600000-999999"}, {"TIMED_OUT": "123456"}), most=1000)
    assert found is not None
    assert (len(found.letters), found.each) == (1000, 1000)
    assert found.letters.index("F") == 123
    assert found.letters[599:601] == ".q"


def test_what_an_answer_left_out_is_not_told_as_success() -> None:
    found = grid(shown(4, {}, {"FAILED": "0, …"}))
    assert found is not None
    assert found.letters == "F???"


def test_numbers_of_a_part_have_their_own_cells() -> None:
    found = grid(shown(3, {"RUNNING": "50"}, {}, indices="7,50,90"))
    assert found is not None
    assert found.letters == ".r."


def test_one_replica_has_no_grid() -> None:
    assert grid(shown(1, {}, {})) is None


def test_the_scheduler_says_where_each_replica_is() -> None:
    drive = Driving.with_hosts(2)
    drive.submit("j", replicas=7, gpu={})
    drive.settle()
    worker = drive.workers["w0"]
    first, *_ = worker.held
    worker.finish(first, 3)
    drive.settle()
    found = as_struct(JobInfo, wire(show(drive.engine, "t", "j")))
    drawn = grid(found)
    assert drawn is not None
    states = [drive.states("j")[number] for number in range(7)]
    assert drawn.letters == "".join(
        {"RUNNING": "r", "QUEUED": "q", "FAILED": "F", "PLACED": "s", "CLAIMED": "s"}[state] for state in states
    )
    assert {"r", "q", "F"} <= set(drawn.letters)


def test_a_terminal_has_lines_that_begin_with_the_number_of_their_first_replica() -> None:
    found = grid_lines(shown(45, {"RUNNING": "21"}, {"FAILED": "40"}), 24)
    assert found == ["F failed  r running  . succeeded", " 0 " + "." * 20, "20 .r" + "." * 18, "40 F...."]
    of_many = grid_lines(shown(100_000, {}, {"FAILED": "99999"}), 120)
    assert len(of_many) <= LINES_MAX + 1
    assert of_many[-1].endswith("F")
    assert "a letter is 50 replicas" in of_many[0]
    assert grid_lines(shown(8, {"RUNNING": "0-7"}, {}), 80) == [], "a line says enough of so few"
