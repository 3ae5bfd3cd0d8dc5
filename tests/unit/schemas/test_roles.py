"""Rights by role, and whom an answer may go to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moorage.schemas.roles import (
    INBOX,
    OPERATOR_READS,
    ROLE_NAMES,
    ROLES,
    USER_INFO,
    Role,
    has_right,
    inbox,
    may_answer,
    names,
    rights,
)
from moorage.schemas.subjects import API_VERBS, MAY_EXEC, MAY_STORE, OF_POOLS, Subjects

SUBJECTS = Subjects()
TENANT = st.from_regex(r"[a-z0-9-]{1,32}", fullmatch=True)


def test_every_role_of_the_table_is_one_of_the_six() -> None:
    known = {word for _, words in ROLES.values() for word in words} | {MAY_EXEC, MAY_STORE, *OF_POOLS}
    assert set(ROLES) == set(ROLE_NAMES)
    for row in SUBJECTS.table():
        assert names(row.writes) | names(row.reads) <= known, row


def test_only_a_submitter_with_exec_runs_commands_in_jobs() -> None:
    without, may = (rights("submitter", "x", SUBJECTS, execs=execs) for execs in (False, True))
    assert without.refused == ("moorage.api.x.exec",)
    assert may.refused == ()
    assert set(may.publish) - set(without.publish) == {"moorage.tty.x.*.*.in"}
    assert set(may.subscribe) - set(without.subscribe) == {"moorage.tty.x.*.*.out"}
    worker = rights("worker", "w", SUBJECTS)
    assert [each for each in worker.publish if ".tty." in each] == ["moorage.tty.*.w.*.out"]
    assert [each for each in worker.subscribe if ".tty." in each] == ["moorage.tty.*.w.*.in"]


@pytest.mark.parametrize("role", ROLE_NAMES)
def test_nobody_has_a_right_on_the_ledger_or_a_wildcard_over_all(role: str) -> None:
    may = rights(role, "x", SUBJECTS, queue=True, results_of=["x"], queues_of=["x"])  # type: ignore[arg-type]
    own = {USER_INFO} if role == "scheduler" else set()  # which tells a user of itself alone
    for subject in {*may.publish, *may.subscribe} - own:
        assert not subject.startswith(("moorage.ledger", "moorage.snapshot", "$SYS", ">", "*")), subject
        assert not {SUBJECTS.trace_events, SUBJECTS.trace_stream} & {subject, subject.rpartition(".")[2]}, subject
        assert subject not in ("moorage.>", "$JS.>", "$JS.API.>"), subject


@given(TENANT, TENANT)
def test_a_submitters_rights_name_its_tenant_alone(mine: str, other: str) -> None:
    may = rights("submitter", mine, SUBJECTS, queue=True, results_of=[mine, other])
    for subject in (*may.publish, *may.subscribe):
        assert mine in subject, subject
        assert subject.split(".")[2] == mine or subject.endswith(
            (f"RESULT_{mine}", f"FILES_{mine}", f"FILES_{mine}.>", f"SCHEDULES_{mine}", f"SCHEDULES_{mine}.>")
        ), subject


def test_the_queue_and_results_are_given_on_purpose() -> None:
    plain = rights("submitter", "acme", SUBJECTS)
    assert plain.publish == ("moorage.api.acme.*", "moorage.call.acme.>")
    assert "moorage.request.acme.submit" in rights("submitter", "acme", SUBJECTS, queue=True).publish


@pytest.mark.parametrize("role", sorted({*ROLE_NAMES} - {"scheduler", "submitter"}))
def test_of_the_users_account_schedulers_alone_ask_what_the_server_answers(role: Role) -> None:
    may = rights(role, "x", SUBJECTS, queue=True, results_of=["x"], queues_of=["x"], execs=True)
    discovery = [subject for subject in may.publish if subject.startswith("$SRV.")]  # which schedulers answer
    assert [subject for subject in may.publish if subject.startswith("$")] == discovery
    assert bool(discovery) == (role == "operator")


@pytest.mark.parametrize(
    ("asked", "reply", "may"),
    [
        ("moorage.api.acme.show", "_INBOX.abcDEF.7", True),
        ("moorage.api.acme.show", "_INBOX_custom.7", True),
        ("moorage.api.acme.show", "replies.of.mine", True),
        ("moorage.api.acme.show", "_R_.uR3.k1", True),
        ("moorage.api.acme.show", "_INBOX.submitter.acme.x.7", True),
        ("moorage.api.acme.show", "_INBOX.submitter.beta.x.7", False),
        ("moorage.api.acme.show", "_INBOX.worker.w1.x.7", False),
        ("moorage.api.acme.show", "_INBOX.scheduler.main.x.7", False),
        ("moorage.api.acme.show", "_INBOX.operator.ana.x.7", True),
        ("moorage.api.acme.submit", "_INBOX.operator.ana.x.7", False),
        ("moorage.api.acme.logs", "_INBOX.operator.ana.x.7", False),
        ("moorage.admin.ana.drain", "_INBOX.operator.ana.x.7", True),
        ("moorage.admin.ana.drain", "_INBOX.operator.ben.x.7", False),
        ("moorage.admin.ana.drain", "_INBOX.submitter.ana.x.7", False),
        ("moorage.admin._.drain", "_INBOX.abcDEF.7", True),
        ("moorage.admin.joiner.admit", "_INBOX.joiner.main.x.7", True),
        ("moorage.admin.joiner.admit", "_INBOX.operator.joiner.x.7", False),
        ("moorage.admin.ana.fleet", "_INBOX.joiner.main.x.7", False),
        ("moorage.admin.joiner.admit", "_INBOX.pool.spot.x.7", False),
        ("moorage.api.acme.ls", "_INBOX.pool.spot.x.7", False),
        ("moorage.api.acme.ls", "_INBOX.joiner.main.x.7", False),
        ("moorage.worker.w1.join", "_INBOX.worker.w1.x.7", True),
        ("moorage.worker.w1.join", "_INBOX.worker.w2.x.7", False),
        ("$SRV.PING", "_INBOX.operator.ana.x.7", True),
        ("$SRV.PING", "_INBOX.submitter.acme.x.7", False),
        ("moorage.api.acme.show", "moorage.ledger.record", False),
        ("moorage.api.acme.show", "moorage.worker.w1.wanted", False),
        ("moorage.api.acme.show", "moorage", False),
        ("moorage.api.acme.show", "moorage2.mine", True),
        ("moorage.api.acme.show", "$JS.API.STREAM.PURGE.MOORAGE_REQUEST", False),
        ("moorage.api.acme.show", "$O.bucket.C.x", False),
        ("moorage.api.acme.show", "$SYS.REQ.SERVER.PING", False),
    ],
)
def test_whom_an_answer_may_go_to(asked: str, reply: str, may: bool) -> None:
    assert may_answer("moorage", asked, reply) is may


@given(TENANT, TENANT, st.sampled_from(API_VERBS), st.sampled_from(ROLE_NAMES))
def test_a_named_inbox_gets_the_answers_to_its_own_questions_alone(mine: str, other: str, verb: str, role: str) -> None:
    asked = SUBJECTS.api(mine, verb)
    reply = f"{inbox(role, other)}.random.1"  # type: ignore[arg-type]
    # that of a caller is below its tenant's
    own = (role in ("submitter", "caller") and mine == other) or (role == "operator" and verb in OPERATOR_READS)
    assert may_answer("moorage", asked, reply) == own


@given(st.text(max_size=40))
def test_any_reply_subject_is_judged(reply: str) -> None:
    for asked in ("moorage.api.acme.show", "moorage.admin", "moorage", "", f"{INBOX}."):
        assert may_answer("moorage", asked, reply) in (True, False)


def test_operators_alone_hear_what_names_jobs_and_tenants_of_the_fleet() -> None:
    subjects = Subjects()
    for role in ROLE_NAMES:
        heard = subjects.fleet_detail in rights(role, "acme", subjects).subscribe
        assert heard is (role == "operator"), role


@pytest.mark.parametrize(
    ("inbox", "operation", "subject", "has"),
    [
        ("_INBOX.operator.Ana", "publish", "moorage.admin.ana.acts", True),  # the server tells subjects in lower case
        ("_INBOX.operator.ana", "publish", "moorage.admin.bob.acts", False),
        ("_INBOX.operator.ana", "publish", "moorage.api.acme.submit", False),
        ("_INBOX.operator.ana", "subscription", "moorage.events._fleet", True),
        ("_INBOX.submitter.acme", "publish", "moorage.call.acme.echo.more", True),
        ("_INBOX.submitter.acme", "publish", "moorage.call.acme", False),
        ("_INBOX.submitter.acme", "publish", "moorage.api.acme.exec", False),  # where it is refused, it is meant
        ("_INBOX.submitter.acme", "subscription", "_inbox.submitter.acme.x.*", False),  # another user's key
        ("_INBOX", "publish", "moorage.api.acme.ls", False),
    ],
)
def test_what_a_role_may_do_and_a_server_refuses_is_a_right_of_an_earlier_release(
    inbox: str, operation: str, subject: str, has: bool
) -> None:
    assert has_right(inbox, operation, subject) == has
