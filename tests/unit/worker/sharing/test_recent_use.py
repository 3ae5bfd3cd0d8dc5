"""What a worker remembers of its jobs' use of devices: a ring of ten minutes for each."""

from __future__ import annotations

import pytest

from moorage.schemas.attempt import AttemptName
from moorage.schemas.errors import Refused
from moorage.schemas.frames import USE_KEPT_S, AttemptUse, Device, DeviceUse, ReadUse
from moorage.worker.sharing import recent_use
from moorage.worker.sharing.recent_use import RecentUse

NAME: AttemptName = ("acme", "j", 0, 1, 10)
DEVICES = [Device(3, "nvidia", "H100", "GPU-a", 81559), Device(4, "nvidia", "H100", "GPU-b", 81559)]


def asked(last_s: int, points: int) -> ReadUse:
    return ReadUse("s", *NAME, last_s, points)


def read(use: RecentUse, *percents: int | None, since_s: float = 1000.0) -> None:
    """A reading a second: MiB is a thousand times the percent, and the board tells no power."""
    for at, percent in enumerate(percents):
        memory = None if percent is None else percent * 1000
        use.record(since_s + at, {NAME: [DeviceUse(1, percent, memory, None)]})


def test_each_span_has_the_mean_of_its_readings_and_the_last_one_ends_now() -> None:
    use = RecentUse()
    read(use, 10, 20, 30, 50)
    page = use.page(asked(6, 3), DEVICES)
    assert page.span_s == 2
    assert [(line.index, line.uuid, line.memory_total_mib) for line in page.devices] == [(4, "GPU-b", 81559)]
    assert page.devices[0].percent == [None, 15, 40]
    assert page.devices[0].memory_mib == [None, 15000, 40000]
    assert page.devices[0].power_w == [None, None, None]


def test_seconds_without_a_reading_and_what_the_board_does_not_tell_are_null() -> None:
    use = RecentUse()
    read(use, 10, None)
    read(use, 30, since_s=1004.0)
    assert use.page(asked(6, 6), DEVICES).devices[0].percent == [None, 10, None, None, None, 30]


def test_a_ring_goes_round_and_forgets_what_is_older() -> None:
    use = RecentUse()
    read(use, *range(USE_KEPT_S + 5))
    assert use.page(asked(USE_KEPT_S, USE_KEPT_S), DEVICES).devices[0].percent == list(range(5, USE_KEPT_S + 5))
    read(use, 7, since_s=1000.0 + 3 * USE_KEPT_S)
    assert use.page(asked(3, 3), DEVICES).devices[0].percent == [None, None, 7]
    assert set(use.page(asked(USE_KEPT_S, USE_KEPT_S), DEVICES).devices[0].percent) == {None, 7}


def test_the_newest_reading_goes_into_the_renewal_and_an_ended_job_is_forgotten() -> None:
    use = RecentUse()
    read(use, 10)
    assert use.newest({}) == [AttemptUse(10, [DeviceUse(1, 10, 10000, None)], 0, *NAME[:4])]
    use.record(1001.0, {})
    assert use.newest({}) == []
    assert use.page(asked(10, 10), DEVICES).devices == []


def test_rings_are_bounded_and_one_too_many_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_use, "RINGS_BYTES_MAX", 12 * USE_KEPT_S)
    use = RecentUse()
    use.record(1000.0, {("acme", "first", 0, 1, 9): [DeviceUse(0, 1, 1, None)], NAME: [DeviceUse(1, 2, 2, None)]})
    assert len(use.newest({})) == 2, "the newest reading is there all the same"
    with pytest.raises(Refused, match="no room"):
        use.page(asked(10, 10), DEVICES)
