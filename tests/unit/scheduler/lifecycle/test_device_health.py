"""Devices that workers call unwell: closed alone, left with notice, kept from the job they failed under, and back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from moorage.scheduler.answers import views
from moorage.scheduler.core.config import Config
from moorage.scheduler.core.ledger.acts import Avoid, Health
from moorage.scheduler.core.ledger.fold import fold
from moorage.scheduler.core.ledger.record import decode_record
from moorage.scheduler.core.ledger.state import AVOID_MAX, State
from moorage.schemas.errors import Refused
from moorage.schemas.frames import End, Unwell
from moorage.schemas.operate import ReleaseAct, act_of
from tests.unit.scheduler.driving import PATIENCE_MS, Driving

if TYPE_CHECKING:
    from moorage.scheduler.core.ledger.folding import Folding

FAILED = Unwell(0, "xid", "Xid 79: the GPU has fallen off the bus", True)
PROBATION = Unwell(0, "probation", "after Xid 79: the GPU has fallen off the bus")
SAVES = {"driver": "noop", "checkpoint_signal": "SIGUSR1", "checkpoint_before_s": 30}


def say(drive: Driving, worker: str, *unwell: Unwell) -> None:
    """A renewal that tells this of the devices, and what comes of it."""
    drive.workers[worker].unwell = list(unwell)
    drive.renew(worker)


def slots_of(drive: Driving, job: str, index: int = 0) -> tuple[str, int]:
    attempt = drive.attempt(job, index)
    return attempt.worker.id, attempt.mask


def ends(drive: Driving) -> list[End]:
    """By attempt: one that renews and ends with one record is asked to end twice."""
    return list({(end.job, end.replica): end for frame in drive.wanted for end in frame.end}.values())


def test_a_failed_device_is_closed_alone_and_the_others_of_its_host_go_on() -> None:
    drive = Driving.with_hosts(3)
    drive.submit("kept", gpu={})
    drive.settle()
    assert slots_of(drive, "kept") == ("w0", 1)
    say(drive, "w0", Unwell(1, "xid", "Xid 48: an uncorrectable (double-bit) memory error", False))
    drive.submit("next", gpu={})
    drive.settle()
    assert slots_of(drive, "next") == ("w0", 4)
    assert drive.replica("kept").state == drive.replica("next").state
    [row] = views.fleet(drive.engine, drive.now).workers
    assert row.cells == "#!#"
    assert [(t.slot, t.kind, t.recorded) for t in row.troubles] == [(1, "xid", True)]


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_record_places_jobs_by_what_it_says_of_devices_itself(is_closed: bool) -> None:
    drive = Driving.with_hosts(2)
    if not is_closed:
        say(drive, "w0", PROBATION)
    drive.workers["w0"].unwell = [FAILED] if is_closed else []
    drive.send("w0", drive.workers["w0"].renew_frame())
    for name in ("first", "second"):
        drive.offer_submit(name, gpu={})
    drive.tick()
    assert drive.placed_on("first") + drive.placed_on("second") == ["w0", "-" if is_closed else "w0"]
    assert not is_closed or slots_of(drive, "first") == ("w0", 2)


def test_the_record_of_an_operators_word_places_a_job_on_the_device_that_it_opens() -> None:
    drive = Driving.with_hosts(1)
    say(drive, "w0", PROBATION)
    drive.workers["w0"].auto = False
    drive.submit("j", gpu={})
    assert drive.placed_on("j") == ["-"]
    drive.operate("release", "w0")
    assert drive.placed_on("j") == ["w0"]


def test_a_device_that_its_worker_warns_of_is_given_out() -> None:
    drive = Driving.with_hosts(2)
    drive.load("w0", w1="cdi: no CDI spec names it: nvidia-ctk cdi generate", s0="ecc")
    drive.submit("next", gpu={})
    drive.settle()
    assert slots_of(drive, "next") == ("w0", 2)
    [row] = views.fleet(drive.engine, drive.now).workers
    assert [(t.slot, t.kind, t.detail) for t in row.troubles] == [
        (0, "ecc", ""),
        (1, "cdi", "no CDI spec names it: nvidia-ctk cdi generate"),
    ]
    drive.submit("waits", gpu={"count": 2})
    drive.settle()
    held_by = drive.explained("waits")["held_by"]
    assert not any("cdi" in words for words in held_by), "it is no reason to wait"
    drive.load("w0", s0="ecc")
    assert [t.kind for t in views.fleet(drive.engine, drive.now).workers[0].troubles] == ["ecc"]


def test_what_runs_on_it_is_told_to_save_itself_then_ends_and_starts_elsewhere() -> None:
    drive = Driving.with_hosts(1)
    drive.submit("j", gpu={}, run=SAVES)
    drive.settle()
    drive.worker("w1", gpus=1)
    drive.workers["w0"].auto = False
    say(drive, "w0", FAILED)
    [end] = ends(drive)
    assert (end.job, end.notice_s) == ("j", 30.0)
    assert drive.job("j").state == "ENDING"
    drive.tick()
    assert not ends(drive), "it was told"
    drive.renew("w0")
    assert [end.notice_s for end in ends(drive)] == [30.0], "until its renewal shows it, also after a takeover"
    drive.report("exited", "j", code=-15, detail="end")
    drive.tick()
    drive.settle()
    assert drive.job("j").state == "RUNNING"
    assert slots_of(drive, "j") == ("w1", 1)
    history = [row[8] for row in drive.job("j").history if row[8]]
    assert "GPU 0 of w0: Xid 79: the GPU has fallen off the bus" in history
    assert drive.replica("j").losses == 1


def counts(drive: Driving) -> tuple[int, int, int]:
    replica = drive.replica("j")
    return replica.retries, replica.losses, replica.restarts


STAYS = {"run": {"driver": "noop", "restart": "always", "max_restarts": 1}}


@pytest.mark.parametrize(
    ("asked", "counted"), [({"retries_on_lost": 1}, (0, 1, 0)), (STAYS, (0, 0, 1))], ids=["losses", "restarts"]
)
def test_a_failed_device_counts_no_loss_and_no_restart_beyond_the_limit(
    asked: dict[str, Any], counted: tuple[int, int, int]
) -> None:
    drive = Driving.with_hosts(1, 1)
    drive.submit("j", gpu={}, **asked)
    drive.settle()
    first, _ = slots_of(drive, "j")
    say(drive, first, FAILED)
    drive.settle()
    drive.pass_time(2_000)
    drive.settle()
    assert (drive.states("j"), counts(drive)) == (["RUNNING"], counted)
    second, _ = slots_of(drive, "j")
    assert second != first
    drive.workers[second].auto = False
    say(drive, second, FAILED)
    assert (drive.states("j"), counts(drive)) == (["ENDING"], counted), "another attempt does not follow"
    drive.report("exited", "j", code=-15, detail="end")
    drive.tick()
    assert drive.states("j") == ["FAILED"]


@pytest.mark.parametrize("back", ["without it", "with it"])
@pytest.mark.parametrize("asked", [{"retries_on_lost": 1}, STAYS], ids=["losses", "restarts"])
def test_an_attempt_that_leaves_a_failed_device_and_is_kept_through_a_partition_counts_once(
    asked: dict[str, Any], back: str
) -> None:
    drive = Driving()
    worker = drive.worker("w0", gpus=1)
    drive.submit("j", gpu={}, on_partition="keep", **asked)
    drive.settle()
    worker.auto = False
    say(drive, "w0", FAILED)
    counted = counts(drive)
    assert (drive.states("j"), sum(counted)) == (["ENDING"], 1)
    drive.pass_time(40_000, renew=False)
    assert drive.states("j") == ["LOST_KEPT"]
    if back == "without it":
        worker.held.clear()
        drive.join(worker)
    else:
        drive.join(worker)
        say(drive, "w0", FAILED)
        assert (drive.states("j"), counts(drive)) == (["ENDING"], counted), "it is asked again"
        drive.report("exited", "j", code=-15, detail="end")
        drive.tick()
    assert (drive.states("j"), counts(drive)) == (["QUEUED"], counted)


def failing(config: Config | None = None, **asked: Any) -> Driving:
    """The only GPU of the fleet has failed under job j, which waits for another."""
    drive = Driving.with_hosts(1, config=config)
    drive.submit("j", gpu={}, **asked)
    drive.settle()
    say(drive, "w0", FAILED)
    drive.settle()
    assert drive.job("j").state == "QUEUED"
    return drive


def test_a_device_is_not_given_again_to_the_job_it_failed_under_and_is_to_others() -> None:
    drive = failing()
    say(drive, "w0")  # its probation is over
    drive.settle()
    assert drive.job("j").state == "QUEUED"
    assert drive.explained("j")["avoids"] == ["w0: GPU 0"]
    drive.submit("other", gpu={})
    drive.settle()
    assert slots_of(drive, "other") == ("w0", 1), "who waits for another device is in nobody's way"
    drive.worker("w1", gpus=1)
    drive.tick()
    drive.settle()
    assert slots_of(drive, "j") == ("w1", 1)


def failed_under(config: Config | None = None, **asked: Any) -> Driving:
    """The only GPU of the fleet failed under job j and is well again."""
    drive = failing(config, **asked)
    say(drive, "w0")
    return drive


def test_a_worker_that_is_started_anew_opens_no_device_to_the_job_it_failed_under() -> None:
    """What it refused for what it runs is asked again then; a device that failed is another matter."""
    drive = Driving.with_hosts(1)
    drive.submit("j", gpu={})
    drive.settle()
    say(drive, "w0", FAILED)
    drive.settle()
    assert drive.job("j").avoid == ((0, 1),)
    say(drive, "w0")
    drive.workers["w0"].boot += "-2"
    drive.join(drive.workers["w0"])
    drive.pass_time(60_000)
    assert (drive.job("j").avoid, drive.states("j")) == (((0, 1),), ["QUEUED"])


def test_another_workers_refusal_opens_no_device_that_failed() -> None:
    drive = failed_under()
    drive.worker("w1", gpus=1, auto=False)
    drive.pass_time(60_000)
    drive.report("refused", "j", detail="not-here: this worker has no such driver")
    drive.settle()
    assert dict(drive.job("j").avoid) == {0: 1, 1: 1}
    drive.workers["w0"].boot += "-2"
    drive.join(drive.workers["w0"])
    drive.pass_time(60_000)
    assert dict(drive.job("j").avoid) == {0: 1, 1: 1}
    assert drive.explained("j")["refused_by"] == ["w1"]


def test_the_newest_device_that_failed_is_never_the_one_forgotten() -> None:
    """A job avoids a bounded number of workers; of the others the one with the lowest number is forgotten."""
    drive = Driving()
    drive.submit("j", gpu={})
    job = drive.job("j")
    folding = cast("Folding", SimpleNamespace(job=lambda *_: job, out=SimpleNamespace(jobs={})))
    for worker in (*range(1, AVOID_MAX + 1), 0):
        Avoid(job.num, worker, 1).fold(folding)
    assert sorted(dict(job.avoid)) == [0, *range(2, AVOID_MAX + 1)]


def test_no_host_is_held_back_for_a_job_that_may_not_have_its_device() -> None:
    drive = failed_under()
    drive.pass_time(PATIENCE_MS + 5_000)
    assert drive.engine.planner.verdicts.reservation is None
    drive.submit("other", gpu={})
    drive.settle()
    assert slots_of(drive, "other") == ("w0", 1)
    assert drive.job("j").state == "QUEUED"


def test_a_host_that_a_job_may_not_have_whole_is_not_reserved_for_it_though_it_is_free() -> None:
    drive = Driving.with_hosts(2, 2)
    drive.submit("j", gpu={"count": 2})
    drive.submit("long", gpu={"count": 2}, run={"driver": "noop", "timeout_s": 3_600})
    drive.settle()
    (failed,) = drive.placed_on("j")
    say(drive, failed, FAILED)
    drive.settle()
    say(drive, failed)
    drive.pass_time(PATIENCE_MS + 10_000)
    held = drive.reservation
    assert [drive.engine.fleet.hosts[num].worker.id for num in held.hosts] == drive.placed_on("long")


def test_nobody_ends_for_a_job_that_may_not_have_the_device() -> None:
    drive = failed_under(config=Config(preempt_priority=80, preempt_after=60.0), priority=90)
    drive.submit("other", gpu={})
    drive.settle()
    drive.pass_time(100_000)
    drive.settle()
    assert drive.job("other").state == "RUNNING"
    drive.submit("next", gpu={}, priority=90)
    drive.pass_time(2_000)
    drive.settle()
    assert drive.job("next").state == "RUNNING", "and somebody ends for one that may"


@pytest.mark.parametrize("gpu", [{}, {"scheduling": "gang"}])
def test_an_operators_word_opens_a_device_that_is_well_again_to_the_job_it_failed_under(gpu: dict[str, str]) -> None:
    drive = Driving.with_hosts(2)
    drive.submit("j", replicas=2, gpu=gpu)
    drive.settle()
    say(drive, "w0", FAILED)
    drive.settle()
    say(drive, "w0")
    drive.pass_time(5_000)
    drive.settle()
    assert "QUEUED" in drive.states("j")
    assert drive.operate("release", "w0", slots=[1])["changed"] is False
    assert drive.operate("release", "w0", slots=[0])["slots"] == [0]
    drive.settle()
    assert drive.states("j") == ["RUNNING", "RUNNING"]
    assert drive.operate("release", "w0")["changed"] is False


@pytest.mark.parametrize("slots", [None, [0]])
def test_an_operators_word_ends_a_job_that_its_worker_cannot_end(slots: list[int] | None) -> None:
    drive = Driving.with_hosts(2, auto=False)
    drive.submit("j", gpu={})
    drive.reports([("claimed", "j", 0, 0, ""), ("started", "j", 0, 0, "")])
    assert slots_of(drive, "j") == ("w0", 1)
    assert drive.operate("release", "w0", slots=[0])["changed"] is False, "it runs"
    drive.cancel("j")
    drive.workers["w0"].local = {0}  # as its pool says of a device whose job does not end
    drive.renew("w0")
    drive.reports([("quarantined", "j", 0, 0, "0")])
    assert drive.states("j") == ["CANCELLING"]
    assert drive.operate("release", "w0", **({} if slots is None else {"slots": slots}))["slots"] == [0]
    drive.renew("w0")
    assert [0] in [frame.well for frame in drive.wanted], "its worker is told"
    drive.reports([("exited", "j", 0, 137, "lost"), ("freed", "j", 0, 0, "")])
    assert drive.states("j") == ["CANCELLED"]


def test_a_word_on_one_device_leaves_the_job_its_others() -> None:
    drive = Driving.with_hosts(2)
    drive.submit("j", gpu={"count": 2})
    drive.settle()
    say(drive, "w0", FAILED, Unwell(1, "xid", "Xid 48: an uncorrectable (double-bit) memory error", True))
    drive.settle()
    assert drive.job("j").avoid == ((0, 3),)
    drive.operate("release", "w0", slots=[1])
    assert drive.job("j").avoid == ((0, 1),)


def test_an_order_that_names_no_device_releases_none() -> None:
    """Without `slots` all of a worker's devices are meant; a list that came out empty is a mistake."""
    assert act_of("release", {"worker": "w0"}) == ReleaseAct(worker="w0")
    with pytest.raises(Refused, match="at least one, found"):
        act_of("release", {"worker": "w0", "slots": []})


