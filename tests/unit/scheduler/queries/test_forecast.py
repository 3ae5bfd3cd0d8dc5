"""When those that wait start: by what the leader has learned, found in a copy that changes nothing here."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

import pytest

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.events import ChangeOrder
from moorage.scheduler.leader.outgoing import messages_of
from moorage.scheduler.ledger.invariants import validate
from moorage.scheduler.whatif import child, future
from moorage.scheduler.whatif import forecast as forecasting
from moorage.scheduler.whatif.forecast import EARLIER, LATER, RUNS_SURE, Forecast, decode_forecast, forecast
from moorage.scheduler.whatif.future import Future
from moorage.scheduler.whatif.looks import LOOKS
from moorage.schemas.capabilities import Capabilities
from moorage.schemas.operate import ChangeAsked
from tests.unit.scheduler.driving import Driving

MINUTE = 60_000


def learned(drive: Driving, minutes: list[int], workload: str = "train") -> None:
    """Runs of a workload that lasted so many minutes, one after the other on a fleet that is free."""
    for number, lasted in enumerate(minutes):
        drive.submit(f"{workload}-learned-{number}", gpu={}, run={"driver": "noop", "argv": [workload]})
        drive.settle()
        drive.now += lasted * MINUTE
        drive.run_out("w0")
    drive.renew()


def submit(drive: Driving, name: str, workload: str = "train", tenant: str = "t", **fields: object) -> None:
    drive.submit(name, tenant=tenant, run={"driver": "noop", "argv": [workload]}, **{"gpu": {}, **fields})
    drive.settle()


def look_ahead(drive: Driving) -> Forecast:
    """Return the forecast, with so much time that a busy machine ends no look of it early."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(future, "CPU_S_MAX", future.CPU_S_MAX and 15.0)
        answer = child.ask(lambda: forecast(drive.engine, drive.now, limit_s=60.0), limit_s=60.0)
    assert answer is not None
    return decode_forecast(answer)


def test_where_several_tenants_wait_an_interval_ends_later_as_more_will_come_of_those_that_are_owed_more() -> None:
    told = []
    for other in ("t", "another"):
        drive = Driving.with_hosts(1)
        learned(drive, [10] * (RUNS_SURE - 3) + [20] * 3)
        for name, tenant in (("runs", "t"), ("next", "t"), ("last", other)):
            submit(drive, name, tenant=tenant, priority=10 if name == "last" else 50)
        drive.now += 4 * MINUTE
        drive.renew()
        told.append(look_ahead(drive).starts["t"]["next"])
    alone, shared = told
    assert (alone.p10_ms, alone.p50_ms) == (shared.p10_ms, shared.p50_ms)
    assert shared.p90_ms == pytest.approx(2 * alone.p90_ms, abs=2)


@pytest.mark.parametrize("runs", [RUNS_SURE - 2, RUNS_SURE])
def test_a_start_is_when_such_runs_end_less_what_has_passed(runs: int) -> None:
    drive = Driving.with_hosts(1)
    learned(drive, [10] * (runs - 3) + [20] * 3)
    submit(drive, "runs")
    drive.now += 4 * MINUTE
    drive.renew()
    for name in ("first", "second"):
        submit(drive, name)
    starts = look_ahead(drive).starts["t"]
    assert abs(starts["first"].p50_ms - 6 * MINUTE) < 1_000
    if runs < RUNS_SURE:
        assert (starts["first"].p10_ms, starts["first"].p90_ms) == (-1, -1)
    else:
        assert abs(starts["first"].p10_ms - EARLIER * 6 * MINUTE) < 1_000
        assert abs(starts["first"].p90_ms - LATER * 16 * MINUTE) < 2_000
    assert abs(starts["second"].p50_ms - 16 * MINUTE) < 1_000
    assert starts["second"].worker == "w0"
    assert (starts["first"].runs, starts["second"].runs) == (runs, runs), "the runs that the estimate rests on"


