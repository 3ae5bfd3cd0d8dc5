"""Every end of a job of very many replicas is a row in the history, and is found there by its number."""

from __future__ import annotations

import random
from typing import Any

import pytest

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.ledger.state import LISTED_MAX
from moorage.schemas.errors import Problem
from moorage.schemas.job import STATES
from moorage.schemas.ranges import Ranges, ranges_of
from tests.unit.scheduler.driving import wire
from tests.unit.scheduler.follower.test_history import Writing, scene
from tests.waiting import until

COUNT = 5_000
WORKERS, SLOTS = 4, 64


async def shown(drive: Writing, job: str, only: Ranges) -> list[dict[str, Any]]:
    """The rows of some replicas, as `show` answers."""
    drive.questions += 1
    reply = f"q{drive.questions}"
    data = drive.reader.show("t", job, reply, True, only=only)
    if data is None:
        await until(lambda: reply in drive.answered, 60, f"an answer to show {job}")
        data = drive.answered[reply]
    assert not isinstance(data, Problem), data
    rows: list[dict[str, Any]] = wire(data)["replica_states"]
    return rows


async def play_all(drive: Writing, chance: random.Random, until_left: int = 0) -> dict[int, tuple[str, int, str]]:
    """Run the replicas, of which some fail; return of each its state, exit code and worker."""
    ended: dict[int, tuple[str, int, str]] = {}
    while (
        (drive.state.job("t", "many") is not None)
        and not drive.job("many").over
        and drive.job("many").live > until_left
    ):
        found = {index: row.attempt for index, row in drive.job("many").rows.items() if row.attempt is not None}
        codes = {index: chance.choice((0,) * 9 + (3,)) for index in found}
        for kind in ("claimed", "started"):
            drive.reports([(kind, "many", index, 0, "") for index in found])
        ended |= {
            index: ("FAILED" if codes[index] else "SUCCEEDED", codes[index], attempt.worker.id)
            for index, attempt in found.items()
        }
        drive.reports([("exited", "many", index, code, "") for index, code in codes.items()])
        drive.reports([("freed", "many", index, 0, "") for index in found])
        await drive.written(0.1)
    return ended


def busy(drive: Writing) -> None:
    for number in range(WORKERS):
        drive.worker(f"w{number}", SLOTS, auto=False)
    drive.submit("many", replicas=COUNT, gpu={}, max_failed=None)


@pytest.mark.slow
@scene(Config(ended_max=0))
async def test_each_end_is_found_by_its_number_while_the_job_runs_and_when_it_has_left_memory(drive: Writing) -> None:
    drive.checks = False
    busy(drive)
    chance = random.Random(4)
    ended = await play_all(drive, chance, until_left=1_000)
    assert len(drive.job("many").history) < 16 * LISTED_MAX
    some = sorted(chance.sample(sorted(ended), 40))
    rows = await shown(drive, "many", ranges_of(some))
    assert [(row["replica"], row["state"], row.get("code"), row["ran_on"]) for row in rows] == [
        (index, *ended[index]) for index in some
    ]
    drive.cancel("many")
    for index in list(drive.job("many").rows):
        drive.reports([("withdrawn", "many", index, 0, "")])
    await drive.written(2)
    assert drive.state.job("t", "many") is None, "it has left memory"
    rows = await shown(drive, "many", ranges_of([*some, COUNT - 1]))
    assert [(row["replica"], row["state"]) for row in rows] == [
        *((index, ended[index][0]) for index in some),
        (COUNT - 1, "CANCELLED"),
    ]
    pages = await drive.pages("many")
    found = {change["replica"]: change for change in pages if change["state"] in ("SUCCEEDED", "FAILED")}
    assert {index: (change["state"], change["code"], change["worker"]) for index, change in found.items()} == ended
    assert all(change["fence"] and change["attempt"] == 1 for change in found.values())
    cancelled = [
        range(each["replica"], each.get("through", each["replica"]) + 1)
        for each in pages
        if each["state"] == "CANCELLED"
    ]
    assert sum(map(len, cancelled)) == COUNT - len(ended)


@pytest.mark.slow
@scene(Config(ended_max=0))
async def test_another_follower_goes_on_and_writes_no_end_twice(drive: Writing) -> None:
    drive.checks = False
    drive.follows(save_records=30)
    busy(drive)
    chance = random.Random(5)
    ended = await play_all(drive, chance, until_left=1_000)
    drive.follows()
    await drive.written(2)
    ended |= await play_all(drive, chance)
    await drive.written(2)
    told = [move for frame in drive.frames() for history in frame.jobs for move in history.moves if move.worker >= 0]
    assert len(told) == len(ended) == COUNT
    assert {move.replica: STATES[move.state] for move in told} == {index: row[0] for index, row in ended.items()}


@scene()
async def test_events_of_very_many_are_counts_and_exceptions(drive: Writing) -> None:
    drive.checks = False
    busy(drive)
    ended = await play_all(drive, random.Random(6), until_left=COUNT - 500)
    events = [event for event in drive.events if event["job"] == "many"]
    assert {event["replicas"]["of"] for event in events} == {COUNT}
    assert sum(events[-1]["replicas"]["states"].values()) == COUNT
    told = {change["replica"] for event in events for change in event.get("changes", ()) if change["replica"] >= 0}
    assert told == {index for index, (state, _, _) in ended.items() if state == "FAILED"}
    data = await drive.asked("show", "many")
    assert data["replicas"]["states"]["SUCCEEDED"] == sum(state == "SUCCEEDED" for state, _, _ in ended.values())
    assert data["replicas"]["ended"]["FAILED"].split(", ")[0] == str(min(told))
    drive.cancel("many")
    last = [event for event in drive.events if event["job"] == "many"][-1]["changes"][0]
    assert (last["state"], last["through"]) == ("CANCELLED", COUNT - 1)