def test_what_was_reserved_for_a_job_as_it_asked_is_not_kept_from_it_once_it_may_have_its_device_again() -> None:
    drive = Driving.with_hosts(2)
    drive.submit("j", gpu={})
    drive.submit("other", gpu={}, run={"driver": "noop", "timeout_s": 3_600})
    drive.settle()
    failed = slots_of(drive, "j")[1].bit_length() - 1
    say(drive, "w0", Unwell(failed, "xid", "Xid 79: the GPU has fallen off the bus", True))
    drive.settle()
    say(drive, "w0")
    drive.pass_time(PATIENCE_MS + 3_000)
    assert drive.engine.planner.verdicts.reservation is not None
    drive.operate("release", "w0", slots=[failed])
    drive.settle()
    assert drive.states("j") == ["RUNNING"]


def test_nobody_joins_the_sharers_of_an_unwell_device() -> None:
    drive = Driving.with_hosts(1)
    share = {"sharing": "mps", "share": {"memory_mib": 1_000, "compute_percent": 10}}
    drive.submit("first", gpu=share)
    drive.settle()
    say(drive, "w0", Unwell(0, "reset-needed", "the driver asks for a reset", False))
    drive.submit("next", gpu=share)
    drive.settle()
    assert (drive.job("first").state, drive.job("next").state) == ("RUNNING", "QUEUED")