@pytest.mark.parametrize("max_running", [None, 4, 2])
def test_a_job_that_runs_as_many_replicas_as_it_may_has_a_start_for_the_next(max_running: int | None) -> None:
    drive = Driving.with_hosts(4)
    run = {"driver": "noop", "timeout_s": 60}
    drive.submit("many", replicas=10, max_running=max_running, gpu={}, run=run)
    drive.settle()
    start = look_ahead(drive).starts["t"]["many"]
    assert abs(start.p50_ms - MINUTE) < 2_000


def test_a_start_rests_on_the_least_known_of_the_ends_before_it() -> None:
    drive = Driving.with_hosts(1)
    learned(drive, [10] * 8)
    learned(drive, [10] * 3, "serve")
    submit(drive, "runs")
    submit(drive, "first", "serve")
    submit(drive, "second")
    starts = look_ahead(drive).starts["t"]
    assert (starts["first"].runs, starts["second"].runs) == (8, 3)


def preempting() -> Driving:
    """A job of an hour, that may be ended for another, with 40 seconds of grace."""
    drive = Driving.with_hosts(1, config=Config(preempt_priority=80, preempt_after=0))
    drive.submit("runs", gpu={}, run={"driver": "noop", "timeout_s": 3600, "grace_s": 40})
    drive.settle()
    return drive


def test_who_makes_room_may_take_its_grace_for_it() -> None:
    drive = preempting()
    drive.offer_submit("urgent", gpu={}, priority=90)
    drive.tick(2_000, obey=False)
    drive.tick(2_000, obey=False)
    assert drive.states("runs") == ["ENDING"]
    start = look_ahead(drive).starts["t"]["urgent"]
    assert start.p50_ms < 1_000
    assert 40_000 <= start.p90_ms < 42_000
    assert start.runs == 0


def freezing(*, frozen: bool) -> Driving:
    """A job of an hour on the only GPU; or a frozen one, and a preemptible job of an hour there."""
    drive = Driving(Config(preempt_priority=80, preempt_after=0))
    drive.worker("w0", 1, capabilities={"noop": Capabilities(freezes=True)})
    hour = {"driver": "noop", "timeout_s": 3600, "grace_s": 0}
    drive.submit("owner", gpu={}, run=hour)
    drive.settle()
    if frozen:
        drive.order("freeze", job="owner")
        drive.settle()
        drive.submit("spot", gpu={}, run=hour, preemptible=True)
        drive.settle()
        assert drive.states("spot") == ["RUNNING"]
    drive.workers["w0"].auto = False
    return drive


def test_a_preemptible_job_starts_once_the_job_that_is_being_frozen_is_frozen() -> None:
    drive = freezing(frozen=False)
    drive.submit("spot", gpu={}, preemptible=True)
    assert look_ahead(drive).starts["t"]["spot"].p50_ms > 50 * MINUTE
    drive.order("freeze", job="owner")
    assert drive.states("owner") == ["RUNNING"]
    assert look_ahead(drive).starts["t"]["spot"].p90_ms < 1_000


def test_a_frozen_job_is_resumed_once_the_job_on_its_gpu_is_over_and_the_next_starts_when_it_has_ended() -> None:
    drive = freezing(frozen=True)
    drive.submit("plain", gpu={})
    drive.order("resume", job="owner")
    assert (drive.states("owner"), drive.states("spot")) == (["FROZEN"], ["ENDING"])
    assert 50 * MINUTE < look_ahead(drive).starts["t"]["plain"].p50_ms < 70 * MINUTE


def test_what_may_preempt_starts_although_a_frozen_job_waits_for_the_gpu() -> None:
    drive = freezing(frozen=True)
    drive.submit("urgent", gpu={}, priority=90)
    assert look_ahead(drive).starts["t"]["urgent"].p90_ms <= MINUTE, "it looks again after a minute at the latest"


def test_what_waits_for_an_end_that_nobody_knows_is_unknown() -> None:
    drive = Driving.with_hosts(1)
    submit(drive, "runs", "new")
    submit(drive, "waits", "new")
    found = look_ahead(drive)
    assert (found.starts, found.unknown_runs) == ({}, 1)


