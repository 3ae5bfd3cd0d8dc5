"""For how long attempts show no sign of work: by their output and by what their devices do."""

from __future__ import annotations

import msgspec
import pytest

from moorage.schemas.attempt import AttemptName
from moorage.schemas.frames import DeviceUse, Place
from moorage.schemas.job import Request
from moorage.worker.devices.readers.base import SlotReading
from moorage.worker.drivers.noop import NoopDriver
from moorage.worker.session.attempt_messages import Attempt
from moorage.worker.sharing.usage_meter import UsageMeter

NAME: AttemptName = ("acme", "j", 0, 1, 10)
IDLE = SlotReading(util_percent=0, power_w=70, power_limit_w=700)
SPINS = SlotReading(util_percent=100, power_w=150, power_limit_w=700)
WORKS = SlotReading(util_percent=100, power_w=600, power_limit_w=700)


def meter(stall_s: float | None = 60, slots: int = 2, *, hears_output: bool = True) -> UsageMeter:
    place = Place(*NAME, list(range(slots)), "exclusive", False, b"")
    run = {"driver": "noop"} | ({} if stall_s is None else {"stall_s": stall_s})
    attempt = Attempt(NAME, place, msgspec.convert({"gpu": {}, "run": run}, Request), 0.0)
    attempt.phase = "running"
    return UsageMeter({NAME: attempt}, {"noop": NoopDriver()}, hears_output=hears_output)


def still_s(*readings: SlotReading) -> int:
    """For how long an attempt counts as still whose devices show this for ten seconds."""
    of = meter(slots=len(readings))
    for second in range(11):
        of.measure(readings, 100.0 + second)
    return of.newest()[0].still_s


@pytest.mark.parametrize(
    ("readings", "is_still"),
    [
        ((IDLE, IDLE), True),
        ((SPINS, IDLE), True),
        ((SPINS, SPINS), True),
        ((WORKS, IDLE), False),
        ((SPINS, WORKS), False),
        ((SlotReading(util_percent=99, power_w=80, power_limit_w=700),), False),
        ((SlotReading(util_percent=0, peak_percent=40, power_w=80, power_limit_w=700),), False),
        ((SlotReading(util_percent=None),), False),
        ((SlotReading(util_percent=100),), False),
        ((SlotReading(util_percent=100, power_w=90),), False),
        # the limit is 700 W, and nobody saw the device idle: a tenth of it is taken for that
        ((SlotReading(util_percent=100, power_w=227, power_limit_w=700),), True),
        ((SlotReading(util_percent=100, power_w=228, power_limit_w=700),), False),
    ],
)  # fmt: skip
def test_devices_at_0_or_at_100_percent_with_low_power_are_still(
    readings: tuple[SlotReading, ...], is_still: bool
) -> None:
    assert still_s(*readings) == (10 if is_still else 0)


def test_low_power_begins_a_quarter_of_the_way_above_what_the_device_draws_when_idle() -> None:
    of = meter(slots=1)
    of.measure([SlotReading(util_percent=0, power_w=150, power_limit_w=350)], 99.0)
    for second, power_w in enumerate((199, 199, 199, 201, 199)):
        of.measure([SlotReading(util_percent=100, power_w=power_w, power_limit_w=350)], 100.0 + second)
        assert of.newest()[0].still_s == (1, 2, 3, 0, 1)[second], "150 + (350 - 150) / 4"


def test_a_sharer_is_judged_by_its_own_use_of_the_device() -> None:
    of = meter(slots=1)
    [attempt] = of._held.values()
    attempt.place = msgspec.structs.replace(attempt.place, mode="time-slice")
    mine, others = DeviceUse(0, 0, 10, 500, 700), SlotReading(util_percent=90, peak_percent=90, power_w=500)
    for second in range(4):
        of.stillness.read([others], {NAME: [mine]}, 100.0 + second)
    assert of.stillness.seconds() == {NAME: 3}


def test_output_begins_the_time_anew() -> None:
    of = meter()
    for second in range(20):
        of.measure([IDLE, IDLE], 100.0 + second)
        if second == 12:
            of.stillness.note_output(NAME, 112.5)
    assert of.newest()[0].still_s == 6
    of.stillness.note_output(("acme", "other", 0, 1, 11), 119.0)
    assert len(of.stillness.seconds()) == 1, "of others nothing is kept"


def test_time_without_readings_is_no_stillness() -> None:
    of = meter()
    of.measure([IDLE, IDLE], 100.0)
    of.measure([IDLE, IDLE], 900.0)
    assert of.newest()[0].still_s == 0


def test_a_frozen_attempt_begins_anew_when_it_goes_on() -> None:
    of = meter()
    [attempt] = of._held.values()
    of.measure([IDLE, IDLE], 100.0)
    attempt.frozen = True
    of.measure([IDLE, IDLE], 110.0)
    assert of.newest() == []
    attempt.frozen = False
    of.measure([IDLE, IDLE], 120.0)
    of.measure([IDLE, IDLE], 125.0)
    assert of.newest()[0].still_s == 5


@pytest.mark.parametrize("of", [meter(None), meter(hears_output=False)])
def test_who_did_not_ask_and_whose_output_is_not_heard_is_never_still(of: UsageMeter) -> None:
    for second in range(11):
        of.measure([IDLE, IDLE], 100.0 + second)
    assert of.newest()[0].still_s == 0