def test_probation_keeps_it_closed_and_ends_nobody() -> None:
    drive = Driving.with_hosts(1)
    say(drive, "w0", PROBATION)
    drive.submit("j", gpu={})
    drive.settle()
    assert drive.job("j").state == "QUEUED"
    found = drive.explained("j")
    assert found["reason"] == "sick"
    assert found["held_by"] == ["w0 GPU 0: probation: after Xid 79: the GPU has fallen off the bus"]
    say(drive, "w0")
    drive.settle()
    assert drive.job("j").state == "RUNNING"


def test_one_record_tells_it_once_and_what_is_the_same_writes_nothing() -> None:
    drive = Driving.with_hosts(2)
    say(drive, "w0", PROBATION)
    acts = len([1 for payload in drive.records for act in decode_record(payload).acts if isinstance(act, Health)])
    for _ in range(3):
        drive.renew("w0")
    again = len([1 for payload in drive.records for act in decode_record(payload).acts if isinstance(act, Health)])
    assert (acts, again) == (1, 1)


def test_of_many_renewals_of_a_worker_in_one_record_the_first_one_counts() -> None:
    drive = Driving.with_hosts(2)
    worker = drive.workers["w0"]
    for number in range(50):
        worker.unwell = [Unwell(1, "remap", f"row {number} of memory could not be remapped")] * (1 - number % 2)
        drive.send("w0", worker.renew_frame())
    drive.tick()
    told = [act for act in decode_record(drive.records[-1]).acts if isinstance(act, Health)]
    assert [act.detail for act in told] == ["row 0 of memory could not be remapped"]
    drive.renew("w0")
    assert drive.state.workers["w0"].unwell_mask == 0, "the next record takes what the worker says then"