def test_a_job_of_several_attempts_without_a_known_end_is_one_job() -> None:
    drive = Driving.with_hosts(2, 2)
    submit(drive, "runs", "new", replicas=2, gpu={"scheduling": "gang"})
    drive.submit("ends", replicas=2, gpu={}, tenant="u", run={"driver": "noop", "timeout_s": 60})
    drive.settle()
    submit(drive, "starts", "new", replicas=2)
    submit(drive, "waits", "new", replicas=2)
    found = look_ahead(drive)
    assert (found.unknown_runs, found.unknown_starts) == (1, 1)


def test_a_time_limit_bounds_a_start_whatever_other_commands_took() -> None:
    drive = Driving.with_hosts(1)
    learned(drive, [1] * 30)
    drive.submit("runs", gpu={}, run={"driver": "noop", "argv": ["new"], "timeout_s": 3600})
    drive.settle()
    submit(drive, "waits")
    submit(drive, "behind")
    starts = look_ahead(drive).starts["t"]
    assert starts["waits"].runs == 0, "nothing was learned of the command that runs"
    assert starts["waits"].p50_ms == starts["waits"].p90_ms
    assert abs(starts["waits"].p90_ms - 60 * MINUTE) < 1_000
    assert abs(starts["behind"].p90_ms - 61 * MINUTE) < 2_000
    assert starts["behind"].runs == 30
    assert {start.p10_ms for start in starts.values()} == {-1}, "the one that runs may end at any time"


def test_what_runs_keeps_the_time_limit_from_before_a_change_and_what_starts_later_has_the_new_one() -> None:
    drive = Driving.with_hosts(1)
    for name in ("runs", "next", "last"):
        drive.submit(name, gpu={}, run={"driver": "noop", "timeout_s": 3600})
        drive.settle()
    for name in ("runs", "next"):
        drive.engine.offer(ChangeOrder("t", ChangeAsked(job=name, timeout_s=60.0), "", True))
    drive.tick()
    starts = look_ahead(drive).starts["t"]
    assert [round(starts[name].p50_ms / MINUTE) for name in ("next", "last")] == [60, 61]


def test_waiting_replicas_of_jobs_before_it_count_and_a_sweep_has_an_end() -> None:
    drive = Driving.with_hosts(4)
    learned(drive, [10] * 5)
    submit(drive, "mine", replicas=44)
    submit(drive, "bobs", "eval", replicas=8)
    found = look_ahead(drive)
    assert abs(found.starts["t"]["mine"].p50_ms - 10 * MINUTE) < 2_000
    assert abs(found.starts["t"]["bobs"].p50_ms - 110 * MINUTE) < 20_000
    assert abs(found.ends["t"]["mine"].p50_ms - 110 * MINUTE) < 20_000
    assert "bobs" not in found.ends["t"], "nobody knows how long those take"


def test_a_gang_and_what_is_ahead_of_it_in_the_queue() -> None:
    drive = Driving.with_hosts(2)
    learned(drive, [10] * 5)
    submit(drive, "a")
    submit(drive, "b")
    drive.submit("gang", replicas=2, gpu={"scheduling": "gang"}, run={"driver": "noop", "argv": ["train"]}, priority=90)
    submit(drive, "behind")
    starts = look_ahead(drive).starts["t"]
    assert abs(starts["gang"].p50_ms - 10 * MINUTE) < 2_000
    assert abs(starts["behind"].p50_ms - 20 * MINUTE) < 2_000


def test_looking_ahead_changes_nothing_here_even_with_a_record_in_flight() -> None:
    drive = Driving.with_hosts(1)
    learned(drive, [1] * 4)
    submit(drive, "runs")
    submit(drive, "waits")
    drive.offer_submit("more", gpu={})
    drive.engine.build(drive.now, drive.now)
    before = (drive.state.digest, drive.state.seq, len(drive.engine.queue), drive.engine.waiting)
    assert "waits" in look_ahead(drive).starts["t"]
    assert (drive.state.digest, drive.state.seq, len(drive.engine.queue), drive.engine.waiting) == before
    assert drive.engine.in_flight
    validate(drive.state)


