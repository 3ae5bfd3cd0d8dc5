"""The log of what a NATS server refuses a process, and of the end of each refusal that was logged."""

from __future__ import annotations

import logging

import pytest

from moorage.bus.connect_logged import REFUSED_AGAIN_S, REFUSED_MAX, Refusals
from moorage.bus.errors import PermissionRefused

REFUSED = "this NATS user may not subscribe to {}: give the user's role that permission"
AGAIN = "the NATS server takes the subscription to {} again"


def test_a_refusal_is_told_now_and_then_and_only_so_many(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    refusals = Refusals(logging.getLogger("moorage.test"), lambda: now)
    tell = refusals.on_error
    for _ in range(3):
        tell(PermissionRefused("publish", "moorage.load.n01"))
    assert [each.getMessage() for each in caplog.records] == [
        "this NATS user may not publish to moorage.load.n01: give the user's role that permission"
    ]
    for at in range(2 * REFUSED_MAX):
        tell(PermissionRefused("publish", f"chosen.{at}"))
    assert len(caplog.records) == REFUSED_MAX
    now = REFUSED_AGAIN_S
    tell(PermissionRefused("publish", "moorage.load.n01"))
    assert len(caplog.records) == REFUSED_MAX + 1


def test_the_end_of_a_refusal_is_logged_once_and_only_if_the_refusal_was(caplog: pytest.LogCaptureFixture) -> None:
    """A process that did not log its refusals logged their ends, and each of two subscriptions of a subject its own."""
    now = 0.0
    refusals = Refusals(logging.getLogger("moorage.test"), lambda: now)
    refusals.on_regained(["never.refused"])
    refusals.on_error(PermissionRefused("subscription", "jobs.a"))
    now = 2 * REFUSED_AGAIN_S  # it is still logged as refused, whatever else was refused meanwhile
    refusals.on_error(PermissionRefused("subscription", "jobs.b"))
    refusals.on_regained(["jobs.A", "jobs.A", "jobs.b"])
    refusals.on_error(PermissionRefused("subscription", "jobs.b"))
    assert [each.getMessage() for each in caplog.records] == [
        *(REFUSED.format(each) for each in ("jobs.a", "jobs.b")),
        *(AGAIN.format(each) for each in ("jobs.A", "jobs.b")),
        REFUSED.format("jobs.b"),
    ]


@pytest.mark.parametrize(
    ("operation", "subject", "fix"),
    [
        ("subscription", "_inbox.x7.*", "set inbox_prefix in the nats context"),
        ("subscription", "moorage.worker.n03.wanted", "give worker n03 its own key, or name the key's id with --id"),
        ("subscription", "gpu.eu.worker.n03.logs", "give worker n03 its own key"),
        ("publish", "$js.api.stream.info.moorage_ledger", "MOORAGE_LEDGER_URL_FILE"),
        ("publish", "$js.api.stream.info.moorage_request", "give the user's role that permission"),
        ("publish", "moorage.worker.n03.logs", "give the user's role that permission"),
        ("publish", "moorage.api.vision.ls", "give the user's role that permission"),
    ],
)
def test_a_refusal_names_what_is_wrong(operation: str, subject: str, fix: str) -> None:
    assert fix in PermissionRefused(operation, subject).problem.next