def test_an_operators_word_opens_it_until_the_worker_judges_anew() -> None:
    drive = failing()
    drive.workers["w0"].auto = False  # it has not heard the word yet
    answer = drive.operate("release", "w0")
    assert (answer["changed"], answer["slots"]) == (True, [0])
    drive.renew("w0")
    assert drive.state.workers["w0"].unwell_mask == 0, "what it said before it took the word counts for nothing"
    assert [frame.well for frame in drive.wanted if frame.well] == [[0]]
    drive.renew("w0")
    assert [frame.well for frame in drive.wanted if frame.well] == [[0]], "said until it is taken"
    worker = drive.workers["w0"]
    worker.unwell, worker.well_n, worker.auto = [], drive.state.workers["w0"].well_n, True
    drive.renew("w0")
    drive.tick()
    assert drive.state.workers["w0"].well == 0
    drive.settle()
    assert drive.job("j").state == "RUNNING", "the job may have it again, too"
    say(drive, "w0", FAILED)
    assert drive.state.workers["w0"].unwell_mask == 1, "from now on its word counts again"


def test_a_word_on_one_device_leaves_the_others_as_they_are() -> None:
    drive = Driving.with_hosts(3)
    say(drive, "w0", FAILED, Unwell(2, "remap", "a row of memory could not be remapped", True))
    assert drive.operate("release", "w0", slots=[2])["slots"] == [2]
    assert drive.state.workers["w0"].unwell_mask == 1
    assert drive.operate("release", "w0", slots=[1])["changed"] is False