@pytest.mark.parametrize("folds", [True, False])
def test_a_copy_takes_a_record_in_flight_as_stored_in_the_next_place(folds: bool) -> None:
    drive = Driving.with_hosts(1)
    drive.offer_submit("more", gpu={})
    after = drive.state.seq
    drive.engine.build(drive.now, drive.now, folds=folds)
    Future(drive.engine, drive.now, 0)
    assert drive.state.seq == after + 1
    assert drive.job("more").ledger == after + 1


def test_a_copy_takes_a_record_in_flight_of_which_all_messages_are_made() -> None:
    """They have answers and events, too, not frames of workers alone: the look failed, and explain had no fix."""
    drive = Driving.with_hosts(1)
    drive.offer_submit("more", gpu={})
    after = drive.state.seq
    drive.engine.build(drive.now, drive.now)
    outputs = drive.engine.prepare_outputs(drive.now)
    assert outputs is not None
    messages = messages_of(outputs, drive.engine.subjects, after + 1, lambda mark, answer: False, 1 << 20)
    assert len(messages) > len(outputs.messages) > 0
    Future(drive.engine, drive.now, 0)
    assert drive.state.seq == after + 1


def test_a_forecast_without_a_look_in_time_is_empty_and_fails_nothing() -> None:
    drive = Driving.with_hosts(1)
    for name in ("runs", "waits"):
        submit(drive, name)
    found = decode_forecast(forecast(drive.engine, drive.now, limit_s=0.0))
    assert (found.starts, found.ends, found.cut) == ({}, {}, True)


@pytest.mark.parametrize("ended", range(LOOKS + 1))
def test_a_forecast_of_fewer_than_half_of_the_looks_says_that_it_was_cut(
    ended: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had no start and no word why, and one look alone said of a job that it ends before it would start."""
    drive = Driving.with_hosts(1)
    for name, fields in {"runs": {}, "waits": {}, "expires": {"deadline_s": 30}}.items():
        drive.submit(name, gpu={}, run={"driver": "noop", "timeout_s": 60}, **fields)
        drive.settle()

    def in_time(works: Sequence[child.Work], limit_s: float) -> list[bytes | None]:
        return [*child.ask_all(works[:ended]), *[None] * (LOOKS - ended)]

    monkeypatch.setattr(forecasting, "ask_all", in_time)
    found = look_ahead(drive)
    is_half = ended > LOOKS // 2
    assert (found.cut, "waits" in found.starts.get("t", {}), "expires" in found.late.get("t", {})) == (
        not is_half, is_half, is_half,
    )  # fmt: skip


def test_what_a_copy_frees_of_the_leader_costs_no_answer() -> None:
    open_files = [open(os.devnull) for _ in range(16)]  # noqa: SIM115
    lowest = min(file.fileno() for file in open_files)

    def frees() -> bytes:
        open_files.clear()  # each closes its number
        return b"found"

    def asks_more() -> bytes:
        while os.dup(0) < lowest - 1:
            pass  # a pipe would have the next number that is not taken
        return b",".join(answer or b"lost" for answer in child.ask_all([frees] * 5))

    assert child.ask(asks_more) == b",".join([b"found"] * 5)
    for file in open_files:
        file.close()


class Raw(logging.Handler):
    """To descriptor 2, which a child has as well."""

    def emit(self, record: logging.LogRecord) -> None:
        os.write(2, self.format(record).encode())


def test_a_child_whose_asker_is_gone_ends_without_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    raw = Raw()
    child.log.addHandler(raw)
    try:
        pid, receive = child.fork(lambda: b"x" * 1_000_000)  # more than a pipe holds
        os.close(receive)
        _, status = os.waitpid(pid, 0)
    finally:
        child.log.removeHandler(raw)
    assert os.waitstatus_to_exitcode(status) == 1
    assert capfd.readouterr().err == ""
