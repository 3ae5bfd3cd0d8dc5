"""What became of calls is added up by service from frames of members that restart, are not heard, and may lie."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import msgspec
import pytest

from moorage.scheduler.answers import call_totals
from moorage.scheduler.answers.call_totals import (
    FIGURE_MAX,
    FORGET_MS,
    LATELY_MS,
    NOW_MAX,
    SERVICES_MAX,
    SERVICES_OF_TENANT_MAX,
    CallTotals,
)
from moorage.scheduler.core.lifecycle.scaling import SILENT_MS
from moorage.scheduler.leader.intake import LOAD_BYTES_MAX
from moorage.schemas.answers.operators import ServiceCalls
from moorage.schemas.codec import encode
from moorage.schemas.service import CALL_CODES_MAX, CALL_MS, OTHER_CODES, CallCounts, MemberLoad

TIMES = len(CALL_MS) + 1


def load(
    ended: int,
    *,
    member: str = "m",
    replica: int = 0,
    ran: tuple[int, ...] | None = None,
    errors: dict[str, int] | None = None,
    **more: Any,
) -> MemberLoad:
    """A frame of a member all of whose calls waited 1 ms and ran 20 ms, but for the classes given."""
    waited, ran = (ended, *[0] * (TIMES - 1)), ran or (0, 0, ended, *[0] * (TIMES - 3))
    counts = CallCounts(errors or {}, waited, ran)
    frame = MemberLoad(member, 2, 1, 0, 0, False, 0, 0, 0, ended, ended, 20 * ended, "j", replica, 7, 1, counts)
    return msgspec.structs.replace(frame, **more)


def heard(totals: CallTotals, *loads: MemberLoad, service: str = "s", at_ms: int = 0) -> ServiceCalls:
    """The row of the service once these frames were heard, one a second."""
    for second, each in enumerate(loads):
        totals.add_load("t", service, each, at_ms + 1000 * second)
    return next(row for row in totals.rows(at_ms + 1000 * len(loads)) if row.service == service)


def test_differences_of_attempts_are_added_from_the_first_frame_that_is_heard() -> None:
    totals = CallTotals()
    assert heard(totals, load(500)).calls == 0, "another leader heard of these"
    row = heard(totals, load(510, errors={"500": 3}, refused=2), load(100, replica=1), load(101, replica=1))
    assert (row.calls, row.members, row.refused, row.errors) == (13, 2, 2, {"500": 3})
    assert (row.waited_ms, row.ran_ms) == (11, 220)
    assert (row.waited[0], row.ran[2], sum(row.ran)) == (11, 11, 11)


@pytest.mark.parametrize(
    ("again", "calls"),
    [
        (load(4), 14),  # a lower number
        (load(30, member="other"), 40),  # no lower one, and another process
        (load(12, errors={}), 22),  # its errors are fewer
        (load(10, errors={"500": 1}), 10),  # the same again
    ],
)
def test_an_attempt_that_begins_again_counts_from_zero(again: MemberLoad, calls: int) -> None:
    assert heard(CallTotals(), load(0), load(10, errors={"500": 1}), again).calls == calls


@pytest.mark.parametrize(
    "wrong",
    [
        load(-1),
        load(FIGURE_MAX + 1),
        load(11, ran=(-1, *[0] * (TIMES - 1))),
        load(11, places=NOW_MAX + 1),
        load(11, waiting=-1),
        load(11, errors={str(code): 1 for code in range(CALL_CODES_MAX + 2)}),
    ],
)
def test_a_frame_that_cannot_be_true_is_ignored(wrong: MemberLoad) -> None:
    row = heard(CallTotals(), load(0), load(10), wrong, load(12))
    assert (row.calls, sum(row.ran)) == (12, 12)


def test_classes_of_another_number_are_not_counted_and_the_rest_is() -> None:
    """A member may be of another release, or of no release of ours."""
    row = heard(CallTotals(), load(0), load(10, counts=CallCounts({"teapot": 2}, (1, 2), ())))
    assert (row.calls, row.errors, sum(row.waited)) == (10, {OTHER_CODES: 2}, 0)


def test_totals_are_bounded_in_services_codes_attempts_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    totals = CallTotals()
    for number in range(SERVICES_MAX + 2):
        for ended in (0, 1):
            totals.add_load(f"t{number // SERVICES_OF_TENANT_MAX}", f"s{number}", load(ended), 0)
    rows = totals.rows(0)
    assert len(rows) == SERVICES_MAX + 1
    assert (rows[-1].tenant, rows[-1].service, rows[-1].calls) == ("(others)", "(others)", 2)
    totals.add_load("t", "new", load(0), FORGET_MS)
    rows = totals.rows(FORGET_MS)
    assert len(rows) == SERVICES_MAX + 1
    assert (rows[-1].calls, "new" in {row.service for row in rows}) == (3, True), "it has the place of one that is over"

    row = heard(CallTotals(), load(0), *(load(n, errors={str(n): 1}) for n in range(1, 2 * CALL_CODES_MAX)))
    assert len(row.errors) == CALL_CODES_MAX + 1
    monkeypatch.setattr(call_totals, "MEMBERS_MAX", 2)
    row = heard(CallTotals(), load(0), load(0, replica=1), load(0, replica=2), load(9), load(10))
    assert (row.calls, row.members) == (1, 2), "one that was forgotten begins where it is heard again"
    most = [load(number) for _ in range(2**14) for number in (0, FIGURE_MAX)]
    assert encode(heard(CallTotals(), *most))


@pytest.mark.parametrize(
    "fill",
    [
        {"counts": CallCounts(waited=(1,) * 3500, ran=(1,) * 3500)},
        {"counts": CallCounts(errors={f"c{number}": 1 for number in range(900)})},
        {"member": "m" * 7000},
        {"job": "j" * 7000},
    ],
)
def test_a_frame_takes_no_more_room_than_a_true_one(fill: dict[str, Any]) -> None:
    """Frames come from tenants' programs: 50 services of 1024 members each took gigabytes of the leader's memory."""
    frame = encode(msgspec.structs.replace(load(1), **fill), json=False)
    assert len(frame) <= LOAD_BYTES_MAX
    totals, read = CallTotals(), msgspec.msgpack.Decoder(MemberLoad).decode
    totals.add_load("t", "s", load(0), 0)
    tracemalloc.start()
    try:
        for replica in range(100):
            totals.add_load("t", "s", msgspec.structs.replace(read(frame), replica=replica), 0)
        gc.collect()
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 100 * 4096


def test_two_members_of_one_attempt_are_two() -> None:
    """A job that starts a member for each of its GPUs: their frames come in turns."""
    row = heard(CallTotals(), load(0), load(0, member="n"), *(load(5), load(7, member="n")) * 5)
    assert (row.calls, row.members) == (12, 2)


def test_one_tenant_takes_not_all_places() -> None:
    totals = CallTotals()
    for number in range(SERVICES_OF_TENANT_MAX + 1):
        totals.add_load("t", f"s{number}", load(0), 0)
    totals.add_load("u", "theirs", load(0), 0)
    assert [(row.tenant, row.service) for row in totals.rows(0)][-2:] == [("u", "theirs"), ("(others)", "(others)")]


def test_errors_of_callers_and_what_they_try_again_are_no_failures() -> None:
    totals = CallTotals()
    heard(totals, load(0), load(10, errors={"404": 3, "503": 2, "500": 1, "504": 1}))
    assert totals.lately(2000)[0].errors == 2


def test_the_largest_true_frame_is_read_and_a_longer_one_is_not() -> None:
    many = CallCounts({str(100 + code): FIGURE_MAX for code in range(CALL_CODES_MAX)}, *((FIGURE_MAX,) * TIMES,) * 2)
    assert len(encode(load(FIGURE_MAX, counts=many))) < LOAD_BYTES_MAX / 4


def test_an_attempt_that_was_silent_for_long_is_forgotten() -> None:
    totals = CallTotals()
    heard(totals, load(0), load(10))
    assert totals.rows(1000 + SILENT_MS)[0].members == 0
    heard(totals, load(0, replica=1), at_ms=FORGET_MS + 2000)
    assert heard(totals, load(15), load(16), at_ms=FORGET_MS + 2000).calls == 11


def test_what_happened_lately_is_of_the_last_minute_and_failing_services_are_first() -> None:
    totals = CallTotals()
    heard(totals, load(0), load(100))
    now_ms = 1000 + LATELY_MS
    slow = (0, 0, 188, *[0] * (TIMES - 4), 12)
    heard(totals, load(100), load(200, ran=slow, errors={"500": 4}), at_ms=now_ms)
    heard(totals, load(0), load(500), service="well", at_ms=now_ms)
    heard(totals, load(0, draining=True), service="ends", at_ms=now_ms)
    totals.woken("t", "asleep", now_ms)
    first, second = totals.lately(now_ms + 2000)
    assert (first.service, first.members, first.places, first.running) == ("s", 1, 2, 1)
    assert (first.calls, first.errors, first.waited_ms, first.ran_ms) == (100, 4, CALL_MS[0], None)
    assert (second.service, second.calls, second.ran_ms) == ("well", 500, CALL_MS[2])
    assert [row.woken for row in totals.rows(now_ms) if row.service == "asleep"] == [1]
    assert totals.lately(now_ms + 2 * LATELY_MS) == []


def test_who_has_a_service_is_told_of_its_last_minute_by_halves_and_of_the_newest_error() -> None:
    totals = CallTotals()
    assert totals.use("t", "s", 0) is None
    ran = (0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0, 2)
    heard(totals, load(0), load(10, ran=ran, errors={"500": 2, "422": 1}, last_error="500:" + "x" * 500))
    use = totals.use("t", "s", 2000)
    assert use is not None
    assert (use.members, use.places, use.running, use.calls) == (1, 2, 1, 10)
    assert (use.waited_ms, use.ran_ms) == ([1, 1], [20, None])
    assert use.errors == {"500": 2, "422": 1}
    assert use.last_error == "500:" + "x" * 196
    assert totals.use("other", "s", 2000) is None, "of another tenant"
    later = totals.use("t", "s", 2000 + 2 * LATELY_MS)
    assert later is not None
    assert (later.calls, later.waited_ms) == (0, [0, 0])