def test_a_word_that_shares_a_record_with_what_it_answers_counts() -> None:
    """A load frame shows a failure at once, the renewal that tells it may wait for the next record."""
    drive = Driving.with_hosts(2)
    drive.submit("j", gpu={"count": 2})
    drive.settle()
    worker = drive.workers["w0"]
    worker.unwell, worker.auto = [FAILED], False
    drive.send("w0", worker.renew_frame())
    first, again = (drive.offer_operate("release", "w0", slots=[0]) for _ in range(2))
    drive.tick()
    assert (drive.answers[first]["changed"], drive.answers[first]["slots"]) == (True, [0])
    assert drive.answers[again]["changed"] is False
    assert drive.state.workers["w0"].unwell_mask == 0
    assert drive.job("j").avoid == (), "the job that left it may have it again, as if it were said a record later"


def test_a_word_stands_above_what_the_worker_says_later_in_the_same_record() -> None:
    drive = Driving.with_hosts(2)
    say(drive, "w0", PROBATION)
    drive.workers["w0"].auto = False
    drive.offer_operate("release", "w0", slots=[0])
    drive.workers["w0"].unwell = [FAILED, Unwell(1, "remap", "a row of memory could not be remapped", True)]
    drive.renew("w0")
    worker = drive.state.workers["w0"]
    assert (worker.unwell_mask, worker.well) == (2, 1), "only of the other device it is believed"


