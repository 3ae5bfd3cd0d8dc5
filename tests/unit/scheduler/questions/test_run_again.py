"""`again`: the request with which what did not succeed of a job is run again, while the job runs and long after."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.events import ChangeOrder
from moorage.scheduler.questions.agains import Agains, again_asked
from moorage.schemas.errors import Problem, Refused
from moorage.schemas.names import is_job
from moorage.schemas.operate import ChangeAsked
from moorage.schemas.ranges import numbers_in, parse_ranges, ranges_of
from tests.unit.scheduler.driving import wire
from tests.unit.scheduler.follower.test_ends_of_many import COUNT, busy, play_all
from tests.unit.scheduler.follower.test_history import Writing, scene
from tests.waiting import until


async def again(drive: Writing, job: str, **arguments: Any) -> Any:
    """What a caller is answered, as plain data; a `Problem` as it is."""
    drive.questions += 1
    reply = f"q{drive.questions}"
    data = Agains(drive.engine, drive.reader).ask("t", again_asked({"job": job, **arguments}), reply, True)
    if data is None:
        await until(lambda: reply in drive.answered, 60, f"an answer to again {job}")
        data = drive.answered[reply]
    return data if isinstance(data, Problem) else wire(data)


def asked(drive: Writing, name: str, **fields: Any) -> None:
    drive.submit(name, gpu={}, run={"driver": "noop", "argv": ["train", "x"]}, labels={"sweep": "lr"}, **fields)


@pytest.mark.slow
@scene(Config(ended_max=0))
async def test_what_did_not_succeed_is_the_same_while_it_runs_and_when_it_has_left_memory(drive: Writing) -> None:
    drive.checks = False
    busy(drive)
    ended = await play_all(drive, random.Random(4), until_left=1_000)
    failed = {index for index, (state, _, _) in ended.items() if state == "FAILED"}
    first = await again(drive, "many", failed=True)
    assert (first["job"], first["again_of"], first["of"]) == ("many-again-1", "many", len(failed))
    assert set(numbers_in(parse_ranges(first["request"]["indices"]))) == failed
    drive.cancel("many")
    for index in list(drive.job("many").rows):
        drive.reports([("withdrawn", "many", index, 0, "")])
    failed |= set(range(COUNT)) - ended.keys()
    some = await again(drive, "many", failed=True, replicas=f"0-99,{COUNT - 1}")
    assert set(numbers_in(parse_ranges(some["request"]["indices"]))) == failed & {*range(100), COUNT - 1}
    await drive.written(2)
    assert drive.state.job("t", "many") is None, "it has left memory"
    last = await again(drive, "many", failed=True)
    assert set(numbers_in(parse_ranges(last["request"]["indices"]))) == failed
    assert last["request"]["max_failed"] is None, "the rest of the request is the same"
    shown = await drive.asked("show", "many")
    counts = shown["replicas"]["states"]
    assert counts["SUCCEEDED"] == COUNT - len(failed)
    assert counts["FAILED"] + counts["CANCELLED"] == len(failed)

    body = {name: value for name, value in last["request"].items() if name != "job"}
    drive.submit(last["job"], **body)
    job = drive.job("many-again-1")
    assert job.size == last["of"] == len(failed)
    assert job.numbers == ranges_of(failed)


def run_all(drive: Writing, job: str, codes: dict[int, int]) -> None:
    """Each replica of a job runs and exits with its code, 0 if none is said."""
    numbers = list(drive.job(job).rows)
    for kind in ("claimed", "started"):
        drive.reports([(kind, job, index, 0, "") for index in numbers])
    drive.reports([("exited", job, index, codes.get(index, 0), "") for index in numbers])
    drive.reports([("freed", job, index, 0, "") for index in numbers])


@scene(Config(ended_max=0))
async def test_a_job_of_one_and_one_of_few_are_run_again_from_their_history(drive: Writing) -> None:
    drive.worker("w0", 8, auto=False)
    asked(drive, "one")
    asked(drive, "few", replicas=4)
    run_all(drive, "one", {0: 3})
    run_all(drive, "few", {0: 3, 2: 3})
    await drive.written()
    assert not drive.state.jobs, "they have left memory"
    one = (await again(drive, "one", failed=True))["request"]
    assert {name: value for name, value in one.items() if name not in ("gpu", "run")} == {
        "job": "one-again-1",
        "again_of": "one",
        "labels": {"sweep": "lr"},
    }
    assert one["run"] == {"driver": "noop", "argv": ["train", "x"]}
    few = (await again(drive, "few", failed=True))["request"]
    assert few["indices"] == "0,2"
    assert "replicas" not in few
    assert "again" not in await drive.asked("show", "few")
    drive.submit("few-again-1", **{name: value for name, value in few.items() if name != "job"})
    assert (await drive.asked("show", "few"))["again"] == ["few-again-1"]
    whole = (await again(drive, "few"))["request"]
    assert whole["replicas"] == 4
    assert "indices" not in whole


@scene(Config(ended_max=0))
async def test_what_a_change_set_holds_for_the_next_run_too_also_from_the_history(drive: Writing) -> None:
    drive.worker("w0", 8, auto=False)
    asked(drive, "few", replicas=4, max_running=4, priority=60)
    drive.engine.offer(ChangeOrder("t", ChangeAsked(job="few", max_running=1, priority=20, timeout_s=7200.0), "", True))
    drive.tick()

    async def bounds() -> tuple[int, int, float]:
        request = (await again(drive, "few"))["request"]
        return request["max_running"], request["priority"], request["run"]["timeout_s"]

    assert await bounds() == (1, 20, 7200.0)
    drive.cancel("few")
    run_all(drive, "few", dict.fromkeys(range(4), 3))
    await drive.written()
    assert not drive.state.jobs, "it has left memory"
    assert await bounds() == (1, 20, 7200.0)
    assert (await drive.asked("show", "few"))["priority"] == 20


@scene()
async def test_a_job_with_a_field_of_a_later_release_is_not_run_again_without_it(drive: Writing) -> None:
    asked(drive, "later")
    body = json.loads(drive.job("later").body) | {"moves": "fast"}
    drive.job("later").body = json.dumps(body).encode()
    refused = await again(drive, "later")
    assert (refused.code, refused.field) == ("failed-precondition", "$.moves")


@scene()
async def test_a_condition_of_the_first_time_is_left_out(drive: Writing) -> None:
    asked(drive, "prep")
    asked(drive, "one", if_seq=drive.state.seq, after=["prep"], start_after_s=60, on_no_match="reject")
    assert {"if_seq", "after", "start_after_s", "on_no_match"}.isdisjoint((await again(drive, "one"))["request"])


@scene()
async def test_a_service_is_run_again_as_a_whole(drive: Writing) -> None:
    can = {"process": {"answers_calls": True, "reaches": True}}
    drive.worker("w0", 4, auto=False, capabilities=can)
    services: dict[str, Any] = {"fixed": 2, "follows": {"min": 2, "max": 4}}
    for name, replicas in services.items():
        drive.submit(name, gpu={}, replicas=replicas, service={"name": name}, run={"argv": ["serve"]})
        drive.reports([(kind, name, index, 0, "") for kind in ("claimed", "started") for index in (0, 1)])
    drive.operate("drain", "w0")
    drive.pass_time(3_000)
    drive.worker("w1", 4, auto=False, capabilities=can)
    drive.tick()
    for name, replicas in services.items():
        moved = max(drive.job(name).rows)
        assert moved == 2
        drive.cancel(name)
        run_all(drive, name, dict.fromkeys(drive.job(name).rows, 3))
        request = (await again(drive, name, failed=True))["request"]
        assert (request["replicas"], "indices" in request) == (replicas, False)
        refused = await again(drive, name, replicas=str(moved))
        assert (refused.field, "as a whole" in refused.message) == ("$.replicas", True)


@scene()
async def test_items_go_on_by_the_numbers_that_are_kept(drive: Writing) -> None:
    drive.worker("w0", 8, auto=False)
    run = {"driver": "noop", "argv": ["{item}"], "items": ["a", "b", "c"]}
    drive.submit("sweep", gpu={}, run=run)
    run_all(drive, "sweep", {1: 3})
    first = (await again(drive, "sweep", failed=True))["request"]
    assert (first["indices"], first["run"]["items"]) == ("1", ["a", "b", "c"])
    drive.submit("sweep-again-1", **{name: value for name, value in first.items() if name != "job"})
    assert drive.job("sweep-again-1").numbers == ((1, 1),)


@scene()
async def test_each_run_again_has_the_next_number_whichever_job_it_is_of(drive: Writing) -> None:
    drive.worker("w0", 8, auto=False)
    asked(drive, "train")
    run_all(drive, "train", {0: 3})
    first = await again(drive, "train", failed=True)
    assert first["again"] == []
    assert first == await again(drive, "train", failed=True), "asking takes no id"
    drive.submit("train-again-1", **{name: value for name, value in first["request"].items() if name != "job"})
    run_all(drive, "train-again-1", {0: 3})
    second = await again(drive, "train", failed=True)
    assert (second["job"], second["again"]) == ("train-again-2", ["train-again-1"])
    third = await again(drive, "train-again-1", failed=True)
    assert (third["job"], third["again_of"], third["again"]) == ("train-again-2", "train-again-1", [])
    long = "x" * 64
    asked(drive, long)
    name = (await again(drive, long))["job"]
    assert is_job(name)
    assert name == "x" * 56 + "-again-1"


@scene(Config(ended_max=0))
async def test_a_number_is_taken_by_a_job_that_only_its_end_is_known_of(drive: Writing) -> None:
    asked(drive, "train")
    asked(drive, "train-again-1")
    drive.cancel("train-again-1")
    await drive.written()
    assert drive.state.job("t", "train-again-1") is None
    assert (await again(drive, "train"))["job"] == "train-again-2"


@scene(Config(ended_max=0))
async def test_a_request_that_is_no_longer_kept_is_said_to_be_gone(drive: Writing) -> None:
    asked(drive, "train")
    drive.cancel("train")
    await drive.written()
    await drive.js.delete_stream("MOORAGE_HISTORY")
    await drive.written()
    gone = await again(drive, "train", failed=True)
    assert (gone.code, gone.fault, gone.job) == ("request-gone", "fleet", "train")


@scene(Config(ended_max=0))
async def test_of_several_replicas_a_long_request_is_kept_too(drive: Writing) -> None:
    env = {f"V{number}": "x" * 100 for number in range(100)}
    for name, replicas in (("one", 1), ("many", 2)):
        drive.submit(name, gpu={}, replicas=replicas, run={"driver": "noop", "argv": ["x"], "env": env})
        drive.cancel(name)
    await drive.written()
    assert (await again(drive, "one")).code == "request-gone"
    assert (await again(drive, "many"))["request"]["run"]["env"] == env


@scene()
async def test_what_has_not_failed_is_not_run_again(drive: Writing) -> None:
    drive.worker("w0", 8, auto=False)
    asked(drive, "well", replicas=2)
    run_all(drive, "well", {})
    well = await again(drive, "well", failed=True)
    assert (well.code, "all of job well has succeeded" in well.message) == ("failed-precondition", True)
    asked(drive, "some", replicas=2)
    live = await again(drive, "some", failed=True)
    assert (live.code, live.next) == ("failed-precondition", "moorage wait some")
    run_all(drive, "some", {1: 3})
    none = await again(drive, "some", failed=True, replicas="0")
    assert (none.code, none.field, none.allowed) == ("failed-precondition", "$.replicas", "1")
    unknown = await again(drive, "some", replicas="1-4,7")
    assert (unknown.message, unknown.allowed) == ("job some has no replica 2-4, 7", "0-1"), (
        "none is left out in silence"
    )
    unknown = await again(drive, "nobody")
    assert unknown.code == "not-found"


@scene()
async def test_ranks_of_a_gang_are_run_again_together(drive: Writing) -> None:
    drive.worker("w0", 8, auto=False)
    drive.submit("gang", replicas=4, gpu={"scheduling": "gang"})
    run_all(drive, "gang", {1: 3})
    drive.cancel("gang")
    request = (await again(drive, "gang", failed=True))["request"]
    assert (request["replicas"], request.get("indices")) == (4, None)
    part = await again(drive, "gang", failed=True, replicas="1")
    assert part.code == "failed-precondition"


@scene()
async def test_what_does_not_fit_into_one_request_is_run_again_in_parts(drive: Writing) -> None:
    drive.checks = False
    drive.submit("many", replicas=100_000, gpu={}, max_failed=None)
    job = drive.job("many")
    for index in range(0, 100_000, 5):  # as if every fifth had failed, which would take very many records
        job.end(index, index, 9, 0, 0)
    refused = await again(drive, "many", failed=True)
    assert (refused.code, refused.found) == ("too-large", "20000")
    found = 0
    for first in range(0, 100_000, 25_000):
        answer = await again(drive, "many", failed=True, replicas=f"{first}-{first + 24_999}")
        assert not isinstance(answer, Problem), answer
        found += answer["of"]
    assert found == 20_000


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"job": "a", "failed": "yes"}, "$.failed"),
        ({"job": "a", "replicas": "5-1"}, "$.replicas"),
        ({"job": "a", "replcas": "1"}, "$.replcas"),
    ],
)
def test_a_misspelt_question_names_its_field(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(Refused) as refused:
        again_asked(arguments)
    assert refused.value.problem.field == field


@scene(Config())
async def test_a_job_for_each_worker_is_run_again_on_all_or_not(drive: Writing) -> None:
    drive.worker("w0", 1, auto=False)
    asked(drive, "check", each_worker="once")
    run_all(drive, "check", dict.fromkeys(drive.job("check").rows, 3))
    refused = await again(drive, "check", failed=True)
    assert isinstance(refused, Problem)
    assert (refused.code, refused.field) == ("failed-precondition", "$.failed")
    assert "again on all of them" in refused.message
    assert (await again(drive, "check"))["request"]["each_worker"] == "once"
