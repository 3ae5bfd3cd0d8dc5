"""A refusal of NATS comes with advice for this user."""

from __future__ import annotations

import pytest

from moorage.cli.framework import options
from moorage.client.errors import NotPermitted
from moorage.client.tenant import TENANT_VARIABLE
from moorage.schemas.errors import Problem


@pytest.mark.parametrize(
    ("subject", "advice"),
    [
        (
            "$js.api.stream.msg.get.obj_moorage_files_vision",
            "moorage admin nats-config, without --shared and --no-results",
        ),
        ("moorage.api.speech.submit", "this key is tenant vision's: --tenant vision"),
    ],
)
def test_files_of_ones_own_tenant_want_a_right_and_not_another_tenant(
    monkeypatch: pytest.MonkeyPatch, subject: str, advice: str
) -> None:
    """`--with` was answered "this key is tenant vision's: --tenant vision" to that very tenant."""
    monkeypatch.setattr(options, "whose_key", lambda _: ("submitter", "vision"))
    monkeypatch.setenv(TENANT_VARIABLE, "vision" if subject.startswith("$") else "speech")
    error = NotPermitted(Problem("permission-refused", f"this NATS user may not publish to {subject}"))
    told = options._refused(options.Options(), error)
    assert advice in told.problem.next