def test_a_word_that_was_taken_is_not_said_again_with_the_next_one() -> None:
    drive = Driving.with_hosts(2)
    say(drive, "w0", FAILED)
    drive.workers["w0"].auto = False
    drive.operate("release", "w0", slots=[0])
    worker = drive.workers["w0"]
    worker.well_n = drive.state.workers["w0"].well_n
    worker.unwell = [FAILED, Unwell(1, "remap", "a row of memory could not be remapped", True)]
    drive.send("w0", worker.renew_frame())
    assert drive.operate("release", "w0", slots=[1])["slots"] == [1]
    after = drive.state.workers["w0"]
    assert (after.unwell_mask, after.well) == (1, 2), "device 0 has failed again since it took the word"


def test_a_gang_leaves_as_a_whole_and_counts_one_loss() -> None:
    drive = Driving.with_hosts(1, 1)
    drive.submit("g", replicas=2, gpu={"scheduling": "gang"}, run=SAVES)
    drive.settle()
    assert drive.job("g").state == "RUNNING"
    at = slots_of(drive, "g", 0)[0]
    for worker in drive.workers.values():
        worker.auto = False
    say(drive, at, FAILED)
    assert sorted((end.replica, end.notice_s) for end in ends(drive)) == [(0, 30.0), (1, 30.0)]
    drive.reports([("exited", "g", 0, -15, "end"), ("exited", "g", 1, -15, "end")])
    assert drive.job("g").state == "QUEUED"
    assert drive.replica("g", 0).losses == 1


def test_a_gang_that_still_gathers_loses_no_try_with_a_device() -> None:
    drive = Driving.with_hosts(1, 1, auto=False)
    drive.submit("g", replicas=2, gpu={"scheduling": "gang"}, retries_on_lost=0)
    drive.reports([("claimed", "g", 0, 0, "")])
    say(drive, "w0", FAILED)
    drive.reports([("withdrawn", "g", 0, 0, ""), ("withdrawn", "g", 1, 0, "")])
    assert drive.states("g") == ["QUEUED"] * 2
    assert drive.replica("g", 0).losses == 0


def test_a_gang_keeps_from_every_device_of_a_host_that_failed_under_it_at_once() -> None:
    drive = Driving.with_hosts(2)
    drive.submit("g", replicas=2, gpu={"scheduling": "gang"})
    drive.settle()
    say(drive, "w0", FAILED, Unwell(1, "xid", "Xid 79: the GPU has fallen off the bus", True))
    drive.settle()
    assert drive.job("g").avoid == ((0, 0b11),)
    assert drive.replica("g", 0).losses == 1


def test_jobs_that_a_device_fails_under_at_once_ask_differently_in_the_order_of_their_slots() -> None:
    """What a record changes of its shapes is the same in every replay of it."""
    drive = Driving.with_hosts(16)
    for number in range(16):
        drive.submit(f"j{number}", gpu={})
        drive.settle()
    say(drive, "w0", *(Unwell(slot, "xid", "Xid 79", True) for slot in range(16)))
    at = [
        (drive.job(f"j{number}").avoid, drive.engine.reader.shape_of(drive.job(f"j{number}")).index)
        for number in range(16)
    ]
    assert sorted(at) == sorted(at, key=lambda row: row[1])


