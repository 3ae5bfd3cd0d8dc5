"""A reason is one entry: whoever speaks of it reads the entry, and a new one needs no other change."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from msgspec import convert
from msgspec.structs import replace

from moorage.cli.framework import console
from moorage.cli.framework.codes import FIXES, frame, reasons
from moorage.cli.jobs.explain import explained_rows, fix_lines
from moorage.scheduler.core.fleet.filters import FILTERS, Filter, Names, Offer
from moorage.scheduler.core.fleet.shape import Shape
from moorage.schemas.answers.jobs import Explained, Fix
from moorage.schemas.reasons import REASONS, Cure, Ends, Reason
from tests.unit.scheduler.driving import Driving
from tools import reference_pages

TAPE = Reason(
    "no-tape", "no worker has a tape", Ends.NEVER, (Cure.REQUEST,), "put a tape into a worker of {job}", "with-a-tape"
)


def _has_tape(offer: Offer, shape: Shape) -> bool:
    return shape.driver == "noop" and "tape" in offer.kit.drivers


def _words(shape: Shape, offers: Sequence[Offer], names: Names) -> str:
    return f"no worker has a tape for {shape.driver}"


def test_a_new_reason_is_one_entry_and_its_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REASONS, TAPE.name, TAPE)
    monkeypatch.setitem(FILTERS, TAPE.name, Filter(TAPE, "host", _has_tape, _words))
    drive = Driving.with_hosts(2)
    accepted = drive.submit("j", gpu={})
    told = drive.explained("j")
    assert (told["reason"], told["means"], told["workers_left"]["no-tape"]) == ("no-tape", TAPE.means, 0)
    assert drive.fixes("j") == [], "no other request has a tape either"
    assert "no worker has a tape for noop" in str(accepted), accepted
    why = convert(told, Explained)
    assert fix_lines(why) == ["fix: put a tape into a worker of j"]
    assert any("known 1 > with-a-tape 0" in str(row) for row in explained_rows(why))
    assert (reasons()["no-tape"].means, frame(reasons()["no-tape"])["fix"]) == (TAPE.means, TAPE.fix)
    assert "| `no-tape` | no worker has a tape | put a tape into a worker of JOB |" in reference_pages.errors()


@pytest.mark.parametrize("fix", sorted({*FIXES.values(), *(reason.fix for reason in REASONS.values())}))
def test_a_fix_that_takes_an_operators_key_says_so(fix: str) -> None:
    """A tenant was sent to `moorage fleet` for the models that it may ask for, and was refused there."""
    if re.search(r"moorage (fleet|admin|drain|cordon|uncordon)", fix):
        assert re.search(r"\ban operator|\boperators\b|those who run this fleet", fix)


def test_a_job_at_its_max_running_is_changed_in_place() -> None:
    told = Explained(job="sweep", tenant="t", state="QUEUED", reason="max-running")
    assert fix_lines(told) == ["fix: wait, or moorage change sweep --max-running N"]


def test_what_an_operator_is_told_has_the_key_of_the_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had the operator's own, with which `submit` is refused."""
    monkeypatch.setattr(console, "_server", " --nats operator.ana")
    monkeypatch.setattr(console, "_tenant", " --tenant vision")
    told = Explained(
        job="j", tenant="vision", state="QUEUED", reason="busy", fixes=[Fix(say="alone", request={"replicas": 1})]
    )
    assert fix_lines(told, operates=True) == [
        "fix: the job would start now with this change (alone): "
        "moorage submit --instead-of j --nats submitter.vision --replicas 1"
    ]
    ended = replace(told, state="FAILED", reason="", fixes=[])
    assert fix_lines(ended, operates=True) == ["fix: moorage logs j --nats submitter.vision"]


def test_a_program_that_no_worker_has_is_named_by_its_path_or_brought() -> None:
    told = Explained(job="j", tenant="t", state="FAILED", why="not-here: no program nope in PATH /bin (w0)")
    assert fix_lines(told) == ["fix: give its full path, or bring it with --with and write ./NAME"]
    told = replace(told, why="not-here: no folder /data (w0)")
    assert fix_lines(told) == ["fix: mend what the message names, or put it on a worker; then moorage again j"]


def test_of_a_program_that_was_killed_show_is_named_for_what_is_known_of_its_memory() -> None:
    told = Explained(job="j", tenant="t", state="FAILED", code=-9)
    assert fix_lines(told)[0].startswith("fix: moorage show j says what is known of its memory")
    assert fix_lines(replace(told, code=1)) == ["fix: moorage logs j"]


def test_a_filter_that_is_asked_later_is_nearer_to_a_fit() -> None:
    drive = Driving.with_hosts(0)
    drive.worker("w1", 2, labels={"zone": "a"})
    drive.submit("j", gpu={"model": "B200"})
    drive.submit("k", gpu={"model": "B200"}, requires={"zone": ["b"]})
    told = drive.explained("j")
    assert told["reason"] == "model"
    assert told["workers_left"] == {"known": 2, "no-gpu": 1, "model": 0, "matching": 0}
    assert drive.explained("k")["reason"] == "label"


def test_every_filter_has_a_reason_that_no_waiting_ends() -> None:
    assert set(FILTERS) <= set(REASONS)
    assert all(each.reason is REASONS[name] and each.reason.is_never for name, each in FILTERS.items())
