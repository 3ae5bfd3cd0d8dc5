"""Subjects: spelt in one place, tenant and worker at fixed places, one table for the permission templates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moorage.schemas.operate import ADMIN_VERBS
from moorage.schemas.subjects import API_VERBS, WORKER_VERBS, Subjects


@pytest.mark.parametrize("prefix", ["moorage", "gpu", "a.b.c"])
def test_every_subject_begins_with_the_prefix(prefix: str) -> None:
    subjects = Subjects(prefix)
    made = [
        subjects.api("t", "submit"), subjects.admin("drain"), subjects.request("t", "cancel"), subjects.events("t"),
        subjects.event("t", "j"), subjects.log("t", "j", 0), subjects.hello("w"), subjects.load("w"),
        subjects.worker("w", "wanted"), subjects.snapshot("s"), subjects.dead_letter("t"), subjects.fleet_frame,
        subjects.roll_call, subjects.ledger_record, subjects.ledger_epoch,
    ]  # fmt: skip
    assert all(name.startswith(f"{prefix}.") for name in made)
    assert len(set(made)) == len(made)
    assert all(row.subject.startswith(f"{prefix}.") for row in subjects.table())


@pytest.mark.parametrize("prefix", ["moorage", "a.b"])
def test_tokens_stand_at_fixed_places(prefix: str) -> None:
    subjects = Subjects(prefix)
    assert [subjects.token(subjects.api("t", "submit"), at) for at in range(4)] == ["api", "t", "submit", ""]
    assert [subjects.token(subjects.worker("w", "join"), at) for at in range(3)] == ["worker", "w", "join"]


def test_streams_do_not_share_a_name_or_a_subject() -> None:
    subjects = Subjects()
    streams = {subjects.ledger_stream, subjects.snapshot_stream, subjects.request_stream, subjects.dead_letter_stream}
    assert len(streams) == 4
    roots = {
        wide.split(".")[1]
        for wide in (subjects.ledger_all, subjects.snapshot_all, subjects.request_all, subjects.dead_letters_all)
    }
    assert len(roots) == 4
    assert Subjects("a.b").ledger_stream == "A_B_LEDGER", "a dot is no part of a stream's name"


def test_wildcards_catch_what_they_should_and_the_worker_does_not_hear_itself() -> None:
    subjects = Subjects()
    assert subjects.worker_join_all == subjects.worker("*", "join")
    assert "wanted" not in WORKER_VERBS
    assert {"submit", "cancel"} <= set(API_VERBS)
    assert {"drain", "cordon", "uncordon"} <= set(ADMIN_VERBS)


def test_public_subjects_are_those_of_the_contract() -> None:
    public = {row.subject for row in Subjects().table() if "public" in row.kind}
    assert public == {
        "moorage.hello.<worker>", "moorage.load.<worker>", "moorage.fleet.frame", "moorage.fleet.rollcall",
        "moorage.fleet.look", "moorage.fleet.standing",
    }  # fmt: skip


@given(st.from_regex(r"[a-z0-9-]{1,32}", fullmatch=True), st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True))
def test_names_never_change_the_number_of_tokens(tenant: str, job: str) -> None:
    assert Subjects().event(tenant, job).count(".") == 3
    assert Subjects().log(tenant, job, 7).count(".") == 4