def test_a_job_that_meets_one_failing_device_after_another_ends_within_its_bound() -> None:
    drive = Driving()
    drive.submit("poison", gpu={}, retries_on_lost=2)
    for number in range(3):
        name = f"w{number}"
        drive.worker(name, gpus=1)
        drive.tick(2_000)
        drive.settle()
        assert drive.job("poison").state == "RUNNING"
        say(drive, name, FAILED)
        drive.settle()
    assert drive.job("poison").state == "FAILED"


def test_another_device_in_the_slot_is_no_longer_unwell() -> None:
    drive = Driving()
    worker = drive.worker("w0", gpus=1)
    say(drive, "w0", FAILED)
    drive.join(worker)
    assert drive.state.workers["w0"].unwell_mask == 1, "the same device in a new session"
    pool = worker.hello.gpu_pool
    replaced = [type(device)(device.index, device.vendor, device.name, "GPU-new", device.memory_mib) for device in pool]
    worker.hello.gpu_pool[:] = replaced
    drive.join(worker)
    assert drive.state.workers["w0"].unwell_mask == 0


@pytest.mark.parametrize("slot", [-1, 1, 63, 2**40])
def test_slots_that_are_not_there_and_long_words_reach_no_record(slot: int) -> None:
    drive = Driving.with_hosts(1)
    say(drive, "w0", Unwell(slot, "xid", "x"), Unwell(0, "k" * 500 + "\n", "d\x1b[31m" * 200))
    [(at, (kind, detail, _, _))] = drive.state.workers["w0"].unwell.items()
    assert (at, len(kind)) == (0, 16)
    assert len(detail) <= 120
    assert detail.isprintable()


def test_who_is_there_from_outside_is_named_and_the_device_comes_back_by_itself() -> None:
    drive = Driving()
    drive.worker("w3", gpus=2)
    drive.load("w3", f0="pid 1234 python (user bob)", s1="thermal")
    drive.submit("j", gpu={})
    drive.settle()
    found = drive.explained("j")
    assert found["reason"] == "foreign"
    assert "w3 GPU 0: used by pid 1234 python (user bob)" in found["held_by"]
    [row] = views.fleet(drive.engine, drive.now).workers
    assert row.cells == "x!"
    drive.load("w3")
    drive.tick()
    drive.settle()
    assert drive.job("j").state == "RUNNING"


def test_own_jobs_are_named_beside_who_is_there_from_outside() -> None:
    drive = Driving()
    drive.worker("w3", gpus=4)
    for name in ("f1", "f2", "f3"):
        drive.submit(name, gpu={})
    drive.settle()
    (free,) = {0, 1, 2, 3} - {slot for name in ("f1", "f2", "f3") for slot in drive.slots(name)}
    drive.load("w3", **{f"f{free}": "pid 1234 python (user bob)"})
    drive.submit("j", gpu={})
    drive.settle()
    found = drive.explained("j")
    assert found["reason"] == "foreign"
    assert found["held_by"][:4] == [
        f"w3 GPU {free}: used by pid 1234 python (user bob)", "job f1: 1 GPU", "job f2: 1 GPU", "job f3: 1 GPU",
    ]  # fmt: skip
    assert [row["job"] for row in found["holders"]["own"]] == ["f1", "f2", "f3"]


def test_a_ledger_without_any_of_this_keeps_its_digest() -> None:
    """What is new is in a digest only where it is there: ledgers of before fold as they did."""
    drive = Driving.with_hosts(1)
    drive.submit("j", gpu={})
    drive.settle()
    state = State()
    for seq, payload in enumerate(drive.records, 1):
        fold(state, decode_record(payload), seq)
    worker = state.workers["w0"]
    attempt = next(iter(worker.attempts.values()))
    before = (worker.digest_row(1), attempt.digest_row(1), state.jobs[1].digest_row(1))
    worker.unwell[0] = ("xid", "", 1, 1)
    attempt.notice_s = 1
    state.jobs[1].avoid = ((0, 1),)
    after = (worker.digest_row(1), attempt.digest_row(1), state.jobs[1].digest_row(1))
    assert all(one != other for one, other in zip(before, after, strict=True))
