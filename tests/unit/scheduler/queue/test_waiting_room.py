"""Jobs that start after others: what counts as an end, who is told of it, and what a takeover makes of them."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from moorage.cli.jobs.job_rows import job_row
from moorage.scheduler.answers.listing import Reasons, row_of
from moorage.scheduler.answers.views import summary
from moorage.scheduler.answers.waiting import waiting_by_reason
from moorage.scheduler.core.config import Config
from moorage.scheduler.core.events import Cancel
from moorage.scheduler.core.ledger.acts import Met
from moorage.scheduler.core.ledger.ceilings import CEILINGS
from moorage.scheduler.core.ledger.fold import fold
from moorage.scheduler.core.ledger.folding import FoldError
from moorage.scheduler.core.ledger.record import Record, decode_record
from moorage.scheduler.core.ledger.records import STEP_WIDTH, Op
from moorage.scheduler.core.queue.waiting_room import TOLD_MAX
from moorage.scheduler.ledger.ledger_reader import FoldedRecord, concerns, rows
from moorage.scheduler.whatif.forecast import decode_forecast, forecast
from moorage.scheduler.whatif.plan import PlanAsk, decode_planned, plan
from moorage.schemas.answers.jobs import Awaited
from moorage.schemas.job import WHENS
from moorage.schemas.ranges import parse_ranges
from tests.unit.scheduler.driving import Driving

NOOP: dict[str, Any] = {"driver": "noop"}


def ends(drive: Driving, name: str, code: int = 0) -> None:
    """A running job of a worker that is not `auto` exits, and its devices are free."""
    drive.report("exited", name, code=code)
    drive.report("freed", name)


def starts(drive: Driving, name: str) -> None:
    drive.report("claimed", name)
    drive.report("started", name)


def records_of(drive: Driving, since: int) -> list[Record]:
    return [decode_record(payload) for payload in drive.records[since:]]


# ----------------------------------------------------------------------------------------- what counts as an end


@pytest.mark.parametrize("when", WHENS)
@pytest.mark.parametrize("code", [0, 1])
def test_a_job_starts_after_the_end_that_it_asks_for_and_is_cancelled_after_another(when: str, code: int) -> None:
    drive = Driving.with_hosts(2, auto=False)
    drive.submit("train-42", gpu={})
    answer = drive.submit("eval", gpu={}, after=[{"job": "train-42", "when": when}])
    assert (answer["kind"], answer["state"]) == ("accepted", "QUEUED")
    starts(drive, "train-42")
    assert drive.placed_on("eval") == ["-"]
    drive.report("exited", "train-42", code=code)
    drive.tick()
    if when == "any" or (code == 0) == (when == "succeeded"):
        assert drive.states("eval") == ["PLACED"]
        return
    assert drive.states("eval") == ["CANCELLED"]
    assert drive.explained("eval")["why"] == f"after train-42: {'FAILED' if code else 'SUCCEEDED'}"


def test_it_waits_for_all_of_them() -> None:
    drive = Driving.with_hosts(3, auto=False)
    for name in ("a", "b"):
        drive.submit(name, gpu={})
        starts(drive, name)
    drive.submit("both", gpu={}, after=["a", {"job": "b", "when": "any"}])
    ends(drive, "a")
    drive.tick()
    assert drive.states("both") == ["QUEUED"]
    drive.lead()
    drive.renew()
    assert [number for number, _ in drive.job("both").awaits] == [drive.job("b").num]
    ends(drive, "b", code=3)
    drive.tick()
    assert drive.states("both") == ["PLACED"]


def test_an_end_of_before_counts_at_once_and_of_a_job_that_left_memory_too() -> None:
    drive = Driving.with_hosts(1, config=Config(ended_max=1), auto=False)
    for name, code in (("well", 0), ("badly", 1), ("last", 0)):
        drive.submit(name, gpu={})
        starts(drive, name)
        ends(drive, name, code)
    drive.pass_time(2_000)
    assert drive.state.job("t", "well") is None
    assert drive.submit("after-well", gpu={}, after=["well"])["state"] == "QUEUED"
    assert drive.states("after-well") == ["PLACED"]
    found = drive.submit("after-badly", gpu={}, after=["badly"])
    assert (found["state"], found["warnings"]) == ("CANCELLED", ["after badly: FAILED"])
    assert drive.explained("after-badly")["why"] == "after badly: FAILED"


@pytest.mark.parametrize(("job", "word"), [("eval", "eval"), ("last", "'=last'")])
def test_what_was_cancelled_for_anothers_end_is_told_how_that_was_run_again(job: str, word: str) -> None:
    drive = Driving.with_hosts(1, auto=False)
    drive.submit("badly", gpu={})
    starts(drive, "badly")
    ends(drive, "badly", 1)
    drive.submit(job, gpu={}, after=["badly"])
    assert "fixes" not in drive.explained(job)
    drive.submit("badly-again-1", gpu={}, again_of="badly")
    assert drive.explained(job)["fixes"] == [
        {
            "say": "badly was run again, as badly-again-1",
            "command": f"""moorage again {word} --but '{{"after": ["badly-again-1"]}}'""",
            "who": "tenant",
        }
    ]


@pytest.mark.parametrize("tenant", ["t", "u"])
def test_an_unknown_job_is_refused_and_so_is_another_tenants(tenant: str) -> None:
    drive = Driving()
    if tenant == "u":
        drive.submit("prep", gpu={}, tenant="u")
    answer = drive.submit("train", gpu={}, after=["prep"])
    assert (answer["code"], answer["field"], answer["found"]) == ("unknown-job", "$.after", "prep")
    drive.submit("queued", gpu={}, after=["prep"], sequence=1)
    assert drive.states("queued") == ["REJECTED"], "nobody waits for the answer to a request of the durable queue"


def test_a_job_that_is_forgotten_is_unknown() -> None:
    drive = Driving(Config(ended_max=1, finished_keep=60.0, history_keep=60.0))
    drive.submit("old", gpu={})
    drive.cancel("old")
    for name in ("b", "c"):
        drive.submit(name, gpu={})
        drive.cancel(name)
    drive.pass_time(120_000, step=10_000)
    assert drive.submit("new", gpu={}, after=["old"])["code"] == "unknown-job"


def test_no_job_waits_for_itself_through_whatever_others() -> None:
    """An id that is not accepted yet is unknown, so what a job waits for was there before it: no circle can close."""
    drive = Driving()
    first = drive.offer_submit("a", gpu={}, after=["b"])
    second = drive.offer_submit("b", gpu={}, after=["a"])
    alone = drive.offer_submit("c", gpu={}, after=["c"])
    drive.tick()
    assert [drive.answers[reply]["code"] for reply in (first, second, alone)] == ["unknown-job"] * 3
    drive.offer_submit("a", gpu={})
    drive.offer_submit("b", gpu={}, after=["a"])  # in one record: it is known at once
    drive.tick()
    assert drive.job("b").awaits == ((drive.job("a").num, WHENS.index("succeeded")),)


@pytest.mark.parametrize(("other", "which"), [(1, 0), (2, 0), (7, 0), (-5, 0), (0, 3)])
def test_no_record_can_say_that_a_job_waits_for_itself_or_for_a_later_one(other: int, which: int) -> None:
    drive = Driving()
    drive.submit("before", gpu={})
    state = drive.state
    steps = [int(Op.AWAIT), state.next_num, 0, state.next_num + other - 1, which, 0]
    accepts = [("t", [name, b"{}", 1, ""]) for name in ("a", "b")]
    record = Record(1, state.epoch, 7, 9, drive.now, state.digest, accepts=accepts, steps=steps)
    with pytest.raises(FoldError, match="cannot wait"):
        fold(state, record, state.seq + 1)


# ----------------------------------------------------------------------------------------- while it waits


def test_times_count_from_when_it_may_start_and_the_deadline_from_acceptance() -> None:
    drive = Driving.with_hosts(1, auto=False)
    drive.submit("train", gpu={})
    starts(drive, "train")
    drive.submit("hasty", gpu={}, start_within_s=10, after=["train"])
    drive.submit("late", gpu={}, deadline_s=60, after=["train"])
    drive.pass_time(30_000)
    assert drive.states("hasty") == ["QUEUED"]
    assert drive.states("late") == ["QUEUED"]
    drive.submit("first", gpu={}, priority=99)
    ends(drive, "train")
    drive.tick()
    assert drive.states("first") == ["PLACED"]
    assert drive.job("hasty").waits_from_ms == drive.job("hasty").ready_ms
    drive.pass_time(9_000)
    assert drive.states("hasty") == ["QUEUED"]
    drive.lead()
    drive.renew()
    drive.pass_time(2_000)
    assert drive.states("hasty") == ["EXPIRED"]
    drive.pass_time(20_000)
    assert drive.states("late") == ["EXPIRED"]


def test_the_deadline_of_a_job_that_waits_for_others_passes_all_the_same() -> None:
    drive = Driving()
    drive.submit("train", gpu={})
    drive.submit("eval", gpu={}, deadline_s=10, after=["train"])
    drive.submit("report", gpu={}, after=["eval"])
    drive.pass_time(12_000)
    assert drive.states("eval") == ["EXPIRED"]
    assert drive.states("report") == ["CANCELLED"]
    assert drive.explained("report")["why"] == "after eval: EXPIRED"


def test_it_has_no_place_in_the_queue_and_no_age() -> None:
    """An hour behind another job lifts it above nobody: it comes behind what was there when it could start."""
    drive = Driving.with_hosts(1, config=Config(ageing=36_000, reserve_after=5), auto=False)
    drive.submit("train", gpu={})
    starts(drive, "train")
    drive.submit("big", gpu={}, priority=40, after=["train"])
    drive.pass_time(3_600_000, step=60_000)
    assert drive.engine.queue.is_empty
    drive.submit("small", gpu={}, priority=50)
    drive.tick()
    assert drive.engine.planner.verdicts.reservation is None
    ends(drive, "train")
    drive.tick()
    assert (drive.states("small"), drive.states("big")) == (["PLACED"], ["QUEUED"])


def test_limits_count_a_job_that_waits_for_others() -> None:
    drive = Driving()
    drive.order("limit", jobs=2)
    drive.submit("train", gpu={})
    drive.submit("eval", gpu={}, after=["train"])
    assert drive.submit("more", gpu={})["code"] == "failed-precondition"
    drive.cancel("eval")
    assert drive.submit("more", gpu={})["kind"] == "accepted"


def test_a_hold_and_its_release_leave_it_where_it_waits() -> None:
    drive = Driving.with_hosts(2, auto=False)
    drive.submit("train", gpu={})
    starts(drive, "train")
    for name in ("eval", "kept"):
        drive.submit(name, gpu={}, after=["train"])
        drive.order("hold", job=name)
    drive.order("release", job="eval")
    drive.order("priority", job="eval", priority=90)
    assert drive.engine.queue.is_empty
    ends(drive, "train")
    drive.tick()
    assert drive.states("eval") == ["PLACED"]
    assert drive.states("kept") == ["QUEUED"]
    drive.order("release", job="kept")
    assert drive.states("kept") == ["PLACED"]


def test_a_release_in_the_very_record_that_lets_it_go_loses_nobody() -> None:
    drive = Driving.with_hosts(2, auto=False)
    drive.submit("train", gpu={})
    starts(drive, "train")
    drive.submit("eval", gpu={}, after=["train"])
    drive.order("hold", job="eval")
    drive.report("exited", "train")
    drive.offer_order("release", job="eval")
    drive.tick()
    assert drive.states("eval") == ["PLACED"]


def test_replicas_that_are_cancelled_while_it_waits_never_run() -> None:
    drive = Driving.with_hosts(4, auto=False)
    drive.submit("train", gpu={})
    starts(drive, "train")
    drive.submit("sweep", gpu={}, replicas=4, max_running=2, after=["train"])
    drive.engine.offer(Cancel("t", "sweep", "some", replicas=parse_ranges("0-1")))
    drive.tick()
    ends(drive, "train")
    drive.tick()
    assert drive.states("sweep") == ["CANCELLED", "CANCELLED", "PLACED", "PLACED"]


def test_a_gang_waits_as_a_whole() -> None:
    drive = Driving.with_hosts(2, auto=False)
    drive.submit("prep")
    starts(drive, "prep")
    drive.submit("train", replicas=2, gpu={"scheduling": "gang"}, after=["prep"])
    assert drive.placed_on("train") == ["-", "-"]
    ends(drive, "prep")
    drive.tick()
    assert drive.placed_on("train") == ["w0", "w0"]


def test_a_cancelled_job_leaves_those_behind_it_without_a_chance_but_for_any_and_failed() -> None:
    drive = Driving()
    drive.submit("train", gpu={})
    for when in WHENS:
        drive.submit(when, gpu={}, after=[{"job": "train", "when": when}])
    drive.cancel("train")
    drive.tick()
    assert drive.states("succeeded") == ["CANCELLED"]
    assert [drive.job(when).awaits for when in ("any", "failed")] == [(), ()]
    drive.worker("w0", 2, auto=False)
    drive.tick()
    assert [drive.states(when) for when in ("any", "failed")] == [["PLACED"], ["PLACED"]]


# ----------------------------------------------------------------------------------------- what is told


def test_explain_names_the_chain_and_what_would_start_it() -> None:
    drive = Driving.with_hosts(2, auto=False)
    drive.submit("prep", gpu={})
    starts(drive, "prep")
    drive.submit("other", gpu={})
    drive.submit("train", gpu={}, after=[{"job": "prep", "when": "any"}])
    drive.submit("eval", gpu={}, after=["train", "other"])
    told = drive.explained("eval")
    assert told["reason"] == "after"
    assert told["because"] == (
        "it waits for train (QUEUED), which waits for prep (RUNNING, whatever its end); and for 1 more job"
    )
    assert told["after"] == [
        {"job": "train", "when": "succeeded", "state": "QUEUED"},
        {"job": "other", "when": "succeeded", "state": "PLACED"},
    ]
    assert [link["job"] for link in told["chain"]] == ["train", "prep"]
    assert "position" not in told
    ends(drive, "prep")
    drive.tick()
    assert drive.explained("train")["state"] == "PLACED"
    assert [link["job"] for link in drive.explained("eval")["chain"]] == ["train"]


def test_a_free_gpu_starts_it_without_those_that_it_waits_for() -> None:
    drive = Driving.with_hosts(2, auto=False)
    drive.submit("prep", gpu={})
    starts(drive, "prep")
    drive.submit("train", gpu={}, after=["prep"])
    assert drive.fixes("train") == [{"say": "without waiting for prep", "request": {"after": None}}]


def test_a_very_long_chain_is_told_by_its_nearest_links() -> None:
    drive = Driving()
    drive.submit("j0", gpu={})
    for number in range(1, 40):
        drive.submit(f"j{number}", gpu={}, after=[f"j{number - 1}"])
    told = drive.explained("j39")
    assert len(told["chain"]) == 16
    assert told["because"].endswith(", and so on")


def test_ls_show_and_the_counts_of_reasons_tell_it() -> None:
    drive = Driving()
    drive.submit("train", gpu={})
    drive.submit("sweep", gpu={}, replicas=5, after=["train"])
    row = row_of(drive.engine, drive.job("sweep"), Reasons(drive.engine))
    assert (row.reason, row.after) == ("after", [Awaited(job="train", when="succeeded", state="QUEUED")])
    assert job_row(row)[-1] == "after train QUEUED"
    assert waiting_by_reason(drive.engine)["after"] == 5
    drive.cancel("train")
    drive.tick()
    assert summary(drive.engine, drive.job("sweep")).after == []
    assert summary(drive.engine, drive.job("sweep")).why == "after train: CANCELLED"


def test_a_forecast_and_a_plan_tell_when_it_starts_behind_the_others() -> None:
    drive = Driving.with_hosts(1, auto=False)
    drive.submit("prep", gpu={}, run={"driver": "noop", "timeout_s": 600})
    starts(drive, "prep")
    drive.submit("train", gpu={}, after=["prep"], run={"driver": "noop", "timeout_s": 60})
    drive.submit("eval", gpu={}, after=["train"])
    found = decode_forecast(forecast(drive.engine, drive.now)).starts["t"]
    assert 590_000 <= found["train"].p50_ms <= 620_000
    assert found["train"].p50_ms + 60_000 <= found["eval"].p50_ms <= found["train"].p50_ms + 80_000
    request = {"job": "report", "gpu": {}, "after": ["train"], "run": NOOP}
    planned = decode_planned(plan(drive.engine, drive.now, "t", msgspec.convert({"request": request}, PlanAsk)))
    assert planned.starts == "later"
    assert planned.waiting is not None
    assert planned.waiting.reason == "after"
    assert planned.in_ms is not None
    assert planned.in_ms.p50_ms >= 650_000


def test_the_ledger_says_which_end_let_it_go() -> None:
    drive = Driving.with_hosts(2, auto=False)
    drive.submit("prep", gpu={})
    starts(drive, "prep")
    drive.submit("train", gpu={}, after=["prep"])
    told: list[dict[str, Any]] = []
    drive.on_folded = lambda folded: told.extend(  # type: ignore[method-assign]
        rows(FoldedRecord(len(drive.records), decode_record(drive.records[-1]), folded, drive.shadow))
    )
    ends(drive, "prep")
    drive.tick()
    acts = [row for row in told if row["kind"] == "act"]
    assert [(row["act"], row["ended"], row["waiting"]) for row in acts] == [("met", "t/prep", ["t/train"])]
    assert all(concerns(acts[0], name) for name in ("prep", "train", "t/train"))
    assert not concerns(acts[0], "eval")


# ----------------------------------------------------------------------------------------- many behind one


def submit_many(drive: Driving, names: list[str], behind: Any) -> None:
    for at in range(0, len(names), CEILINGS.accepts):
        for name in names[at : at + CEILINGS.accepts]:
            drive.offer_submit(name, gpu={}, after=[behind(name)], reply="")
        drive.tick()


def told_by(record: Record) -> int:
    """How many jobs a record tells of an end, in whatever way."""
    cancelled = sum(record.steps[at] == Op.MOVE_FRESH for at in range(0, len(record.steps), STEP_WIDTH))
    return cancelled + sum(len(act.waiting) for act in record.acts if isinstance(act, Met))


@pytest.mark.parametrize("goes_well", [True, False])
@pytest.mark.parametrize("many", [3_000, pytest.param(100_000, marks=(pytest.mark.slow, pytest.mark.release))])
def test_very_many_behind_one_are_told_in_turns(many: int, goes_well: bool) -> None:
    drive = Driving(Config(jobs_max=2 * many, ended_max=10))
    drive.checks = False
    drive.submit("train", gpu={"count": 8})
    names = [f"j{number}" for number in range(many)]
    submit_many(drive, names, lambda name: {"job": "train", "when": "any" if goes_well else "succeeded"})
    before = len(drive.records)
    drive.cancel("train")
    turns = 0
    while drive.engine.urgent:
        drive.tick()
        turns += 1
    counts = [told_by(record) for record in records_of(drive, before + 1)]
    assert max(counts) <= TOLD_MAX
    assert sum(counts) == many
    assert turns <= many // TOLD_MAX + 2
    assert not drive.engine.room.jobs
    queued = [job for job in drive.state.jobs.values() if job.live and not job.awaits]
    assert len(queued) == (many if goes_well else 0)
    assert len(drive.engine.queue) - len(queued) <= 1, "the entry of what was cancelled is swept away later"


@pytest.mark.parametrize("many", [2_000, pytest.param(100_000, marks=(pytest.mark.slow, pytest.mark.release))])
def test_a_very_long_chain_ends_link_by_link_in_turns(many: int) -> None:
    drive = Driving(Config(jobs_max=2 * many))
    drive.checks = False
    names = [f"j{number}" for number in range(many)]
    drive.submit("first", gpu={"count": 8})
    before = {name: f"j{number - 1}" if number else "first" for number, name in enumerate(names)}
    submit_many(drive, names, lambda name: before[name])
    mark = len(drive.records)
    drive.cancel("first")
    while drive.engine.urgent:
        drive.tick()
    counts = [told_by(record) for record in records_of(drive, mark + 1)]
    assert max(counts) <= TOLD_MAX
    assert len(counts) <= many // TOLD_MAX + 2
    assert {drive.state.jobs[num].state for num in drive.state.jobs} == {"CANCELLED"}
    assert drive.explained(names[-1])["why"] == f"after {names[-2]}: CANCELLED"


def test_a_leader_that_dies_between_two_turns_is_followed_by_one_that_tells_the_rest() -> None:
    """The job that has ended stays in memory until all behind it were told, whatever else has to leave."""
    drive = Driving(Config(ended_max=1))
    drive.submit("train", gpu={"count": 8})
    names = [f"j{number}" for number in range(2 * TOLD_MAX + 5)]
    drive.checks = False
    submit_many(drive, names, lambda name: "train")
    drive.checks = True
    drive.cancel("train")
    drive.tick()
    states = [drive.job(name).state for name in names if drive.state.job("t", name) is not None]
    assert states.count("QUEUED") == TOLD_MAX + 5
    assert drive.state.job("t", "train") is not None
    drive.lead_from_snapshot()
    while drive.engine.urgent:
        drive.tick()
    assert drive.state.live == 0
    drive.pass_time(2_000)
    assert drive.state.job("t", "train") is None


@pytest.mark.parametrize("seed", range(4))
def test_a_state_folded_anew_is_the_same_after_any_ends(seed: int) -> None:
    """A web of jobs, each behind some before it: whoever leads, it ends as if one leader had led all the time."""
    seeded = random.Random(seed)
    drive = Driving.with_hosts(3, auto=False)
    names: list[str] = []
    for number in range(40):
        after = [{"job": name, "when": seeded.choice(WHENS)} for name in seeded.sample(names, min(len(names), 2))]
        names.append(f"j{number}")
        drive.submit(names[-1], gpu={}, after=after)
    while drive.state.live:
        if seeded.random() < 0.2:
            drive.lead()
            drive.renew()
        drive.tick()
        placed = [name for name in names if drive.states(name) == ["PLACED"]]
        for name in placed:
            starts(drive, name)
            ends(drive, name, seeded.choice((0, 0, 1)))
        if not placed and not drive.engine.urgent:
            waiting = [name for name in names if drive.states(name) == ["QUEUED"]]
            assert not waiting, waiting
    for name in names:
        assert drive.states(name)[0] in ("SUCCEEDED", "FAILED", "CANCELLED")


def test_a_job_that_waits_for_others_and_is_on_hold_is_explained_by_both() -> None:
    drive = Driving.with_hosts(1)
    drive.submit("train")
    drive.settle()
    drive.submit("eval", after=["train"])
    drive.settle()
    drive.order("hold", job="eval", why="a review")
    told = drive.explained("eval")
    assert told["reason"] == "after"
    assert told["because"].startswith("it waits for train (RUNNING); and job eval is held by ")
    assert told["hold"]["why"] == "a review"
