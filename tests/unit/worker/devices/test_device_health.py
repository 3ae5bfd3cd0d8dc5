"""What a worker makes of its devices' faults: closed, failed, on probation, well; and what outlives the agent."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import msgspec
import pytest

from moorage.schemas.errors import Refused
from moorage.schemas.frames import Device
from moorage.worker.devices.device_health import FORGET_S, PROBATION_S, PROBATION_S_MAX, UNRESPONSIVE_S, DeviceHealth
from moorage.worker.devices.device_watch import DeviceWatch
from moorage.worker.devices.pool import GpuPool, SlotsRefused
from moorage.worker.devices.readers.base import DeviceProcess, SlotReading
from moorage.worker.devices.readers.faults import (
    GPU_LOST,
    RESET_REQUIRED,
    SLOWED_DOWN,
    Fault,
    Gravity,
    of_recovery_action,
    of_rows,
    of_xid,
)

DEVICES = [Device(index, "nvidia", "NVIDIA H100", f"GPU-{index}", 81559) for index in range(3)]
WELL = SlotReading(memory_used_mib=4)
WATCHED = of_xid(61)  # a code that no list names


def health(now: float = 0.0, boot: str = "b1", **more: object) -> DeviceHealth:
    return DeviceHealth(DEVICES, boot=boot, now=now, **more)  # type: ignore[arg-type]


def kind(book: DeviceHealth, slot: int, now: float) -> tuple[str, bool]:
    verdict = book.verdict(slot, now)
    return verdict.kind, verdict.ends


@pytest.mark.parametrize(
    ("xid", "gravity"),
    [
        (13, Gravity.NOTE),  # graphics engine exception: the application's
        (31, Gravity.NOTE),  # memory page fault
        (43, Gravity.NOTE),  # a reset channel
        (45, Gravity.NOTE),  # preemptive cleanup
        (63, Gravity.NOTE),  # a row was remapped
        (94, Gravity.NOTE),  # a contained memory error: the application is ended, nobody else
        (61, Gravity.FAILED),
        (999, Gravity.FAILED),
        (48, Gravity.RESET),
        (64, Gravity.RESET),
        (74, Gravity.RESET),
        (79, Gravity.RESET),
        (95, Gravity.RESET),
        (119, Gravity.RESET),
    ],
)
def test_whose_fault_an_xid_is(xid: int, gravity: Gravity) -> None:
    assert of_xid(xid).gravity == gravity
    assert of_xid(xid).detail.startswith(f"Xid {xid}")


def test_what_the_driver_recommends_and_remapped_rows() -> None:
    assert of_recovery_action(0) is None
    assert of_recovery_action(3) is None, "of peer to peer traffic alone"
    asked = of_recovery_action(1)
    assert asked is not None
    assert asked.gravity == Gravity.RESET
    assert of_rows(False, False) is None
    pending, failed = of_rows(True, False), of_rows(True, True)
    assert pending is not None
    assert failed is not None
    assert (pending.gravity, failed.gravity) == (Gravity.CLOSED, Gravity.RESET)


def test_a_failure_ends_what_runs_then_probation_then_well() -> None:
    book = health()
    book.happened(1, WATCHED, 10.0)
    assert kind(book, 1, 10.0) == ("xid", True)
    assert [(u.slot, u.kind, u.ends) for u in book.unwell(10.0)] == [(1, "xid", True)]
    assert kind(book, 0, 10.0) == ("ok", False), "that device alone"
    book.read(1, WELL, 12.0)
    assert kind(book, 1, 12.0) == ("probation", False)
    assert book.verdict(1, 12.0).detail == "after Xid 61"
    assert kind(book, 1, 12.0 + PROBATION_S - 1) == ("probation", False)
    assert kind(book, 1, 12.0 + PROBATION_S) == ("ok", False)
    assert book.unwell(12.0 + PROBATION_S) == []


def test_one_that_flaps_stays_away_ever_longer_and_is_forgiven_after_a_day() -> None:
    book, now, waits = health(), 0.0, []
    for _ in range(9):
        book.happened(0, WATCHED, now)
        book.read(0, WELL, now + 1)
        waits.append(book.probation_of(0))
        now += 1 + waits[-1]
        assert kind(book, 0, now)[0] == "ok"
    assert waits[:3] == [PROBATION_S, 2 * PROBATION_S, 4 * PROBATION_S]
    assert max(waits) == PROBATION_S_MAX
    book.read(0, WELL, now + FORGET_S)
    book.happened(0, WATCHED, now + FORGET_S + 1)
    assert book.probation_of(0) == PROBATION_S


def test_a_fault_during_probation_begins_it_anew_and_one_that_goes_on_counts_once() -> None:
    book = health()
    for now in (0.0, 1.0, 2.0):
        book.happened(0, WATCHED, now)
    assert book.records()["nvidia/GPU-0"].failures == 1
    book.read(0, WELL, 10.0)
    book.happened(0, WATCHED, 100.0)
    assert kind(book, 0, 100.0) == ("xid", True)
    assert book.records()["nvidia/GPU-0"].failures == 2


def test_what_only_a_reset_cures_waits_for_the_next_boot() -> None:
    book = health()
    book.happened(0, of_xid(79), 5.0)
    book.read(0, WELL, 6.0)
    assert kind(book, 0, 6.0 + PROBATION_S_MAX) == ("xid", True), "however clean it looks"
    kept = book.records()
    again = health(now=7.0, past=kept, past_boot="b1")
    assert kind(again, 0, 7.0 + PROBATION_S_MAX) == ("xid", True), "a restart of the agent is no reset"
    booted = health(now=3.0, boot="b2", past=kept, past_boot="b1")
    assert kind(booted, 0, 4.0) == ("probation", False)
    assert kind(booted, 0, 3.0 + PROBATION_S) == ("ok", False)


def test_memory_errors_count_when_they_are_new() -> None:
    book = health()
    book.read(0, SlotReading(health="ecc", uncorrected_errors=2), 0.0)
    assert kind(book, 0, 0.0) == ("ecc", True)
    book.read(0, SlotReading(health="ecc", uncorrected_errors=2), 2.0)
    assert kind(book, 0, 2.0) == ("probation", False)
    assert kind(book, 0, 2.0 + PROBATION_S) == ("ok", False), "the counter stays until the driver is loaded anew"
    book.read(0, SlotReading(health="ecc", uncorrected_errors=3), 700.0)
    assert kind(book, 0, 700.0) == ("ecc", True)
    again = health(now=1.0, past=book.records(), past_boot="b1")
    again.read(0, SlotReading(health="ecc", uncorrected_errors=3), 2.0)
    assert again.records()["nvidia/GPU-0"].failures == 2


def test_what_lasts_is_so_as_long_as_it_lasts() -> None:
    book = health()
    pending = of_rows(True, False)
    assert pending is not None
    book.read(0, SlotReading(faults=(pending,)), 0.0)
    assert kind(book, 0, 0.0) == ("reset-needed", False), "closed: what runs goes on"
    assert [u.kind for u in book.unwell(0.0)] == ["reset-needed"]
    book.read(0, WELL, 2.0)
    assert kind(book, 0, 2.0) == ("ok", False)
    book.read(1, SlotReading(health="thermal", faults=(SLOWED_DOWN,)), 2.0)
    assert kind(book, 1, 2.0) == ("thermal", False)
    assert book.unwell(2.0) == [], "heat passes: the load frame alone tells it"
    book.read(2, SlotReading(health="unresponsive", faults=(RESET_REQUIRED,)), 2.0)
    assert kind(book, 2, 2.0) == ("reset-needed", True)


def test_a_device_that_is_lost_fails_at_once_and_one_that_is_silent_after_a_while() -> None:
    book = health()
    book.read(0, SlotReading(health="unresponsive", faults=(GPU_LOST,)), 0.0)
    assert kind(book, 0, 0.0) == ("missing", True)
    silent = SlotReading(health="unresponsive")
    for now in (0.0, UNRESPONSIVE_S - 1):
        book.read(1, silent, now)
        assert kind(book, 1, now) == ("ok", False)
    book.read(1, silent, UNRESPONSIVE_S)
    assert kind(book, 1, UNRESPONSIVE_S) == ("unresponsive", True)


def test_an_operators_word_is_news_once_and_readings_judge_on() -> None:
    book = health()
    book.happened(0, of_xid(79), 0.0)
    assert book.well([0, 7], 12) == [0]
    assert book.unwell(1.0) == []
    book.happened(0, of_xid(79), 2.0)
    assert book.well([0], 12) == [], "the same word again"
    assert kind(book, 0, 2.0) == ("xid", True)
    assert book.well([0], 13) == [0]


def test_a_failed_check_closes_a_device_until_an_operator_says_that_it_is_well_over_restarts_and_boots() -> None:
    book = health()
    book.check_failed(1, "row 7 differs")
    book.read(1, WELL, 1.0)
    assert kind(book, 1, 1.0) == ("check", False), "closed, and what runs goes on, though its readings are clean"
    booted = health(boot="b2", now=2.0, past=book.records(), past_boot="b1")
    booted.happened(1, Fault("xid", Gravity.FAILED, "an event"), 3.0)
    assert kind(booted, 1, 3.0) == ("xid", True)
    booted.read(1, WELL, 4.0)
    booted.read(1, WELL, 4.0 + FORGET_S)
    assert [(each.slot, each.kind, each.detail) for each in booted.unwell(4.0 + FORGET_S)] == [
        (1, "check", "row 7 differs")
    ]
    assert booted.well([1], 1) == [1]
    assert booted.unwell(5.0 + FORGET_S) == []


# ------------------------------------------------------------------------------------------ in the pool, in the file


def explained(slot: int, pids: Collection[int], is_leased: bool) -> Collection[int]:
    return pids if is_leased else ()


def watch(pool: GpuPool, file: Path | None = None, **more: object) -> DeviceWatch:
    fields = {"boot": "b1", "probation_s": PROBATION_S, "now": 0.0, "explained": explained} | more
    return DeviceWatch(DEVICES, pool=pool, file=file, **fields)  # type: ignore[arg-type]


def test_a_gpu_in_mig_mode_is_not_given_out_and_its_slices_are() -> None:
    whole = Device(0, "nvidia", "NVIDIA A30", "GPU-0", 24576, mig=True)
    part = Device(0, "nvidia", "NVIDIA A30 MIG 1g.6gb", "MIG-8f6c1b52-77aa-4c1e-9d2b-000000000001", 5952, mig=True)
    pool = GpuPool([whole, part])
    watch = DeviceWatch([whole, part], "b1", pool, PROBATION_S, 0.0, None, explained)
    assert watch.seen([WELL, WELL], 1.0)
    assert [(each.slot, each.kind, each.ends) for each in watch.told] == [(0, "mig", False)]
    assert "MIG mode" in watch.told[0].detail
    with pytest.raises(SlotsRefused, match="quarantined"):
        pool.try_claim_slots([0], "exclusive", "t/j/0")
    pool.try_claim_slots([1], "exclusive", "t/j/0")
    watch.well([0], 1, 2.0)
    assert [each.kind for each in watch.told] == ["mig"]  # an operator's word does not undo it
    state = pool.slot_states()[0]
    assert watch.shown(state, WELL, 3.0)[0] == "mig"


def test_the_pool_gives_out_the_others_and_who_holds_it_keeps_it() -> None:
    pool = GpuPool(DEVICES)
    seen = watch(pool)
    held = pool.try_claim_slots([0], "exclusive", "job")
    assert seen.happened(0, of_xid(79), 1.0)
    assert not seen.happened(0, of_xid(79), 2.0), "nothing new"
    assert pool.slot_states()[0].quarantine == "xid: Xid 79: the GPU has fallen off the bus"
    held.ended()
    held.release()
    with pytest.raises(SlotsRefused, match="quarantined"):
        pool.try_claim_slots([0], "exclusive", "next")
    pool.try_claim_slots([1], "exclusive", "next")
    pool.quarantine(0, "memory kept after job", "memory")
    pool.unquarantine(0, "memory")  # it came back: the device is unwell all the same
    assert pool.slot_states()[0].quarantine == "xid: Xid 79: the GPU has fallen off the bus"
    assert seen.well([0], 1, 3.0) == [0]
    pool.try_claim_slots([0], "exclusive", "again")
    pool.validate()


def test_a_probation_that_ends_gives_out_no_device_whose_memory_is_not_back() -> None:
    pool = GpuPool(DEVICES)
    seen = watch(pool)
    pool.try_claim_slots([1, 2], "exclusive", "others")
    seen.happened(0, Fault("xid", Gravity.FAILED, "an event"), 1.0)
    pool.quarantine(0, "memory kept after job", "memory")
    seen.seen([WELL] * 3, 2.0)
    seen.seen([WELL] * 3, 3.0 + PROBATION_S)
    assert not seen.told, "the device itself is well again"
    assert pool.slot_states()[0].quarantine == "memory kept after job"
    assert pool.try_claim() is None
    pool.unquarantine(0, "memory")
    with pool.try_claim() or pytest.fail("it is in use again") as lease:
        assert lease.slot == 0
    pool.validate()


def test_what_is_known_outlives_the_agent_and_a_broken_file_says_nothing(tmp_path: Path) -> None:
    file = tmp_path / "deep/devices.health"
    watch(GpuPool(DEVICES), file).happened(1, of_xid(48), 1.0)
    pool = GpuPool(DEVICES)
    again = watch(pool, file)
    again.seen([WELL] * 3, 2.0)
    assert [(u.slot, u.kind, u.ends) for u in again.told] == [(1, "xid", True)]
    assert pool.slot_states()[1].quarantine
    assert set(msgspec.json.decode(file.read_bytes())["devices"]) == {"nvidia/GPU-1"}
    whole = file.read_bytes()
    for broken in (b"{", b"", whole[:-1], *(whole[:at] + b"\xff" + whole[at + 1 :] for at in range(len(whole)))):
        file.write_bytes(broken)
        watch(GpuPool(DEVICES), file).seen([WELL] * 3, 2.0)  # no agent may fail to start for it
    file.write_bytes(b"{")
    assert watch(GpuPool(DEVICES), file).health.unwell(2.0) == []


def test_health_that_could_not_be_stored_is_stored_by_the_next_reading(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "state" / "devices.json"
    seen = watch(GpuPool(DEVICES), file)
    (tmp_path / "state").write_text("a file where the folder would be")
    seen.happened(1, WATCHED, 1.0)
    seen.seen([WELL] * 3, 2.0)
    assert [record.levelname for record in caplog.records] == ["ERROR"], "said once"
    (tmp_path / "state").unlink()
    seen.seen([WELL] * 3, 3.0)
    assert set(msgspec.json.decode(file.read_bytes())["devices"]) == {"nvidia/GPU-1"}
    file.unlink()
    seen.seen([WELL] * 3, 4.0)
    assert not file.exists(), "nothing has changed"


def test_who_is_there_from_outside_is_named_skipped_and_forgotten_when_it_leaves() -> None:
    pool = GpuPool(DEVICES)
    seen = watch(pool)
    there = SlotReading(memory_used_mib=900, processes=(DeviceProcess(1234, "python", 896, "bob"),))
    held = pool.try_claim_slots([1], "exclusive", "job")
    seen.seen([there, there, WELL], 1.0)
    with pytest.raises(Refused, match=r"foreign: GPU 0 is used by pid 1234 python \(user bob\)"):
        seen.check_foreign([2, 0])
    seen.check_foreign([1])  # of a lease it is no stranger
    states = pool.slot_states()
    assert seen.shown(states[0], there, 1.0) == ("ok", "pid 1234 python (user bob)", "")
    assert seen.shown(states[1], there, 1.0)[1] == "", "a public frame tells nothing of a tenant's job"
    seen.seen([WELL, there, WELL], 3.0)
    seen.check_foreign([0])
    held.release()


def test_the_agent_itself_and_mps_are_no_strangers() -> None:
    import os

    ours = SlotReading(processes=(DeviceProcess(os.getpid(), "python"), DeviceProcess(9, "nvidia-cuda-mps")))
    assert ours.foreign((os.getpid(),)) == ""


def test_long_and_odd_words_are_cut() -> None:
    book = health()
    book.happened(0, Fault("xid", Gravity.FAILED, "x" * 500), 0.0)
    assert len(book.verdict(0, 0.0).detail) == 120
    book.read(0, WELL, 1.0)
    assert len(book.verdict(0, 1.0).detail) == 120
